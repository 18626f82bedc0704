"""Dots of four blocks of 32 of each of four weight rows with one row of activations (AVX-512-VBMI), block after block.

Owns how four neighbouring blocks of nibbles are taken together: their packed bytes fill a register, and scales, integer
sums and conversions of all sixteen blocks are lanes of one. The float steps are `block_dots`' canonical ones: a row's
accumulator takes its four blocks in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bloomery.cpu_experts.isa import AVX512VNNI, at_least, host_features
from bloomery.cpu_experts.kernels.block_formats import SMALL_BLOCKS
from bloomery.cpu_experts.kernels.block_parts import SmallBlock, powers_of_two
from bloomery.cpu_experts.kernels.lane_sums import sums_by_block
from bloomery.cpu_experts.kernels.wide_dots import nibble_dots
from bloomery.cpu_experts.kernels.wide_formats import NIBBLE_BLOCKS
from bloomery.cpu_experts.simd import Emitter, Value, f32x4, i8x64, i16x32, i32x8, i32x16, vector

QUAD: Final = 4  # blocks that are taken together
f32x16 = vector("f32", 16)


def with_quads(name: str) -> bool:
    """Whether `quad_dots` knows the type and this CPU has what it needs."""
    return name in NIBBLE_BLOCKS and at_least(AVX512VNNI) and host_features().get("avx512vbmi", False)


def quad_dots(s: Emitter, name: str, addresses: Sequence[Value], x: Sequence[Value], acc: Value) -> Value:
    """acc (f32x4) after QUAD blocks of four rows; x: addresses of the activations' values, d and sums."""
    x_values, x_d, x_sums = x
    kind, nibbles = SMALL_BLOCKS[name], NIBBLE_BLOCKS[name]
    rows = [_Row(s, kind, address) for address in addresses]
    first, second = (s.load(i8x64, x_values, 64 * half) for half in range(2))
    activations = [
        s.shuffle(first, second, [start + 32 * block + at for block in range(QUAD) for at in range(16)])
        for start in (0, 16)
    ]
    dots = [nibble_dots(s, nibbles, row.bytes(nibbles.quants_at, 16), row.blocks, activations) for row in rows]
    isum = sums_by_block(s, dots)
    each = [block for block in range(QUAD) for _ in rows]
    of_x = s.load(i32x8, x_sums)
    if offset := kind.offset + (128 if kind.signed else 0):
        isum = s.sub(isum, s.shl(s.lanes(of_x, [2 * block for block in each]), offset.bit_length() - 1))
    heads = _heads(s, rows)
    d = powers_of_two(s, s.and_(heads, s.splat_constant(i32x16, 255))) if kind.exponent else _halves(s, heads, 0)
    d = s.fmul(d, s.lanes(s.load(f32x4, x_d), each))
    products = s.to_float(f32x16, isum)
    for block in range(QUAD):
        mine = range(4 * block, 4 * block + 4)
        acc = s.fma(s.lanes(d, mine), s.lanes(products, mine), acc)
        if kind.minimum_at is not None:
            weighted = s.lanes(s.as_(vector("f32", 8), of_x), [2 * block + 1] * 4)
            acc = s.fma(s.lanes(_halves(s, heads, 1), mine), weighted, acc)
    return acc


class _Row:
    """QUAD neighbouring blocks of a row, all bytes of which are in two registers."""

    def __init__(self, emitter: Emitter, kind: type[SmallBlock], address: Value) -> None:
        self.s = emitter
        self.nbytes = kind.nbytes
        self.blocks = [emitter.add(address, address.type(block * kind.nbytes)) for block in range(QUAD)]
        self.end = QUAD * kind.nbytes - 64
        self.parts = emitter.load(i8x64, address), emitter.load(i8x64, address, self.end)

    def bytes(self, at: int, count: int) -> Value:
        """QUAD * count bytes: those from `at` on of each block."""
        places = [block * self.nbytes + at + byte for block in range(QUAD) for byte in range(count)]
        return self.s.shuffle(*self.parts, [place if place < 64 else 64 + place - self.end for place in places])


def _heads(s: Emitter, rows: Sequence[_Row]) -> Value:
    """i32x16: the first four bytes of each block, those of the four rows' first blocks first."""
    words = [s.as_(vector("i32", 4), row.bytes(0, 4)) for row in rows]
    together = s.concat(s.concat(words[0], words[1]), s.concat(words[2], words[3]))
    return s.lanes(together, [4 * row + block for block in range(QUAD) for row in range(4)])


def _halves(s: Emitter, heads: Value, half: int) -> Value:
    """f32x16 of the lower or upper f16 of each word."""
    bits = s.lanes(s.as_(i16x32, heads), range(half, 32, 2))
    return s.widen(f32x16, s.as_(vector("f16", 16), bits))
