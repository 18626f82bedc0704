"""How the blocks of each quant type are taken apart when a lane is a weight row.

Owns the unpacking of one block of as many rows as a vector of i32 has lanes (16 with AVX-512, 8 with AVX2). The packed
words of the rows are transposed first; what follows is the same few shifts and masks for all rows at once, scales
included, and a word of the result holds four consecutive elements of its row. The bit layouts are those of
`block_formats` and `grid_formats`, whose classes give the facts of a type; how panels are multiplied is `panel_dots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

from bloomery.cpu_experts.kernels import block_formats, grid_formats
from bloomery.cpu_experts.kernels.block_formats import FP4_VALUES, IQ4_VALUES
from bloomery.cpu_experts.kernels.block_parts import BlockFormat
from bloomery.cpu_experts.kernels.grid_tables import gather_8, table_address
from bloomery.cpu_experts.simd import Emitter, Value, i32x4, vector


class Panel:
    """One block of `lanes` rows at the given addresses. Words are vectors of i32, lane = row."""

    facts: ClassVar[type[BlockFormat]]
    greatest: ClassVar[int] = 127  # magnitude of a value
    scaled: ClassVar[int] = 0  # elements that share an integer scale; 0: there is none

    def __init__(self, emitter: Emitter, addresses: Sequence[Value]) -> None:
        self.s = emitter
        self.addresses = addresses
        self.lanes = len(addresses)
        self.word = vector("i32", self.lanes)

    def values(self) -> Iterator[Value]:
        """The elements as unsigned (or signed, see `facts`) bytes, four in a word, in ascending order."""
        raise NotImplementedError

    def scales(self) -> list[Value]:
        """The integer scale of each `scaled` elements, one in a word."""
        return []

    def minima(self) -> list[Value]:
        """The integer minimum of each `scaled` elements, for types that have them."""
        return []

    def words(self, start: int, count: int) -> list[Value]:
        """`count` consecutive words of the packed block from byte `start`; reads nothing past the block."""
        found: list[Value] = []
        while len(found) < count:
            at = start + 4 * len(found)
            back = max(0, at + 16 - self.facts.nbytes + 3) // 4  # words that the load has to start earlier
            found += self._four_words(at - 4 * back)[back:]
        return found[:count]

    def _four_words(self, at: int) -> list[Value]:
        """Words of 16 bytes of each row: rows i, i+4, ... side by side, then transposes of 4 by 4 in every 16 bytes."""
        s, parts = self.s, self.lanes // 4
        loads = [s.load(i32x4, address, at) for address in self.addresses]
        quads = []
        for first in range(4):
            quad = loads[first::4]
            while len(quad) > 1:
                quad = [s.concat(*quad[index : index + 2]) for index in range(0, len(quad), 2)]
            quads.append(quad[0])

        def weave(x: Value, y: Value, lanes: Sequence[int]) -> Value:
            """`lanes` of each 16 bytes: 0..3 of x, 4..7 of y."""
            chosen = [4 * part + lane % 4 + self.lanes * (lane // 4) for part in range(parts) for lane in lanes]
            return s.shuffle(x, y, chosen)

        low, high = (0, 4, 1, 5), (2, 6, 3, 7)
        firsts, lasts = (0, 1, 4, 5), (2, 3, 6, 7)
        words = []
        for half in (low, high):
            even, odd = weave(quads[0], quads[1], half), weave(quads[2], quads[3], half)
            words += [weave(even, odd, firsts), weave(even, odd, lasts)]
        return words

    def part(self, word: Value, shift: int, mask: int) -> Value:
        """(word >> shift) & mask, the mask repeated in each byte if it fits one."""
        s = self.s
        spread = mask * 0x01010101 if mask < 256 else mask
        return s.and_(s.lshr(word, shift) if shift else word, s.splat_constant(self.word, spread))

    def byte(self, word: Value, index: int, mask: int = 255, shift: int = 0) -> Value:
        """((byte `index` of each word) >> shift) & mask."""
        s = self.s
        at = 8 * index + shift
        return s.and_(s.lshr(word, at) if at else word, s.splat_constant(self.word, mask))

    def signed_byte(self, word: Value, index: int) -> Value:
        return self.s.ashr(self.s.shl(word, 24 - 8 * index), 24)

    def nibbles(self, words: Sequence[Value]) -> Iterator[Value]:
        """The lower nibbles of all words, then the upper ones."""
        for shift in (0, 4):
            for word in words:
                yield self.part(word, shift, 15)

    def lookup(self, codes: Value, table: Sequence[int]) -> Value:
        """table[code] for each byte of each word; 16 entries."""
        s = self.s
        kind = vector("i8", 4 * self.lanes)
        entries = s.constant(kind, list(table) * (self.lanes // 4))
        return s.as_(self.word, s.table(entries, s.as_(kind, codes)))


class Q2_K(Panel):
    facts = block_formats.Q2_K
    greatest = 3
    scaled = 16

    def values(self) -> Iterator[Value]:
        for half in range(2):
            words = self.words(16 + 32 * half, 8)
            for part in range(4):
                for word in words:
                    yield self.part(word, 2 * part, 3)

    def scales(self) -> list[Value]:
        return [self.byte(word, index, 15) for word in self.words(0, 4) for index in range(4)]

    def minima(self) -> list[Value]:
        return [self.byte(word, index, 15, 4) for word in self.words(0, 4) for index in range(4)]


class Q3_K(Panel):
    facts = block_formats.Q3_K
    greatest = 7
    scaled = 16

    def values(self) -> Iterator[Value]:
        mask = self.words(0, 8)
        for half in range(2):
            low = self.words(32 + 32 * half, 8)
            for part in range(4):
                bit = 4 * half + part
                for word, bits in zip(low, mask):
                    high = self.s.shl(self.part(bits, bit, 1), 2)
                    yield self.s.or_(self.part(word, 2 * part, 3), high)

    def scales(self) -> list[Value]:
        s = self.s
        words = self.words(96, 3)
        offset = s.splat_constant(self.word, 32)
        found = []
        for index in range(16):
            low = self.byte(words[index // 4 % 2], index % 4, 15, 4 * (index // 8))
            high = self.byte(words[2], index % 4, 3, 2 * (index // 4))
            found.append(s.sub(s.or_(low, s.shl(high, 4)), offset))
        return found


class Q4_K(Panel):
    facts: ClassVar[type[BlockFormat]] = block_formats.Q4_K
    greatest = 15
    scaled = 32

    def values(self) -> Iterator[Value]:
        for group in range(4):
            yield from self.nibbles(self.words(16 + 32 * group, 8))

    def _six_bits(self, first: int) -> list[Value]:
        """Scales (first = 0) or minima (1): four with 6 bits in a word, four with their upper 2 bits there."""
        s = self.s
        words = self.words(4, 3)
        low = [self.byte(words[first], index, 63) for index in range(4)]
        for index in range(4):
            nibble = self.byte(words[2], index, 15, 4 * first)
            low.append(s.or_(nibble, s.shl(self.byte(words[first], index, 3, 6), 4)))
        return low

    def scales(self) -> list[Value]:
        return self._six_bits(0)

    def minima(self) -> list[Value]:
        return self._six_bits(1)


class Q5_K(Q4_K):
    facts = block_formats.Q5_K
    greatest = 31

    def values(self) -> Iterator[Value]:
        bits = self.words(16, 8)
        for group in range(4):
            low = list(self.nibbles(self.words(48 + 32 * group, 8)))
            for index, nibble in enumerate(low):
                high = self.part(bits[index % 8], 2 * group + index // 8, 1)
                yield self.s.or_(nibble, self.s.shl(high, 4))


class Q6_K(Panel):
    facts = block_formats.Q6_K
    greatest = 63
    scaled = 16

    def values(self) -> Iterator[Value]:
        for half in range(2):
            bits = self.words(128 + 32 * half, 8)
            low = self.words(64 * half, 16)
            for part in range(4):
                for index in range(8):
                    nibble = self.part(low[index + 8 * (part % 2)], 4 * (part // 2), 15)
                    high = self.s.shl(self.part(bits[index], 2 * part, 3), 4)
                    yield self.s.or_(nibble, high)

    def scales(self) -> list[Value]:
        return [self.signed_byte(word, index) for word in self.words(192, 4) for index in range(4)]


class IQ4_XS(Panel):
    facts = block_formats.IQ4_XS
    scaled = 32

    def values(self) -> Iterator[Value]:
        for group in range(8):
            for codes in self.nibbles(self.words(8 + 16 * group, 4)):
                yield self.lookup(codes, IQ4_VALUES)

    def scales(self) -> list[Value]:
        s = self.s
        high, low = self.words(0, 2)
        offset = s.splat_constant(self.word, 32)
        found = []
        for index in range(8):
            biased = s.or_(self.byte(low, 0, 15, 4 * index), s.shl(self.byte(high, 2, 3, 2 * index), 4))
            found.append(s.sub(biased, offset))
        return found


class GridPanel(Panel):
    """Types whose codes stand for groups of magnitudes; every element has a bit for its sign."""

    together: ClassVar[int] = 8  # elements of a code

    def codes(self) -> Iterator[Value]:
        """Words of codes in ascending order."""
        raise NotImplementedError

    def signs(self) -> Iterator[Value]:
        """Words whose lowest 8 bits are the signs of 8 elements."""
        raise NotImplementedError

    def values(self) -> Iterator[Value]:
        s = self.s
        table = table_address(s, self.facts.__name__)
        spread = s.splat_constant(self.word, 0x00204081)  # a copy of four bits in each byte, bit i lowest in byte i
        signs = self.signs()
        for index, word in enumerate(self._fours()):
            if index % 2 == 0:
                eight = next(signs)
            magnitudes = self._gather(table, word)
            negative = self.part(s.mul(self.byte(eight, 0, 15, 4 * (index % 2)), spread), 0, 1)
            flipped = s.xor(magnitudes, s.mul(negative, s.splat_constant(self.word, 255)))
            yield s.add(flipped, negative)  # no magnitude is 0, so that no byte carries

    def _fours(self) -> Iterator[Value]:
        """Where in the table the words of four elements lie."""
        s = self.s
        for code in self.codes():
            if self.together == 4:
                yield code
            else:
                yield s.shl(code, 1)
                yield s.or_(s.shl(code, 1), s.splat_constant(self.word, 1))

    def _gather(self, table: Value, indices: Value) -> Value:
        s = self.s
        parts = [gather_8(s, table, s.lanes(indices, range(at, at + 8))) for at in range(0, self.lanes, 8)]
        return parts[0] if len(parts) == 1 else s.concat(*parts)

    def _even(self, seven: Value) -> Value:
        """7 bits with an eighth that makes the number of set bits even."""
        s = self.s
        folded = s.xor(seven, s.lshr(seven, 4))
        folded = s.xor(folded, s.lshr(folded, 2))
        odd = s.and_(s.xor(folded, s.lshr(folded, 1)), s.splat_constant(self.word, 1))
        return s.or_(seven, s.shl(odd, 7))

    def _odd(self, code: Value) -> Value:
        """2 code + 1."""
        return self.s.or_(self.s.shl(code, 1), self.s.splat_constant(self.word, 1))

    def _nibble_scales(self, at: int, count: int) -> list[Value]:
        words = self.words(at, count // 8)
        return [self._odd(self.byte(words[index // 8], 0, 15, 4 * (index % 8))) for index in range(count)]


class IQ2_XXS(GridPanel):
    facts = grid_formats.IQ2_XXS
    scaled = 32

    def codes(self) -> Iterator[Value]:
        for word in self.words(2, 16)[0::2]:
            yield from (self.byte(word, index) for index in range(4))

    def signs(self) -> Iterator[Value]:
        for word in self.words(2, 16)[1::2]:
            yield from (self._even(self.byte(word, 0, 127, 7 * index)) for index in range(4))

    def scales(self) -> list[Value]:
        return [self._odd(self.s.lshr(word, 28)) for word in self.words(2, 16)[1::2]]


class IQ2_XS(GridPanel):
    facts = grid_formats.IQ2_XS
    scaled = 16

    def codes(self) -> Iterator[Value]:
        for word in self.words(2, 16):
            yield from (self.byte(word, 0, 511, 16 * half) for half in range(2))

    def signs(self) -> Iterator[Value]:
        for word in self.words(2, 16):
            yield from (self._even(self.byte(word, 0, 127, 16 * half + 9)) for half in range(2))

    def scales(self) -> list[Value]:
        return self._nibble_scales(66, 16)


class IQ2_S(GridPanel):
    facts = grid_formats.IQ2_S
    scaled = 16

    def codes(self) -> Iterator[Value]:
        low, high = self.words(2, 8), self.words(66, 2)
        for index in range(32):
            upper = self.byte(high[index // 16], 0, 3, 2 * (index % 16))
            yield self.s.or_(self.byte(low[index // 4], index % 4), self.s.shl(upper, 8))

    def signs(self) -> Iterator[Value]:
        for word in self.words(34, 8):
            yield from (self.byte(word, index) for index in range(4))

    def scales(self) -> list[Value]:
        return self._nibble_scales(74, 16)


class IQ3_XXS(GridPanel):
    facts = grid_formats.IQ3_XXS
    scaled = 32
    together = 4

    def codes(self) -> Iterator[Value]:
        for word in self.words(2, 16):
            yield from (self.byte(word, index) for index in range(4))

    def signs(self) -> Iterator[Value]:
        for word in self.words(66, 8):
            yield from (self._even(self.byte(word, 0, 127, 7 * index)) for index in range(4))

    def scales(self) -> list[Value]:
        return [self._odd(self.s.lshr(word, 28)) for word in self.words(66, 8)]


class IQ3_S(GridPanel):
    facts = grid_formats.IQ3_S
    scaled = 32
    together = 4

    def codes(self) -> Iterator[Value]:
        low, high = self.words(2, 16), self.words(66, 2)
        for index in range(64):
            ninth = self.byte(high[index // 32], 0, 1, index % 32)
            yield self.s.or_(self.byte(low[index // 4], index % 4), self.s.shl(ninth, 8))

    def signs(self) -> Iterator[Value]:
        for word in self.words(74, 8):
            yield from (self.byte(word, index) for index in range(4))

    def scales(self) -> list[Value]:
        return self._nibble_scales(106, 8)


class Q4_0(Panel):
    facts: ClassVar[type[BlockFormat]] = block_formats.Q4_0
    greatest = 15
    quants_at: ClassVar[int] = 2

    def values(self) -> Iterator[Value]:
        yield from self.nibbles(self.words(self.quants_at, 4))


class Q4_1(Q4_0):
    facts = block_formats.Q4_1
    quants_at = 4


class Q5_0(Q4_0):
    facts: ClassVar[type[BlockFormat]] = block_formats.Q5_0
    greatest = 31
    quants_at: ClassVar[int] = 6

    def values(self) -> Iterator[Value]:
        s = self.s
        bits = self.words(self.quants_at - 4, 1)[0]
        spread = s.splat_constant(self.word, 0x00204081)  # a copy of four bits in each byte, bit i lowest in byte i
        for index, nibble in enumerate(super().values()):
            four = self.byte(bits, 0, 15, 4 * index)
            yield s.or_(nibble, s.shl(self.part(s.mul(four, spread), 0, 1), 4))


class Q5_1(Q5_0):
    facts = block_formats.Q5_1
    quants_at = 8


class Q8_0(Panel):
    facts = block_formats.Q8_0

    def values(self) -> Iterator[Value]:
        yield from self.words(2, 8)


class IQ4_NL(Panel):
    facts = block_formats.IQ4_NL

    def values(self) -> Iterator[Value]:
        for codes in self.nibbles(self.words(2, 4)):
            yield self.lookup(codes, IQ4_VALUES)


class MXFP4(Panel):
    facts = block_formats.MXFP4

    def values(self) -> Iterator[Value]:
        for codes in self.nibbles(self.words(1, 4)):
            yield self.lookup(codes, FP4_VALUES)


PANELS: Final[dict[str, type[Panel]]] = {
    kind.__name__: kind
    for kind in (
        *(Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_XS),
        *(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4),
    )
}
