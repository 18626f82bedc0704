"""The card's worker process and its pool, with the NumPy reference in the place of the card."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pool_kit import left_behind, worker_environment
from running import evaluate, joined, rows_of
from stand_in_card import CRASH

from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime.architectures import build_program
from bloomery.runtime.card_pool import CardPool
from bloomery.runtime.errors import PlanError, StepAborted, WorkerLost
from bloomery.runtime.executor import StateSnapshot
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program
from bloomery.runtime.reference import ReferenceExecutor

PATH = str(demo_model_path("tiny-qwen3moe"))
TOKENS = list(np.random.default_rng(7).integers(1, 200, 40))


@pytest.fixture(autouse=True)
def find_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with ModelFile.open(PATH) as model:
        yield build_program(model)


@pytest.fixture(scope="module")
def logits(program: Program) -> np.ndarray[Any, Any]:
    return evaluate(ReferenceExecutor(program, context=64, cache_type="f16"), TOKENS, block=8)


def start(program: Program, **options: Any) -> CardPool:
    settings = {"context": 64, "slots": 3, "prompt_block": 8, **options}
    return CardPool.start(PATH, program, workload="stand_in_card:load", **settings)


@pytest.fixture
def pool(program: Program) -> Iterator[CardPool]:
    made = start(program)
    yield made
    made.close()
    assert not left_behind()


def test_steps_states_and_copies(program: Program, logits: np.ndarray[Any, Any]) -> None:
    """Results reach the arena; prefixes, snapshots and restored slots go on bit for bit; numbers add up."""
    reports: list[tuple[str, int, int]] = []
    pool = start(program, progress=lambda *report: reports.append(report))
    try:
        assert (evaluate(pool, TOKENS, block=8) == logits).all()
        last = pool.step(rows_of(TOKENS[-1:], start=39))
        assert last.greedy[0] == logits[-1].argmax() and last.hidden is not None and len(last.hidden) == 1
        pool.copy_prefix(0, 1, 24)
        assert (evaluate(pool, TOKENS[24:], block=8, slot=1, start=24) == logits[24:]).all()
        kept = pool.snapshot(1, 32)
        assert {name: rows.shape for name, rows in kept.rows.items()} == {
            state.name: (32, state.width) for state in program.states.values()
        }
        assert all(rows.dtype == np.float16 and rows.any() for rows in kept.rows.values())
        pool.restore(2, kept)
        assert (evaluate(pool, TOKENS[32:], block=8, slot=2, start=32) == logits[32:]).all()
        both = pool.step(joined(rows_of(TOKENS[38:39], start=38), rows_of(TOKENS[:1], slot=2)))
        np.testing.assert_allclose(both.logits, logits[[38, 0]], atol=1e-4)
        with pytest.raises(ValueError, match="does not fit state"):
            pool.restore(2, StateSnapshot(31, kept.rows))
        with pytest.raises(ValueError, match="no slot 3"):
            pool.copy_prefix(0, 3, 1)
        with pytest.raises(ValueError, match="position outside"):
            pool.step(rows_of([1], start=64))
        statistics = pool.statistics()
        assert (statistics["card"], statistics["restarts"], statistics["lost"]) == ("stand-in", 0, "")
        assert (statistics["rows"], len(statistics["pids"])) == (40 + 1 + 16 + 8 + 2, 1)
    finally:
        pool.close()
    assert ("upload", 10, 10) in reports and not left_behind()
    with pytest.raises(WorkerLost, match="closed"):
        pool.step(rows_of([1]))


def test_what_is_missing_reaches_the_caller(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "refuse")
    with pytest.raises(PlanError, match=r"sees no card.*card worker") as caught:
        start(program)
    assert "--plan cpu" in caught.value.hint
    assert not left_behind()


def test_a_killed_worker_is_replaced_and_its_slots_are_forgotten(pool: CardPool, logits: np.ndarray[Any, Any]) -> None:
    evaluate(pool, TOKENS, block=8)
    assert pool.continuable(0) == range(65)
    (pid,) = pool.statistics()["pids"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match=rf"card worker \(pid {pid}\) was killed by SIGKILL"):
        while True:  # the signal may need a moment
            pool.step(rows_of(TOKENS[:1]))
    with pytest.raises(WorkerLost):
        pool.copy_prefix(0, 1, 8)
    pool.recover()
    assert pool.statistics()["restarts"] == 1 and not os.path.exists(f"/proc/{pid}")
    assert pool.continuable(0) == range(1)
    with pytest.raises(ValueError, match="cannot go on at position 5"):
        pool.step(rows_of(TOKENS[:1], start=5))
    assert (evaluate(pool, TOKENS, block=8) == logits).all()
    assert pool.continuable(0) == range(41)


def test_a_failure_of_the_card_is_told_with_its_last_words(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "crash:2")
    pool = start(program)
    try:
        pool.step(rows_of(TOKENS[:1]))
        with pytest.raises(WorkerLost, match=f"ended with exit status 3.*its last words: CardError: {CRASH}"):
            pool.step(rows_of(TOKENS[1:2], start=1))
        pool.recover()
        pool.step(rows_of(TOKENS[:1]))
        pool.step(rows_of(TOKENS[1:2], start=1))
    finally:
        pool.close()


def test_an_abort_ends_the_step_at_a_boundary_and_no_other(
    program: Program, logits: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "slow")
    pool = start(program)  # two seconds and more a step
    try:
        for _ in range(2):
            begun = time.monotonic()
            threading.Timer(0.1, pool.abort).start()
            with pytest.raises(StepAborted):
                pool.step(rows_of(TOKENS[:8]))
            assert 0.09 < time.monotonic() - begun < 1.2
        pool.abort()  # nothing runs
        assert pool.statistics()["aborted"] == 2
        assert (pool.step(rows_of(TOKENS[:8])).logits == logits[:8]).all()
    finally:
        pool.close()
