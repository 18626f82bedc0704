"""Kernels `router_<gating>` and `argmax`: choices, where every tie goes to the lower index.

Owns their order of operations. Softmax: e^(x - greatest), summed in 8 lanes by index mod 8, then the tree of
`float_sum`, each divided by the sum. Sigmoid: 1 / (1 + e^-x). The chosen are taken one after the other; their weights
are summed in that order. A NaN loses against every number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from numba import types

from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    argument,
    compiled,
    emits,
    f32x8,
    float_argument,
    i32x8,
    inlined,
    load_f32,
    load_i32,
    store_f32,
    store_i32,
)

_INT = types.int64
# Arguments: rows (index of the step's row count), experts, used, logits, logits row stride, ids, ids row stride, mix,
# mix row stride, bias or 0, normalise, scale, groups, groups used, scratch, bytes of a scratch area
ROUTER_WORDS: Final = 16


@emits(types.float32, types.float32, types.float32)
def _sum(s: Emitter, x: Value, y: Value) -> Value:
    return s.fadd(x, y)


@emits(types.float32, types.float32)
def _number(s: Emitter, x: Value) -> Value:
    """x, or -infinity for NaN."""
    return s.b.select(s.b.fcmp_unordered("uno", x, x), x.type(float("-inf")), x)


@emits(types.float32)
def _lowest(s: Emitter) -> Value:
    return f32x8.ir.element(float("-inf"))


@emits(types.float32)
def _none(s: Emitter) -> Value:
    return f32x8.ir.element(0.0)


@emits(types.float32, types.float32, types.float32, types.boolean, types.float64)
def _weight(s: Emitter, score: Value, total: Value, normalise: Value, scale: Value) -> Value:
    floor = score.type(2.0**-14)
    total = s.b.select(s.b.fcmp_ordered("<", total, floor), floor, total)
    divided = s.b.select(normalise, s.fdiv(score, total), score)
    return s.fmul(divided, s.b.fptrunc(scale, score.type))


@emits(f32x8)
def _nothing(s: Emitter) -> Value:
    return s.zero(f32x8)


@emits(f32x8, _INT, _INT, _INT, types.float32, f32x8)
def _exponentials_8(s: Emitter, x: Value, out: Value, count: Value, greatest: Value, total: Value) -> Value:
    values = s.exp(s.fsub(s.load_first(f32x8, x, count), s.splat(f32x8, greatest)))
    s.store_first(f32x8, values, out, count)
    return s.fadd(total, s.first_or(values, 0.0, count))


@emits(types.float32, f32x8)
def _total(s: Emitter, value: Value) -> Value:
    return s.float_sum(value)


@emits(types.void, _INT, _INT, types.float32)
def _divide_8(s: Emitter, x: Value, count: Value, divisor: Value) -> None:
    s.store_first(f32x8, s.fdiv(s.load_first(f32x8, x, count), s.splat(f32x8, divisor)), x, count)


@emits(types.void, _INT, _INT, _INT)
def _sigmoid_8(s: Emitter, x: Value, out: Value, count: Value) -> None:
    one = s.splat_constant(f32x8, 1.0)
    values = s.fdiv(one, s.fadd(one, s.exp(s.fneg(s.load_first(f32x8, x, count)))))
    s.store_first(f32x8, values, out, count)


@compiled
def _softmax(x: int, out: int, count: int) -> None:
    greatest = _lowest()
    for index in range(count):
        value = _number(load_f32(x + 4 * index))
        if value > greatest:
            greatest = value
    sums = _nothing()
    for start in range(0, count, 8):
        sums = _exponentials_8(x + 4 * start, out + 4 * start, count - start, greatest, sums)
    total = _total(sums)
    for start in range(0, count, 8):
        _divide_8(out + 4 * start, count - start, total)


@compiled
def _sigmoids(x: int, out: int, count: int) -> None:
    for start in range(0, count, 8):
        _sigmoid_8(x + 4 * start, out + 4 * start, count - start)


@inlined
def _best(values: int, taken: int, count: int) -> int:
    """Index of the greatest of the f32 `values` whose i32 in `taken` is 0, ties to the lower index."""
    best = -1
    greatest = _lowest()
    for index in range(count):
        if load_i32(taken + 4 * index) == 0:
            value = load_f32(values + 4 * index)
            if best < 0 or value > greatest:
                best, greatest = index, value
    return best


@compiled
def _keep_groups(selection: int, taken: int, experts: int, groups: int, groups_used: int, work: int) -> None:
    """Leaves -infinity in all but the `groups_used` groups with the greatest sum of their two best selections."""
    size = experts // groups
    chosen = work + 4 * groups
    for group in range(groups):
        first, second = _lowest(), _lowest()
        for index in range(group * size, group * size + size):
            value = load_f32(selection + 4 * index)
            if value > first:
                first, second = value, first
            elif value > second:
                second = value
        store_f32(work + 4 * group, _number(_sum(first, second)))
        store_i32(chosen + 4 * group, 0)
    for _ in range(groups_used):
        store_i32(chosen + 4 * _best(work, chosen, groups), 1)
    for index in range(experts):
        if load_i32(chosen + 4 * (index // size)) == 0:
            store_f32(selection + 4 * index, _lowest())


def router(gating: str) -> Callable[[int, int, int, int], None]:
    """Kernel `router_softmax` or `router_sigmoid`."""
    activate = _softmax if gating == "softmax" else _sigmoids

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows = argument(step, argument(args, 0))
        experts, used, bias = argument(args, 1), argument(args, 2), argument(args, 9)
        scores = argument(args, 14) + rank * argument(args, 15)
        selection = scores + 4 * experts
        taken = selection + 4 * experts
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            activate(argument(args, 3) + row * argument(args, 4), scores, experts)
            for index in range(experts):
                value = load_f32(scores + 4 * index)
                if bias != 0:
                    value = _sum(value, load_f32(bias + 4 * index))
                store_f32(selection + 4 * index, _number(value))
                store_i32(taken + 4 * index, 0)
            if argument(args, 12) > 1:
                _keep_groups(selection, taken, experts, argument(args, 12), argument(args, 13), taken + 4 * experts)
            ids = argument(args, 5) + row * argument(args, 6)
            mix = argument(args, 7) + row * argument(args, 8)
            total = _none()
            for place in range(used):
                best = _best(selection, taken, experts)
                store_i32(taken + 4 * best, 1)
                store_i32(ids + 4 * place, best)
                total = _sum(total, load_f32(scores + 4 * best))
            normalise, scale = argument(args, 10) != 0, float_argument(args, 11)
            for place in range(used):
                score = load_f32(scores + 4 * load_i32(ids + 4 * place))
                store_f32(mix + 4 * place, _weight(score, total, normalise, scale))

    return kernel


@emits(i32x8)
def _first_indices(s: Emitter) -> Value:
    return s.constant(i32x8, range(8))


@emits(f32x8)
def _all_lowest(s: Emitter) -> Value:
    return s.splat_constant(f32x8, float("-inf"))


@emits(types.int32, f32x8, i32x8)
def _winner(s: Emitter, best: Value, indices: Value) -> Value:
    """Index of the greatest lane; the lower index wins a tie."""
    index, value = s.lane(indices, 0), s.lane(best, 0)
    for candidate in range(1, 8):
        other, at = s.lane(best, candidate), s.lane(indices, candidate)
        better = s.b.fcmp_ordered(">", other, value)
        tied = s.and_(s.b.fcmp_ordered("==", other, value), s.b.icmp_signed("<", at, index))
        wins = s.or_(better, tied)
        index, value = s.b.select(wins, at, index), s.b.select(wins, other, value)
    return index


@emits(f32x8, _INT, _INT, f32x8)
def _better_values(s: Emitter, x: Value, count: Value, best: Value) -> Value:
    return s.fmax(_part(s, x, count), best)


@emits(i32x8, _INT, _INT, _INT, f32x8, i32x8)
def _better_indices(s: Emitter, x: Value, start: Value, count: Value, best: Value, indices: Value) -> Value:
    numbers = s.add(s.constant(i32x8, range(8)), s.splat(i32x8, s.b.trunc(start, i32x8.ir.element)))
    return s.b.select(s.b.fcmp_ordered(">", _part(s, x, count), best), numbers, indices)


def _part(s: Emitter, x: Value, count: Value) -> Value:
    return s.first_or(s.load_first(f32x8, x, count), float("-inf"), count)


def argmax() -> Callable[[int, int, int, int], None]:
    """Kernel `argmax`: rows (index of the step's row count), x, x row stride, out, out row stride, elements."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, elements = argument(step, argument(args, 0)), argument(args, 5)
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            x = argument(args, 1) + row * argument(args, 2)
            best, indices = _all_lowest(), _first_indices()
            for start in range(0, elements, 8):
                indices = _better_indices(x + 4 * start, start, elements - start, best, indices)
                best = _better_values(x + 4 * start, elements - start, best)
            store_i32(argument(args, 3) + row * argument(args, 4), _winner(best, indices))

    return kernel
