"""Activations as the quantised products want them: rounded exactly as ggml rounds them on x86.

Owns the kernels `quantise_Q8_K`, `quantise_Q8_0`, `quantise_F16`, `quantise_BF16`. Formulas: ggml's
quantize_row_q8_K_ref, and the AVX2 branches of quantize_row_q8_0 and quantize_row_q8_1 (round to nearest even).

A row of quantised activations is three planes: int8 values, f32 scales `d`, sums. Q8_K (blocks of 256): sums are int16
of each 16 elements in split order (`block_parts`). Q8_0 (blocks of 32; serves Q8_1 too, whose values and d are the
same): `d` is the f32 of the stored f16; sums are int32 of the block, then f32 of the f16 `d * sum` of Q8_1.

With a second input the rows are silu(gate) * up, computed on the way as `elementwise.swiglu` computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.kernels.block_parts import SPLIT_ORDER
from bloomery.cpu_experts.kernels.elementwise import narrow_run, swiglu_run
from bloomery.cpu_experts.kernels.layouts import ACTIVATION_ELEMENTS, BUFFER_BYTES, PLANE_BYTES
from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    argument,
    compiled,
    emits,
    f32x8,
    float_argument,
    i8x32,
    i16x16,
    i32x8,
    inlined,
    load_f32,
    pair_of,
    vector,
)

# Arguments: rows (index of the step's row count), rows per step row, heads, blocks of a head, x, x stride, x head
# stride, up or 0, out, out stride, d plane, sums plane, buffers (BUFFER_BYTES a rank), limit of silu(x) * up, bytes
# from one rank's rows to the next one's, if each makes all rows for itself (0: they share them)
OWN: Final = 14  # place of the last of them
_INT = types.int64
_PAIR = pair_of(types.float32)


def _horizontal(s: Emitter, value: Value, better: Callable[[Value, Value], Value]) -> Value:
    """The lane of f32x8 that wins every comparison."""
    value = better(s.low(value), s.high(value))
    value = better(s.low(value), s.high(value))
    return better(s.lane(value, 0), s.lane(value, 1))


@emits(_PAIR, _INT)
def _extremes(s: Emitter, x: Value) -> tuple[Value, Value]:
    """Greatest and least of 256 floats and 0; NaN is passed over."""
    high = low = s.zero(f32x8)
    for start in range(0, 256, 8):
        part = s.load(f32x8, x, 4 * start)
        high, low = s.fmax(part, high), s.fmin(part, low)
    return _horizontal(s, high, s.fmax), _horizontal(s, low, s.fmin)


@emits(types.void, _INT, _INT, _INT, _INT, types.float32)
def _quantise_256(s: Emitter, x: Value, values: Value, d: Value, sums: Value, extreme: Value) -> None:
    single = extreme.type
    inverse = s.fdiv(single(-127.0), extreme)
    parts, halves = [], []
    limit = s.splat_constant(i32x8, 127)
    for start in range(0, 256, 8):
        part = s.round_to_i32(s.fmul(s.load(f32x8, x, 4 * start), s.splat(f32x8, inverse)))
        parts.append(s.b.select(s.b.icmp_signed("<", part, limit), part, limit))
    for start in range(0, 32, 2):
        halves.append(s.add(parts[start], parts[start + 1]))
    fours = [s.sum4(*halves[start : start + 4]) for start in range(0, 16, 4)]
    sixteen = s.concat(s.concat(fours[0], fours[1]), s.concat(fours[2], fours[3]))
    s.store(s.trunc(i16x16, s.lanes(sixteen, SPLIT_ORDER)), sums)
    for start in range(0, 32, 4):
        joined = s.concat(s.concat(parts[start], parts[start + 1]), s.concat(parts[start + 2], parts[start + 3]))
        s.store(s.trunc(i8x32, joined), values, 8 * start)
    s.store(s.fdiv(single(1.0), inverse), d)


@emits(types.void, _INT, _INT, _INT)
def _zero_256(s: Emitter, values: Value, d: Value, sums: Value) -> None:
    for start in range(0, 256, 32):
        s.store(s.zero(i8x32), values, start)
    s.store(f32x8.ir.element(0.0), d)
    s.store(s.zero(i16x16), sums)


@inlined
def _q8_k(x: int, values: int, d: int, sums: int) -> None:
    high, low = _extremes(x)
    extreme = high
    if -low > high:
        extreme = low
    elif -low == high:  # the first of the largest magnitude decides the sign
        at = x
        if high > 0:
            while load_f32(at) != high and load_f32(at) != low:
                at += 4
            extreme = load_f32(at)
    if extreme == 0:
        _zero_256(values, d, sums)
    else:
        _quantise_256(x, values, d, sums, extreme)


def quants_of_32(s: Emitter, x: Value) -> tuple[Value, list[Value]]:
    """Of the 32 floats at x: the block's f32 scale, and the rounded values as four i32x8."""
    parts = [s.load(f32x8, x, 32 * part) for part in range(4)]
    largest = s.fabs(parts[0])
    for part in parts[1:]:
        largest = s.fmax(largest, s.fabs(part))
    largest = _horizontal(s, largest, s.fmax)
    single = largest.type
    scale = s.fdiv(largest, single(127.0))
    inverse = s.fdiv(single(127.0), largest)
    inverse = s.b.select(s.b.fcmp_unordered("!=", largest, single(0.0)), inverse, single(0.0))
    return scale, [s.round_to_i32(s.fmul(part, s.splat(f32x8, inverse))) for part in parts]


