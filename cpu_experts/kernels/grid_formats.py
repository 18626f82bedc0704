"""How blocks of the quant types whose codes stand for groups of magnitudes are taken apart in registers (AVX2).

Owns their bit layouts (those of ggml's block_* structures); the tables are `grid_tables`, the other types
`block_formats`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from bloomery.cpu_experts.isa import AVX512VNNI, at_least
from bloomery.cpu_experts.kernels.block_parts import BIT_32, SuperBlock, range_of
from bloomery.cpu_experts.kernels.grid_tables import gather_8, load_eights, table_address
from bloomery.cpu_experts.simd import Value, i8x32, i16x8, i16x16, i16x32, i32x8, i32x16, vector


class GridBlock(SuperBlock):
    """Codes stand for groups of 4 or 8 magnitudes out of a table; a bit for each element is its sign."""

    signed = True

    def magnitudes(self, group: int) -> Value:
        """i8x32: `values` without their signs."""
        raise NotImplementedError

    @functools.cached_property
    def signs(self) -> Value:
        """i8x32: a byte for each 8 elements, the first lowest; 1 is negative."""
        raise NotImplementedError

    def values(self, group: int) -> Value:
        s, magnitudes = self.s, self.magnitudes(group)
        bits = s.lane(s.as_(i32x8, self.signs), group)
        if at_least(AVX512VNNI):  # the word is a mask register
            negative = s.b.bitcast(bits, BIT_32)
        else:
            bit = s.bytes32([1, 2, 4, 8, 16, 32, 64, 128] * 4)
            spread = s.table(s.as_(i8x32, s.splat(i32x8, bits)), s.bytes32([0] * 8 + [1] * 8 + [2] * 8 + [3] * 8))
            negative = s.b.icmp_unsigned("==", s.and_(spread, bit), bit)
        return s.b.select(negative, s.sub(s.zero(i8x32), magnitudes), magnitudes)

    def even(self, seven: Value) -> Value:
        """i8x32 of 7 bits each with an eighth that makes the number of set bits even."""
        s = self.s
        folded = s.xor(seven, s.bytes_shr(seven, 4, 15))
        folded = s.xor(folded, s.bytes_shr(folded, 2, 63))
        folded = s.xor(folded, s.bytes_shr(folded, 1, 127))
        return s.or_(seven, s.bytes_shl(folded, 7, 128))

    def four_sevens(self, words: Value) -> Value:
        """i8x32 of the four fields of 7 bits in each word (i32x8)."""
        s, total = self.s, None
        for field in range(4):
            bits = s.and_(s.shl(words, field) if field else words, s.splat_constant(i32x8, 127 << 8 * field))
            total = bits if total is None else s.or_(total, bits)
        return s.as_(i8x32, total)

    def odd_scales(self, codes: Value) -> Value:
        """Split order of 2c + 1 for eight codes c (i32x8), each of a sub-block of 32."""
        s = self.s
        return self.doubled(s.trunc(i16x8, s.or_(s.shl(codes, 1), s.splat_constant(i32x8, 1))))

    def odd_nibble_scales(self, at: int) -> Value:
        """Split order of 2c + 1 for the sixteen nibbles c of the 8 bytes at `at`, low ones first."""
        s = self.s
        packed = s.zext(i16x8, s.load(vector("i8", 8), self.address, at))
        nibbles = s.concat(s.and_(packed, s.splat_constant(i16x8, 15)), s.lshr(packed, 4))
        return s.or_(s.shl(nibbles, 1), s.splat_constant(i16x16, 1))

    def code(self, element: str, at: int) -> Value:
        """i32 of an unsigned integer in the block."""
        return self.s.b.zext(self.s.load_scalar(element, self.address, at), i32x8.ir.element)

    def eights(self, table: str, codes: Sequence[Value]) -> Value:
        return self.s.as_(i8x32, load_eights(self.s, table_address(self.s, table), codes))


class WordBlock(GridBlock):
    """Types with a word for each 32 elements: 28 bits of signs and a scale of 4 bits. The eighth sign of each eight
    makes their number even."""

    @functools.cached_property
    def words(self) -> Value:
        """i32x8."""
        raise NotImplementedError

    @functools.cached_property
    def signs(self) -> Value:
        return self.even(self.four_sevens(self.words))

    @functools.cached_property
    def scales(self) -> Value:
        return self.odd_scales(self.s.lshr(self.words, 28))


class IQ2_XXS(WordBlock):
    """For each 32 elements four codes of eight, then the word."""

    nbytes = 66
    fraction = 0.125

    @functools.cached_property
    def words(self) -> Value:
        return self.s.lanes(self.s.load(i32x16, self.address, 2), range(1, 16, 2))

    def magnitudes(self, group: int) -> Value:
        return self.eights("IQ2_XXS", [self.code("i8", 2 + 8 * group + index) for index in range(4)])


class IQ2_XS(GridBlock):
    """32 words of 16 bits: a code of eight in 9 bits, then 7 signs; the eighth makes their number even."""

    nbytes = 74
    fraction = 0.125

    @functools.cached_property
    def signs(self) -> Value:
        s = self.s
        return self.even(s.trunc(i8x32, s.lshr(s.load(i16x32, self.address, 2), 9)))

    @functools.cached_property
    def scales(self) -> Value:
        return self.odd_nibble_scales(66)

    def magnitudes(self, group: int) -> Value:
        s = self.s
        words = [self.code("i16", 2 + 8 * group + 2 * index) for index in range(4)]
        return self.eights("IQ2_XS", [s.and_(word, word.type(511)) for word in words])


class IQ2_S(GridBlock):
    """32 codes of eight: 8 bits each at 2, 2 more at 66; signs at 34."""

    nbytes = 82
    fraction = 0.125

    @functools.cached_property
    def signs(self) -> Value:
        return self.load(34)

    @functools.cached_property
    def scales(self) -> Value:
        return self.odd_nibble_scales(74)

    def magnitudes(self, group: int) -> Value:
        s, high = self.s, self.code("i8", 66 + group)
        codes = []
        for index in range(4):
            upper = s.and_(s.b.shl(high, high.type(8 - 2 * index)), high.type(0x300))
            codes.append(s.or_(self.code("i8", 2 + 4 * group + index), upper))
        return self.eights("IQ2_S", codes)


class IQ3_XXS(WordBlock):
    """64 codes of four, then the words."""

    nbytes = 98
    fraction = 0.25

    @functools.cached_property
    def words(self) -> Value:
        return self.s.load(i32x8, self.address, 66)

    def magnitudes(self, group: int) -> Value:
        s = self.s
        codes = s.zext(i32x8, s.load(vector("i8", 8), self.address, 2 + 8 * group))
        return s.as_(i8x32, gather_8(s, table_address(s, "IQ3_XXS"), codes))


class IQ3_S(GridBlock):
    """64 codes of four: 8 bits each at 2, a ninth at 66; signs at 74, eight scales of 4 bits at 106."""

    nbytes = 110

    @functools.cached_property
    def signs(self) -> Value:
        return self.load(74)

    @functools.cached_property
    def scales(self) -> Value:
        s = self.s
        nibbles = s.lshr(s.splat(i32x8, s.load_scalar("i32", self.address, 106)), range_of(0, 4))
        return self.odd_scales(s.and_(nibbles, s.splat_constant(i32x8, 15)))

    def magnitudes(self, group: int) -> Value:
        s = self.s
        low = s.zext(i32x8, s.load(vector("i8", 8), self.address, 2 + 8 * group))
        ninth = s.shl(s.splat(i32x8, self.code("i8", 66 + group)), range_of(8, -1))
        codes = s.or_(low, s.and_(ninth, s.splat_constant(i32x8, 256)))
        return s.as_(i8x32, gather_8(s, table_address(s, "IQ3_S"), codes))
