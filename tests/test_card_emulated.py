"""Kernels without a card: whole ops on the emulator, against the float64 reference; mostly those of prompt blocks."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import numpy as np
import pytest
from card_stand import Bench, expected, tensor
from emulated_card import EmulatedCard, library, run
from kernel_references import product, random_weights
from numpy.typing import NDArray
from running import rows_of

from bloomery.runtime.program import (
    Attention,
    CacheState,
    CacheWrite,
    EmbedRows,
    MatMul,
    RoutedExperts,
    Router,
    View,
)

pytestmark = pytest.mark.timeout(300)
SEED = 20261130
BAND = 1e-3  # of the greatest magnitude: f16 weights and activations


def random(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng((SEED, seed)).standard_normal(shape, np.float32)


def close(found: NDArray[np.float32], wanted: NDArray[np.floating], band: float = BAND) -> None:
    assert np.isfinite(found).all()
    assert np.abs(found - wanted).max() <= band * np.abs(wanted).max(), np.abs(found - wanted).max()


def test_libraries_share_no_memory() -> None:
    """Seen failing without -fno-gnu-unique: kernels of Q6_K wrote behind the smaller rings of Q4_K, as both then had
    them."""
    symbols = subprocess.run(["nm", library("matmul", "Q5_K")._name], capture_output=True, text=True, check=True).stdout
    assert "rings" in symbols
    assert not [line for line in symbols.splitlines() if " u " in line]


def test_a_write_beyond_shared_memory_is_told() -> None:
    """A router that is given a few bytes less than its scores take."""
    bench = Bench()
    ids, mix = bench.buffer("ids", 2, "i32"), bench.buffer("mix", 2)
    scores = bench.input("scores", random((64, 6)))
    card = EmulatedCard(bench.program(Router("router", scores, ids, mix, None, "softmax", True, 1.0, 1, 1)))
    launches = card.run(rows_of(np.arange(1)), block=False)
    (launch,) = (launch for launch in launches if launch.kernel.function == "router")
    run(launch)
    with pytest.raises(AssertionError, match=r"router.* writes beyond its 40 bytes of shared memory"):
        run(replace(launch, shared=40))


@pytest.mark.parametrize("name, band", (("Q8_0", BAND), ("F32", 1e-6)))
def test_products(name: str, band: float) -> None:
    """Widths and heights that are no multiples of a tile's, two weights in one launch."""
    bench, generator = Bench(), np.random.default_rng(SEED)
    x = bench.input("x", random((64, 96)))
    outs = bench.buffer("y0", 7), bench.buffer("y1", 130)
    for i, out in enumerate(outs):
        blocks = random_weights(generator, name, out.width, 96)
        bench.weights[f"w{i}"] = tensor(f"w{i}", (96, out.width), name, blocks)
    program = bench.program(MatMul("product", x, outs, ("w0", "w1"), (None, None)))
    card, rows = EmulatedCard(program), rows_of(np.arange(40))
    card.run(rows, block=True)
    for out, wanted in zip(outs, expected(program, rows, *outs)):
        close(card.read(out, 40), wanted, band)


def test_routed_experts() -> None:
    bench, generator = Bench(), np.random.default_rng(SEED)
    experts, used, width, hidden = 6, 2, 96, 64
    x, logits = bench.input("x", random((64, width))), bench.input("scores", random((64, experts), 1))
    ids, mix, out = bench.buffer("ids", used, "i32"), bench.buffer("mix", used), bench.buffer("out", width)
    for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        blocks = random_weights(generator, "Q8_0", experts * shape[1], shape[0])
        bench.weights[name] = tensor(name, (*shape, experts), "Q8_0", blocks)
    program = bench.program(
        Router("router", logits, ids, mix, None, "softmax", True, 1.0, 1, 1),
        RoutedExperts("experts", x, ids, mix, out, "gate", "up", "down"),
    )
    card, rows = EmulatedCard(program), rows_of(np.arange(40))
    launches = card.run(rows, block=True)
    assert "experts_open" in {launch.kernel.function for launch in launches}
    close(card.read(out, 40), expected(program, rows, out)[0])


