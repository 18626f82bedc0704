"""What the blocks of all quant types have in common, in registers: two families, their scales, the order of sub-blocks.

Owns what a format must say of itself and the integer widths that keep every product exact. It knows no quant type
(`block_formats`, `grid_formats`), nor how blocks are multiplied, stored or iterated (`block_dots`).

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
from bloomery.cpu_experts.simd import Emitter, Value, i8x16, i8x32, i16x8, i16x16, i32x8, vector

SPLIT_ORDER: Final = (0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)
BIT_32: Final = ir.VectorType(ir.IntType(1), 32)


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


class SmallBlock(BlockFormat):
    elements = 32

    def fifth_bits(self, at: int) -> Value:
        """i8x32: 16 where bit i of the 32-bit word at `at` is set, else 0."""
        s = self.s
        bits = s.load_scalar("i32", self.address, at)
        if at_least(AVX512VNNI):  # the word is a mask register
            return s.b.select(s.b.bitcast(bits, BIT_32), s.splat_constant(i8x32, 16), s.zero(i8x32))
        word = s.as_(i8x32, s.splat(i32x8, bits))
        spread = s.table(word, s.bytes32([0] * 8 + [1] * 8 + [2] * 8 + [3] * 8))
        bit = s.bytes32([1, 2, 4, 8, 16, 32, 64, 128] * 4)
        set_ = s.b.sext(s.b.icmp_unsigned("==", s.and_(spread, bit), bit), i8x32.ir)
        return s.and_(set_, s.splat_constant(i8x32, 16))


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
    return powers_of_two(s, s.gather_lanes(word, exponents))


def powers_of_two(s: Emitter, e: Value) -> Value:
    """f32 of 2^(e - 128) for words e from 0 to 255."""
    lanes = e.type.count
    word = vector("i32", lanes)
    one = s.splat_constant(word, 1)
    tiny = s.b.shl(s.splat_constant(word, 0x00200000), e)  # 2^-128 and 2^-127 have no exponent of their own
    normal = s.shl(s.sub(e, one), 23)
    is_tiny = s.b.icmp_unsigned("<=", e, one)
    return s.as_(vector("f32", lanes), s.b.select(is_tiny, tiny, normal))


def half_floats(s: Emitter, addresses: Sequence[Value], at: int) -> Value:
    """f32 of the f16 at `at` of each block."""
    lanes = len(addresses)
    bits = s.gather_lanes(vector("i16", lanes), [s.load_scalar("i16", address, at) for address in addresses])
    return s.widen(vector("f32", lanes), s.as_(vector("f16", lanes), bits))
