"""Rows of the caches: kernel `cache_write_<cache type>`, and how the attention kernels read elements of such rows.

Owns where an element of a row lies. Rows are f32, f16, or blocks of q8_0 (`runtime.cache_types`), whose elements are
scale * value, exact in f32; what they meet (queries, weights) stays f32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.kernels.activations import quants_of_32
from bloomery.cpu_experts.kernels.elementwise import copy_run, narrow_run
from bloomery.cpu_experts.kernels.work import share_end, share_start, step_row
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    argument,
    compiled,
    emits,
    f32x8,
    i8x32,
    inlined,
    load_i32,
    vector,
)

CACHE_BLOCKS: Final = {"F32": (1, 4), "F16": (1, 2), "Q8_0": (32, 34)}  # elements and bytes
_INT: Final = types.int64


def row_bytes(name: str) -> Callable[[int], int]:
    """Numba function: bytes of so many elements, whole blocks."""
    elements, nbytes = CACHE_BLOCKS[name]

    @inlined
    def of(count: int) -> int:
        return count // elements * nbytes

    made: Callable[[int], int] = of
    return made


def _block(s: Emitter, row: Value, start: Value) -> tuple[Value, Value]:
    """Address of the q8_0 block of element `start` of a row, and the element's place in it."""
    block = s.b.lshr(start, start.type(5))
    return s.add(row, s.mul(block, block.type(34))), s.and_(start, start.type(31))


def load_cached(s: Emitter, name: str, row: Value, start: Value | int, count: int = 16) -> Value:
    """f32 vector of `count` (8 or 16) elements from `start`, a multiple of `count`, of the row at address `row`."""
    start = row.type(start) if isinstance(start, int) else start
    wide = vector("f32", count)
    if name != "Q8_0":
        address = s.add(row, s.mul(start, start.type(CACHE_BLOCKS[name][1])))
        return s.load(wide, address) if name == "F32" else s.widen(wide, s.load(vector("f16", count), address))
    block, place = _block(s, row, start)
    scale = s.b.fpext(s.load_scalar("f16", block), wide.ir.element)
    values = s.sext(vector("i32", count), s.load(vector("i8", count), s.add(block, place), 2))
    return s.fmul(s.to_float(wide, values), s.splat(wide, scale))


def load_cached_one(s: Emitter, name: str, row: Value, start: Value) -> Value:
    """f32 of element `start` of a row."""
    single = f32x8.ir.element
    if name != "Q8_0":
        address = s.add(row, s.mul(start, start.type(CACHE_BLOCKS[name][1])))
        value = s.load_scalar(name.lower(), address)
        return value if name == "F32" else s.b.fpext(value, single)
    block, place = _block(s, row, start)
    value = s.b.sitofp(s.load_scalar("i8", s.add(block, place), 2), single)
    return s.fmul(value, s.b.fpext(s.load_scalar("f16", block), single))


@emits(types.void, _INT, _INT)
def _store_block(s: Emitter, x: Value, out: Value) -> None:
    scale, quants = quants_of_32(s, x)
    joined = s.concat(s.concat(quants[0], quants[1]), s.concat(quants[2], quants[3]))
    s.store(s.b.fptrunc(scale, vector("f16", 1).ir.element), out)
    s.store(s.trunc(i8x32, joined), out, 2)


@compiled
def _quantise_run(x: int, out: int, count: int) -> None:
    """f32 to q8_0."""
    for block in range(count // 32):
        _store_block(x + 128 * block, out + 34 * block)


_RUNS: Final[dict[str, Any]] = {"f32": copy_run, "f16": narrow_run, "q8_0": _quantise_run}


def cache_write(cache_type: str) -> Callable[[int, int, int, int], None]:
    """Kernel `cache_write_<type>`: x, x row stride, heads, width, x head stride, first cache row (element `start` of
    row 0 of slot 0), slot stride, row stride, rows of a slot, head stride, ratio, rows (index of the step's row count).

    A position that completes a group of `ratio` is written, to row (position // ratio) mod (rows of a slot)."""
    run = _RUNS[cache_type]

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        kind, slots, positions = argument(args, 11), argument(step, 3), argument(step, 4)
        rows = argument(step, kind)
        heads, width, in_slot, ratio = argument(args, 2), argument(args, 3), argument(args, 8), argument(args, 10)
        for unit in range(share_start(rows * heads, rank, ranks), share_end(rows * heads, rank, ranks)):
            row = unit // heads
            head = unit - row * heads
            at = 4 * step_row(step, kind, row)
            slot, position = load_i32(slots + at), load_i32(positions + at)
            group = position // ratio
            if position - group * ratio == ratio - 1:
                place = group - group // in_slot * in_slot
                target = argument(args, 5) + slot * argument(args, 6) + place * argument(args, 7)
                run(
                    argument(args, 0) + row * argument(args, 1) + head * argument(args, 4),
                    target + head * argument(args, 9),
                    width,
                )

    return kernel
