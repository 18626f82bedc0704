"""Products of a panel of weight rows with several rows of activations, in the canonical order of `block_dots`.

A panel is PANEL_VECTORS vectors of weight rows, lane = row, each block decoded once (`panel_formats`) into scratch that
stays in the second-level cache. Activations lie as they were quantised, row after row: four of their bytes are spread
over all lanes and multiplied with four bytes of every weight row, so an accumulator holds one output of each row, no
sum ever crosses lanes, and the float steps of the canonical order cost one instruction for a vector of rows. Exact
integer sums make the result equal to that of `block_dots` bit for bit.

Layout of one decoded block: words of values (4 elements of each row), words of scales, words of minima or scales in
pairs (i16) that meet the pairs of activation sums, then `d`, then `dmin` or `m`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from numba import types

from bloomery.cpu_experts.isa import AVX512VNNI, at_least
from bloomery.cpu_experts.kernels.block_dots import prefetch_panel
from bloomery.cpu_experts.kernels.block_formats import SUPER_BLOCKS
from bloomery.cpu_experts.kernels.block_parts import SPLIT_ORDER, block_scales, half_floats
from bloomery.cpu_experts.kernels.layouts import PANEL_VECTORS, PLANE_BYTES
from bloomery.cpu_experts.kernels.panel_formats import PANELS, Panel
from bloomery.cpu_experts.simd import Emitter, Value, emits, vector

_INT: Final = types.int64
Values: TypeAlias = list[Value]
_BIAS: Final = 128  # makes a signed byte unsigned


@dataclass(frozen=True)
class Shape:
    """Sizes of a quant type's decoded block under an ISA; offsets and bytes."""

    vnni: bool
    panel: type[Panel]

    @property
    def lanes(self) -> int:
        return 16 if self.vnni else 8

    @property
    def rows(self) -> int:
        """Weight rows of a panel."""
        return self.lanes * PANEL_VECTORS

    @property
    def line(self) -> int:
        """Bytes of one word of each row."""
        return 4 * self.rows

    @property
    def elements(self) -> int:
        return self.panel.facts.elements

    @property
    def scales(self) -> int:
        return self.elements // self.panel.scaled if self.panel.scaled else 0

    @property
    def biased(self) -> bool:
        """Whether signed values are stored with _BIAS added, because vpdpbusd takes unsigned ones."""
        return self.vnni and self.panel.facts.signed

    @property
    def offset(self) -> int:
        return self.panel.facts.offset + (_BIAS if self.biased else 0)

    @property
    def pairs(self) -> int:
        """Words of pairs: 16 minima, or 16 scales where values have an offset."""
        return 8 if self.scales and (self.offset or self.panel.facts.minimum_at is not None) else 0

    @property
    def scales_at(self) -> int:
        return self.elements // 4 * self.line

    @property
    def pairs_at(self) -> int:
        return self.scales_at + self.scales * self.line

    @property
    def d_at(self) -> int:
        return self.pairs_at + self.pairs * self.line

    @property
    def minimum_at(self) -> int:
        return self.d_at + self.line

    @property
    def nbytes(self) -> int:
        return self.minimum_at + (self.line if self.panel.facts.minimum_at is not None else 0)


def panel_shape(name: str) -> Shape:
    return Shape(at_least(AVX512VNNI), PANELS[name])


def unpack_panel(name: str) -> Any:
    """Numba function (first row's block, bytes of a row, rows that exist, tile): decodes one block of a panel's rows.

    Rows past the existing ones repeat the last of them."""
    shape = panel_shape(name)

    @emits(types.void, _INT, _INT, _INT, _INT)
    def unpack(s: Emitter, block: Value, row_bytes: Value, rows: Value, tile: Value) -> None:
        last = s.sub(rows, rows.type(1))

        def one_vector(index: Value, carried: list[Value]) -> list[Value]:
            addresses = []
            for lane in range(shape.lanes):
                row = s.add(s.mul(index, index.type(shape.lanes)), index.type(lane))
                row = s.b.select(s.b.icmp_signed("<", row, last), row, last)
                addresses.append(s.add(block, s.mul(row, row_bytes)))
            _unpack_vector(s, shape, addresses, row_bytes, s.add(tile, s.mul(index, index.type(4 * shape.lanes))))
            return []

        s.loop(rows.type(PANEL_VECTORS), [], one_vector)

    return unpack


