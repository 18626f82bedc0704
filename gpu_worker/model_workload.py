"""The workload of a real card worker: the program of a model file on the card, results straight into the arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.gpu_worker.compile_cache import find_compiler
from bloomery.gpu_worker.driver import load_pycuda
from bloomery.gpu_worker.hand_off_lowering import HostSide
from bloomery.gpu_worker.launches import MAX_ROWS
from bloomery.gpu_worker.lowering import lower
from bloomery.gpu_worker.results import Results
from bloomery.gpu_worker.sizing import SizingContext
from bloomery.gpu_worker.workload import HandOffLate
from bloomery.runtime.architectures import build_program
from bloomery.runtime.arena import Arena
from bloomery.runtime.errors import StepAborted
from bloomery.runtime.executor import StepResult, StepRows
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.hand_off import CutReason, HandOffWords
from bloomery.runtime.leg_times import LegWords
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program
from bloomery.runtime.split_program import card_part
from bloomery.runtime.step_record import STEP
from bloomery.runtime.worker_messages import CardStart


class ModelWorkload:
    """Keeps the model file mapped while it is loaded."""

    def __init__(self, start: CardStart) -> None:
        load_pycuda()
        find_compiler()
        self._start = start
        self._model = ModelFile.open(start.model)
        self.program = build_program(self._model)
        shape, self._on_card = start.shape, card_part(self.program, start.hand_offs)
        lower(self._on_card, SizingContext(self._on_card, shape.context, shape.cache_type), MAX_ROWS, MAX_ROWS)
        self._executor: CardExecutor | None = None

    def executor(
        self, arena: Arena, is_cut: Callable[[], bool], progress: Callable[[str, int, int], None]
    ) -> CardExecutor:
        start, shape = self._start, self._start.shape
        arguments: dict[str, Any] = {
            "context": shape.context,
            "slots": shape.slots,
            "prompt_block": shape.max_rows,
            "cache_type": shape.cache_type,
            "card": start.card,
            "deterministic": start.deterministic,
            "is_cut": is_cut,
            "progress": progress,
        }
        if start.time_stages:
            words = LegWords(arena.memory("leg_times"), start.hand_offs)
            control = arena.memory("control").data.cast("B").cast("q")

            def note(ns: int) -> None:
                assert self._executor is not None
                words.note(control[STEP // 8], ns, *self._executor.experts_brought)

            arguments["on_end"] = note
        results = results_in(arena, self.program)
        if start.hand_offs:
            tiers = ExpertTiers.of_text(self.program, start.tiers)
            numbers, timed, least = (start.hand_offs[0], start.hand_offs[-1]), start.time_stages, start.stream_rows
            there = tuple((rows, ExpertTiers.of_text(self.program, text)) for rows, text in start.stream_tiers)
            host = HostSide(tiers, arena, shape.processes, start.hand_off_ns, *numbers, timed, least, there)
            self._executor = HandOffExecutor(self._on_card, **arguments, results=results, host=host)
        else:
            self._executor = CardExecutor(self._on_card, **arguments, results=results)
        return self._executor

    def facts(self) -> dict[str, Any]:
        assert self._executor is not None
        card = self._executor.card
        return {
            "card": card.name,
            "architecture": card.architecture,
            "card_bytes": sum(self._executor.memory.sizes.values()),
            "experts_from": self._executor.experts_from,
        }


class HandOffExecutor(CardExecutor):
    """A CardExecutor whose kernels may have given a step up: it then ends as they found out."""

    def __init__(self, program: Program, *, host: HostSide, **arguments: Any) -> None:
        self._words = HandOffWords(host.arena.memory("hand_off"))
        self._control = host.arena.memory("control").data.cast("B").cast("q")
        super().__init__(program, host=host, **arguments)

    def step(self, rows: StepRows) -> StepResult:
        result = super().step(rows)
        cut = self._words.cut(self._control[STEP // 8])
        if cut is not None:
            reason, rank = cut
            if reason == CutReason.LATE:
                raise HandOffLate(rank)
            raise StepAborted("cut while the card waited for the host")
        return result


def results_in(arena: Arena, program: Program) -> Results:
    """The arena's buffers of results, and the segments that the card reaches."""
    view = program.hidden
    hidden = None if view is None else arena.buffer(view.buffer)[:, view.start : view.end]
    areas = tuple((arena.segment_address(name), arena.layout.segments[name]) for name in ("activations", "control"))
    return Results(arena.buffer(program.logits), arena.buffer(program.argmax)[:, 0], hidden, areas)


def load(start: CardStart) -> ModelWorkload:
    return ModelWorkload(start)
