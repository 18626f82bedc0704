"""Dots of four weight rows whose codes stand for eight values of three levels, one row of x (AVX-512-VBMI).

Owns the integer sums of IQ2_XXS, IQ2_XS and IQ2_S, which `position_dots` asks for. A code's eight levels are the 16
bits of a word, so that a table of up to 1024 codes lies in at most 32 registers, and words of two at a time are looked
up for the 32 codes of a row's block. Byte i of what is found has two bits for each of the elements 4i to 4i + 3: one
position in four after the other, a level with its sign looks up a value in 16 bytes. Values are taken 64 too great,
which makes them unsigned; a lane of products is a sub-block of 16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir

from bloomery.cpu_experts.kernels.block_parts import SPLIT_ORDER
from bloomery.cpu_experts.kernels.code_lookups import by_position, constant_table, even_bytes, words_of_two
from bloomery.cpu_experts.kernels.grid_tables import grid_words
from bloomery.cpu_experts.kernels.wide_formats import moved_bits
from bloomery.cpu_experts.simd import Emitter, Value, i8x32, i8x64, i16x16, i16x32, i32x16, vector
from bloomery.cpu_experts.vectors import ELEMENTS

i64x8 = vector("i64", 8)
LEVELS: Final = (8, 25, 43)
_LIFT: Final = 6  # values are taken 2 to this power too great
_BIT_32: Final = ir.VectorType(ir.IntType(1), 32)


class LevelBlock:
    """One block of one row: where codes, signs and scales lie."""

    name: str

    def __init__(self, emitter: Emitter, address: Value) -> None:
        self.s = emitter
        self.address = address

    @functools.cached_property
    def codes(self) -> Value:
        """i16x32: the lower 6 bits of each are those of a code."""
        raise NotImplementedError

    @functools.cached_property
    def upper_bits(self) -> list[Value]:
        """Masks of 32: of each code bit 6, bit 7 and so on."""
        raise NotImplementedError

    @functools.cached_property
    def signs(self) -> Value:
        """i8x64: bit p of byte i is set where element 4i + p is negative; the upper four bits are anything."""
        raise NotImplementedError

    @functools.cached_property
    def scales(self) -> Value:
        """i32x16 of sub-blocks of 16."""
        raise NotImplementedError

    def has_bit(self, words: Value, bit: int) -> Value:
        s = self.s
        chosen = s.and_(words, s.splat_constant(i16x32, 1 << bit))
        return s.b.icmp_unsigned("!=", chosen, s.zero(i16x32))

    def halves_of_eights(self, eights: Value) -> Value:
        """Of sign bytes, each twice: the lower four bits of the first, the upper ones of the second."""
        return self.s.shift_out(eights, [8 * at + 4 * (at % 2) for at in range(8)] * 8)


class IQ2_XXS(LevelBlock):
    name = "IQ2_XXS"

    @functools.cached_property
    def quants(self) -> Value:
        """i8x64: for each 32 elements four codes, then a word of four fields of 7 signs and the scale's 4 bits."""
        return self.s.load(i8x64, self.address, 2)

    @functools.cached_property
    def codes(self) -> Value:
        return self.s.as_(i16x32, self.s.shift_out(self.quants, [8 * (at // 2) for at in range(8)] * 8))

    @functools.cached_property
    def upper_bits(self) -> list[Value]:
        return [self.has_bit(self.codes, bit) for bit in (6, 7)]

    @functools.cached_property
    def signs(self) -> Value:
        fields = self.s.shift_out(self.quants, [32 + 7 * (at // 2) for at in range(8)] * 8)
        return self.halves_of_eights(even_bytes(self.s, fields))

    @functools.cached_property
    def scales(self) -> Value:
        s = self.s
        words = s.lanes(s.as_(i32x16, self.quants), [lane | 1 for lane in range(16)])
        return s.or_(s.lshr(words, 27), s.splat_constant(i32x16, 1))


class NibbleScales(LevelBlock):
    """Types with a scale of 4 bits for each 16 elements, in 8 bytes at `scales_at`."""

    scales_at: int

    @functools.cached_property
    def scales(self) -> Value:
        s = self.s
        packed = s.as_(i8x64, s.splat(i64x8, s.load_scalar("i64", self.address, self.scales_at)))
        twice = s.shift_out(packed, [(4 * (at // 4) - 1 + 8 * (at % 4)) % 64 for at in range(64)])
        codes = s.and_(s.as_(i32x16, twice), s.splat_constant(i32x16, 30))
        return s.or_(codes, s.splat_constant(i32x16, 1))


class IQ2_XS(NibbleScales):
    name = "IQ2_XS"
    scales_at = 66

    @functools.cached_property
    def codes(self) -> Value:
        """Words: 9 bits of a code, then 7 signs."""
        return self.s.load(i16x32, self.address, 2)

    @functools.cached_property
    def upper_bits(self) -> list[Value]:
        return [self.has_bit(self.codes, bit) for bit in (6, 7, 8)]

    @functools.cached_property
    def signs(self) -> Value:
        fields = self.s.shift_out(self.s.as_(i8x64, self.codes), [16 * (at // 2) + 9 for at in range(8)] * 8)
        return self.halves_of_eights(even_bytes(self.s, fields))


class IQ2_S(NibbleScales):
    name = "IQ2_S"
    scales_at = 74

    @functools.cached_property
    def codes(self) -> Value:
        return self.s.zext(i16x32, self.s.load(i8x32, self.address, 2))

    @functools.cached_property
    def upper_bits(self) -> list[Value]:
        s = self.s
        pairs = s.load_scalar("i64", self.address, 66)  # bits 8 and 9 of each code
        masks = [self.has_bit(self.codes, bit) for bit in (6, 7)]
        for first in range(2):
            bits = s.call(
                "llvm.x86.bmi.pext.64", ELEMENTS["i64"], [pairs, ELEMENTS["i64"](0x5555555555555555 << first)]
            )
            masks.append(s.b.bitcast(s.b.trunc(bits, ELEMENTS["i32"]), _BIT_32))
        return masks

    @functools.cached_property
    def signs(self) -> Value:
        s = self.s
        words = s.zext(i64x8, s.load(vector("i32", 8), self.address, 34))
        return s.shift_out(s.as_(i8x64, words), [4 * at for at in range(8)] * 8)


def _level_sums(kind: type[LevelBlock]) -> Callable[[Emitter, Sequence[Value], Value, Value], list[Value]]:
    def sums(s: Emitter, addresses: Sequence[Value], x_values: Value, x_sums: Value) -> list[Value]:
        activations = by_position(s, x_values)
        lanes = s.lanes(s.load(i16x16, x_sums), [SPLIT_ORDER.index(block) for block in range(16)])
        start = s.sub(s.zero(i32x16), s.shl(s.sext(i32x16, lanes), _LIFT))
        totals = []
        for address in addresses:
            row = kind(s, address)
            found = s.as_(i8x64, _levels(s, row))
            parts = (found, s.as_(i8x64, s.lshr(s.as_(i16x32, found), 4)))
            dots = start
            for position in range(4):
                values = _signed_values(s, parts[position // 2], row.signs, position)
                dots = s.add_products_u8(dots, values, activations[position])
            totals.append(s.mul(dots, row.scales))
        return totals

    return sums


def _levels(s: Emitter, row: LevelBlock) -> Value:
    """i16x32: of each code of a row the eight levels."""
    table = _level_table(s, row.name)

    def found(bit: int, first: int) -> Value:
        if bit < 0:
            low, high = (s.load(i16x32, table, 2 * first + 64 * half) for half in range(2))
            return words_of_two(s, low, row.codes, high)
        return s.b.select(row.upper_bits[bit], found(bit - 1, first + (64 << bit)), found(bit - 1, first))

    return found(len(row.upper_bits) - 1, 0)


def _signed_values(s: Emitter, levels: Value, signs: Value, position: int) -> Value:
    """i8x64: of the two bits of each byte at one position the value, 64 too great."""
    upper = position % 2
    sign_to = 0 if upper else 2
    sign = moved_bits(s, signs, (position, sign_to), (position, sign_to), 1)
    indices = s.or_(s.and_(levels, s.splat_constant(i8x64, 3 << 2 * upper)), sign)
    table = [0] * 16
    for level, magnitude in enumerate(LEVELS):
        for negative in range(2):
            table[level << 2 * upper | negative << sign_to] = (1 << _LIFT) + (-magnitude if negative else magnitude)
    return s.table(s.constant(i8x64, table * 4), indices)


def _level_table(s: Emitter, name: str) -> Value:
    """Address of a word for each code: two bits for each of its eight levels, the first lowest."""
    magnitudes = np.array(grid_words(name), "<u4").view(np.uint8).reshape(-1, 8)
    levels: Any = np.searchsorted(LEVELS, magnitudes)
    words = (levels << 2 * np.arange(8)).sum(axis=1).astype("<u2")
    return constant_table(s, f"{name.lower()}_levels", words.tobytes())


LEVEL_SUMS: Final = {kind.name: _level_sums(kind) for kind in (IQ2_XXS, IQ2_XS, IQ2_S)}