def _unpack_vector(s: Emitter, shape: Shape, addresses: Sequence[Value], row_bytes: Value, tile: Value) -> None:
    facts = shape.panel.facts
    prefetch_panel(s, facts, addresses, row_bytes)
    panel = shape.panel(s, addresses)
    bias = s.splat_constant(panel.word, 0x80808080)
    for step, value in enumerate(panel.values()):
        s.store(s.xor(value, bias) if shape.biased else value, tile, step * shape.line)
    scales = panel.scales()
    for index, scale in enumerate(scales):
        word = scale if shape.vnni else _pair(s, panel, scale, scale)
        s.store(word, tile, shape.scales_at + index * shape.line)
    if shape.pairs:
        lanes = panel.minima() if facts.minimum_at is not None else scales
        sixteen = lanes if len(lanes) == 16 else [lane for lane in lanes for _ in range(2)]
        for index in range(8):
            pair = _pair(s, panel, *(sixteen[SPLIT_ORDER[2 * index + odd]] for odd in range(2)))
            s.store(pair, tile, shape.pairs_at + index * shape.line)
    s.store(block_scales(s, facts, addresses), tile, shape.d_at)
    if facts.minimum_at is not None:
        s.store(half_floats(s, addresses, facts.minimum_at), tile, shape.minimum_at)


def _pair(s: Emitter, panel: Panel, low: Value, high: Value) -> Value:
    """Words of two i16."""
    return s.or_(s.and_(low, s.splat_constant(panel.word, 0xFFFF)), s.shl(high, 16))


