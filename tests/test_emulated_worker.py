"""Plan a without a card: the real worker, the real executor and its kernels on the emulator, the hand-off kernels among
them, beside real CPU-expert workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from oracle_data import figures, host_band, quantised_file
from pool_kit import left_behind, worker_environment
from running import evaluate
from test_hand_off import program_of, tiers_of

from bloomery.runtime.card_pool import CardPool
from bloomery.runtime.divergence import divergence
from bloomery.runtime.leg_times import BEGUN, SEEN, SENT

pytestmark = pytest.mark.timeout(300)
NAME = "qwen3moe-Q4_K_M"


@pytest.fixture(autouse=True)
def find_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


@contextmanager
def emulated_pool(share: float, **options: Any) -> Iterator[CardPool]:
    program = program_of(NAME)
    sizes = {"context": 64, "slots": 2, "prompt_block": 12, "cache_type": "f32", "processes": 2, **options}
    tiers = tiers_of(program, share) if share < 1 else None
    path = str(quantised_file(NAME))
    pool = CardPool.start(path, program, tiers=tiers, workload="emulated_driver:load", **sizes)
    try:
        yield pool
    finally:
        pool.close()
        assert not left_behind()


def test_any_placement_stays_in_the_band() -> None:
    """As on a card, for which test_card_daemon has the same: the first tokens of the oracle's text."""
    stored = figures(NAME)
    tokens, median_mean = stored["tokens"][:12], host_band(NAME)
    for share in (0.3, 1.0):
        with emulated_pool(share) as pool:
            first = evaluate(pool, tokens, block=8)
            assert (evaluate(pool, tokens[:3], block=1, slot=1) == first[:3]).all(), "single rows differ from groups"
        found = divergence(stored["logits"][:12], first)
        print(share, found)
        assert found.kl_median <= median_mean[0] and found.kl_mean <= median_mean[1]


def test_times_of_hand_offs_change_no_bit_and_are_in_order() -> None:
    with emulated_pool(0.3) as pool:
        plain = evaluate(pool, [5, 9, 17], block=1)
        assert pool.step_legs() == [] and pool.op_seconds() == {}
    with emulated_pool(0.3, time_legs=True) as pool:
        assert (evaluate(pool, [5, 9, 17], block=1) == plain).all()
        legs, spent = pool.step_legs(), pool.op_seconds()
        assert pool.step_legs() == [], "told once"
    assert len(legs) == 3
    for step in legs:
        times = step.hand_offs[step.hand_offs[:, SENT] > 0]
        assert len(step.hand_offs) == sum(name.endswith(" wait") for name in spent) > 1 and len(times)
        assert (times[:, SENT] <= times[:, BEGUN]).all() and (times[:, SENT] <= times[:, SEEN]).all()
        assert (times[1:, SENT] > times[:-1].max(axis=1)).all() and times.max() - times[0, SENT] < step.card_ns
    assert all(kernel > 0 for kernel, _ in spent.values())