@emits(types.void, _INT, _INT, _INT, _INT)
def _q8_0(s: Emitter, x: Value, values: Value, d: Value, sums: Value) -> None:
    scale, quants = quants_of_32(s, x)
    single, half = scale.type, vector("f16", 1).ir.element
    joined = s.concat(s.concat(quants[0], quants[1]), s.concat(quants[2], quants[3]))
    s.store(s.trunc(i8x32, joined), values)
    fours = s.sum4(*quants)
    lanes = [s.lane(fours, lane) for lane in range(4)]
    total = s.add(s.add(lanes[0], lanes[1]), s.add(lanes[2], lanes[3]))
    s.store(s.b.fpext(s.b.fptrunc(scale, half), single), d)
    s.store(total, sums)
    weighted = s.fmul(scale, s.b.sitofp(total, single))
    s.store(s.b.fpext(s.b.fptrunc(weighted, half), single), sums, 4)


@emits(types.void, _INT, _INT)
def _to_bf16(s: Emitter, x: Value, values: Value) -> None:
    bits = s.load_scalar("i32", x)
    word = bits.type
    odd = s.and_(s.b.lshr(bits, word(16)), word(1))
    rounded = s.b.lshr(s.add(bits, s.add(odd, word(0x7FFF))), word(16))
    quiet = s.or_(s.b.lshr(bits, word(16)), word(64))
    is_nan = s.b.icmp_unsigned(">", s.and_(bits, word(0x7FFFFFFF)), word(0x7F800000))
    s.store(s.b.trunc(s.b.select(is_nan, quiet, rounded), vector("i16", 1).ir.element), values)


@compiled
def _bf16_run(x: int, out: int, count: int) -> None:
    """f32 to bf16, to nearest even; a NaN stays one."""
    for element in range(count):
        _to_bf16(x + 4 * element, out + 2 * element)


_BLOCK: Final[dict[str, Any]] = {"Q8_K": _q8_k, "Q8_0": _q8_0}


@inlined
def _first(args: int, units: int, rank: int, ranks: int) -> int:
    first: int = 0 if argument(args, OWN) != 0 else share_start(units, rank, ranks)
    return first


@inlined
def _last(args: int, units: int, rank: int, ranks: int) -> int:
    last: int = units if argument(args, OWN) != 0 else share_end(units, rank, ranks)
    return last


def quantise(kind: str) -> Callable[[int, int, int, int], None]:
    """Kernel `quantise_<kind>`: rows of x (or, for Q8 kinds, of silu(x) * up) into planes; a head after the other."""
    return _convert(narrow_run if kind == "F16" else _bf16_run) if kind in ("F16", "BF16") else _quantise(kind)


def _convert(run: Callable[[int, int, int], None]) -> Callable[[int, int, int, int], None]:
    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows = argument(step, argument(args, 0)) * argument(args, 1)
        heads, width = argument(args, 2), argument(args, 3)
        out = argument(args, 8) + rank * argument(args, OWN)
        for unit in range(_first(args, rows * heads, rank, ranks), _last(args, rows * heads, rank, ranks)):
            row = unit // heads
            head = unit - row * heads
            source = argument(args, 4) + row * argument(args, 5) + head * argument(args, 6)
            run(source, out + row * argument(args, 9) + 2 * head * width, width)

    return kernel


def _quantise(kind: str) -> Callable[[int, int, int, int], None]:
    block_of = _BLOCK[kind]
    elements = ACTIVATION_ELEMENTS[kind]
    values_bytes, d_bytes, sums_bytes = PLANE_BYTES[kind]
    quantise_block = compiled(lambda x, values, d, sums: block_of(x, values, d, sums))

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows = argument(step, argument(args, 0)) * argument(args, 1)
        heads, blocks = argument(args, 2), argument(args, 3)
        x, x_stride, head_stride, up = argument(args, 4), argument(args, 5), argument(args, 6), argument(args, 7)
        out, out_stride = argument(args, 8) + rank * argument(args, OWN), argument(args, 9)
        d_plane, sums_plane = argument(args, 10), argument(args, 11)
        buffer = argument(args, 12) + rank * BUFFER_BYTES
        in_row = heads * blocks
        for unit in range(_first(args, rows * in_row, rank, ranks), _last(args, rows * in_row, rank, ranks)):
            row = unit // in_row
            place = unit - row * in_row
            head = place // blocks
            source = row * x_stride + head * head_stride + (place - head * blocks) * elements * 4
            target = out + row * out_stride
            if up == 0:
                block_at = x + source
            else:
                swiglu_run(x + source, up + source, buffer, elements, float_argument(args, 13))
                block_at = buffer
            quantise_block(
                block_at, target + place * values_bytes, target + d_plane + place * d_bytes,
                target + sums_plane + place * sums_bytes,
            )  # fmt: skip

    return kernel
