"""Kernels `pool_write` and `pool_rows`: groups of positions become one row.

Owns their order of operations, all f32: greatest score g of the group's positions; weights e^(score - g); the sums of
weight * value (fma) and of the weights by ascending position; their quotient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from numba import types

from bloomery.cpu_experts.kernels.elementwise import add_run, copy_run
from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import Emitter, Value, argument, emits, f32x8, load_i32, pair_of

_INT = types.int64
_PAIR = pair_of(f32x8)
POOL_CHUNK: Final = 64  # elements of a pooled row in one unit of work


def pool_write() -> Callable[[int, int, int, int], None]:
    """Kernel `pool_write`: values, row stride, scores, row stride, width, bias (float32, ratio times width) or 0,
    ratio, state, slot stride, row stride, rows of a slot."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, slots, positions = argument(step, 0), argument(step, 3), argument(step, 4)
        width, bias, ratio, in_slot = argument(args, 4), argument(args, 5), argument(args, 6), argument(args, 10)
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            position = load_i32(positions + 4 * row)
            place = position - position // in_slot * in_slot
            at = argument(args, 7) + load_i32(slots + 4 * row) * argument(args, 8) + place * argument(args, 9)
            copy_run(argument(args, 0) + row * argument(args, 1), at, width)
            scores = argument(args, 2) + row * argument(args, 3)
            if bias == 0:
                copy_run(scores, at + 4 * width, width)
            else:
                add_run(scores, bias + 4 * width * (position - position // ratio * ratio), at + 4 * width, width)

    return kernel


@emits(f32x8)
def _lowest(s: Emitter) -> Value:
    return s.splat_constant(f32x8, float("-inf"))


@emits(f32x8, _INT, _INT, f32x8)
def _greater_8(s: Emitter, scores: Value, count: Value, greatest: Value) -> Value:
    return s.fmax(s.load_first(f32x8, scores, count), greatest)


@emits(_PAIR)
def _no_sums(s: Emitter) -> tuple[Value, Value]:
    return s.zero(f32x8), s.zero(f32x8)


@emits(_PAIR, _INT, _INT, _INT, f32x8, f32x8, f32x8)
def _take_8(
    s: Emitter, values: Value, scores: Value, count: Value, greatest: Value, total: Value, weights: Value
) -> tuple[Value, Value]:
    weight = s.exp(s.fsub(s.load_first(f32x8, scores, count), greatest))
    return s.fma(weight, s.load_first(f32x8, values, count), total), s.fadd(weights, weight)


@emits(types.void, f32x8, f32x8, _INT, _INT)
def _quotient_8(s: Emitter, total: Value, weights: Value, out: Value, count: Value) -> None:
    s.store_first(f32x8, s.fdiv(total, weights), out, count)


@emits(types.void, _INT, _INT)
def _nothing_8(s: Emitter, out: Value, count: Value) -> None:
    s.store_first(f32x8, s.zero(f32x8), out, count)


def pool_rows() -> Callable[[int, int, int, int], None]:
    """Kernel `pool_rows`: out, row stride, elements, width of values, ratio, overlap, state, slot stride, row stride,
    rows of a slot. Rows that complete no group become zeros."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, slots, positions = argument(step, 0), argument(step, 3), argument(step, 4)
        elements, width, ratio = argument(args, 2), argument(args, 3), argument(args, 4)
        overlap, in_slot = argument(args, 5), argument(args, 9)
        chunks = (elements + POOL_CHUNK - 1) // POOL_CHUNK
        for unit in range(share_start(rows * chunks, rank, ranks), share_end(rows * chunks, rank, ranks)):
            row = unit // chunks
            begin = (unit - row * chunks) * POOL_CHUNK
            position = load_i32(positions + 4 * row)
            end = position + 1
            own = end - ratio  # the group's first position; positions before it belong to the group before
            whole = end - end // ratio * ratio == 0
            first = max(own - ratio, 0) if overlap != 0 else own
            state = argument(args, 6) + load_i32(slots + 4 * row) * argument(args, 7)
            out = argument(args, 0) + row * argument(args, 1)
            for start in range(begin, min(begin + POOL_CHUNK, elements), 8):
                count = elements - start
                if not whole:
                    _nothing_8(out + 4 * start, count)
                else:
                    greatest = _lowest()
                    for each in range(first, end):
                        at = state + (each - each // in_slot * in_slot) * argument(args, 8) + 4 * start
                        at += 4 * elements if overlap != 0 and each >= own else 0
                        greatest = _greater_8(at + 4 * width, count, greatest)
                    sums = _no_sums()
                    for each in range(first, end):
                        at = state + (each - each // in_slot * in_slot) * argument(args, 8) + 4 * start
                        at += 4 * elements if overlap != 0 and each >= own else 0
                        sums = _take_8(at, at + 4 * width, count, greatest, sums[0], sums[1])
                    _quotient_8(sums[0], sums[1], out + 4 * start, count)

    return kernel
