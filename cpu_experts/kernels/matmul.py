"""Matrix products: rows of activations times weights of one quant type, dense or by chosen expert.

Owns the kernels `matmul_<type>` and `experts_<type>`: which rows a rank computes and in which pattern memory is read.
The arithmetic is `block_dots` and `float_dots`; arguments are laid out by `lowering`.

A rank owns a run of output rows. One row of activations multiplies blocks straight from the file, in four streams far
apart with software prefetch, which is what keeps memory busy; more rows share one decoding of a panel of weight rows.
Both compute the same sums in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.isa import AMX, at_least, prefetch_distance
from bloomery.cpu_experts.kernels.block_dots import aligned_frame, block_step, quad_step
from bloomery.cpu_experts.kernels.block_formats import SMALL_BLOCKS, SUPER_BLOCKS
from bloomery.cpu_experts.kernels.elementwise import add_run
from bloomery.cpu_experts.kernels.float_dots import (
    ELEMENT_BYTES,
    LANES,
    finish_lanes,
    float_step,
    float_tail,
    no_lanes,
)
from bloomery.cpu_experts.kernels.layouts import PLANE_BYTES
from bloomery.cpu_experts.kernels.panel_dots import panel_product, panel_shape, unpack_panel
from bloomery.cpu_experts.kernels.quad_dots import QUAD, with_quads
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
    store_i32,
)

# Arguments of matmul_<type>: MATMUL_HEAD words, then MATMUL_JOB words for every weight.
# Head: rows (index of the step's row count), x, x stride, d plane, sums plane, tiles, bytes of a tile area.
# Job: weight, bytes of a row, blocks of a row, output rows, first block of x, out, out stride, bias or 0.
MATMUL_HEAD: Final = 7
MATMUL_JOB: Final = 8
# Arguments of experts_<type>: EXPERTS_HEAD words, then EXPERTS_JOB words for every weight.
# Head: rows (index of the step's row count), x, x stride, d plane, sums plane, tiles, bytes of a tile area, lists,
# bytes of a list area, ids, ids row stride, used, experts, 1 if x has a row for every item (0: for every row).
# Job: weight, bytes of an expert, bytes of a row, blocks of a row, output rows, out, out stride.
EXPERTS_HEAD: Final = 14
EXPERTS_JOB: Final = 7


def activation_blocks(name: str) -> tuple[int, int, int]:
    """(bytes of values, bytes of d, bytes of sums) that one block of weights of type `name` meets in a row of x."""
    if name in ELEMENT_BYTES:
        return ELEMENT_BYTES[name], 0, 0
    return PLANE_BYTES["Q8_K" if name in SUPER_BLOCKS else "Q8_0"]


@emits(f32x4)
def _zeros(s: Emitter) -> Value:
    return s.zero(f32x4)


@emits(types.void, f32x4, types.int64, types.int64, types.int64, types.int64)
def _scatter(s: Emitter, value: Value, a0: Value, a1: Value, a2: Value, a3: Value) -> None:
    for lane, address in enumerate((a0, a1, a2, a3)):
        s.store(s.lane(value, lane), address)


@inlined
def _store_results(total: Any, out: int, bias: int, r0: int, r1: int, r2: int, r3: int) -> None:
    if bias == 0:
        _scatter(total, out + 4 * r0, out + 4 * r1, out + 4 * r2, out + 4 * r3)
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
    from_blocks, from_panels = _multiply_halves(name), _multiply_panels(name)
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


def _row_dots(name: str) -> Callable[..., Any]:
    """Numba function: f32x4 of four rows of weights and one of activations, while rows that come later are fetched."""
    step = block_step(name)
    nbytes = (SUPER_BLOCKS | SMALL_BLOCKS)[name].nbytes
    x_bytes, d_bytes, sums_bytes = activation_blocks(name)

    @inlined
    def from_block(
        w0: int, w1: int, w2: int, w3: int, p0: int, p1: int, p2: int, p3: int, row: int, d_plane: int, sums_plane: int,
        first: int, blocks: int, total: Any,
    ) -> Any:  # fmt: skip
        for block in range(first, blocks):
            at = block * nbytes
            total = step(
                w0 + at, w1 + at, w2 + at, w3 + at, p0 + at, p1 + at, p2 + at, p3 + at, row + block * x_bytes,
                row + d_plane + block * d_bytes, row + sums_plane + block * sums_bytes, total,
            )  # fmt: skip
        return total

    if with_quads(name):
        four = quad_step(name)

        @inlined
        def dots(
            w0: int, w1: int, w2: int, w3: int, p0: int, p1: int, p2: int, p3: int, row: int, d_plane: int,
            sums_plane: int, blocks: int,
        ) -> Any:  # fmt: skip
            total, whole = _zeros(), blocks - blocks % QUAD
            for block in range(0, whole, QUAD):
                at = block * nbytes
                total = four(
                    w0 + at, w1 + at, w2 + at, w3 + at, p0 + at, p1 + at, p2 + at, p3 + at, row + block * x_bytes,
                    row + d_plane + block * d_bytes, row + sums_plane + block * sums_bytes, total,
                )  # fmt: skip
            return from_block(w0, w1, w2, w3, p0, p1, p2, p3, row, d_plane, sums_plane, whole, blocks, total)

    else:

        @inlined
        def dots(
            w0: int, w1: int, w2: int, w3: int, p0: int, p1: int, p2: int, p3: int, row: int, d_plane: int,
            sums_plane: int, blocks: int,
        ) -> Any:  # fmt: skip
            return from_block(w0, w1, w2, w3, p0, p1, p2, p3, row, d_plane, sums_plane, 0, blocks, _zeros())

    dots_: Callable[..., Any] = dots
    return dots_


@functools.cache
def _multiply_blocks(name: str) -> Callable[..., None]:
    """One row of activations: blocks are decoded in registers, four weight rows far apart at a time, two of each of two
    runs of rows. Of `following`, where the first run of the next call starts, and of `then`, where the second does, the
    beginnings are fetched at the end, since an expert's rows are few; 0: of nothing."""
    dots, distance = _row_dots(name), prefetch_distance()

    @compiled
    def multiply(
        run: int, rows: int, out: int, other: int, other_rows: int, other_out: int, row_bytes: int, blocks: int,
        row: int, d_plane: int, sums_plane: int, following: int, then: int,
    ) -> None:  # fmt: skip
        aligned_frame()
        half = (max(rows, other_rows) + 1) >> 1
        later = (distance + row_bytes - 1) // row_bytes
        for index in range(half):
            r0 = min(index, rows - 1)
            r1 = min(index + half, rows - 1)
            r2 = min(index, other_rows - 1)
            r3 = min(index + half, other_rows - 1)
            w0, w1, w2, w3 = (
                run + r0 * row_bytes, run + r1 * row_bytes, other + r2 * row_bytes, other + r3 * row_bytes,
            )  # fmt: skip
            ahead = further = later * row_bytes
            if index + later >= half and following != 0:
                ahead = following - run + (later - half) * row_bytes
                further = then - other + (later - half) * row_bytes
            p0, p1, p2, p3 = w0 + ahead, w1 + ahead, w2 + further, w3 + further
            total = dots(w0, w1, w2, w3, p0, p1, p2, p3, row, d_plane, sums_plane, blocks)
            _scatter(total, out + 4 * r0, out + 4 * r1, other_out + 4 * r2, other_out + 4 * r3)

    multiply_: Callable[..., None] = multiply
    return multiply_


