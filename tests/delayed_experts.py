"""The workload of a CPU-expert worker beside a card, with a random delay before each answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from numba import cfunc, int64, void

from bloomery.cpu_experts import expert_workload
from bloomery.cpu_experts.stage import LoweringContext, Stage
from bloomery.runtime.sync import load_acquire, pause, store_release
from bloomery.runtime.worker_messages import WorkerStart

_SIGNATURE = void(int64, int64, int64, int64)
MOST_PAUSES = 1 << 10  # tens of microseconds


def _delay(args: int, rank: int, ranks: int, step: int) -> None:
    """args: the state of a random generator."""
    state = load_acquire(args) * 2862933555777941757 + 3037000493 + rank
    store_release(args, state)
    few = (state >> 60) & 3  # of four answers one comes at once
    for _ in range(((state >> 33) & (1024 - 1)) * few >> 2):
        pause()


class DelayedExperts:
    def __init__(self, start: WorkerStart) -> None:
        self._inner = expert_workload.load(start)
        self.program, self.kept = self._inner.program, self._inner.kept
        self._delay: Any = None

    def map_weights(self, besides: Collection[str], progress: Callable[[int, int], None]) -> None:
        self._inner.map_weights(besides, progress)

    def stages(self, context: LoweringContext) -> list[Stage]:
        out: list[Stage] = []
        for number, stage in enumerate(self._inner.stages(context)):
            if stage.kernel == "hand_off_answer":
                out.append(Stage("delay", (12345 + number,), stage.label, barrier=False))
            out.append(replace(stage))
        return out

    def compile(self, kernel: str) -> int:
        if kernel != "delay":
            return self._inner.compile(kernel)
        if self._delay is None:
            self._delay = cfunc(_SIGNATURE)(_delay)
        return int(self._delay.address)


def load(start: WorkerStart) -> DelayedExperts:
    return DelayedExperts(start)
