"""What the CPU workers' time stamp counters say of their stages, added up from the arena.

Owns the reading of region `ticks`; the interpreter of `cpu_experts` writes it, each rank its own part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bloomery.runtime.arena import TICKS_PER_STAGE, Arena


def op_ticks(arena: Arena, labels: Sequence[str], stages: int) -> dict[str, tuple[int, int]]:
    """For each op name the ticks that all ranks together have spent in its kernels and at its barriers since the start.
    `labels` are the op names of the `stages`. Read it between steps."""
    ticks = arena.memory("ticks").view(np.int64).reshape(-1, stages, TICKS_PER_STAGE)
    sums: dict[str, tuple[int, int]] = {}
    for label, (kernel, barrier) in zip(labels, ticks.sum(axis=0)):
        before = sums.get(label, (0, 0))
        sums[label] = (before[0] + int(kernel), before[1] + int(barrier))
    return sums


def op_seconds(
    arena: Arena, labels: Sequence[str], stages: int, ranks: int, tick_rate: float
) -> dict[str, tuple[float, float]]:
    """The same in seconds that a rank has spent, the mean of all; `tick_rate` is in ticks a second. Empty for 0."""
    if not tick_rate:
        return {}
    each = ranks * tick_rate
    return {
        name: (kernel / each, barrier / each) for name, (kernel, barrier) in op_ticks(arena, labels, stages).items()
    }
