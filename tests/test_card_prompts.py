"""Prompt blocks on the card against float64 references and against themselves, at real and at odd sizes. Needs a card.

Bands: weights, activations, queries, keys and attention weights are rounded to f16, half a unit in 2^11 of each, and
their sums are f32; over n terms of either sign that is at most a few 2^-12 of the greatest result. Rows themselves are
what the file says they are: `expected` dequantises and multiplies in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from card_stand import Bench, expected, f32, need_card, on_card, read, tensor
from kernel_references import random_weights
from numpy.typing import NDArray
from oracle_data import QUANTISED, figures, quantised_file
from running import evaluate, greedy, rows_of
from test_card_models import model_on_card

from bloomery.gpu_worker.launches import MAX_ROWS
from bloomery.gpu_worker.products import WEIGHT_TYPES
from bloomery.runtime.divergence import kl_divergence
from bloomery.runtime.program import Attention, CacheState, CacheWrite, HeadMatMul, MatMul, RoutedExperts, Router, View
from bloomery.runtime.quant_types import QuantType

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SEED = 20261130
BAND = 1e-3  # of the greatest magnitude, see above
F32_BAND = 4e-6


@pytest.fixture(autouse=True, scope="module")
def card() -> None:
    need_card()


def random(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng((SEED, seed)).standard_normal(shape, np.float32)


def close(found: NDArray[np.float32], wanted: NDArray[np.floating], band: float) -> None:
    assert np.isfinite(found).all()
    assert np.abs(found - wanted).max() <= band * np.abs(wanted).max(), np.abs(found - wanted).max()


def many(rows: int) -> NDArray[np.int32]:
    return np.random.default_rng((SEED, rows)).integers(0, 64, rows).astype(np.int32)


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_products(name: str) -> None:
    """Several weights of odd heights in one op; rows of magnitudes 2^64 apart; a row's result depends on no other."""
    widths = (768, 2048) if QuantType.named(name).block_elements == 256 else (160, 2048, 96)
    for width in (*widths, 77) if name in ("F32", "F16", "BF16") else widths:
        bench = Bench()
        values = random((64, width), width) * np.float32(2.0) ** np.arange(-20, 44)[:, None].astype(np.float32)
        x = bench.input("x", values)
        heights = (1, 7, 130, 515, 64)
        generator = np.random.default_rng((SEED, width))
        outs = tuple(bench.buffer(f"y{i}", height) for i, height in enumerate(heights))
        for i, height in enumerate(heights):
            bench.weights[f"w{i}"] = tensor(
                f"w{i}", (width, height), name, random_weights(generator, name, height, width)
            )
        bench.weights["bias"] = f32("bias", random((7,)))
        names = tuple(f"w{i}" for i in range(5))
        program = bench.program(MatMul("product", x, outs, names, (None, "bias", None, None, None)))
        with on_card(program, prompt_block=256, deterministic=False) as executor:
            rows = rows_of(many(256))
            executor.step(rows)
            found = [read(executor, out, 256) for out in outs]
            wanted = expected(program, rows, *outs)
            unit = np.abs(np.concatenate(wanted, axis=2)).max(axis=(1, 2), keepdims=True)  # of each row: they differ
            for one, other in zip(found, wanted):
                assert np.isfinite(one).all()
                error = np.abs(one - other) / unit
                assert error.max() <= (F32_BAND if name == "F32" else BAND), error.max()
            part = rows_of(rows.tokens[100:141])
            executor.step(part)
            for one, out in zip(found, outs):
                assert (read(executor, out, 41) == one[100:141]).all(), "a row's result depends on the block"


@pytest.mark.parametrize("name, width", (("F32", 64), ("Q8_0", 128), ("Q8_0", 512), ("F16", 64), ("Q4_K", 256)))
def test_head_matmul(name: str, width: int) -> None:
    heads, outputs, rows = 5, 70, 200
    bench = Bench()
    bench.input("x", random((64, heads * (width + 30))))
    x = View("x", 10, width, heads, width + 20)
    blocks = random_weights(np.random.default_rng(SEED), name, heads * outputs, width)
    bench.weights["w"] = tensor("w", (width, outputs, heads), name, blocks)
    y = bench.buffer("y", heads * 100)
    out = View(y.buffer, 3, outputs, heads, 99)
    program = bench.program(HeadMatMul("heads", x, out, "w"))
    with on_card(program, prompt_block=256, deterministic=False) as executor:
        block = rows_of(many(rows))
        executor.step(block)
        close(read(executor, out, rows), expected(program, block, out)[0], F32_BAND if name == "F32" else BAND)


