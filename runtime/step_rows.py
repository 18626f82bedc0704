"""The rows of a step, gathered from the sequences that it serves."""

from __future__ import annotations

import numpy as np

from bloomery.runtime.executor import StepRows
from bloomery.runtime.sequence import Sequence


def step_rows(
    parts: list[tuple[Sequence, int]], out_rows: list[int], ahead: int = 0, shallow: bool = False
) -> StepRows:
    """The next rows of each sequence, one sequence after the other; the last `out_rows` of each want logits. So many
    steps `ahead` follow, if any."""
    total = sum(rows for _, rows in parts)
    tokens, slots, positions = np.empty((3, total), dtype=np.int32)
    wanted: list[int] = []
    end = 0
    for (sequence, rows), outs in zip(parts, out_rows, strict=True):
        slot = sequence.slot
        assert slot is not None
        begin, end = end, end + rows
        tokens[begin:end] = sequence.tokens[slot.count : slot.count + rows]
        slots[begin:end] = slot.index
        positions[begin:end] = np.arange(slot.count, slot.count + rows)
        wanted.extend(range(end - outs, end))
    return StepRows(tokens, slots, positions, np.array(wanted, dtype=np.int32), ahead=ahead, shallow=shallow)
