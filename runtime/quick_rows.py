"""Rows of n-gram tables for a few tokens, by compiled code that does not need the GIL: numbers, cache, file.

Owns the compiled form of what `engram_hash`, `row_cache` and `row_reader` do for many rows, over the same cache and
the same open files, so that both may be used by turns. It is for steps of a few rows, for which Python is slower than
memory. Compiled at the first call, and kept on disk (`compiled`).
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.compiled import compiled
from bloomery.runtime.engram_hash import EngramHash
from bloomery.runtime.row_cache import SPREAD, TABLE_SHIFT, WAYS
from bloomery.runtime.row_reader import RowReader
from bloomery.runtime.row_reads import ROW, SITE, STATUS, TO, ask, wait
from bloomery.runtime.sync import copy_bytes, load_acquire, pause, store_release

CLOCK, ROWS, CACHED, FROM_DISK, TOUCHED, FAILED_SITE, FAILED_ROW, FAILED_STATUS = range(8)
"""Words of the state that compiled code leaves behind. FAILED_SITE -1: nothing failed; FAILED_STATUS is what the system
said: -errno, or how many bytes were there."""
_WORDS: Final = 8

TOLD, FLAG, STOP = range(3)
"""Lines of LINE bytes of the words through which steps that follow each other get their rows (`serve`)."""
LINE: Final = 128
RELEASED: Final = 1 << 40
"""The flag's value that lets everybody go on: greater than the number of any lap."""


@compiled
def _place(key: Any, keys: NDArray[np.int64]) -> Any:
    """The set of the cache that a key belongs to, as RowCache has it."""
    upper = (np.uint64(key) * SPREAD) >> np.uint64(32)
    return np.int64((upper * np.uint64(keys.shape[0])) >> np.uint64(32))


@compiled
def _take(key: Any, to: Any, keys: Any, used: Any, kept: int, row_bytes: int, now: int) -> bool:
    if keys.shape[0] == 0:
        return False
    place = _place(key, keys)
    for way in range(WAYS):
        if keys[place, way] == key:
            used[place, way] = now
            copy_bytes(to, kept + (place * WAYS + way) * row_bytes, row_bytes)
            return True
    return False


@compiled
def _keep(key: int, row: int, keys: Any, used: Any, kept: int, row_bytes: int, now: int) -> None:
    """As RowCache does: of rows that are put together, at time `now`, a set keeps one."""
    if keys.shape[0] == 0:
        return
    place = _place(key, keys)
    oldest = 0
    for way in range(WAYS):
        if keys[place, way] == key or used[place, way] == now:
            return
        if used[place, way] < used[place, oldest]:
            oldest = way
    keys[place, oldest] = key
    used[place, oldest] = now
    copy_bytes(kept + (place * WAYS + oldest) * row_bytes, row, row_bytes)


@compiled
def bring(history: Any, outs: Any, hashing: Any, cache: Any, files: Any, marks: Any) -> Any:
    """Rows of all sites for histories (R, longest), newest first, to outs[site] + (row * buckets + bucket) * row_bytes;
    whether all could be read. A history's token is -1 where nothing is: from there on every place is
    `pad`."""
    token_map, pad, multipliers, primes, offsets, heads = hashing
    keys, used, kept = cache
    row_bytes = files[2]
    state, missing = marks[0], marks[2]
    absent = 0
    for r in range(history.shape[0]):
        for site in range(multipliers.shape[0]):
            blocked = history[r, 0] < 0
            first = pad if blocked else np.uint64(token_map[history[r, 0]])
            mixed = first * multipliers[site, 0]
            now, before = state[CLOCK] + 1, absent
            for order in range(1, history.shape[1]):
                blocked = blocked or history[r, order] < 0
                compressed = pad if blocked else np.uint64(token_map[history[r, order]])
                mixed ^= compressed * multipliers[site, order]
                for head in range(heads):
                    bucket = (order - 1) * heads + head
                    number = np.int64(mixed % primes[site, bucket] + offsets[site, bucket])
                    to = outs[site] + (r * primes.shape[1] + bucket) * row_bytes
                    if not _take(number + (site << TABLE_SHIFT), to, keys, used, kept, row_bytes, now):
                        missing[absent, SITE], missing[absent, ROW], missing[absent, TO] = site, number, to
                        absent += 1
            if absent - before < primes.shape[1]:
                state[CLOCK] = now  # some were there
    total = history.shape[0] * primes.size
    state[ROWS] += total
    state[CACHED] += total - absent
    return _read(absent, cache, files, marks)


@compiled
def _read(absent: int, cache: Any, files: Any, marks: Any) -> bool:
    keys, used, kept = cache
    row_bytes = files[2]
    state, touched, piece = marks[0], marks[1], marks[3]
    missing = marks[2][:absent]
    for index in range(absent):
        if state[TOUCHED] < touched.shape[0]:
            site = missing[index, SITE]
            touched[state[TOUCHED], 0] = site
            touched[state[TOUCHED], 1] = missing[index, ROW] * row_bytes + files[1][site]
            state[TOUCHED] += 1
    state[FROM_DISK] += ask(missing, files, piece)
    failed = wait(missing, files)
    if failed >= 0:
        state[FAILED_SITE], state[FAILED_ROW] = missing[failed, SITE], missing[failed, ROW]
        state[FAILED_STATUS] = missing[failed, STATUS]
        return False
    for index in range(absent):
        site = missing[index, SITE]
        if index == 0 or site != missing[index - 1, SITE]:
            state[CLOCK] += 1
        key = missing[index, ROW] + (site << TABLE_SHIFT)
        _keep(key, missing[index, TO], keys, used, kept, row_bytes, state[CLOCK])
    return True


