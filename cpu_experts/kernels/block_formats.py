"""How the blocks of each quant type are taken apart in registers (AVX2).

Owns the bit layouts of the GGUF block formats (the layouts are those of ggml's block_* structures), but for those with
tables of magnitudes (`grid_formats`), and the list of all. What they have in common is `block_parts`; it does not know
how blocks are multiplied, stored or iterated (`block_dots`).
"""

from __future__ import annotations

import functools
from typing import ClassVar, Final

from bloomery.cpu_experts.kernels.block_parts import SmallBlock, SuperBlock, range_of
from bloomery.cpu_experts.kernels.grid_formats import IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS
from bloomery.cpu_experts.simd import Value, i8x16, i16x8, i16x16, i32x4, i32x8

FP4_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice those of e2m1
IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Q2_K(SuperBlock):
    nbytes = 84
    d_at = 80
    minimum_at = 82

    @functools.cached_property
    def packed(self) -> Value:
        return self.s.zext(i16x16, self.split(self.s.load(i8x16, self.address, 0)))

    @functools.cached_property
    def scales(self) -> Value:
        return self.s.and_(self.packed, self.s.splat_constant(i16x16, 15))

    @functools.cached_property
    def minima(self) -> Value:
        return self.s.lshr(self.packed, 4)

    def values(self, group: int) -> Value:
        half, part = divmod(group, 4)
        return self.s.bytes_shr(self.load(16 + 32 * half), 2 * part, 3)


class Q3_K(SuperBlock):
    nbytes = 110
    offset = 4
    d_at = 108

    @functools.cached_property
    def scales(self) -> Value:
        s = self.s
        around = s.load(i8x16, self.address, 94)  # the 12 packed bytes start at 96; the load stays inside the block
        low = s.as_(i32x4, s.lanes(around, [2, 3, 4, 5, 6, 7, 8, 9] * 2))
        low = s.and_(s.lshr(low, [0, 0, 4, 4]), s.splat_constant(i32x4, 0x0F0F0F0F))
        high = s.as_(i32x4, s.lanes(around, [10, 11, 12, 13] * 4))
        high = s.and_(s.lshr(s.shl(high, [4, 2, 0, 0]), [0, 0, 0, 2]), s.splat_constant(i32x4, 0x30303030))
        biased = s.as_(i8x16, s.or_(low, high))
        return s.sext(i16x16, self.split(s.sub(biased, s.splat_constant(i8x16, 32))))

    def values(self, group: int) -> Value:
        half, part = divmod(group, 4)
        s, mask = self.s, self.load(0)
        low = s.bytes_shr(self.load(32 + 32 * half), 2 * part, 3)
        high = s.bytes_shl(mask, 2 - group, 4) if group <= 2 else s.bytes_shr(mask, group - 2, 4)
        return s.or_(low, high)


class Q4_K(SuperBlock):
    nbytes = 144
    minimum_at = 2
    quants_at: ClassVar[int] = 16

    @functools.cached_property
    def both(self) -> Value:
        """i8x16: 8 scales of 6 bits, then 8 minima, from the 12 packed bytes at 4."""
        s = self.s
        words = s.as_(i32x4, s.load(i8x16, self.address, 4))
        low = s.lshr(s.lanes(words, [0, 2, 1, 2]), [0, 0, 0, 4])
        low = s.and_(low, s.constant(i32x4, [0x3F3F3F3F, 0x0F0F0F0F] * 2))
        high = s.lshr(s.lanes(words, [0, 0, 1, 1]), [0, 2, 0, 2])
        high = s.and_(high, s.constant(i32x4, [0, 0x30303030] * 2))
        return s.as_(i8x16, s.or_(low, high))

    @functools.cached_property
    def scales(self) -> Value:
        return self.doubled(self.s.zext(i16x8, self.s.low(self.both)))

    @functools.cached_property
    def minima(self) -> Value:
        return self.doubled(self.s.zext(i16x8, self.s.high(self.both)))

    def values(self, group: int) -> Value:
        return self.s.bytes_shr(self.load(self.quants_at + 32 * (group // 2)), 4 * (group % 2), 15)


class Q5_K(Q4_K):
    nbytes = 176
    quants_at = 48

    def values(self, group: int) -> Value:
        s, bits = self.s, self.load(16)
        high = s.bytes_shl(bits, 4 - group, 16) if group <= 4 else s.bytes_shr(bits, group - 4, 16)
        return s.or_(super().values(group), high)


class Q6_K(SuperBlock):
    nbytes = 210
    offset = 32
    d_at = 208

    @functools.cached_property
    def scales(self) -> Value:
        return self.s.sext(i16x16, self.split(self.s.load(i8x16, self.address, 192)))

    def values(self, group: int) -> Value:
        half, part = divmod(group, 4)
        s, bits = self.s, self.load(128 + 32 * half)
        low = s.bytes_shr(self.load(64 * half + 32 * (part % 2)), 4 * (part // 2), 15)
        high = s.bytes_shl(bits, 4 - 2 * part, 0x30) if part < 3 else s.bytes_shr(bits, 2, 0x30)
        return s.or_(low, high)


class IQ4_XS(SuperBlock):
    nbytes = 136
    signed = True

    @functools.cached_property
    def scales(self) -> Value:
        s = self.s
        high = s.splat(i32x8, s.b.zext(s.load_scalar("i16", self.address, 2), i32x8.ir.element))
        low = s.splat(i32x8, s.load_scalar("i32", self.address, 4))
        high = s.and_(s.lshr(high, range_of(0, 2)), s.splat_constant(i32x8, 3))
        low = s.and_(s.lshr(low, range_of(0, 4)), s.splat_constant(i32x8, 15))
        biased = s.or_(low, s.shl(high, 4))
        return self.doubled(s.trunc(i16x8, s.sub(biased, s.splat_constant(i32x8, 32))))

    def values(self, group: int) -> Value:
        return self.s.table(self.s.bytes32(IQ4_VALUES * 2), self.nibbles(8 + 16 * group))


class Q4_0(SmallBlock):
    nbytes = 18
    offset = 8

    def values(self, group: int) -> Value:
        return self.nibbles(2)


class Q4_1(SmallBlock):
    nbytes = 20
    minimum_at = 2

    def values(self, group: int) -> Value:
        return self.nibbles(4)


class Q5_0(SmallBlock):
    nbytes = 22
    offset = 16

    def values(self, group: int) -> Value:
        return self.s.or_(self.nibbles(6), self.fifth_bits(2))


class Q5_1(SmallBlock):
    nbytes = 24
    minimum_at = 2

    def values(self, group: int) -> Value:
        return self.s.or_(self.nibbles(8), self.fifth_bits(4))


class Q8_0(SmallBlock):
    nbytes = 34
    signed = True

    def values(self, group: int) -> Value:
        return self.load(2)


class IQ4_NL(SmallBlock):
    nbytes = 18
    signed = True

    def values(self, group: int) -> Value:
        return self.s.table(self.s.bytes32(IQ4_VALUES * 2), self.nibbles(2))


class MXFP4(SmallBlock):
    nbytes = 17
    signed = True
    exponent = True

    def values(self, group: int) -> Value:
        return self.s.table(self.s.bytes32(FP4_VALUES * 2), self.nibbles(1))


SUPER_BLOCKS: Final[dict[str, type[SuperBlock]]] = {
    kind.__name__: kind for kind in (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_XS)
}
SMALL_BLOCKS: Final[dict[str, type[SmallBlock]]] = {
    kind.__name__: kind for kind in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4)
}
