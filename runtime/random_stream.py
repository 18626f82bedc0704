"""llama.cpp's random numbers: a Mersenne Twister and what C++'s standard library makes of its outputs.

Owns one stream. Knows nothing of tokens.
"""

from __future__ import annotations

import math

import numpy as np

_OUTPUTS = 2**32


class RandomStream:
    """MT19937 seeded with a 32-bit number, as std::mt19937; uniform numbers as std::uniform_real_distribution makes
    them in libstdc++."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.RandomState(seed)

    def uniform(self) -> float:
        """A double in [0, 1) of two outputs: (first + second * 2**32) / 2**64."""
        first, second = self._random.randint(0, _OUTPUTS, size=2, dtype=np.uint32)
        return min((float(first) + float(second) * 2.0**32) / 2.0**64, math.nextafter(1.0, 0.0))

    def uniform_float(self) -> float:
        """A float32 in [0, 1) of one output."""
        value = np.float32(self._random.randint(0, _OUTPUTS, dtype=np.uint32)) / np.float32(2.0**32)
        return float(min(value, np.nextafter(np.float32(1), np.float32(0))))
