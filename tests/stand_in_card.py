"""A card worker's workload without a card: the NumPy reference computes, all around it is the real worker process.

$STAND_IN is what goes wrong: `refuse` fails as a machine without a card does, `crash:N` ends the process with a
message at step N, `slow` takes 40 ms an op, `stuck:N` never sends the first hand-off of step N.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.gpu_worker.workload import HandOffLate
from bloomery.runtime.architectures import build_program
from bloomery.runtime.arena import Arena
from bloomery.runtime.errors import PlanError, StepAborted
from bloomery.runtime.executor import StepResult, StepRows
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.hand_off import BUFFERS, HandOffWords, target
from bloomery.runtime.leg_times import BEGUN, SEEN, SENT, LegWords
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.ops_hand_off import HandOffReceive, HandOffSend
from bloomery.runtime.program import Op, Program, RoutedExperts
from bloomery.runtime.reference import ReferenceExecutor
from bloomery.runtime.slot_states import ArrayRows
from bloomery.runtime.split_program import card_part
from bloomery.runtime.step_record import RankWords, StepRecord
from bloomery.runtime.worker_messages import CardStart

CRASH = "the stand-in fails as told"


class CardSide:
    """What the card's kernels do in a hand-off, in Python: the same words, the same waits, the same cuts."""

    def __init__(self, start: CardStart, arena: Arena, tiers: ExpertTiers) -> None:
        self._start, self._tiers = start, tiers
        self.words = HandOffWords(arena.memory("hand_off"))
        self.control = RankWords(arena.memory("control"), start.rank, start.shape.ranks)
        self._arena = arena
        self._legs = LegWords(arena.memory("leg_times"), start.hand_offs) if start.time_stages else None
        self._record = StepRecord(arena.memory("record"), start.shape.max_rows)
        self._sent = False
        self._step, self._lap = -1, 0

    def _note(self, index: int, which: int) -> None:
        if self._legs:
            self._legs.note_hand_off(index, which, time.monotonic_ns() if self._sent else 0)

    def on_host(self, gate: str, ids: NDArray[Any]) -> NDArray[np.bool_]:
        return np.isin(ids, self._tiers.on_card[gate], invert=True)

    def send(self, index: int, gate: str, kind: str, x: NDArray[Any], ids: NDArray[Any], mix: NDArray[Any]) -> None:
        to_x, to_ids, to_mix, _ = (self._arena.buffer(name) for name in BUFFERS[kind])
        if index == min(self._start.hand_offs):
            self._step, self._lap = self.control.step, self._lap + 1 if self.control.step == self._step else 0
        ends = index == max(self._start.hand_offs) and self._lap == self._record.ahead
        on_host = self.on_host(gate, ids)
        self._sent = bool(on_host.any())
        if not self._sent and not ends:
            return self._note(index, SENT)
        to_x[: len(x), : x.shape[1]] = x
        for row, there in enumerate(on_host):
            count = int(there.sum())
            to_ids[row, :count], to_mix[row, :count] = ids[row, there], mix[row, there]
            if count < ids.shape[1]:
                to_ids[row, count] = -1  # what stands behind it is of earlier steps
        self.words.card_flag = target(self.control.step, index, self._lap)
        self._note(index, SENT)

    def receive(self, index: int, kind: str, rows: int, width: int) -> NDArray[Any]:
        step, begun = self.control.step, time.monotonic_ns()
        self._note(index, BEGUN)
        if not self._sent:
            self._note(index, SEEN)
            return np.zeros((rows, width), np.float32)
        wanted = target(step, index, self._lap)
        for rank in range(self._start.shape.processes):
            while self.words.rank_flag(rank) < wanted:
                if self.control.aborted(step) or self.control.poisoned(step):
                    raise StepAborted("cut while it waited for the host")
                if time.monotonic_ns() - begun > self._start.hand_off_ns:
                    raise HandOffLate(rank)
                time.sleep(1e-5)
        self._note(index, SEEN)
        return self._arena.buffer(BUFFERS[kind][3])[:rows, :width].copy()


