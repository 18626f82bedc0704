"""How one block of four weight rows is taken apart in 64-byte registers (AVX-512), for one row of activations.

Owns the same bit layouts as `block_formats` and `grid_formats`, whose classes give the facts of a type. Values come 64
elements of a row at a time; the packed scales of the four rows are decoded together, each row in its own 16 bytes of a
register. How they are multiplied is `wide_dots`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from llvmlite import ir

from bloomery.cpu_experts.isa import host_features
from bloomery.cpu_experts.kernels import block_formats
from bloomery.cpu_experts.kernels.block_formats import FP4_VALUES, IQ4_VALUES, SUPER_BLOCKS
from bloomery.cpu_experts.kernels.block_parts import SPLIT_ORDER, SuperBlock, block_scales, half_floats
from bloomery.cpu_experts.kernels.grid_formats import GridBlock
from bloomery.cpu_experts.simd import Emitter, Value, f32x4, i8x16, i8x32, i8x64, i16x32, i32x16, vector

i64x8 = vector("i64", 8)
_BIT_64: Final = ir.VectorType(ir.IntType(1), 64)


class WideBlocks:
    """One block of four rows at four addresses. Class attributes and methods describe a quant type.

    The scales of a row are 16 places in `order`, eight of each pair of groups; those of the four rows lie in the four
    times 16 bytes of a register."""

    facts: ClassVar[type[SuperBlock]]
    sub_blocks: ClassVar[int] = 16
    pairs: ClassVar[tuple[tuple[int, int], tuple[int, int]]] = ((0, 1), (2, 3))  # groups whose sums are packed together
    first_lifted: ClassVar[int] = 0  # values of the first pair are taken times 2 to this power
    scales_lifted: ClassVar[int] = 0  # and all scales times 2 to this one

    def __init__(self, emitter: Emitter, addresses: Sequence[Value]) -> None:
        self.s = emitter
        self.addresses = addresses

    def values(self, row: int, group: int) -> Value:
        """i8x64: the elements `runs(group)` of a row, unsigned and below 64."""
        raise NotImplementedError

    def signed(self, row: int, group: int, activations: Value) -> Value:
        """i8x64: what multiplies `values(row, group)` instead of the activations, where those carry the signs."""
        return activations

    @classmethod
    def runs(cls, group: int) -> tuple[int, int]:
        """Where the two runs of 32 elements start that group 0..3 of 64 is made of."""
        return 64 * group, 64 * group + 32

    @classmethod
    def blocks_of(cls, pair: int) -> list[int]:
        """Sub-blocks of 16 of a pair of groups, four of the first, four of the second."""
        return [run // 16 + half for group in cls.pairs[pair] for run in cls.runs(group) for half in range(2)]

    @classmethod
    def order(cls) -> list[int]:
        """Which sub-block of 16 each of the 16 places belongs to, for types with so many."""
        return [block for pair in range(2) for block in cls.blocks_of(pair)]

    @functools.cached_property
    def floats(self) -> list[Value]:
        """f32x4 of d and, for types that have one, of dmin."""
        places = [at for at in (self.facts.d_at, self.facts.minimum_at) if at is not None]
        return [half_floats(self.s, self.addresses, at) for at in places]

    @functools.cached_property
    def scale_halves(self) -> list[Value]:
        """i16x32 of the first eight places of each row and of the last; the first only for types with 8 sub-blocks."""
        raise NotImplementedError

    @functools.cached_property
    def minimum_halves(self) -> list[Value]:
        """The same of minima; only for types with minima."""
        raise NotImplementedError

    def scales(self, row: int, pair: int) -> Value:
        """i16x32 beside the packed sums of a pair: in each 16 bytes four of the first group, four of the second."""
        blocks = self.blocks_of(pair)
        if self.sub_blocks == 8:
            half, places = 0, [block // 2 for block in blocks]
        else:
            half, places = pair, list(range(8))
        return self.s.lanes(self.scale_halves[half], [8 * row + place for place in beside_packed(places)])

    # ---- loads and bits
    def four(self, at: int) -> Value:
        """i8x64: 16 bytes of each row."""
        s = self.s
        parts = [s.load(i8x16, address, at) for address in self.addresses]
        return s.concat(s.concat(parts[0], parts[1]), s.concat(parts[2], parts[3]))

    def twice(self, row: int, at: int) -> Value:
        """i8x64: 32 bytes of a row, two times."""
        part = self.s.load(i8x32, self.addresses[row], at)
        return self.s.concat(part, part)

    def words_of(self, value: Value, shifts: Sequence[int]) -> Value:
        return self.s.lshr(self.s.as_(i32x16, value), list(shifts) * 4)

    def each(self, value: Value, mask: Sequence[int]) -> Value:
        """value & mask, the mask's four words repeated in every 16 bytes (words of i32)."""
        return self.s.and_(value, self.s.constant(i32x16, list(mask) * 4))

    def order_words(self, value: Value, words: Sequence[int]) -> Value:
        """Words in every 16 bytes rearranged."""
        lanes = [4 * part + word for part in range(4) for word in words]
        return self.s.lanes(self.s.as_(i32x16, value), lanes)

    def halves(self, value: Value, signed: bool = False) -> list[Value]:
        """i16x32 of the first eight bytes (i8x64) of each 16, and of the last; `signed` ones 256 times too great."""
        s = self.s
        found = []
        for half in range(2):
            lanes = [lane for part in range(4) for at in range(8) for lane in (16 * part + 8 * half + at, 64)]
            zero = s.zero(i8x64)
            if signed:
                lanes = [lanes[at ^ 1] for at in range(64)]
            # opaque: LLVM would rather permute bytes and widen them again for every use
            found.append(s.opaque(s.as_(i16x32, s.shuffle(value, zero, lanes))))
        return found

    def ordered(self, value: Value) -> Value:
        """Bytes of sub-blocks, 16 for each row, as `order` has them."""
        lanes = [16 * part + block for part in range(4) for block in self.order()]
        return self.s.lanes(value, lanes)