ATTENTIONS = {  # kv heads, query heads, key width, value width, values are the keys' first part, cache type
    "128": (2, 8, 128, 128, False, "f16"),
    "64": (3, 3, 64, 64, False, "f16"),
    "undivided latent": (2, 2, 192, 128, False, "f16"),
    "latent": (1, 4, 576, 512, True, "f16"),
    "f32 cache": (1, 2, 128, 128, False, "f32"),
}


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention(kind: str) -> None:
    """A prompt in blocks of odd lengths, in a slot that is not the first."""
    kv, heads, key, value, shared, cache_type = ATTENTIONS[kind]
    bench = Bench()
    q, k = bench.input("q", random((64, heads * key))), bench.input("k", random((64, kv * key), 1))
    bench.states["keys"] = CacheState("keys", kv * key)
    writes = [CacheWrite("write keys", k, "keys")]
    if not shared:
        v = bench.input("v", random((64, kv * value), 2))
        bench.states["values"] = CacheState("values", kv * value)
        writes.append(CacheWrite("write values", v, "values"))
    out = bench.buffer("out", heads * value)
    queries, outs = View(q.buffer, 0, key, heads, key), View(out.buffer, 0, value, heads, value)
    values = "keys" if shared else "values"
    op = Attention("attention", queries, outs, "keys", values, kv, key, value, 2 * key**-0.5)
    program = bench.program(*writes, op)
    tokens = many(700)
    wanted = expected(program, rows_of(tokens), outs, context=768, max_rows=768)[0]
    with on_card(
        program, slots=2, cache_type=cache_type, context=768, prompt_block=512, deterministic=False
    ) as executor:
        found = []
        for first, last in ((0, 200), (200, 451), (451, 484), (484, 700)):
            executor.step(rows_of(tokens[first:last], slot=1, start=first))
            found.append(read(executor, outs, last - first))
    close(np.concatenate(found), wanted, FLOAT_OR_HALF[cache_type])


FLOAT_OR_HALF = {"f32": F32_BAND, "f16": 2e-3}


@pytest.mark.parametrize(
    "types", (("F32", "F32"), ("Q4_K", "Q6_K"), ("Q3_K", "Q5_K"), ("Q4_0", "Q5_1"), ("F16", "BF16"))
)
def test_routed_experts(types: tuple[str, str]) -> None:
    """Through a slot map; experts that are not on the card count as nothing; some are chosen by nobody."""
    experts, used, width, hidden, rows = 12, 3, 512, 256, 400
    generator = np.random.default_rng(SEED)
    bench = Bench()
    x, logits = (
        bench.input("x", random((64, width))),
        bench.input("scores", random((64, experts), 1) - 100 * np.eye(1, 12, 5)),
    )
    ids, mix = bench.buffer("ids", used, "i32"), bench.buffer("mix", used)
    out = bench.buffer("out", width)
    places = generator.permutation(experts).astype(np.int32)
    for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        kind = types[1] if name == "down" else types[0]
        blocks = random_weights(generator, kind, experts * shape[1], shape[0]).reshape(experts, -1)
        bench.weights[name] = tensor(name, (*shape, experts), kind, blocks)
    ops = (
        Router("router", logits, ids, mix, None, "softmax", True, 1.0, 1, 1),
        RoutedExperts("experts", x, ids, mix, out, "gate", "up", "down"),
    )
    program = bench.program(*ops)
    block = rows_of(many(rows))
    wanted = expected(program, block, out, context=512)[0]
    with on_card(program, prompt_block=512, context=512, deterministic=False) as executor:
        executor.step(block)
        close(read(executor, out, rows), wanted, 1e-5 if types == ("F32", "F32") else 2e-3)
        with executor.card.current("moving experts"):
            for name in ("gate", "up", "down"):
                held = program.weights[name]
                moved = np.empty_like(held.data).reshape(experts, -1)
                moved[places] = held.data.reshape(experts, -1)
                executor.card.cuda.memcpy_htod(executor.memory.address(f"weight {name}"), moved)
            executor.memory.set_slot_map("gate", places)
        first = read(executor, out, rows).copy()
        executor.step(block)
        assert (read(executor, out, rows) == first).all(), "the same weights elsewhere give other bits"
        with executor.card.current("taking experts away"):
            executor.memory.set_slot_map("gate", np.full(experts, -1, np.int32))
        executor.step(block)
        assert (read(executor, out, rows) == 0).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_models(name: str) -> None:
    """Against llama.cpp on the dequantised weights, whose activations it does not round: closer than its own rounding
    of activations brings the quantised file."""
    tokens, rounded = (figures(name)[part] for part in ("tokens", "logits"))
    exact = figures(f"{name}-dequantised")["logits"]
    with model_on_card(quantised_file(name), cache_type="f16", deterministic=False) as executor:
        executor._least_block = MAX_ROWS + 1  # the tokens are few
        found = evaluate(executor, tokens)
        mine, theirs = kl_divergence(exact, found), kl_divergence(exact, rounded)
        print(name, np.sort(mine)[[16, 24, 28, 31]], np.sort(theirs)[[16, 24, 28, 31]])
        # models of random weights fork where a router is undecided: some positions may lie anywhere
        assert np.median(mine) <= np.median(theirs) / 2 and (mine <= theirs.mean()).mean() >= 3 / 4
        half = len(tokens) // 2
        assert len(executor.step(rows_of(tokens[:half], out="none")).logits) == 0
        later = executor.step(rows_of(tokens[half:], start=half)).logits
        assert (later == found[half:]).all(), "blocks of other sizes give other bits"
        assert len(greedy(executor, tokens, 5)) == 5
