"""Where a card executor puts what its steps give: memory of its own, or of whoever asked for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Results:
    """Where results go: logits (O, V), greedy tokens (O) and hidden rows (O, width) in rows that may lie apart; `areas`
    are the (address, bytes) of what has to be registered with the driver for that."""

    logits: NDArray[np.float32]
    greedy: NDArray[np.int32]
    hidden: NDArray[np.float32] | None
    areas: tuple[tuple[int, int], ...] = ()
