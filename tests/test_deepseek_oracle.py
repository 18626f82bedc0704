"""`deepseek41` and `deepseek4` on the reference executor against the figures of others.

V4.1: the publisher's program in float64 (tiny models) and a float64 forward of the trained model: engram rows, expert
ids and row lists equal, numbers inside the bands that data/oracle/deepseek41/README.md states. V4: llama.cpp in F32.
Every gate here is seen to fail in test_deepseek_mutations.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from deepseek_data import RecordingExecutor, executor_of, figures41, tiny4, tiny41
from oracle_data import trained_file
from running import greedy

from bloomery.runtime.divergence import divergence, fork_before
from bloomery.runtime.engram_hash import histories
from bloomery.runtime.program import Program

STORED = 1e-6  # the figures are float32 of numbers up to 16
FLOAT32 = 1e-5  # relative rms at each position: what float32 sums in another order cost, as for other architectures
FLOAT32_HALF_CACHES = 2e-2  # values next to a rounding boundary go to the other half-precision number
LLAMA_F32 = 2e-5
PUBLISHERS = (2, 4, 5, 7)


def assert_choices(executor: RecordingExecutor, stored: dict[str, np.ndarray], prefix: str = "") -> None:
    """Engram rows, experts, row lists and candidate rows are the stored ones."""
    for site, layer in enumerate((1, 4)):
        found = executor.made[f"blk.{layer}.engram_ids"][0][:, 0]
        np.testing.assert_array_equal(found, stored["engram_rows"][:, site])
    np.testing.assert_array_equal(executor.experts(), stored[f"{prefix}router_ids"])
    for layer in PUBLISHERS:
        if f"{prefix}list{layer}" in stored:
            np.testing.assert_array_equal(executor.chosen(layer), stored[f"{prefix}list{layer}"], f"list {layer}")
    if f"{prefix}candidate_mask" in stored:
        blocks = executor.made["blk.5.index_rows"][1][:, 0]
        block = next(op.block for op in executor.program.ops if op.name == "blk.5.index_rows")  # type: ignore[union-attr]
        mask = np.unpackbits(stored[f"{prefix}candidate_mask"], axis=1)
        for r, row in enumerate(blocks):
            inside = np.isin(np.arange(r + 1) // block, row[row >= 0])
            np.testing.assert_array_equal(inside, mask[r, : r + 1].astype(bool), f"candidates of position {r}")


@pytest.mark.parametrize(("variant", "kind"), [("a", "mix"), ("a", "f32"), ("dense", "mix"), ("b", "mix")])
def test_tiny_models_in_float64(variant: str, kind: str) -> None:
    stored = figures41(f"tiny-deepseek41-{variant}")
    executor = executor_of(tiny41(variant, kind))  # type: ignore[arg-type]
    logits = executor.logits(stored["ids"])
    assert np.abs(logits - stored["logits"]).max() < STORED
    assert_choices(executor, stored)
    weights = np.stack([executor.made[f"blk.{layer}.router"][1][:, 0] for layer in range(9)])
    assert np.abs(weights - stored["router_weights"]).max() < STORED
    if variant == "a":
        for layer in (1, 4):
            gate = executor.made[f"blk.{layer}.engram_gate"][0][:, 0]
            assert np.abs(gate - stored[f"engram_gate{layer}"]).max() < STORED
        for layer in range(9):
            streams = executor.made[f"blk.{layer}.hc_ffn_post"][0]
            assert np.abs(streams[stored["stream_positions"]] - stored["stream"][layer]).max() < 4 * STORED
            assert np.abs(np.sqrt((streams**2).mean(-1)) - stored["stream_rms"][layer]).max() < STORED
            np.testing.assert_allclose(streams.sum(-1), stored["stream_sum"][layer], rtol=1e-6, atol=1e-5)
            assert np.abs(executor.made[f"blk.{layer}.hc_ffn_mix"][0][:, 0] - stored["pre"][layer]).max() < STORED


@pytest.mark.parametrize("variant", ["a", "dense"])
def test_tiny_models_in_float32(variant: str) -> None:
    stored = figures41(f"tiny-deepseek41-{variant}")
    executor = executor_of(tiny41(variant), wide=False)  # type: ignore[arg-type]
    assert divergence(stored["logits"], executor.logits(stored["ids"])).relative_rms_max < FLOAT32
    assert_choices(executor, stored)


@pytest.mark.parametrize(("wide", "band"), [(True, STORED), (False, FLOAT32_HALF_CACHES)])
def test_half_precision_caches(wide: bool, band: float) -> None:
    stored = figures41("tiny-deepseek41-a")
    executor = executor_of(tiny41("a"), wide=wide, cache_type="f16")
    assert np.abs(executor.logits(stored["ids"]) - stored["f16cache_logits"]).max() < band
    assert_choices(executor, stored, "f16cache_")


def test_what_the_figures_exercise() -> None:
    """Lists that drop rows, masks that cut, a limit that binds, biased and negative selections: else the gates above
    would say nothing of them."""
    stored = figures41("tiny-deepseek41-a")
    for layer in PUBLISHERS:
        assert np.isfinite(stored[f"list_gap{layer}"]).sum() > 80
    assert (np.unpackbits(stored["candidate_mask"], axis=1).sum(axis=1) <= 6).all()
    executor = executor_of(tiny41("a"))
    executor.logits(stored["ids"][:20])
    program: Program = executor.program
    assert {op.limit for op in program.ops if op.name.endswith("routed_experts")} == {0.5, 0.75, 10.0}  # type: ignore[union-attr]
    gate, up = executor.made["blk.6.ffn_gate_shexp+ffn_up_shexp"]
    assert gate.max() > 0.5 and np.abs(up).max() > 0.5


@pytest.mark.parametrize("text", ["prose", "code", "long"])
def test_trained_model(text: str) -> None:
    stored = {key.removeprefix(f"{text}_"): value for key, value in figures41("tiny-deepseek41-reference").items()}
    executor = executor_of(trained_file("tiny-deepseek41-Q3_K_M"), context=512)
    logits = executor.logits(stored["ids"])
    kept = slice(len(stored["ids"]) - len(stored["top_ids"]), None)
    top = np.take_along_axis(logits[kept], stored["top_ids"], axis=1)
    assert np.abs(top - stored["top_logits"]).max() < 4 * STORED  # |logit| up to 26
    np.testing.assert_array_equal(np.argsort(-logits[kept], axis=1, kind="stable")[:, :32], stored["top_ids"])
    np.testing.assert_array_equal(executor.experts()[:, kept].transpose(1, 0, 2), stored["router_ids"])
    for site, layer in enumerate((1, 4)):
        rows = executor.made[f"blk.{layer}.engram_ids"][0][kept, 0]
        np.testing.assert_array_equal(rows, stored["engram_rows"][:, site])
        engram = executor.program.engram
        assert engram is not None
        np.testing.assert_array_equal(engram.row_ids(site, histories(stored["ids"], engram.longest))[kept], rows)
    for layer in PUBLISHERS:
        np.testing.assert_array_equal(executor.chosen(layer)[-1], stored[f"list{layer}"])


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_deepseek4_against_llama_cpp(wide: bool) -> None:
    """Its router ids and lists are not stored; a different choice moves logits by 0.1 and more."""
    stored = figures41("deepseek4-F32")
    executor = executor_of(tiny4(), wide=wide)
    assert np.abs(executor.logits(stored["tokens"]) - stored["logits"]).max() < LLAMA_F32
    if not wide:
        found = greedy(executor, stored["tokens"], len(stored["greedy"]))
        assert fork_before(found, stored["greedy"].tolist(), stored["greedy_margin"].tolist(), 1e-3) is None


def test_deepseek4_quantised_as_its_dequantised_weights() -> None:
    """MXFP4 experts and Q8_0 for the rest, as the published file has them; llama.cpp on the same weights as F32."""
    expected = figures41("deepseek4-MXFP4_MOE-dequantised")["logits"]
    found = executor_of(tiny4("MXFP4_MOE")).logits(figures41("deepseek4-MXFP4_MOE")["tokens"])
    assert divergence(expected, found).relative_rms_max < 1e-5
