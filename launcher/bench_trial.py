"""What a benchmark runs and how a set of measurements is summed up: trials, their tokens, median and spread.

Knows neither engine nor peer; both run the same trials on the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

TOKEN_SEED: Final = 20


@dataclass(frozen=True)
class Trial:
    """`pp`: a prompt of `count` tokens behind `depth` cached ones, up to the logits of its last token. `tg`: `count`
    tokens generated one by one, the first of them computed at position `depth`."""

    kind: Literal["pp", "tg"]
    count: int
    depth: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.count}"

    @property
    def positions(self) -> int:
        """Of a slot that the trial fits in; one more, for the token that follows a prompt."""
        return self.depth + self.count + 1


def trials_of(prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int]) -> list[Trial]:
    """Shallow depths first, so that the cache only grows."""
    found: list[Trial] = []
    for depth in sorted(set(depths)):
        found += [Trial("pp", count, depth) for count in prompts if count]
        found += [Trial("tg", count, depth) for count in generated if count]
    return found


class TokenSource:
    """Random tokens: one long text whose beginning fills caches to any depth, and fresh ones for every round."""

    def __init__(self, vocabulary: int, longest: int, seed: int = TOKEN_SEED) -> None:
        self._vocabulary = vocabulary
        self._generator = np.random.default_rng(seed)
        self._text = self.fresh(longest)

    def prefix(self, depth: int) -> tuple[int, ...]:
        return self._text[:depth]

    def fresh(self, count: int) -> tuple[int, ...]:
        return tuple(self._generator.integers(0, self._vocabulary, count).tolist())


@dataclass(frozen=True)
class Summary:
    """`spread` is the interquartile range over the median (quartiles interpolated linearly)."""

    median: float
    spread: float


def summary(values: Sequence[float]) -> Summary:
    low, middle, high = np.percentile(np.asarray(values, np.float64), (25, 50, 75))
    return Summary(float(middle), float((high - low) / middle) if middle else 0.0)


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> Iterator[float]:
    """Round by round: what disturbs the machine for longer than a round disturbs both sides of a ratio."""
    return (a / b for a, b in zip(ours, theirs, strict=True))
