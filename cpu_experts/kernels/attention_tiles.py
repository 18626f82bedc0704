"""Scores and weighted sums of several queries that share keys and values: pieces of `attention`, in its order.

Owns what is kept in registers. Keys and values are widened once for all queries of a tile; each query's own order of
operations is untouched, so that the results do not depend on how queries are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.isa import AVX512VNNI, at_least, prefetch_distance
from bloomery.cpu_experts.kernels.cache_rows import CACHE_BLOCKS, load_cached
from bloomery.cpu_experts.kernels.float_dots import LANES, f32x16
from bloomery.cpu_experts.kernels.layouts import ATTENTION_HEADS
from bloomery.cpu_experts.simd import Emitter, Value, emits, f32x4, vector

COLUMNS: Final = 64  # of the output that a tile computes
_INT: Final = types.int64


def heads_together() -> int:
    """Queries of a tile: four keys or 64 columns for each must fit the registers."""
    return ATTENTION_HEADS if at_least(AVX512VNNI) else 1


def as_cached(s: Emitter, name: str, value: Value) -> Value:
    """f32 values (a scalar or a vector) as they meet the cache: rounded to f16 if that is its type."""
    if name != "F16":
        return value
    half = vector("f16", value.type.count).ir if hasattr(value.type, "count") else vector("f16", 1).ir.element
    return s.b.fpext(s.b.fptrunc(value, half), value.type)


def round_queries(name: str) -> Any:
    """Numba function (q, out, blocks of 16): queries rounded to the type of the cache."""

    @emits(types.void, _INT, _INT, _INT)
    def copy(s: Emitter, q: Value, out: Value, blocks: Value) -> None:
        def step(index: Value, _: list[Value]) -> list[Value]:
            at = s.mul(index, index.type(4 * LANES))
            s.store(as_cached(s, name, s.load(f32x16, s.add(q, at))), s.add(out, at))
            return []

        s.loop(blocks, [], step)

    return copy


def _sums_16(s: Emitter, parts: Sequence[Value]) -> Value:
    """The totals of 16 vectors of lanes, each in the tree of `float_dots`: lane 4i + j is that of part 4i + j."""

    def pairs(first: Value, second: Value, lanes: Sequence[int], distance: int) -> Value:
        """Lanes (16 and up: the second's) plus those that lie `distance` behind them."""
        return s.fadd(s.shuffle(first, second, lanes), s.shuffle(first, second, [lane + distance for lane in lanes]))

    eight = [*range(8), *range(16, 24)]
    even = [quarter + lane for quarter in range(0, 16, 4) for lane in (0, 2, 16, 18)]
    fours = [quarter + lane for quarter in (0, 8, 16, 24) for lane in range(4)]
    sums = [parts[8 * half + 4 * (place % 2) + place // 2] for half in range(2) for place in range(8)]
    for lanes, distance in ((eight, 8), (even, 1), (even, 1), (fours, 4)):
        sums = [pairs(sums[place], sums[place + 1], lanes, distance) for place in range(0, len(sums), 2)]
    return sums[0]


def score_tile(name: str, heads: int) -> Any:
    """Numba function (k0, k1, k2, k3, queries, bytes between queries, blocks of 16, scores, bytes between score rows,
    following, bytes between keys, scale): four keys' scores for each query of a tile of `heads` (1 or 4).

    Meanwhile memory is asked for four keys from `following` on, a few lines at a time: a core stands still while it
    waits for more lines than it can count. A tile of a single query is too little work for that."""
    elements, nbytes = CACHE_BLOCKS[name]

    @emits(types.void, *[_INT] * 11, types.float64)
    def tile(s: Emitter, *words: Value) -> None:
        keys, (queries, distance, blocks, scores, row, following, stride, scale) = words[:4], words[4:]

        def step(index: Value, lanes: list[Value]) -> list[Value]:
            first = s.mul(index, index.type(LANES))
            if heads > 1 and prefetch_distance():
                line = s.add(following, s.b.udiv(s.mul(first, first.type(nbytes)), first.type(elements)))
                for key in range(4):
                    s.prefetch(s.add(line, s.mul(stride, stride.type(key))))
            wide = [load_cached(s, name, key, first) for key in keys]
            at = s.add(queries, s.mul(index, index.type(4 * LANES)))
            loaded = [s.load(f32x16, s.add(at, s.mul(distance, distance.type(head)))) for head in range(heads)]
            return [
                s.fma(key, query, lanes[4 * head + place])
                for head, query in enumerate(loaded)
                for place, key in enumerate(wide)
            ]

        lanes = s.loop(blocks, [s.zero(f32x16)] * (4 * heads), step)
        factor = s.b.fptrunc(scale, f32x4.ir.element)
        if heads == 1:
            halves = [s.fadd(s.low(part), s.high(part)) for part in lanes]
            s.store(s.fmul(s.float_sum4(*halves), s.splat(f32x4, factor)), scores)
            return
        totals = s.fmul(_sums_16(s, lanes), s.splat(f32x16, factor))
        for head in range(heads):
            s.store(s.lanes(totals, range(4 * head, 4 * head + 4)), s.add(scores, s.mul(row, row.type(head))))

    return tile


def value_tile(name: str, heads: int) -> Any:
    """Numba function (values, bytes between their rows, positions, weights, bytes between weight rows, out, bytes
    between heads of out, ahead): adds these positions' part of COLUMNS columns to the outputs of `heads` queries.
    Meanwhile memory is asked for what lies `ahead` bytes behind (not if the tile is a single query)."""
    parts = COLUMNS // LANES
    elements, nbytes = CACHE_BLOCKS[name]
    lines = range(0, COLUMNS // elements * nbytes, 64) if heads > 1 and prefetch_distance() else range(0)

    @emits(types.void, *[_INT] * 8)
    def tile(s: Emitter, *words: Value) -> None:
        values, stride, positions, weights, row, out, distance, ahead = words

        def step(index: Value, totals: list[Value]) -> list[Value]:
            at = s.add(values, s.mul(index, stride))
            for line in lines:
                s.prefetch(s.add(at, ahead), line)
            wide = [load_cached(s, name, at, LANES * part) for part in range(parts)]
            at = s.add(weights, s.mul(index, index.type(4)))
            shares = [s.load_scalar("f32", s.add(at, s.mul(row, row.type(head)))) for head in range(heads)]
            return [
                s.fma(part, s.splat(f32x16, share), totals[parts * head + place])
                for head, share in enumerate(shares)
                for place, part in enumerate(wide)
            ]

        rows = [s.add(out, s.mul(distance, distance.type(head))) for head in range(heads)]
        places = [(place, 4 * LANES * part) for place in rows for part in range(parts)]
        totals = s.loop(positions, [s.load(f32x16, *place) for place in places], step)
        for total, place in zip(totals, places, strict=True):
            s.store(total, *place)

    return tile


@emits(types.void, _INT, _INT)
def clear_columns(s: Emitter, out: Value, blocks: Value) -> None:
    """Zeros to blocks of LANES floats."""

    def step(index: Value, _: list[Value]) -> list[Value]:
        s.store(s.zero(f32x16), s.add(out, s.mul(index, index.type(4 * LANES))))
        return []

    s.loop(blocks, [], step)


@emits(types.void, _INT, _INT, _INT, _INT)
def fetch_rows(s: Emitter, rows: Value, stride: Value, count: Value, lines: Value) -> None:
    """Asks for the first `lines` 64-byte lines of some rows."""
    if not prefetch_distance():
        return

    def row(index: Value, _: list[Value]) -> list[Value]:
        at = s.add(rows, s.mul(index, stride))

        def line(place: Value, _: list[Value]) -> list[Value]:
            s.prefetch(s.add(at, s.mul(place, place.type(64))))
            return []

        s.loop(lines, [], line)
        return []

    s.loop(count, [], row)
