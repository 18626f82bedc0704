"""States of conversations that lost their slot, kept in host memory up to a fixed number of bytes.

Owns which snapshots are kept, what they take and which is dropped first. Knows executors only by `snapshot` and
`restore`, and nothing of who gets which slot. Used by the engine's thread alone; other threads may read the figures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.executor import InPieces, StateSnapshot
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.prefixes import common_prefix

log = logging.getLogger(__name__)

MEMORY_LEFT = 256 << 20
"""Bytes of the machine's memory that are never taken, whatever the limit."""


class SlotMemory(Protocol):
    """What is needed of an executor. One that has InPieces copies in pieces."""

    def continuable(self, slot: int) -> range: ...

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot: ...

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int: ...

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None: ...


@dataclass(eq=False)
class Kept:
    """A conversation's tokens (int32, as many as `snapshot.positions`) and the states that they left behind. One that
    is `lent`, to so many copies, is not dropped."""

    tokens: NDArray[np.int32]
    snapshot: StateSnapshot
    lent: int = 0

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.snapshot.nbytes

    @property
    def first(self) -> int:
        """The first position at which it can go on."""
        return self.snapshot.positions - self.snapshot.reach

    def usable(self, prompt: NDArray[np.int32]) -> int:
        """The greatest number of common tokens after which it can go on; 0 if there is none."""
        match = common_prefix(self.tokens, prompt)
        return match if match >= self.first else 0


class SnapshotCache:
    """`limit`: bytes of tokens and rows, never exceeded, not for a moment either; 0 keeps nothing. Whatever the limit,
    what the machine cannot spare is not kept (`available` tells, in bytes)."""

    def __init__(self, memory: SlotMemory, limit: int, available: Callable[[], int] = available_memory) -> None:
        self._memory, self.limit, self._available = memory, limit, available
        self._kept: list[Kept] = []  # least recently used first
        self.nbytes = 0
        self._counts = dict.fromkeys(("hits", "restored_tokens", "stored", "dropped", "refused"), 0)

    def find(self, prompt: NDArray[np.int32]) -> tuple[int, Kept | None]:
        """The snapshot that knows most of a prompt, and how many tokens of it."""
        best, found = 0, None
        for kept in self._kept:
            match = kept.usable(prompt)
            if match and match >= best:  # of equals the most recent
                best, found = match, kept
        return best, found

    def restore(self, kept: Kept, slot: int, positions: int) -> None:
        """Brings the first `positions` tokens of a snapshot into a slot; it stays kept, as the one used last."""
        for _ in self.restore_pieces(kept, slot, positions):
            pass

    def restore_pieces(self, kept: Kept, slot: int, positions: int) -> Generator[None, None, None]:
        """`restore`, a few MiB at a time if the executor can."""
        if isinstance(self._memory, InPieces):
            yield from self._memory.restore_pieces(slot, kept.snapshot, positions)
        else:
            self._memory.restore(slot, kept.snapshot, positions)
        self._counts["hits"] += 1
        self._counts["restored_tokens"] += positions
        self._touch(kept)

    def keep(self, slot: int, tokens: NDArray[np.int32]) -> bool:
        """Keeps what a slot that holds `tokens` has in its states; whether it did. Others make room for it, the least
        recently used ones first, but not those that are lent. One that the new one replaces goes, too."""
        pieces = self.keep_pieces(slot, tokens)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return bool(end.value)

    def keep_pieces(self, slot: int, tokens: NDArray[np.int32]) -> Generator[None, None, bool]:
        """`keep`, a few MiB at a time if the executor can. Memory counts as taken from the beginning on."""
        count = len(tokens)
        allowed = self._memory.continuable(slot)
        if not self.limit or count not in allowed:
            return False
        for other in self._kept:
            if other.first <= count <= len(other.tokens) and common_prefix(other.tokens, tokens) == count:
                self._touch(other)
                return True
        reach = count - allowed.start
        need = tokens.nbytes + self._memory.snapshot_bytes(count, reach)
        if need > self.limit - sum(other.nbytes for other in self._kept if other.lent):
            self._counts["refused"] += 1
            return False
        for other in tuple(self._kept):
            if (
                not other.lent
                and allowed.start <= other.first
                and common_prefix(tokens, other.tokens) == len(other.tokens)
            ):
                self._drop(other)
        if not self._make_room(need):
            self._counts["refused"] += 1
            return False
        self.nbytes += need
        kept = None
        try:
            if isinstance(self._memory, InPieces):
                snapshot = yield from self._memory.snapshot_pieces(slot, count, reach)
            else:
                snapshot = self._memory.snapshot(slot, count, reach)
            kept = Kept(tokens.copy(), snapshot)
        except MemoryError:
            log.warning("no memory for a snapshot of %d bytes", need)
            self._counts["refused"] += 1
        finally:
            self.nbytes += (kept.nbytes if kept else 0) - need
        if kept is None:
            return False
        self._kept.append(kept)
        self._counts["stored"] += 1
        return True

    def statistics(self) -> dict[str, Any]:
        """Plain values. `dropped` counts those that made room, `refused` those for which there was none."""
        return {"bytes": self.nbytes, "limit_bytes": self.limit, "snapshots": len(self._kept), **self._counts}

    def _make_room(self, need: int) -> bool:
        while self.nbytes + need > self.limit or self._available() < need + MEMORY_LEFT:
            oldest = next((kept for kept in self._kept if not kept.lent), None)
            if oldest is None:
                return False
            self._drop(oldest)
            self._counts["dropped"] += 1
        return True

    def _drop(self, kept: Kept) -> None:
        self._kept = [other for other in self._kept if other is not kept]
        self.nbytes -= kept.nbytes

    def _touch(self, kept: Kept) -> None:
        """Makes it the one used last; one that has been dropped meanwhile stays so."""
        if any(other is kept for other in self._kept):
            self._kept = [*(other for other in self._kept if other is not kept), kept]
