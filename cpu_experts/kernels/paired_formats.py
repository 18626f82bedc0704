"""How the blocks of K types are taken apart in registers of 32 bytes that hold 16 bytes of each of two rows (AVX2).

Owns which bits become values there, where they lie and how much too great they are left. It does not know how blocks
are multiplied (`carried_dots`). The same blocks one at a time, and the facts of each type, are `block_formats`.

The scales of both rows are unpacked together. A part of a byte is left where it lies if that is possible: products of
it are 2 to some power (its lift) too great.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar, Final

from bloomery.cpu_experts.simd import Emitter, Value, i8x16, i8x32, i16x16, i32x8


class PairedBlocks:
    """A block of each of two rows, taken apart lazily. Vectors have the first row's lanes below the second's."""

    halves_add: ClassVar[bool] = False  # 32 elements have one scale, and the products of both halves fit i16 together
    scales_lifted: ClassVar[int] = 0  # scales are 2 to this power too great

    def __init__(self, emitter: Emitter, addresses: Sequence[Value]) -> None:
        self.s = emitter
        self.addresses = addresses

    def load(self, at: int) -> Value:
        """i8x32: 16 bytes of each block."""
        return self.s.concat(*(self.s.load(i8x16, address, at) for address in self.addresses))

    @functools.cached_property
    def scales(self) -> list[Value]:
        """i16x16 of each row's scales of eight sub-blocks: of all, or first of the even ones and then of the odd."""
        raise NotImplementedError

    @functools.cached_property
    def minima(self) -> list[Value]:
        """The same of minima."""
        raise NotImplementedError

    def values(self, group: int, half: int) -> tuple[Value, int]:
        """i8x32 of elements 32*group + 16*half and on, and their lift."""
        raise NotImplementedError

    @functools.cached_property
    def _twice(self) -> list[list[Value]]:
        """For each of `scales` two i32x8 whose words are a scale twice. LLVM would see through these and look scales up
        by masks, which there are no registers for."""
        s = self.s
        places = [[lane + first + at for lane in (0, 8) for at in range(4) for _ in range(2)] for first in (0, 4)]
        return [[s.opaque(s.as_(i32x8, s.lanes(scales, lanes))) for lanes in places] for scales in self.scales]

    def scale(self, group: int, half: int) -> Value:
        """i16x16 that multiplies the pair products of `values(group, half)`."""
        upper, part = divmod(group, 4)
        twice = self._twice[half % len(self.scales)][upper]
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

    def values(self, group: int, half: int) -> tuple[Value, int]:
        packed = self.load(self.quants_at + 32 * (group // 2) + 16 * half)
        return self.s.bytes_shr(packed, 4 * (group % 2), 15), 0


class _Q5_K(_Q4_K):
    quants_at = 48

    def values(self, group: int, half: int) -> tuple[Value, int]:
        s, (pair, odd) = self.s, divmod(group, 2)
        packed = self.load(self.quants_at + 32 * pair + 16 * half)
        low = s.bytes_shr(packed, 3, 0x1E) if odd else s.and_(packed, s.splat_constant(i8x32, 15))
        # values of the odd group are twice too great, so that the fifth bits of both move by as much
        return s.or_(low, _moved(s, self.load(16 + 16 * half), 4 - 2 * pair, 16 << odd)), odd


class _Q3_K(PairedBlocks):
    scales_lifted = 8
    _MOVES: Final = ((0, 2), (0, 3), (-2, 2), (-2, 3), (0, -2), (0, -1), (-2, -2), (-2, -1))
    """For each group how far its two lower bits move up, and its third bits so that they lie above them: chosen so that
    no more than six different moves are needed."""

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
        return [s.shl(words, 8), s.and_(words, s.splat_constant(i16x16, 0xFF00))]

    def values(self, group: int, half: int) -> tuple[Value, int]:
        upper, part = divmod(group, 4)
        low_up, high_up = self._MOVES[group]
        lift = 2 * part + low_up
        low = _moved(self.s, self.load(32 + 32 * upper + 16 * half), low_up, 3 << lift)
        return self.s.or_(low, _moved(self.s, self.load(16 * half), high_up, 4 << lift)), lift


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

    def values(self, group: int, half: int) -> tuple[Value, int]:
        upper, part = divmod(group, 4)
        lift = min(2 * part, 4)  # the last part is moved down once, since products of it would not fit where it lies
        return _moved(self.s, self.load(16 + 32 * upper + 16 * half), lift - 2 * part, 3 << lift), lift


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
}
