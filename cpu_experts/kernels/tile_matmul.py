"""Many rows of activations times weights of one quant type in tile registers: the loops around `tile_dots`.

Rows of activations are packed, up to TILE_CHUNK of them at a time; then every panel of weight rows is decoded unit by
unit, and each unit meets all packed rows while it is in the first-level cache. Results of a panel gather in scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bloomery.cpu_experts.kernels.layouts import (
    PACKED_BLOCK,
    PACKED_BYTES,
    PACKED_LEAST,
    TILE_CHUNK,
    TILE_SUMS,
    TILE_TOKENS,
    TILE_WEIGHTS,
)
from bloomery.cpu_experts.kernels.tile_dots import (
    PANEL_ROWS,
    clear_results,
    configure_tiles,
    copy_results,
    pack_row,
    release_tiles,
    tile_product,
    tile_shape,
    unpack_unit,
)
from bloomery.cpu_experts.simd import compiled, inlined, load_i32

TILES_FROM: Final = 10  # rows of activations from which tiles are faster than vectors


@inlined
def _row_of(items: int, item: int) -> int:
    """Row of x of an item."""
    row: int = item if items == 0 else load_i32(items + 8 * item)
    return row


@inlined
def _place_of(items: int, item: int) -> int:
    """Row of out of an item."""
    row: int = item if items == 0 else load_i32(items + 8 * item + 4)
    return row


def multiply_tiles(name: str) -> Callable[..., None]:
    """Numba function as `matmul.quantised_multiply` makes them, without bias; `tiles` has `layouts.tile_area` bytes."""
    shape = tile_shape(name)
    unpack, pack, configure = unpack_unit(name), pack_row(name), configure_tiles(name)
    unit, packed_block, block_bytes = shape.blocks, shape.packed_bytes, shape.block_bytes
    product, product_1 = tile_product(name, unit), tile_product(name, 1)
    nbytes = shape.panel.facts.nbytes
    budget, least, most = PACKED_BYTES // PACKED_BLOCK[shape.kind], PACKED_LEAST, TILE_CHUNK
    result_bytes = 4 * PANEL_ROWS

    @inlined
    def one_panel(weight: int, row_bytes: int, blocks: int, rows: int, packed: int, groups: int, tiles: int) -> None:
        """Results of `rows` weight rows for all packed rows of activations."""
        sums = tiles + TILE_WEIGHTS
        results = sums + TILE_SUMS
        stride = blocks * packed_block
        clear_results(results, groups * TILE_TOKENS)
        block = 0
        while block + unit <= blocks:
            for part in range(unit):
                unpack(weight + (block + part) * nbytes, row_bytes, rows, tiles + part * block_bytes)
            product(tiles, packed + block * packed_block, stride, groups, sums, results)
            block += unit
        while unit > 1 and block < blocks:
            unpack(weight + block * nbytes, row_bytes, rows, tiles)
            product_1(tiles, packed + block * packed_block, stride, groups, sums, results)
            block += 1

    @compiled
    def multiply(
        weight: int, row_bytes: int, blocks: int, first: int, last: int, x: int, x_stride: int, d_plane: int,
        sums_plane: int, items: int, count: int, out: int, out_stride: int, tiles: int,
    ) -> None:  # fmt: skip
        chunk = min(most, max(least, budget // blocks * TILE_TOKENS))
        results = tiles + TILE_WEIGHTS + TILE_SUMS
        packed = results + chunk * result_bytes
        stride = blocks * packed_block
        configure()
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            groups = (stop - start + TILE_TOKENS - 1) // TILE_TOKENS
            for place in range(groups * TILE_TOKENS):
                row = x + _row_of(items, min(start + place, stop - 1)) * x_stride
                group = place // TILE_TOKENS
                pack(
                    row, row + d_plane, row + sums_plane, blocks, packed + group * stride, place - group * TILE_TOKENS
                )  # fmt: skip
            for row in range(first, last, PANEL_ROWS):
                rows = min(PANEL_ROWS, last - row)
                one_panel(weight + row * row_bytes, row_bytes, blocks, rows, packed, groups, tiles)
                for item in range(start, stop):
                    place = out + _place_of(items, item) * out_stride + 4 * row
                    copy_results(results + (item - start) * result_bytes, place, rows)
        release_tiles()

    multiply_: Callable[..., None] = multiply
    return multiply_
