"""The tokens that may still be chosen at one position, and numeric primitives over rows of logits.

Owns sorting, cutting, softmax and the cumulative draw. Knows no sampling parameter and no random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.intp]

_GROUP = 128  # scores of which `at_least` takes the greatest
_PICK_BLOCK = 1024  # weights of a block in `pick`
_TINY = math.nextafter(0.0, 1.0)  # never reached by nothing: keeps `pick` from weights of zero
_FEW = 512  # windows up to this size are counted by sorting, longer ones by a table over the vocabulary


class Candidates:
    """`ids[i]` has the logit `logits[i]` (float32, minus infinity: excluded). `ordered`: greatest logit first."""

    def __init__(self, logits: Row) -> None:
        """Every token of the vocabulary; the array is the caller's and is not changed."""
        self.ids: Ids = np.arange(len(logits), dtype=np.intp)
        self.logits = logits
        self.ordered = False
        self._borrowed = self._complete = True

    def __len__(self) -> int:
        return len(self.ids)

    def own(self) -> Row:
        """The logits, to be changed in place."""
        if self._borrowed:
            self.logits, self._borrowed = self.logits.copy(), False
        return self.logits

    def keep(self, chosen: Ids | slice | NDArray[np.bool_], ordered: bool) -> None:
        """Keeps some of the candidates, in the order of `chosen`."""
        self.ids, self.logits, self.ordered = self.ids[chosen], self.logits[chosen], ordered
        self._complete = False
        self._borrowed = self._borrowed and isinstance(chosen, slice)

    def order(self, count: int) -> Ids:
        """Indices of the `count` greatest (all if there are fewer) in descending order, equal ones in their order."""
        count = min(count, len(self))
        return np.arange(count) if self.ordered else top_ids(self.logits, count)

    def sort(self, count: int | None = None) -> None:
        """Keeps the `count` greatest (default: all) in descending order."""
        if not self.ordered:
            self.keep(self.order(len(self) if count is None else count), ordered=True)
        elif count is not None and count < len(self):
            self.keep(slice(count), ordered=True)

    def change(self, tokens: Ids, function: Callable[[Row, Ids], Row]) -> None:
        """Replaces the logits of those of `tokens` (distinct) that are candidates by `function(logits, which)`, `which`
        being their indices in `tokens`. Their order is no longer known."""
        if self._complete:
            place, which = tokens, np.arange(len(tokens))
        else:
            _, place, which = np.intersect1d(self.ids, tokens, assume_unique=True, return_indices=True)
        logits = self.own()
        logits[place] = function(logits[place], which)
        self.ordered = False

    def best(self) -> float:
        return float(self.logits[0] if self.ordered else self.logits.max())

    def probabilities(self) -> Row:
        """float32 softmax of the logits."""
        weights = exp_below(self.logits, self.best())
        share: Row = weights / np.float32(weights.sum(dtype=np.float64))
        return share


def pick(weights: Row, uniform: float) -> int:
    """Index of the first weight at which the cumulated weights (float64) reach `uniform` (in [0, 1)) times their total;
    never a weight of zero. Block sums first: a full float64 cumulation of a large vocabulary costs milliseconds."""
    if len(weights) <= _PICK_BLOCK:
        cumulated = np.cumsum(weights, dtype=np.float64)
        return int(np.searchsorted(cumulated, max(uniform * cumulated[-1], _TINY)))
    starts = np.arange(0, len(weights), _PICK_BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    wanted = max(uniform * sums[-1], _TINY)
    block = int(np.searchsorted(sums, wanted))
    first = block * _PICK_BLOCK
    inside = np.cumsum(weights[first : first + _PICK_BLOCK], dtype=np.float64)
    wanted -= sums[block - 1] if block else 0.0
    return first + int(np.searchsorted(inside, min(max(wanted, _TINY), inside[-1])))


def exp_below(values: Row, best: float) -> Row:
    weights: Row = np.exp(values - np.float32(best))
    return weights


def at_least(scores: Row, count: int) -> np.float32:
    """A bound that at least `count` scores reach, and few more: the count-th greatest of the maxima of as many disjoint
    groups of scores as there are, if there are enough, else the count-th greatest score."""
    groups = len(scores) // _GROUP
    if count < groups:
        scores = scores[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    place = len(scores) - count
    return np.float32(np.partition(scores, place)[place])


def top_values(scores: Row, count: int) -> Row:
    """The `count` greatest scores (all if there are fewer) in descending order."""
    if count < len(scores):
        scores = scores[scores >= at_least(scores, count)]
    return np.sort(scores)[::-1][:count]


def top_ids(scores: Row, count: int) -> Ids:
    """Indices of the `count` greatest scores (count at most their number), best first, ties to the lower index."""
    if count == 0:
        return np.empty(0, dtype=np.intp)
    candidates = np.flatnonzero(scores >= at_least(scores, count))
    order = np.argsort(-scores[candidates], kind="stable")
    return candidates[order[:count]]


def token_counts(tokens: NDArray[np.int32], vocabulary: int) -> tuple[Ids, Row]:
    """The distinct tokens and how often each occurs (float32)."""
    if len(tokens) <= _FEW:
        ids, counts = np.unique(tokens, return_counts=True)
        return ids.astype(np.intp), counts.astype(np.float32)
    table = np.bincount(tokens, minlength=vocabulary)
    found = np.flatnonzero(table)
    return found, table[found].astype(np.float32)


def log_sum_exp(logits: Row) -> float:
    """log(sum(exp(logits))) of one row: float32 exponentials relative to the greatest, summed in float64."""
    best = logits.max()
    return float(best) + math.log(float(np.exp(logits - best).sum(dtype=np.float64)))
