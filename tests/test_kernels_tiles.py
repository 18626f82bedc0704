"""Tile registers (AMX): every word of the vocabulary, and products of many rows, bit for bit against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_references import product, random_weights, to_bf16
from numpy.typing import NDArray
from test_kernels_products import activations, multiply, width_for
from test_kernels_simd import generator, run

from bloomery.cpu_experts import isa, tiles
from bloomery.cpu_experts.kernels import WEIGHT_TYPES
from bloomery.cpu_experts.kernels.layouts import TILE_CHUNK
from bloomery.cpu_experts.kernels.tile_matmul import TILES_FROM
from bloomery.cpu_experts.simd import Emitter, Value

needs_amx = pytest.mark.skipif(isa.AMX not in isa.available_isas(), reason="needs AMX-INT8 and AMX-BF16")


def tile_product(
    a: NDArray[np.generic], b: NDArray[np.generic], c: NDArray[np.generic], signs: tuple[bool, bool] | None
) -> NDArray[np.int32]:
    """c + a @ b by tiles of the operands' own shapes (b as products want it); rows past them must stay untouched."""
    out = np.full((16, 16), 7, np.int32)
    shapes = [(x.shape[0], x.view(np.uint8).shape[1]) for x in (c, a, b)]

    def body(s: Emitter, source: Value, o: Value, n: Value) -> None:
        tiles.configure(s, shapes)
        at = 0
        for tile, (rows, nbytes) in enumerate(shapes):
            tiles.load(s, tile, source, at, nbytes)
            at += rows * nbytes
        if signs is None:
            tiles.add_bf16_products(s, 0, 1, 2)
        else:
            tiles.add_products(s, 0, 1, 2, *signs)
        tiles.store(s, 0, o)
        tiles.release(s)

    run(body, *(np.ascontiguousarray(x).view(np.uint8) for x in (c, a, b)), out=out)
    return out


def woven(b: NDArray[np.generic], together: int) -> NDArray[np.generic]:
    """(k, columns) with `together` consecutive k side by side."""
    k, columns = b.shape
    return b.reshape(k // together, together, columns).swapaxes(1, 2).reshape(k // together, -1)


@needs_amx
@pytest.mark.parametrize("signs", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [(16, 64, 16), (5, 12, 3)])
def test_byte_products(signs: tuple[bool, bool], shape: tuple[int, int, int]) -> None:
    rows, k, columns = shape
    ranges = [(-128, 128) if signed else (0, 256) for signed in signs]
    a = generator().integers(*ranges[0], (rows, k))
    b = generator().integers(*ranges[1], (k, columns))
    a[0], b[:, 0] = ranges[0][0] or 255, ranges[1][0] or 255  # the widest sums: nothing saturates
    c = generator().integers(-(2**30), 2**30, (rows, columns)).astype(np.int32)
    kinds = [np.int8 if signed else np.uint8 for signed in signs]
    found = tile_product(a.astype(kinds[0]), woven(b.astype(kinds[1]), 4), c, signs)
    np.testing.assert_array_equal(found[:rows, :columns], c + a @ b)
    assert (found[rows:] == 7).all() and (found[:, columns:] == 7).all()


@needs_amx
def test_bf16_products_of_integers_are_exact() -> None:
    a = 64 * generator().integers(-32, 33, (16, 32))
    b = generator().integers(0, 256, (32, 16))
    c = generator().integers(-(2**20), 2**20, (16, 16)).astype(np.float32)
    operands = [to_bf16(x.astype(np.float32)) for x in (a, b)]
    found = tile_product(operands[0], woven(operands[1], 2), c, None).view(np.float32)
    np.testing.assert_array_equal(found, c + (a @ b).astype(np.float32))


@needs_amx
def test_zeroed_and_strided_tiles() -> None:
    x = generator().integers(0, 256, (32, 64)).astype(np.uint8)
    out = np.full((32, 64), 9, np.uint8)

    def body(s: Emitter, source: Value, o: Value, n: Value) -> None:
        tiles.configure(s, [(16, 64), (16, 64)])
        tiles.load(s, 0, source, 64, 128)  # every second row
        tiles.load(s, 1, source)
        tiles.zero(s, 1)
        tiles.store(s, 0, o, 0, 128)
        tiles.store(s, 1, o, 64, 128)
        tiles.release(s)

    run(body, x, out=out)
    np.testing.assert_array_equal(out[::2], x[1::2])
    assert (out[1::2] == 0).all()


def test_amx_needs_cpu_and_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    features = dict.fromkeys(isa.NEEDS[isa.AMX], True)
    monkeypatch.setenv("BLOOMERY_ISA", "amx")
    monkeypatch.setattr(isa, "tiles_permitted", lambda: True)
    assert isa.refusal(features) is None
    reason = isa.refusal({**features, "amx-bf16": False})
    assert reason is not None and "BLOOMERY_ISA=amx" in reason and "AMX-BF16" in reason
    monkeypatch.setattr(isa, "tiles_permitted", lambda: False)
    reason = isa.refusal(features)
    assert reason is not None and "BLOOMERY_ISA=amx" in reason and "permission" in reason
    monkeypatch.setattr(isa, "host_features", lambda: features)
    assert isa.available_isas()[-1] == isa.AVX512VNNI, "without permission the next best is taken"


@needs_amx
@pytest.mark.parametrize("name", [name for name in WEIGHT_TYPES if name not in ("F32", "F16", "BF16")])
def test_many_rows_equal_the_reference_bit_for_bit(name: str) -> None:
    """Odd numbers of weight rows and rows of activations, blocks that do not fill a unit."""
    for outputs, rows in ((1, TILES_FROM), (70, 37)):
        width = width_for(name)
        weights = random_weights(generator(), name, outputs, width)
        x = activations(generator(), rows, width)
        expected = product(name, weights, x)
        for ranks in (1, 3):
            np.testing.assert_array_equal(multiply(name, weights, x, ranks), expected)


@needs_amx
def test_more_rows_than_are_packed_at_once() -> None:
    weights = random_weights(generator(), "Q4_K", 3, 256)
    x = activations(generator(), 2 * TILE_CHUNK + 5, 256)
    np.testing.assert_array_equal(multiply("Q4_K", weights, x, 2), product("Q4_K", weights, x))
