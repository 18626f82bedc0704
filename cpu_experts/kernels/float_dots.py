"""Dot products of four rows of float weights (F32, F16, BF16) with one row of activations, in the canonical order.

Owns that order. Activations are rounded to the weights' type first (as ggml does), products and sums are f32:

    lane[i] = fma over k = i, i+16, i+32, ... of w[k] * x[k], started at 0           (16 lanes)
    total   = ((t0+t1)+(t2+t3)) + ((t4+t5)+(t6+t7))   with t[i] = lane[i] + lane[i+8]

The lanes of four rows travel through a loop as one vector of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.isa import prefetch_distance
from bloomery.cpu_experts.simd import Emitter, Value, emits, f32x4, f32x8, i32x8, vector

LANES: Final = 16
ELEMENT_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
f32x16, f32x64 = vector("f32", 16), vector("f32", 64)
f16x16, i16x16, i32x16, i32x64 = vector("f16", 16), vector("i16", 16), vector("i32", 16), vector("i32", 64)
_INT = types.int64


def load_floats(s: Emitter, name: str, address: Value, offset: int = 0) -> Value:
    """f32x16 of 16 consecutive elements."""
    if name == "F32":
        return s.load(f32x16, address, offset)
    if name == "F16":
        return s.widen(f32x16, s.load(f16x16, address, offset))
    bits = s.zext(i32x16, s.load(i16x16, address, offset))
    return s.as_(f32x16, s.shl(bits, 16))


def load_float(s: Emitter, name: str, address: Value) -> Value:
    """f32 of one element."""
    single = f32x8.ir.element
    if name == "F32":
        return s.load_scalar("f32", address)
    if name == "F16":
        return s.b.fpext(s.load_scalar("f16", address), single)
    bits = s.b.zext(s.load_scalar("i16", address), i32x8.ir.element)
    return s.b.bitcast(s.b.shl(bits, bits.type(16)), single)


def finish(s: Emitter, lanes: Value) -> Value:
    """f32x4 totals of f32x64."""
    quarters = []
    for row in range(4):
        low = s.lanes(lanes, range(16 * row, 16 * row + 8))
        high = s.lanes(lanes, range(16 * row + 8, 16 * row + 16))
        quarters.append(s.fadd(low, high))
    return s.float_sum4(*quarters)


def _join(s: Emitter, parts: Sequence[Value]) -> Value:
    return s.concat(s.concat(parts[0], parts[1]), s.concat(parts[2], parts[3]))


def float_step(name: str) -> Any:
    """Numba function (w0, w1, w2, w3, x, lanes) -> lanes: the next 16 elements."""

    @emits(f32x64, _INT, _INT, _INT, _INT, _INT, f32x64)
    def step(s: Emitter, w0: Value, w1: Value, w2: Value, w3: Value, x: Value, lanes: Value) -> Value:
        for row in (w0, w1, w2, w3) if prefetch_distance() else ():
            s.prefetch(row, prefetch_distance())
        w = _join(s, [load_floats(s, name, row) for row in (w0, w1, w2, w3)])
        return s.fma(w, _join(s, [load_floats(s, name, x)] * 4), lanes)

    return step


def float_tail(name: str) -> Any:
    """Numba function (w0, w1, w2, w3, x, lane, lanes) -> lanes: one more element, into lane number `lane`."""

    @emits(f32x64, _INT, _INT, _INT, _INT, _INT, types.int32, f32x64)
    def step(s: Emitter, w0: Value, w1: Value, w2: Value, w3: Value, x: Value, lane: Value, lanes: Value) -> Value:
        w = _join(s, [s.splat(f32x16, load_float(s, name, row)) for row in (w0, w1, w2, w3)])
        xs = s.splat(f32x64, load_float(s, name, x))
        numbers = s.constant(i32x64, [index % LANES for index in range(64)])
        chosen = s.b.icmp_unsigned("==", numbers, s.splat(i32x64, lane))
        return s.b.select(chosen, s.fma(w, xs, lanes), lanes)

    return step


@emits(f32x4, f32x64)
def finish_lanes(s: Emitter, lanes: Value) -> Value:
    return finish(s, lanes)


@emits(f32x64)
def no_lanes(s: Emitter) -> Value:
    return s.zero(f32x64)
