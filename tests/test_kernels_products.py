"""Activation quantisation and matrix products, bit for bit against NumPy in the stated orders, for every quant type."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_bytes import random_blocks
from in_process import aligned_bytes, run_kernel
from kernel_references import (
    FLOATS,
    SUPER,
    Floats,
    product,
    quantise_q8_0,
    quantise_q8_k,
    random_weights,
    to_bf16,
)
from numpy.typing import NDArray

from bloomery.cpu_experts.kernels import WEIGHT_TYPES
from bloomery.cpu_experts.kernels.layouts import (
    ACTIVATION_ELEMENTS,
    BUFFER_BYTES,
    EXPERTS_HEAD,
    SUPER_TILE_BYTES,
    aligned,
    planes,
    tile_area,
)
from bloomery.cpu_experts.lowering import activation_kind
from bloomery.runtime.quant_types import QuantType

INFINITY = int(np.array(np.inf).view(np.int64))
SPLIT = [*range(0, 16, 2), *range(1, 16, 2)]


def step_of(rows: int) -> NDArray[np.int64]:
    return np.array([rows, rows, 0, 0, 0, 0], np.int64)


def activations(generator: np.random.Generator, rows: int, width: int) -> Floats:
    """Magnitudes of many scales, a block of zeros, and a block whose extreme occurs with both signs."""
    x = generator.standard_normal((rows, width)) * np.exp(2 * generator.standard_normal((rows, 1)))
    x = x.astype(np.float32)
    if width >= 512:
        x[0, :256] = 0
        x[0, 300], x[0, 299] = np.abs(x[0, 256:512]).max() * 2, -np.abs(x[0, 256:512]).max() * 2
    return x


class Quantised:
    """x in the form `kind`, made by the kernel; garbage where the kernel wrote nothing. `own`: made by every rank for
    itself; `memory` then is rank 0's, `areas` are all."""

    def __init__(self, kind: str, x: Floats, ranks: int = 1, up: Floats | None = None, own: bool = False) -> None:
        rows, width = x.shape
        self.kind, self.width = kind, width
        self.d_plane, self.sums_plane, self.stride = planes(kind, width)
        self.areas = aligned_bytes((ranks if own else 1) * rows * self.stride, 0xFF).reshape(-1, rows, self.stride)
        self.memory = self.areas[0]
        buffer = aligned_bytes(BUFFER_BYTES * ranks)
        blocks = width // ACTIVATION_ELEMENTS[kind]
        source = (x.ctypes.data, x.strides[0], 0, 0 if up is None else up.ctypes.data)
        target = (self.memory.ctypes.data, self.stride, self.d_plane, self.sums_plane, buffer.ctypes.data, INFINITY)
        words = [0, 1, 1, blocks, *source, *target, self.areas.strides[0] * own]
        run_kernel(f"quantise_{kind}", words, step_of(rows), ranks)

    def plane(self, row: int, name: str) -> NDArray[np.uint8]:
        starts = {"values": 0, "d": self.d_plane, "sums": self.sums_plane}
        blocks = self.width // ACTIVATION_ELEMENTS[self.kind]
        sizes = {"values": self.width, "d": 4 * blocks, "sums": blocks * (32 if self.kind == "Q8_K" else 8)}
        return self.memory[row, starts[name] : starts[name] + sizes[name]]


@pytest.mark.parametrize("ranks", [1, 3])
def test_q8_k_is_ggmls(ranks: int) -> None:
    x = activations(np.random.default_rng(11), 5, 1024)
    made = Quantised("Q8_K", x, ranks)
    for row, source in enumerate(x):
        values, d, sums = quantise_q8_k(source)
        np.testing.assert_array_equal(made.plane(row, "values").view(np.int8), values)
        np.testing.assert_array_equal(made.plane(row, "d").view(np.float32), d)
        found = made.plane(row, "sums").view(np.int16).reshape(-1, 16)
        np.testing.assert_array_equal(found, sums.reshape(-1, 16)[:, SPLIT])


@pytest.mark.parametrize("ranks", [1, 3])
def test_q8_0_and_q8_1_are_ggmls(ranks: int) -> None:
    x = activations(np.random.default_rng(12), 5, 1056)
    x[1, 64:96] = np.arange(-16, 16) + 0.5  # ties: to even
    x[1, 64] = 127
    made = Quantised("Q8_0", x, ranks)
    for row, source in enumerate(x):
        values, d, sums, weighted = quantise_q8_0(source)
        np.testing.assert_array_equal(made.plane(row, "values").view(np.int8), values)
        np.testing.assert_array_equal(made.plane(row, "d").view(np.float32), d)
        np.testing.assert_array_equal(made.plane(row, "sums").view(np.int32)[0::2], sums)
        np.testing.assert_array_equal(made.plane(row, "sums").view(np.float32)[1::2], weighted)


@pytest.mark.parametrize("kind", ["Q8_K", "Q8_0", "F16", "BF16"])
def test_every_rank_can_quantise_for_itself(kind: str) -> None:
    x = activations(np.random.default_rng(15), 5, 1024)
    shared, own = Quantised(kind, x), Quantised(kind, x, 3, own=True)
    assert len(own.areas) == 3 and (own.areas == shared.memory).all()


