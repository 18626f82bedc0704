"""Steps ahead and times of legs on a real card. Needs one; `test_step_ahead` and `test_emulated_worker` need none."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from card_stand import need_card
from deepseek_data import tiny41
from oracle_data import TRAINED, quantised_file, trained_file
from running import greedy, rows_of
from test_card_daemon import card_pool
from test_step_ahead import after, one_by_one

from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.runtime.architectures import build_program
from bloomery.runtime.executor import MOST_AHEAD
from bloomery.runtime.leg_times import BEGUN, SEEN, SENT, leg_figures
from bloomery.runtime.model_file import ModelFile

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True, scope="module")
def card() -> None:
    need_card()


@pytest.mark.parametrize("name", ["qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M", "llama-Q4_K_M"])
@pytest.mark.parametrize(("slots", "ahead"), [(1, MOST_AHEAD), (3, 4)])
def test_steps_ahead_are_single_steps(name: str, slots: int, ahead: int) -> None:
    """Bit for bit: the first time, when the graph is captured, and replayed many times."""
    program = build_program(ModelFile.open(quantised_file(name)))
    executor = CardExecutor(program, context=64, slots=slots, prompt_block=64, deterministic=True)
    try:
        rows = after(executor, ahead)
        logits, tokens = one_by_one(executor, rows)
        for _ in range(50):
            made = executor.step(rows)
            assert (made.greedy == tokens).all() and (made.logits == logits).all()
    finally:
        executor.close()


def test_a_long_text_is_the_same_in_runs_of_any_length() -> None:
    path = trained_file(TRAINED[0])
    program = build_program(ModelFile.open(path))
    executor = CardExecutor(program, context=256, prompt_block=64, cache_type="f16")
    try:
        prompt, count = list(range(5, 12)), 120
        wanted = greedy(executor, prompt, count)
        for ahead in (1, 7, MOST_AHEAD):
            begun = time.perf_counter()
            found = executor.step(rows_of(prompt, out="last")).greedy.tolist()
            while len(found) < count:
                rows = rows_of(found[-1:], start=len(prompt) + len(found) - 1)
                found += executor.step(replace(rows, ahead=min(ahead, count - len(found) - 1))).greedy.tolist()
            print(f"{ahead} ahead: {(count - 1) / (time.perf_counter() - begun):.0f} tokens/s")
            assert found == wanted
    finally:
        executor.close()


@pytest.mark.parametrize("name", ["qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M", "deepseek41"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_steps_ahead_with_experts_on_the_host(name: str, share: float) -> None:
    """Bit for bit, at any placement, with one stream and with two, also with n-gram tables."""
    for slots in (1, 2):
        path = tiny41("a") if name == "deepseek41" else quantised_file(name)
        with card_pool(path, share, slots=slots, context=64) as pool:
            rows = after(pool, pool.most_ahead(slots))
            assert rows.ahead == 8 // slots - 1
            logits, tokens = one_by_one(pool, rows)
            for _ in range(20):
                made = pool.step(rows)
                assert (made.greedy == tokens).all() and (made.logits == logits).all()


def test_times_of_legs_are_of_the_step_that_was() -> None:
    with card_pool(quantised_file("qwen3moe-Q4_K_M"), 0.3, time_legs=True) as pool:
        pool.step(rows_of([5, 6, 7], out="last"))
        pool.step_legs()
        before, walls = pool.op_seconds(), []
        for i in range(50):
            begun = time.perf_counter_ns()
            pool.step(rows_of([8], start=3 + i))
            walls.append(time.perf_counter_ns() - begun)
        legs, spent = pool.step_legs(), pool.op_seconds()
    assert len(legs) == 50
    for step, wall in zip(legs, walls, strict=True):
        times = step.hand_offs[step.hand_offs[:, SENT] > 0]
        assert 0 < step.card_ns < wall
        assert (times[:, SENT] <= times[:, BEGUN]).all() and (times[:, SENT] <= times[:, SEEN]).all()
        assert (times[1:, SENT] >= times[:-1].max(axis=1)).all() and times.max() - times[0, SENT] < step.card_ns
    host = [sum(spent[name]) - sum(before[name]) for name in spent if not name.endswith((" wait", " answer"))]
    figures = leg_figures(legs, [seconds / 50 for seconds in host])
    print(f"card {1e6 * figures.card:.0f} us, host {1e6 * figures.host:.0f}, bound {1e6 * figures.bound:.0f}")
    clock = np.unique(np.diff(np.unique(np.concatenate([step.hand_offs.reshape(-1) for step in legs]))))
    print(f"the card's clock advances by {clock[0]} ns, hand-offs take {1e6 * np.median(figures.round_trips):.1f} us")
    assert 0 < figures.bound < np.mean(walls) / 1e9 and figures.wait < figures.card + figures.wait
