"""Every kernel of the card against its NumPy reference, on random inputs at real and at odd sizes. Needs a card."""

from __future__ import annotations

import numpy as np
import pytest
from card_stand import Bench, expected, f32, need_card, on_card, read, steps, tensor
from kernel_references import FLOATS, float_weights, integer_parts, product, random_weights
from numpy.typing import NDArray

from bloomery.gpu_worker.products import WEIGHT_TYPES
from bloomery.runtime.program import (
    Add,
    Argmax,
    Attention,
    Buffer,
    CacheState,
    CacheWrite,
    CopyHeads,
    EmbedRows,
    HeadMatMul,
    MatMul,
    RmsNorm,
    Rope,
    RoutedExperts,
    Router,
    SwiGlu,
    View,
)
from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.reference_ops import route, routed_experts, swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SEED = 20261130
FLOAT_BAND = 4e-6  # of the greatest magnitude: f32 sums of up to 8192 terms in another order
ROWS = 8


@pytest.fixture(autouse=True, scope="module")
def card() -> None:
    need_card()


def random(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng((SEED, seed)).standard_normal(shape, np.float32)


def close(found: NDArray[np.float32], wanted: NDArray[np.floating], band: float = FLOAT_BAND) -> None:
    assert np.isfinite(found).all()
    assert np.abs(found - wanted).max() <= band * max(1e-30, np.abs(wanted).max()), np.abs(found - wanted).max()


def magnitude(name: str, weights: NDArray[np.uint8], x: NDArray[np.float32]) -> float:
    """The greatest sum of the terms' magnitudes: what the rounding of a sum is measured by."""
    if name in FLOATS:
        return float((np.abs(float_weights(name, weights)) @ np.abs(x).T).max())
    dense = np.abs(QuantType.named(name).dequantise(weights))
    if integer_parts(name, weights)[1] is not None or name in ("Q4_1", "Q5_1"):  # minima: both terms are greater
        dense = dense + 2 * dense.max()
    return float((dense @ np.abs(x).T).max())


WIDTHS = {"super": (256, 768, 2048, 5120), "small": (32, 160, 2048), "float": (7, 96, 2048, 3001)}


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_products(name: str) -> None:
    """The integer parts are those of the host (a wrong one is 1e-2 off); float sums differ in order only. One row gives
    the same bits as eight, with several weights of odd heights in one op."""
    kind = QuantType.named(name)
    for width in WIDTHS["super" if kind.block_elements == 256 else "float" if name in FLOATS else "small"]:
        bench = Bench()
        values = random((64, width), width)
        x = bench.input("x", values)
        heights = (1, 7, 130, 515, 64)
        generator = np.random.default_rng((SEED, width))
        blocks = [random_weights(generator, name, height, width) for height in heights]
        outs, names = [], []
        for i, (height, block) in enumerate(zip(heights, blocks)):
            bench.weights[f"w{i}"] = tensor(f"w{i}", (width, height), name, block)
            outs.append(bench.buffer(f"y{i}", height))
            names.append(f"w{i}")
        bench.weights["bias"] = f32("bias", random((7,)))
        biases = (None, "bias", None, None, None)
        with on_card(bench.program(MatMul("product", x, tuple(outs), tuple(names), biases))) as executor:
            kept: list[NDArray[np.float32]] = []
            for rows in (ROWS, 1, 2, 3, 5):
                executor.step(steps(range(rows)))
                for i, out in enumerate(outs):
                    found = read(executor, out, rows)[:, 0]
                    wanted = product(name, blocks[i], values[:ROWS]) if rows == ROWS else kept[i][:rows]
                    if rows < ROWS:
                        assert (found == wanted).all(), f"{rows} rows give other bits than {ROWS}"
                        continue
                    wanted = wanted + (random((7,)) if i == 1 else 0)
                    assert np.abs(found - wanted).max() <= 2e-6 * magnitude(name, blocks[i], values[:ROWS]), (width, i)
                if rows == ROWS:
                    kept = [read(executor, out, rows)[:, 0] for out in outs]


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_embedding_rows(name: str) -> None:
    width = 2048 if QuantType.named(name).block_elements > 1 else 77
    bench = Bench()
    blocks = random_weights(np.random.default_rng(SEED), name, 64, width)
    bench.weights["w"] = tensor("w", (width, 64), name, blocks)
    out = bench.buffer("y", width)
    with on_card(bench.program(EmbedRows("embed", out, "w"))) as executor:
        executor.step(steps([3, 63, 0, 17]))
        wanted = bench.weights["w"].dequantise_rows([3, 63, 0, 17])
        close(read(executor, out, 4)[:, 0], wanted, 1e-6)


@pytest.mark.parametrize("name", ("F32", "F16", "Q8_0", "Q4_0", "Q5_1", "Q4_K"))
def test_head_matmul(name: str) -> None:
    """Heads that lie with gaps, as the parts of MLA queries do."""
    heads, width, outputs = 5, 256, 70
    bench = Bench()
    values = random((64, heads * 300))
    whole = bench.input("x", values)
    x = View(whole.buffer, 10, width, heads, 300) if name != "F32" else View(whole.buffer, 20, width, heads, 290)
    blocks = random_weights(np.random.default_rng(SEED), name, heads * outputs, width)
    bench.weights["w"] = tensor("w", (width, outputs, heads), name, blocks)
    y = bench.buffer("y", heads * 100)
    out = View(y.buffer, 3, outputs, heads, 100 - 1)
    with on_card(bench.program(HeadMatMul("heads", x, out, "w"))) as executor:
        executor.step(steps(range(6)))
        found = read(executor, out, 6)
        for h in range(heads):
            part = np.ascontiguousarray(values[:6, x.start + h * x.stride :][:, :width])
            mine = blocks[h * outputs : (h + 1) * outputs]
            band = 2e-6 * magnitude(name, mine, part)
            assert np.abs(found[:, h] - product(name, mine, part)).max() <= band


def test_norm_rope_sums_and_copies() -> None:
    bench = Bench()
    x = bench.input("x", random((64, 4 * 96)))
    y = bench.input("y", random((64, 4 * 96), 1))
    heads = View("x", 0, 96, 4, 96)
    gaps = View("y", 0, 64, 4, 96)
    bench.weights["long"] = f32("long", random((384,), 2))
    bench.weights["short"] = f32("short", random((96,), 3))
    bench.weights["gapped"] = f32("gapped", random((64,), 4))
    frequencies = tuple(10000.0 ** (-i / 24) for i in range(24))
    out = {n: bench.buffer(n, 384) for n in ("long_out", "short_out", "near", "far", "sum", "silu", "copy", "gap_out")}
    four = {n: View(n, 0, 96, 4, 96) for n in out}
    ops = (
        RmsNorm("long", x, out["long_out"], "long", 1e-6),
        RmsNorm("short", heads, four["short_out"], "short", 1e-5),
        RmsNorm("gapped", gaps, View("gap_out", 5, 64, 4, 90), "gapped", 1e-5),
        Rope("near", heads, four["near"], frequencies, 1.25, "neighbours"),
        Rope("far", heads, four["far"], frequencies, 1.0, "halves"),
        Add("add", x, y, out["sum"]),
        SwiGlu("silu", x, y, out["silu"], 0.7),
        CopyHeads("copy", View("x", 96, 96), four["copy"]),
        Rope("in place", four["sum"], four["sum"], frequencies, 1.0, "halves", behind=3),
    )
    program = bench.program(*ops)
    views = [*(out[n] for n in out if n != "gap_out"), View("gap_out", 5, 64, 4, 90)]
    rows = steps([1, 2, 3, 9, 8], positions=[3, 4, 5, 200, 255], slots=[0, 0, 0, 1, 2])
    with on_card(program, slots=3) as executor:
        executor.step(rows)
        for view, wanted in zip(views, expected(program, rows, *views, slots=3)):
            close(read(executor, view, 5), wanted)


ATTENTIONS = {  # kv heads, query heads, key width, value width, values are the keys' first part
    "grouped": (2, 16, 64, 64, False),
    "single": (3, 3, 40, 24, False),
    "twelve of one": (1, 12, 128, 128, False),
    "latent": (1, 16, 96 + 64, 96, True),
}


@pytest.mark.parametrize("cache_type", ("f32", "f16"))
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention(kind: str, cache_type: str) -> None:
    """Over 0 to 3 splits, rows of two slots mixed; a row alone gives the bits that it gives among others."""
    kv, heads, key, value, shared = ATTENTIONS[kind]
    bench = Bench()
    q = bench.input("q", random((64, heads * key)))
    k = bench.input("k", random((64, kv * key), 1))
    bench.states["keys"] = CacheState("keys", kv * key)
    writes = [CacheWrite("write keys", k, "keys")]
    if not shared:
        v = bench.input("v", random((64, kv * value), 2))
        bench.states["values"] = CacheState("values", kv * value)
        writes.append(CacheWrite("write values", v, "values"))
    out = bench.buffer("out", heads * value)
    queries, outs = View(q.buffer, 0, key, heads, key), View(out.buffer, 0, value, heads, value)
    values = "keys" if shared else "values"
    op = Attention("attention", queries, outs, "keys", values, kv, key, value, key**-0.5)
    program = bench.program(*writes, op)
    generator = np.random.default_rng(SEED)
    band = FLOAT_BAND if cache_type == "f32" else 2e-3  # f16 queries, keys and values: half a unit in 2^11 each
    lengths = {0: 170, 1: 66}
    tokens = {slot: generator.integers(0, 64, n) for slot, n in lengths.items()}
    with on_card(program, slots=2, cache_type=cache_type, prompt_block=8) as executor:
        found, alone = {}, {}
        for slot, n in lengths.items():
            parts = []
            for first in range(0, n - 4, 8):
                last = min(first + 8, n - 4)
                executor.step(steps(tokens[slot][first:last], range(first, last), [slot] * (last - first)))
                parts.append(read(executor, outs, last - first))
            found[slot] = np.concatenate(parts)
        ends = {slot: range(n - 4, n) for slot, n in lengths.items()}
        mixed = steps([*tokens[0][-4:], *tokens[1][-4:]], [*ends[0], *ends[1]], [0] * 4 + [1] * 4)
        executor.step(mixed)
        both = read(executor, outs, 8)
        for slot, n in lengths.items():
            found[slot] = np.concatenate([found[slot], both[4 * slot : 4 * slot + 4]])
            executor.step(steps(tokens[slot][-1:], [n - 1], [slot]))
            alone[slot] = read(executor, outs, 1)
            assert (alone[slot][0] == found[slot][-1]).all()
            rows = steps(tokens[slot], range(n))
            close(found[slot], expected(program, rows, outs)[0], band)


@pytest.mark.parametrize("width, kv, heads", ((128, 4, 32), (64, 8, 32)))
def test_attention_far(width: int, kv: int, heads: int) -> None:
    """A context of more splits than a step has blocks: blocks take several at once, which are joined as they go. Four
    rows give the bits of one."""
    n, each = 20000, heads // kv
    bench = Bench()
    tables = [random((64, w * width), i) for i, w in enumerate((heads, kv, kv))]
    q, k, v = (bench.input(name, table) for name, table in zip("qkv", tables))
    for name in ("keys", "values"):
        bench.states[name] = CacheState(name, kv * width)
    out = bench.buffer("out", heads * width)
    queries, outs = View(q.buffer, 0, width, heads, width), View(out.buffer, 0, width, heads, width)
    op = Attention("attention", queries, outs, "keys", "values", kv, width, width, width**-0.5)
    program = bench.program(CacheWrite("write keys", k, "keys"), CacheWrite("write values", v, "values"), op)
    tokens = np.random.default_rng(SEED).integers(0, 64, n)
    keys, values = (tables[i].astype(np.float16).astype(np.float64)[tokens].reshape(n, kv, width) for i in (1, 2))
    with on_card(program, context=20480, cache_type="f16", prompt_block=2048, deterministic=False) as executor:
        for first in range(0, n - 4, 2048):
            last = min(first + 2048, n - 4)
            executor.step(steps(tokens[first:last], range(first, last)))
        executor.step(steps(tokens[-4:], range(n - 4, n)))
        found = read(executor, outs, 4)
        executor.step(steps(tokens[-1:], [n - 1]))
        assert (read(executor, outs, 1)[0] == found[-1]).all()
    for row, position in enumerate(range(n - 4, n)):
        query = tables[0].astype(np.float16).astype(np.float64)[tokens[position]].reshape(kv, each, width)
        scores = np.einsum("khw,pkw->khp", query, keys[: position + 1]) * width**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        wanted = np.einsum("khp,pkw->khw", weights, values[: position + 1]).reshape(heads, width)
        close(found[row], wanted, 1e-4)


ROUTERS = {
    "softmax": {"gating": "softmax", "normalise": True, "scale": 1.0, "groups": 1, "groups_used": 1, "bias": False},
    "plain": {"gating": "softmax", "normalise": False, "scale": 16.0, "groups": 1, "groups_used": 1, "bias": False},
    "grouped": {"gating": "sigmoid", "normalise": True, "scale": 2.5, "groups": 8, "groups_used": 3, "bias": True},
}


@pytest.mark.parametrize("experts", (40, 128, 512))
@pytest.mark.parametrize("kind", ROUTERS)
def test_router(kind: str, experts: int) -> None:
    options = dict(ROUTERS[kind])
    used, with_bias = 8, options.pop("bias")
    logits = np.round(random((64, experts), experts) * 4) / 4  # full of ties
    logits[5:9] = random((4, experts))
    bench = Bench()
    x = bench.input("x", logits)
    ids, mix = bench.buffer("ids", used, "i32"), bench.buffer("mix", used)
    bias = random((experts,), 1) / 8 if with_bias else None
    if bias is not None:
        bench.weights["bias"] = f32("bias", bias)
    op = Router("router", x, ids, mix, "bias" if with_bias else None, **options)
    with on_card(bench.program(op)) as executor:
        executor.step(steps(range(5, 13)))
        chosen, weights = read(executor, ids, 8)[:, 0], read(executor, mix, 8)[:, 0]
    wanted_ids, wanted_mix = route(logits[5:13], used, bias=bias, **options)
    if kind != "grouped":
        assert (chosen == wanted_ids).all()
    else:  # sigmoids of equal logits are equal on both sides, but sums with a bias may round to ties on one
        assert (chosen == wanted_ids).mean() > 0.9
    same = chosen == wanted_ids
    close(weights[same], wanted_mix[same])


@pytest.mark.parametrize(
    "types", (("F32", "F32"), ("Q4_K", "Q6_K"), ("Q3_K", "Q5_K"), ("Q4_0", "Q5_1"), ("Q8_0", "Q8_0"))
)
def test_routed_experts_through_a_slot_map(types: tuple[str, str]) -> None:
    """Experts that lie elsewhere in memory are found by the map; those that are not on the card count as nothing."""
    experts, used, width, hidden = 12, 3, 512, 256
    generator = np.random.default_rng(SEED)
    gate, up = (random_weights(generator, types[0], experts * hidden, width) for _ in range(2))
    down = random_weights(generator, types[1], experts * width, hidden)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    blocks = {"gate": gate, "up": up, "down": down}
    bench = Bench()
    x = bench.input("x", random((64, width)))
    logits = bench.input("scores", random((64, experts), 1))
    ids, mix = bench.buffer("ids", used, "i32"), bench.buffer("mix", used)
    out = bench.buffer("out", width)
    places = generator.permutation(experts).astype(np.int32)
    for name, shape in shapes.items():
        kind = types[1] if name == "down" else types[0]
        moved = np.empty_like(blocks[name]).reshape(experts, -1)
        moved[places] = blocks[name].reshape(experts, -1)
        bench.weights[name] = tensor(name, (*shape, experts), kind, moved)
    program = bench.program(
        Router("router", logits, ids, mix, None, "softmax", True, 1.0, 1, 1),
        RoutedExperts("experts", x, ids, mix, out, "gate", "up", "down"),
    )

    def reference(absent: set[int], chosen: NDArray[np.int32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
        wanted = np.zeros((ROWS, width), np.float32)
        for r in range(ROWS):
            for a in range(used):
                e = int(chosen[r, a])
                if e in absent:
                    continue
                row = bench_values[r : r + 1]
                at = slice(e * hidden, (e + 1) * hidden)
                opened = swiglu(product(types[0], gate[at], row), product(types[0], up[at], row))
                part = product(types[1], down[e * width : (e + 1) * width], opened)[0]
                wanted[r] += weights[r, a] * part
        return wanted

    bench_values = random((64, width))
    with on_card(program) as executor:
        for absent in (set(), {int(places[0]), 3, 7}):
            map_now = np.array([-1 if e in absent else places[e] for e in range(experts)], np.int32)
            with executor.card.current("the slot map"):
                executor.memory.set_slot_map("gate", map_now)
            executor.step(steps(range(ROWS)))
            chosen, weights = read(executor, ids, ROWS)[:, 0], read(executor, mix, ROWS)[:, 0]
            found = read(executor, out, ROWS)[:, 0]
            wanted = reference(absent, chosen, weights)
            # hidden activations that fall on the other side of a rounding boundary: a step of 1/127 of one of 256
            close(found, wanted, 1e-5 if types[0] == "F32" else 2e-3)
            assert np.median(np.abs(found - wanted)) <= 1e-5 * np.abs(wanted).max()
            executor.step(steps([2]))
            assert (read(executor, out, 1)[0, 0] == found[2]).all()


def test_argmax() -> None:
    width = 70001
    values = np.zeros((8, width), np.float32)
    values[0] = random((width,))
    values[1, [5, 300, 69999]] = 3.0
    values[2] = -np.inf
    values[3, :] = np.nan
    values[3, 41] = -5.0
    values[4, -1] = 1.0
    bench = Bench()
    x = bench.input("x", values)
    bench.buffers["best"] = Buffer("best", 1, "step", "i32")
    best = View("best", 0, 1)
    with on_card(bench.program(Argmax("argmax", x, best))) as executor:
        executor.step(steps(range(5)))
        assert read(executor, best, 5)[:, 0, 0].tolist() == [int(values[0].argmax()), 5, 0, 41, width - 1]


def test_reference_of_experts_is_the_op() -> None:
    """The expectation above is the op's normative function, for float weights."""
    x, ids = random((2, 64)), np.array([[1, 0], [2, 1]], np.int32)
    mix = np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)
    gate, up, down = random((3, 32, 64), 1), random((3, 32, 64), 2), random((3, 64, 32), 3)
    wanted = routed_experts(x, ids, mix, lambda e: (gate[e], up[e], down[e]))
    found = np.zeros_like(x)
    for r in range(2):
        for a in range(2):
            e = ids[r, a]
            found[r] += mix[r, a] * (down[e] @ swiglu(gate[e] @ x[r], up[e] @ x[r]))
    close(found, wanted, 1e-5)
