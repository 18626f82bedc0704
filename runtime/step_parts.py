"""How the rows of a step are cut for a card: blocks of a prompt, and groups of a few rows.

Owns the rule, which the card's executor and its pool share. Knows no executor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def step_parts(
    slots: NDArray[np.int32], positions: NDArray[np.int32], group: int, least_block: int
) -> Iterator[tuple[int, int, bool]]:
    """(first row, row after the last, whether it is a block), in the order of rows: neighbours of one slot at
    neighbouring positions are a block if they are at least so many; all others go in groups of up to `group` rows."""
    follows = (np.diff(slots) == 0) & (np.diff(positions) == 1)
    ends = [*(np.flatnonzero(~follows) + 1).tolist(), len(slots)]
    begin = first = 0
    for end in ends:
        block = end - first >= least_block
        if block or end == ends[-1]:
            last = first if block else end
            for at in range(begin, last, group):
                yield at, min(at + group, last), False
        if block:
            yield first, end, True
            begin = end
        first = end
