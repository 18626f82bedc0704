"""The host executor's kernels against llama.cpp's figures: F32 files and variants, quantised files, trained models."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from in_process import InProcessExecutor
from numpy.typing import NDArray
from oracle_data import (
    HERE,
    QUANTISED,
    TINY,
    TRAINED,
    f32_file,
    figures,
    host_band,
    quantised_file,
    self_divergence,
    trained_file,
)
from running import rows_of

from bloomery.runtime.architectures import build_program
from bloomery.runtime.divergence import divergence, kl_divergence
from bloomery.runtime.model_file import ModelFile

sys.path.insert(0, str(HERE / "oracle_kit"))
from variants import VARIANTS, write_variant

F32_BAND = 1e-5  # relative rms at each position, as in test_reference_oracle.py
ACTIVATION_NOISE = 1e-9  # nats; without 8-bit activations no position of any file comes nearer to llama.cpp than 2e-4


def executor(path: Path, cache_type: str = "f32", context: int = 128) -> InProcessExecutor:
    program = build_program(ModelFile.open(path))
    return InProcessExecutor(program, context=context, max_rows=128, max_out_rows=128, cache_type=cache_type)


def logits(path: Path, tokens: NDArray[np.int32], cache_type: str = "f32") -> NDArray[np.float32]:
    return executor(path, cache_type).step(rows_of(tokens))[0]


@pytest.mark.parametrize("name", TINY)
def test_f32_files(name: str) -> None:
    stored = figures(f"{name}-F32")
    found = logits(f32_file(name), stored["tokens"])
    assert divergence(stored["logits"], found).relative_rms_max < F32_BAND


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, tmp_path: Path) -> None:
    write_variant(name, tmp_path / "variant.gguf")
    stored = figures("variants")
    found = logits(tmp_path / "variant.gguf", stored["tokens"])
    assert divergence(stored[name], found).relative_rms_max < F32_BAND


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_files(name: str) -> None:
    """Inside the band, and at some position exactly: where no value fell on the other side of a rounding boundary, an
    engine that quantises activations as ggml does agrees with it to float32 rounding."""
    stored = figures(name)
    found = logits(quantised_file(name), stored["tokens"])
    result = divergence(stored["logits"], found)
    median, mean = host_band(name)
    assert result.kl_median <= median and result.kl_mean <= mean
    assert kl_divergence(stored["logits"], found).min() < ACTIVATION_NOISE


@pytest.mark.parametrize("name", TRAINED)
def test_trained_models(name: str) -> None:
    """F16 cache. See `host_band`: llama.cpp differs from itself by a mean of 1.4e-3 to 4.7e-3 nats on these tokens."""
    stored = figures(f"{name}-trained")
    base, found = [], []
    for text in ("prose", "code"):
        base.append(stored[f"{text}_log_probabilities"].astype(np.float32))
        found.append(logits(trained_file(name), stored[f"{text}_tokens"], "f16")[stored[f"{text}_rows"]])
    result = divergence(np.concatenate(base), np.concatenate(found))
    median, mean = host_band(name)
    print(name, result)
    assert result.kl_median <= median and result.kl_mean <= mean


@pytest.mark.parametrize("name", TRAINED)
def test_greedy_choices(name: str) -> None:
    """After each prefix of llama.cpp's own greedy continuations our greedy token is the same wherever its margin is one
    that noise does not overturn.

    If two right engines diverge by a mean of k nats, logits differ by a standard deviation of sqrt(2 k) (see
    `host_band`), the difference of the two best by 2 sqrt(k); three of these are the bound, with llama.cpp's k against
    itself. (It forks from its own F16 run at margins of 0.08 with an F32 cache, and at 0.17 with flash attention.)
    """
    stored = figures(f"{name}-trained")
    bound = 3 * 2 * math.sqrt(self_divergence(name))
    clear = 0
    for i in range(3):
        prompt, expected, margins = stored[f"prompt{i}"], stored[f"greedy{i}"], stored[f"margin{i}"]
        _, found = executor(trained_file(name), "f16").step(rows_of(np.concatenate([prompt, expected[:-1]])))
        wrong = (found[len(prompt) - 1 :] != expected) & (margins > bound)
        assert not wrong.any(), (i, np.nonzero(wrong)[0], margins[wrong], bound)
        clear += int((margins > bound).sum())
    assert clear > 90, "too few clear choices for a test"
