"""How much of a prompt is known already: common prefixes of token arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def common_prefix(held: NDArray[np.int32], prompt: NDArray[np.int32]) -> int:
    """Length of the longest common prefix of two token arrays."""
    limit = min(len(held), len(prompt))
    differs = held[:limit] != prompt[:limit]
    first = int(differs.argmax()) if limit else 0
    return first if limit and differs[first] else limit