def test_f16_and_bf16_round_to_nearest_even() -> None:
    x = activations(np.random.default_rng(13), 3, 77)
    x[0, :4] = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8]
    half = Quantised("F16", x).memory[:, : 2 * 77].copy().view(np.uint16)
    np.testing.assert_array_equal(half, x.astype(np.float16).view(np.uint16))
    brain = Quantised("BF16", x).memory[:, : 2 * 77].copy().view(np.uint16)
    np.testing.assert_array_equal(brain, to_bf16(x))
    x[1, 0] = np.float32(np.nan)
    assert np.isnan(
        (Quantised("BF16", x).memory[1, :2].copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    )


@pytest.mark.parametrize("kind", ["Q8_K", "Q8_0"])
def test_quantising_silu_gate_times_up_equals_doing_both(kind: str) -> None:
    generator = np.random.default_rng(14)
    gate, up = (activations(generator, 3, 512) for _ in range(2))
    whole = np.zeros_like(gate)
    places = [word for a in (gate, up, whole) for word in (a.ctypes.data, a.strides[0], 0)]
    run_kernel("swiglu", [0, 1, 1, 512, *places, INFINITY], step_of(3), 2)
    np.testing.assert_array_equal(Quantised(kind, gate, 2, up).memory, Quantised(kind, whole).memory)


def tiles_area(name: str, blocks: int) -> int:
    """Bytes of a rank's scratch for decoded weights."""
    if name in FLOATS:
        return 0
    return max(aligned(blocks * SUPER_TILE_BYTES), aligned(tile_area(activation_kind(name), blocks)))


def multiply(name: str, weights: NDArray[np.uint8], x: Floats, ranks: int, bias: Floats | None = None) -> Floats:
    """The kernel's product of weights (N rows) and x (R, K)."""
    rows, width = x.shape
    out = np.full((rows, len(weights)), np.nan, np.float32)
    blocks = width // QuantType.named(name).block_elements
    if activation_kind(name) == "F32":
        source = (x.ctypes.data, x.strides[0], 0, 0)
    else:
        made = Quantised(activation_kind(name), x)
        source = (made.memory.ctypes.data, made.stride, made.d_plane, made.sums_plane)
    area = tiles_area(name, blocks)
    tiles = aligned_bytes(ranks * area, 0xFF)
    job = (weights.ctypes.data, weights.strides[0], blocks, len(weights), 0, out.ctypes.data, out.strides[0])
    bias_at = 0 if bias is None else bias.ctypes.data
    words = [0, *source, tiles.ctypes.data, area, 1, *job, bias_at]
    run_kernel(f"matmul_{name}", words, step_of(rows), ranks)
    return out


def width_for(name: str) -> int:
    return 51 if name in FLOATS else 768 if name in SUPER else 160


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_products_equal_the_reference_bit_for_bit(name: str) -> None:
    """One row takes the path straight from the blocks, several the path through tiles; ranks cut the outputs."""
    generator = np.random.default_rng(20)
    width = width_for(name)
    for outputs in (1, 6, 37):
        weights = random_weights(generator, name, outputs, width)
        x = activations(generator, 5, width)
        expected = product(name, weights, x)
        np.testing.assert_array_equal(multiply(name, weights, x, 1), expected)
        np.testing.assert_array_equal(multiply(name, weights, x, 2), expected)
        for row in range(5):
            for ranks in (1, 3):
                alone = multiply(name, weights, x[row : row + 1].copy(), ranks)
                np.testing.assert_array_equal(alone, expected[row : row + 1])
    bias = generator.standard_normal(37, dtype=np.float32)
    np.testing.assert_array_equal(multiply(name, weights, x, 3, bias), expected + bias)


@pytest.mark.parametrize("name", [name for name in WEIGHT_TYPES if name not in FLOATS])
def test_extreme_integers_do_not_saturate(name: str) -> None:
    """All bits set in weights, and activations at the ends of their range: the widest sums there are."""
    width = 512
    kind = QuantType.named(name)
    weights = np.full((4, kind.row_bytes(width)), 0xFF, np.uint8)
    sound = random_weights(np.random.default_rng(21), name, 4, width).reshape(-1, kind.block_bytes)
    blocks = weights.reshape(-1, kind.block_bytes)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(name, (0, 2) if name[-1] in "1K" else (0,)):
        blocks[:, at : at + 2] = sound[:, at : at + 2]
    if name == "Q8_0":
        blocks[:2, 2:] = 0x80  # -128
    if name == "MXFP4":
        blocks[:, 0], blocks[0, 0], blocks[1, 0] = 120, 0, 1  # the two exponents without a normal number
        blocks[2:, 1:] = 0x77  # the greatest value
    for x in (np.ones((2, width), np.float32), -np.ones((2, width), np.float32)):
        x[1, ::2] *= -1
        expected = product(name, weights, x)
        np.testing.assert_array_equal(multiply(name, weights, x, 1), expected)
        np.testing.assert_array_equal(multiply(name, weights, x[:1].copy(), 1), expected[:1])
        np.testing.assert_array_equal(multiply(name, weights, np.tile(x, (8, 1)), 1), np.tile(expected, (8, 1)))


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_experts_equal_products_of_each_item(name: str) -> None:
    """One weight or two in one call; some experts are chosen by many rows, some by one, some by none."""
    generator = np.random.default_rng(22)
    width, outputs, experts, used, rows = width_for(name), 10, 7, 3, 6
    weights = [random_weights(generator, name, outputs * experts, width) for _ in range(2)]
    x = activations(generator, rows, width)
    ids = np.stack([generator.permutation(experts - 1)[:used] for _ in range(rows)]).astype(np.int32)
    ids[1:, 0] = 5  # ids may repeat in a row: the result is defined item by item
    ids[0] = 4, 1, 2  # a step of this row alone has one item an expert
    blocks = width // QuantType.named(name).block_elements
    if activation_kind(name) == "F32":
        source = (x.ctypes.data, x.strides[0], 0, 0)
    else:
        made = Quantised(activation_kind(name), x)
        source = (made.memory.ctypes.data, made.stride, made.d_plane, made.sums_plane)
    quantised = (x if source[0] == x.ctypes.data else made.memory).view(np.uint8).reshape(-1)
    whole = [product(name, weight, x).reshape(rows, experts, outputs) for weight in weights]
    expectations = [np.take_along_axis(each, ids[:, :, None].astype(np.int64), axis=1) for each in whole]
    for ranks in (1, 2, 3):
        outs = [np.full((rows * used, outputs), np.nan, np.float32) for _ in weights]
        area = 4 * (experts + 1 + 2 * rows * used) + 60 & ~63
        tile_bytes = tiles_area(name, blocks)
        tiles, lists = aligned_bytes(ranks * tile_bytes, 0xFF), aligned_bytes(ranks * area, 0xFF)
        jobs = [
            word
            for weight, out in zip(weights, outs)
            for word in (
                *(weight.ctypes.data, outputs * weight.strides[0], weight.strides[0], blocks, outputs),
                *(out.ctypes.data, out.strides[0]),
            )
        ]
        words = [
            0,
            *source,
            tiles.ctypes.data,
            tile_bytes,
            lists.ctypes.data,
            area,
            ids.ctypes.data,
            4 * used,
        ]
        for count, weights_at_once in ((rows, 2), (rows, 1), (1, 2), (1, 1)):
            for out in outs:
                out[:] = np.nan
            some = jobs[: 7 * weights_at_once]
            tail = (used, experts, 0, 0, 0, 0, weights_at_once, *some)
            run_kernel(f"experts_{name}", [*words, *tail], step_of(count), ranks)
            for expected, out in zip(expectations[:weights_at_once], outs):
                np.testing.assert_array_equal(out.reshape(rows, used, outputs)[:count], expected[:count])
        run_kernel(f"experts_{name}", [*words, used, experts, 1, 0, 0, 0, 1, *jobs[:7]], step_of(1), ranks)
        np.testing.assert_array_equal(outs[0][:used], whole[0][range(used), ids[0]])  # a row of x for every item
        # every rank reads the x that it has for itself; matrices lie in another order, as a table says
        order = [4, 2, 5, 1, 6, 0, 3]
        moved = [weight.reshape(experts, -1)[order].copy() for weight in weights]
        for at, weight in enumerate(moved):
            jobs[7 * at] = weight.ctypes.data
        for count, weights_at_once in ((1, 2), (rows, 2), (1, 1)):
            for out in outs:
                out[:] = np.nan
            for rank in range(ranks):
                areas = aligned_bytes(ranks * quantised.nbytes, 0xFF)
                areas.reshape(ranks, -1)[rank] = quantised
                words[1] = areas.ctypes.data
                some = [weights_at_once, *jobs[: 7 * weights_at_once]]
                tail = (used, experts, 0, quantised.nbytes, EXPERTS_HEAD + len(some), 0, *some)
                table = [order.index(expert) for expert in range(experts)]
                run_kernel(f"experts_{name}", [*words, *tail, *table], step_of(count), ranks, [rank])
            for expected, out in zip(expectations[:weights_at_once], outs):
                np.testing.assert_array_equal(out.reshape(rows, used, outputs)[:count], expected[:count])


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_embedding_rows_are_the_gguf_packages(name: str) -> None:
    generator = np.random.default_rng(23)
    width = width_for(name)
    weights = np.frombuffer(random_blocks(generator, name, (width, 9)), np.uint8).reshape(9, -1).copy()
    expected = QuantType.named(name).dequantise(weights).reshape(9, width)
    tokens = np.array([8, 0, 3, 3, 7], np.int32)
    out = np.full((5, width), np.nan, np.float32)
    step = step_of(5)
    step[2] = tokens.ctypes.data
    blocks = width // QuantType.named(name).block_elements
    words = [weights.ctypes.data, weights.strides[0], blocks, out.ctypes.data, out.strides[0]]
    run_kernel(f"embed_{name}", words, step, 2)
    np.testing.assert_array_equal(out, expected[tokens])
