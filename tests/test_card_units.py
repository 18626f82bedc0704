"""Kernels that a decode step of one row is made of, on the emulator: weights that go straight to registers, for every
number of lanes that a row may have; the choice of experts by a block of threads."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from card_stand import Bench, expected, tensor
from emulated_card import EmulatedCard
from kernel_references import random_weights
from numpy.typing import NDArray
from running import rows_of
from test_card_chains import Unchained

from bloomery.gpu_worker.lowering import Lowering
from bloomery.gpu_worker.products import UNIT_TYPES
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.ops_deepseek4 import HyperCollapse, HyperPost
from bloomery.runtime.program import Add, MatMul, Op, RmsNorm, RoutedExperts, Router, SwiGlu, View

pytestmark = pytest.mark.timeout(300)
BAND = 0.02  # of activations in eight bits
Kind = Literal["Q3_K", "Q4_K", "Q6_K"]


def weights(generator: np.random.Generator, kind: str, name: str, *shape: int) -> Tensor:
    return tensor(name, shape, kind, random_weights(generator, kind, int(np.prod(shape[1:])), shape[0]))


def close(found: NDArray[np.float32], wanted: NDArray[np.floating], band: float = BAND) -> None:
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - wanted) <= band * np.linalg.norm(wanted)


@pytest.mark.parametrize("kind", UNIT_TYPES)
@pytest.mark.parametrize("width", (256, 512, 768, 1024, 1280, 1536, 2048, 4096, 4352))
def test_products(kind: Kind, width: int) -> None:
    """Rows of 4 to 32 lanes, two and three units a lane and lanes without any; a last warp that is not full, weights
    that begin at any even byte; rows together as each alone, with a sum, bit for bit."""
    generator = np.random.default_rng(width)
    bench = Bench()
    x = bench.input("x", generator.standard_normal((64, width), np.float32))
    before = bench.input("before", generator.standard_normal((64, 37), np.float32))
    y, total = bench.buffer("y", 37), bench.buffer("total", 37)
    bench.weights["w"] = weights(generator, kind, "w", width, 37)
    program = bench.program(MatMul("product", x, (y,), ("w",), (None,)), Add("sum", before, y, total))
    rows = rows_of(np.arange(5))
    card = EmulatedCard(program)
    card.run(rows, block=False)
    together = card.read(total, 5)
    for view in (y, total):
        close(card.read(view, 5), expected(program, rows, view)[0])
    for row in range(5):
        card.run(rows_of(np.arange(row, row + 1)), block=False)
        assert np.array_equal(card.read(total, 1)[0], together[row])


@pytest.mark.parametrize("kind", UNIT_TYPES)
@pytest.mark.parametrize("width, hidden", ((256, 768), (2048, 256), (4096, 512)))
def test_experts(kind: Kind, width: int, hidden: int) -> None:
    """Gate and up of a warp's rows at once and, where a row has all lanes, one after the other; one row and several."""
    generator = np.random.default_rng(hidden)
    experts, used = 5, 3
    bench = Bench()
    x = bench.input("x", generator.standard_normal((64, width), np.float32))
    logits = bench.input("scores", generator.standard_normal((64, experts), np.float32))
    ids, mix, out = bench.buffer("ids", used, "i32"), bench.buffer("mix", used), bench.buffer("out", width)
    for name, *shape in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        bench.weights[name] = weights(generator, kind, name, *shape, experts)
    program = bench.program(
        Router("router", logits, ids, mix, None, "softmax", True, 1.0, 1, 1),
        RoutedExperts("experts", x, ids, mix, out, "gate", "up", "down"),
    )
    for count in (1, 3):
        rows = rows_of(np.arange(count))
        card = EmulatedCard(program)
        names = {launch.kernel.function for launch in card.run(rows, block=False)}
        assert "close_experts" in names
        close(card.read(out, count), expected(program, rows, out)[0], 2 * BAND)  # rounded twice


