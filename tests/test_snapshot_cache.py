"""Snapshots of conversations in host memory: the cap, what is dropped, and that they change no bit of an answer.

Planted once and seen to fail: no room made; the bytes of a dropped one not given back; the most recent dropped first; a
ring kept one row short; of rings that reach back less far, the whole match counted, a beginning replaced, or a restored
slot that claims more than its own rings hold.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepseek_data import tiny41
from engine_client import GREEDY, Client, exhaust
from numpy.typing import NDArray
from oracle_data import trained_file
from running import rows_of

from bloomery.runtime.architectures import build_program
from bloomery.runtime.engine import Engine
from bloomery.runtime.executor import StateSnapshot, StepExecutor
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.requests import Chunk
from bloomery.runtime.slot_states import SlotStates
from bloomery.runtime.snapshot_cache import MEMORY_LEFT, SnapshotCache
from bloomery.runtime.states import CacheState, GroupState, RingState
from bloomery.runtime.tokenizer import Tokenizer

PLENTY = 1 << 40


class Rows:
    """A slot's states are `width` bytes a position."""

    def __init__(self, width: int, lowest: int = 0) -> None:
        self.width, self.lowest = width, lowest

    def continuable(self, slot: int) -> range:
        return range(self.lowest, 1 << 20)

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        return StateSnapshot(positions, {"rows": np.full((positions, self.width), slot, np.uint8)}, reach)

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int:
        return positions * self.width

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None:
        pass


def tokens_of(seed: int, count: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)


def test_memory_is_what_is_said_and_never_more_than_the_limit() -> None:
    limit = 10 << 20
    cache = SnapshotCache(Rows(4096), limit, lambda: PLENTY)
    prompts = [tokens_of(seed, 300 + 100 * (seed % 7)) for seed in range(40)]
    tracemalloc.start()
    try:
        for prompt in prompts:
            assert cache.keep(0, prompt)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    figures = cache.statistics()
    assert limit - 4100 * 900 < figures["bytes"] <= limit and peak <= 1.01 * limit
    assert abs(held - figures["bytes"]) < 0.01 * limit
    assert figures["snapshots"] + figures["dropped"] == figures["stored"] == 40


def test_the_least_recently_used_goes_first() -> None:
    cache = SnapshotCache(Rows(996), 350_000, lambda: PLENTY)  # 1000 bytes a token
    a, b, c, d = (tokens_of(seed, 100) for seed in range(4))
    for prompt in (a, b, c):
        assert cache.keep(0, prompt)
    found, kept = cache.find(a)
    assert found == 100 and kept is not None
    cache.restore(kept, 0, 100)
    assert cache.keep(0, d)
    assert [cache.find(prompt)[0] for prompt in (a, b, c, d)] == [100, 0, 100, 100]
    assert cache.statistics() | {"limit_bytes": 0} == {
        "bytes": 300_000, "limit_bytes": 0, "snapshots": 3,
        "hits": 1, "restored_tokens": 100, "stored": 4, "dropped": 1, "refused": 0,
    }  # fmt: skip


def test_what_is_being_brought_back_stays() -> None:
    cache = SnapshotCache(Rows(996), 250_000, lambda: PLENTY)
    a, b, c = (tokens_of(seed, 100) for seed in range(3))
    assert cache.keep(0, a) and cache.keep(0, b)
    _, lent = cache.find(a)
    assert lent is not None
    lent.lent = 1
    assert cache.keep(0, c)
    assert [cache.find(prompt)[0] for prompt in (a, b, c)] == [100, 0, 100]
    assert cache.keep(0, np.concatenate([a, b[:20]])) and lent in cache._kept, "not replaced either"
    assert cache.nbytes <= cache.limit


def test_longer_ones_replace_their_beginnings() -> None:
    cache = SnapshotCache(Rows(10), PLENTY, lambda: PLENTY)
    whole = tokens_of(1, 200)
    for count in (50, 120, 200, 150):
        assert cache.keep(0, whole[:count])
    assert cache.statistics()["snapshots"] == 1 and cache.statistics()["stored"] == 3
    assert cache.find(whole[:77]) == (77, cache._kept[0])


def test_only_where_a_snapshot_can_go_on() -> None:
    """Rings that reach back to position 90: the beginning of a conversation is another snapshot."""
    cache = SnapshotCache(Rows(10, lowest=90), PLENTY, lambda: PLENTY)
    whole, other = tokens_of(1, 200), tokens_of(2, 200)
    assert cache.keep(0, whole[:120])
    prompts = (whole, whole[:95], np.concatenate([whole[:100], other]), np.concatenate([whole[:80], other]))
    assert [cache.find(prompt)[0] for prompt in prompts] == [120, 95, 100, 0]
    cache._memory.lowest = 170  # type: ignore[attr-defined]
    assert cache.keep(0, whole) and cache.statistics()["snapshots"] == 2
    assert [cache.find(prompt)[0] for prompt in prompts] == [200, 95, 100, 0]


def test_what_is_too_large_is_refused_and_costs_nothing() -> None:
    cache = SnapshotCache(Rows(996), 150_000, lambda: PLENTY)
    small, large = tokens_of(1, 100), tokens_of(2, 151)
    assert cache.keep(0, small) and not cache.keep(0, large)
    assert cache.find(small)[0] == 100 and cache.statistics()["refused"] == 1
    _, kept = cache.find(small)
    assert kept is not None
    kept.lent = 1
    assert not cache.keep(0, tokens_of(3, 60)), "what is about to be used stays, and the limit holds"
    assert not SnapshotCache(Rows(1), 0, lambda: PLENTY).keep(0, small)
    poor = SnapshotCache(Rows(996), PLENTY, lambda: MEMORY_LEFT + 50_000)
    assert not poor.keep(0, small) and poor.keep(0, small[:50])


