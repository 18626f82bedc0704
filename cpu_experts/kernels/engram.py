"""Kernels of n-gram tables: `token_write`, `engram_rows`, `engram_gate`; rows of any matrix: `table_rows_<type>`.

Owns their order of operations. Row ids are integers, exactly `engram_hash`'s. The gate's two sums of squares and its
product, of (key * key weight) * (stream * query weight), are float64 in 8 lanes by index mod 8, then as `rms_norm`'s;
the rest of the gate is float64 but for e^x; out = stream + gate * value, product and sum rounded to f32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from numba import types

from bloomery.cpu_experts.kernels.block_formats import SMALL_BLOCKS, SUPER_BLOCKS
from bloomery.cpu_experts.kernels.block_parts import BlockFormat
from bloomery.cpu_experts.kernels.elementwise import dequantise_block
from bloomery.cpu_experts.kernels.float_dots import ELEMENT_BYTES
from bloomery.cpu_experts.kernels.hyper import exp_1
from bloomery.cpu_experts.kernels.norm_rope import no_squares, square_mean, squares_8
from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    argument,
    compiled,
    emits,
    f32x8,
    f64x8,
    float_argument,
    load_f32,
    load_i32,
    store_f32,
    store_i32,
)

_INT = types.int64
LEAST_PRODUCT: Final = 1e-6
# Arguments of engram_rows: ids, row stride, tokens' state, slot stride, row stride, rows of a slot, token map (int32),
# pad, longest, heads; then the multipliers, the primes and the offsets.
ENGRAM_HEAD: Final = 10


def token_write() -> Callable[[int, int, int, int], None]:
    """Kernel `token_write`: state, slot stride, row stride, rows of a slot."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, tokens, slots, positions = argument(step, 0), argument(step, 2), argument(step, 3), argument(step, 4)
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            position = load_i32(positions + 4 * row)
            place = position - position // argument(args, 3) * argument(args, 3)
            at = argument(args, 0) + load_i32(slots + 4 * row) * argument(args, 1) + place * argument(args, 2)
            store_i32(at, load_i32(tokens + 4 * row))

    return kernel


