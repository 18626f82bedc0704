"""Dot products of four weight rows with one row of activations, block by block, in the canonical order.

Owns the canonical order of quantised dots. It knows neither which rows are multiplied nor how work is shared
(`matmul`); the same dots for several rows of activations are `panel_dots`.

Canonical order. An output element is one f32 accumulator, started at 0, that takes the blocks in ascending order:

    isum = exact int32 sum over the block of scale * (value - offset) * quantised activation (scale = 1 in SmallBlocks)
    acc  = fma(d * dx, float(isum), acc)                       d * dx and float(isum) each rounded once to f32
    SuperBlock with minima:  acc = fma(-(dmin * dx), float(sum of minimum * activation sum), acc)
    SmallBlock with minima:  acc = fma(m, s, acc)              s = the Q8_1 block's f16 d*sum

Integer sums are exact in any order, so four rows are reduced together by a transposed reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from bloomery.cpu_experts.isa import AVX512VNNI, at_least, prefetch_distance
from bloomery.cpu_experts.kernels.block_formats import SMALL_BLOCKS, SUPER_BLOCKS
from bloomery.cpu_experts.kernels.block_parts import BlockFormat, SuperBlock, block_scales, half_floats
from bloomery.cpu_experts.kernels.layouts import PANEL_VECTORS
from bloomery.cpu_experts.kernels.position_dots import position_dots, with_positions
from bloomery.cpu_experts.kernels.quad_dots import QUAD, quad_dots
from bloomery.cpu_experts.kernels.wide_dots import nibble_sums, table_dots, wide_dots
from bloomery.cpu_experts.kernels.wide_formats import NIBBLE_BLOCKS, WIDE_BLOCKS
from bloomery.cpu_experts.simd import Emitter, Value, emits, f32x4, i8x32, i8x64, i16x16, i32x4, i32x8

_INT = types.int64


def prefetch(s: Emitter, nbytes: int, addresses: Sequence[Value]) -> None:
    """Fetches so many bytes of each of four rows that come later, where the CPU does not see four streams by itself."""
    if prefetch_distance():
        for address in addresses:
            for line in range(0, max(nbytes, 64), 64):
                s.prefetch(address, line)


def prefetch_panel(s: Emitter, kind: type[BlockFormat], addresses: Sequence[Value], row_bytes: Value) -> None:
    """Fetches the next blocks into the first-level cache, and the same blocks of the next panel, as many rows further
    on, into the second: a row is too short for fetching far ahead in it."""
    if prefetch_distance():
        ahead = s.mul(row_bytes, row_bytes.type(len(addresses) * PANEL_VECTORS))
        for address in addresses:
            for line in range(0, max(kind.nbytes, 64), 64):
                s.prefetch(address, kind.nbytes + line)
                s.prefetch(s.add(address, ahead), line, 2)


def _vnni() -> bool:
    return at_least(AVX512VNNI)


def _four_products(s: Emitter, kind: type[BlockFormat], w: Value, x: Value) -> Value:
    """i32x8 of exact sums of four products; signed values are taken 128 too great, as vpdpbusd wants unsigned ones."""
    unsigned = s.xor(w, s.splat_constant(i8x32, 0x80)) if kind.signed else w
    return s.add_products_u8(s.zero(i32x8), unsigned, x)


def _offset(kind: type[BlockFormat]) -> int:
    return kind.offset + (128 if kind.signed and _vnni() else 0)


def _products(s: Emitter, kind: type[BlockFormat], w: Value, x: Value) -> Value:
    """i16x16 of exact pair products of weights and activations; |x| <= 127."""
    if kind.signed:
        return s.pair_products_u8(s.with_sign(w, w), s.with_sign(x, w))
    return s.pair_products_u8(w, x)


def _super_dots(
    s: Emitter, kind: type[SuperBlock], addresses: Sequence[Value], x: Sequence[Value], acc: Value
) -> Value:
    """Of types with neither an offset nor minima: those that have one are `carried_dots` or `wide_dots`."""
    assert not kind.offset and kind.minimum_at is None
    x_values, x_d, _ = x
    d = block_scales(s, kind, addresses)
    totals = []
    for row in [kind(s, address) for address in addresses]:
        total = None
        for group in range(8):
            values, activations = row.values(group), s.load(i8x32, x_values, 32 * group)
            scaled = s.pair_products_i16(_products(s, kind, values, activations), row.scale(group))
            total = scaled if total is None else s.add(total, scaled)
        totals.append(total)
    dx = s.splat(f32x4, s.load_scalar("f32", x_d))
    return s.fma(s.fmul(d, dx), s.to_float(f32x4, s.sum4(*totals)), acc)


def _small_sums(s: Emitter, name: str, addresses: Sequence[Value], x_values: Value) -> Value:
    """i32x4: the integer sums of four blocks, `_offset` not yet taken off."""
    kind = SMALL_BLOCKS[name]
    if name in NIBBLE_BLOCKS and _vnni():
        return nibble_sums(s, NIBBLE_BLOCKS[name], addresses, x_values)
    quants = s.load(i8x32, x_values)
    values = [kind(s, address).values(0) for address in addresses]
    if _vnni():
        return s.sum4(*[_four_products(s, kind, w, quants) for w in values])
    ones = s.splat_constant(i16x16, 1)
    return s.sum4(*[s.pair_products_i16(_products(s, kind, w, quants), ones) for w in values])


def _small_dots(s: Emitter, name: str, addresses: Sequence[Value], x: Sequence[Value], acc: Value) -> Value:
    x_values, x_d, x_sums = x
    kind = SMALL_BLOCKS[name]
    d, m = _floats(s, kind, addresses)
    isum = _small_sums(s, name, addresses, x_values)
    if offset := _offset(kind):
        total = s.splat(i32x4, s.load_scalar("i32", x_sums))
        isum = s.sub(isum, s.shl(total, offset.bit_length() - 1))
    dx = s.splat(f32x4, s.load_scalar("f32", x_d))
    acc = s.fma(s.fmul(d, dx), s.to_float(f32x4, isum), acc)
    if kind.minimum_at is not None:
        acc = s.fma(m, s.splat(f32x4, s.load_scalar("f32", x_sums, 4)), acc)
    return acc


def _floats(s: Emitter, kind: type[BlockFormat], addresses: Sequence[Value]) -> tuple[Value, Value]:
    d = block_scales(s, kind, addresses)
    return d, None if kind.minimum_at is None else half_floats(s, addresses, kind.minimum_at)


@emits(types.void)
def aligned_frame(s: Emitter) -> None:
    """Lets the frame of the function that it becomes part of start at a multiple of 64: registers that LLVM keeps there
    would cross lines otherwise, which it does not care for by itself."""
    slot = s.b.alloca(i8x64.ir)
    slot.align = 64
    s.b.asm(ir.FunctionType(ir.VoidType(), [slot.type]), "", "r", [slot], True)


def block_step(name: str) -> Any:
    """Numba function (w0, w1, w2, w3, p0, p1, p2, p3, x values, x d, x sums, acc) -> acc: one block of four rows as the
    file has it, while those at p0 to p3 are fetched."""

    @emits(f32x4, *[_INT] * 11, f32x4)
    def step(s: Emitter, *operands: Value) -> Value:
        addresses, later, (xq, xd, xs, acc) = operands[:4], operands[4:8], operands[8:]
        prefetch(s, (SUPER_BLOCKS | SMALL_BLOCKS)[name].nbytes, later)
        if with_positions(name):
            return position_dots(s, name, addresses, (xq, xd, xs), acc)
        if name in WIDE_BLOCKS and _vnni():
            return wide_dots(s, WIDE_BLOCKS[name], addresses, (xq, xd, xs), acc)
        if name == "IQ4_XS" and _vnni():
            return table_dots(s, addresses, (xq, xd, xs), acc)
        if name in SUPER_BLOCKS:
            return _super_dots(s, SUPER_BLOCKS[name], addresses, (xq, xd, xs), acc)
        return _small_dots(s, name, addresses, (xq, xd, xs), acc)

    return step


def quad_step(name: str) -> Any:
    """The same for QUAD blocks of a type that `with_quads`."""

    @emits(f32x4, *[_INT] * 11, f32x4)
    def step(s: Emitter, *operands: Value) -> Value:
        prefetch(s, QUAD * SMALL_BLOCKS[name].nbytes, operands[4:8])
        return quad_dots(s, name, operands[:4], operands[8:11], operands[11])

    return step


def with_pairs(name: str) -> bool:
    """Whether there is a step that multiplies two of four rows with other activations."""
    return name in WIDE_BLOCKS and _vnni() and not with_positions(name)


def pair_step(name: str) -> Any:
    """As `block_step`, with x values, x d and x sums twice: of the first two rows, and of the last two."""

    @emits(f32x4, *[_INT] * 14, f32x4)
    def step(s: Emitter, *operands: Value) -> Value:
        prefetch(s, SUPER_BLOCKS[name].nbytes, operands[4:8])
        return wide_dots(s, WIDE_BLOCKS[name], operands[:4], operands[8:14], operands[14])

    return step
