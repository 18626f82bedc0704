"""The card's worker process from its start to its end: opens the model, attaches, loads, serves steps, sleeps.

Owns the process's side of `bloomery.runtime.worker_messages` and of `step_record`: one rank among the others, which
meets no barrier inside a step. What computes is the workload's. It leaves when the coordinator says so or is gone; a
failure of the card ends it, with a message that names the op, and the coordinator starts another in its place.
"""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

import numpy as np

from bloomery.gpu_worker.workload import CardWorkload, HandOffLate, RowExecutor
from bloomery.runtime.arena import Arena, ArenaLayout, Lowered
from bloomery.runtime.errors import StepAborted
from bloomery.runtime.executor import StepResult
from bloomery.runtime.futex import futex_wake
from bloomery.runtime.slot_states import RowStore
from bloomery.runtime.split_program import host_part
from bloomery.runtime.step_record import RankWords, Status, StepRecord
from bloomery.runtime.worker_life import live
from bloomery.runtime.worker_link import Link
from bloomery.runtime.worker_messages import CardStart, lowered_of

_PROGRESS_SECONDS = 0.1
_ERRAND_MS = 2


def run(start: CardStart) -> int:
    """The life of a worker; returns its exit status."""
    return live(start, lambda link: CardWorker(start, link))


class CardWorker:
    """Construction opens the model and looks for the card; `serve_until_told` does the rest."""

    def __init__(self, start: CardStart, link: Link) -> None:
        self._start, self._link = start, link
        module, _, function = start.workload.partition(":")
        self._workload: CardWorkload = getattr(importlib.import_module(module), function)(start)
        self._spoke = 0.0
        self._boundaries = 0
        self._fence = threading.Lock()

    def serve_until_told(self) -> None:
        self._link.send("hello", scratch=[], stages=0, labels=[], kernels=[])
        message = self._link.receive()
        assert message["kind"] == "attach", message
        lowered = lowered_of(message)
        self._attach(message["prefix"], lowered)
        executor = self._workload.executor(self._arena, self._is_cut, self._report)
        self._link.send("ready", facts=self._workload.facts())
        while not self._words.stop:
            if self._await_step():
                self._serve(executor)
                continue
            self._words.sleeping = True
            with self._fence:  # a full fence between the store and the loads (step_record)
                pass
            if self._words.step == self._last and not self._words.stop:
                self._link.sleep()
            self._words.sleeping = False
            while messages := self._link.take(_ERRAND_MS):  # errands come in rows
                for message in messages:
                    self._link.send("done", rows=self._run_errand(executor.store, message))

    def _attach(self, prefix: str, lowered: Lowered) -> None:
        start, shape = self._start, self._start.shape
        shared = host_part(self._workload.program, start.hand_offs)
        self._arena = Arena.attach(prefix, ArenaLayout(shared, shape, lowered))
        self._words = RankWords(self._arena.memory("control"), start.rank, shape.ranks)
        self._record = StepRecord(self._arena.memory("record"), shape.max_rows)
        self._last = self._words.step
        program = self._workload.program
        self._logits = self._arena.buffer(program.logits)
        self._greedy = self._arena.buffer(program.argmax)[:, 0]
        view = program.hidden
        self._hidden = None if view is None else self._arena.buffer(view.buffer)[:, view.start : view.end]

    def _report(self, stage: str, done: int, total: int) -> None:
        """Tells the pool how far loading is, now and then."""
        now = time.monotonic()
        if done >= total or now - self._spoke > _PROGRESS_SECONDS:
            self._spoke = now
            self._link.send("progress", stage=stage, done=done, total=total)

    # ---- one step
    def _await_step(self) -> bool:
        """Watches the step number for the idle time; whether there is a new one."""
        deadline = time.monotonic_ns() + self._start.idle_ns
        while self._words.step == self._last:
            if time.monotonic_ns() >= deadline or self._words.stop:
                return False
        return True

    def _serve(self, executor: RowExecutor) -> None:
        self._last = step = self._words.step
        rows, status, detail = self._record.read_rows(), Status.COMPLETED, 0
        self._boundaries = 0
        if rows is not None:
            try:
                self._publish(executor.step(rows))
            except StepAborted:
                status = Status.POISONED if self._words.poisoned(step) else Status.ABORTED
            except HandOffLate as late:
                status, detail = Status.TIMED_OUT, late.rank
        self._words.leave(step, status, detail)
        with self._fence:
            pass
        if self._words.all_done(step):
            self._words.ring(step)
            futex_wake(self._words.bell_address)

    def _is_cut(self) -> bool:
        """Whether the coordinator wants the running step to end; asked at each boundary, which counts as progress."""
        self._words.reached(self._last, self._boundaries)
        self._boundaries += 1
        return self._words.aborted(self._last) or self._words.poisoned(self._last)

    def _publish(self, result: StepResult) -> None:
        """Results go to the arena, unless the executor has put them there."""
        wanted = len(result.greedy)
        pairs = [(self._logits, result.logits), (self._greedy, result.greedy)]
        if self._hidden is not None and result.hidden is not None:
            pairs.append((self._hidden, result.hidden))
        for target, made in pairs:
            if wanted and made.ctypes.data != target.ctypes.data:
                target[:wanted] = made

    # ---- between steps
    def _run_errand(self, store: RowStore, message: dict[str, Any]) -> bytes:
        match message:
            case {"kind": "copy", "source": source, "target": target, "positions": positions}:
                store.copy(source, target, positions)
            case {"kind": "read", "name": name, "slot": slot, "first": first, "count": count}:
                return np.ascontiguousarray(store.read(name, slot, range(first, first + count))).tobytes()
            case {"kind": "write", "name": name, "slot": slot, "first": first, "rows": held}:
                width = self._workload.program.states[name].width
                rows = np.frombuffer(held, store.dtype(name)).reshape(-1, width)
                store.write(name, slot, range(first, first + len(rows)), rows)
            case {"kind": kind}:
                raise ValueError(f"an errand of unknown kind {kind!r}")
        return b""
