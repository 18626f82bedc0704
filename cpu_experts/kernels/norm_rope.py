"""Kernels `rms_norm`, `unit_norm`, `rope_table` and `rope_<pairs>`.

Owns their order of operations. rms_norm: squares and their sum in float64 (8 lanes by index mod 8, then
((0+1)+(2+3)) + ((4+5)+(6+7))), mean rounded to f32, then f32: x * (1 / sqrt(mean + epsilon)) * weight; unit_norm
without the weight. Rope: the angle (position - behind) * frequency, its cosine and sine and their product with the
magnitude in float64, rounded to f32 once; the rotation in f32, each product rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.kernels.elementwise import copy_run
from bloomery.cpu_experts.kernels.work import share_end, share_start, step_row
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    argument,
    compiled,
    emits,
    f32x8,
    f64x8,
    float_argument,
    load_i32,
    store_f32,
)

_INT = types.int64
ROPE_TABLE_HEAD: Final = 6
# Arguments of rope_table: table, table row stride, pairs, magnitude, behind, rows (index of the step's row count); then
# the frequencies (float64).


@emits(f64x8)
def no_squares(s: Emitter) -> Value:
    return s.zero(f64x8)


@emits(f64x8, _INT, _INT, f64x8)
def squares_8(s: Emitter, x: Value, count: Value, total: Value) -> Value:
    wide = s.widen(f64x8, s.load_first(f32x8, x, count))
    return s.fma(wide, wide, total)


@emits(types.float32, f64x8, _INT, types.float64)
def _inverse_root(s: Emitter, squares: Value, count: Value, epsilon: Value) -> Value:
    single = f32x8.ir.element
    mean = s.b.fptrunc(s.fdiv(s.float_sum(squares), s.b.sitofp(count, squares.type.element)), single)
    shifted = s.fadd(mean, s.b.fptrunc(epsilon, single))
    return s.fdiv(single(1.0), s.call("llvm.sqrt.f32", single, [shifted]))


@emits(types.float64, f64x8, _INT)
def square_mean(s: Emitter, squares: Value, count: Value) -> Value:
    """The mean in float64."""
    return s.fdiv(s.float_sum(squares), s.b.sitofp(count, squares.type.element))


@compiled
def inverse_root_of(x: int, count: int, epsilon: float) -> Any:
    """1 / sqrt(mean of squares + epsilon) of `count` consecutive floats, f32."""
    squares = no_squares()
    for start in range(0, count, 8):
        squares = squares_8(x + 4 * start, count - start, squares)
    return _inverse_root(squares, count, epsilon)


@emits(types.void, _INT, _INT, types.float32, _INT)
def _unit_8(s: Emitter, x: Value, out: Value, scale: Value, count: Value) -> None:
    s.store_first(f32x8, s.fmul(s.load_first(f32x8, x, count), s.splat(f32x8, scale)), out, count)


@emits(types.void, _INT, _INT, _INT, types.float32, _INT)
def _scale_8(s: Emitter, x: Value, weight: Value, out: Value, scale: Value, count: Value) -> None:
    scaled = s.fmul(s.load_first(f32x8, x, count), s.splat(f32x8, scale))
    s.store_first(f32x8, s.fmul(scaled, s.load_first(f32x8, weight, count)), out, count)


@compiled
def _norm_run(x: int, weight: int, out: int, count: int, epsilon: float) -> None:
    scale = inverse_root_of(x, count, epsilon)
    for start in range(0, count, 8):
        _scale_8(x + 4 * start, weight + 4 * start, out + 4 * start, scale, count - start)


def rms_norm() -> Callable[[int, int, int, int], None]:
    """Kernel `rms_norm`: rows (index of the step's row count), heads, width, x, x row stride, x head stride, out, out
    row stride, out head stride, weight, epsilon."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        units = argument(step, argument(args, 0)) * argument(args, 1)
        heads, width = argument(args, 1), argument(args, 2)
        for unit in range(share_start(units, rank, ranks), share_end(units, rank, ranks)):
            row = unit // heads
            head = unit - row * heads
            _norm_run(
                argument(args, 3) + row * argument(args, 4) + head * argument(args, 5),
                argument(args, 9),
                argument(args, 6) + row * argument(args, 7) + head * argument(args, 8),
                width,
                float_argument(args, 10),
            )

    return kernel


def unit_norm() -> Callable[[int, int, int, int], None]:
    """Kernel `unit_norm`: arguments as `rms_norm`'s, but no weight."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        units = argument(step, argument(args, 0)) * argument(args, 1)
        heads, width = argument(args, 1), argument(args, 2)
        for unit in range(share_start(units, rank, ranks), share_end(units, rank, ranks)):
            row = unit // heads
            head = unit - row * heads
            x = argument(args, 3) + row * argument(args, 4) + head * argument(args, 5)
            out = argument(args, 6) + row * argument(args, 7) + head * argument(args, 8)
            scale = inverse_root_of(x, width, float_argument(args, 9))
            for start in range(0, width, 8):
                _unit_8(x + 4 * start, out + 4 * start, scale, width - start)

    return kernel


def rope_table() -> Callable[[int, int, int, int], None]:
    """Kernel `rope_table`: for each row the cosines, then the sines, of (position - behind) * frequency, times the
    magnitude."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        kind, positions = argument(args, 5), argument(step, 4)
        rows = argument(step, kind)
        pairs, magnitude, behind = argument(args, 2), float_argument(args, 3), argument(args, 4)
        for unit in range(share_start(rows * pairs, rank, ranks), share_end(rows * pairs, rank, ranks)):
            row = unit // pairs
            pair = unit - row * pairs
            position = load_i32(positions + 4 * step_row(step, kind, row)) - behind
            angle = float(position) * float_argument(args, ROPE_TABLE_HEAD + pair)
            at = argument(args, 0) + row * argument(args, 1) + 4 * pair
            store_f32(at, math.cos(angle) * magnitude)
            store_f32(at + 4 * pairs, math.sin(angle) * magnitude)

    return kernel


def _rotated(s: Emitter, first: Value, second: Value, cosine: Value, sine: Value) -> tuple[Value, Value]:
    return (
        s.fsub(s.fmul(first, cosine), s.fmul(second, sine)),
        s.fadd(s.fmul(first, sine), s.fmul(second, cosine)),
    )


@emits(types.void, _INT, _INT, _INT, _INT, _INT)
def _halves_8(s: Emitter, x: Value, out: Value, distance: Value, table: Value, count: Value) -> None:
    """Eight pairs (x[i], x[i + n]); `distance` = 4n bytes is also that from cosines to sines."""
    cosine, sine = (s.load_first(f32x8, at, count) for at in (table, s.add(table, distance)))
    first, second = (s.load_first(f32x8, at, count) for at in (x, s.add(x, distance)))
    first, second = _rotated(s, first, second, cosine, sine)
    s.store_first(f32x8, first, out, count)
    s.store_first(f32x8, second, s.add(out, distance), count)


@emits(types.void, _INT, _INT, _INT, _INT, _INT)
def _neighbours_8(s: Emitter, x: Value, out: Value, distance: Value, table: Value, count: Value) -> None:
    """Eight pairs (x[2i], x[2i + 1])."""
    cosine, sine = (s.load_first(f32x8, at, count) for at in (table, s.add(table, distance)))
    elements = s.add(count, count)
    rest = s.sub(elements, elements.type(8))
    low = s.load_first(f32x8, x, elements)
    high = s.load_first(f32x8, s.add(x, x.type(32)), rest)
    first, second = (s.shuffle(low, high, range(odd, 16, 2)) for odd in (0, 1))
    first, second = _rotated(s, first, second, cosine, sine)
    weave = [lane // 2 + 8 * (lane % 2) for lane in range(16)]
    s.store_first(f32x8, s.shuffle(first, second, weave[:8]), out, elements)
    s.store_first(f32x8, s.shuffle(first, second, weave[8:]), s.add(out, out.type(32)), rest)


def rope(pairs_kind: str) -> Callable[[int, int, int, int], None]:
    """Kernel `rope_halves` or `rope_neighbours`: table, table row stride, pairs, heads, width, x, x row stride, x head
    stride, out, out row stride, out head stride, rows (index of the step's row count)."""
    rotate = _halves_8 if pairs_kind == "halves" else _neighbours_8
    pair_bytes = 4 if pairs_kind == "halves" else 8

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, pairs, heads = argument(step, argument(args, 11)), argument(args, 2), argument(args, 3)
        rest = argument(args, 4) - 2 * pairs
        for unit in range(share_start(rows * heads, rank, ranks), share_end(rows * heads, rank, ranks)):
            row = unit // heads
            head = unit - row * heads
            table = argument(args, 0) + row * argument(args, 1)
            x = argument(args, 5) + row * argument(args, 6) + head * argument(args, 7)
            out = argument(args, 8) + row * argument(args, 9) + head * argument(args, 10)
            for pair in range(0, pairs, 8):
                at = pair * pair_bytes
                rotate(x + at, out + at, 4 * pairs, table + 4 * pair, pairs - pair)
            if x != out and rest > 0:
                copy_run(x + 8 * pairs, out + 8 * pairs, rest)

    return kernel
