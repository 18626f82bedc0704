"""Kernels that treat every element alone, and moves: add, swiglu, select_rows, experts_sum, embed_<type>.

Owns their order of operations: `add` and the products of `experts_sum` round each product and each sum once, experts
are added in rank order; dequantised elements are (d * scale) * (value - offset) - dmin * minimum, each operation
rounded to f32, as ggml's and the gguf package's dequantisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.kernels.block_formats import SMALL_BLOCKS, SUPER_BLOCKS
from bloomery.cpu_experts.kernels.block_parts import BlockFormat, block_scales
from bloomery.cpu_experts.kernels.float_dots import ELEMENT_BYTES, load_float
from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import (
    Emitter,
    Value,
    argument,
    compiled,
    emits,
    f32x8,
    float_argument,
    i32x8,
    load_i32,
    vector,
)

CHUNK: Final = 256  # elements of one unit of work
_INT = types.int64
# Arguments of add and swiglu: rows (index of the step's row count), rows per step row, heads, width, then address, row
# stride and head stride of x, y and out; swiglu also has its limit, infinity for none.
BINARY_WORDS: Final = 13


@emits(types.void, _INT, _INT, _INT, _INT)
def _add_8(s: Emitter, x: Value, y: Value, out: Value, count: Value) -> None:
    s.store_first(f32x8, s.fadd(s.load_first(f32x8, x, count), s.load_first(f32x8, y, count)), out, count)


@emits(types.void, _INT, _INT, _INT, _INT, types.float64)
def _swiglu_8(s: Emitter, gate: Value, up: Value, out: Value, count: Value, limit: Value) -> None:
    most = s.splat(f32x8, s.b.fptrunc(limit, f32x8.ir.element))
    # a NaN is passed on: fmin and fmax give their second operand then
    bounded = s.fmax(s.fneg(most), s.fmin(most, s.load_first(f32x8, up, count)))
    product = s.fmul(s.silu(s.fmin(most, s.load_first(f32x8, gate, count))), bounded)
    s.store_first(f32x8, product, out, count)


@compiled
def add_run(x: int, y: int, out: int, count: int) -> None:
    """out = x + y for `count` consecutive floats."""
    for start in range(0, count, 8):
        _add_8(x + 4 * start, y + 4 * start, out + 4 * start, count - start)


@compiled
def swiglu_run(gate: int, up: int, out: int, count: int, limit: float) -> None:
    """out = silu(min(gate, limit)) * clip(up, -limit, limit) for `count` floats; silu(x) = x / (1 + e^-x)."""
    for start in range(0, count, 8):
        _swiglu_8(gate + 4 * start, up + 4 * start, out + 4 * start, count - start, limit)


def _binary(gated: bool) -> Callable[[int, int, int, int], None]:
    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows = argument(step, argument(args, 0)) * argument(args, 1)
        heads, width = argument(args, 2), argument(args, 3)
        x, x_row, x_head = argument(args, 4), argument(args, 5), argument(args, 6)
        y, y_row, y_head = argument(args, 7), argument(args, 8), argument(args, 9)
        out, out_row, out_head = argument(args, 10), argument(args, 11), argument(args, 12)
        chunks = (width + CHUNK - 1) // CHUNK
        units = rows * heads * chunks
        for unit in range(share_start(units, rank, ranks), share_end(units, rank, ranks)):
            pair = unit // chunks
            start = (unit - pair * chunks) * CHUNK
            row = pair // heads
            head = pair - row * heads
            x_at = x + row * x_row + head * x_head + 4 * start
            y_at = y + row * y_row + head * y_head + 4 * start
            out_at = out + row * out_row + head * out_head + 4 * start
            if gated:
                swiglu_run(x_at, y_at, out_at, min(width - start, CHUNK), float_argument(args, BINARY_WORDS))
            else:
                add_run(x_at, y_at, out_at, min(width - start, CHUNK))

    return kernel


def add() -> Callable[[int, int, int, int], None]:
    """Kernel `add`."""
    return _binary(False)


def swiglu() -> Callable[[int, int, int, int], None]:
    """Kernel `swiglu`."""
    return _binary(True)


@emits(types.void, _INT, _INT, _INT)
def _copy_8(s: Emitter, x: Value, out: Value, count: Value) -> None:
    s.store_first(f32x8, s.load_first(f32x8, x, count), out, count)


@compiled
def copy_run(x: int, out: int, count: int) -> None:
    """Copies `count` consecutive floats."""
    for start in range(0, count, 8):
        _copy_8(x + 4 * start, out + 4 * start, count - start)


def copy_heads() -> Callable[[int, int, int, int], None]:
    """Kernel `copy_heads`: rows (index of the step's row count), heads, width, x, x row stride, x head stride, out, out
    row stride, out head stride. An x of one head has head stride 0."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, heads = argument(step, argument(args, 0)), argument(args, 1)
        for unit in range(share_start(rows * heads, rank, ranks), share_end(rows * heads, rank, ranks)):
            row = unit // heads
            head = unit - row * heads
            copy_run(
                argument(args, 3) + row * argument(args, 4) + head * argument(args, 5),
                argument(args, 6) + row * argument(args, 7) + head * argument(args, 8),
                argument(args, 2),
            )

    return kernel


def select_rows() -> Callable[[int, int, int, int], None]:
    """Kernel `select_rows`: x, x row stride, out, out row stride, elements."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, indices = argument(step, 1), argument(step, 5)
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            source = argument(args, 0) + load_i32(indices + 4 * row) * argument(args, 1)
            copy_run(source, argument(args, 2) + row * argument(args, 3), argument(args, 4))

    return kernel


@emits(types.void, _INT, _INT)
def _store_f16_8(s: Emitter, x: Value, out: Value) -> None:
    s.store(s.narrow(vector("f16", 8), s.load(f32x8, x)), out)


@emits(types.void, _INT, _INT)
def _store_f16_1(s: Emitter, x: Value, out: Value) -> None:
    s.store(s.b.fptrunc(s.load_scalar("f32", x), vector("f16", 1).ir.element), out)


@compiled
def narrow_run(x: int, out: int, count: int) -> None:
    """f32 to f16, to nearest even."""
    whole = count // 8 * 8
    for start in range(0, whole, 8):
        _store_f16_8(x + 4 * start, out + 2 * start)
    for start in range(whole, count):
        _store_f16_1(x + 4 * start, out + 2 * start)


@emits(types.void, _INT, _INT, _INT, _INT, _INT, _INT)
def weighted_sum_8(
    s: Emitter, items: Value, item_stride: Value, mix: Value, used: Value, out: Value, count: Value
) -> None:
    """out = sum over a < used in order, from 0, of mix[a] * (eight floats of item a), each operation rounded."""
    b = s.b
    zero = used.type(0)
    start = b.block
    head, body, done = (b.append_basic_block(name) for name in ("experts", "expert", "summed"))
    b.branch(head)
    b.position_at_end(head)
    place, total = b.phi(used.type), b.phi(f32x8.ir)
    place.add_incoming(zero, start)
    total.add_incoming(s.zero(f32x8), start)
    b.cbranch(b.icmp_signed("<", place, used), body, done)
    b.position_at_end(body)
    value = s.load_first(f32x8, s.add(items, s.mul(place, item_stride)), count)
    weight = s.load_scalar("f32", s.add(mix, b.shl(place, place.type(2))))
    place.add_incoming(s.add(place, place.type(1)), b.block)
    total.add_incoming(s.fadd(total, s.fmul(value, s.splat(f32x8, weight))), b.block)
    b.branch(head)
    b.position_at_end(done)
    s.store_first(f32x8, total, out, count)


def experts_sum() -> Callable[[int, int, int, int], None]:
    """Kernel `experts_sum`: items, item stride, mix, mix row stride, used, out, out row stride, elements, rows (index
    of the step's row count), ids, ids row stride.

    out[row] = sum over places a in order, from 0 up to the first negative id, of mix[row][a] * items[row * used + a].
    A rank sums the elements that are its outputs of the down matrices (`expert_matmul`), and need not wait for others
    unless they may have helped it (`lent_experts`).
    """

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows = argument(step, argument(args, 8))
        used, width = argument(args, 4), argument(args, 7)
        begin, end = share_start(width, rank, ranks), share_end(width, rank, ranks)
        for row in range(rows):
            chosen, ids = 0, argument(args, 9) + row * argument(args, 10)
            while chosen < used and load_i32(ids + 4 * chosen) >= 0:
                chosen += 1
            for start in range(begin, end, 8):
                weighted_sum_8(
                    argument(args, 0) + row * used * argument(args, 1) + 4 * start, argument(args, 1),
                    argument(args, 2) + row * argument(args, 3), chosen,
                    argument(args, 5) + row * argument(args, 6) + 4 * start, end - start,
                )  # fmt: skip

    return kernel


def dequantise_block(name: str) -> Any:
    """Numba function (block, out): the elements of one block as f32."""

    @emits(types.void, _INT, _INT)
    def dequantise(s: Emitter, address: Value, out: Value) -> None:
        single = f32x8.ir.element
        half = vector("f16", 1).ir.element

        def scalar(at: int) -> Value:
            return s.b.fpext(s.b.bitcast(s.load_scalar("i16", address, at), half), single)

        if name in ELEMENT_BYTES:
            s.store(load_float(s, name, address), out)
            return
        kind: type[BlockFormat] = (SUPER_BLOCKS | SMALL_BLOCKS)[name]
        block: Any = kind(s, address)
        d = s.lane(block_scales(s, kind, [address]), 0)
        minimum = None if kind.minimum_at is None else scalar(kind.minimum_at)
        widen = s.sext if kind.signed else s.zext
        for start in range(0, kind.elements, 8):
            group, within = divmod(start, 32)
            bytes_ = s.lanes(block.values(group), range(within, within + 8))
            value = s.sub(widen(i32x8, bytes_), s.splat_constant(i32x8, kind.offset))
            value = s.to_float(f32x8, value)
            if name in SMALL_BLOCKS:
                value = s.fmul(s.splat(f32x8, d), value)
                if minimum is not None:
                    value = s.fadd(value, s.splat(f32x8, minimum))
            else:
                sub, odd = divmod(start // 16, 2)
                scale = s.b.sitofp(s.lane(block.scales, sub + 8 * odd), single)
                value = s.fmul(s.splat(f32x8, s.fmul(d, scale)), value)
                if minimum is not None:
                    least = s.b.sitofp(s.lane(block.minima, sub + 8 * odd), single)
                    value = s.fsub(value, s.splat(f32x8, s.fmul(minimum, least)))
            s.store(value, out, 4 * start)

    return dequantise


def embed(name: str) -> Callable[[int, int, int, int], None]:
    """Kernel `embed_<type>`: weight, bytes of a row, blocks of a row, out, out row stride."""
    dequantise = dequantise_block(name)
    kinds: dict[str, type[BlockFormat]] = {**SUPER_BLOCKS, **SMALL_BLOCKS}
    elements = 1 if name in ELEMENT_BYTES else kinds[name].elements
    nbytes = ELEMENT_BYTES[name] if name in ELEMENT_BYTES else kinds[name].nbytes

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows, tokens = argument(step, 0), argument(step, 2)
        blocks = argument(args, 2)
        for row in range(share_start(rows, rank, ranks), share_end(rows, rank, ranks)):
            source = argument(args, 0) + load_i32(tokens + 4 * row) * argument(args, 1)
            target = argument(args, 3) + row * argument(args, 4)
            for block in range(blocks):
                dequantise(source + block * nbytes, target + block * elements * 4)

    return kernel
