"""Kernels of block drafts and their targets: `stream_mean`, `chain_tokens`.

Owns their order of operations. stream_mean: copies added in ascending order, each sum rounded to f32, then times 1/C.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import types

from bloomery.cpu_experts.kernels.elementwise import CHUNK
from bloomery.cpu_experts.kernels.work import share_end, share_start, step_row
from bloomery.cpu_experts.simd import Emitter, Value, argument, compiled, emits, f32x8, load_i32, store_i32

_INT = types.int64


@emits(f32x8, _INT, _INT)
def _first_8(s: Emitter, x: Value, count: Value) -> Value:
    return s.load_first(f32x8, x, count)


@emits(f32x8, f32x8, _INT, _INT)
def _add_8(s: Emitter, total: Value, x: Value, count: Value) -> Value:
    return s.fadd(total, s.load_first(f32x8, x, count))


@emits(types.void, f32x8, types.float64, _INT, _INT)
def _store_8(s: Emitter, total: Value, factor: Value, out: Value, count: Value) -> None:
    scaled = s.fmul(total, s.splat(f32x8, s.b.fptrunc(factor, f32x8.ir.element)))
    s.store_first(f32x8, scaled, out, count)


def stream_mean() -> Callable[[int, int, int, int], None]:
    """Kernel `stream_mean`: rows (index of the step's row count), copies, width, streams, row stride, copy stride, out,
    row stride."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, copies, width = argument(step, argument(args, 0)), argument(args, 1), argument(args, 2)
        chunks = (width + CHUNK - 1) // CHUNK
        for unit in range(share_start(rows * chunks, rank, ranks), share_end(rows * chunks, rank, ranks)):
            row = unit // chunks
            begin = (unit - row * chunks) * CHUNK
            streams, out = argument(args, 3) + row * argument(args, 4), argument(args, 6) + row * argument(args, 7)
            for start in range(begin, min(begin + CHUNK, width), 8):
                total = _first_8(streams + 4 * start, width - start)
                for copy in range(1, copies):
                    total = _add_8(total, streams + copy * argument(args, 5) + 4 * start, width - start)
                _store_8(total, 1.0 / copies, out + 4 * start, width - start)

    return kernel


@compiled
def _place(slots: int, step: int, row: int) -> int:
    """How many wanted rows of the same slot come right before wanted row `row`."""
    slot, place = load_i32(slots + 4 * step_row(step, 1, row)), 0
    while place < row and load_i32(slots + 4 * step_row(step, 1, row - place - 1)) == slot:
        place += 1
    return place


def chain_tokens() -> Callable[[int, int, int, int], None]:
    """Kernel `chain_tokens`: ids, row stride, chosen, row stride, round.

    ids[o] = the token before wanted row o of a block as far as round number `round` can know it: the row's own token
    if it is the block's first; else chosen[o - 1], which is final if the row is at most the `round`th behind the first;
    rows behind those get the first row's token, for a valid one.
    """

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows = argument(step, 1)
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            place = _place(argument(step, 3), step, row)
            if 0 < place <= argument(args, 4):
                token = load_i32(argument(args, 2) + (row - 1) * argument(args, 3))
            else:
                token = load_i32(argument(step, 2) + 4 * step_row(step, 1, row - place))
            store_i32(argument(args, 0) + row * argument(args, 1), token)

    return kernel