# ---- with models ----


class Asking:
    """An engine of one slot: every other conversation takes the slot over."""

    def __init__(self, executor: StepExecutor, tokenizer: Tokenizer, limit: int) -> None:
        self.client = Client(Engine(executor, tokenizer, None, snapshot_bytes=limit))

    def __call__(self, prompt: list[int], count: int, **fields: Any) -> tuple[int, list[int], NDArray[np.float32]]:
        """Cached tokens, generated ones, their logits."""
        request = self.client.submit(
            tuple(prompt), max_tokens=count, sampling=GREEDY, ignore_eos=True, logits="generated", **fields
        )
        exhaust(self.client)
        chunks = [event for event in self.client.events[request] if isinstance(event, Chunk)]
        logits = np.concatenate([chunk.logits for chunk in chunks if chunk.logits is not None])
        return self.client.final(request).cached_tokens, self.client.tokens(request), logits


@contextmanager
def pool_of(path: Path, program: Any, block: int) -> Iterator[HostPool]:
    pool = HostPool.start(str(path), program, context=256, slots=1, processes=1, prompt_block=block)
    try:
        yield pool
    finally:
        pool.close()


@pytest.mark.parametrize("kind", ["deepseek41", "qwen3moe"])
def test_two_conversations_on_one_slot_and_not_a_bit_differs(kind: str) -> None:
    """Three turns each in turns. With snapshots only new tokens are computed; every logit is that of a run without."""
    path = tiny41("a") if kind == "deepseek41" else trained_file("tiny-qwen3moe-Q4_K_M")
    with ModelFile.open(path) as model:
        tokenizer, program = Tokenizer.from_model_file(model), build_program(model)
        with pool_of(path, program, block=24) as pool:
            ask, plain = Asking(pool, tokenizer, 1 << 30), Asking(pool, tokenizer, 0)
            generator = np.random.default_rng(3)
            histories = [generator.integers(3, 250, 40).tolist() for _ in range(2)]
            expected = [0, 0]
            turns: list[tuple[list[int], Any]] = []
            for turn in range(3):
                for which, history in enumerate(histories):
                    outcome = ask(history, 9)
                    assert outcome[0] == expected[which], (turn, which)
                    turns.append((list(history), outcome))
                    # the last generated token is in no cache, the next turn differs from the one before by two tokens
                    history += [*outcome[1][:-2], *generator.integers(3, 250, 30).tolist()]
                    expected[which] = len(history) - 30
            figures = ask.client.engine.metrics()["snapshots"]
            assert figures["hits"] == 4 and figures["bytes"] <= figures["limit_bytes"]
            for prompt, (_, tokens, logits) in turns:
                cached, same_tokens, same_logits = plain(prompt, 9, cache_prompt=False)
                assert cached == 0 and same_tokens == tokens
                np.testing.assert_array_equal(same_logits, logits)


STATES = (CacheState("keys", 1), RingState("window", 1, 8), GroupState("groups", 1, 3))
SPARE = 6


class Stored:
    """States whose rows say which logical row they are, and nothing once they have been overwritten."""

    def __init__(self, spare: int = SPARE) -> None:
        rows = {state.name: np.full((2, state.rows(64, spare), 1), -1.0) for state in STATES}
        named = {state.name: state for state in STATES}
        self.rows = rows
        self.states = SlotStates(named, rows, slots=2, context=64, spare=spare)

    def run(self, first: int, end: int) -> None:
        for start in range(first, end, 5):
            stop = min(end, start + 5)
            self.states.reach.begin(rows_of(np.zeros(stop - start), start=start))
            for state in STATES:
                written = state.live(stop).stop
                for row in range(state.live(start).stop, written):
                    self.rows[state.name][0, row % self.rows[state.name].shape[1]] = row

    def holds(self, slot: int, position: int) -> bool:
        """Whether everything is there that going on at a position reads."""
        arrays = self.rows
        return all(
            arrays[state.name][slot, row % arrays[state.name].shape[1], 0] == row
            for state in STATES
            for row in state.live(position)
        )


def test_reach_of_rings_is_kept_and_not_more() -> None:
    source = Stored()
    source.run(0, 33)
    allowed = source.states.reach.continuable(0)
    assert allowed == range(26, 34)
    taken = source.states.snapshot(0, 33, 7)
    assert taken.nbytes == source.states.snapshot_bytes(33, 7) > source.states.snapshot(0, 33).nbytes
    for position in allowed:
        for target in (Stored(), Stored(spare=9), Stored(spare=5)):
            target.states.restore(1, taken, position)
            reached = target.states.reach.continuable(1)
            assert reached.stop == position + 1 and reached.start == max(26, position - target.states.reach._spare - 1)
            assert all(target.holds(1, place) for place in reached)
    with pytest.raises(ValueError, match="goes on at 26 to 33, not at 25"):
        source.states.restore(1, taken, 25)
    for reach in (8, 33):
        with pytest.raises(ValueError, match="slot 0 cannot go on at position"):
            source.states.snapshot(0, 33, reach)
