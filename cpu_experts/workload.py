"""What a worker runs: a program, its stages in given memory, and the compiled kernels they name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from bloomery.cpu_experts.stage import LoweringContext, Stage
from bloomery.runtime.program import Program


class Workload(Protocol):
    """Made by the function that WorkerStart.workload names, from the WorkerStart."""

    @property
    def program(self) -> Program: ...

    @property
    def kept(self) -> Mapping[str, tuple[int, ...]]:
        """Tensors of which not all matrices are used here, and the numbers of those that are."""

    def map_weights(self, besides: Collection[str], progress: Callable[[int, int], None]) -> None:
        """Makes the weights ready for the first step, but for those that lie elsewhere; `progress(done, total)` in
        bytes."""

    def stages(self, context: LoweringContext) -> list[Stage]:
        """The program's stages with addresses from this context. PlanError for what has no kernel."""

    def compile(self, kernel: str) -> int:
        """Address of a kernel, compiled or loaded from the cache."""
