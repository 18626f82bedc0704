"""Dots of four weight rows whose codes stand for four values, position by position (AVX-512-VBMI), one row of x.

Owns the lookups in registers: the value at one position of a group, for 64 codes at once, is a byte out of a table of
256 or 512, which two-register permutations take from registers, where loads would take a code at a time. Activations
are brought into the same order once a block; integer sums are exact in any order, and the float steps are
`block_dots`' canonical ones. The types are those with a scale for each 32 elements: no lane has parts of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir

from bloomery.cpu_experts.isa import AVX512VNNI, at_least, host_features
from bloomery.cpu_experts.kernels.block_formats import SUPER_BLOCKS
from bloomery.cpu_experts.kernels.block_parts import block_scales
from bloomery.cpu_experts.kernels.grid_tables import grid_words
from bloomery.cpu_experts.simd import Emitter, Value, f32x4, i8x32, i8x64, i32x8, i32x16, vector

i64x8 = vector("i64", 8)
_BIT_64: Final = ir.VectorType(ir.IntType(1), 64)
_FIELDS: Final = (0, 7, 14, 21, 32, 39, 46, 53)
"""Where the four fields of 7 bits of each of two words begin."""


def with_positions(name: str) -> bool:
    """Whether `position_dots` knows the type and this CPU has what it needs."""
    return name in _SUMS and at_least(AVX512VNNI) and host_features().get("avx512vbmi", False)


def position_dots(s: Emitter, name: str, addresses: Sequence[Value], x: Sequence[Value], acc: Value) -> Value:
    """acc (f32x4) after one block of four rows; x: addresses of the activations' values, d and sums (not used)."""
    x_values, x_d, _ = x
    totals = _SUMS[name](s, addresses, x_values)
    dx = s.splat(f32x4, s.load_scalar("f32", x_d))
    d = block_scales(s, SUPER_BLOCKS[name], addresses)
    return s.fma(s.fmul(d, dx), s.to_float(f32x4, s.sum4(*totals)), acc)


# ---- the types: i32x8 of partial sums for each of the four rows
def _iq3_xxs(s: Emitter, addresses: Sequence[Value], x_values: Value) -> list[Value]:
    activations = _by_position(s, x_values)
    totals = []
    for pair in (addresses[:2], addresses[2:]):
        words = s.concat(*(s.load(i32x8, address, 66) for address in pair))
        signs, scales = _sign_bytes(s, words), _odd(s, s.lshr(words, 28))
        for row, address in enumerate(pair):
            codes = s.load(i8x64, address, 2)
            of_codes = s.lanes(signs, [32 * row + code // 2 for code in range(64)])
            dots = _four_positions(s, _values(s, "IQ3_XXS", codes), activations, of_codes)
            scaled = s.mul(dots, s.lanes(scales, [8 * row + lane // 2 for lane in range(16)]))
            totals.append(s.add(s.low(scaled), s.high(scaled)))
    return totals


def _iq3_s(s: Emitter, addresses: Sequence[Value], x_values: Value) -> list[Value]:
    activations = _by_position(s, x_values)
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
        totals.append(s.add(s.low(scaled), s.high(scaled)))
    return totals


_SUMS: Final[dict[str, Callable[[Emitter, Sequence[Value], Value], list[Value]]]] = {
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}


# ---- their parts
def _by_position(s: Emitter, x_values: Value) -> list[Value]:
    """For each position in a group of four: i8x64 of the activations there, group after group."""
    quarters = []
    for quarter in range(4):
        values = s.load(i8x64, x_values, 64 * quarter)
        ordered = s.lanes(values, [4 * group + position for position in range(4) for group in range(16)])
        quarters.append(s.as_(i64x8, ordered))
    found = []
    for position in range(4):
        mine = [2 * position, 2 * position + 1]
        halves = [s.shuffle(a, b, [*mine, *(8 + lane for lane in mine)] * 2) for a, b in _pairs(quarters)]
        found.append(s.as_(i8x64, s.shuffle(halves[0], halves[1], [0, 1, 2, 3, 8, 9, 10, 11])))
    return found


def _pairs(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2]))


def _sign_bytes(s: Emitter, words: Value) -> Value:
    """i8x64: from words (i32x16) with four fields of 7 bits each field with an eighth bit that makes the number of set
    bits even."""
    fields = s.shift_out(s.as_(i8x64, words), _FIELDS * 8)
    even = [field | (field.bit_count() & 1) << 7 for field in range(128)]
    return _of_two(s, s.constant(i8x64, even[:64]), fields, s.constant(i8x64, even[64:]))


def _values(s: Emitter, name: str, codes: Value, half: int = 0) -> list[Value]:
    """For each position i8x64 of the values that 64 codes of 8 bits stand for, in one half of the type's table."""
    table, entries = _table_address(s, name), len(grid_words(name))
    upper = s.b.icmp_signed("<", codes, s.zero(i8x64))
    found = []
    for position in range(4):
        first = entries * position + 256 * half
        low, low_2, high, high_2 = (s.load(i8x64, table, first + 64 * part) for part in range(4))
        found.append(s.b.select(upper, _of_two(s, high, codes, high_2), _of_two(s, low, codes, low_2)))
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


def _of_two(s: Emitter, low: Value, indices: Value, high: Value) -> Value:
    """vpermi2b: bytes of two registers by the lower 7 bits of each index."""
    return s.call("llvm.x86.avx512.vpermi2var.qi.512", i8x64.ir, [low, indices, high])


def _table_address(s: Emitter, name: str) -> Value:
    """Address of the type's values, those of all codes at position 0 first."""
    module, label = s.b.module, f"{name.lower()}_positions"
    table = module.globals.get(label)
    if table is None:
        values = np.array(grid_words(name), "<u4").view(np.uint8).reshape(-1, 4).T.reshape(-1)
        kind = ir.ArrayType(ir.IntType(8), len(values))
        table = ir.GlobalVariable(module, kind, label)
        table.linkage, table.global_constant, table.align = "internal", True, 64
        table.initializer = ir.Constant(kind, bytearray(values.tobytes()))
    return s.b.ptrtoint(table, ir.IntType(64))
