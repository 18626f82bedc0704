"""The slots of the caches: which tokens each one holds, who uses it, and where a new prompt finds most of itself.

Knows nothing of requests or steps. Used by the engine's thread alone; other threads may read `Slot` fields.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.prefixes import common_prefix
from bloomery.runtime.snapshot_cache import SnapshotCache

CopyPrefix = Callable[[int, int, int], None]
Continuable = Callable[[int], range]

# A copy is an errand to every worker: fewer tokens than this are computed again instead.
COPY_AT_LEAST = 16


class Slot:
    """One place in the caches: positions 0..count-1 hold `tokens[:count]` and nothing else is claimed."""

    def __init__(self, index: int, continuable: Continuable) -> None:
        """`continuable(index)`: the positions at which its caches can go on, besides 0."""
        self.index, self._continuable = index, continuable
        self.tokens: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.count = 0
        self.busy = False
        self.last_used = 0

    def match(self, prompt: NDArray[np.int32]) -> int:
        """Length of the longest common prefix of `prompt` and what the slot holds."""
        return common_prefix(self.tokens[: self.count], prompt)

    def usable(self, count: int) -> int:
        """How many of its first `count` tokens the caches can go on behind; 0 if they cannot."""
        allowed = self._continuable(self.index)
        count = min(count, self.count, allowed.stop - 1)
        return count if count >= allowed.start else 0


class SlotPool:
    """Hands out at most one slot a sequence and remembers what idle slots hold."""

    def __init__(
        self, slots: int, copy_prefix: CopyPrefix, continuable: Continuable, snapshots: SnapshotCache | None = None
    ) -> None:
        """`copy_prefix` and `continuable` are a StepExecutor's; `snapshots` keeps what a slot held before another
        conversation takes it over."""
        self.slots = tuple(Slot(index, continuable) for index in range(slots))
        self._copy_prefix, self._snapshots = copy_prefix, snapshots
        self._clock = 0

    @property
    def idle(self) -> int:
        return sum(not slot.busy for slot in self.slots)

    def can_take(self, wanted: int | None) -> bool:
        """Whether a sequence that asks for slot `wanted` (None: any) can have one now."""
        return self.idle > 0 if wanted is None else not self.slots[wanted].busy

    @property
    def held_tokens(self) -> int:
        return sum(slot.count for slot in self.slots)

    def acquire(
        self, tokens: NDArray[np.int32], prompt_length: int, reuse: bool, wanted: int | None = None
    ) -> tuple[Slot, int]:
        """Takes a slot for a sequence whose buffer is `tokens` (int32; it begins with the prompt and becomes the slot's
        record) and returns it with the number of prompt tokens already in its cache. `can_take(wanted)` holds.

        The last prompt token is never counted as cached: its row has to be computed for its logits.
        """
        idle = [slot for slot in self.slots if not slot.busy]
        victim = min(idle, key=lambda slot: (slot.last_used, slot.index)) if wanted is None else self.slots[wanted]
        prompt = tokens[: prompt_length - 1]
        cached, spared = 0, None
        fill: Callable[[], object] | None = None
        if reuse:
            found = [(slot.usable(slot.match(prompt)), not slot.busy, slot) for slot in self.slots]
            cached, _, source = max(found, key=lambda entry: entry[:2])  # the longest; of equals an idle one
            in_place = next((match for match, _, slot in found if slot is victim))
            stored, kept = self._snapshots.find(prompt) if self._snapshots else (0, None)
            if wanted is None and not source.busy and not worth_keeping(source, cached):
                victim, in_place = source, cached
            if max(cached, stored) - in_place < COPY_AT_LEAST:
                cached = in_place
            elif self._snapshots and kept and stored > cached:
                cached, spared, fill = stored, kept, partial(self._snapshots.restore, kept, victim.index, stored)
            else:
                fill = partial(self._copy_prefix, source.index, victim.index, cached)
        if self._snapshots and worth_keeping(victim, victim.match(prompt)):
            self._snapshots.keep(victim.index, victim.tokens[: victim.count], spared)
        if fill:
            victim.count = 0  # nothing is claimed while the rows are being overwritten
            fill()
        victim.busy = True
        victim.tokens, victim.count = tokens, cached
        return victim, cached

    def release(self, slot: Slot) -> None:
        """Gives a slot back. What it holds stays usable for later prompts."""
        assert slot.busy
        self._clock += 1
        slot.busy, slot.last_used = False, self._clock


def worth_keeping(slot: Slot, match: int) -> bool:
    """Whether the tokens behind a match are worth a copy of the match to another slot: a conversation that shares a
    long instruction with the new one is, the few tokens by which a client's history differs from ours are not."""
    return slot.count - match > max(COPY_AT_LEAST, match // 8)
