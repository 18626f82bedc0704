"""Matrix products: rows of activations times weights of one quant type.

Owns the kernels `matmul_<type>`, which rows a rank computes, and products with any number of rows of activations. The
arithmetic is `panel_dots` and `float_dots`; arguments are laid out by `lowering`.

A rank owns a run of output rows. One row of activations multiplies blocks straight from the file (`row_matmul`); more
rows share one decoding of a panel of weight rows. Both compute the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.isa import AMX, at_least
from bloomery.cpu_experts.kernels.elementwise import add_run
from bloomery.cpu_experts.kernels.float_dots import (
    ELEMENT_BYTES,
    LANES,
    finish_lanes,
    float_step,
    float_tail,
    no_lanes,
)
from bloomery.cpu_experts.kernels.panel_dots import panel_product, panel_shape, unpack_panel
from bloomery.cpu_experts.kernels.row_matmul import activation_blocks, multiply_halves, scatter
from bloomery.cpu_experts.kernels.tile_matmul import TILES_FROM, multiply_tiles
from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    argument,
    compiled,
    emits,
    f32x4,
    inlined,
    load_i32,
)

# Arguments of matmul_<type>: MATMUL_HEAD words, then MATMUL_JOB words for every weight.
# Head: rows (index of the step's row count), x, x stride, d plane, sums plane, tiles, bytes of a tile area.
# Job: weight, bytes of a row, blocks of a row, output rows, first block of x, out, out stride, bias or 0.
MATMUL_HEAD: Final = 7
MATMUL_JOB: Final = 8


@inlined
def _store_results(total: Any, out: int, bias: int, r0: int, r1: int, r2: int, r3: int) -> None:
    if bias == 0:
        scatter(total, out + 4 * r0, out + 4 * r1, out + 4 * r2, out + 4 * r3)
    else:
        _store_biased(total, out, bias, r0, r1, r2, r3)


@emits(types.void, f32x4, types.int64, types.int64, *[types.int64] * 4)
def _store_biased(s: Emitter, total: Value, out: Value, bias: Value, *rows: Value) -> None:
    for lane, row in enumerate(rows):
        offset = s.b.shl(row, row.type(2))
        value = s.fadd(s.lane(total, lane), s.load_scalar("f32", s.add(bias, offset)))
        s.store(value, s.add(out, offset))


def quantised_multiply(name: str) -> Callable[..., None]:
    """Numba function that multiplies rows `first`..`last`-1 of a weight with `count` rows of x.

    `items` is the address of int32 pairs (row of x, row of out), or 0 for rows 0..count-1 of both. `following` is the
    address of the weight that comes next, of which one row of x fetches the beginnings, or 0.
    """
    from_blocks, from_panels = multiply_halves(name), _multiply_panels(name)
    with_tiles = at_least(AMX)
    from_tiles = multiply_tiles(name) if with_tiles else from_panels

    @compiled
    def multiply(
        weight: int, row_bytes: int, blocks: int, first: int, last: int, x: int, x_stride: int, d_plane: int,
        sums_plane: int, items: int, count: int, out: int, out_stride: int, bias: int, tiles: int, following: int,
    ) -> None:  # fmt: skip
        if count == 1:
            row, place = x, out
            if items != 0:
                row, place = x + load_i32(items) * x_stride, out + load_i32(items + 4) * out_stride
            skipped = first * row_bytes
            from_blocks(
                weight + skipped, last - first, place + 4 * first, row_bytes, blocks, row, d_plane, sums_plane,
                following + skipped if following != 0 else 0,
            )  # fmt: skip
        elif with_tiles and count >= TILES_FROM:
            from_tiles(
                weight, row_bytes, blocks, first, last, x, x_stride, d_plane, sums_plane, items, count, out, out_stride,
                tiles,
            )  # fmt: skip
        else:
            from_panels(
                weight, row_bytes, blocks, first, last, x, x_stride, d_plane, sums_plane, items, count, out, out_stride,
                tiles,
            )  # fmt: skip
        if bias != 0:
            for item in range(count):
                place = out + item * out_stride + 4 * first
                add_run(place, bias + 4 * first, place, last - first)

    multiply_: Callable[..., None] = multiply
    return multiply_


def _multiply_panels(name: str) -> Callable[..., None]:
    """Several rows of activations: a panel of weight rows is decoded once, then meets them 4, 2 or 1 at a time."""
    unpack, shape = unpack_panel(name), panel_shape(name)
    product_1, product_2, product_4 = (panel_product(name, rows) for rows in (1, 2, 4))
    height, tile, nbytes = shape.rows, shape.nbytes, shape.panel.facts.nbytes
    four = shape.vnni  # 16 registers hold two rows of activations

    @inlined
    def place(items: int, item: int, x: int, x_stride: int, out: int, out_stride: int) -> tuple[int, int]:
        if items == 0:
            return x + item * x_stride, out + item * out_stride
        return x + load_i32(items + 8 * item) * x_stride, out + load_i32(items + 8 * item + 4) * out_stride

    @compiled
    def multiply(
        weight: int, row_bytes: int, blocks: int, first: int, last: int, x: int, x_stride: int, d_plane: int,
        sums_plane: int, items: int, count: int, out: int, out_stride: int, tiles: int,
    ) -> None:  # fmt: skip
        for row in range(first, last, height):
            rows = min(height, last - row)
            for block in range(blocks):
                unpack(weight + row * row_bytes + block * nbytes, row_bytes, rows, tiles + block * tile)
            item, to = 0, out + 4 * row
            while four and item + 4 <= count:
                x0, y0 = place(items, item, x, x_stride, to, out_stride)
                x1, y1 = place(items, item + 1, x, x_stride, to, out_stride)
                x2, y2 = place(items, item + 2, x, x_stride, to, out_stride)
                x3, y3 = place(items, item + 3, x, x_stride, to, out_stride)
                product_4(tiles, blocks, rows, d_plane, sums_plane, x0, x1, x2, x3, y0, y1, y2, y3)
                item += 4
            while item + 2 <= count:
                x0, y0 = place(items, item, x, x_stride, to, out_stride)
                x1, y1 = place(items, item + 1, x, x_stride, to, out_stride)
                product_2(tiles, blocks, rows, d_plane, sums_plane, x0, x1, y0, y1)
                item += 2
            if item < count:
                x0, y0 = place(items, item, x, x_stride, to, out_stride)
                product_1(tiles, blocks, rows, d_plane, sums_plane, x0, y0)

    multiply_: Callable[..., None] = multiply
    return multiply_


def float_multiply(name: str) -> Callable[..., None]:
    """The same for F32, F16 and BF16 weights; a block is one element, planes and tiles are not used."""
    step, tail = float_step(name), float_tail(name)
    nbytes = ELEMENT_BYTES[name]

    @compiled
    def multiply(
        weight: int, row_bytes: int, blocks: int, first: int, last: int, x: int, x_stride: int, d_plane: int,
        sums_plane: int, items: int, count: int, out: int, out_stride: int, bias: int, tiles: int, following: int,
    ) -> None:  # fmt: skip
        quarter = (last - first + 3) >> 2
        whole = blocks // LANES * LANES
        for index in range(quarter):
            r0 = first + index
            r1 = min(r0 + quarter, last - 1)
            r2 = min(r0 + 2 * quarter, last - 1)
            r3 = min(r0 + 3 * quarter, last - 1)
            w0, w1, w2, w3 = (
                weight + r0 * row_bytes, weight + r1 * row_bytes, weight + r2 * row_bytes, weight + r3 * row_bytes,
            )  # fmt: skip
            for item in range(count):
                from_row, to_row = item, item
                if items != 0:
                    from_row, to_row = load_i32(items + 8 * item), load_i32(items + 8 * item + 4)
                row = x + from_row * x_stride
                lanes = no_lanes()
                for at in range(0, whole * nbytes, LANES * nbytes):
                    lanes = step(w0 + at, w1 + at, w2 + at, w3 + at, row + at, lanes)
                for element in range(whole, blocks):
                    at = element * nbytes
                    lanes = tail(w0 + at, w1 + at, w2 + at, w3 + at, row + at, element - whole, lanes)
                _store_results(finish_lanes(lanes), out + to_row * out_stride, bias, r0, r1, r2, r3)

    multiply_: Callable[..., None] = multiply
    return multiply_


def multiply_of(name: str) -> Callable[..., None]:
    return float_multiply(name) if name in ELEMENT_BYTES else quantised_multiply(name)


def matmul(name: str) -> Callable[[int, int, int, int], None]:
    """Kernel `matmul_<name>`: every job's output rows for all rows of x; the jobs' rows are shared as one long run."""
    multiply = multiply_of(name)
    x_bytes, d_bytes, sums_bytes = activation_blocks(name)

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        count = argument(step, argument(args, 0))
        x, x_stride = argument(args, 1), argument(args, 2)
        d_plane, sums_plane = argument(args, 3), argument(args, 4)
        tiles = argument(args, 5) + rank * argument(args, 6)
        jobs = argument(args, MATMUL_HEAD)
        total = 0
        for job in range(jobs):
            total += argument(args, MATMUL_HEAD + 4 + job * MATMUL_JOB)
        mine, end = share_start(total, rank, ranks), share_end(total, rank, ranks)
        before = 0
        for job in range(jobs):
            at = MATMUL_HEAD + 1 + job * MATMUL_JOB
            rows, block = argument(args, at + 3), argument(args, at + 4)
            first, last = max(mine - before, 0), min(end - before, rows)
            before += rows
            if first < last and count > 0:
                multiply(
                    argument(args, at), argument(args, at + 1), argument(args, at + 2), first, last,
                    x + block * x_bytes, x_stride, d_plane + block * (d_bytes - x_bytes),
                    sums_plane + block * (sums_bytes - x_bytes), 0, count,
                    argument(args, at + 5), argument(args, at + 6), argument(args, at + 7), tiles, 0,
                )  # fmt: skip

    return kernel
