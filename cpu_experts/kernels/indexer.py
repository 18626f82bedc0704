"""Kernels `index_scores_<cache type>` and `index_rows_<cache type>`: which group rows a row of the step attends to.

Owns the order of operations. score[i] is one fma chain over the heads in order of (weight * scale) * max(0, dot), from
0, the dot as in `float_dots`. The greatest scores are found by bisection over their bit patterns as ordered integers;
every tie goes to the lower row; a NaN or -infinity is never kept.

An op that chooses within the candidate blocks of another scores the rows of those blocks only; whatever lies in the
other places is overwritten before anything is chosen.

In steps of few rows the scores are shared out among the ranks by runs of group rows (`index_scores`), so that one row
keeps all of them busy; in steps of many rows each rank scores its rows itself. The sums are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.kernels.key_dots import key_dots
from bloomery.cpu_experts.kernels.layouts import SHARED_INDEX_ROWS
from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    argument,
    compiled,
    emits,
    f32x4,
    f32x8,
    float_argument,
    i32x8,
    load_f32,
    load_i32,
    store_i32,
)

_INT = types.int64
RUN: Final = 64  # group rows of one unit of work of index_scores (a multiple of 4)
LEAST: Final = -(2**31)
NEVER: Final = -(2**31) + 0x7FFFFF  # the ordered integer of -infinity
FIRST: Final = 2**31 - 1
# Arguments of both: heads, width, scale, q, row stride, head stride, weights, row stride, keys, slot stride, row
# stride, ratio, scratch, bytes of an area, out, row stride, kept rows, kept blocks or 0, row stride, their number,
# within or 0, row stride, their number, block, offset of the blocks' area in an area.


@emits(f32x4)
def _none(s: Emitter) -> Value:
    return s.zero(f32x4)


@emits(f32x4, f32x4, types.float32, types.float64, f32x4)
def _add_head(s: Emitter, dots: Value, weight: Value, scale: Value, total: Value) -> Value:
    factor = s.fmul(weight, s.b.fptrunc(scale, weight.type))
    return s.fma(s.splat(f32x4, factor), s.fmax(dots, s.zero(f32x4)), total)


@emits(types.void, f32x4, _INT)
def _store_4(s: Emitter, total: Value, scores: Value) -> None:
    s.store(total, scores)


def _score_run(name: str) -> Any:
    """Numba function that scores group rows first..last-1 of one row of the step; it may write three more."""
    dots = key_dots(name)

    @compiled
    def score(args: int, step: int, row: int, first: int, last: int, visible: int, scores: int) -> None:
        keys = argument(args, 8) + load_i32(argument(step, 3) + 4 * row) * argument(args, 9)
        stride, newest = argument(args, 10), visible - 1
        weights = argument(args, 6) + row * argument(args, 7)
        for index in range(first, last, 4):
            k0, k1 = keys + index * stride, keys + min(index + 1, newest) * stride
            k2, k3 = keys + min(index + 2, newest) * stride, keys + min(index + 3, newest) * stride
            total = _none()
            for head in range(argument(args, 0)):
                q = argument(args, 3) + row * argument(args, 4) + head * argument(args, 5)
                products = dots(k0, k1, k2, k3, q, argument(args, 1))
                total = _add_head(products, load_f32(weights + 4 * head), float_argument(args, 2), total)
            _store_4(total, scores + 4 * index)

    return score


@compiled
def _visible(args: int, step: int, row: int) -> int:
    count: int = (load_i32(argument(step, 4) + 4 * row) + 1) // argument(args, 11)
    return count


def _score_candidates(name: str) -> Any:
    """Numba function that scores the group rows of the blocks at places first..last-1 of a row's list of candidate
    blocks (neighbouring blocks as one run)."""
    score = _score_run(name)

    @compiled
    def candidates(args: int, step: int, row: int, first: int, last: int, visible: int, scores: int) -> None:
        within, block = argument(args, 20) + row * argument(args, 21), argument(args, 23)
        place = first
        while place < last and load_i32(within + 4 * place) >= 0:
            begin = load_i32(within + 4 * place)
            end = begin
            while place < last and load_i32(within + 4 * place) == end:
                end += 1
                place += 1
            score(args, step, row, begin * block, min(end * block, visible), visible, scores)

    return candidates


def index_scores(cache_type: str) -> Callable[[int, int, int, int], None]:
    """Kernel `index_scores_<type>`. Where a run of candidates ends, two ranks may write a score, with equal bits."""
    score, candidates = _score_run(cache_type.upper()), _score_candidates(cache_type.upper())

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, most, run = argument(step, 0), 0, RUN
        if rows <= SHARED_INDEX_ROWS:
            if argument(args, 20) != 0:
                most, run = argument(args, 22), max(1, RUN // argument(args, 23))
            else:
                for row in range(rows):
                    most = max(most, _visible(args, step, row))
            runs = (most + run - 1) // run
            for unit in range(share_start(rows * runs, rank, ranks), share_end(rows * runs, rank, ranks)):
                row = unit // runs
                first, visible = (unit - row * runs) * run, _visible(args, step, row)
                scores = argument(args, 12) + row * argument(args, 13)
                if argument(args, 20) != 0:
                    candidates(args, step, row, first, min(first + run, most), visible, scores)
                else:
                    score(args, step, row, first, min(first + run, visible), visible, scores)

    return kernel


@emits(types.void, _INT)
def _order_8(s: Emitter, at: Value) -> None:
    """Eight scores become integers of the same order, NaN the least; -0 equals 0."""
    scores = s.fadd(s.load(f32x8, at), s.zero(f32x8))
    bits = s.as_(i32x8, scores)
    sign = s.b.ashr(bits, s.splat_constant(i32x8, 31))
    ordered = s.xor(bits, s.and_(sign, s.splat_constant(i32x8, 0x7FFFFFFF)))
    number = s.b.fcmp_ordered("ord", scores, scores)
    s.store(s.b.select(number, ordered, s.splat_constant(i32x8, LEAST)), at)


@emits(i32x8)
def _no_counts(s: Emitter) -> Value:
    return s.zero(i32x8)


@emits(i32x8, _INT, types.int32, i32x8)
def _count_8(s: Emitter, at: Value, least: Value, counts: Value) -> Value:
    reached = s.b.icmp_signed(">=", s.load(i32x8, at), s.splat(i32x8, least))
    return s.sub(counts, s.b.sext(reached, i32x8.ir))


@emits(types.int32, i32x8)
def _sum(s: Emitter, counts: Value) -> Value:
    total = s.lane(counts, 0)
    for lane in range(1, 8):
        total = s.add(total, s.lane(counts, lane))
    return total


@compiled
def _reaching(values: int, count: int, least: int) -> int:
    """How many of the ordered integers, padded with LEAST to eights, are `least` or more."""
    if least > FIRST:
        return 0
    counts = _no_counts()
    for index in range(0, count, 8):
        counts = _count_8(values + 4 * index, least, counts)
    total: int = _sum(counts)
    return total


@compiled
def _pad(values: int, count: int) -> None:
    for index in range(count, (count + 7) // 8 * 8):
        store_i32(values + 4 * index, LEAST)


@compiled
def _choose(values: int, count: int, keep: int, out: int) -> None:
    """Numbers of the `keep` greatest ordered integers, ascending, ties to the lower; -1 where there are fewer."""
    low, high = NEVER + 1, FIRST + 1  # at least `keep` reach low, unless there are fewer at all; fewer reach high
    if _reaching(values, count, low) > keep:
        while high - low > 1:
            middle = (low + high) >> 1
            if _reaching(values, count, middle) >= keep:
                low = middle
            else:
                high = middle
        ties = keep - _reaching(values, count, low + 1)
    else:
        ties = keep
    taken = 0
    for index in range(count):
        value = load_i32(values + 4 * index)
        if value > low or (value == low and ties > 0):
            if value == low:
                ties -= 1
            store_i32(out + 4 * taken, index)
            taken += 1
            if taken == keep:
                break
    for place in range(taken, keep):
        store_i32(out + 4 * place, -1)


@compiled
def _greatest_of_blocks(values: int, count: int, block: int, blocks: int) -> int:
    """Writes the greatest ordered integer of each block at `blocks`, for the last one FIRST; returns their number."""
    number = (count + block - 1) // block
    for each in range(number):
        best = LEAST
        for index in range(each * block, min(each * block + block, count)):
            best = max(best, load_i32(values + 4 * index))
        store_i32(blocks + 4 * each, best)
    store_i32(blocks + 4 * (number - 1), FIRST)
    return number


@compiled
def _keep_blocks(values: int, count: int, within: int, kept: int, block: int) -> None:
    """Leaves LEAST in all rows that are in none of the `kept` ascending block numbers at `within`."""
    place = 0
    for each in range((count + block - 1) // block):
        while place < kept and 0 <= load_i32(within + 4 * place) < each:
            place += 1
        if place == kept or load_i32(within + 4 * place) != each:
            for index in range(each * block, min(each * block + block, count)):
                store_i32(values + 4 * index, LEAST)


def index_rows(cache_type: str) -> Callable[[int, int, int, int], None]:
    """Kernel `index_rows_<type>`."""
    score, candidates = _score_run(cache_type.upper()), _score_candidates(cache_type.upper())

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, keep, block = argument(step, 0), argument(args, 16), argument(args, 23)
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            visible = _visible(args, step, row)
            out = argument(args, 14) + row * argument(args, 15)
            area = row if rows <= SHARED_INDEX_ROWS else rank
            scores = argument(args, 12) + area * argument(args, 13)
            if rows > SHARED_INDEX_ROWS and visible > 0:
                if argument(args, 20) != 0:
                    candidates(args, step, row, 0, argument(args, 22), visible, scores)
                else:
                    score(args, step, row, 0, visible, visible, scores)
            for index in range(0, visible, 8):
                _order_8(scores + 4 * index)
            _pad(scores, visible)
            if argument(args, 17) != 0:
                kept, number = argument(args, 17) + row * argument(args, 18), 0
                blocks = scores + argument(args, 24)
                if visible > 0:
                    number = _greatest_of_blocks(scores, visible, block, blocks)
                _pad(blocks, number)
                _choose(blocks, number, argument(args, 19), kept)
            if argument(args, 20) != 0:
                within = argument(args, 20) + row * argument(args, 21)
                _keep_blocks(scores, visible, within, argument(args, 22), block)
            _choose(scores, visible, keep, out)

    return kernel
