"""What a card worker runs: the executor of a model, made once the arena is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bloomery.runtime.arena import Arena
from bloomery.runtime.executor import StepExecutor
from bloomery.runtime.program import Program
from bloomery.runtime.slot_states import RowStore


class HandOffLate(Exception):
    """A CPU-expert worker did not answer in time: `rank`."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"worker {rank} did not answer in time")
        self.rank = rank


class RowExecutor(StepExecutor, Protocol):
    """A StepExecutor whose states can be read and written one by one."""

    @property
    def store(self) -> RowStore:
        """The rows of its states."""


class CardWorkload(Protocol):
    """Made by the function that WorkerStart.workload names, from the CardStart. PlanError if there is no card."""

    @property
    def program(self) -> Program:
        """The whole program of the model."""

    def executor(
        self, arena: Arena, is_cut: Callable[[], bool], progress: Callable[[str, int, int], None]
    ) -> RowExecutor:
        """Loads the model. The executor asks `is_cut` at every boundary at which it can end a step (StepAborted).
        A step raises HandOffLate for a CPU-expert worker that does not answer."""

    def facts(self) -> dict[str, Any]:
        """What status says of the card, once the model is loaded."""