def engram_rows() -> Callable[[int, int, int, int], None]:
    """Kernel `engram_rows`. Products stay below 2^63 (checked when the constants are read), so int64 is exact."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, slots, positions = argument(step, 0), argument(step, 3), argument(step, 4)
        in_slot, token_map, pad = argument(args, 5), argument(args, 6), argument(args, 7)
        longest, heads = argument(args, 8), argument(args, 9)
        primes = ENGRAM_HEAD + longest
        offsets = primes + (longest - 1) * heads
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            ids = argument(args, 0) + row * argument(args, 1)
            state = argument(args, 2) + load_i32(slots + 4 * row) * argument(args, 3)
            position = load_i32(positions + 4 * row)
            hashed, blocked = 0, False
            for back in range(longest):
                compressed = pad
                at = position - back
                if at < 0:
                    blocked = True
                if not blocked:
                    token = load_i32(state + (at - at // in_slot * in_slot) * argument(args, 4))
                    if token < 0:
                        blocked = True
                    else:
                        compressed = load_i32(token_map + 4 * token)
                hashed ^= compressed * argument(args, ENGRAM_HEAD + back)
                if back > 0:
                    for head in range(heads):
                        bucket = (back - 1) * heads + head
                        prime = argument(args, primes + bucket)
                        store_i32(ids + 4 * bucket, hashed - hashed // prime * prime + argument(args, offsets + bucket))

    return kernel


def table_rows(name: str) -> Callable[[int, int, int, int], None]:
    """Kernel `table_rows_<type>`: rows (index of the step's row count, or -1 for one row), table rows of a row, ids or
    0 (then 0, 1, ...), row stride, table, bytes of a row, blocks of a row, elements of a row, out, row stride."""
    dequantise = dequantise_block(name)
    kinds: dict[str, type[BlockFormat]] = {**SUPER_BLOCKS, **SMALL_BLOCKS}
    elements = 1 if name in ELEMENT_BYTES else kinds[name].elements
    nbytes = ELEMENT_BYTES[name] if name in ELEMENT_BYTES else kinds[name].nbytes

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        count = argument(args, 1)
        units = count if argument(args, 0) < 0 else count * argument(step, argument(args, 0))
        for unit in range(share_start(units, rank, ranks), share_end(units, rank, ranks)):
            row = unit // count
            place = unit - row * count
            number = place
            if argument(args, 2) != 0:
                number = load_i32(argument(args, 2) + row * argument(args, 3) + 4 * place)
            source = argument(args, 4) + number * argument(args, 5)
            target = argument(args, 8) + row * argument(args, 9) + 4 * place * argument(args, 7)
            for block in range(argument(args, 6)):
                dequantise(source + block * nbytes, target + block * elements * 4)

    return kernel


@emits(f64x8, _INT, _INT, _INT, _INT, _INT, f64x8)
def _likeness_8(
    s: Emitter, key: Value, key_weight: Value, query: Value, query_weight: Value, count: Value, total: Value
) -> Value:
    parts = [s.widen(f64x8, s.load_first(f32x8, at, count)) for at in (key, key_weight, query, query_weight)]
    return s.fma(s.fmul(parts[0], parts[1]), s.fmul(parts[2], parts[3]), total)


@emits(types.float64, f64x8)
def _sum(s: Emitter, total: Value) -> Value:
    return s.float_sum(total)


@emits(types.void, _INT, types.float32, _INT, _INT, _INT)
def _add_share_8(s: Emitter, value: Value, share: Value, stream: Value, out: Value, count: Value) -> None:
    product = s.fmul(s.load_first(f32x8, value, count), s.splat(f32x8, share))
    s.store_first(f32x8, s.fadd(s.load_first(f32x8, stream, count), product), out, count)


@compiled
def _gate(key: int, key_weight: int, query: int, query_weight: int, width: int, epsilon: float) -> float:
    total, keys, queries = no_squares(), no_squares(), no_squares()
    for start in range(0, width, 8):
        at, count = 4 * start, width - start
        total = _likeness_8(key + at, key_weight + at, query + at, query_weight + at, count, total)
        keys = squares_8(key + at, count, keys)
        queries = squares_8(query + at, count, queries)
    roots = math.sqrt(square_mean(keys, width) + epsilon) * math.sqrt(square_mean(queries, width) + epsilon)
    d = _sum(total) / roots / math.sqrt(width)
    grown = math.sqrt(max(abs(d), LEAST_PRODUCT))
    if d < 0:
        grown = -grown
    elif d == 0:
        grown = 0.0
    gate: float = 1.0 / (1.0 + exp_1(-grown))
    return gate


def engram_gate() -> Callable[[int, int, int, int], None]:
    """Kernel `engram_gate`: rows (index of the step's row count), copies, width, streams, row stride, copy stride,
    keys, row stride, copy stride, value, row stride, gate, row stride, out, row stride, copy stride, key weight,
    query weight (float32, copies times width), epsilon."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, copies, width = argument(step, argument(args, 0)), argument(args, 1), argument(args, 2)
        for unit in range(share_start(rows * copies, rank, ranks), share_end(rows * copies, rank, ranks)):
            row = unit // copies
            copy = unit - row * copies
            stream = argument(args, 3) + row * argument(args, 4) + copy * argument(args, 5)
            key = argument(args, 6) + row * argument(args, 7) + copy * argument(args, 8)
            value = argument(args, 9) + row * argument(args, 10)
            gate_at = argument(args, 11) + row * argument(args, 12) + 4 * copy
            out = argument(args, 13) + row * argument(args, 14) + copy * argument(args, 15)
            weights = 4 * width * copy
            gate = _gate(
                key, argument(args, 16) + weights, stream, argument(args, 17) + weights, width, float_argument(args, 18)
            )
            store_f32(gate_at, gate)
            share = load_f32(gate_at)
            for start in range(0, width, 8):
                at = 4 * start
                _add_share_8(value + at, share, stream + at, out + at, width - start)

    return kernel
