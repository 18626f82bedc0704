"""Dots of four weight rows whose codes stand for four values, position by position (AVX-512-VBMI), one row of x.

Owns the lookups in registers: the value at one position of a group, for 64 codes at once, is a byte out of a table of
256 or 512, which two-register permutations take from registers, where loads would take a code at a time. Activations
are brought into the same order once a block; integer sums are exact in any order, and the float steps are
`block_dots`' canonical ones. The types are those with a scale for each 32 elements: no lane has parts of two. The
integer sums of types whose codes stand for eight values are `level_dots`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from llvmlite import ir

from bloomery.cpu_experts.isa import AVX512VNNI, at_least, host_features
from bloomery.cpu_experts.kernels.block_formats import SUPER_BLOCKS
from bloomery.cpu_experts.kernels.block_parts import block_scales
from bloomery.cpu_experts.kernels.code_lookups import by_position, constant_table, even_bytes, of_two
from bloomery.cpu_experts.kernels.grid_tables import grid_words
from bloomery.cpu_experts.kernels.lane_sums import row_by_row, sums_of_fours
from bloomery.cpu_experts.kernels.level_dots import LEVEL_SUMS
from bloomery.cpu_experts.simd import Emitter, Value, f32x4, i8x32, i8x64, i32x8, i32x16, vector

i64x8 = vector("i64", 8)
_BIT_64: Final = ir.VectorType(ir.IntType(1), 64)
_FIELDS: Final = (0, 7, 14, 21, 32, 39, 46, 53)
"""Where the four fields of 7 bits of each of two words begin."""


def with_positions(name: str) -> bool:
    """Whether `position_dots` knows the type and this CPU has what it needs."""
    needs = ("avx512vbmi", "bmi2")
    return name in _SUMS and at_least(AVX512VNNI) and all(host_features().get(need, False) for need in needs)


def position_dots(s: Emitter, name: str, addresses: Sequence[Value], x: Sequence[Value], acc: Value) -> Value:
    """acc (f32x4) after one block of four rows; x: addresses of the activations' values, d and sums."""
    x_values, x_d, x_sums = x
    totals = _SUMS[name](s, addresses, x_values, x_sums)
    dx = s.splat(f32x4, s.load_scalar("f32", x_d))
    d = block_scales(s, SUPER_BLOCKS[name], addresses)
    return s.fma(s.fmul(d, dx), s.to_float(f32x4, sums_of_fours(s, row_by_row(s, totals))), acc)


# ---- the types: i32x16 of partial sums for each of the four rows
def _iq3_xxs(s: Emitter, addresses: Sequence[Value], x_values: Value, _: Value) -> list[Value]:
    activations = by_position(s, x_values)
    totals = []
    for pair in (addresses[:2], addresses[2:]):
        words = s.concat(*(s.load(i32x8, address, 66) for address in pair))
        signs, scales = _sign_bytes(s, words), _odd(s, s.lshr(words, 28))
        for row, address in enumerate(pair):
            codes = s.load(i8x64, address, 2)
            of_codes = s.lanes(signs, [32 * row + code // 2 for code in range(64)])
            dots = _four_positions(s, _values(s, "IQ3_XXS", codes), activations, of_codes)
            scaled = s.mul(dots, s.lanes(scales, [8 * row + lane // 2 for lane in range(16)]))
            totals.append(scaled)
    return totals


def _iq3_s(s: Emitter, addresses: Sequence[Value], x_values: Value, _: Value) -> list[Value]:
    activations = by_position(s, x_values)
    totals = []
    for address in addresses:
        codes = s.load(i8x64, address, 2)
        ninth = s.b.bitcast(s.load_scalar("i64", address, 66), _BIT_64)
        of_codes = s.lanes(s.load(i8x32, address, 74), [code // 2 for code in range(64)])
        low, high = (_values(s, "IQ3_S", codes, half) for half in range(2))
        values = [s.b.select(ninth, *both) for both in zip(high, low)]
        dots = _four_positions(s, values, activations, of_codes)
        nibbles = s.lshr(s.splat(i32x16, s.load_scalar("i32", address, 106)), [4 * (lane // 2) for lane in range(16)])
        scaled = s.mul(dots, _odd(s, s.and_(nibbles, s.splat_constant(i32x16, 15))))
        totals.append(scaled)
    return totals


_SUMS: Final[dict[str, Callable[[Emitter, Sequence[Value], Value, Value], list[Value]]]] = {
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    **LEVEL_SUMS,
}


# ---- their parts
def _values(s: Emitter, name: str, codes: Value, half: int = 0) -> list[Value]:
    """For each position i8x64 of the values that 64 codes of 8 bits stand for, in one half of the type's table."""
    table, entries = _table_address(s, name), len(grid_words(name))
    upper = s.b.icmp_signed("<", codes, s.zero(i8x64))
    found = []
    for position in range(4):
        first = entries * position + 256 * half
        low, low_2, high, high_2 = (s.load(i8x64, table, first + 64 * part) for part in range(4))
        found.append(s.b.select(upper, of_two(s, high, codes, high_2), of_two(s, low, codes, low_2)))
    return found


def _four_positions(s: Emitter, values: Sequence[Value], activations: Sequence[Value], of_codes: Value) -> Value:
    """i32x16 of the dots of 64 groups of four; `of_codes` has for each group the sign byte of eight elements."""
    dots = s.zero(i32x16)
    for position in range(4):
        bits = [1 << position, 16 << position] * 32
        dots = s.add_products_u8(dots, values[position], _negated(s, activations[position], of_codes, bits))
    return dots


def _negated(s: Emitter, activations: Value, signs: Value, bits: Sequence[int]) -> Value:
    """Activations, negative where a sign byte has the bit."""
    chosen = s.and_(signs, s.constant(i8x64, bits))
    negative = s.b.icmp_unsigned("!=", chosen, s.zero(i8x64))
    return s.b.select(negative, s.sub(s.zero(i8x64), activations), activations)


def _odd(s: Emitter, codes: Value) -> Value:
    """2c + 1 for i32x16."""
    return s.or_(s.shl(codes, 1), s.splat_constant(i32x16, 1))


def _sign_bytes(s: Emitter, words: Value) -> Value:
    """i8x64: from words (i32x16) with four fields of 7 bits each field as `even_bytes` has it."""
    return even_bytes(s, s.shift_out(s.as_(i8x64, words), _FIELDS * 8))


def _table_address(s: Emitter, name: str) -> Value:
    """Address of the type's values, those of all codes at position 0 first."""
    values = np.array(grid_words(name), "<u4").view(np.uint8).reshape(-1, 4).T.reshape(-1)
    return constant_table(s, f"{name.lower()}_positions", values.tobytes())
