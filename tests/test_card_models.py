"""Whole models on the card against llama.cpp's figures, and the promises about results. Needs a card."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_stand import need_card
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
from running import evaluate, greedy, joined, rows_of

from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.gpu_worker.driver import CardError
from bloomery.runtime.architectures import build_program
from bloomery.runtime.divergence import divergence
from bloomery.runtime.errors import PlanError
from bloomery.runtime.model_file import ModelFile

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
F32_BAND = 1e-5  # relative rms at each position, as on the host


@pytest.fixture(autouse=True, scope="module")
def card() -> None:
    need_card()


@contextmanager
def model_on_card(path: Path, **arguments: Any) -> Iterator[CardExecutor]:
    settings = {"context": 256, "cache_type": "f32", "prompt_block": 128, "deterministic": True, **arguments}
    executor = CardExecutor(build_program(ModelFile.open(path)), **settings)
    try:
        yield executor
    finally:
        executor.close()


@pytest.mark.parametrize("name", TINY)
def test_f32_files(name: str) -> None:
    stored = figures(f"{name}-F32")
    with model_on_card(f32_file(name)) as executor:
        result = divergence(stored["logits"], evaluate(executor, stored["tokens"]))
    print(name, result)
    assert result.relative_rms_max < F32_BAND


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_files(name: str) -> None:
    stored = figures(name)
    with model_on_card(quantised_file(name)) as executor:
        result = divergence(stored["logits"], evaluate(executor, stored["tokens"]))
    median, mean = host_band(name)
    print(name, result)
    assert result.kl_median <= median and result.kl_mean <= mean


@pytest.mark.parametrize("name", TRAINED)
def test_trained_models(name: str) -> None:
    stored = figures(f"{name}-trained")
    base, found = [], []
    with model_on_card(trained_file(name), cache_type="f16") as executor:
        for text in ("prose", "code"):
            base.append(stored[f"{text}_log_probabilities"].astype(np.float32))
            found.append(evaluate(executor, stored[f"{text}_tokens"])[stored[f"{text}_rows"]])
        bound = 3 * 2 * math.sqrt(self_divergence(name))
        clear = 0
        for i in range(3):
            prompt, expected, margins = stored[f"prompt{i}"], stored[f"greedy{i}"], stored[f"margin{i}"]
            chosen = executor.step(rows_of(np.concatenate([prompt, expected[:-1]]))).greedy.copy()
            wrong = (chosen[len(prompt) - 1 :] != expected) & (margins > bound)
            assert not wrong.any(), (i, np.nonzero(wrong)[0], margins[wrong], bound)
            clear += int((margins > bound).sum())
    result = divergence(np.concatenate(base), np.concatenate(found))
    median, mean = host_band(name)
    print(name, result)
    assert result.kl_median <= median and result.kl_mean <= mean
    assert clear > 90, "too few clear choices for a test"


@pytest.mark.parametrize("name", ("qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M", "llama-Q4_K_M"))
def test_results_depend_on_nothing_but_the_sequence(name: str) -> None:
    """Replay or eager, one row or many, any block, any slot, a copied prefix: the same bits."""
    path, tokens = quantised_file(name), figures(name)["tokens"]
    with model_on_card(path, graphs=False, slots=3) as eager:
        wanted = evaluate(eager, tokens)
        assert (evaluate(eager, tokens, slot=2) == wanted).all()
    with model_on_card(path, slots=3) as replayed:
        assert (evaluate(replayed, tokens) == wanted).all()
        assert (evaluate(replayed, tokens) == wanted).all(), "a second run replays graphs only"
        assert replayed.statistics()["graph_nodes"]
        for block in (1, 3, 8, 13):
            assert (evaluate(replayed, tokens, block=block, slot=1) == wanted).all(), block
        half = len(tokens) // 2
        replayed.copy_prefix(1, 2, half)
        assert (evaluate(replayed, tokens[half:], slot=2, start=half) == wanted[half:]).all()
        both = joined(rows_of(tokens[:5], slot=0), rows_of(tokens[half:], slot=2, start=half))
        found = replayed.step(both).logits.copy()
        assert (found[:5] == wanted[:5]).all() and (found[5:] == wanted[half:]).all()
        assert len(replayed.step(rows_of(tokens[:9], out="none")).logits) == 0
        last = replayed.step(rows_of(tokens, out="last"))
        assert (last.logits[0] == wanted[-1]).all() and last.greedy[0] == wanted[-1].argmax()


def test_greedy_generation_is_repeated() -> None:
    name = TRAINED[0]
    prompt = figures(f"{name}-trained")["prompt0"]
    with model_on_card(trained_file(name), cache_type="f16") as executor:
        first = greedy(executor, prompt, 40)
        assert greedy(executor, prompt, 40) == first


def test_refusals_name_what_was_refused() -> None:
    """A launch that the driver refuses names kernel and op; memory that does not suffice is named with the shortfall,
    and what was taken before comes back."""
    path, tokens = quantised_file("llama-Q4_K_M"), figures("llama-Q4_K_M")["tokens"][:4]
    with pytest.raises(PlanError, match=r"cache .* needs \d+ bytes and \d+ are free, \d+ too few"):
        CardExecutor(build_program(ModelFile.open(path)), context=1 << 20, slots=8192)
    with model_on_card(path) as executor:
        launches = executor.launches(1, 1)
        at = next(i for i, launch in enumerate(launches) if launch.label.startswith("blk.1."))
        launches[at] = replace(launches[at], shared=1 << 20)
        with pytest.raises(CardError, match=r"cuFuncSetAttribute: .*\(launching .* for op blk\.1\."):
            executor.step(rows_of(tokens[:1]))


FAULT = """
import os, sys
from dataclasses import replace
from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.gpu_worker.driver import CardError
from bloomery.runtime.architectures import build_program
from bloomery.runtime.errors import WorkerLost
from bloomery.runtime.model_file import ModelFile
from running import rows_of

executor = CardExecutor(build_program(ModelFile.open(sys.argv[1])), context=64)
launches = executor.launches(1, 1)
at = next(i for i, launch in enumerate(launches) if "matmul_1" in launch.kernel.function)
launches[at] = replace(launches[at], words=(64, *launches[at].words[1:]))
for attempt in (lambda: executor.step(rows_of([5])), lambda: executor.step(rows_of([5])), executor.recover):
    try:
        attempt()
    except WorkerLost as error:
        named = launches[at].label in error.message, executor.card.name in error.message
        print(type(error).__name__, *named, flush=True)
os._exit(0)
"""


def test_a_fault_names_its_op_and_the_executor_stays_lost() -> None:
    """In a process of its own: after an illegal access a process can do nothing more with the card."""
    command = [sys.executable, "-c", FAULT, str(quantised_file("llama-Q4_K_M"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.splitlines() == ["CardError True True", "WorkerLost True True", "WorkerLost True True"], done