@functools.cache
def _multiply_halves(name: str) -> Callable[..., None]:
    """The same for one run of rows, the halves of which are the two runs."""
    from_runs = _multiply_blocks(name)

    @inlined
    def multiply(
        run: int, rows: int, out: int, row_bytes: int, blocks: int, row: int, d_plane: int, sums_plane: int,
        following: int,
    ) -> None:  # fmt: skip
        first = (rows + 1) >> 1
        second = min(first, rows - 1)  # of a single row both halves are that row
        then = following + second * row_bytes
        from_runs(
            run, first, out, run + second * row_bytes, rows - second, out + 4 * second, row_bytes, blocks, row, d_plane,
            sums_plane, following, then,
        )  # fmt: skip

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


def _multiply(name: str) -> Callable[..., None]:
    return float_multiply(name) if name in ELEMENT_BYTES else quantised_multiply(name)


def matmul(name: str) -> Callable[[int, int, int, int], None]:
    """Kernel `matmul_<name>`: every job's output rows for all rows of x; the jobs' rows are shared as one long run."""
    multiply = _multiply(name)
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


@compiled
def group_by_expert(
    lists: int, ids: int, ids_stride: int, rows: int, used: int, experts: int, x_of_each_item: int
) -> int:
    """Writes at `lists` int32 starts[experts + 1], then pairs (row of x, item) ordered by expert, then by item.

    Item number = row * used + place in the row's list of chosen experts, which ends at a negative id. Returns the
    address of the pairs; the number of pairs takes the place of the first start, which is 0.
    """
    pairs = lists + 4 * (experts + 1)
    for expert in range(experts + 1):
        store_i32(lists + 4 * expert, 0)
    for row in range(rows):
        for place in range(used):
            chosen = load_i32(ids + row * ids_stride + 4 * place)
            if chosen < 0:
                break
            counter = lists + 4 * (chosen + 1)
            store_i32(counter, load_i32(counter) + 1)
    for expert in range(experts):
        store_i32(lists + 4 * (expert + 1), load_i32(lists + 4 * (expert + 1)) + load_i32(lists + 4 * expert))
    total = load_i32(lists + 4 * experts)
    for row in range(rows - 1, -1, -1):  # backwards, so that starts[e + 1] ends up as the start of e
        count = 0
        while count < used and load_i32(ids + row * ids_stride + 4 * count) >= 0:
            count += 1
        for place in range(count - 1, -1, -1):
            counter = lists + 4 * (load_i32(ids + row * ids_stride + 4 * place) + 1)
            position = load_i32(counter) - 1
            store_i32(counter, position)
            item = row * used + place
            store_i32(pairs + 8 * position, item if x_of_each_item != 0 else row)
            store_i32(pairs + 8 * position + 4, item)
    store_i32(lists, total)
    return pairs


