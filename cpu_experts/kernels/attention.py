"""Kernel `attention_<cache type>`: causal attention of each row over its own slot's cache.

Owns its order of operations, which depends on nothing but the row's own position:

    score[p]  = scale * (q . key[p])     the float dot of `float_dots` (16 lanes by index mod 16, fixed tree), f32
    e[p]      = e^(score[p] - greatest score)
    total     = e summed in 8 lanes by p mod 8, then ((0+1)+(2+3)) + ((4+5)+(6+7))
    weight[p] = e[p] * (1 / total)                        both rounded, as ggml does
    out[j]    = fma over p in ascending order of weight[p] * value[p][j], from 0

With an f16 cache, q and the weights are rounded to f16 before they meet it, as ggml rounds them; with q8_0 they are
not (ggml rounds q to q8_0 in some of its paths). Heads that share keys
are taken together (`attention_tiles`), and head by head, so that the rows of a prompt block meet the same keys while
they are in cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import types

from bloomery.cpu_experts.kernels.attention_blocks import ROWS_FROM, rows_of_one_slot
from bloomery.cpu_experts.kernels.attention_tiles import (
    COLUMNS,
    as_cached,
    clear_columns,
    fetch_rows,
    heads_together,
    round_queries,
    score_tile,
    value_tile,
)
from bloomery.cpu_experts.kernels.cache_rows import load_cached, load_cached_one, row_bytes
from bloomery.cpu_experts.kernels.float_dots import (
    LANES,
    f32x16,
    f32x64,
    finish_lanes,
    no_lanes,
)
from bloomery.cpu_experts.kernels.layouts import ATTENTION_HEADS
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
    inlined,
    load_i32,
)

_INT = types.int64
# Positions between those that memory is asked for and those in work, also those of a block of values, which stays in
# the first-level cache until all queries have taken it: as many as these bytes hold, within bounds. Where memory is
# asked for in bursts (`fetch_rows`), no more than the least.
AHEAD_BYTES: Final = 1 << 14
AHEAD_LEAST: Final = 16
AHEAD_MOST: Final = 64
# Arguments: heads, heads of a group, key width, value width, scale, q, q row stride, q head stride, out, out row
# stride, out head stride, keys, their slot stride, row stride, head stride, values, their slot stride, row stride, head
# stride, scratch, bytes of a row of scores, bytes of a rank's area (`layouts`), queries that are taken together
ATTENTION_WORDS: Final = 23


def _key_step(name: str) -> Any:
    @emits(f32x64, _INT, _INT, _INT, _INT, _INT, _INT, f32x64)
    def step(s: Emitter, k0: Value, k1: Value, k2: Value, k3: Value, at: Value, q: Value, lanes: Value) -> Value:
        keys = [load_cached(s, name, key, at) for key in (k0, k1, k2, k3)]
        wide = s.concat(s.concat(keys[0], keys[1]), s.concat(keys[2], keys[3]))
        query = as_cached(s, name, s.load(f32x16, q))
        twice = s.concat(query, query)
        return s.fma(wide, s.concat(twice, twice), lanes)

    return step


def _key_tail(name: str) -> Any:
    @emits(f32x64, *[_INT] * 7, f32x64)
    def step(s: Emitter, *words: Value) -> Value:
        keys, (element, q, lane, lanes) = words[:4], words[4:]
        query = as_cached(s, name, s.load_scalar("f32", q))
        for row, key in enumerate(keys):
            at = s.add(lane, lane.type(16 * row))
            total = s.fma(load_cached_one(s, name, key, element), query, s.b.extract_element(lanes, at))
            lanes = s.b.insert_element(lanes, total, at)
        return lanes

    return step


@emits(types.void, f32x4, types.float64, _INT)
def _store_scores(s: Emitter, dots: Value, scale: Value, scores: Value) -> None:
    factor = s.b.fptrunc(scale, f32x4.ir.element)
    s.store(s.fmul(dots, s.splat(f32x4, factor)), scores)


@emits(f32x8)
def _nothing(s: Emitter) -> Value:
    return s.zero(f32x8)


@emits(f32x8)
def _lowest(s: Emitter) -> Value:
    return s.splat_constant(f32x8, float("-inf"))


def _or_lowest(s: Emitter, scores: Value, count: Value) -> Value:
    return s.first_or(s.load(f32x8, scores), float("-inf"), count)


@emits(f32x8, _INT, _INT, f32x8)
def _greatest_8(s: Emitter, scores: Value, count: Value, greatest: Value) -> Value:
    return s.fmax(_or_lowest(s, scores, count), greatest)


@emits(f32x8, _INT, f32x8)
def _greatest_16(s: Emitter, scores: Value, greatest: Value) -> Value:
    values = s.load(f32x16, scores)
    return s.fmax(s.high(values), s.fmax(s.low(values), greatest))


@emits(types.float32, f32x8)
def _greatest(s: Emitter, value: Value) -> Value:
    value = s.fmax(s.low(value), s.high(value))
    value = s.fmax(s.low(value), s.high(value))
    return s.fmax(s.lane(value, 0), s.lane(value, 1))


@emits(f32x8, _INT, _INT, types.float32, f32x8)
def _weights_8(s: Emitter, scores: Value, count: Value, greatest: Value, total: Value) -> Value:
    weights = s.exp(s.fsub(_or_lowest(s, scores, count), s.splat(f32x8, greatest)), at_most_zero=True)
    s.store(weights, scores)
    return s.fadd(total, weights)


@emits(f32x8, _INT, types.float32, f32x8)
def _weights_16(s: Emitter, scores: Value, greatest: Value, total: Value) -> Value:
    """The same for 16 positions: the lanes of the total take the lower eight first."""
    weights = s.exp(s.fsub(s.load(f32x16, scores), s.splat(f32x16, greatest)), at_most_zero=True)
    s.store(weights, scores)
    return s.fadd(s.fadd(total, s.low(weights)), s.high(weights))


def _scale_16(name: str) -> Any:
    @emits(types.void, _INT, types.float32)
    def scale(s: Emitter, scores: Value, factor: Value) -> None:
        s.store(as_cached(s, name, s.fmul(s.load(f32x16, scores), s.splat(f32x16, factor))), scores)

    return scale


@emits(types.float32, f32x8)
def _sum(s: Emitter, value: Value) -> Value:
    return s.float_sum(value)


def _value_step(name: str, columns: int) -> Any:
    """Numba function (value row, first column, address of its weight, totals) -> totals for 64 or 8 columns."""
    kind = f32x64 if columns == 64 else f32x8

    @emits(kind, _INT, _INT, _INT, kind)
    def step(s: Emitter, row: Value, column: Value, weight: Value, total: Value) -> Value:
        if columns == 64:
            parts = [load_cached(s, name, row, s.add(column, column.type(16 * part))) for part in range(4)]
            values = s.concat(s.concat(parts[0], parts[1]), s.concat(parts[2], parts[3]))
        else:
            values = load_cached(s, name, row, column, 8)
        return s.fma(values, s.splat(kind, s.load_scalar("f32", weight)), total)

    return step


def _value_single(name: str) -> Any:
    @emits(types.float32, _INT, _INT, _INT, types.float32)
    def step(s: Emitter, row: Value, column: Value, weight: Value, total: Value) -> Value:
        return s.fma(load_cached_one(s, name, row, column), s.load_scalar("f32", weight), total)

    return step


def _store(kind: Any) -> Any:
    @emits(types.void, kind, _INT)
    def store(s: Emitter, total: Value, out: Value) -> None:
        s.store(total, out)

    return store


_store_64, _store_8, _store_1 = _store(f32x64), _store(f32x8), _store(types.float32)


@emits(types.float32)
def _no_total(s: Emitter) -> Value:
    return f32x8.ir.element(0.0)


def _softmax(name: str) -> Callable[[int, int], None]:
    """Numba function (scores, positions seen): scores to weights, in place; writes up to 15 floats more."""
    scale_16 = _scale_16(name)

    @inlined
    def softmax(scores: int, seen: int) -> None:
        best, whole = _lowest(), seen // 16 * 16
        for position in range(0, whole, 16):
            best = _greatest_16(scores + 4 * position, best)
        for position in range(whole, seen, 8):
            best = _greatest_8(scores + 4 * position, seen - position, best)
        greatest = _greatest(best)
        sums = _nothing()
        for position in range(0, whole, 16):
            sums = _weights_16(scores + 4 * position, greatest, sums)
        for position in range(whole, seen, 8):
            sums = _weights_8(scores + 4 * position, seen - position, greatest, sums)
        factor = np.float32(1.0) / _sum(sums)
        for position in range(0, seen, 16):
            scale_16(scores + 4 * position, factor)

    made: Callable[[int, int], None] = softmax
    return made


def _one_head(name: str) -> Callable[..., None]:
    """Numba function for one query and widths of any size."""
    key_step, key_tail, softmax = _key_step(name), _key_tail(name), _softmax(name)
    value_64, value_8, value_1 = _value_step(name, 64), _value_step(name, 8), _value_single(name)

    @compiled
    def head(
        q: int, keys: int, key_stride: int, key_width: int, values: int, value_stride: int, value_width: int, seen: int,
        scale: float, scores: int, out: int,
    ) -> None:  # fmt: skip
        whole = key_width // LANES * LANES
        for position in range(0, seen, 4):
            last = seen - 1
            k0 = keys + position * key_stride
            k1 = keys + min(position + 1, last) * key_stride
            k2 = keys + min(position + 2, last) * key_stride
            k3 = keys + min(position + 3, last) * key_stride
            lanes = no_lanes()
            for start in range(0, whole, LANES):
                lanes = key_step(k0, k1, k2, k3, start, q + 4 * start, lanes)
            for start in range(whole, key_width):
                lanes = key_tail(k0, k1, k2, k3, start, q + 4 * start, start - whole, lanes)
            _store_scores(finish_lanes(lanes), scale, scores + 4 * position)
        softmax(scores, seen)
        column = 0
        while column + 64 <= value_width:
            wide = no_lanes()
            for position in range(seen):
                wide = value_64(values + position * value_stride, column, scores + 4 * position, wide)
            _store_64(wide, out + 4 * column)
            column += 64
        while column + 8 <= value_width:
            eight = _nothing()
            for position in range(seen):
                eight = value_8(values + position * value_stride, column, scores + 4 * position, eight)
            _store_8(eight, out + 4 * column)
            column += 8
        while column < value_width:
            one = _no_total()
            for position in range(seen):
                one = value_1(values + position * value_stride, column, scores + 4 * position, one)
            _store_1(one, out + 4 * column)
            column += 1

    made: Callable[..., None] = head
    return made


def _queries_of_head(name: str, together: int) -> Callable[..., None]:
    """Numba function for some queries of a row that share keys: whole tiles of `together`, widths that are multiples of
    LANES and of COLUMNS. Keys, then values, are gone through once for all of them."""
    bytes_of = row_bytes(name)
    most = AHEAD_MOST if together > 1 else AHEAD_LEAST
    rounded, softmax = round_queries(name), _softmax(name)
    scores_of, outputs_of = score_tile(name, together), value_tile(name, together)

    @compiled
    def queries_of_head(
        q: int, q_head: int, keys: int, key_stride: int, key_width: int, values: int, value_stride: int,
        value_width: int, seen: int, scale: float, count: int, scratch: int, room: int, score_row: int, out: int,
        out_head: int,
    ) -> None:  # fmt: skip
        blocks = key_width // LANES
        scores = scratch + 4 * room * key_width
        for query in range(count):
            rounded(q + query * q_head, scratch + 4 * query * key_width, blocks)
            clear_columns(out + query * out_head, value_width // LANES)
        key_lines, value_lines = (bytes_of(key_width) + 63) // 64, (bytes_of(value_width) + 63) // 64
        distance = min(max(AHEAD_BYTES // bytes_of(key_width), AHEAD_LEAST), most)
        for position in range(0, seen, 4):
            ahead = keys + (position + distance) * key_stride
            if together == 1:
                fetch_rows(ahead, key_stride, min(4, seen - position - distance), key_lines)
            final = seen - 1
            k0 = keys + position * key_stride
            k1 = keys + min(position + 1, final) * key_stride
            k2 = keys + min(position + 2, final) * key_stride
            k3 = keys + min(position + 3, final) * key_stride
            for query in range(0, count, together):
                scores_of(
                    k0, k1, k2, k3, scratch + 4 * query * key_width, 4 * key_width, blocks,
                    scores + query * score_row + 4 * position, score_row, ahead, key_stride, scale,
                )  # fmt: skip
        for query in range(count):
            softmax(scores + query * score_row, seen)
        block = min(max(AHEAD_BYTES // bytes_of(value_width), AHEAD_LEAST), most)
        ahead = block * value_stride
        for position in range(0, seen, block):
            taken = min(block, seen - position)
            start = values + position * value_stride
            if together == 1:
                fetch_rows(start + ahead, value_stride, min(block, seen - position - block), value_lines)
            for query in range(0, count, together):
                weights = scores + query * score_row + 4 * position
                for column in range(0, value_width, COLUMNS):
                    outputs_of(
                        start + bytes_of(column), value_stride, taken, weights, score_row,
                        out + query * out_head + 4 * column, out_head, ahead,
                    )  # fmt: skip

    made: Callable[..., None] = queries_of_head
    return made


def _many_rows(name: str) -> Callable[..., None]:
    """Numba function for the rows of a prompt block: a unit is some consecutive rows and the heads that share keys."""
    rows_of_slot = rows_of_one_slot(name, _softmax(name))

    @compiled
    def many_rows(args: int, rank: int, ranks: int, rows: int, slots: int, positions: int, scale: float) -> None:
        heads, group, key_width, value_width = (
            argument(args, 0), argument(args, 1), argument(args, 2), argument(args, 3),
        )  # fmt: skip
        queries = argument(args, 22)
        together = queries // group
        blocks = (rows + together - 1) // together
        units = heads // group * blocks
        for unit in range(share_start(units, rank, ranks), share_end(units, rank, ranks)):
            kv_head = unit // blocks
            row = (unit - kv_head * blocks) * together
            stop = min(row + together, rows)
            while row < stop:  # rows of one slot after the other
                slot, last = load_i32(slots + 4 * row), row + 1
                while last < stop and load_i32(slots + 4 * last) == slot:
                    last += 1
                rows_of_slot(
                    argument(args, 5) + row * argument(args, 6) + kv_head * group * argument(args, 7),
                    argument(args, 6), argument(args, 7),
                    argument(args, 11) + slot * argument(args, 12) + kv_head * argument(args, 14), argument(args, 13),
                    key_width,
                    argument(args, 15) + slot * argument(args, 16) + kv_head * argument(args, 18), argument(args, 17),
                    value_width, positions + 4 * row, last - row, group, scale,
                    argument(args, 19) + rank * argument(args, 21), queries + ATTENTION_HEADS, argument(args, 20),
                    argument(args, 8) + row * argument(args, 9) + kv_head * group * argument(args, 10),
                    argument(args, 9), argument(args, 10),
                )  # fmt: skip
                row = last

    made: Callable[..., None] = many_rows
    return made


def attention(cache_type: str) -> Callable[[int, int, int, int], None]:
    """Kernel `attention_<type>` for caches of type f32, f16 or q8_0."""
    name = cache_type.upper()
    together = heads_together()
    one_head = _one_head(name)
    singly = _queries_of_head(name, 1)
    in_tiles = _queries_of_head(name, together) if together > 1 else singly
    many_rows = _many_rows(name)

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, slots, positions = argument(step, 0), argument(step, 3), argument(step, 4)
        heads, group = argument(args, 0), argument(args, 1)
        key_width, value_width, scale = argument(args, 2), argument(args, 3), float_argument(args, 4)
        q_head, out_head = argument(args, 7), argument(args, 10)
        key_stride, value_stride = argument(args, 13), argument(args, 17)
        scores, score_row = argument(args, 19) + rank * argument(args, 21), argument(args, 20)
        if rows >= ROWS_FROM and key_width % LANES == 0 and value_width % COLUMNS == 0:
            many_rows(args, rank, ranks, rows, slots, positions, scale)
            return
        whole = key_width % LANES == 0 and value_width % COLUMNS == 0
        chunk = together if whole and group % together == 0 else 1
        most = (rows * heads // chunk + ranks - 1) // ranks * chunk  # heads of the rank with most
        if most >= 2 * ((rows * heads + ranks - 1) // ranks):
            chunk = 1  # a head by itself takes twice the time that it takes in a tile
        tiles, shared = heads // chunk, group // chunk
        unit, end = share_start(rows * tiles, rank, ranks), share_end(rows * tiles, rank, ranks)
        while unit < end:
            row = unit // tiles
            first = unit - row * tiles
            kv_head = first // shared
            count = min((kv_head + 1) * shared - first, end - unit)
            if whole:
                count = min(count, argument(args, 22) // chunk)
            slot = load_i32(slots + 4 * row)
            seen = load_i32(positions + 4 * row) + 1
            q = argument(args, 5) + row * argument(args, 6) + first * chunk * q_head
            out = argument(args, 8) + row * argument(args, 9) + first * chunk * out_head
            keys = argument(args, 11) + slot * argument(args, 12) + kv_head * argument(args, 14)
            values = argument(args, 15) + slot * argument(args, 16) + kv_head * argument(args, 18)
            if whole and chunk > 1:
                in_tiles(
                    q, q_head, keys, key_stride, key_width, values, value_stride, value_width, seen, scale,
                    count * chunk, scores, argument(args, 22), score_row, out, out_head,
                )  # fmt: skip
            elif whole:
                singly(
                    q, q_head, keys, key_stride, key_width, values, value_stride, value_width, seen, scale,
                    count, scores, argument(args, 22), score_row, out, out_head,
                )  # fmt: skip
            else:
                for head in range(count):
                    one_head(
                        q + head * q_head, keys, key_stride, key_width, values, value_stride, value_width, seen, scale,
                        scores, out + head * out_head,
                    )  # fmt: skip
            unit += count

    return kernel
