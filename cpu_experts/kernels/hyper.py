"""Kernels of hyper-connections: `hyper_mix`, `hyper_collapse`, `hyper_post`.

Owns their order of operations. hyper_mix: the mean of squares over all copies as `rms_norm` takes it; the logits times
its inverse root in f32; e^x in f32, everything after it, the Sinkhorn rounds too, in float64 with sums in ascending
order, rounded to f32 at the end. Sums over copies: each product and each sum rounded to f32, copies in ascending order;
hyper_post begins with post * y.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import types

from bloomery.cpu_experts.kernels.elementwise import CHUNK, copy_run, weighted_sum_8
from bloomery.cpu_experts.kernels.norm_rope import inverse_root_of
from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    argument,
    compiled,
    emits,
    f32x8,
    float_argument,
    load_f32,
    load_f64,
    store_f32,
)

_INT = types.int64


@emits(types.float32, types.float32)
def exp_1(s: Emitter, x: Value) -> Value:
    """e^x of one f32."""
    return s.lane(s.exp(s.splat(f32x8, x)), 0)


@emits(types.float32, types.float32, types.float32)
def _product(s: Emitter, x: Value, y: Value) -> Value:
    return s.fmul(x, y)


@emits(types.void, _INT, types.float64)
def _store_f64(s: Emitter, address: Value, value: Value) -> None:
    s.store(value, address)


@compiled
def _sigmoid(x: float) -> float:
    result: float = 1.0 / (1.0 + exp_1(-x))
    return result


@compiled
def _sinkhorn(square: int, copies: int, epsilon: float, rounds: int) -> None:
    """Float64 logits at `square` (source-major) become the mixing matrix."""
    for source in range(copies):
        row = square + 8 * source * copies
        greatest = load_f64(row)
        for target in range(1, copies):
            greatest = max(greatest, load_f64(row + 8 * target))
        total = 0.0
        for target in range(copies):
            value = float(exp_1(load_f64(row + 8 * target) - greatest))
            _store_f64(row + 8 * target, value)
            total += value
        for target in range(copies):
            _store_f64(row + 8 * target, load_f64(row + 8 * target) / total + epsilon)
    for turn in range(rounds):
        if turn > 0:
            for source in range(copies):
                _divide_by_sum(square + 8 * source * copies, 8, copies, epsilon)
        for target in range(copies):
            _divide_by_sum(square + 8 * target, 8 * copies, copies, epsilon)


@compiled
def _divide_by_sum(first: int, stride: int, count: int, epsilon: float) -> None:
    total = 0.0
    for index in range(count):
        total += load_f64(first + index * stride)
    for index in range(count):
        at = first + index * stride
        _store_f64(at, load_f64(at) / (total + epsilon))


def hyper_mix() -> Callable[[int, int, int, int], None]:
    """Kernel `hyper_mix`: rows (index of the step's row count), copies, elements of all copies, streams, row stride,
    logits, row stride, pre, row stride, post or 0, row stride, mixing or 0, row stride, base, scale, epsilon,
    hyper_epsilon, rounds, scratch (copies^2 float64 a rank), bytes of a scratch area."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, copies, elements = argument(step, argument(args, 0)), argument(args, 1), argument(args, 2)
        base, scale, small = argument(args, 13), argument(args, 14), float_argument(args, 16)
        square = argument(args, 18) + rank * argument(args, 19)
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            root = inverse_root_of(argument(args, 3) + row * argument(args, 4), elements, float_argument(args, 15))
            logits = argument(args, 5) + row * argument(args, 6)
            pre = argument(args, 7) + row * argument(args, 8)
            for copy in range(copies):
                m = float(_product(load_f32(logits + 4 * copy), root))
                gate = _sigmoid(m * load_f32(scale) + load_f32(base + 4 * copy))
                store_f32(pre + 4 * copy, gate + small)
            if argument(args, 9) != 0:
                post = argument(args, 9) + row * argument(args, 10)
                for copy in range(copies):
                    at = 4 * (copies + copy)
                    m = float(_product(load_f32(logits + at), root))
                    store_f32(post + 4 * copy, 2.0 * _sigmoid(m * load_f32(scale + 4) + load_f32(base + at)))
                for index in range(copies * copies):
                    at = 4 * (2 * copies + index)
                    m = float(_product(load_f32(logits + at), root))
                    _store_f64(square + 8 * index, m * load_f32(scale + 8) + load_f32(base + at))
                _sinkhorn(square, copies, small, argument(args, 17))
                mixing = argument(args, 11) + row * argument(args, 12)
                for index in range(copies * copies):
                    store_f32(mixing + 4 * index, load_f64(square + 8 * index))

    return kernel


def hyper_collapse() -> Callable[[int, int, int, int], None]:
    """Kernel `hyper_collapse`: rows (index of the step's row count), copies, width, streams, row stride, copy stride,
    pre, row stride, out, row stride."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, copies, width = argument(step, argument(args, 0)), argument(args, 1), argument(args, 2)
        chunks = (width + CHUNK - 1) // CHUNK
        for unit in range(share_start(rows * chunks, rank, ranks), share_end(rows * chunks, rank, ranks)):
            row = unit // chunks
            first = (unit - row * chunks) * CHUNK
            streams = argument(args, 3) + row * argument(args, 4)
            pre, out = argument(args, 6) + row * argument(args, 7), argument(args, 8) + row * argument(args, 9)
            for start in range(first, min(first + CHUNK, width), 8):
                weighted_sum_8(streams + 4 * start, argument(args, 5), pre, copies, out + 4 * start, width - start)

    return kernel


@emits(f32x8, _INT, types.float32, _INT)
def _scaled_8(s: Emitter, x: Value, factor: Value, count: Value) -> Value:
    return s.fmul(s.load_first(f32x8, x, count), s.splat(f32x8, factor))


@emits(f32x8, _INT, types.float32, f32x8, _INT)
def _add_scaled_8(s: Emitter, x: Value, factor: Value, total: Value, count: Value) -> Value:
    return s.fadd(total, s.fmul(s.load_first(f32x8, x, count), s.splat(f32x8, factor)))


@emits(types.void, f32x8, _INT)
def _store_8(s: Emitter, value: Value, out: Value) -> None:
    s.store(value, out)


def hyper_post() -> Callable[[int, int, int, int], None]:
    """Kernel `hyper_post`: rows (index of the step's row count), copies, width, y, row stride, streams, row stride,
    copy stride, post, row stride, mixing, row stride, out, row stride, copy stride, scratch (32 bytes a copy a rank),
    bytes of a scratch area. Eight elements of all copies are made before any is stored, so out may be streams."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, copies, width = argument(step, argument(args, 0)), argument(args, 1), argument(args, 2)
        made = argument(args, 15) + rank * argument(args, 16)
        chunks = (width + CHUNK - 1) // CHUNK
        for unit in range(share_start(rows * chunks, rank, ranks), share_end(rows * chunks, rank, ranks)):
            row = unit // chunks
            first = (unit - row * chunks) * CHUNK
            y = argument(args, 3) + row * argument(args, 4)
            streams = argument(args, 5) + row * argument(args, 6)
            post, mixing = argument(args, 8) + row * argument(args, 9), argument(args, 10) + row * argument(args, 11)
            out = argument(args, 12) + row * argument(args, 13)
            for start in range(first, min(first + CHUNK, width), 8):
                count = width - start
                for copy in range(copies):
                    total = _scaled_8(y + 4 * start, load_f32(post + 4 * copy), count)
                    for source in range(copies):
                        at = streams + source * argument(args, 7) + 4 * start
                        total = _add_scaled_8(at, load_f32(mixing + 4 * (source * copies + copy)), total, count)
                    _store_8(total, made + 32 * copy)
                for copy in range(copies):
                    copy_run(made + 32 * copy, out + copy * argument(args, 14) + 4 * start, min(count, 8))

    return kernel