def test_attention() -> None:
    """Two blocks of one slot, their borders inside a split; what lies beyond in the cache is no number."""
    kv, heads, width, n, start = 2, 4, 64, 105, 37
    bench = Bench()
    q, k, v = (bench.input(name, random((64, w * width), w)) for name, w in (("q", heads), ("k", kv), ("v", kv)))
    for name in ("keys", "values"):
        bench.states[name] = CacheState(name, kv * width)
    out = bench.buffer("out", heads * width)
    queries, outs = View(q.buffer, 0, width, heads, width), View(out.buffer, 0, width, heads, width)
    op = Attention("attention", queries, outs, "keys", "values", kv, width, width, 2 * width**-0.5)
    program = bench.program(CacheWrite("write keys", k, "keys"), CacheWrite("write values", v, "values"), op)
    tokens = np.random.default_rng(SEED).integers(0, 64, n)
    card = EmulatedCard(program)
    for area in ("cache keys", "cache values"):
        card.areas[area][:] = 0xFF
    found = []
    for first, last in ((0, start), (start, n)):
        launches = card.run(rows_of(tokens[first:last], slot=1, start=first), block=True)
        assert "flash_64_64" in {launch.kernel.function for launch in launches}
        found.append(card.read(outs, last - first))
    close(np.concatenate(found), expected(program, rows_of(tokens), outs)[0], 2e-3)


@pytest.mark.parametrize("heads, kv, width, n", ((16, 2, 128, 140), (5, 1, 64, 260)))
def test_attention_of_a_step(heads: int, kv: int, width: int, n: int) -> None:
    """Rows over several splits, joined in one run or two, few blocks for them, beside garbage in the cache; a row alone
    and among others gives the same bits. The band is that of keys, values and queries in f16."""
    bench = Bench()
    q, k, v = (bench.input(name, random((64, w * width), w)) for name, w in (("q", heads), ("k", kv), ("v", kv)))
    for name in ("keys", "values"):
        bench.states[name] = CacheState(name, kv * width)
    out = bench.buffer("out", heads * width)
    queries, outs = View(q.buffer, 0, width, heads, width), View(out.buffer, 0, width, heads, width)
    op = Attention("attention", queries, outs, "keys", "values", kv, width, width, 2 * width**-0.5)
    program = bench.program(CacheWrite("write keys", k, "keys"), CacheWrite("write values", v, "values"), op)
    tokens = np.random.default_rng(SEED).integers(0, 64, n)
    card = EmulatedCard(program, context=320)
    card.multiprocessors = 1
    for area in ("cache keys", "cache values"):
        card.areas[area][:] = 0xFF
    for first in range(0, n - 3, 137):
        card.run(rows_of(tokens[first : first + 137], slot=1, start=first), block=True)
    wanted = expected(program, rows_of(tokens), outs, context=320)[0]
    launches = card.run(rows_of(tokens[-3:], slot=1, start=n - 3), block=False)
    assert f"attend_cores_{width}" in {launch.kernel.function for launch in launches}
    together = card.read(outs, 3)
    close(together, wanted[-3:], 2e-3)
    card.run(rows_of(tokens[-1:], slot=1, start=n - 1), block=False)
    assert np.array_equal(card.read(outs, 1)[0], together[2])


@pytest.mark.parametrize("name", ("MXFP4", "IQ3_XXS"))
def test_types_with_tables(name: str) -> None:
    """Products of a decode step (the host's integers, other float sums), of a prompt block, and embedding rows."""
    bench, generator, width = Bench(), np.random.default_rng(SEED), {"MXFP4": 352, "IQ3_XXS": 768}[name]
    values = random((64, width), 5)
    x, out, row = bench.input("x", values), bench.buffer("y", 35), bench.buffer("row", width)
    blocks = random_weights(generator, name, 35, width)
    bench.weights["w"] = tensor("w", (width, 35), name, blocks)
    bench.weights["table"] = tensor("table", (width, 64), name, random_weights(generator, name, 64, width))
    program = bench.program(MatMul("product", x, (out,), ("w",), (None,)), EmbedRows("embed", row, "table"))
    card = EmulatedCard(program)
    for rows in (1, 5):
        card.run(rows_of(np.arange(rows)), block=False)
        close(card.read(out, rows)[:, 0], product(name, blocks, values[:rows]), 1e-6)
        close(card.read(row, rows)[:, 0], bench.weights["table"].dequantise_rows(np.arange(rows)), 1e-6)
    card.run(rows_of(np.arange(40)), block=True)
    close(card.read(out, 40), expected(program, rows_of(np.arange(40)), out)[0])