@compiled
def next_expert(lists: int, expert: int, experts: int) -> int:
    """The next expert after `expert` that `group_by_expert` found items for; `experts` if there is none."""
    found = expert + 1
    while found < experts:
        stop = load_i32(lists) if found + 1 == experts else load_i32(lists + 4 * (found + 2))
        if stop > load_i32(lists + 4 * (found + 1)):
            return found
        found += 1
    return found


def experts(name: str) -> Callable[[int, int, int, int], None]:
    """Kernel `experts_<name>`: for every item (row, chosen expert) and job: out[item] = weight[expert] @ x.

    Items are grouped by expert, so that the weights of an expert are read once a step. Each expert's output rows are
    shared among the ranks. Two jobs of one item (gate and up) are done together: their runs of rows are twice as long
    as halves of them, and every beginning costs time.
    """
    multiply = _multiply(name)
    two_runs = None if name in ELEMENT_BYTES else _multiply_blocks(name)
    if two_runs is None:

        @inlined
        def together(args: int, expert: int, after: int, experts: int, items: int, rank: int, ranks: int) -> bool:
            return False

    else:
        runs: Callable[..., None] = two_runs

        @inlined
        def together(args: int, expert: int, after: int, experts: int, items: int, rank: int, ranks: int) -> bool:
            at = EXPERTS_HEAD + 1
            up = at + EXPERTS_JOB
            outputs, row_bytes, blocks = argument(args, at + 4), argument(args, at + 2), argument(args, at + 3)
            if outputs != argument(args, up + 4):
                return False
            first, last = share_start(outputs, rank, ranks), share_end(outputs, rank, ranks)
            if first < last:
                row = argument(args, 1) + load_i32(items) * argument(args, 2)
                to = load_i32(items + 4)
                gate_weights = argument(args, at) + first * row_bytes
                up_weights = argument(args, up) + first * row_bytes
                following = then = 0
                if after < experts:
                    following = gate_weights + after * argument(args, at + 1)
                    then = up_weights + after * argument(args, up + 1)
                runs(
                    gate_weights + expert * argument(args, at + 1), last - first,
                    argument(args, at + 5) + to * argument(args, at + 6) + 4 * first,
                    up_weights + expert * argument(args, up + 1), last - first,
                    argument(args, up + 5) + to * argument(args, up + 6) + 4 * first,
                    row_bytes, blocks, row, argument(args, 3), argument(args, 4), following, then,
                )  # fmt: skip
            return True

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows = argument(step, argument(args, 0))
        x, x_stride, d_plane, sums_plane = argument(args, 1), argument(args, 2), argument(args, 3), argument(args, 4)
        tiles = argument(args, 5) + rank * argument(args, 6)
        lists = argument(args, 7) + rank * argument(args, 8)
        used, expert_count = argument(args, 11), argument(args, 12)
        pairs = group_by_expert(
            lists, argument(args, 9), argument(args, 10), rows, used, expert_count, argument(args, 13)
        )
        jobs = argument(args, EXPERTS_HEAD)
        expert = next_expert(lists, -1, expert_count)
        while expert < expert_count:
            start = load_i32(lists + 4 * (expert + 1))
            stop = load_i32(lists) if expert + 1 == expert_count else load_i32(lists + 4 * (expert + 2))
            after = next_expert(lists, expert, expert_count)
            one = stop == start + 1 and jobs == 2
            if not (one and together(args, expert, after, expert_count, pairs + 8 * start, rank, ranks)):
                for job in range(jobs):
                    at = EXPERTS_HEAD + 1 + job * EXPERTS_JOB
                    following = 0
                    if job + 1 < jobs:
                        following = argument(args, at + EXPERTS_JOB) + expert * argument(args, at + EXPERTS_JOB + 1)
                    elif after < expert_count:
                        following = argument(args, EXPERTS_HEAD + 1) + after * argument(args, EXPERTS_HEAD + 2)
                    outputs = argument(args, at + 4)
                    first, last = share_start(outputs, rank, ranks), share_end(outputs, rank, ranks)
                    if first < last:
                        multiply(
                            argument(args, at) + expert * argument(args, at + 1), argument(args, at + 2),
                            argument(args, at + 3), first, last, x, x_stride, d_plane, sums_plane,
                            pairs + 8 * start, stop - start, argument(args, at + 5), argument(args, at + 6), 0, tiles,
                            following,
                        )  # fmt: skip
            expert = after

    return kernel
