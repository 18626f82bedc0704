"""Dots of four weight rows with one row of activations in 64-byte registers (AVX-512-VNNI), in `block_dots`' order.

Owns how the integer sums are taken there: vpdpbusd multiplies 64 elements of a row; the sums of four products fit i16
(63 * 127 * 4), so those of 128 elements are packed together and meet their scales in one vpdpwssd. The float steps are
the canonical ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llvmlite import ir

from bloomery.cpu_experts.kernels.block_formats import IQ4_VALUES, IQ4_XS
from bloomery.cpu_experts.kernels.block_parts import SPLIT_ORDER, half_floats
from bloomery.cpu_experts.kernels.lane_sums import row_by_row, sums_of_both, sums_of_fours
from bloomery.cpu_experts.kernels.wide_formats import Nibbles, WideBlocks
from bloomery.cpu_experts.simd import Emitter, Value, f32x4, i8x16, i8x32, i8x64, i16x16, i16x32, i32x8, i32x16
from bloomery.cpu_experts.vectors import ELEMENTS

_BIT_64: Final = ir.VectorType(ir.IntType(1), 64)


def wide_dots(s: Emitter, kind: type[WideBlocks], addresses: Sequence[Value], xs: Sequence[Value], acc: Value) -> Value:
    """acc (f32x4) after one block of four rows; xs: addresses of the activations' values, d and sums, three for all
    rows or six, of which the last three are what the last two rows are multiplied with."""
    facts, blocks = kind.facts, kind(s, addresses)
    x_values, x_d, x_sums = ([xs[place]] * 2 + [xs[place - 3]] * 2 for place in range(3))  # of each row
    activations = [
        [s.concat(*(s.load(i8x32, values, start) for start in kind.runs(group))) for group in range(4)]
        for values in (x_values[0], x_values[3])[: len(xs) // 3]
    ]
    rows = []
    for row in range(4):
        total = None
        for pair, groups in enumerate(kind.pairs):
            mine = activations[row // 2 % len(activations)]
            dots = [
                s.add_products_u8(s.zero(i32x16), blocks.values(row, group), blocks.signed(row, group, mine[group]))
                for group in groups
            ]
            packed, scales = s.pack_i16(*dots), blocks.scales(row, pair)
            if total is None:
                total = s.pair_products_i16(packed, scales)
            else:
                total = s.add_products_i16(s.ashr(total, kind.first_lifted), packed, scales)
        rows.append(total)
    totals = row_by_row(s, rows)
    if facts.offset:
        lift = _by_sums(s, kind, blocks.scale_halves, x_sums)
        totals = s.sub(totals, s.shl(lift, facts.offset.bit_length() - 1))
    dx = s.gather_lanes(f32x4, [s.load_scalar("f32", address) for address in x_d])
    if facts.minimum_at is None:
        isum = s.ashr(sums_of_fours(s, totals), kind.scales_lifted)
        return s.fma(s.fmul(blocks.floats[0], dx), s.to_float(f32x4, isum), acc)
    isum, minima = sums_of_both(s, totals, _by_sums(s, kind, blocks.minimum_halves, x_sums))
    d, dmin = blocks.floats
    acc = s.fma(s.fmul(d, dx), s.to_float(f32x4, isum), acc)
    return s.fma(s.fneg(s.fmul(dmin, dx)), s.to_float(f32x4, minima), acc)


def table_dots(s: Emitter, addresses: Sequence[Value], x: Sequence[Value], acc: Value) -> Value:
    """The same for IQ4_XS, whose values are too great for packed sums: a lane stays in its sub-block of 32.

    Lower nibbles of 64 packed bytes are the first 16 elements of four sub-blocks, upper ones the last 16."""
    x_values, x_d, x_sums = x
    sums = s.load(i16x16, x_sums)
    parts = [[s.load(i8x16, x_values, 32 * group + 16 * half) for group in range(8)] for half in range(2)]
    activations = [[joined(s, part[4 * quad : 4 * quad + 4]) for quad in range(2)] for part in parts]
    table = s.constant(i8x64, [value + 128 for value in IQ4_VALUES] * 4)
    fifteen = s.splat_constant(i8x64, 15)
    totals = []
    for address in addresses:
        scales = IQ4_XS(s, address).scales
        wide = s.sext(i32x8, s.low(scales))
        total = None
        for quad in range(2):
            packed = s.load(i8x64, address, 8 + 64 * quad)
            upper = s.as_(i8x64, s.lshr(s.as_(i16x32, packed), 4))
            dots = s.zero(i32x16)
            for half, nibbles in enumerate((packed, upper)):
                values = s.table(table, s.and_(nibbles, fifteen))
                dots = s.add_products_u8(dots, values, activations[half][quad])
            scaled = s.mul(dots, s.lanes(wide, [4 * quad + lane // 4 for lane in range(16)]))
            total = scaled if total is None else s.add(total, scaled)
        lift = s.shl(s.pair_products_i16(scales, sums), 7)  # values were taken 128 too great
        totals.append(s.sub(s.add(s.low(total), s.high(total)), lift))
    dx = s.splat(f32x4, s.load_scalar("f32", x_d))
    d = half_floats(s, addresses, IQ4_XS.d_at)
    return s.fma(s.fmul(d, dx), s.to_float(f32x4, s.sum4(*totals)), acc)


def nibble_sums(s: Emitter, kind: Nibbles, addresses: Sequence[Value], x_values: Value) -> Value:
    """i32x4: of four rows' blocks of 32 the integer sums, signed values taken 128 too great.

    The 16 packed bytes of each row lie in 16 bytes of one register: lower nibbles meet the first 16 activations, upper
    ones the last 16."""
    packed = joined(s, [s.load(i8x16, address, kind.quants_at) for address in addresses])
    halves = [joined(s, [s.load(i8x16, x_values, 16 * half)] * 4) for half in range(2)]
    return sums_of_fours(s, nibble_dots(s, kind, packed, addresses, halves))


def nibble_dots(
    s: Emitter, kind: Nibbles, packed: Value, addresses: Sequence[Value], activations: Sequence[Value]
) -> Value:
    """i32x16: of four blocks of 32 the integer sums, four lanes each. `packed`: their 16 bytes of nibbles side by side;
    `activations`: what lower nibbles meet, and upper ones."""
    fifteen = s.splat_constant(i8x64, 15)
    upper = s.as_(i8x64, s.lshr(s.as_(i16x32, packed), 4))
    dots = s.zero(i32x16)
    for half, nibbles in enumerate((packed, upper)):
        values = s.and_(nibbles, fifteen)
        if kind.table is not None:
            values = s.table(s.constant(i8x64, [value + 128 & 255 for value in kind.table] * 4), values)
        if kind.fifth_at is not None:
            values = s.or_(values, _fifth_bits(s, addresses, kind.fifth_at + 2 * half))
        dots = s.add_products_u8(dots, values, activations[half])
    return dots


def joined(s: Emitter, parts: Sequence[Value]) -> Value:
    """Four parts of 16 bytes as one of 64."""
    return s.concat(s.concat(parts[0], parts[1]), s.concat(parts[2], parts[3]))


def _fifth_bits(s: Emitter, addresses: Sequence[Value], at: int) -> Value:
    """i8x64: 16 where the bit of a row's 16 bits at `at` is set; the bits of four rows make a mask register."""
    bits = None
    for row, address in enumerate(addresses):
        wide = s.b.zext(s.load_scalar("i16", address, at), ELEMENTS["i64"])
        wide = s.b.shl(wide, wide.type(16 * row))
        bits = wide if bits is None else s.b.or_(bits, wide)
    mask = s.b.bitcast(bits, _BIT_64)
    return s.b.select(mask, s.splat_constant(i8x64, 16), s.zero(i8x64))


def _by_sums(s: Emitter, kind: type[WideBlocks], halves: Sequence[Value], x_sums: Sequence[Value]) -> Value:
    """i32x16: for each row, in its 16 bytes, four partial sums of its scales or minima times the activation sums."""
    first, last = (s.load(i16x16, x_sums[row]) for row in (0, 2))
    if kind.sub_blocks == 8:
        # split order: even sub-blocks of 16 and odd ones
        first, last = (s.add(s.low(sums), s.high(sums)) for sums in (first, last))
        return s.pair_products_i16(halves[0], s.shuffle(first, last, [*range(8)] * 2 + [*range(8, 16)] * 2))
    total = None
    for half, of_scales in enumerate(halves):
        places = [SPLIT_ORDER.index(block) for block in kind.order()[8 * half : 8 * half + 8]]
        beside = s.shuffle(first, last, places * 2 + [16 + place for place in places] * 2)
        if total is None:
            total = s.pair_products_i16(of_scales, beside)
        else:
            total = s.add_products_i16(total, of_scales, beside)
    return total
