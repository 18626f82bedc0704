"""A worker process from its start to its end: opens the model, lowers, compiles, attaches, serves steps, sleeps.

Owns the process's side of `bloomery.runtime.worker_messages` and its rules of leaving: told to by the coordinator, or
when the coordinator is gone, in which case it also removes the names that the coordinator left. What happens inside a
step is `interpreter`'s.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.cpu_experts import interpreter
from bloomery.cpu_experts.arena_context import ArenaContext, SizingContext
from bloomery.cpu_experts.own_weights import OwnWeights
from bloomery.cpu_experts.stage import STEP_TOKENS
from bloomery.cpu_experts.workload import Workload
from bloomery.runtime.arena import TICKS_PER_STAGE, Arena, ArenaLayout, Lowered
from bloomery.runtime.host_weights import HostWeights, WeightLayout, copied_tensors, lock_mapped
from bloomery.runtime.shallow_steps import shallow_part
from bloomery.runtime.step_record import LINE, RECORD_ARRAYS, STAGE_BITS, STEP, record_array_offset
from bloomery.runtime.worker_life import live
from bloomery.runtime.worker_link import Link
from bloomery.runtime.worker_messages import WorkerStart, lowered_of

INTERPRETER = "interpreter"
"""Compiled like a kernel, by one worker for all."""
_TICK_RATE_SECONDS = 0.02


def run(start: WorkerStart) -> int:
    """The life of a worker; returns its exit status."""
    return live(start, lambda link: Worker(start, link), pin=start.cpu)


class Worker:
    """One rank. Construction opens the model and lowers its program; `serve_until_told` does the rest."""

    def __init__(self, start: WorkerStart, link: Link) -> None:
        self._start = start
        self._link = link
        self._reported = 0.0
        module, _, function = start.workload.partition(":")
        self._workload: Workload = getattr(importlib.import_module(module), function)(start)
        program, shape = self._workload.program, start.shape
        sharing = (start.rank, shape.processes, self._workload.kept, start.lends, start.rows)
        self._own = OwnWeights(program, *sharing) if start.own_weights else None
        sizing = SizingContext(program, shape, self._own)
        self._stages = self._workload.stages(sizing)
        if self._own:
            self._own.load(lambda done, total: self._report("weights", done, total))
        besides = self._own.names if self._own else set()
        self._workload.map_weights(besides, lambda done, total: self._report("map", done, total))
        assert len(self._stages) < 1 << STAGE_BITS
        self._lowered = Lowered(tuple(sorted(sizing.wanted.items())), len(self._stages))
        self._memory: tuple[Any, ...] = ()

    def _report(self, stage: str, done: int, total: int) -> None:
        """Every worker maps the same pages, and reads as much; one tells of it, and who comes later."""
        now = time.monotonic()
        if (self._start.rank == 0 or self._start.generation) and (done == total or now > self._reported + 0.1):
            self._link.send("progress", stage=stage, done=done, total=total)
            self._reported = now

    def serve_until_told(self) -> None:
        """Reports, compiles what it is told to, attaches, and serves steps until it is told to stop."""
        self._link.send(
            "hello",
            scratch=self._lowered.scratch,
            stages=self._lowered.stages,
            labels=[stage.label for stage in self._stages],
            kernels=[INTERPRETER, *dict.fromkeys(stage.kernel for stage in self._stages)],
            rows=self._own.path if self._own else "",
        )
        while (message := self._link.receive())["kind"] == "compile":
            self._compile(message["kernel"])
            self._link.send("compiled", kernel=message["kernel"])
        assert message["kind"] == "attach", message
        arena = self._attach(message)
        self._link.send("ready", **self._own_facts(), **self._tick_rate())
        self._serve(arena)

    def _tick_rate(self) -> dict[str, float]:
        """Where stages are timed: ticks a second of the counter that times them."""
        if not self._start.time_stages:
            return {}
        interpreter.now_ticks()  # the first call compiles it, or loads it
        begun, first = time.perf_counter(), interpreter.now_ticks()
        time.sleep(_TICK_RATE_SECONDS)
        return {"tick_rate": (interpreter.now_ticks() - first) / (time.perf_counter() - begun)}

    def _compile(self, kernel: str) -> int:
        if kernel == INTERPRETER:
            interpreter.compile_interpreter()
            return 0
        return self._workload.compile(kernel)

    def _attach(self, message: dict[str, Any]) -> Arena:
        """Attaches and lowers the program into the arena; makes the stage table and this rank's private words."""
        self._compile(INTERPRETER)
        layout = ArenaLayout(self._workload.program, self._start.shape, lowered_of(message))
        arena = Arena.attach(message["prefix"], layout)
        if self._own:
            self._own.borrow(message["rows"][: self._start.shape.processes])
        weights = (self._copied(), self._own)
        context = ArenaContext(self._workload.program, arena, self._start.hand_off_ns, *weights)
        self._stages = self._workload.stages(context)
        assert len(self._stages) == self._lowered.stages, "lowering depends on addresses"
        table, arguments = self._stage_table()
        private = aligned_words(interpreter.PRIVATE_WORDS)
        private[interpreter.LAST_STEP // 8] = arena.memory("control")[STEP : STEP + 8].view(np.int64)[0]
        private[interpreter.SPINS // 8] = self._start.spins
        private[interpreter.YIELDS // 8] = self._start.yields
        private[interpreter.IDLE_NS // 8] = self._start.idle_ns
        private[interpreter.DEADLINE_NS // 8] = self._start.deadline_ns
        private[interpreter.SHALLOW_STAGES // 8] = self._shallow_stages()
        private[interpreter.REPORTERS // 8] = self._start.shape.ranks
        if self._start.time_stages:
            ticks = arena.address("ticks") + 8 * TICKS_PER_STAGE * self._lowered.stages * self._start.rank
            private[interpreter.TICKS // 8] = ticks
        pointers = private[interpreter.POINTERS // 8 :]
        for index in range(len(RECORD_ARRAYS)):
            offset = record_array_offset(index, self._start.shape.max_rows)
            pointers[STEP_TOKENS + index] = arena.address("record") + offset
        self._memory = (table, arguments, private)
        return arena

    def _shallow_stages(self) -> int:
        """How many stages a shallow step has; all of them where there are no such steps."""
        part = shallow_part(self._workload.program)
        if part is None:
            return len(self._stages)
        names = {op.name for op in self._workload.program.ops[: part.ops]}
        return next(i for i, stage in enumerate(self._stages) if stage.label not in names)

    def _copied(self) -> HostWeights | None:
        """The weights' copy in shared memory, if the coordinator has made one."""
        if not self._start.weight_files:
            return None
        program = self._workload.program
        layout = WeightLayout(copied_tensors(program), self._start.weight_nodes)
        return HostWeights.attach(layout, self._start.weight_files)

    def _own_facts(self) -> dict[str, Any]:
        """What the pool is told of weights in this process's own memory."""
        if not self._own:
            return {}
        unlocked = ""
        if self._start.mlock:
            others = [t for t in copied_tensors(self._workload.program) if t.name not in self._own.names]
            unlocked = self._own.lock() or lock_mapped(others)
        facts = {"weights": self._own.nbytes, "huge": self._own.huge_share(), "unlocked": unlocked}
        return facts | {"sees": self._own.seen}

    def _stage_table(self) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
        """The interpreter's table of stages, and their arguments, which must stay alive."""
        kernels = {name: self._workload.compile(name) for name in dict.fromkeys(stage.kernel for stage in self._stages)}
        table = aligned_words(interpreter.STAGE_WORDS * len(self._stages)).reshape(-1, interpreter.STAGE_WORDS)
        arguments = []
        for entry, stage in zip(table, self._stages):
            words = aligned_words(len(stage.arguments))
            words[:] = stage.arguments
            arguments.append(words)
            entry[:] = kernels[stage.kernel], words.ctypes.data, stage.barrier
        return table, arguments

    def _serve(self, arena: Arena) -> None:
        start, (table, _, private) = self._start, self._memory
        control, words = arena.address("control"), private.ctypes.data
        step_data = (control, arena.address("record"), table.ctypes.data, len(table), words)
        while interpreter.serve(*step_data, start.rank, start.shape.processes) != interpreter.Reason.STOPPED:
            # nobody rang: it sleeps on; to watch again, every second, would be most of what an idle worker does
            while interpreter.prepare_to_sleep(control, words, start.rank) and not self._link.sleep():
                pass
            interpreter.wake_up(control, start.rank)
            self._link.silence()


def aligned_words(count: int) -> NDArray[np.int64]:
    """Zeroed int64 words at a multiple of 128 bytes: no line is shared with anything else."""
    memory = np.zeros(8 * count + 2 * LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + 8 * count].view(np.int64)
