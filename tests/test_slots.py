"""The slot pool against a model that never reads its bookkeeping: what tokens each slot's cache rows really hold.

Planted once and seen to fail: the last prompt token counted as cached; a busy slot handed out; a match behind a slot's
count; more claimed than the victim holds; rows claimed while a copy overwrites them; the most recently used slot given
up; releases not timed; always, or never, a match used in place; of a ring, the whole match counted; a victim's
states not kept, or one token less of them.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from running import rows_of

from bloomery.runtime.executor import StateSnapshot
from bloomery.runtime.slot_reach import SlotReach
from bloomery.runtime.slots import COPY_AT_LEAST, Slot, SlotPool, worth_keeping
from bloomery.runtime.snapshot_cache import Kept, SnapshotCache
from bloomery.runtime.states import CacheState, RingState

SLOTS, CONTEXT, SPARE = 4, 120, 24


def common_prefix(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


class PoolMachine(RuleBasedStateMachine):
    """`rows[slot]` are the tokens in the slot's cache rows, moved only by evaluations and copies. `reach` refuses steps
    and copies at positions that a ring has lost."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = [[] for _ in range(SLOTS)]
        self.running: list[Slot] = []
        self.released: list[int] = []  # slot indices, least recently used first
        self.copies: list[tuple[int, int, int]] = []
        self.restores: list[tuple[int, int]] = []

    def continuable(self, slot: int) -> range:
        return self.reach.continuable(slot)

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        self.reach.require(slot, positions)
        assert positions - reach in self.reach.continuable(slot)
        return StateSnapshot(positions, {"rows": np.array(self.rows[slot][:positions])}, reach)

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int:
        return 8 * positions

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None:
        assert positions is not None and snapshot.positions - snapshot.reach <= positions <= snapshot.positions
        assert all(other.index != slot for other in self.running), "a busy slot's rows are overwritten"
        self.restores.append((slot, positions))
        self.rows[slot] = snapshot.rows["rows"][:positions].tolist()
        self.reach.restored(slot, positions, snapshot.positions - snapshot.reach)

    def copy(self, source: int, target: int, positions: int) -> None:
        assert positions <= len(self.rows[source])
        assert all(slot.index != target for slot in self.running), "a busy slot's rows are overwritten"
        self.reach.require(source, positions)
        self.copies.append((source, target, positions))
        self.rows[target] = self.rows[source][:positions]
        self.reach.restored(target, positions)

    @initialize(ring=st.booleans(), limit=st.sampled_from([0, 2000, 1 << 30]))
    def start(self, ring: bool, limit: int) -> None:
        state = RingState("window", 1, 8) if ring else CacheState("keys", 1)
        self.reach = SlotReach([state], slots=SLOTS, context=CONTEXT, spare=SPARE)
        self.snapshots = SnapshotCache(self, limit, lambda: 1 << 40)
        self.pool = SlotPool(SLOTS, self.copy, self.reach.continuable, self.snapshots)
        self.released = list(range(SLOTS))

    def usable(self, slot: int, match: int) -> int:
        """Of the first `match` tokens, those after which the slot can go on, found by trying."""
        for position in range(match, 0, -1):
            try:
                self.reach.require(slot, position)
            except ValueError:
                continue
            return position
        return 0

    @staticmethod
    def stored(kept: Kept, prompt: list[int]) -> int:
        match = common_prefix(kept.tokens.tolist(), prompt)
        return match if match >= kept.snapshot.positions - kept.snapshot.reach else 0

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(data=st.data(), reuse=st.sampled_from([True, True, True, False]))
    def admit(self, data: st.DataObject, reuse: bool) -> None:
        kept_rows = [kept.tokens.tolist() for kept in self.snapshots._kept]
        known = data.draw(st.sampled_from([[], *self.rows, *kept_rows]))
        cut = data.draw(st.integers(0, len(known)))
        prompt = [*known[:cut], *data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=20))][:CONTEXT]
        busy = {slot.index for slot in self.running}
        matches = [self.usable(slot, common_prefix(rows, prompt[:-1])) for slot, rows in enumerate(self.rows)]
        before = [list(rows) for rows in self.rows]
        self.copies, self.restores = [], []
        stored = max((self.stored(kept, prompt[:-1]) for kept in self.snapshots._kept), default=0)
        tokens = np.full(len(prompt) + 10, -1, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        slot, cached = self.pool.acquire(tokens, len(prompt), reuse)

        assert slot.index not in busy and slot.busy
        assert cached == slot.count <= len(prompt) - 1
        assert self.rows[slot.index][:cached] == prompt[:cached], "claimed tokens are not in the cache"
        assert self.pool.idle == SLOTS - len(busy) - 1
        oldest = next(index for index in self.released if index not in busy)
        idle_matches = [matches[index] for index in range(SLOTS) if index not in busy]
        if not reuse:
            assert cached == 0 and slot.index == oldest and not self.copies
        else:
            assert cached > max(*matches, stored) - COPY_AT_LEAST, "a longer match was worth a copy"
            if self.restores:
                assert self.restores == [(slot.index, cached)] and cached == stored > max(matches) and not self.copies
            elif max(idle_matches) == max(matches) and slot.index != oldest:
                assert cached == max(matches) and not self.copies, "another than the oldest only if the match is in it"
                assert len(before[slot.index]) - cached <= max(COPY_AT_LEAST, cached // 8), (
                    "a conversation was thrown away"
                )
            if self.copies:
                [(source, target, positions)] = self.copies
                assert (target, positions) == (oldest, cached) and matches[source] == cached == max(matches)
                assert cached >= matches[oldest] + COPY_AT_LEAST
        lost = before[slot.index]
        shared = common_prefix(lost, prompt)
        if self.snapshots.limit > 1 << 20 and len(lost) - shared > max(COPY_AT_LEAST, shared // 8):
            found, _ = self.snapshots.find(np.array([*lost, 9], dtype=np.int32))
            assert found == len(lost), "a conversation was lost"
        for index in set(range(SLOTS)) - {slot.index}:
            assert self.rows[index] == before[index]
        self.rows[slot.index] = self.rows[slot.index][:cached]
        self.running.append(slot)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, SLOTS), new=st.lists(st.integers(0, 2), min_size=1, max_size=30))
    def evaluate(self, which: int, new: list[int]) -> None:
        """Rows are computed: first what is left of the prompt, then whatever comes."""
        slot = self.running[which % len(self.running)]
        new = new[: min(len(slot.tokens) - slot.count, SPARE + 1)]
        if new:
            self.reach.begin(rows_of(new, slot=slot.index, start=slot.count))
        for token in new:
            if slot.tokens[slot.count] < 0:
                slot.tokens[slot.count] = token
            self.rows[slot.index].append(int(slot.tokens[slot.count]))
            slot.count += 1

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, SLOTS))
    def end(self, which: int) -> None:
        slot = self.running.pop(which % len(self.running))
        self.pool.release(slot)
        self.released.remove(slot.index)
        self.released.append(slot.index)

    @invariant()
    def record_tells_the_truth(self) -> None:
        for slot in self.pool.slots:
            assert slot.tokens[: slot.count].tolist() == self.rows[slot.index]
        assert self.pool.held_tokens == sum(map(len, self.rows))

    @invariant()
    def snapshots_tell_the_truth(self) -> None:
        kept = self.snapshots._kept
        assert all(entry.tokens.tolist() == entry.snapshot.rows["rows"].tolist() for entry in kept)
        assert self.snapshots.nbytes == sum(12 * len(entry.tokens) for entry in kept) <= self.snapshots.limit


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def filled(index: int, tokens: list[int]) -> Slot:
    slot = Slot(index, lambda _: range(10**6))
    slot.tokens, slot.count = np.array(tokens, dtype=np.int32), len(tokens)
    return slot


