"""Where the weights of experts on the host come from, and how they get to the card's staging areas.

Owns two ways from the mapped model file: copies that the card makes itself, out of pages that were locked for it, and
copies through pinned buffers that threads fill, where pages cannot be locked. Both put copies on a stream in the order
in which they were asked for; what the stream waits for, and who waits for it, is `expert_stream`'s.
"""

from __future__ import annotations

import ctypes
import os
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.gpu_worker.driver import Card, LockedMemory
from bloomery.runtime.errors import PlanError
from bloomery.runtime.expert_staging import PINNED_BYTES

BUFFERS: Final = 8
_PIECE: Final = PINNED_BYTES // BUFFERS
_PAGE: Final = 4096
_LOCK_PIECE: Final = 1 << 30
"""Bytes that are locked at a time, so that progress can be told; copies are cut there."""


@dataclass(frozen=True)
class HostCopy:
    """Bytes of the mapped file, and the card's address that they go to."""

    target: int
    source: NDArray[np.uint8]

    def cut(self, first: int, last: int) -> HostCopy:
        return HostCopy(self.target + first, self.source[first:last])


class ExpertSource(Protocol):
    """`ahead`: whether `issue` returns without waiting for anything, so that it can be called as early as one likes."""

    ahead: bool
    what: str
    """Which way it is and what it costs, for people."""

    def begin(self, layers: Sequence[Sequence[HostCopy]]) -> None:
        """What the next calls of `issue` will copy, layer by layer."""

    def issue(self, stream: Any) -> None:
        """Puts the next layer's copies on a stream."""

    def end(self) -> None:
        """Nothing of what was begun is wanted any more; the stream has been waited for."""

    def close(self) -> None: ...


class LockedSource:
    """The file's pages, locked for the card: it reads them itself."""

    ahead = True

    def __init__(
        self, card: Card, ranges: Sequence[tuple[int, int]], progress: Callable[[str, int, int], None]
    ) -> None:
        """`ranges` are (first address, bytes), whole pages. PlanError if one cannot be locked."""
        begun = time.perf_counter()
        self._cuda, self._layers = card.cuda, deque[Sequence[HostCopy]]()
        self._locked: list[LockedMemory] = []
        total, done = sum(nbytes for _, nbytes in ranges), 0
        self._borders: list[int] = []
        try:
            for start, nbytes in ranges:
                for at in range(start, start + nbytes, _LOCK_PIECE):
                    some = min(_LOCK_PIECE, start + nbytes - at)
                    self._locked.append(LockedMemory(card, at, some))
                    self._borders.append(at)
                    done += some
                    progress("lock", done, total)
        except BaseException:
            self.close()
            raise
        seconds = time.perf_counter() - begun
        self.what = f"out of {total} bytes of the mapped file, locked for the card in {seconds:.1f} s"

    def begin(self, layers: Sequence[Sequence[HostCopy]]) -> None:
        self._layers = deque(layers)

    def issue(self, stream: Any) -> None:
        for copy in self._layers.popleft():
            for part in self._parts(copy):
                self._cuda.memcpy_htod_async(part.target, part.source, stream)

    def _parts(self, copy: HostCopy) -> Iterable[HostCopy]:
        """The copy, cut where a range that was locked ends."""
        start, nbytes = copy.source.ctypes.data, copy.source.nbytes
        inside = slice(bisect_right(self._borders, start), bisect_left(self._borders, start + nbytes))
        cuts = [border - start for border in self._borders[inside]]
        return [copy.cut(first, last) for first, last in zip([0, *cuts], [*cuts, nbytes])]

    def end(self) -> None:
        self._layers.clear()

    def close(self) -> None:
        for locked in self._locked:
            locked.close()
        self._locked.clear()


@dataclass
class _Filled:
    """A buffer that is being filled: the parts of copies in it, at these bytes of it."""

    buffer: int
    parts: list[tuple[int, HostCopy]]
    done: Future[None]


