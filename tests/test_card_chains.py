"""Chains of a decode step against the same ops launched one by one, on the emulator: the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import numpy as np
import pytest
from card_stand import Bench, expected, tensor
from deepseek_data import tiny41
from emulated_card import EmulatedCard
from oracle_data import quantised_file
from running import rows_of

from bloomery.gpu_worker.chains import Chained, FreshAttention, NormedExperts, NormedProduct, Summed, chained
from bloomery.gpu_worker.fusions import HeadJob, fused
from bloomery.gpu_worker.launches import MAX_ROWS
from bloomery.gpu_worker.lowering import Lowering
from bloomery.runtime.architectures import build_program
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Add, Attention, CacheWrite, Op, RmsNorm, Rope, RoutedExperts, SwiGlu, View
from bloomery.runtime.states import CacheState

pytestmark = pytest.mark.timeout(300)


class Unchained(Lowering):
    def parts(self) -> Iterable[Chained]:
        return fused(self.program)


@pytest.mark.parametrize("name", ("qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M", "deepseek2-v3-Q4_K_M"))
@pytest.mark.parametrize("rows", (1, 3))
def test_chains_change_no_bit(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in products, sums in products, experts that choose for themselves or have one beside them that every row
    takes: all buffers as before."""
    program = build_program(ModelFile.open(quantised_file(name)))
    always = name.startswith("deepseek2")
    found = []
    for lowering in (Lowering, Unchained):
        monkeypatch.setattr("bloomery.gpu_worker.lowering.Lowering", lowering)
        card = EmulatedCard(program, rows=8)
        launches = card.run(rows_of(np.arange(7, 7 + rows)), block=False)
        names = {launch.kernel.function for launch in launches}
        alone = lowering is Lowering and rows == 1
        assert ("normed_matmul" in names) == alone
        if always:
            labels = {launch.label for launch in launches if launch.kernel.function == "open_experts"}
            assert alone == all("ffn_down_shexp & " in label for label in labels) and labels
        else:
            assert ("normed_scores" in names) == (lowering is Lowering)
            assert alone == any(name.startswith("attend_fresh") for name in names)
        found.append({name: card.read(View(name, 0, buffer.width), rows) for name, buffer in program.buffers.items()})
        found[-1] |= {area: values for area, values in card.areas.items() if area.startswith("cache ")}
    inside = {job.view.buffer for part in chained(fused(program)) for job in fresh_jobs(part) if rows == 1}
    if always and rows == 1:
        always_ops = [op for op in program.ops if isinstance(op, SwiGlu) and op.name.endswith("_shexp")]
        inside |= {view.buffer for op in always_ops for view in (op.gate, op.up, op.out)}
        inside |= {op.y.buffer for op in program.ops if isinstance(op, Add) and op.name.endswith("add_shexp")}
    for name, values in found[0].items():
        assert name in inside or np.array_equal(values, found[1][name]), name


