"""Atomics, system calls and indirect calls for Numba nogil code. Knows no layout and no waiting rule.

Addresses are plain int64. Loads acquire, stores release; exchanges are sequentially consistent and full fences.
x86-64 and Linux only, like the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

llvmlite.binding.initialize_native_asmparser()  # Numba does not, and inline assembly aborts the process without it

_declare: Any = cgutils.get_or_insert_function
_copy: Any = cgutils.raw_memcpy
_I64 = ir.IntType(64)
_WORD = _I64.as_pointer()

SYS_SCHED_YIELD = 24
SYS_NANOSLEEP = 35
SYS_PRCTL = 157
SYS_FUTEX = 202
SYS_CLOCK_GETTIME = 228
PR_SET_TIMERSLACK = 29
FUTEX_WAKE = 1
CLOCK_MONOTONIC = 1
_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")  # of a system call


def _word_intrinsic(definition: Callable[..., Any]) -> Callable[..., int]:
    """Numba's `intrinsic` with the type that the function has for Numba code: words in, a word (or nothing) out."""
    made: Callable[..., int] = intrinsic(definition)
    return made


@_word_intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _WORD), "acquire", 8)

    return types.int64(types.int64), emit


@_word_intrinsic
def store_release(typing_context: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], _WORD), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@_word_intrinsic
def exchange(typing_context: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("xchg", builder.inttoptr(arguments[0], _WORD), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@_word_intrinsic
def compare_exchange(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Stores `value` where `expected` is found; 1 if it was, else 0. A full fence."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD)
        found = builder.cmpxchg(place, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(found, 1), _I64)

    return types.int64(*[types.int64] * 3), emit


@_word_intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Between places that do not overlap."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in arguments[:2])
        _copy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@_word_intrinsic
def pause(typing_context: Any) -> Any:
    """Tells the core that this is a spin loop."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(_declare(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit


@_word_intrinsic
def ticks(typing_context: Any) -> Any:
    """The time stamp counter."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, [])
        return builder.call(_declare(builder.module, kind, "llvm.x86.rdtsc"), [])

    return types.int64(), emit


def _emit_system_call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    registers = "".join(f",{{{name}}}" for name in ("rax", *_ARGUMENTS)[: len(arguments)])
    kind = ir.FunctionType(_I64, [_I64] * len(arguments))
    return builder.asm(kind, "syscall", f"={{rax}}{registers},~{{rcx}},~{{r11}},~{{memory}}", list(arguments), True)


@_word_intrinsic
def system_call(typing_context: Any, number: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """A raw system call with up to four arguments; returns the kernel's result (negative: -errno)."""
    return types.int64(*[types.int64] * 5), _emit_system_call


@_word_intrinsic
def long_system_call(typing_context: Any, number: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """The same with six arguments."""
    return types.int64(*[types.int64] * 7), _emit_system_call


@_word_intrinsic
def call_kernel(typing_context: Any, kernel: Any, arguments_address: Any, rank: Any, ranks: Any, step: Any) -> Any:
    """Calls the function at address `kernel`: void(int64 arguments, int64 rank, int64 ranks, int64 step)."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 4)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


@njit(nogil=True)
def yield_core() -> None:
    system_call(SYS_SCHED_YIELD, 0, 0, 0, 0)


@njit(nogil=True)
def wake_sleeper(address: int) -> None:
    """Wakes who sleeps on the futex in the low half of the word."""
    system_call(SYS_FUTEX, address, FUTEX_WAKE, 1, 0)


@njit(nogil=True)
def monotonic_ns(clock: int) -> int:
    """Nanoseconds of CLOCK_MONOTONIC; `clock` is the address of 16 bytes private to the caller."""
    system_call(SYS_CLOCK_GETTIME, CLOCK_MONOTONIC, clock, 0, 0)
    return load_acquire(clock) * 1_000_000_000 + load_acquire(clock + 8)


@njit(nogil=True)
def nap_exactly() -> None:
    """From now on naps of this thread take no longer than asked for and some 20 us; the usual slack is 50 us more."""
    system_call(SYS_PRCTL, PR_SET_TIMERSLACK, 1, 0, 0)


@njit(nogil=True)
def nap(clock: int, nanoseconds: int) -> None:
    """Sleeps for less than a second; `clock` as for monotonic_ns."""
    store_release(clock, 0)
    store_release(clock + 8, nanoseconds)
    system_call(SYS_NANOSLEEP, clock, 0, 0, 0)
