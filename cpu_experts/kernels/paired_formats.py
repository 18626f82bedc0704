"""How the blocks of K types are taken apart in registers of 32 bytes, those of two rows together (AVX2).

Owns which bits become values there, where they lie and how much too great they are left. It does not know how blocks
are multiplied (`carried_dots`). The same blocks for other uses, and the facts of each type, are `block_formats`.

The scales of two rows are unpacked together, 16 bytes of a register each. The values of types with a scale for each 32
elements are too: the products of both halves of 32 then meet a scale together. A part of a byte is left where it lies
if that is possible: products of it are 2 to some power (its lift) too great.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar, Final

from bloomery.cpu_experts.simd import Emitter, Value, i8x16, i8x32, i16x16, i32x8


class PairedBlocks:
    """A block of each of two rows, taken apart lazily: vectors have the first row's lanes below the second's. Or one of
    these rows alone."""

    halves_add: ClassVar[bool] = False  # 32 elements have one scale, and the products of both halves fit i16 together

    def __init__(self, emitter: Emitter, addresses: Sequence[Value]) -> None:
        self.s = emitter
        self.addresses = addresses

    def one(self, row: int) -> PairedBlocks:
        """One of both rows."""
        alone = type(self)(self.s, self.addresses[row : row + 1])
        alone.scales = [self.of_row(self.scales, row)]
        return alone

    def of_row(self, both: Sequence[Value], row: int) -> Value:
        """i16x16 in split order of one row's `scales` or `minima`."""
        even, odd = both
        return self.s.shuffle(even, odd, [place + 8 * row + lane for place in (0, 16) for lane in range(8)])

    def load(self, at: int) -> Value:
        """i8x32: 16 bytes of each block, or 32 of one."""
        if len(self.addresses) == 1:
            return self.s.load(i8x32, self.addresses[0], at)
        return self.s.concat(*(self.s.load(i8x16, address, at) for address in self.addresses))

    @functools.cached_property
    def scales(self) -> list[Value]:
        """i16x16 of each row's scales of eight sub-blocks: of all, or first of the even ones and then of the odd."""
        raise NotImplementedError

    @functools.cached_property
    def minima(self) -> list[Value]:
        """The same of minima."""
        raise NotImplementedError

    def values(self, group: int, half: int = 0) -> tuple[Value, int]:
        """i8x32 of elements 32*group + 16*half and on, and their lift."""
        raise NotImplementedError

    @functools.cached_property
    def _twice(self) -> list[Value]:
        """Two i32x8 whose words are a scale twice. LLVM would see through these and look scales up by masks, which
        there are no registers for."""
        s, (scales,) = self.s, self.scales
        places = [[lane + first + at for lane in (0, 8) for at in range(4) for _ in range(2)] for first in (0, 4)]
        return [s.opaque(s.as_(i32x8, s.lanes(scales, lanes))) for lanes in places]

    def scale(self, group: int) -> Value:
        """i16x16 that multiplies the pair products of `values(group)`."""
        upper, part = divmod(group, 4)
        twice = self._twice[upper]
        return self.s.as_(i16x16, self.s.lanes(twice, [part] * 4 + [4 + part] * 4))


