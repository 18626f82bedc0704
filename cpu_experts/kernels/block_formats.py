"""How the blocks of each quant type are taken apart in registers (AVX2).

Owns the bit layouts of the GGUF block formats (the layouts are those of ggml's block_* structures) and the integer
widths that keep every product exact. It does not know how blocks are multiplied, stored or iterated (`block_dots`).

Two families:

* `SuperBlock`: 256 elements in 16 sub-blocks of 16 (or 8 of 32), integer sub-scales, float scale `d`, some with
  integer minima and `dmin`. element = d*scale*(value - offset) - dmin*minimum. Multiplied with Q8_K activations.
* `SmallBlock`: 32 elements, float scale `d`, some with a float minimum `m`. element = d*(value - offset) + m.
  Multiplied with Q8_0 (with m: Q8_1) activations.

Sub-scales and minima are held as 16 lanes of i16 in *split order*: those of the even sub-blocks of 16 in the lower
half, those of the odd ones in the upper half. One byte lookup then spreads the two scales that belong to a vector of 32
elements. The sums of activations (`activations.py`) are stored in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar, Final

from llvmlite import ir

from bloomery.cpu_experts.isa import AVX512VNNI, at_least
from bloomery.cpu_experts.kernels.grid_tables import gather_8, load_eights, table_address
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    i8x16,
    i8x32,
    i16x8,
    i16x16,
    i16x32,
    i32x4,
    i32x8,
    i32x16,
    vector,
)

SPLIT_ORDER: Final = (0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)
_BIT_32: Final = ir.VectorType(ir.IntType(1), 32)
FP4_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice those of e2m1
IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class BlockFormat:
    """One block at an address, taken apart lazily. Class attributes describe the quant type."""

    elements: ClassVar[int]
    nbytes: ClassVar[int]
    offset: ClassVar[int] = 0  # subtracted from the (unsigned) values
    signed: ClassVar[bool] = False  # values are signed bytes; otherwise unsigned and below 128
    d_at: ClassVar[int] = 0
    exponent: ClassVar[bool] = False  # d is a byte e8m0 that stands for 2^(e - 128); otherwise f16
    fraction: ClassVar[float] = 1.0  # d is this part of the f16 (a power of two)
    minimum_at: ClassVar[int | None] = None  # where dmin or m lies

    def __init__(self, emitter: Emitter, address: Value) -> None:
        self.s = emitter
        self.address = address

    def load(self, at: int) -> Value:
        return self.s.load(i8x32, self.address, at)

    def values(self, group: int) -> Value:
        """i8x32: elements 32*group .. 32*group + 31 of the block."""
        raise NotImplementedError

    def nibbles(self, at: int) -> Value:
        """i8x32 of 16 packed bytes: the lower nibbles, then the upper ones."""
        s = self.s
        packed = s.load(i8x16, self.address, at)
        upper = s.as_(i8x16, s.lshr(s.as_(i16x8, packed), 4))
        return s.and_(s.concat(packed, upper), s.splat_constant(i8x32, 15))


class SuperBlock(BlockFormat):
    elements = 256

    @functools.cached_property
    def scales(self) -> Value:
        """i16x16 in split order."""
        raise NotImplementedError

    @functools.cached_property
    def minima(self) -> Value:
        """i16x16 in split order, for types with `minimum_at`."""
        raise NotImplementedError

    def scale(self, group: int) -> Value:
        """i16x16 that multiplies the pair products of `values(group)`."""
        byte = 2 * group
        return self.s.as_(i16x16, self.s.table(self.s.as_(i8x32, self.scales), self.s.bytes32([byte, byte + 1] * 16)))

    def doubled(self, eight: Value) -> Value:
        """Split order of 8 values (i16x8) that each belong to a sub-block of 32."""
        return self.s.concat(eight, eight)

    def split(self, sixteen: Value) -> Value:
        """Bytes (i8x16) of 16 sub-blocks in split order."""
        return self.s.lanes(sixteen, SPLIT_ORDER)


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
            negative = s.b.bitcast(bits, _BIT_32)
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


class IQ2_XXS(GridBlock):
    """For each 32 elements four codes of eight, then a word: 28 bits of signs and a scale of 4 bits. The eighth sign of
    each eight makes their number even."""

    nbytes = 66
    fraction = 0.125

    @functools.cached_property
    def words(self) -> Value:
        return self.s.lanes(self.s.load(i32x16, self.address, 2), range(1, 16, 2))

    @functools.cached_property
    def signs(self) -> Value:
        return self.even(self.four_sevens(self.words))

    @functools.cached_property
    def scales(self) -> Value:
        return self.odd_scales(self.s.lshr(self.words, 28))

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


class IQ3_XXS(GridBlock):
    """64 codes of four; then a word for each 32 elements as in IQ2_XXS."""

    nbytes = 98
    fraction = 0.25

    @functools.cached_property
    def words(self) -> Value:
        return self.s.load(i32x8, self.address, 66)

    @functools.cached_property
    def signs(self) -> Value:
        return self.even(self.four_sevens(self.words))

    @functools.cached_property
    def scales(self) -> Value:
        return self.odd_scales(self.s.lshr(self.words, 28))

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


class SmallBlock(BlockFormat):
    elements = 32

    def fifth_bits(self, at: int) -> Value:
        """i8x32: 16 where bit i of the 32-bit word at `at` is set, else 0."""
        s = self.s
        bits = s.load_scalar("i32", self.address, at)
        if at_least(AVX512VNNI):  # the word is a mask register
            return s.b.select(s.b.bitcast(bits, _BIT_32), s.splat_constant(i8x32, 16), s.zero(i8x32))
        word = s.as_(i8x32, s.splat(i32x8, bits))
        spread = s.table(word, s.bytes32([0] * 8 + [1] * 8 + [2] * 8 + [3] * 8))
        bit = s.bytes32([1, 2, 4, 8, 16, 32, 64, 128] * 4)
        set_ = s.b.sext(s.b.icmp_unsigned("==", s.and_(spread, bit), bit), i8x32.ir)
        return s.and_(set_, s.splat_constant(i8x32, 16))


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


def range_of(start: int, step: int) -> Sequence[int]:
    return range(start, start + 8 * step, step)


def block_scales(s: Emitter, kind: type[BlockFormat], addresses: Sequence[Value]) -> Value:
    """f32 of `d` of each block."""
    if kind.fraction != 1.0:
        d = half_floats(s, addresses, kind.d_at)
        return s.fmul(d, s.splat_constant(vector("f32", len(addresses)), kind.fraction))
    if not kind.exponent:
        return half_floats(s, addresses, kind.d_at)
    word = vector("i32", len(addresses))
    exponents = [s.b.zext(s.load_scalar("i8", address, kind.d_at), word.ir.element) for address in addresses]
    e = s.gather_lanes(word, exponents)
    one = s.splat_constant(word, 1)
    tiny = s.b.shl(s.splat_constant(word, 0x00200000), e)  # 2^-128 and 2^-127 have no exponent of their own
    normal = s.shl(s.sub(e, one), 23)
    is_tiny = s.b.icmp_unsigned("<=", e, one)
    return s.as_(vector("f32", len(addresses)), s.b.select(is_tiny, tiny, normal))


def half_floats(s: Emitter, addresses: Sequence[Value], at: int) -> Value:
    """f32 of the f16 at `at` of each block."""
    lanes = len(addresses)
    bits = s.gather_lanes(vector("i16", lanes), [s.load_scalar("i16", address, at) for address in addresses])
    return s.widen(vector("f32", lanes), s.as_(vector("f16", lanes), bits))


SUPER_BLOCKS: Final[dict[str, type[SuperBlock]]] = {
    kind.__name__: kind for kind in (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_XS)
}
SMALL_BLOCKS: Final[dict[str, type[SmallBlock]]] = {
    kind.__name__: kind for kind in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4)
}
