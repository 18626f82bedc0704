"""One row of activations times weight rows, four at a time: how memory is read while weights are multiplied.

Owns which rows are in flight together and what is fetched meanwhile. The arithmetic is `block_dots`; several rows of
activations are `matmul`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import types

from bloomery.cpu_experts.isa import prefetch_distance
from bloomery.cpu_experts.kernels.block_dots import aligned_frame, block_step, pair_step, quad_step
from bloomery.cpu_experts.kernels.block_formats import SMALL_BLOCKS, SUPER_BLOCKS
from bloomery.cpu_experts.kernels.carried_dots import CarriedDots, with_carried_sums
from bloomery.cpu_experts.kernels.float_dots import ELEMENT_BYTES
from bloomery.cpu_experts.kernels.layouts import PLANE_BYTES
from bloomery.cpu_experts.kernels.quad_dots import QUAD, with_quads
from bloomery.cpu_experts.simd import Emitter, Value, compiled, emits, f32x4, inlined


def activation_blocks(name: str) -> tuple[int, int, int]:
    """(bytes of values, bytes of d, bytes of sums) that one block of weights of type `name` meets in a row of x."""
    if name in ELEMENT_BYTES:
        return ELEMENT_BYTES[name], 0, 0
    return PLANE_BYTES["Q8_K" if name in SUPER_BLOCKS else "Q8_0"]


@emits(f32x4)
def _zeros(s: Emitter) -> Value:
    return s.zero(f32x4)


@emits(types.void, f32x4, types.int64, types.int64, types.int64, types.int64)
def scatter(s: Emitter, value: Value, a0: Value, a1: Value, a2: Value, a3: Value) -> None:
    for lane, address in enumerate((a0, a1, a2, a3)):
        s.store(s.lane(value, lane), address)


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

    if with_carried_sums(name):
        carried = CarriedDots(name)
        start, carried_step, finish = carried.start, carried.step, carried.finish

        @inlined
        def dots(
            w0: int, w1: int, w2: int, w3: int, p0: int, p1: int, p2: int, p3: int, row: int, d_plane: int,
            sums_plane: int, blocks: int,
        ) -> Any:  # fmt: skip
            total, sums, factors = start()
            for block in range(blocks):
                at = block * nbytes
                total, sums, factors = carried_step(
                    w0 + at, w1 + at, w2 + at, w3 + at, p0 + at, p1 + at, p2 + at, p3 + at, row + block * x_bytes,
                    row + d_plane + block * d_bytes, row + sums_plane + block * sums_bytes, total, sums, factors,
                )  # fmt: skip
            return finish(total, sums, factors)

    elif with_quads(name):
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
def multiply_runs(name: str) -> Callable[..., None]:
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
            scatter(total, out + 4 * r0, out + 4 * r1, other_out + 4 * r2, other_out + 4 * r3)

    multiply_: Callable[..., None] = multiply
    return multiply_


@functools.cache
def multiply_halves(name: str) -> Callable[..., None]:
    """The same for one run of rows, the halves of which are the two runs."""
    from_runs = multiply_runs(name)

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


@functools.cache
def multiply_pairs(name: str) -> Callable[..., None]:
    """As `multiply_runs`, with a row of activations for each of the two runs, of a type that `with_pairs`."""
    step, distance = pair_step(name), prefetch_distance()
    nbytes = SUPER_BLOCKS[name].nbytes
    x_bytes, d_bytes, sums_bytes = activation_blocks(name)

    @compiled
    def multiply(
        run: int, out: int, row: int, other: int, other_out: int, other_row: int, rows: int, row_bytes: int,
        blocks: int, d_plane: int, sums_plane: int, following: int, then: int,
    ) -> None:  # fmt: skip
        aligned_frame()
        half = (rows + 1) >> 1
        later = (distance + row_bytes - 1) // row_bytes
        for index in range(half):
            second = min(index + half, rows - 1)
            w0, w1 = run + index * row_bytes, run + second * row_bytes
            w2, w3 = other + index * row_bytes, other + second * row_bytes
            ahead = further = later * row_bytes
            if index + later >= half and following != 0:
                ahead = following - run + (later - half) * row_bytes
                further = then - other + (later - half) * row_bytes
            p0, p1, p2, p3 = w0 + ahead, w1 + ahead, w2 + further, w3 + further
            total = _zeros()
            for block in range(blocks):
                at, x, d, sums = block * nbytes, block * x_bytes, block * d_bytes, block * sums_bytes
                total = step(
                    w0 + at, w1 + at, w2 + at, w3 + at, p0 + at, p1 + at, p2 + at, p3 + at,
                    row + x, row + d_plane + d, row + sums_plane + sums,
                    other_row + x, other_row + d_plane + d, other_row + sums_plane + sums, total,
                )  # fmt: skip
            scatter(total, out + 4 * index, out + 4 * second, other_out + 4 * index, other_out + 4 * second)

    multiply_: Callable[..., None] = multiply
    return multiply_
