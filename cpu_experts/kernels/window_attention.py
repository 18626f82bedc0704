"""Kernel `window_attention_<cache type>`: a row's heads over a window of positions and over chosen group rows.

Owns the order of operations. Keys come in the order of the window's positions, then of the group rows. A score is the
float dot of `float_dots` times the scale; weights e^(score - greatest), the sink's score among those; their sum is
taken in 8 lanes by index mod 8, the sink's added last; each weight is divided by it; each output element is one `fma`
chain over the keys in order. Queries and weights stay f32, whatever the cache.

All heads of a row meet the same keys, whose addresses a rank writes down once a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.kernels.float_dots import f32x64, load_float, load_floats, no_lanes
from bloomery.cpu_experts.kernels.hyper import exp_1
from bloomery.cpu_experts.kernels.key_dots import key_dots
from bloomery.cpu_experts.kernels.work import share_end, share_start, step_row
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    argument,
    compiled,
    emits,
    f16x8,
    f32x4,
    f32x8,
    float_argument,
    load_f32,
    load_i32,
    load_i64,
)

_INT = types.int64
# Arguments: heads, width, scale, q, row stride, head stride, out, row stride, head stride, window, slot stride, row
# stride, rows of a slot, span, groups or 0, slot stride, row stride, chosen or 0, row stride, greatest number chosen,
# ratio, sinks, scratch, bytes of a scratch area, keys that it has room for, rows (index of the step's row count), 1 if
# the wanted rows of a slot are a block that sees itself.
WINDOW_WORDS: Final = 27


@emits(types.void, _INT, _INT)
def _store_i64(s: Emitter, address: Value, value: Value) -> None:
    s.store(value, address)


@compiled
def _list_keys(args: int, row: int, step: int, keys: int) -> int:
    """Writes the addresses of a row's keys at `keys`; returns how many there are."""
    at = 4 * step_row(step, argument(args, 25), row)
    slot, position = load_i32(argument(step, 3) + at), load_i32(argument(step, 4) + at)
    window = argument(args, 9) + slot * argument(args, 10)
    in_slot = argument(args, 12)
    count = 0
    first, last = position - argument(args, 13) + 1, position
    if argument(args, 26) != 0:
        first = position
        for other in range(argument(step, 1)):
            at = 4 * step_row(step, 1, other)
            if load_i32(argument(step, 3) + at) == slot:
                first, last = min(first, load_i32(argument(step, 4) + at)), max(last, load_i32(argument(step, 4) + at))
        first -= argument(args, 13)
    for each in range(max(0, first), last + 1):
        _store_i64(keys + 8 * count, window + (each - each // in_slot * in_slot) * argument(args, 11))
        count += 1
    if argument(args, 14) != 0:
        groups = argument(args, 14) + slot * argument(args, 15)
        if argument(args, 17) == 0:
            for number in range((position + 1) // argument(args, 20)):
                _store_i64(keys + 8 * count, groups + number * argument(args, 16))
                count += 1
        else:
            chosen = argument(args, 17) + row * argument(args, 18)
            for place in range(argument(args, 19)):
                number = load_i32(chosen + 4 * place)
                if number < 0:
                    break
                _store_i64(keys + 8 * count, groups + number * argument(args, 16))
                count += 1
    return count


@emits(types.void, f32x4, types.float64, _INT)
def _store_scores(s: Emitter, dots: Value, scale: Value, scores: Value) -> None:
    s.store(s.fmul(dots, s.splat(f32x4, s.b.fptrunc(scale, f32x4.ir.element))), scores)


@emits(f32x8)
def _nothing(s: Emitter) -> Value:
    return s.zero(f32x8)


@emits(f32x8, types.float32)
def _all(s: Emitter, value: Value) -> Value:
    return s.splat(f32x8, value)


@emits(f32x8, _INT, _INT, f32x8)
def _greatest_8(s: Emitter, scores: Value, count: Value, greatest: Value) -> Value:
    return s.fmax(s.first_or(s.load(f32x8, scores), float("-inf"), count), greatest)


@emits(types.float32, f32x8)
def _greatest(s: Emitter, value: Value) -> Value:
    value = s.fmax(s.low(value), s.high(value))
    value = s.fmax(s.low(value), s.high(value))
    return s.fmax(s.lane(value, 0), s.lane(value, 1))


@emits(f32x8, _INT, _INT, types.float32, f32x8)
def _weights_8(s: Emitter, scores: Value, count: Value, greatest: Value, total: Value) -> Value:
    lowered = s.fsub(s.first_or(s.load(f32x8, scores), float("-inf"), count), s.splat(f32x8, greatest))
    weights = s.exp(lowered)
    s.store(weights, scores)
    return s.fadd(total, weights)


@emits(types.void, _INT, types.float32)
def _divide_8(s: Emitter, scores: Value, total: Value) -> None:
    s.store(s.fdiv(s.load(f32x8, scores), s.splat(f32x8, total)), scores)


@emits(types.float32, f32x8, types.float32)
def _total(s: Emitter, sums: Value, last: Value) -> Value:
    return s.fadd(s.float_sum(sums), last)


@emits(types.float32, types.float32, types.float32)
def _difference(s: Emitter, x: Value, y: Value) -> Value:
    return s.fsub(x, y)


def _value_step(name: str, columns: int) -> Any:
    """Numba function (address in a key, address of its weight, totals) -> totals for 64, 8 or 1 columns."""
    kind: Any = {64: f32x64, 8: f32x8, 1: types.float32}[columns]

    @emits(kind, _INT, _INT, kind)
    def step(s: Emitter, key: Value, weight: Value, total: Value) -> Value:
        factor = s.load_scalar("f32", weight)
        if columns == 1:
            return s.fma(load_float(s, name, key), factor, total)
        if columns == 64:
            parts = [load_floats(s, name, key, 16 * part * (4 if name == "F32" else 2)) for part in range(4)]
            values = s.concat(s.concat(parts[0], parts[1]), s.concat(parts[2], parts[3]))
        else:
            values = s.load(f32x8, key) if name == "F32" else s.widen(f32x8, s.load(f16x8, key))
        return s.fma(values, s.splat(kind, factor), total)

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


def window_attention(cache_type: str) -> Callable[[int, int, int, int], None]:
    """Kernel `window_attention_<type>` for caches of type f32 or f16."""
    name = cache_type.upper()
    element = 4 if name == "F32" else 2
    dots = key_dots(name)
    value_64, value_8, value_1 = _value_step(name, 64), _value_step(name, 8), _value_step(name, 1)

    @compiled
    def head_of_row(keys: int, seen: int, scores: int, q: int, out: int, width: int, scale: float, sink: int) -> None:
        last = seen - 1
        for index in range(0, seen, 4):
            k0 = load_i64(keys + 8 * index)
            k1 = load_i64(keys + 8 * min(index + 1, last))
            k2 = load_i64(keys + 8 * min(index + 2, last))
            k3 = load_i64(keys + 8 * min(index + 3, last))
            _store_scores(dots(k0, k1, k2, k3, q, width), scale, scores + 4 * index)
        best = _all(load_f32(sink))
        for index in range(0, seen, 8):
            best = _greatest_8(scores + 4 * index, seen - index, best)
        greatest = _greatest(best)
        sums = _nothing()
        for index in range(0, seen, 8):
            sums = _weights_8(scores + 4 * index, seen - index, greatest, sums)
        total = _total(sums, exp_1(_difference(load_f32(sink), greatest)))
        for index in range(0, seen, 8):
            _divide_8(scores + 4 * index, total)
        column = 0
        while column + 64 <= width:
            wide = no_lanes()
            for index in range(seen):
                wide = value_64(load_i64(keys + 8 * index) + column * element, scores + 4 * index, wide)
            _store_64(wide, out + 4 * column)
            column += 64
        while column + 8 <= width:
            eight = _nothing()
            for index in range(seen):
                eight = value_8(load_i64(keys + 8 * index) + column * element, scores + 4 * index, eight)
            _store_8(eight, out + 4 * column)
            column += 8
        while column < width:
            one = _no_total()
            for index in range(seen):
                one = value_1(load_i64(keys + 8 * index) + column * element, scores + 4 * index, one)
            _store_1(one, out + 4 * column)
            column += 1

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, heads = argument(step, argument(args, 25)), argument(args, 0)
        keys = argument(args, 22) + rank * argument(args, 23)
        scores = keys + 8 * argument(args, 24)
        listed, seen = -1, 0
        for unit in range(share_start(rows * heads, rank, ranks), share_end(rows * heads, rank, ranks)):
            row = unit // heads
            head = unit - row * heads
            if row != listed:
                seen = _list_keys(args, row, step, keys)
                listed = row
            head_of_row(
                keys, seen, scores,
                argument(args, 3) + row * argument(args, 4) + head * argument(args, 5),
                argument(args, 6) + row * argument(args, 7) + head * argument(args, 8),
                argument(args, 1), float_argument(args, 2), argument(args, 21) + 4 * head,
            )  # fmt: skip

    return kernel