@compiled
def serve(
    words: int, tokens: Any, laps: int, history: Any, outs: Any, hashing: Any, cache: Any, files: Any,
    marks: Any,
) -> None:  # fmt: skip
    """Rows of the laps 1 to `laps` of a step, each once its tokens have been told; see `QuickRows.serve`."""
    for lap in range(1, laps + 1):
        while load_acquire(words + TOLD * LINE) < lap:
            if load_acquire(words + STOP * LINE) != 0:
                store_release(words + FLAG * LINE, RELEASED)
                return
            pause()
        for r in range(history.shape[0]):
            for place in range(history.shape[1] - 1, 0, -1):
                history[r, place] = history[r, place - 1]
            history[r, 0] = tokens[r]
        if not bring(history, outs, hashing, cache, files, marks):
            store_release(words + FLAG * LINE, RELEASED)
            return
        store_release(words + FLAG * LINE, lap)


class QuickRows:
    """Rows for up to `most_rows` tokens at once, of the tables of `reader` (no direct reads), which are those of
    `sites` in their order. One thread at a time, and none in the reader meanwhile."""

    def __init__(self, hashing: EngramHash, sites: tuple[int, ...], reader: RowReader, most_rows: int) -> None:
        assert not reader.direct, "direct reads need aligned pages"
        self._reader, self._longest = reader, hashing.longest
        used = [hashing.sites[site] for site in sites]
        lines = [np.array([getattr(site, name) for site in used], np.uint64) for name in _CONSTANTS]
        self._hashing = (np.ascontiguousarray(hashing.token_map), np.uint64(hashing.pad), *lines, hashing.heads)
        cache = reader.cache
        self._cache = (cache.keys, cache.used, cache.rows.ctypes.data)
        self._files = reader.places()
        self._state = np.zeros(_WORDS, np.int64)
        most = most_rows * hashing.buckets * len(sites)
        self._touched = np.empty((0 if reader.keep_pages else _MOST_TOUCHED, 2), np.int64)
        self._marks = (self._state, self._touched, np.empty((most, 4), np.int64), np.empty(2, np.int64))
        self.shape = (len(sites), most_rows * hashing.buckets, reader.row_bytes)
        """Sites, rows of a site for the greatest number of tokens, bytes of a row."""

    def compile(self) -> None:
        """Now, not amid a step."""
        words = np.zeros((3, LINE), np.uint8)
        words[STOP, 0] = 1
        nowhere = np.zeros(self.shape[0], np.int64)
        self._serve(words.ctypes.data, np.zeros(1, np.int32), 1, np.full((1, self._longest), -1, np.int64), nowhere)

    def bring(self, history: NDArray[np.int64], outs: NDArray[np.int64]) -> None:
        """Rows for histories (R, longest): for each site the address of room for R * buckets rows, one token's behind
        the other's. Raises TableReadError."""
        begun = time.perf_counter()
        self._begin()
        bring(history, outs, self._hashing, self._cache, self._files, self._marks)
        self._end(1)
        counters = self._reader.counters
        counters.seconds_last = time.perf_counter() - begun
        counters.seconds += counters.seconds_last

    def serve(
        self, words: int, tokens: NDArray[np.int32], laps: int, history: NDArray[np.int64], outs: NDArray[np.int64]
    ) -> None:
        """For steps that follow each other while nobody looks. `history` (R, longest) is that of the step before the
        first and moves on; `words` is the address of three lines. Who makes lap k's tokens writes them to `tokens` (R),
        then k to TOLD (release); their rows are put into `outs`, then k into FLAG (release). Nothing is written there
        before TOLD says so: who tells has read the rows before. Another thread ends it by writing STOP; then, and when
        rows cannot be read, FLAG becomes RELEASED. TableReadError for rows that cannot be read."""
        self._begin()
        self._serve(words, tokens, laps, history, outs)
        self._end(laps)

    def _serve(self, words: int, tokens: Any, laps: int, history: Any, outs: Any) -> None:
        rest = (self._hashing, self._cache, self._files, self._marks)
        serve(words, tokens, laps, history, outs, *rest)

    def _begin(self) -> None:
        self._state[:] = 0
        self._state[CLOCK], self._state[FAILED_SITE] = self._reader.cache.clock, -1

    def _end(self, fetches: int) -> None:
        state, reader = self._state, self._reader
        reader.cache.clock = int(state[CLOCK])
        counters = reader.counters
        counters.fetches += fetches
        counters.rows += int(state[ROWS])
        counters.cached += int(state[CACHED])
        counters.from_disk += int(state[FROM_DISK])
        for site in range(self.shape[0]):
            mine = self._touched[: state[TOUCHED]]
            reader.note_touched(site, mine[mine[:, 0] == site, 1])
        if state[FAILED_SITE] >= 0:
            raise reader.failure(int(state[FAILED_SITE]), int(state[FAILED_ROW]), int(state[FAILED_STATUS]))


_CONSTANTS: Final = ("multipliers", "primes", "offsets")
_MOST_TOUCHED: Final = 1 << 13
