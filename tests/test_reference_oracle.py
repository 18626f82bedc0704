"""The reference executor against llama.cpp: F32 files, dequantised weights of quantised files, trained models.

Every gate here is seen to fail in test_reference_mutations.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from activation_rounding import RoundingExecutor
from oracle_data import HERE, QUANTISED, TINY, TRAINED, f32_file, figures, host_band, quantised_file, trained_file
from running import evaluate, greedy, reference

from bloomery.runtime.architectures import build_program
from bloomery.runtime.divergence import divergence, fork_before
from bloomery.runtime.model_file import ModelFile

sys.path.insert(0, str(HERE / "oracle_kit"))
from variants import VARIANTS, write_variant

F32_BAND = 1e-5  # relative rms at each position: what float32 sums in another order cost (llama.cpp itself: up to 3e-6)


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("name", TINY)
def test_f32_files(name: str, wide: bool) -> None:
    stored = figures(f"{name}-F32")
    executor = reference(f32_file(name), wide=wide)
    assert divergence(stored["logits"], evaluate(executor, stored["tokens"])).relative_rms_max < F32_BAND
    found = greedy(executor, stored["tokens"], len(stored["greedy"]))
    assert fork_before(found, stored["greedy"].tolist(), stored["greedy_margin"].tolist(), 1e-3) is None


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, tmp_path: Path) -> None:
    """Tied heads, biases, undivided qkv, every kind of context scaling, routers without their keys, Mixtral's experts,
    and a router whose scores nearly vanish."""
    write_variant(name, tmp_path / "variant.gguf")
    stored = figures("variants")
    found = evaluate(reference(tmp_path / "variant.gguf"), stored["tokens"])
    assert divergence(stored[name], found).relative_rms_max < F32_BAND


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_files_as_their_dequantised_weights(name: str) -> None:
    expected = figures(f"{name}-dequantised")["logits"]
    found = evaluate(reference(quantised_file(name), wide=True), figures(name)["tokens"])
    assert divergence(expected, found).relative_rms_max < F32_BAND


@pytest.mark.parametrize("name", QUANTISED)
def test_rounding_activations_as_ggml_does_explains_its_logits(name: str) -> None:
    """The bands that other executors get (`host_band`) rest on this model of activation rounding."""
    stored = figures(name)
    program = build_program(ModelFile.open(quantised_file(name)))
    found = evaluate(RoundingExecutor(program, context=64), stored["tokens"])
    result = divergence(stored["logits"], found)
    median, mean = host_band(name)
    assert result.kl_median <= median and result.kl_mean <= mean


@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_exactly(name: str) -> None:
    """Weights dequantised, F32 cache: logits at positions up to 127 and greedy continuations of 64 tokens."""
    stored = figures(f"{name}-trained")
    executor = reference(trained_file(name))
    for text in ("prose", "code"):
        found = evaluate(executor, stored[f"{text}_tokens"])[stored[f"{text}_exact_rows"]]
        assert divergence(stored[f"{text}_exact_logits"], found).relative_rms_max < F32_BAND
    for i in range(3):
        expected = stored[f"exact_greedy{i}"].tolist()
        found_tokens = greedy(executor, stored[f"prompt{i}"], len(expected))
        assert fork_before(found_tokens, expected, stored[f"exact_margin{i}"].tolist(), 0.002) is None


@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_with_rounded_activations(name: str) -> None:
    """As llama.cpp runs them by default: F16 cache, 8-bit activations. Greedy runs are compared up to the first small
    margin by the exact test above only, since here llama.cpp itself forks from its own dequantised weights."""
    stored = figures(f"{name}-trained")
    executor = RoundingExecutor(build_program(ModelFile.open(trained_file(name))), context=128, cache_type="f16")
    base, found = [], []
    for text in ("prose", "code"):
        base.append(stored[f"{text}_log_probabilities"].astype(np.float32))
        found.append(evaluate(executor, stored[f"{text}_tokens"])[stored[f"{text}_rows"]])
    result = divergence(np.concatenate(base), np.concatenate(found))
    median, mean = host_band(name)
    assert result.kl_median <= median and result.kl_mean <= mean
    assert result.same_top >= 0.9