class _Q4_K(PairedBlocks):
    halves_add = True
    quants_at: ClassVar[int] = 16

    @functools.cached_property
    def _both(self) -> Value:
        """i8x32: of each row 8 scales of 6 bits, then 8 minima, from the 12 packed bytes behind d and dmin."""
        s = self.s
        words = s.as_(i32x8, self.load(0))
        low = s.lshr(s.lanes(words, [1, 3, 2, 3, 5, 7, 6, 7]), [0, 0, 0, 4] * 2)
        low = s.and_(low, s.constant(i32x8, [0x3F3F3F3F, 0x0F0F0F0F] * 4))
        high = s.lshr(s.lanes(words, [1, 1, 2, 2, 5, 5, 6, 6]), [0, 2, 0, 2] * 2)
        high = s.and_(high, s.constant(i32x8, [0, 0x30303030] * 4))
        return s.as_(i8x32, s.or_(low, high))

    def _eight(self, start: int) -> Value:
        """i16x16 of eight bytes of each row's `_both`."""
        places = [32 * zero + lane + start + byte for lane in (0, 16) for byte in range(8) for zero in range(2)]
        return self.s.as_(i16x16, self.s.shuffle(self._both, self.s.zero(i8x32), places))

    @functools.cached_property
    def scales(self) -> list[Value]:
        return [self._eight(0)]

    @functools.cached_property
    def minima(self) -> list[Value]:
        return [self._eight(8)]

    def values(self, group: int, half: int = 0) -> tuple[Value, int]:
        packed = self.load(self.quants_at + 32 * (group // 2) + 16 * half)
        return self.s.bytes_shr(packed, 4 * (group % 2), 15), 0


class _Q5_K(_Q4_K):
    quants_at = 48

    def values(self, group: int, half: int = 0) -> tuple[Value, int]:
        s, (pair, odd) = self.s, divmod(group, 2)
        packed = self.load(self.quants_at + 32 * pair + 16 * half)
        low = s.bytes_shr(packed, 3, 0x1E) if odd else s.and_(packed, s.splat_constant(i8x32, 15))
        # values of the odd group are twice too great, so that the fifth bits of both move by as much
        return s.or_(low, _moved(s, self.load(16 + 16 * half), 4 - 2 * pair, 16 << odd)), odd


class _Q3_K(PairedBlocks):
    _THIRD: Final = [[(bits >> odd & 1) << 2 | (bits >> odd + 2 & 1) << 6 for bits in range(16)] for odd in range(2)]
    """Of four groups' third bits two: bit 2 and bit 6 of a byte, for the even groups and for the odd ones."""

    @functools.cached_property
    def scales(self) -> list[Value]:
        s = self.s
        around = self.load(94)  # the 12 packed bytes start at 96; the load stays inside the block
        low = s.as_(i32x8, s.table(around, s.bytes32([2, 3, 4, 5, 6, 7, 8, 9] * 4)))
        low = s.and_(s.lshr(low, [0, 0, 4, 4] * 2), s.splat_constant(i32x8, 0x0F0F0F0F))
        high = s.as_(i32x8, s.table(around, s.bytes32([10, 11, 12, 13] * 8)))
        high = s.lshr(s.shl(high, [4, 2, 0, 0] * 2), [0, 0, 0, 2] * 2)
        biased = s.as_(i8x32, s.or_(low, s.and_(high, s.splat_constant(i32x8, 0x30303030))))
        words = s.as_(i16x16, s.sub(biased, s.splat_constant(i8x32, 32)))
        return _signed_halves(s, words)

    @functools.cached_property
    def _two_groups(self) -> dict[tuple[int, int], Value]:
        """For (half of the block, first group): two groups, the second of which is two after the first and lies 4 bits
        above it; others share bits 3 and 7. LLVM would take the groups apart before they meet."""
        s = self.s
        found = {}
        for upper in range(2):
            fours = s.bytes_shr(self.load(0), 4 * upper, 15)
            for odd in range(2):
                low = s.bytes_shr(self.load(32 + 32 * upper), 2 * odd, 0x33)
                found[upper, odd] = s.opaque(s.or_(low, s.table(s.bytes32(self._THIRD[odd] * 2), fours)))
        return found

    def values(self, group: int, half: int = 0) -> tuple[Value, int]:
        upper, part = divmod(group, 4)
        later, odd = divmod(part, 2)
        lift = 4 * later
        return self.s.and_(self._two_groups[upper, odd], self.s.splat_constant(i8x32, 7 << lift)), lift


class _Q6_K(PairedBlocks):
    @functools.cached_property
    def scales(self) -> list[Value]:
        return _signed_halves(self.s, self.s.as_(i16x16, self.load(192)))

    def values(self, group: int, half: int = 0) -> tuple[Value, int]:
        upper, part = divmod(group, 4)
        low = self.s.bytes_shr(self.load(64 * upper + 32 * (part % 2)), 4 * (part // 2), 15)
        return self.s.or_(low, _moved(self.s, self.load(128 + 32 * upper), 4 - 2 * part, 0x30)), 0


class _Q2_K(PairedBlocks):
    @functools.cached_property
    def _packed(self) -> list[Value]:
        """i16x16 of nibbles: scales of even sub-blocks, their minima, the same of odd ones; others above them."""
        words = self.s.as_(i16x16, self.load(0))
        return [words, *(self.s.lshr(words, 4 * nibble) for nibble in (1, 2, 3))]

    def _nibbles(self, number: int) -> Value:
        return self.s.and_(self._packed[number], self.s.splat_constant(i16x16, 15))

    @functools.cached_property
    def scales(self) -> list[Value]:
        return [self._nibbles(0), self._nibbles(2)]

    @functools.cached_property
    def minima(self) -> list[Value]:
        return [self._nibbles(1), self._packed[3]]

    def values(self, group: int, half: int = 0) -> tuple[Value, int]:
        upper, part = divmod(group, 4)
        later, odd = divmod(part, 2)
        lift = 4 * later  # no more: products of the upper two bits would not fit
        return _moved(self.s, self.load(16 + 32 * upper), -2 * odd, 3 << lift), lift


def _signed_halves(s: Emitter, words: Value) -> list[Value]:
    """The lower bytes of words as i16x16, and the upper ones."""
    return [s.ashr(s.shl(words, 8), 8), s.ashr(words, 8)]


def _moved(s: Emitter, value: Value, up: int, mask: int) -> Value:
    """Bytes moved up (down if below 0), and of them the bits of `mask`, into which nothing of other bytes may move."""
    if up:
        words = s.as_(i16x16, value)
        value = s.as_(i8x32, s.shl(words, up) if up > 0 else s.lshr(words, -up))
    return s.and_(value, s.splat_constant(i8x32, mask))


PAIRED_BLOCKS: Final[dict[str, type[PairedBlocks]]] = {
    "Q2_K": _Q2_K,
    "Q3_K": _Q3_K,
    "Q4_K": _Q4_K,
    "Q5_K": _Q5_K,
    "Q6_K": _Q6_K,
}
