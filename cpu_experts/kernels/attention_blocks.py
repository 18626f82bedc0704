"""Attention of many rows of one slot, as `attention` defines it: keys and values are prepared once for all of them.

Owns how the work of a prompt block is cut. Keys are transposed, a lane is a key, so that sums of products need no
shuffles: the 16 lanes of the canonical dot become 16 chains, which meet in its tree. Scores of a query stay in scratch
until all are there; then softmax and the weighted sums run in the order of `attention`, position after position.

Queries are counted row by row, in a row head by head. Scratch of a rank: queries, packed keys, a block of values,
results, then scores, in this order (`layouts.attention_area`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.isa import AVX512VNNI, at_least
from bloomery.cpu_experts.kernels.attention_tiles import round_queries
from bloomery.cpu_experts.kernels.cache_rows import load_cached
from bloomery.cpu_experts.kernels.float_dots import LANES
from bloomery.cpu_experts.kernels.layouts import ATTENTION_COLUMNS, ATTENTION_KEYS, ATTENTION_VALUES
from bloomery.cpu_experts.simd import Emitter, Value, compiled, emits, f32x8, load_i32, vector

_INT: Final = types.int64
ROWS_FROM: Final = 12  # rows of a step from which their attention is taken together


def _width() -> int:
    """Lanes of a vector register."""
    return 16 if at_least(AVX512VNNI) else 8


def queries_together() -> int:
    """Queries whose sums fit the registers beside each other."""
    return 4 if at_least(AVX512VNNI) else 2


def _transposed(s: Emitter, rows: list[Value]) -> list[Value]:
    """The columns of a square of vectors."""
    count = len(rows)
    distance = 1
    while distance < count:
        made = list(rows)
        for index in range(count):
            if index & distance:
                continue
            a, b = rows[index], rows[index + distance]
            low = [lane if not lane & distance else count + lane - distance for lane in range(count)]
            high = [lane + distance if not lane & distance else count + lane for lane in range(count)]
            made[index], made[index + distance] = s.shuffle(a, b, low), s.shuffle(a, b, high)
        rows = made
        distance *= 2
    return rows


def _pack_keys(name: str) -> Any:
    """Numba function (keys, bytes between them, how many exist, blocks of 16, out): ATTENTION_KEYS keys as f32, element
    16 b + i of all of them at i * blocks + b. Keys past the existing ones repeat the last."""
    width = _width()

    @emits(types.void, *[_INT] * 5)
    def pack(s: Emitter, keys: Value, stride: Value, existing: Value, blocks: Value, out: Value) -> None:
        last = s.sub(existing, existing.type(1))
        addresses = []
        for key in range(ATTENTION_KEYS):
            number = existing.type(key)
            addresses.append(s.add(keys, s.mul(stride, s.b.select(s.b.icmp_signed("<", number, last), number, last))))

        def one(index: Value, carried: list[Value]) -> list[Value]:
            start = s.mul(index, index.type(LANES))
            for first in range(0, ATTENTION_KEYS, width):
                loads = [load_cached(s, name, at, start) for at in addresses[first : first + width]]
                for part in range(0, LANES, width):
                    square = [s.lanes(row, range(part, part + width)) for row in loads] if width < LANES else loads
                    for lane, column in enumerate(_transposed(s, square)):
                        at = s.add(s.mul(blocks, blocks.type(part + lane)), index)
                        s.store(column, s.add(out, s.mul(at, at.type(4 * ATTENTION_KEYS))), 4 * first)
            return []

        s.loop(blocks, [], one)

    return pack


def _score_block(queries: int) -> Any:
    """Numba function (queries, bytes between them, packed keys, blocks of 16, scores, bytes between rows of them,
    scale): scores of ATTENTION_KEYS keys for each of `queries` queries."""
    width = _width()
    together = 2  # vectors of keys
    kind = vector("f32", width)

    @emits(types.void, *[_INT] * 6, types.float64)
    def scores_of(s: Emitter, *words: Value) -> None:
        q, distance, keys, blocks, scores, row, scale = words
        factor = s.splat(kind, s.b.fptrunc(scale, kind.ir.element))
        starts = [s.add(q, s.mul(distance, distance.type(query))) for query in range(queries)]

        def chain(lane: int, first: int) -> list[Value]:
            """Lane number `lane` of the canonical dots, for `together` vectors of keys and each query."""

            def step(index: Value, acc: list[Value]) -> list[Value]:
                place = s.add(s.mul(blocks, blocks.type(lane)), index)
                line = s.add(keys, s.mul(place, place.type(4 * ATTENTION_KEYS)))
                at = s.add(s.mul(index, index.type(LANES)), index.type(lane))
                wide = [s.load(kind, line, 4 * (first + width * v)) for v in range(together)]
                shift = s.mul(at, at.type(4))
                values = [s.splat(kind, s.load_scalar("f32", s.add(start, shift))) for start in starts]
                return [
                    s.fma(key, value, acc[query * together + v])
                    for query, value in enumerate(values)
                    for v, key in enumerate(wide)
                ]

            return s.loop(blocks, [s.zero(kind)] * (queries * together), step)

        def tree(first: int, lane: int, count: int) -> list[Value]:
            """Sums of `count` consecutive pairs of chains."""
            if count == 1:
                sums = zip(chain(lane, first), chain(lane + 8, first))
            else:
                sums = zip(tree(first, lane, count // 2), tree(first, lane + count // 2, count // 2))
            return [s.fadd(x, y) for x, y in sums]

        for first in range(0, ATTENTION_KEYS, width * together):
            totals = tree(first, 0, 8)
            for query in range(queries):
                at = s.add(scores, s.mul(row, row.type(query)))
                for v in range(together):
                    s.store(s.fmul(totals[query * together + v], factor), at, 4 * (first + width * v))

    return scores_of


def _copy_values(name: str) -> Any:
    """Numba function (values, bytes between positions, positions, parts of ATTENTION_COLUMNS, out): values as f32, part
    after part ATTENTION_VALUES rows of ATTENTION_COLUMNS."""

    @emits(types.void, *[_INT] * 5)
    def copy(s: Emitter, values: Value, stride: Value, positions: Value, parts: Value, out: Value) -> None:
        def one(position: Value, carried: list[Value]) -> list[Value]:
            source = s.add(values, s.mul(position, stride))
            target = s.add(out, s.mul(position, position.type(4 * ATTENTION_COLUMNS)))

            def part(index: Value, _: list[Value]) -> list[Value]:
                column = s.mul(index, index.type(ATTENTION_COLUMNS))
                to = s.add(target, s.mul(index, index.type(4 * ATTENTION_COLUMNS * ATTENTION_VALUES)))
                for first in range(0, ATTENTION_COLUMNS, LANES):
                    s.store(load_cached(s, name, source, s.add(column, column.type(first))), to, 4 * first)
                return []

            s.loop(parts, [], part)
            return []

        s.loop(positions, [], one)

    return copy


def _value_block(queries: int) -> Any:
    """Numba function (values, positions, weights, bytes between rows of them, results, bytes between them): adds the
    positions to ATTENTION_COLUMNS columns of the results of `queries` queries."""
    width = _width()
    parts = 4
    kind = vector("f32", width)

    @emits(types.void, *[_INT] * 6)
    def add(s: Emitter, values: Value, positions: Value, weights: Value, row: Value, out: Value, far: Value) -> None:
        places = [s.add(out, s.mul(far, far.type(query))) for query in range(queries)]
        starts = [s.add(weights, s.mul(row, row.type(query))) for query in range(queries)]
        for first in range(0, ATTENTION_COLUMNS, width * parts):

            def step(index: Value, totals: list[Value], first: int = first) -> list[Value]:
                line = s.add(values, s.mul(index, index.type(4 * ATTENTION_COLUMNS)))
                wide = [s.load(kind, line, 4 * (first + width * part)) for part in range(parts)]
                shift = s.mul(index, index.type(4))
                shares = [s.splat(kind, s.load_scalar("f32", s.add(start, shift))) for start in starts]
                return [
                    s.fma(column, share, totals[parts * query + part])
                    for query, share in enumerate(shares)
                    for part, column in enumerate(wide)
                ]

            before = [s.load(kind, place, 4 * (first + width * part)) for place in places for part in range(parts)]
            for at, total in enumerate(s.loop(positions, before, step)):
                s.store(total, places[at // parts], 4 * (first + width * (at % parts)))

    return add


@emits(types.void, _INT, _INT)
def _clear(s: Emitter, address: Value, eights: Value) -> None:
    def one(index: Value, carried: list[Value]) -> list[Value]:
        s.store(s.zero(f32x8), s.add(address, s.mul(index, index.type(32))))
        return []

    s.loop(eights, [], one)


@emits(types.void, _INT, _INT, _INT)
def _copy(s: Emitter, source: Value, target: Value, eights: Value) -> None:
    def one(index: Value, carried: list[Value]) -> list[Value]:
        offset = s.mul(index, index.type(32))
        s.store(s.load(f32x8, s.add(source, offset)), s.add(target, offset))
        return []

    s.loop(eights, [], one)


def rows_of_one_slot(name: str, softmax: Callable[[int, int], None]) -> Callable[..., None]:
    """Function for `rows` rows (their positions, int32 each, at `positions`) of one slot and the `group` heads that
    share keys; key width a multiple of 16, value width of ATTENTION_COLUMNS; rows * group queries fit the scratch."""
    prepare, pack, copy_values = round_queries(name), _pack_keys(name), _copy_values(name)
    together = queries_together()
    scores_of, add_values, add_single = _score_block(together), _value_block(together), _value_block(1)
    softmax_of = compiled(lambda scores, seen: softmax(scores, seen))

    @compiled
    def rows_of_slot(
        q: int, q_stride: int, q_head: int, keys: int, key_stride: int, key_width: int, values: int, value_stride: int,
        value_width: int, positions: int, rows: int, group: int, scale: float, scratch: int, most_queries: int,
        score_row: int, out: int, out_stride: int, out_head: int,
    ) -> None:  # fmt: skip
        count, blocks = rows * group, key_width // LANES
        packed = scratch + most_queries * 4 * key_width
        prepared_values = packed + ATTENTION_KEYS * 4 * key_width
        results = prepared_values + ATTENTION_VALUES * 4 * value_width
        scores = results + most_queries * 4 * value_width
        padded = (count + together - 1) // together * together
        most = 0
        for row in range(rows):
            most = max(most, load_i32(positions + 4 * row) + 1)
            for head in range(group):
                place = scratch + (row * group + head) * 4 * key_width
                prepare(q + row * q_stride + head * q_head, place, blocks)
        _clear(scratch + count * 4 * key_width, (padded - count) * key_width // 8)
        _clear(results, padded * value_width // 8)
        for key in range(0, most, ATTENTION_KEYS):
            pack(keys + key * key_stride, key_stride, most - key, blocks, packed)
            for query in range(0, padded, together):
                place = scores + query * score_row + 4 * key
                scores_of(scratch + query * 4 * key_width, 4 * key_width, packed, blocks, place, score_row, scale)
        for query in range(count):
            softmax_of(scores + query * score_row, load_i32(positions + 4 * (query // group)) + 1)
        for first in range(0, most, ATTENTION_VALUES):
            here = min(ATTENTION_VALUES, most - first)
            parts = value_width // ATTENTION_COLUMNS
            copy_values(values + first * value_stride, value_stride, here, parts, prepared_values)
            for part in range(parts):
                columns = prepared_values + part * 4 * ATTENTION_COLUMNS * ATTENTION_VALUES
                for query in range(0, count, together):
                    stop = min(query + together, count)
                    shared = 0
                    if stop - query == together:
                        shared = here
                        for one in range(query, stop):
                            shared = min(shared, load_i32(positions + 4 * (one // group)) + 1 - first)
                        shared = max(shared, 0)
                    weights = scores + query * score_row + 4 * first
                    place = results + query * 4 * value_width + part * 4 * ATTENTION_COLUMNS
                    if shared > 0:
                        add_values(columns, shared, weights, score_row, place, 4 * value_width)
                    for one in range(query, stop):
                        left = min(here, load_i32(positions + 4 * (one // group)) + 1 - first) - shared
                        if left > 0:
                            add_single(
                                columns + shared * 4 * ATTENTION_COLUMNS, left,
                                weights + (one - query) * score_row + 4 * shared, score_row,
                                place + (one - query) * 4 * value_width, 4 * value_width,
                            )  # fmt: skip
        for query in range(count):
            row = query // group
            target = out + row * out_stride + (query - row * group) * out_head
            _copy(results + query * 4 * value_width, target, value_width // 8)

    made: Callable[..., None] = rows_of_slot
    return made
