"""Kernel `router_softplus`: experts by sqrt(ln(1 + e^x)), or by the row's token.

Owns the order of operations. Scores are float64 (exponential and logarithm from the C library), rounded to f32 once;
the choice goes by score + bias in f32, ties to the higher id, a NaN loses against every number. The chosen scores are
summed in order; a weight is score / (sum + 1e-20) * scale, each operation rounded to f32.
"""

from __future__ import annotations

import math
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
    inlined,
    load_f32,
    load_i32,
    store_f32,
    store_i32,
)

LEAST_SUM: Final = 1e-20
STRAIGHT: Final = 20.0  # above it the logarithm is x itself
# Arguments: rows (index of the step's row count), experts, used, logits, row stride, ids, row stride, mix, row stride,
# bias or 0, table (int32, used a token) or 0, normalise, scale, 1 if rows are the wanted ones, scratch (8 bytes an
# expert a rank), bytes of a scratch area.
SOFTPLUS_WORDS: Final = 16


@emits(types.float32, types.float32, types.float32)
def _sum(s: Emitter, x: Value, y: Value) -> Value:
    return s.fadd(x, y)


@emits(types.float32)
def _nothing(s: Emitter) -> Value:
    return f32x8.ir.element(0.0)


@emits(types.float32, types.float32, types.float32, types.boolean, types.float64)
def _weight(s: Emitter, score: Value, total: Value, normalise: Value, scale: Value) -> Value:
    divided = s.fdiv(score, s.fadd(total, s.b.fptrunc(scale.type(LEAST_SUM), score.type)))
    return s.fmul(s.b.select(normalise, divided, score), s.b.fptrunc(scale, score.type))


@compiled
def _score(logit: float) -> float:
    return math.sqrt(logit if logit > STRAIGHT else math.log1p(math.exp(logit)))


@inlined
def _best(selection: int, experts: int) -> int:
    """The greatest, ties to the higher id; those that were taken are NaN."""
    best, greatest = -1, -math.inf
    for index in range(experts):
        value = load_f32(selection + 4 * index)
        if value >= greatest:
            best, greatest = index, value
    return best


def router_softplus() -> Callable[[int, int, int, int], None]:
    """Kernel `router_softplus`."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, experts, used = argument(step, argument(args, 0)), argument(args, 1), argument(args, 2)
        bias, table = argument(args, 9), argument(args, 10)
        scores = argument(args, 14) + rank * argument(args, 15)
        selection = scores + 4 * experts
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            logits = argument(args, 3) + row * argument(args, 4)
            ids, mix = argument(args, 5) + row * argument(args, 6), argument(args, 7) + row * argument(args, 8)
            for index in range(experts):
                store_f32(scores + 4 * index, _score(load_f32(logits + 4 * index)))
                value = load_f32(scores + 4 * index)
                if bias != 0:
                    value = _sum(value, load_f32(bias + 4 * index))
                if value != value:
                    value = -math.inf
                store_f32(selection + 4 * index, value)
            of_step = row if argument(args, 13) == 0 else load_i32(argument(step, 5) + 4 * row)
            total = _nothing()
            for place in range(used):
                if table != 0:
                    chosen = load_i32(table + 4 * (load_i32(argument(step, 2) + 4 * of_step) * used + place))
                else:
                    chosen = _best(selection, experts)
                    store_f32(selection + 4 * chosen, math.nan)
                store_i32(ids + 4 * place, chosen)
                total = _sum(total, load_f32(scores + 4 * chosen))
            normalise, scale = argument(args, 11) != 0, float_argument(args, 12)
            for place in range(used):
                score = load_f32(scores + 4 * load_i32(ids + 4 * place))
                store_f32(mix + 4 * place, _weight(score, total, normalise, scale))

    return kernel
