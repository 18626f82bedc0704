"""The reference executor as a StepExecutor: slots, blocks, caches, precision, aborts, refusals."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from oracle_data import f32_file, quantised_file
from running import evaluate, joined, reference, rows_of

from bloomery.runtime.architectures import build_program
from bloomery.runtime.divergence import divergence
from bloomery.runtime.errors import StepAborted
from bloomery.runtime.executor import StepExecutor, StepRows
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.reference import DequantisedWeights, ReferenceExecutor

NAMES = ("llama", "qwen3moe", "deepseek2-v3", "deepseek2-lite-kvb")
TOKENS = np.random.default_rng(3).integers(0, 500, 24).astype(np.int32)
OTHERS = np.random.default_rng(4).integers(0, 500, 9).astype(np.int32)
EXACT = {"rtol": 0, "atol": 2e-6}  # float64 inside, but logits (up to 16) come as float32


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_float64_to_rounding(name: str) -> None:
    narrow, wide = reference(f32_file(name)), reference(f32_file(name), wide=True)
    assert divergence(evaluate(wide, TOKENS), evaluate(narrow, TOKENS)).relative_rms_max < 5e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [1, 7])
def test_prompt_blocks_do_not_matter(name: str, block: int) -> None:
    executor = reference(f32_file(name), wide=True, slots=2)
    whole = evaluate(executor, TOKENS, slot=0)
    np.testing.assert_allclose(evaluate(executor, TOKENS, slot=1, block=block), whole, **EXACT)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_several_slots_in_one_step(name: str) -> None:
    """A prompt block, a decode row in mid-sequence and another prompt at once, with logits of some rows only."""
    alone = reference(f32_file(name), wide=True)
    first, second = evaluate(alone, TOKENS), evaluate(alone, OTHERS)
    executor = reference(f32_file(name), wide=True, slots=3)
    executor.step(rows_of(TOKENS[:20], slot=2, out="none"))
    step = executor.step(
        joined(
            rows_of(OTHERS, slot=1, out="last"),
            rows_of(TOKENS[20:21], slot=2, start=20),
            rows_of(TOKENS[:5], slot=0),
        )
    )
    expected = np.concatenate([second[-1:], first[20:21], first[:5]])
    np.testing.assert_allclose(step.logits, expected, **EXACT)  # type: ignore[call-overload]
    assert step.greedy.tolist() == expected.argmax(1).tolist()


def test_copied_prefix_is_the_prefix() -> None:
    executor = reference(f32_file("deepseek2-v3"), slots=2)
    whole = evaluate(executor, TOKENS, slot=0)
    executor.copy_prefix(0, 1, 15)
    np.testing.assert_allclose(evaluate(executor, TOKENS[15:], slot=1, start=15), whole[15:], rtol=0, atol=1e-4)
    for state in executor._states.values():
        np.testing.assert_array_equal(state[0, :15], state[1, :15])


def test_rewritten_positions_forget_what_was_there() -> None:
    executor = reference(f32_file("qwen3moe"), wide=True)
    evaluate(executor, OTHERS)
    found = evaluate(executor, TOKENS)
    np.testing.assert_array_equal(found, evaluate(reference(f32_file("qwen3moe"), wide=True), TOKENS))


def test_cache_types_round_what_is_cached() -> None:
    """float16 moves logits by about 1e-3 (11 bits of mantissa), float32 by about 1e-7; neither by nothing."""
    path = f32_file("llama")
    whole = evaluate(reference(path, wide=True), TOKENS)
    for cache, least, most in (("f32", 1e-9, 1e-6), ("f16", 1e-5, 5e-3)):
        found = evaluate(reference(path, wide=True, cache_type=cache), TOKENS)
        assert least < divergence(whole, found).relative_rms_median < most, cache


def test_a_step_without_logits() -> None:
    executor = reference(f32_file("qwen3moe"))
    step = executor.step(rows_of(TOKENS, out="none"))
    assert step.logits.shape == (0, executor.program.vocabulary) and step.greedy.shape == (0,)


def test_abort_ends_the_running_step_at_an_op_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = reference(f32_file("llama"))
    expected = evaluate(executor, TOKENS)
    executor.abort()  # no step runs: nothing happens
    np.testing.assert_array_equal(evaluate(executor, TOKENS), expected)

    begun, ran = threading.Event(), []
    execute = ReferenceExecutor._execute

    def slow(self: ReferenceExecutor, op: Any, rows: StepRows) -> None:
        ran.append(op.name)
        begun.set()
        threading.Event().wait(0.02)
        execute(self, op, rows)

    monkeypatch.setattr(ReferenceExecutor, "_execute", slow)
    other = threading.Thread(target=lambda: (begun.wait(5), executor.abort()))
    other.start()
    with pytest.raises(StepAborted, match="before op"):
        executor.step(rows_of(TOKENS))
    other.join(5)
    assert 0 < len(ran) < len(executor.program.ops)
    monkeypatch.undo()
    np.testing.assert_array_equal(evaluate(executor, TOKENS), expected)


def test_rows_outside_the_executor_are_refused() -> None:
    executor = reference(f32_file("llama"), context=16, slots=2, max_rows=8)
    bad = [
        (rows_of(TOKENS[:9]), "9 rows, 9 wanted"),
        (rows_of(TOKENS[:2], slot=2), r"slot outside 0\.\.1: \[2 2\]"),
        (rows_of(TOKENS[:2], start=15), r"position outside 0\.\.15: \[15 16\]"),
        (rows_of(np.array([512])), r"token outside 0\.\.511: \[512\]"),
        (rows_of(np.array([-1])), r"token outside 0\.\.511: \[-1\]"),
    ]
    for rows, message in bad:
        with pytest.raises(ValueError, match=message):
            executor.step(rows)


def test_weights_are_dequantised_once_within_a_bound() -> None:
    program = build_program(ModelFile.open(quantised_file("qwen3moe-Q4_K_M")))
    ample = DequantisedWeights(program, np.float32, 1 << 30)
    name = "blk.0.ffn_gate_exps.weight"
    assert ample.expert(name, 3) is ample.expert(name, 3)
    np.testing.assert_array_equal(ample[name][3], ample.expert(name, 3))
    tight = DequantisedWeights(program, np.float32, 3 * ample.expert(name, 0).nbytes)
    for e in range(16):
        np.testing.assert_array_equal(tight.expert(name, e), ample.expert(name, e))
    assert tight._bytes == sum(array.nbytes for array in tight._held.values()) <= tight._limit
    assert len(tight._held) == 3


def test_it_is_a_step_executor() -> None:
    executor: StepExecutor = reference(f32_file("llama"), context=64, slots=4, max_rows=32)
    assert (executor.max_rows, executor.max_out_rows, executor.slots, executor.context) == (32, 32, 4, 64)
    executor.step(rows_of(TOKENS))
    executor.recover()
    counters = executor.statistics()
    assert (counters["steps"], counters["rows"]) == (1, 24) and counters["seconds"] > 0
    executor.close()
