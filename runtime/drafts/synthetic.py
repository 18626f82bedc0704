"""Synthetic acceptance: guesses accepted at chosen rates, to measure what a draft of that quality would bring

Owns the draw of how many tokens of a guess count as right. The texts that come out are not the model's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bloomery.runtime.errors import PlanError


class SyntheticAcceptance:
    """`rates[i]`: the share of guesses whose first i + 1 tokens are all accepted. One draw sequence a text, from its
    seed, so that a repeated request is accepted alike."""

    def __init__(self, rates: Sequence[float]) -> None:
        before = (1.0, *rates[:-1])
        self._chances = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=True)]
        self._draws: dict[int, np.random.Generator] = {}

    def accepted(self, text: int, seed: int, count: int) -> int:
        """How many of `count` guessed tokens are accepted."""
        if text not in self._draws:
            if len(self._draws) > 256:
                self._draws.clear()
            self._draws[text] = np.random.default_rng(seed)
        chances = [*self._chances, *[0.0] * count][:count]
        refused = self._draws[text].random(count) >= chances
        return int(refused.argmax()) if refused.any() else count


def check_rates(rates: Sequence[float]) -> None:
    """Raises PlanError unless the rates are from 0 to 1 and do not rise."""
    if not all(math.isfinite(rate) and 0 <= rate <= 1 for rate in rates):
        raise PlanError(f"synthetic acceptance rates {list(rates)}", "give numbers from 0 to 1")
    if any(later > earlier for earlier, later in pairwise(rates)):
        raise PlanError(f"synthetic acceptance rates {list(rates)} rise", "later tokens are accepted at most as often")


def rates_of_length(length: float, most: int) -> tuple[float, ...]:
    """Rates p, p^2, ... p^most with which a step brings `length` tokens on average, the model's own included."""
    if not 1 <= length <= most + 1:
        raise PlanError(f"synthetic acceptance length {length:g}", f"with {most} guessed tokens give 1 to {most + 1}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**n for n in range(1, most + 1)) < length - 1 else (low, middle)
    return tuple(high**n for n in range(1, most + 1))