class PinnedSource:
    """Through a ring of pinned buffers that threads fill; the thread that issues copies waits for them."""

    ahead = False

    def __init__(self, card: Card, why: str) -> None:
        cuda = self._cuda = card.cuda
        self.what = f"through {PINNED_BYTES} bytes of pinned buffers ({why})"
        self._buffers = [cuda.pagelocked_empty(_PIECE, np.uint8) for _ in range(BUFFERS)]
        self._read = [cuda.Event(cuda.event_flags.DISABLE_TIMING) for _ in range(BUFFERS)]
        self._used = [False] * BUFFERS
        self._pool = ThreadPoolExecutor(BUFFERS - 1, "bloomery-experts")
        self._batches: deque[list[tuple[int, HostCopy]]] = deque()
        self._counts: deque[int] = deque()
        self._filling: deque[_Filled] = deque()
        self._next = 0

    def begin(self, layers: Sequence[Sequence[HostCopy]]) -> None:
        made = [list(_batches(layer)) for layer in layers]
        self._counts = deque(map(len, made))
        self._batches = deque(batch for batches in made for batch in batches)
        while len(self._filling) < BUFFERS - 1 and self._batches:
            self._fill()

    def _fill(self) -> None:
        """Has the next buffer filled, once the card has read what was in it."""
        number, parts = self._next, self._batches.popleft()
        self._next = (self._next + 1) % BUFFERS
        if self._used[number]:
            self._read[number].synchronize()
        address = self._buffers[number].ctypes.data
        self._filling.append(_Filled(number, parts, self._pool.submit(_move, address, parts)))

    def issue(self, stream: Any) -> None:
        for _ in range(self._counts.popleft()):
            filled = self._filling.popleft()
            filled.done.result()
            buffer = self._buffers[filled.buffer]
            for at, copy in filled.parts:
                self._cuda.memcpy_htod_async(copy.target, buffer[at : at + copy.source.nbytes], stream)
            self._read[filled.buffer].record(stream)
            self._used[filled.buffer] = True
            if self._batches:
                self._fill()

    def end(self) -> None:
        for filled in self._filling:
            filled.done.result()
        self._filling.clear()
        self._batches.clear()
        self._counts.clear()

    def close(self) -> None:
        try:
            self.end()
        finally:  # also where a part could not be moved
            self._pool.shutdown()
            self._buffers.clear()
            self._read.clear()


def _batches(copies: Sequence[HostCopy]) -> Iterable[list[tuple[int, HostCopy]]]:
    """Copies, cut so that a buffer holds what is copied of it: (bytes from the buffer's beginning, copy)."""
    batch: list[tuple[int, HostCopy]] = []
    end = 0
    for copy in copies:
        first = 0
        while first < copy.source.nbytes:
            some = min(copy.source.nbytes - first, _PIECE - end)
            batch.append((end, copy.cut(first, first + some)))
            first, end = first + some, end + some
            if end == _PIECE:
                yield batch
                batch, end = [], 0
    if batch:
        yield batch


def _move(address: int, parts: Sequence[tuple[int, HostCopy]]) -> None:
    for at, copy in parts:
        ctypes.memmove(address + at, copy.source.ctypes.data, copy.source.nbytes)


def expert_source(card: Card, copies: Sequence[HostCopy], progress: Callable[[str, int, int], None]) -> ExpertSource:
    """The way for these copies: out of locked pages where that is possible, unless BLOOMERY_CARD_LOCK=0."""
    if os.environ.get("BLOOMERY_CARD_LOCK", "1") == "0":
        return PinnedSource(card, "as BLOOMERY_CARD_LOCK=0 asks for")
    try:
        return LockedSource(card, page_ranges(copies), progress)
    except PlanError as error:
        return PinnedSource(card, error.message)


def page_ranges(copies: Iterable[HostCopy]) -> list[tuple[int, int]]:
    """(first address, bytes) of the pages in which these copies' sources lie, ascending; neighbours are one range."""
    found: list[tuple[int, int]] = []
    for copy in sorted(copies, key=lambda copy: int(copy.source.ctypes.data)):
        start = copy.source.ctypes.data // _PAGE * _PAGE
        end = -(-(copy.source.ctypes.data + copy.source.nbytes) // _PAGE) * _PAGE
        if found and start <= found[-1][0] + found[-1][1]:
            found[-1] = found[-1][0], max(end, sum(found[-1])) - found[-1][0]
        else:
            found.append((start, end - start))
    return found
