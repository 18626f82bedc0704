"""Joining of neighbouring symbols, best rank first: the inner rule of SentencePiece vocabularies.

Owns two ways to the same result: whole rounds with NumPy as long as one round joins many symbols (a megabyte of one
character is done in a few), then one pair after the other from a heap. Knows ranks of byte strings, not tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

# A candidate pair is one integer, so that a heap orders it fast: rank, index of the left symbol, bytes of the joined
# text. The left symbol and the length together tell whether it is still current.
SIZE_BITS, LEFT_BITS = 16, 28

LONG = 1 << 10  # symbols; shorter texts are not worth a round
SHARE = 64  # a round is worth its passes over all symbols if it joins one in so many,
CREDIT = 8  # but so many fruitless ones are allowed: a pair that occurs once may come before those that occur often
MAX_KINDS = 1 << 10  # distinct symbols, whose square is the size of a table
NO_RANK = np.iinfo(np.int32).max


def join(data: bytes, starts: list[int], ranks: Mapping[bytes, int]) -> list[int]:
    """Where the symbols begin that remain of `data` when nothing more can be joined.

    `starts`: where they begin at first. Of all neighbours whose joined bytes have a rank, the pair with the least rank
    is joined, the leftmost among equals.
    """
    if len(starts) >= LONG:
        starts = _join_in_rounds(data, starts, ranks)
    return _join_one_by_one(data, starts, ranks)


def _join_one_by_one(data: bytes, starts: list[int], ranks: Mapping[bytes, int]) -> list[int]:
    count = len(starts)
    ends = [*starts[1:], len(data)]
    following = [*range(1, count), -1]
    preceding = list(range(-1, count - 1))
    rank_of = ranks.get

    # Of the first pairs most are stale when their turn comes: a sorted list is passed over faster than a heap.
    waiting = []
    for left in range(count - 1):
        start, end = starts[left], ends[left + 1]
        rank = rank_of(data[start:end])
        if rank is not None:
            waiting.append((rank << LEFT_BITS | left) << SIZE_BITS | end - start)
    waiting.sort(reverse=True)
    heap: list[int] = []
    while waiting or heap:
        pair = heappop(heap) if heap and (not waiting or heap[0] < waiting[-1]) else waiting.pop()
        left = pair >> SIZE_BITS & (1 << LEFT_BITS) - 1
        right = following[left]
        # A symbol that was joined to its left has following -2; any other change shows in the length.
        if right < 0 or ends[right] - starts[left] != pair & (1 << SIZE_BITS) - 1:
            continue
        ends[left] = ends[right]
        after = following[left] = following[right]
        following[right] = -2
        if after >= 0:
            preceding[after] = left
            start, end = starts[left], ends[after]
            rank = rank_of(data[start:end])
            if rank is not None:
                heappush(heap, (rank << LEFT_BITS | left) << SIZE_BITS | end - start)
        before = preceding[left]
        if before >= 0:
            start, end = starts[before], ends[left]
            rank = rank_of(data[start:end])
            if rank is not None:
                heappush(heap, (rank << LEFT_BITS | before) << SIZE_BITS | end - start)
    return [start for start, follower in zip(starts, following, strict=True) if follower != -2]


def _join_in_rounds(data: bytes, starts: list[int], ranks: Mapping[bytes, int]) -> list[int]:
    """As many joins as whole rounds can do. A round joins all pairs of the least rank from left to right. That is the
    rule if no pair that comes up meanwhile has a rank as good; otherwise the round is left undone."""
    kinds = _Kinds(ranks)
    symbols = np.array(
        [kinds.number(data[start:end]) for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    )
    places = np.array(starts)
    credit = float(CREDIT)
    while symbols.size > 1 and len(kinds.texts) <= MAX_KINDS // 2:
        rank_at = kinds.ranks_of(symbols[:-1], symbols[1:])
        best = rank_at.min()
        hits = np.flatnonzero(rank_at == best)
        credit += hits.size * SHARE / symbols.size - 1
        if best == NO_RANK or credit < 0:
            break
        # Of hits side by side every other is joined, beginning with the first.
        run = np.maximum.accumulate(np.where(np.diff(hits, prepend=-2) > 1, np.arange(hits.size), 0))
        chosen = hits[(np.arange(hits.size) - run) % 2 == 0]
        joined = symbols.copy()
        joined[chosen] = kinds.joined(symbols[chosen], symbols[chosen + 1])
        if len(kinds.texts) > MAX_KINDS:
            break
        meanwhile = chosen[chosen + 2 < symbols.size]  # the new symbol before its right neighbour is joined itself
        keep = np.ones(symbols.size, dtype=bool)
        keep[chosen + 1] = False
        afterwards = joined[keep]
        if (
            kinds.ranks_of(joined[meanwhile], symbols[meanwhile + 2]).min(initial=NO_RANK) <= best
            or kinds.ranks_of(afterwards[:-1], afterwards[1:]).min(initial=NO_RANK) <= best
        ):
            grown = _grow_runs(symbols, hits, int(best), kinds)
            if grown is None:
                break
            afterwards, keep = grown
        symbols, places = afterwards, places[keep]
    result: list[int] = places.tolist()
    return result


def _grow_runs(
    symbols: NDArray[np.int64], hits: NDArray[np.int64], best: int, kinds: _Kinds
) -> tuple[NDArray[np.int64], NDArray[np.bool_]] | None:
    """The symbols after a round in which a joined pair at once goes on with the next symbol, because that rank is as
    good (runs of blanks, whose tokens all have one score), and which of the symbols before are still there.

    Only for runs of one symbol, which are filled with the longest token from left to right. None if this is not the
    case, or if another pair would come in between.
    """
    symbol = symbols[hits[0]]
    if (symbols[hits] != symbol).any() or (symbols[hits + 1] != symbol).any():
        return None
    text, longest = kinds.texts[symbol], 2
    while kinds.rank(text * (longest + 1)) == best:
        longest += 1
    inside = np.zeros(symbols.size, dtype=bool)
    inside[hits] = inside[hits + 1] = True
    first = inside & ~np.concatenate([[False], inside[:-1]])
    last = inside & ~np.concatenate([inside[1:], [False]])
    before = [kinds.texts[kind] for kind in set(symbols[np.flatnonzero(first[1:])].tolist())]
    after = [kinds.texts[kind] for kind in set(symbols[np.flatnonzero(last[:-1]) + 1].tolist())]
    filled = text * longest
    between = [filled + text, *(filled + text * length for length in range(2, longest + 1))]
    between += [left + text * length for left in before for length in range(2, longest + 1)]
    between += [text * length + right for right in after for length in range(2, longest + 1)]
    if min(map(kinds.rank, between)) <= best:
        return None
    place = np.arange(symbols.size) - np.maximum.accumulate(np.where(first, np.arange(symbols.size), 0))
    keep = ~inside | (place % longest == 0)
    lengths = np.bincount(np.cumsum(first)[inside])[np.cumsum(first)] - place  # symbols of the run from here on
    numbers = np.array([0, *(kinds.number(text * length) for length in range(1, longest + 1))])
    grown = np.where(inside, numbers[np.clip(lengths, 0, longest)], symbols)
    return grown[keep], keep


class _Kinds:
    """Numbers for the distinct symbols of a text."""

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        self._ranks = ranks
        self._numbers: dict[bytes, int] = {}
        self.texts: list[bytes] = []

    def number(self, text: bytes) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return number

    def rank(self, text: bytes) -> int:
        return self._ranks.get(text, NO_RANK)

    def joined(self, left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the joined texts."""
        return self._of_pairs(left, right, [self.number(a + b) for a, b in self._present(left, right)])

    def ranks_of(self, left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ranks of the joined texts, NO_RANK for those without."""
        return self._of_pairs(left, right, [self.rank(a + b) for a, b in self._present(left, right)])

    def _present(self, left: NDArray[np.int64], right: NDArray[np.int64]) -> list[tuple[bytes, bytes]]:
        pairs = np.flatnonzero(np.bincount(left * MAX_KINDS + right))
        return [(self.texts[pair // MAX_KINDS], self.texts[pair % MAX_KINDS]) for pair in pairs.tolist()]

    def _of_pairs(self, left: NDArray[np.int64], right: NDArray[np.int64], values: list[int]) -> NDArray[np.int64]:
        keys = left * MAX_KINDS + right
        table = np.zeros(keys.max(initial=0) + 1, dtype=np.int64)
        table[np.flatnonzero(np.bincount(keys))] = values
        values_at: NDArray[np.int64] = table[keys]
        return values_at