def anywhere(slot: int) -> range:
    return range(10_000)


def test_match_is_the_longest_common_prefix() -> None:
    slot = filled(0, [1, 2, 3, 4])
    for prompt, length in [([], 0), ([2], 0), ([1, 2, 9], 2), ([1, 2, 3, 4, 5], 4), ([1, 2], 2)]:
        assert slot.match(np.array(prompt, dtype=np.int32)) == length
    slot.count = 1
    assert slot.match(np.array([1, 2, 3], dtype=np.int32)) == 1, "rows behind count are not claimed"


def test_turns_of_one_conversation_stay_in_their_slot() -> None:
    """Each turn resends the last answer less its last token, differently by a few: no copy, no second slot."""
    pool = SlotPool(3, lambda *_: (_ for _ in ()).throw(AssertionError("copied")), anywhere)
    history, previous = list(range(50)), 1
    for turn in range(5):
        tokens = np.array([*history, *range(1000 * turn, 1000 * turn + 40)], dtype=np.int32)
        slot, cached = pool.acquire(tokens, len(history) + 10, True)
        assert slot.index == 0 and cached == previous - 1
        slot.count = len(tokens) - 1
        pool.release(slot)
        previous = len(tokens)
        history = [*tokens.tolist(), 7, 8]


def test_a_shared_instruction_is_copied_and_both_conversations_stay() -> None:
    copies: list[tuple[int, int, int]] = []
    pool = SlotPool(2, lambda *copy: copies.append(copy), anywhere)
    instruction = list(range(200))
    first = np.array([*instruction, *range(500, 700)], dtype=np.int32)
    slot, _ = pool.acquire(first, len(first), True)
    slot.count = len(first)
    pool.release(slot)
    second = np.array([*instruction, *range(800, 900)], dtype=np.int32)
    other, cached = pool.acquire(second, len(second), True)
    assert (slot.index, other.index, cached, copies) == (0, 1, 200, [(0, 1, 200)])
    assert slot.count == 400


@pytest.mark.parametrize(("allowed", "cached"), [(range(80, 101), 90), (range(91, 101), 0), (range(40, 61), 60)])
def test_only_where_a_slot_can_go_on(allowed: range, cached: int) -> None:
    """The prompt shares 90 tokens with the slot."""
    pool = SlotPool(1, lambda *_: None, lambda _: allowed)
    pool.slots[0].tokens, pool.slots[0].count = np.arange(100, dtype=np.int32), 100
    tokens = np.array([*range(90), *range(500, 520)], dtype=np.int32)
    assert pool.acquire(tokens, len(tokens), True) == (pool.slots[0], cached)


def test_worth_keeping() -> None:
    slot = filled(0, list(range(1000)))
    assert worth_keeping(slot, 0) and worth_keeping(slot, 880) and not worth_keeping(slot, 900)
    assert not worth_keeping(slot, 1000)


def test_a_failed_copy_leaves_the_slot_idle_and_empty() -> None:
    def fail(*_: int) -> None:
        raise RuntimeError("lost")

    pool = SlotPool(2, fail, anywhere)
    source, victim = pool.slots
    for slot, first in ((victim, 500), (source, 0)):
        slot.tokens, slot.count, slot.last_used = np.arange(first, first + 100, dtype=np.int32), 100, 1
    source.busy = True
    with pytest.raises(RuntimeError, match="lost"):
        pool.acquire(np.arange(100, dtype=np.int32), 100, True)
    assert not victim.busy and victim.count == 0 and source.count == 100