@pytest.mark.parametrize("kind", UNIT_TYPES)
@pytest.mark.parametrize("width", (256, 768, 2048, 4352))
@pytest.mark.parametrize("copies, collapses", ((1, True), (3, False), (4, True)))
def test_products_that_are_spread(
    kind: Kind, width: int, copies: int, collapses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product, the residual copies made of it and their sum: the bits of one after the other, however many rows a
    warp has."""
    generator = np.random.default_rng(width)
    bench, outputs = Bench(), 37
    x = bench.input("x", generator.standard_normal((64, width), np.float32))
    given = (("streams", copies * outputs), ("post", copies), ("mixing", copies * copies), ("pre", copies))
    streams, post, mixing, pre = (
        bench.input(name, generator.standard_normal((64, size), np.float32)) for name, size in given
    )
    streams = View(streams.buffer, 0, outputs, copies, outputs)
    y = bench.buffer("y", outputs)
    bench.weights["w"] = weights(generator, kind, "w", width, outputs)
    collapsed = bench.input("collapsed", np.zeros((64, outputs), np.float32))
    ops: list[Op] = [
        MatMul("product", x, (y,), ("w",), (None,)),
        HyperPost("spread", y, streams, post, mixing, streams),
    ]
    if collapses:
        ops.append(HyperCollapse("collapse", streams, pre, collapsed))
    program = bench.program(*ops)
    found = []
    for lowering in (Lowering, Unchained):
        monkeypatch.setattr("bloomery.gpu_worker.lowering.Lowering", lowering)
        card = EmulatedCard(program)
        names = {launch.kernel.function for launch in card.run(rows_of(np.arange(3, 4)), block=False)}
        assert ("spread_matmul" in names) == (lowering is Lowering) != ("hyper_post" in names)
        assert ("hyper_collapse" in names) == (lowering is Unchained and collapses)
        found.append((card.read(y, 1), card.read(streams, 1), card.read(collapsed, 1)))
    assert found[0][2].any() == collapses
    for one, other in zip(*found, strict=True):
        assert np.isfinite(one).all() and np.array_equal(one, other)


@pytest.mark.parametrize("kind", UNIT_TYPES)
@pytest.mark.parametrize("width, hidden", ((256, 768), (2048, 256), (4352, 512)))
def test_experts_with_one_that_every_row_takes(
    kind: Kind, width: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With limits of its own, and the sum spread over copies that are collapsed: the bits of all ops one by one."""
    generator = np.random.default_rng(hidden)
    experts, used, copies = 5, 3, 4
    bench = Bench()
    x = bench.input("x", generator.standard_normal((64, width), np.float32))
    logits = bench.input("scores", generator.standard_normal((64, experts), np.float32))
    given = (("streams", copies * width), ("post", copies), ("mixing", copies * copies), ("pre", copies))
    streams, post, mixing, pre = (
        bench.input(name, generator.standard_normal((64, size), np.float32)) for name, size in given
    )
    streams = View(streams.buffer, 0, width, copies, width)
    ids, mix, out = bench.buffer("ids", used, "i32"), bench.buffer("mix", used), bench.buffer("out", width)
    gate, up, inside = (bench.buffer(name, hidden) for name in ("own gate", "own up", "inside"))
    shared, collapsed = bench.buffer("shared", width), bench.buffer("collapsed", width)
    for name, *shape in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        bench.weights[name] = weights(generator, kind, name, *shape, experts)
        bench.weights[f"own {name}"] = weights(generator, kind, f"own {name}", *shape)
    program = bench.program(
        Router("router", logits, ids, mix, None, "softmax", True, 1.0, 1, 1),
        RoutedExperts("experts", x, ids, mix, out, "gate", "up", "down", 0.5),
        MatMul("open", x, (gate, up), ("own gate", "own up"), (None, None)),
        SwiGlu("hidden", gate, up, inside, 0.25),
        MatMul("close", inside, (shared,), ("own down",), (None,)),
        Add("sum", out, shared, out),
        HyperPost("spread", out, streams, post, mixing, streams),
        HyperCollapse("collapse", streams, pre, collapsed),
    )
    found = []
    for lowering in (Lowering, Unchained):
        monkeypatch.setattr("bloomery.gpu_worker.lowering.Lowering", lowering)
        card = EmulatedCard(program)
        names = {launch.kernel.function for launch in card.run(rows_of(np.arange(3, 4)), block=False)}
        assert ("swiglu" in names) == ("hyper_post" in names) == (lowering is Unchained)
        assert ("hyper_collapse" in names) == (lowering is Unchained)
        found.append((card.read(out, 1), card.read(streams, 1), card.read(collapsed, 1)))
    for one, other in zip(*found, strict=True):
        assert np.isfinite(one).all() and np.array_equal(one, other)


@pytest.mark.parametrize("gating, biased", (("softmax", False), ("sigmoid", True)))
@pytest.mark.parametrize("experts, used", ((8, 2), (33, 3), (128, 8), (160, 6), (256, 16)))
@pytest.mark.parametrize("scores", ("random", "few values", "equal", "no numbers"))
def test_choices_of_a_block(
    gating: Literal["softmax", "sigmoid"],
    biased: bool,
    experts: int,
    used: int,
    scores: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts and mixing weights as the router's kernel gives them, whatever scores are equal or no number."""
    generator = np.random.default_rng(experts)
    width, hidden = 256, 256
    router = generator.standard_normal((experts, width), np.float32)
    if scores == "few values":
        router = router[generator.integers(0, 4, experts)]
    if scores == "equal":
        router[:] = router[0]
    if scores == "no numbers":
        router[generator.permutation(experts)[: experts // 2]] = np.nan
    bench = Bench()
    x = bench.input("x", generator.standard_normal((64, width), np.float32))
    normed, logits = bench.buffer("normed", width), bench.buffer("router scores", experts)
    ids, mix, out = bench.buffer("ids", used, "i32"), bench.buffer("mix", used), bench.buffer("out", width)
    bench.weights["norm"] = tensor("norm", (width,), "F32", np.ones(width, np.float32))
    bench.weights["router"] = tensor("router", (width, experts), "F32", router)
    bias = np.round(generator.standard_normal(experts)).astype(np.float32) / 8
    bench.weights["bias"] = tensor("bias", (experts,), "F32", bias)
    for name, *shape in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        bench.weights[name] = weights(generator, "Q4_K", name, *shape, experts)
    program = bench.program(
        RmsNorm("norm", x, normed, "norm", 1e-6),
        MatMul("scores", normed, (logits,), ("router",), (None,)),
        Router("router", logits, ids, mix, "bias" if biased else None, gating, True, 1.0, 1, 1),
        RoutedExperts("experts", normed, ids, mix, out, "gate", "up", "down"),
    )
    found = []
    for lowering in (Lowering, Unchained):
        monkeypatch.setattr("bloomery.gpu_worker.lowering.Lowering", lowering)
        card = EmulatedCard(program)
        names = {launch.kernel.function for launch in card.run(rows_of(np.arange(2)), block=False)}
        assert ("normed_scores" in names) == (lowering is Lowering)
        found.append([card.read(view, 2) for view in (View("ids", 0, used), View("mix", 0, used))])
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1], equal_nan=True)