class _Dots:
    """The integer work of one block for `count` rows of activations: totals[row][vector]."""

    def __init__(self, s: Emitter, shape: Shape, tile: Value, x: Sequence[Value]) -> None:
        self.s, self.shape, self.tile, self.x = s, shape, tile, x
        self.word = vector("i32", shape.lanes)

    def line(self, at: Value, offset: int) -> list[Value]:
        """One word of each weight row: a vector for each of PANEL_VECTORS."""
        return [self.s.load(self.word, at, offset + 4 * self.shape.lanes * v) for v in range(PANEL_VECTORS)]

    def spread(self, address: Value, offset: int) -> Value:
        """Four bytes of an activation row in every lane."""
        return self.s.splat(self.word, self.s.load_scalar("i32", address, offset))

    def sums(
        self, tile: Value, x: Sequence[Value], steps: int, scales: Value | None, totals: list[Value]
    ) -> list[Value]:
        """totals + scale * (values . activations) over `steps` words."""
        return (self._vnni if self.shape.vnni else self._avx2)(tile, x, steps, scales, totals)

    def _vnni(
        self, tile: Value, x: Sequence[Value], steps: int, scales: Value | None, totals: list[Value]
    ) -> list[Value]:
        s = self.s
        dots = [s.zero(self.word)] * len(totals)
        for step in range(steps):
            weights = self.line(tile, step * self.shape.line)
            for row, address in enumerate(x):
                four = self.spread(address, 4 * step)
                for v, weight in enumerate(weights):
                    at = row * PANEL_VECTORS + v
                    dots[at] = s.add_products_u8(dots[at], weight, four)
        if scales is None:
            return [s.add(total, dot) for total, dot in zip(totals, dots)]
        factors = self.line(scales, 0) * len(x)
        return [s.add(total, s.mul(dot, factor)) for total, dot, factor in zip(totals, dots, factors)]

    def _avx2(
        self, tile: Value, x: Sequence[Value], steps: int, scales: Value | None, totals: list[Value]
    ) -> list[Value]:
        """Pair products gather in i16 as long as they fit, then vpmaddwd applies the scale and widens."""
        s, shape = self.s, self.shape
        wide, narrow = vector("i8", 4 * shape.lanes), vector("i16", 2 * shape.lanes)
        greatest = 127 if shape.panel.facts.signed else shape.panel.greatest
        together = max(1, 32767 // (2 * 127 * greatest))
        factors = [s.splat_constant(narrow, 1)] * PANEL_VECTORS
        if scales is not None:
            factors = [s.as_(narrow, word) for word in self.line(scales, 0)]
        for first in range(0, steps, together):
            gathered: list[Value] = [None] * len(totals)
            for step in range(first, min(first + together, steps)):
                weights = [s.as_(wide, word) for word in self.line(tile, step * shape.line)]
                for row, address in enumerate(x):
                    four = s.as_(wide, self.spread(address, 4 * step))
                    for v, weight in enumerate(weights):
                        at = row * PANEL_VECTORS + v
                        if shape.panel.facts.signed:
                            products = s.pair_products_u8(s.with_sign(weight, weight), s.with_sign(four, weight))
                        else:
                            products = s.pair_products_u8(weight, four)
                        gathered[at] = products if gathered[at] is None else s.add(gathered[at], products)
            totals = [
                s.add(total, s.pair_products_i16(part, factors[at % PANEL_VECTORS]))
                for at, (total, part) in enumerate(zip(totals, gathered))
            ]
        return totals

    def pair_sums(self, sums: Value) -> list[Value]:
        """For each vector: the sum over 16 lanes of minima (or scales) times activation sums."""
        s = self.s
        totals = [s.zero(self.word)] * PANEL_VECTORS
        narrow = vector("i16", 2 * self.shape.lanes)
        for index in range(self.shape.pairs):
            two = self.spread(sums, 4 * index)
            for v, pair in enumerate(self.line(self.tile, self.shape.pairs_at + index * self.shape.line)):
                if self.shape.vnni:
                    totals[v] = s.add_products_i16(totals[v], pair, two)
                else:
                    totals[v] = s.add(totals[v], s.pair_products_i16(s.as_(narrow, pair), s.as_(narrow, two)))
        return totals


def _block(s: Emitter, shape: Shape, tile: Value, rows: Sequence[Sequence[Value]], acc: list[Value]) -> list[Value]:
    """One block of the canonical order; a row is the addresses of its values, d and sums; acc[row * V + vector]."""
    facts, single = shape.panel.facts, vector("f32", shape.lanes)
    values = [row[0] for row in rows]
    dots = _Dots(s, shape, tile, values)
    totals = [s.zero(dots.word)] * len(acc)
    if shape.scales:
        steps = shape.panel.scaled // 4

        def scaled(index: Value, totals: list[Value]) -> list[Value]:
            x = [s.add(address, s.mul(index, index.type(4 * steps))) for address in values]
            at = s.add(tile, s.mul(index, index.type(steps * shape.line)))
            factor = s.add(tile, s.mul(index, index.type(shape.line)))
            return dots.sums(at, x, steps, s.add(factor, factor.type(shape.scales_at)), totals)

        totals = s.loop(tile.type(shape.scales), totals, scaled)
    else:
        totals = dots.sums(tile, values, shape.elements // 4, None, totals)
    scales = [s.as_(single, word) for word in dots.line(tile, shape.d_at)]
    least = [s.as_(single, word) for word in dots.line(tile, shape.minimum_at)] if facts.minimum_at is not None else []
    out: list[Value] = []
    for row, (_, x_d, x_sums) in enumerate(rows):
        dx = s.splat(single, s.load_scalar("f32", x_d))
        terms = dots.pair_sums(x_sums) if shape.pairs else []
        for v in range(PANEL_VECTORS):
            total = totals[row * PANEL_VECTORS + v]
            if shape.offset:
                lift = terms[v] if terms else dots.spread(x_sums, 0)
                total = s.sub(total, s.shl(lift, shape.offset.bit_length() - 1))
            value = s.fma(s.fmul(scales[v], dx), s.to_float(single, total), acc[row * PANEL_VECTORS + v])
            if least and terms:
                value = s.fma(s.fneg(s.fmul(least[v], dx)), s.to_float(single, terms[v]), value)
            elif least:
                value = s.fma(least[v], s.splat(single, s.load_scalar("f32", x_sums, 4)), value)
            out.append(value)
    return out


def panel_product(name: str, count: int) -> Callable[..., None]:
    """Numba function (tile, blocks, rows that exist, d plane, sums plane, then `count` addresses of activation rows and
    `count` of results): results of the panel's rows, consecutive floats."""
    shape = panel_shape(name)
    steps = PLANE_BYTES["Q8_K" if name in SUPER_BLOCKS else "Q8_0"]

    @emits(types.void, *[_INT] * (5 + 2 * count))
    def product(s: Emitter, tile: Value, blocks: Value, existing: Value, *rest: Value) -> None:
        planes, x, out = (None, *rest[:2]), rest[2 : 2 + count], rest[2 + count :]
        single = vector("f32", shape.lanes)

        def one_block(index: Value, acc: list[Value]) -> list[Value]:
            offsets = []
            for plane, step in zip(planes, steps):
                offset = s.mul(index, index.type(step))
                offsets.append(offset if plane is None else s.add(offset, plane))
            rows = [[s.add(address, offset) for offset in offsets] for address in x]
            at = s.add(tile, s.mul(index, index.type(shape.nbytes)))
            return _block(s, shape, at, rows, acc)

        acc = s.loop(blocks, [s.zero(single)] * (count * PANEL_VECTORS), one_block)
        for row, address in enumerate(out):
            for v in range(PANEL_VECTORS):
                first = v * shape.lanes
                left = s.sub(existing, existing.type(first))
                at = s.add(address, address.type(4 * first))
                s.store_first(single, acc[row * PANEL_VECTORS + v], at, left)

    made: Callable[..., None] = product
    return made
