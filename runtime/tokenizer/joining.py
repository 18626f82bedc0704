"""Compiled joining of very long SentencePiece pieces, such as a megabyte of one character.

Owns the same rule as `sentencepiece`, for texts whose words are no words; results are equal. Imported only when such a
text comes, because loading the compiler takes longer than joining a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

SIZE_BITS, LEFT_BITS = 16, 28  # as in `sentencepiece`; with 19 bits of rank they fill an int64
BASE = np.uint64(0x9E3779B97F4A7C15)


class Joiner:
    """`texts` and `ranks`: bytes and score rank (0: greatest score) of every token."""

    def __init__(self, texts: Sequence[bytes], ranks: NDArray[np.int64]) -> None:
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        self._blob = np.frombuffer(b"".join(texts), dtype=np.uint8)
        self._starts = np.cumsum(lengths) - lengths
        hashes = np.zeros(len(texts), dtype=np.uint64)
        for position in range(int(lengths.max(initial=0))):
            longer = np.flatnonzero(lengths > position)
            hashes[longer] = hashes[longer] * BASE + self._blob[self._starts[longer] + position] + np.uint64(1)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]
        self._lengths, self._ranks = lengths, ranks

    def join(self, data: bytes, starts: Sequence[int]) -> list[tuple[int, int]]:
        """(start, end) of the symbols that remain of `data`, whose characters begin at `starts`."""
        begins, ends = _join(
            np.frombuffer(data, dtype=np.uint8),
            np.array(starts, dtype=np.int64),
            (self._blob, self._starts, self._lengths, self._hashes, self._order, self._ranks),
        )
        return list(zip(begins.tolist(), ends.tolist(), strict=True))


@numba.njit(cache=True)
def _token(data, hashes, powers, start, end, tables):  # type: ignore[no-untyped-def]
    """Score rank of the token with the bytes data[start:end], or -1."""
    blob, starts, lengths, sorted_hashes, order, ranks = tables
    size = end - start
    if size >= powers.size:
        return np.int64(-1)
    wanted = hashes[end] - hashes[start] * powers[size]
    low, high = 0, sorted_hashes.size
    while low < high:
        middle = (low + high) >> 1
        if sorted_hashes[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    while low < sorted_hashes.size and sorted_hashes[low] == wanted:
        token = order[low]
        if lengths[token] == size:
            equal = True
            for offset in range(size):
                if blob[starts[token] + offset] != data[start + offset]:
                    equal = False
                    break
            if equal:
                return ranks[token]
        low += 1
    return np.int64(-1)


@numba.njit(cache=True)
def _push(heap, count, value):  # type: ignore[no-untyped-def]
    place = count
    while place > 0 and heap[(place - 1) >> 1] > value:
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    heap[place] = value


@numba.njit(cache=True)
def _pop(heap, count):  # type: ignore[no-untyped-def]
    """The least of `count` values; the others are heap[:count - 1] afterwards."""
    least, last, place = heap[0], heap[count - 1], 0
    while True:
        child = 2 * place + 1
        if child >= count - 1:
            break
        if child + 1 < count - 1 and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= last:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = last
    return least


@numba.njit(cache=True)
def _join(data, starts, tables):  # type: ignore[no-untyped-def]
    count = starts.size
    hashes = np.zeros(data.size + 1, dtype=np.uint64)
    for index in range(data.size):
        hashes[index + 1] = hashes[index] * BASE + np.uint64(data[index]) + np.uint64(1)
    powers = np.ones(tables[2].max() + 1, dtype=np.uint64)
    for index in range(1, powers.size):
        powers[index] = powers[index - 1] * BASE
    ends = np.append(starts[1:], data.size)
    following = np.arange(1, count + 1)
    following[count - 1] = -1
    preceding = np.arange(-1, count - 1)
    heap = np.empty(3 * count, dtype=np.int64)
    waiting = 0
    for left in range(count - 1):
        rank = _token(data, hashes, powers, starts[left], ends[left + 1], tables)
        if rank >= 0:
            size = ends[left + 1] - starts[left]
            _push(heap, waiting, (rank << LEFT_BITS | left) << SIZE_BITS | size)
            waiting += 1
    while waiting > 0:
        pair = _pop(heap, waiting)
        waiting -= 1
        left = pair >> SIZE_BITS & (1 << LEFT_BITS) - 1
        right = following[left]
        if right < 0 or ends[right] - starts[left] != pair & (1 << SIZE_BITS) - 1:
            continue
        ends[left] = ends[right]
        after = following[right]
        following[left] = after
        following[right] = -2
        if after >= 0:
            preceding[after] = left
        for first, second in ((preceding[left], left), (left, after)):
            if first >= 0 and second >= 0:
                rank = _token(data, hashes, powers, starts[first], ends[second], tables)
                if rank >= 0:
                    size = ends[second] - starts[first]
                    _push(heap, waiting, (rank << LEFT_BITS | first) << SIZE_BITS | size)
                    waiting += 1
    kept = following != -2
    return starts[kept], ends[kept]
