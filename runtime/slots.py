"""The slots of the caches: which tokens each one holds, who uses it, and where a new prompt finds most of itself.

Knows nothing of requests or steps. Used by the engine's thread alone; other threads may read `Slot` fields.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.prefixes import common_prefix
from bloomery.runtime.snapshot_cache import Kept, SnapshotCache

CopyPrefix = Callable[[int, int, int], None]
CopyPieces = Callable[[int, int, int], Generator[None, None, None]]
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
        self.steady = False  # busy, but what its first `count` positions left stays as it is
        self.lent = 0  # copies of it that are being made
        self.last_used = 0

    @property
    def free(self) -> bool:
        """Whether somebody may take it, or write into it."""
        return not self.busy and not self.lent

    def match(self, prompt: NDArray[np.int32]) -> int:
        """Length of the longest common prefix of `prompt` and what the slot holds."""
        return common_prefix(self.tokens[: self.count], prompt)

    def usable(self, count: int) -> int:
        """How many of its first `count` tokens the caches can go on behind; 0 if they cannot."""
        allowed = self._continuable(self.index)
        count = min(count, self.count, allowed.stop - 1)
        return count if count >= allowed.start else 0


class Taking:
    """A slot on its way to a sequence: what it held is copied away, and what the prompt begins with is copied in, piece
    by piece. Meanwhile it is busy and claims nothing, and what is copied from is lent: nobody else takes or drops it.
    """

    def __init__(
        self,
        slot: Slot,
        tokens: NDArray[np.int32],
        cached: int,
        origin: Slot | Kept | None,
        lost: bool,
        moves: Callable[[Taking], Iterator[None]],
    ) -> None:
        """`moves(self)` copies: away, if something is `lost` otherwise, and in from `origin`; it sets `filling` before
        it writes into the slot."""
        self.slot, self.cached, self.origin = slot, cached, origin
        self.filling = False
        self.copies = lost or origin is not None
        self._tokens, self._held = tokens, (slot.tokens, slot.count)
        slot.busy, slot.count = True, 0
        self._lend(1)
        self._moves = moves(self)

    def advance(self, seconds: float) -> bool:
        """Copies for about so long; True once the slot is the sequence's, `cached` tokens of the prompt in it. Whatever
        copying raises is raised; the slot is free then."""
        end = time.perf_counter() + seconds
        try:
            for _ in self._moves:
                if time.perf_counter() >= end:
                    return False
        except BaseException:
            self._leave()
            raise
        self._lend(-1)
        self.slot.tokens, self.slot.count = self._tokens, self.cached
        return True

    def cancel(self) -> None:
        """The slot is free again, with what it held unless something has been written into it."""
        close = getattr(self._moves, "close", None)
        if close:
            close()
        self._leave()

    def _leave(self) -> None:
        self._lend(-1)
        self.slot.busy = False
        if not self.filling:
            self.slot.tokens, self.slot.count = self._held

    def _lend(self, count: int) -> None:
        if self.origin is not None:
            self.origin.lent += count


class SlotPool:
    """Hands out at most one slot a sequence and remembers what idle slots hold."""

    def __init__(
        self,
        slots: int,
        copy_prefix: CopyPrefix,
        continuable: Continuable,
        snapshots: SnapshotCache | None = None,
        copy_pieces: CopyPieces | None = None,
    ) -> None:
        """`copy_prefix` and `continuable` are a StepExecutor's, `copy_pieces` that of one with InPieces; `snapshots`
        keeps what a slot held before another conversation takes it over."""
        self.slots = tuple(Slot(index, continuable) for index in range(slots))
        self._copy_prefix, self._copy_pieces, self._snapshots = copy_prefix, copy_pieces, snapshots
        self._clock = 0

    @property
    def idle(self) -> int:
        return sum(slot.free for slot in self.slots)

    def can_take(self, wanted: int | None) -> bool:
        """Whether a sequence that asks for slot `wanted` (None: any) can have one now."""
        return self.idle > 0 if wanted is None else self.slots[wanted].free

    @property
    def held_tokens(self) -> int:
        return sum(slot.count for slot in self.slots)

    def acquire(
        self, tokens: NDArray[np.int32], prompt_length: int, reuse: bool, wanted: int | None = None
    ) -> tuple[Slot, int]:
        """`take`, to its end: the slot and the number of prompt tokens that are already in its cache."""
        taking = self.take(tokens, prompt_length, reuse, wanted)
        while not taking.advance(math.inf):
            pass
        return taking.slot, taking.cached

    def take(self, tokens: NDArray[np.int32], prompt_length: int, reuse: bool, wanted: int | None = None) -> Taking:
        """Takes a slot for a sequence whose buffer is `tokens` (int32; it begins with the prompt and becomes the slot's
        record). `can_take(wanted)` holds. The slot is the sequence's once the Taking has ended; nobody else's before.

        The last prompt token is never counted as cached: its row has to be computed for its logits.
        """
        idle = [slot for slot in self.slots if slot.free]
        victim = min(idle, key=lambda slot: (slot.last_used, slot.index)) if wanted is None else self.slots[wanted]
        prompt = tokens[: prompt_length - 1]
        cached = 0
        origin: Slot | Kept | None = None
        if reuse:
            found = [(slot.usable(slot.match(prompt)), slot.free, slot) for slot in self.slots]
            cached, _, source = max(found, key=lambda entry: entry[:2])  # the longest; of equals an idle one
            in_place = next((match for match, _, slot in found if slot is victim))
            stored, kept = self._snapshots.find(prompt) if self._snapshots else (0, None)
            if wanted is None and source.free and not worth_keeping(source, cached):
                victim, in_place = source, cached
            if max(cached, stored) - in_place < COPY_AT_LEAST:
                cached = in_place
            elif self._snapshots and kept and stored > cached:
                cached, origin = stored, kept
            else:
                origin = source
        lost = None
        if self._snapshots and self._snapshots.limit and worth_keeping(victim, victim.match(prompt)):
            lost = victim.tokens[: victim.count]
        return Taking(victim, tokens, cached, origin, lost is not None, partial(self._moves, lost))

    def _moves(self, lost: NDArray[np.int32] | None, taking: Taking) -> Iterator[None]:
        """Copies the states of the slot's `lost` tokens to the snapshots, then from its origin those of the tokens that
        are cached."""
        target, origin = taking.slot, taking.origin
        if lost is not None and self._snapshots:
            yield from self._snapshots.keep_pieces(target.index, lost)
        if origin is None:
            return
        if isinstance(origin, Slot) and origin.usable(taking.cached) < taking.cached:
            taking.cached = 0  # it went on meanwhile, further than its rings reach back
            return
        taking.filling = True
        if isinstance(origin, Kept):
            assert self._snapshots
            yield from self._snapshots.restore_pieces(origin, target.index, taking.cached)
        elif self._copy_pieces and (origin.steady or not origin.busy):
            yield from self._copy_pieces(origin.index, target.index, taking.cached)
        else:
            self._copy_prefix(origin.index, target.index, taking.cached)

    def release(self, slot: Slot) -> None:
        """Gives a slot back. What it holds stays usable for later prompts."""
        assert slot.busy
        self._clock += 1
        slot.busy, slot.steady, slot.last_used = False, False, self._clock


def worth_keeping(slot: Slot, match: int) -> bool:
    """Whether the tokens behind a match are worth a copy of the match to another slot: a conversation that shares a
    long instruction with the new one is, the few tokens by which a client's history differs from ours are not."""
    return slot.count - match > max(COPY_AT_LEAST, match // 8)
