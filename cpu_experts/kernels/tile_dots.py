"""Products of a panel of weight rows with many rows of activations in tile registers (AMX), in `block_dots`' order.

A unit is a super-block or some consecutive small blocks of a panel's 32 weight rows. It is decoded once
(`panel_formats`; lane = row, the layout that a product's second operand has) with the integer scales multiplied in,
then meets the activations 16 rows at a time. value * scale is exact in a byte for some types; for others it is cut in a
low byte (unsigned) and a high one (signed), whose integer sums are put together before the one conversion to f32 that
the canonical order has. So results equal those of `block_dots` bit for bit.

Sums of minima times activation sums are integers below 2^22, which products of bf16 form exactly: a minimum has at
most 8 bits, a sum is cut in a multiple of 64 and the rest.

Packed activations: for TILE_TOKENS rows and a block, bytes as tiles of 64 (super-blocks) or 32 elements, then `d` of
each row, then for types with minima the sums: two bf16 for each of 16, or the f32 of Q8_1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from numba import types

from bloomery.cpu_experts import tiles
from bloomery.cpu_experts.kernels.block_dots import prefetch_panel
from bloomery.cpu_experts.kernels.block_parts import SPLIT_ORDER, block_scales, half_floats
from bloomery.cpu_experts.kernels.layouts import (
    PACKED_BLOCK,
    PANEL_VECTORS,
    PLANE_BYTES,
    TILE_SUMS,
    TILE_TOKENS,
    TILE_WEIGHTS,
)
from bloomery.cpu_experts.kernels.panel_formats import PANELS, Panel
from bloomery.cpu_experts.simd import Emitter, Value, emits, vector

_INT: Final = types.int64
LANES: Final = 16
PANEL_ROWS: Final = LANES * PANEL_VECTORS
_LINE: Final = 4 * PANEL_ROWS  # bytes of a word of each weight row
_SUMS_TILE: Final = 1024
_i32, _f32, _i16, _i8 = vector("i32", 16), vector("f32", 16), vector("i16", 32), vector("i8", 64)
SMALL_UNIT: Final = 2  # small blocks whose sums are taken out of the tiles together

# value * scale fits a signed byte: 3 * 15; -(value * scale) does: the products are -124..128.
_ONE_BYTE: Final = ("Q2_K",)
_ONE_BYTE_NEGATED: Final = ("Q3_K",)


@dataclass(frozen=True)
class TileShape:
    """Sizes and places of a decoded unit of a quant type; offsets and bytes."""

    panel: type[Panel]
    blocks: int = 1

    @property
    def super(self) -> bool:
        return self.panel.facts.elements == 256

    @property
    def negated(self) -> bool:
        return self.panel.__name__ in _ONE_BYTE_NEGATED

    @property
    def halves(self) -> int:
        """Bytes that a product of value and scale takes."""
        fits = not self.panel.scaled or self.panel.__name__ in _ONE_BYTE or self.negated
        return 1 if fits else 2

    @property
    def minima(self) -> bool:
        return self.panel.facts.minimum_at is not None

    @property
    def steps(self) -> int:
        """Products along a block."""
        return 4 if self.super else 1

    @property
    def lines(self) -> int:
        """Words of a block of one weight row."""
        return self.panel.facts.elements // 4

    @property
    def high_at(self) -> int:
        return self.lines * _LINE

    @property
    def minima_at(self) -> int:
        return self.halves * self.lines * _LINE

    @property
    def d_at(self) -> int:
        return self.minima_at + (16 * _LINE if self.super and self.minima else 0)

    @property
    def minimum_at(self) -> int:
        return self.d_at + _LINE

    @property
    def block_bytes(self) -> int:
        """Of one decoded block."""
        return self.minimum_at + (_LINE if self.minima else 0)

    @property
    def kind(self) -> str:
        return "Q8_K" if self.super else "Q8_0"

    @property
    def packed_d(self) -> int:
        return TILE_TOKENS * self.panel.facts.elements

    @property
    def packed_sums(self) -> int:
        return self.packed_d + 4 * TILE_TOKENS

    @property
    def packed_bytes(self) -> int:
        """Of TILE_TOKENS rows of activations, one block."""
        return PACKED_BLOCK[self.kind]


def tile_shape(name: str) -> TileShape:
    shape = TileShape(PANELS[name], 1 if PANELS[name].facts.elements == 256 else SMALL_UNIT)
    assert shape.blocks * shape.block_bytes <= TILE_WEIGHTS
    assert _sums_at(shape, shape.blocks, 0, 0) <= TILE_SUMS // 2
    return shape


# ---- weights
def unpack_unit(name: str) -> Any:
    """Numba function (first row's block, bytes of a row, rows that exist, out): decodes one block of a panel's rows."""
    shape = tile_shape(name)

    @emits(types.void, _INT, _INT, _INT, _INT)
    def unpack(s: Emitter, block: Value, row_bytes: Value, rows: Value, out: Value) -> None:
        last = s.sub(rows, rows.type(1))

        def one_vector(index: Value, carried: list[Value]) -> list[Value]:
            addresses = []
            for lane in range(LANES):
                row = s.add(s.mul(index, index.type(LANES)), index.type(lane))
                row = s.b.select(s.b.icmp_signed("<", row, last), row, last)
                addresses.append(s.add(block, s.mul(row, row_bytes)))
            _unpack_vector(s, shape, addresses, row_bytes, s.add(out, s.mul(index, index.type(4 * LANES))))
            return []

        s.loop(rows.type(PANEL_VECTORS), [], one_vector)

    return unpack


def _unpack_vector(s: Emitter, shape: TileShape, addresses: Sequence[Value], row_bytes: Value, out: Value) -> None:
    facts = shape.panel.facts
    prefetch_panel(s, facts, addresses, row_bytes)
    panel = shape.panel(s, addresses)
    for step, products in enumerate(_products(s, shape, panel)):
        for half, product in enumerate(products):
            s.store(product, out, half * shape.high_at + step * _LINE)
    s.store(block_scales(s, facts, addresses), out, shape.d_at)
    if not shape.minima:
        return
    s.store(half_floats(s, addresses, facts.minimum_at or 0), out, shape.minimum_at)
    if shape.super:
        lanes = panel.minima()
        sixteen = lanes if len(lanes) == 16 else [lane for lane in lanes for _ in range(2)]
        for index, place in enumerate(SPLIT_ORDER):
            bits = s.as_(_i32, s.to_float(_f32, sixteen[place]))  # the lower half is 0: at most 8 bits count
            s.store(s.or_(bits, s.lshr(bits, 16)), out, shape.minima_at + index * _LINE)


def _products(s: Emitter, shape: TileShape, panel: Panel) -> Iterator[tuple[Value, ...]]:
    """(value - offset) * scale of four elements a word: the only byte, or the low one and the high one."""
    facts = panel.facts
    if not panel.scaled:
        offset = s.splat_constant(_i8, facts.offset)
        for word in panel.values():
            yield (s.as_(_i32, s.sub(s.as_(_i8, word), offset)) if facts.offset else word,)
        return
    scales = []
    for scale in panel.scales():  # one byte of four, then the other, so that each product of pairs is one product
        scale = s.sub(s.zero(_i32), scale) if shape.negated else scale
        low = s.and_(scale, s.splat_constant(_i32, 0xFF))
        both = s.or_(low, s.shl(low, 16))
        scales.append((both, s.shl(both, 8)))
    offset = facts.offset + (128 if facts.signed else 0)
    swapped = s.constant(_i8, [16 * (at // 16) + (at % 16 ^ 1) for at in range(64)])
    even_bytes, odd_bytes = s.splat_constant(_i16, 0x00FF), s.splat_constant(_i16, -256)

    def mixed(first: Value, second: Value) -> Value:
        """Even bytes of the first, odd ones of the second."""
        return s.as_(_i32, s.or_(s.and_(first, even_bytes), s.and_(second, odd_bytes)))

    def bytes_swapped(value: Value) -> Value:
        return s.as_(_i16, s.table(s.as_(_i8, value), swapped))

    for step, word in enumerate(panel.values()):
        group = 4 * step // panel.scaled
        values = s.as_(_i8, s.xor(word, s.splat_constant(_i32, 0x80808080)) if facts.signed else word)
        even, odd = (s.pair_products_u8(values, s.as_(_i8, scale)) for scale in scales[group])
        if offset:  # the low bytes of scale times offset would do for one byte
            lift = s.ashr(s.as_(_i16, scales[group][1]), 8)
            lift = s.mul(lift, s.splat_constant(_i16, offset))
            even, odd = s.sub(even, lift), s.sub(odd, lift)
        odd = bytes_swapped(odd)
        low = mixed(even, odd)
        yield (low,) if shape.halves == 1 else (low, bytes_swapped(mixed(odd, even)))


# ---- activations
def pack_row(name: str) -> Any:
    """Numba function (values of a row, d plane, sums plane, blocks, out, place of the row among TILE_TOKENS)."""
    shape = tile_shape(name)
    x_bytes, d_bytes, sums_bytes = PLANE_BYTES[shape.kind]

    @emits(types.void, *[_INT] * 6)
    def pack(s: Emitter, values: Value, d: Value, sums: Value, blocks: Value, out: Value, place: Value) -> None:
        def one(index: Value, carried: list[Value]) -> list[Value]:
            def at(base: Value, step: int) -> Value:
                return s.add(base, s.mul(index, index.type(step)))

            source, target = at(values, x_bytes), at(out, shape.packed_bytes)
            width = x_bytes // shape.steps
            kind = vector("i8", width)
            tile_row = s.add(target, s.mul(place, place.type(width)))
            for step in range(shape.steps):
                s.store(s.load(kind, source, step * width), tile_row, step * width * TILE_TOKENS)
            word = s.add(target, s.mul(place, place.type(4)))
            s.store(s.load_scalar("f32", at(d, d_bytes)), word, shape.packed_d)
            if shape.minima and not shape.super:
                s.store(s.load_scalar("f32", at(sums, sums_bytes), 4), word, shape.packed_sums)
            elif shape.minima:
                whole = s.sext(_i32, s.load(vector("i16", 16), at(sums, sums_bytes)))
                rest = s.and_(whole, s.splat_constant(_i32, 63))
                parts = [s.as_(_i32, s.to_float(_f32, part)) for part in (rest, s.sub(whole, rest))]
                row = s.add(target, s.mul(place, place.type(64)))
                s.store(s.or_(s.lshr(parts[0], 16), parts[1]), row, shape.packed_sums)
            return []

        s.loop(blocks, [], one)

    return pack


# ---- products
@emits(types.void)
def release_tiles(s: Emitter) -> None:
    tiles.release(s)


_A, _B = 4, 5  # tiles; the second operand takes two; 0 to 3 are sums


def configure_tiles(name: str) -> Any:
    """Numba function that gives the tiles the shapes of the type."""
    shape = tile_shape(name)
    width = shape.panel.facts.elements // shape.steps
    sums = (TILE_TOKENS, 4 * LANES)
    shapes = [sums] * 4 + [(TILE_TOKENS, width)] + [(width // 4, 4 * LANES)] * 2

    @emits(types.void)
    def configure(s: Emitter) -> None:
        tiles.configure(s, shapes)

    return configure


def tile_product(name: str, blocks: int) -> Callable[..., None]:
    """Numba function (decoded unit of `blocks` blocks, packed activations, bytes between TILE_TOKENS rows of them,
    their number, sums, results): adds the unit to the results, f32 by row of activations, then weight row.

    The float steps of a group of rows are woven into the tile products of the next: they are about as long, and the
    CPU does not see far enough ahead to overlap them by itself."""
    shape = tile_shape(name)

    @emits(types.void, *[_INT] * 6)
    def product(s: Emitter, unit: Value, x: Value, stride: Value, count: Value, sums: Value, out: Value) -> None:
        scales = _scales(s, shape, blocks, unit)
        one = count.type(1)

        def half(group: Value) -> Value:
            """Where the group's sums lie. Opaque: LLVM 22 drops the choice of an address that it sees through."""
            return s.add(sums, s.opaque(s.mul(s.and_(group, one), one.type(TILE_SUMS // 2))))

        def integers(group: Value) -> Iterator[None]:
            packed = s.add(x, s.mul(group, stride))
            return _integers(s, shape, blocks, unit, packed, half(group))

        def floats(group: Value) -> Iterator[None]:
            packed = s.add(x, s.mul(group, stride))
            results = s.add(out, s.mul(group, one.type(TILE_TOKENS * _LINE)))
            return _floats(s, shape, scales, packed, half(group), results)

        def body(index: Value, carried: list[Value]) -> list[Value]:
            _weave(integers(s.add(index, one)), _integer_pieces(shape, blocks), floats(index), TILE_TOKENS)
            return []

        _weave(integers(one.type(0)), 1, iter(()), 0)
        last = s.sub(count, one)
        s.loop(last, [], body)
        _weave(iter(()), 0, floats(last), 1)

    made: Callable[..., None] = product
    return made


def _weave(first: Iterator[None], firsts: int, second: Iterator[None], seconds: int) -> None:
    """Emits two sequences of pieces of code, of about `firsts` and `seconds` pieces, evenly mixed."""
    done = 0
    for number, _ in enumerate(first, 1):
        while done < seconds * number // max(firsts, 1):
            next(second, None)
            done += 1
    for _ in second:
        pass


def _sums_at(shape: TileShape, block: int, kind: int, v: int) -> int:
    """Where a tile of sums lies: by block, kind (halves, then minima), vector of weights."""
    return ((block * _kinds_of_sums(shape) + kind) * PANEL_VECTORS + v) * _SUMS_TILE


def _kinds_of_sums(shape: TileShape) -> int:
    """Sums that a block leaves in memory for each weight row and row of activations."""
    return shape.halves + (1 if shape.super and shape.minima else 0)


def _integer_pieces(shape: TileShape, blocks: int) -> int:
    """Pieces that `_integers` consists of."""
    minima = 1 if shape.super and shape.minima else 0
    return blocks * (shape.steps * shape.halves + shape.halves + minima) * PANEL_VECTORS


def _integers(s: Emitter, shape: TileShape, blocks: int, unit: Value, packed: Value, sums: Value) -> Iterator[None]:
    """The products of a unit with a group of activations; tiles of sums to memory. A piece is a product or a store."""
    rows = shape.lines // shape.steps
    places = [(half, v) for half in range(shape.halves) for v in range(PANEL_VECTORS)]
    for block in range(blocks):
        weights, x = block * shape.block_bytes, block * shape.packed_bytes
        for tile in range(len(places)):
            tiles.zero(s, tile)
        for step in range(shape.steps):
            tiles.load(s, _A, packed, x + step * rows * 4 * TILE_TOKENS, rows * 4)
            for tile, (half, v) in enumerate(places):
                b = _B + tile % 2
                tiles.load(s, b, unit, weights + half * shape.high_at + step * rows * _LINE + v * 4 * LANES, _LINE)
                tiles.add_products(s, tile, _A, b, b_signed=half + 1 == shape.halves)
                yield
        for tile, (half, v) in enumerate(places):
            tiles.store(s, tile, sums, _sums_at(shape, block, half, v))
            yield
        if shape.super and shape.minima:
            tiles.load(s, _A, packed, x + shape.packed_sums)
            for v in range(PANEL_VECTORS):
                tiles.zero(s, v)
                tiles.load(s, _B + v, unit, weights + shape.minima_at + v * 4 * LANES, _LINE)
                tiles.add_bf16_products(s, v, _A, _B + v)
                tiles.store(s, v, sums, _sums_at(shape, block, shape.halves, v))
                yield


def _scales(s: Emitter, shape: TileShape, blocks: int, unit: Value) -> list[tuple[list[Value], list[Value]]]:
    """For each block `d` and `dmin` or `m` of every vector of weight rows."""

    def lines(block: int, at: int) -> list[Value]:
        return [s.load(_f32, unit, block * shape.block_bytes + at + v * 4 * LANES) for v in range(PANEL_VECTORS)]

    return [
        (lines(block, shape.d_at), lines(block, shape.minimum_at) if shape.minima else []) for block in range(blocks)
    ]


def _floats(
    s: Emitter,
    shape: TileShape,
    scales: Sequence[tuple[list[Value], list[Value]]],
    packed: Value,
    sums: Value,
    results: Value,
) -> Iterator[None]:
    """The float steps of the canonical order for a group of TILE_TOKENS rows of activations; a piece is a row."""
    for token in range(TILE_TOKENS):
        row = token * 4 * LANES
        acc = [s.load(_f32, results, token * _LINE + v * 4 * LANES) for v in range(PANEL_VECTORS)]
        for block, (d, least) in enumerate(scales):
            x = block * shape.packed_bytes + 4 * token
            dx = s.splat(_f32, s.load_scalar("f32", packed, x + shape.packed_d))
            for v in range(PANEL_VECTORS):
                total = s.load(_i32, sums, row + _sums_at(shape, block, 0, v))
                if shape.halves == 2:
                    total = s.add(total, s.shl(s.load(_i32, sums, row + _sums_at(shape, block, 1, v)), 8))
                if shape.negated:
                    total = s.sub(s.zero(_i32), total)
                acc[v] = s.fma(s.fmul(d[v], dx), s.to_float(_f32, total), acc[v])
                if shape.minima and shape.super:
                    term = s.load(_f32, sums, row + _sums_at(shape, block, shape.halves, v))
                    acc[v] = s.fma(s.fneg(s.fmul(least[v], dx)), term, acc[v])
                elif shape.minima:
                    term = s.splat(_f32, s.load_scalar("f32", packed, x + shape.packed_sums))
                    acc[v] = s.fma(least[v], term, acc[v])
        for v in range(PANEL_VECTORS):
            s.store(acc[v], results, token * _LINE + v * 4 * LANES)
        yield


@emits(types.void, _INT, _INT)
def clear_results(s: Emitter, out: Value, tokens: Value) -> None:
    """Zeros for `tokens` rows of activations."""

    def one(index: Value, carried: list[Value]) -> list[Value]:
        at = s.add(out, s.mul(index, index.type(_LINE)))
        for v in range(PANEL_VECTORS):
            s.store(s.zero(_f32), at, v * 4 * LANES)
        return []

    s.loop(tokens, [], one)


@emits(types.void, _INT, _INT, _INT)
def copy_results(s: Emitter, results: Value, out: Value, existing: Value) -> None:
    """The `existing` first results of a row of activations, consecutive floats."""
    for v in range(PANEL_VECTORS):
        left = s.sub(existing, existing.type(v * LANES))
        at = s.add(out, out.type(v * 4 * LANES))
        s.store_first(_f32, s.load(_f32, results, v * 4 * LANES), at, left)