@pytest.mark.parametrize("name", ("a", "b"))
@pytest.mark.parametrize("rows", (1, 3))
def test_chains_of_deepseek41_change_no_bit(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in products, the choice of experts by a product's last block, shared experts, copies of a row made by the
    kernels that their sum comes from: all buffers as before."""
    program = build_program(ModelFile.open(tiny41(name)))
    inside = {view.buffer for op in program.ops if isinstance(op, SwiGlu) for view in (op.gate, op.up, op.out)}
    inside |= {op.y.buffer for op in program.ops if isinstance(op, Add)}
    found = []
    for lowering in (Lowering, Unchained):
        monkeypatch.setattr("bloomery.gpu_worker.lowering.Lowering", lowering)
        card = EmulatedCard(program, rows=8)
        for area in card.areas:
            if area.startswith("rows "):
                card.areas[area][:] = 0
        card.run(rows_of(np.arange(20, 27), slot=1), block=False)
        launches = card.run(rows_of(np.arange(7, 7 + rows), slot=1, start=7), block=False)
        counted = Counter(launch.kernel.function for launch in launches)
        layers = sum(isinstance(op, RoutedExperts) for op in program.ops)
        assert counted["normed_choice"] == (layers if lowering is Lowering else 0)
        assert counted["softplus_router"] == layers - counted["normed_choice"]
        alone = lowering is Lowering and rows == 1
        assert counted["swiglu"] == (0 if alone else layers)
        assert counted["hyper_post"] == (0 if alone else 2 * layers) and bool(counted["spread_matmul"]) == alone
        turned_back = sum(launch.kernel.function == "rope" and "rope_back" in launch.label for launch in launches)
        assert turned_back == (0 if lowering is Lowering else layers)
        found.append({name: card.read(View(name, 0, buffer.width), rows) for name, buffer in program.buffers.items()})
        found[-1] |= {area: values for area, values in card.areas.items() if area.startswith("cache ")}
        for ended in [area for area in card.areas if area.startswith("constant routers")]:
            assert not card.areas[ended][: 4 * MAX_ROWS].any()
    for name, values in found[0].items():
        if rows > 1 or name not in inside:
            assert np.array_equal(values, found[1][name], equal_nan=values.dtype == np.float32), name


def fresh_jobs(part: Chained) -> tuple[HeadJob, ...]:
    """Those whose views keep what the products gave, since attention takes them for itself."""
    return (part.query, part.key) if isinstance(part, FreshAttention) else ()


@pytest.mark.parametrize("last", (0, 1, 62, 63, 64, 130, 139))
@pytest.mark.parametrize(
    "heads, kv, width, pairs", ((16, 2, 128, "halves"), (5, 1, 64, "neighbours"), (20, 2, 128, "halves"))
)
def test_attention_that_prepares_its_row(
    heads: int, kv: int, width: int, pairs: Literal["halves", "neighbours"], last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row first and last in a split and between, alone and behind others, in blocks of one or several splits: the
    bits of norms, rotations, cache writes and attention one after the other."""
    generator = np.random.default_rng(heads + last)
    bench = Bench()
    q, k, v = (
        bench.input(name, generator.standard_normal((64, w * width), np.float32))
        for name, w in (("q", heads), ("k", kv), ("v", kv))
    )
    for name in ("keys", "values"):
        bench.states[name] = CacheState(name, kv * width)
        weight = 1 + generator.standard_normal(width, np.float32) / 8
        bench.weights[f"{name} norm"] = tensor(f"{name} norm", (width,), "F32", weight)
    out = bench.buffer("out", heads * width)
    queries, keys, values = (View(x.buffer, 0, width, w, width) for x, w in ((q, heads), (k, kv), (v, kv)))
    outs = View(out.buffer, 0, width, heads, width)
    turn = tuple(1e4 ** (-2 * i / width) for i in range(width // 2 - (pairs == "neighbours")))
    ops: list[Op] = [RmsNorm("norm keys", keys, keys, "keys norm", 1e-6)]
    if pairs == "halves":
        ops.append(RmsNorm("norm queries", queries, queries, "values norm", 1e-5))
    ops += [Rope(f"turn {x.buffer}", x, x, turn, 1.0, pairs) for x in (queries, keys)]
    ops += [CacheWrite("write keys", keys, "keys"), CacheWrite("write values", values, "values")]
    ops.append(Attention("attention", queries, outs, "keys", "values", kv, width, width, width**-0.5))
    program = bench.program(*ops)
    tokens = generator.integers(0, 64, last + 1)
    for multiprocessors in (1, 4):
        found = []
        for lowering in (Lowering, Unchained):
            monkeypatch.setattr("bloomery.gpu_worker.lowering.Lowering", lowering)
            card = EmulatedCard(program, context=192)
            card.multiprocessors = multiprocessors
            if last:
                card.run(rows_of(tokens[:-1], slot=1), block=True)
            launches = card.run(rows_of(tokens[-1:], slot=1, start=last), block=False)
            assert (f"attend_fresh_{width}" in {each.kernel.function for each in launches}) == (lowering is Lowering)
            found.append([card.read(outs, 1), card.areas["cache keys"].copy(), card.areas["cache values"].copy()])
        for one, other in zip(*found, strict=True):
            assert np.array_equal(one, other)


def test_a_head_whose_end_turns_goes_to_the_cache_in_one_launch() -> None:
    """A latent: normed as a whole, its end turned, written; beside it queries of which the ends turn."""
    generator = np.random.default_rng(3)
    bench, width, turned, heads = Bench(), 192, 64, 3
    q, latent = (
        bench.input(name, generator.standard_normal((64, size), np.float32))
        for name, size in (("q", heads * width), ("latent", width))
    )
    bench.states["keys"] = CacheState("keys", width)
    bench.weights["norm"] = tensor("norm", (width,), "F32", 1 + generator.standard_normal(width, np.float32) / 8)
    ends = [View(x.buffer, width - turned, turned, n, width if n > 1 else 0) for x, n in ((q, heads), (latent, 1))]
    turn = tuple(1e4 ** (-2 * i / turned) for i in range(turned // 2))
    ops: list[Op] = [RmsNorm("norm latent", latent, latent, "norm", 1e-6)]
    ops += [Rope(f"turn {end.buffer}", end, end, turn, 1.0, "neighbours") for end in ends]
    program = bench.program(*ops, CacheWrite("write", latent, "keys"))
    rows = rows_of(np.arange(9, 14), slot=1, start=3)
    card = EmulatedCard(program, cache_type="f32")
    launches = card.run(rows, block=False)
    assert [launch.kernel.function for launch in launches if "norm latent" in launch.label] == [
        "rope_table",
        "prepare_heads_f32",
    ]
    for view, wanted in zip((q, latent), expected(program, rows, q, latent, slots=2), strict=True):
        found = card.read(view, 5)
        assert np.abs(found - wanted).max() < 1e-6 * np.abs(wanted).max()
    state = card.state("keys")
    place = (state.address - card.areas["cache keys"].ctypes.data) // 4 + state.slot_stride + 3 * state.row_stride
    kept = card.areas["cache keys"].view(np.float32)[place : place + 5 * width].reshape(5, width)
    assert np.array_equal(kept, card.read(latent, 5)[:, 0])


def test_what_is_chained() -> None:
    """Every layer's sums, norms and experts; ops stay in order."""
    program = build_program(ModelFile.open(quantised_file("qwen3moe-Q4_K_M")))
    parts = list(chained(fused(program)))
    layers = sum(op.name.endswith("routed_experts") for op in program.ops)
    for kind, least in ((NormedExperts, layers - 1), (NormedProduct, layers), (Summed, layers)):
        assert sum(isinstance(part, kind) for part in parts) >= least, kind
    names = [name for part in parts for name in part.name.split(" & ")]
    assert names == [name for part in fused(program) for name in part.name.split(" & ")]