def beside_packed(places: Sequence[int]) -> list[int]:
    """For the 32 lanes of packed sums the place out of eight, four of the first group and four of the second."""
    return [places[4 * (lane // 4 % 2) + lane // 8] for lane in range(32)]


def moved_bits(s: Emitter, value: Value, low: tuple[int, int], high: tuple[int, int], width: int) -> Value:
    """In each byte: `width` bits from bit low[0] moved to bit low[1], zeros elsewhere; high in the upper 32 bytes.

    One instruction with GFNI (a product with a matrix of bits), else a shift and a mask."""
    masks = [((1 << width) - 1) << to for _, to in (low, high)]
    kept = s.constant(i8x64, [masks[0]] * 32 + [masks[1]] * 32)
    if low[0] == low[1] and high[0] == high[1]:
        return s.and_(value, kept)
    if host_features().get("gfni", False):
        matrix = [_bit_matrix(*low, width)] * 4 + [_bit_matrix(*high, width)] * 4
        table = s.as_(i8x64, s.constant(i64x8, matrix))
        zero = i8x64.ir.element(0)
        return s.call("llvm.x86.vgf2p8affineqb.512", i8x64.ir, [value, table, zero])
    down = [max(0, start - to) for start, to in (low, high)]
    up = [max(0, to - start) for start, to in (low, high)]
    words = s.as_(i64x8, value)
    if any(down):
        words = s.lshr(words, [down[0]] * 4 + [down[1]] * 4)
    if any(up):
        words = s.shl(words, [up[0]] * 4 + [up[1]] * 4)
    return s.and_(s.as_(i8x64, words), kept)


def _bit_matrix(start: int, to: int, width: int) -> int:
    """Matrix of GF2P8AFFINEQB that moves `width` bits from bit `start` to bit `to`: byte 7 - i selects result bit i."""
    matrix = 0
    for bit in range(width):
        matrix |= (1 << (start + bit)) << (8 * (7 - (to + bit)))
    return matrix


class TwoBits(WideBlocks):
    """Values of which two bits lie in 64 bytes, those of four sub-blocks in each byte: only the upper four are moved
    down, and the upper two of four are taken four times too great."""

    pairs = ((1, 3), (0, 2))
    first_lifted = 2
    quants_at: ClassVar[int]

    @classmethod
    def runs(cls, group: int) -> tuple[int, int]:
        return 32 * group, 128 + 32 * group

    @functools.cached_property
    def nibbles(self) -> list[tuple[Value, Value]]:
        """For each row i8x64 whose lower four bits are those of groups 0 and 1, of groups 2 and 3."""
        s = self.s
        quants = [s.load(i8x64, address, self.quants_at) for address in self.addresses]
        return [(row, s.as_(i8x64, s.lshr(s.as_(i16x32, row), 4))) for row in quants]

    def values(self, row: int, group: int) -> Value:
        part, upper = divmod(group, 2)
        return self.s.and_(self.nibbles[row][part], self.s.splat_constant(i8x64, 3 << 2 * upper))


class Q2_K(TwoBits):
    facts = block_formats.Q2_K
    quants_at = 16

    @functools.cached_property
    def packed(self) -> Value:
        return self.ordered(self.four(0))

    @functools.cached_property
    def scale_halves(self) -> list[Value]:
        return self.halves(self.s.and_(self.packed, self.s.splat_constant(i8x64, 15)))

    @functools.cached_property
    def minimum_halves(self) -> list[Value]:
        upper = self.s.as_(i8x64, self.s.lshr(self.s.as_(i16x32, self.packed), 4))
        return self.halves(self.s.and_(upper, self.s.splat_constant(i8x64, 15)))


class Q3_K(TwoBits):
    facts = block_formats.Q3_K
    quants_at = 32
    scales_lifted = 8

    @functools.cached_property
    def end(self) -> Value:
        """i8x64: the last 16 bytes of each row: 2 of the quants, 12 of packed scales, d."""
        return self.four(94)

    @functools.cached_property
    def floats(self) -> list[Value]:
        s = self.s
        d = s.lanes(s.as_(i16x32, self.end), [7, 15, 23, 31])
        return [s.widen(f32x4, s.as_(vector("f16", 4), d))]

    @functools.cached_property
    def scale_halves(self) -> list[Value]:
        s = self.s
        low, high = (
            s.lanes(self.end, [16 * part + lane for part in range(4) for lane in lanes])
            for lanes in ([2, 3, 4, 5, 6, 7, 8, 9] * 2, [10, 11, 12, 13] * 4)
        )
        if host_features().get("avx512vbmi", False):
            low = s.shift_out(low, [8 * (block % 8) + 4 * (block // 8) for block in self.order()] * 4)
            high = s.shift_out(high, [(8 * (block % 4) + 2 * (block // 4) - 4) % 64 for block in self.order()] * 4)
        else:
            low = self.ordered(s.as_(i8x64, self.words_of(low, [0, 0, 4, 4])))
            high = self.words_of(s.shl(s.as_(i32x16, high), [4, 2, 0, 0] * 4), [0, 0, 0, 2])
            high = self.ordered(s.as_(i8x64, high))
        low = s.and_(low, s.splat_constant(i8x64, 0x0F))
        biased = s.or_(low, s.and_(high, s.splat_constant(i8x64, 0x30)))
        return self.halves(s.sub(biased, s.splat_constant(i8x64, 32)), signed=True)

    def values(self, row: int, group: int) -> Value:
        to = 2 + 2 * (group % 2)
        return self.s.or_(
            super().values(row, group), moved_bits(self.s, self.twice(row, 0), (group, to), (4 + group, to), 1)
        )


class Q4_K(WideBlocks):
    facts: ClassVar[type[SuperBlock]] = block_formats.Q4_K
    sub_blocks = 8
    quants_at: ClassVar[int] = 16

    @functools.cached_property
    def header(self) -> Value:
        """i32x16: of each row d and dmin, then the 12 packed bytes of scales and minima."""
        return self.s.as_(i32x16, self.four(0))

    @functools.cached_property
    def floats(self) -> list[Value]:
        s = self.s
        both = s.as_(vector("f16", 8), s.lanes(self.header, [0, 4, 8, 12]))
        return [s.widen(f32x4, s.lanes(both, range(first, 8, 2))) for first in range(2)]

    @functools.cached_property
    def both(self) -> list[Value]:
        """i16x32 twice: of each row 8 scales, and 8 minima."""
        s = self.s
        low = s.lshr(self.order_words(self.header, [1, 3, 2, 3]), [0, 0, 0, 4] * 4)
        low = self.each(low, [0x3F3F3F3F, 0x0F0F0F0F] * 2)
        high = s.lshr(self.order_words(self.header, [1, 1, 2, 2]), [0, 2, 0, 2] * 4)
        high = self.each(high, [0, 0x30303030] * 2)
        return self.halves(s.as_(i8x64, s.or_(low, high)))

    @functools.cached_property
    def scale_halves(self) -> list[Value]:
        return self.both[:1]

    @functools.cached_property
    def minimum_halves(self) -> list[Value]:
        return self.both[1:]

    @classmethod
    def runs(cls, group: int) -> tuple[int, int]:
        first = 128 * (group // 2) + 32 * (group % 2)
        return first, first + 64

    def values(self, row: int, group: int) -> Value:
        packed = self.s.load(i8x64, self.addresses[row], self.quants_at + 64 * (group // 2))
        place = (4 * (group % 2), 0)
        return moved_bits(self.s, packed, place, place, 4)


class Q5_K(Q4_K):
    facts = block_formats.Q5_K
    quants_at = 48

    def values(self, row: int, group: int) -> Value:
        first, second = (start // 32 for start in self.runs(group))
        high = moved_bits(self.s, self.twice(row, 16), (first, 4), (second, 4), 1)
        return self.s.or_(super().values(row, group), high)


class Q6_K(WideBlocks):
    facts = block_formats.Q6_K

    @functools.cached_property
    def scale_halves(self) -> list[Value]:
        return [self.s.ashr(half, 8) for half in self.halves(self.four(192), signed=True)]

    def values(self, row: int, group: int) -> Value:
        half, pair = divmod(group, 2)
        low = moved_bits(self.s, self.s.load(i8x64, self.addresses[row], 64 * half), (4 * pair, 0), (4 * pair, 0), 4)
        high = self.twice(row, 128 + 32 * half)
        return self.s.or_(low, moved_bits(self.s, high, (4 * pair, 4), (4 * pair + 2, 4), 2))


class WideGrid(WideBlocks):
    """Types of `grid_formats.GridBlock`: `values` are magnitudes, `signed` moves the signs to the activations."""

    facts: ClassVar[type[GridBlock]]

    @functools.cached_property
    def rows(self) -> list[GridBlock]:
        return [self.facts(self.s, address) for address in self.addresses]

    @functools.cached_property
    def floats(self) -> list[Value]:
        return [block_scales(self.s, self.facts, self.addresses)]

    def scales(self, row: int, pair: int) -> Value:
        places = [SPLIT_ORDER.index(block) for block in self.blocks_of(pair)]
        return self.s.lanes(self.rows[row].scales, beside_packed(places))

    def values(self, row: int, group: int) -> Value:
        return self.s.concat(*(self.rows[row].magnitudes(2 * group + half) for half in range(2)))

    def signed(self, row: int, group: int, activations: Value) -> Value:
        s = self.s
        bits = s.lane(s.as_(vector("i64", 4), self.rows[row].signs), group)
        negative = s.b.bitcast(bits, _BIT_64)
        return s.b.select(negative, s.sub(s.zero(i8x64), activations), activations)


def _wide_grid(kind: type[GridBlock]) -> type[WideGrid]:
    return type(kind.__name__, (WideGrid,), {"facts": kind})


WIDE_BLOCKS: Final[dict[str, type[WideBlocks]]] = {kind.__name__: kind for kind in (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)} | {
    name: _wide_grid(kind) for name, kind in SUPER_BLOCKS.items() if issubclass(kind, GridBlock)
}


@dataclass(frozen=True)
class Nibbles:
    """A block of 32 elements whose lower four bits are packed in 16 bytes: where they lie, where the fifth bits, and
    what a nibble stands for if not for itself."""

    quants_at: int
    fifth_at: int | None = None
    table: Sequence[int] | None = None


NIBBLE_BLOCKS: Final = {
    "Q4_0": Nibbles(2),
    "Q4_1": Nibbles(4),
    "Q5_0": Nibbles(6, fifth_at=2),
    "Q5_1": Nibbles(8, fifth_at=4),
    "IQ4_NL": Nibbles(2, table=IQ4_VALUES),
    "MXFP4": Nibbles(1, table=FP4_VALUES),
}