class StandInExecutor(ReferenceExecutor):
    """The reference with the errands of a card, ended at op boundaries when it is cut."""

    def __init__(
        self,
        program: Program,
        is_cut: Callable[[], bool],
        side: CardSide | None,
        trouble: tuple[int, int, bool],
        on_end: Callable[[int], None] | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(program, **sizes)
        self._is_cut, self._side, self._on_end = is_cut, side, on_end
        self._crash, self._stuck, self._slow = trouble

    def step(self, rows: StepRows) -> StepResult:
        if self._crash and self._steps + 1 == self._crash:
            print(f"CardError: {CRASH}", file=sys.stderr, flush=True)
            os._exit(3)
        begun = time.monotonic_ns()
        result = super().step(rows)
        if self._on_end:
            self._on_end(time.monotonic_ns() - begun)
        return result

    def _execute(self, op: Op, rows: StepRows) -> None:
        if self._slow:
            time.sleep(0.04)
        self._aborted = self._is_cut()
        match op:
            case HandOffSend():
                assert self._side is not None
                while self._stuck == self._steps + 1:
                    time.sleep(0.01)
                values = (self._buffers.flat(op.x), self._buffers.flat(op.ids), self._buffers.flat(op.mix))
                self._side.send(op.index, op.experts, self.program.buffers[op.x.buffer].rows, *values)
            case HandOffReceive():
                assert self._side is not None
                x, kind = self._buffers.flat(op.x), self.program.buffers[op.x.buffer].rows
                self._buffers.write(op.out, x + self._side.receive(op.index, kind, len(x), op.out.elements))
            case RoutedExperts() if self._side is not None:
                mix = self._buffers.flat(op.mix).copy()
                self._buffers.write(op.mix, np.where(self._side.on_host(op.gate, self._buffers.flat(op.ids)), 0, mix))
                super()._execute(op, rows)
                self._buffers.write(op.mix, mix)
            case _:
                super()._execute(op, rows)

    @property
    def store(self) -> ArrayRows:
        return ArrayRows(self.program.states, self._states)


class StandInWorkload:
    def __init__(self, start: CardStart) -> None:
        self._start = start
        word, _, number = os.environ.get("STAND_IN", "").partition(":")
        if word == "refuse":
            raise PlanError("the NVIDIA driver sees no card", "see nvidia-smi, or run with --plan cpu")
        at = int(number) if number and start.generation == 0 else 0
        self._trouble = at * (word == "crash"), at * (word == "stuck"), word == "slow"
        self.program = build_program(ModelFile.open(start.model))

    def executor(
        self, arena: Arena, is_cut: Callable[[], bool], progress: Callable[[str, int, int], None]
    ) -> StandInExecutor:
        shape = self._start.shape
        progress("upload", 0, 10)
        progress("upload", 10, 10)
        sizes = {"context": shape.context, "slots": shape.slots, "max_rows": shape.max_rows}
        side = None
        if self._start.hand_offs:
            side = CardSide(self._start, arena, ExpertTiers.of_text(self.program, self._start.tiers))
        program = card_part(self.program, self._start.hand_offs)
        on_end: Callable[[int], None] | None = None
        if self._start.time_stages:
            legs = LegWords(arena.memory("leg_times"), self._start.hand_offs)
            control = RankWords(arena.memory("control"), self._start.rank, shape.ranks)

            def on_end(ns: int) -> None:
                legs.note(control.step, ns)

        return StandInExecutor(program, is_cut, side, self._trouble, on_end, **sizes, cache_type=shape.cache_type)

    def facts(self) -> dict[str, Any]:
        return {"card": "stand-in", "architecture": "numpy"}


def load(start: CardStart) -> StandInWorkload:
    return StandInWorkload(start)
