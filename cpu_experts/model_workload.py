"""The workload of a real worker: the program of a model file, lowered onto the host kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection

from bloomery.cpu_experts.compile_cache import compile_kernel
from bloomery.cpu_experts.lowering import lower
from bloomery.cpu_experts.stage import LoweringContext, Stage
from bloomery.runtime.architectures import load_program
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.router_choices import keep_choices
from bloomery.runtime.worker_messages import WorkerStart

_MAP_SECONDS = 30.0  # a step's first look at each 64 KiB would cost a fault, half of an expert's time


class ModelWorkload:
    """Keeps the model file mapped: its pages are shared with all other workers through the page cache."""

    def __init__(self, start: WorkerStart) -> None:
        self._model, program = load_program(start.model, start.taps, start.target)
        self.program = keep_choices(program) if start.keep_choices else program
        tables = {table.weight for table in engram_tables(program)}  # larger than memory, and not read from here
        self.kept: dict[str, tuple[int, ...]] = {}
        self._besides, self._copied = tables, bool(start.weight_files)

    def map_weights(self, besides: Collection[str], progress: Callable[[int, int], None]) -> None:
        if not self._copied:
            self._model.map_pages(_MAP_SECONDS, self._besides | set(besides), progress)

    def stages(self, context: LoweringContext) -> list[Stage]:
        return lower(self.program, context)

    def compile(self, kernel: str) -> int:
        return compile_kernel(kernel)


def load(start: WorkerStart) -> ModelWorkload:
    return ModelWorkload(start)
