"""Prompt blocks whose experts come from the host: the real workers over emulated kernels, whose streams do their work
in the least welcome order. A block is what it is with all experts on the card, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from deepseek_data import tiny4
from oracle_data import host_band, quantised_file
from pool_kit import left_behind, worker_environment
from running import evaluate, joined, rows_of
from test_hand_off import tiers_of

from bloomery.runtime.architectures import build_program
from bloomery.runtime.card_pool import CardPool
from bloomery.runtime.divergence import divergence
from bloomery.runtime.errors import StepAborted, WorkerLost
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.model_file import ModelFile

pytestmark = pytest.mark.timeout(300)
NAME = "qwen3moe-Q4_K_M"
BLOCK = 40
TOKENS = list(np.random.default_rng(5).integers(1, 60, BLOCK + 36))


@pytest.fixture(autouse=True)
def find_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


@contextmanager
def pool_of(name: str, share: float, **options: Any) -> Iterator[CardPool]:
    path = tiny4() if name == "deepseek4" else quantised_file(name)
    program = build_program(ModelFile.open(path))
    sizes = {"context": 96, "slots": 2, "prompt_block": BLOCK, "cache_type": "f16", "processes": 2, "stream_rows": 33}
    tiers = tiers_of(program, share) if share < 1 else None
    pool = CardPool.start(str(path), program, tiers=tiers, workload="emulated_driver:load", **{**sizes, **options})
    try:
        yield pool
    finally:
        pool.close()
        assert not left_behind()


def two_blocks(pool: CardPool) -> Any:
    """Logits of both blocks, all rows of the first and one of the second wanted; then those of a row after them."""
    first = pool.step(rows_of(TOKENS[:BLOCK])).logits.copy()
    last = pool.step(rows_of(TOKENS[BLOCK:], start=BLOCK, out="last")).logits.copy()
    return np.concatenate([first, last])


WAYS = {  # model: (share of the experts on the card, whether pages cannot be locked, whose work is done first)
    NAME: ((0.0, "", "copies"), (0.3, "", "launches")),
    "deepseek2-v3-Q3_K_M": ((0.3, "", "copies"), (0.0, "refuse", "launches")),
    "deepseek4": ((0.3, "", "copies"),),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_block_is_what_it_is_with_all_experts_on_the_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(name, 1.0) as pool:
        wanted = two_blocks(pool)
    for share, lock, turns in WAYS[name]:
        monkeypatch.setenv("EMULATED_LOCK", lock)
        monkeypatch.setenv("EMULATED_TURNS", turns)
        with pool_of(name, share) as pool:
            assert (two_blocks(pool) == wanted).all(), (share, lock, turns)
            again = pool.step(rows_of(TOKENS[:BLOCK], slot=1)).logits
            assert (again == wanted[:BLOCK]).all(), "the areas are not what they were"


def test_blocks_and_handed_over_rows_share_steps() -> None:
    """A row of another slot beside a block, and what is handed over before and after: each as alone, and near to what
    the host makes of all of it."""
    tokens, prompt = TOKENS[:4], TOKENS[4:40]
    with pool_of(NAME, 0.3, stream_rows=0) as pool:
        handed = evaluate(pool, prompt, block=8)
    with pool_of(NAME, 0.3) as pool:
        before = pool.statistics()["steps"]
        wanted = evaluate(pool, tokens, block=1, slot=1)
        block = pool.step(rows_of(prompt)).logits.copy()
        assert pool.statistics()["steps"] - before == len(tokens) + 1, "36 rows are one part"
        both = pool.step(joined(rows_of(tokens[:1], slot=1), rows_of(prompt))).logits
        assert pool.statistics()["steps"] - before == len(tokens) + 3
        assert (both[:1] == wanted[:1]).all() and (both[1:] == block).all()
        assert (evaluate(pool, tokens[1:], block=1, slot=1, start=1) == wanted[1:]).all()
        follows = pool.step(rows_of([7], start=len(prompt))).logits
        assert np.isfinite(follows).all()
    found, (median, mean) = divergence(handed, block), host_band(NAME)
    print(found)
    assert 0 < found.kl_median <= median and found.kl_mean <= mean


def test_a_short_block_leaves_some_experts_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """About half of those that are there: near to what groups give, the same bits each time and in whatever order
    streams do their work; a longer block is the card's alone."""
    program = build_program(ModelFile.open(quantised_file(NAME)))
    tiers, half = tiers_of(program, 0.3), tiers_of(program, 0.5)
    there = {gate: tuple(sorted({*ids, *half.on_card[gate]})) for gate, ids in tiers.on_card.items()}
    kept = ((33, ExpertTiers(tiers.layers, there).text()), (39, ""))
    with pool_of(NAME, 0.3) as pool:
        whole = pool.step(rows_of(TOKENS[:BLOCK])).logits.copy()
        handed = evaluate(pool, TOKENS[:36], block=8)
    found = []
    for turns in ("copies", "launches"):
        monkeypatch.setenv("EMULATED_TURNS", turns)
        with pool_of(NAME, 0.3, stream_tiers=kept) as pool:
            before = pool.statistics()["steps"]
            found += [pool.step(rows_of(TOKENS[:36], slot=slot)).logits.copy() for slot in (0, 1)]
            assert pool.statistics()["steps"] == before + 2
            if turns == "launches":  # the rest has been seen, and steps of the emulator are slow
                continue
            assert (pool.step(rows_of(TOKENS[:BLOCK])).logits == whole).all()
            assert len(pool.step(rows_of(TOKENS[:34], out="none")).logits) == 0, "nothing is wanted of the last layer"
            assert (pool.step(rows_of(TOKENS[:36])).logits == found[0]).all()
    assert all((logits == found[0]).all() for logits in found)
    assert not (found[0] == whole[:36]).all(), "the host has computed nothing"
    median, mean = host_band(NAME)
    for other in (handed, whole[:36]):
        result = divergence(other, found[0])
        print(result)
        assert 0 < result.kl_median <= median and result.kl_mean <= mean


def test_an_abort_ends_a_block_between_layers() -> None:
    with pool_of(NAME, 0.0) as pool:
        wanted = pool.step(rows_of(TOKENS[:BLOCK])).logits.copy()
        begun = time.monotonic()
        pool.step(rows_of(TOKENS[:BLOCK]))
        whole = time.monotonic() - begun
        for part in (0.05, 0.35):
            begun = time.monotonic()
            threading.Timer(part * whole, pool.abort).start()
            with pytest.raises(StepAborted):
                pool.step(rows_of(TOKENS[:BLOCK], slot=1))
            print(time.monotonic() - begun)
        assert (pool.step(rows_of(TOKENS[:BLOCK], slot=1)).logits == wanted).all()


def test_a_death_ends_a_block() -> None:
    """Of a worker that has no part in it, and of the card's: the step ends, the next ones run, a survivor's slots are
    kept."""
    with pool_of(NAME, 0.3) as pool:
        wanted = pool.step(rows_of(TOKENS[:BLOCK])).logits.copy()
        for rank in (0, -1):
            victim = pool.statistics()["pids"][rank]
            begun = time.monotonic()
            threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
            with pytest.raises(WorkerLost, match=rf"\(pid {victim}\) was killed by SIGKILL"):
                while True:
                    pool.step(rows_of(TOKENS[:BLOCK], slot=1))
            pool.recover()
            assert time.monotonic() - begun < 30
            assert pool.continuable(0) == (range(97) if rank == 0 else range(1))
        assert (pool.step(rows_of(TOKENS[:BLOCK])).logits == wanted).all()
