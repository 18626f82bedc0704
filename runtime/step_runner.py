"""Runs steps on the worker processes that meet in an arena: the coordinator's half of a step, whoever computes it.

Owns writing the record, raising the step number, waiting, aborting, and finding and naming workers that die or hang.
Processes are `worker_group`'s, the words both sides share `step_record`'s. Knows nothing of what a step computes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bloomery.runtime.arena import Arena
from bloomery.runtime.engram_process import EngramProcess
from bloomery.runtime.errors import ModelFileError, PlanError, StepAborted, WorkerLost
from bloomery.runtime.executor import StepRows
from bloomery.runtime.futex import FutexWaiter
from bloomery.runtime.step_record import ControlBlock, Status, StepRecord
from bloomery.runtime.step_watch import StallWatch, StopWatch
from bloomery.runtime.worker_group import WorkerGroup

_WATCH_SECONDS = 0.05
_CLOSE_SECONDS = 2.0
_STOPPED = "; it is stopped (by SIGSTOP, or Ctrl-Z on its terminal)"
_LATE = Status.TIMED_OUT


class StepRunner:
    """Steps of the ranks of a group. `step`, `errand` and `recover` belong to one thread at a time, the others to any.

    `labels` has for each rank the names of its stages, as far as it has some.
    """

    def __init__(
        self,
        group: WorkerGroup,
        arena: Arena,
        labels: Sequence[Sequence[str]],
        stall_seconds: float,
        engram: EngramProcess | None = None,
    ) -> None:
        """`stall_seconds`: how long a step may go on without any progress before the worker at fault is killed."""
        self._group, self._arena, self._labels, self._engram = group, arena, labels, engram
        shape = arena.layout.shape
        self._ranks = range(shape.ranks)
        self._record = StepRecord(arena.memory("record"), shape.max_rows)
        self._control = ControlBlock(arena.memory("control"), shape.ranks)
        self._waiter = FutexWaiter(self._control.bell_address, _WATCH_SECONDS)
        self._fence = threading.Lock()
        self._turn = threading.Lock()
        self._closed = False
        self._lost = ""
        self._running = 0
        self._stall_seconds = stall_seconds
        self._counts: dict[str, Any] = dict.fromkeys(("steps", "rows", "aborted", "restarts"), 0)
        self._seconds_last = self._seconds_total = 0.0

    def step(self, rows: StepRows, begin: Callable[[], None], alone: bool = False) -> float:
        """Runs one step to its end; its seconds. `begin` is called once the step is sure to begin and may refuse it.
        In one that a card computes `alone` the ranks of the host have no part.
        Raises StepAborted, WorkerLost and what `begin` raises."""
        begun = time.perf_counter()
        with self._turn:
            self._find_dead()
            begin()
            self._record.write(rows, alone)
            self._run()
            if self._engram:
                self._engram.check(self._control.step)
        seconds = time.perf_counter() - begun
        self._counts["steps"] += 1 + rows.ahead
        self._counts["rows"] += len(rows.tokens) * (1 + rows.ahead)
        self._seconds_last = seconds
        self._seconds_total += seconds
        return seconds

    @property
    def step_number(self) -> int:
        """Of the running step, or of the last one."""
        return self._control.step

    def drill(self) -> None:
        """A step without rows: proves that all ranks wake up, meet at their barriers and report. An abort that was
        meant for the step before it only makes another one necessary."""
        while True:
            self._record.write_drill()
            with contextlib.suppress(StepAborted):
                return self._run()

    def announce(self) -> None:
        """The next call is `step`: from now on `abort` is meant for it."""
        if not self._closed:
            self._running = self._control.step + 1

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Around everything that a step does: an announcement ends with it, however far it came."""
        try:
            yield
        finally:
            self._running = 0

    def abort(self) -> None:
        running = self._running
        if running:
            self._control.abort(running)

    @contextlib.contextmanager
    def errand(self) -> Iterator[None]:
        """Between steps: inside, no step runs and the workers may be asked for something. WorkerLost if one is gone."""
        with self._turn:
            self._find_dead()
            yield

    def recover(self, replace: Callable[[], int]) -> None:
        """After WorkerLost: lets all ranks leave the step, has the dead ones replaced (`replace` says how many there
        were) and proves that steps run again. Raises WorkerLost if they do not."""
        with self._turn:
            step = self._control.step
            self._control.poison(step)
            deadline = time.monotonic() + self._stall_seconds
            for rank in self._ranks:
                self._await_leaving(rank, step, deadline)
            try:
                replaced = replace()
            except (ModelFileError, PlanError) as error:
                raise WorkerLost(f"a worker could not be replaced: {error.message}", error.hint) from error
            self._counts["restarts"] += replaced
            self._lost = ""
            self.drill()

    def statistics(self) -> dict[str, Any]:
        steps = self._counts["steps"]
        statistics = {
            "pids": self._group.pids,
            **self._counts,
            "step_seconds_last": self._seconds_last,
            "step_seconds_mean": self._seconds_total / steps if steps else 0.0,
            "arena_bytes": sum(self._arena.layout.segments.values()),
            "lost": self._lost,
        }
        if not self._closed:
            statistics["sleeping"] = [self._control.sleeping(rank) for rank in self._ranks]
        return statistics

    def close(self) -> bool:
        """Ends the workers and the arena; whether this call did it."""
        self.abort()
        with self._turn:
            if self._closed:
                return False
            self._closed, self._lost = True, "the pool is closed"
            self._control.stop()
            self._pass_fence()
            for rank in self._ranks:
                self._group.ring(rank)
            if self._engram:
                self._engram.ring(unless_awake=False)
            self._group.end(_CLOSE_SECONDS)
            if self._engram:
                self._engram.end(_CLOSE_SECONDS)
            self._arena.unlink()
            self._arena.close()
            return True

    def _refuse_if_lost(self) -> None:
        if self._lost:
            raise WorkerLost(self._lost, "the pool replaces its workers; send the request again")

    def _find_dead(self) -> None:
        if not self._lost and self._any_dead():
            self._lose([], "between steps")
        self._refuse_if_lost()

    def _run(self) -> None:
        """Runs the step that the record describes; returns when every rank has completed it."""
        step = self._control.step + 1
        self._running = step
        try:
            self._control.step = step
            self._pass_fence()
            if self._engram:
                self._engram.ring()
            for rank in self._ranks:
                if self._control.sleeping(rank):
                    self._group.ring(rank)
            self._await_end(step)
        except WorkerLost:
            raise
        except BaseException:  # an interrupt: the record may not be written again before the workers are done with it
            self._control.abort(step)
            self._await_end(step)
            raise
        finally:
            self._running = 0
        statuses = [self._control.status(rank) for rank in self._ranks]
        if Status.TIMED_OUT in statuses:
            self._lost = f"{self._too_long(statuses.index(Status.TIMED_OUT))} (in step {step})"
            self._refuse_if_lost()
        if Status.POISONED in statuses:  # a rank left early, so whatever the others say the step has no result
            left = self._group.describe(statuses.index(Status.POISONED))
            self._lost = f"{left} left its work, told to although no worker was lost (in step {step})"
            self._refuse_if_lost()
        if Status.ABORTED in statuses:
            self._counts["aborted"] += 1
            raise StepAborted(f"step {step} was aborted")

    def _pass_fence(self) -> None:
        """A full fence between the store of a word and the loads after it (step_record): taking a lock is one."""
        with self._fence:
            pass

    def _await_end(self, step: int) -> None:
        watch, stops = StallWatch(self._stall_seconds), StopWatch(self._any_stopped)
        while (bell := self._control.bell) != step:
            self._waiter.wait(bell)
            if self._control.bell == step or self._finished(step):
                return
            late = [r for r in self._ranks if self._control.done(r) == step and self._control.status(r) == _LATE]
            if self._any_dead():
                self._lose([], f"in step {step}")
            elif stops.found():
                self._lose(self._group.stopped(), f"in step {step}", engram=self._engram_stopped, seconds=stops.seconds)
            elif late:
                self._lose(self._laggards(step), f"in step {step}, {self._too_long(late[0])}")
            elif watch.stalled(sum(self._control.progress(rank)[1] for rank in self._ranks)):
                waits = self._engram is not None and self._engram.lags(step)  # then the ranks wait for its rows
                self._lose([] if waits else self._laggards(step), f"in step {step}", engram=waits)
            self._refuse_if_lost()

    def _too_long(self, rank: int) -> str:
        return f"{self._group.describe(rank)} waited too long for {self._group.describe(self._control.detail(rank))}"

    def _finished(self, step: int) -> bool:
        return all(self._control.done(rank) == step for rank in self._ranks)

    def _laggards(self, step: int) -> list[int]:
        """The ranks for which the others wait: those that have come least far."""
        reached = {rank: (self._control.done(rank) == step, *self._control.progress(rank)) for rank in self._ranks}
        least = min(reached.values())
        return [rank for rank in self._ranks if reached[rank] == least]

    def _any_dead(self) -> bool:
        return self._group.any_dead() or (self._engram is not None and self._engram.dead)

    @property
    def _engram_stopped(self) -> bool:
        return self._engram is not None and self._engram.stopped

    def _any_stopped(self) -> bool:
        """Whether a signal has stopped a process that the step may have to wait for: nothing will happen until another
        one makes it go on."""
        return self._engram_stopped or bool(self._group.stopped())

    def _lose(self, hung: list[int], when: str, *, engram: bool = False, seconds: float | None = None) -> None:
        """Lets the survivors leave the running step, kills what hangs (ranks, or the engram I/O process), and words
        what happened."""
        self._control.poison(self._control.step)
        reasons = []
        seconds = self._stall_seconds if seconds is None else seconds
        if self._engram and engram:
            stopped = _STOPPED if self._engram.stopped else ""
            self._engram.kill()
            reasons.append(f"{self._engram.describe()} brought no rows for {seconds:.3g} s{stopped}")
        elif self._engram and self._engram.dead:
            reasons.append(self._engram.describe_exit())
        for rank in hung:
            where = self._where(rank) + (_STOPPED if rank in self._group.stopped() else "")
            self._group.kill(rank)
            reasons.append(f"{self._group.describe(rank)} made no progress for {seconds:.3g} s{where}")
        for rank in self._group.dead():
            if rank not in hung:
                reasons.append(self._group.describe_exit(rank, self._where(rank)))
        self._lost = f"{'; '.join(reasons)} ({when})"

    def _where(self, rank: int) -> str:
        """At which op a rank is, if it is inside a step."""
        if self._control.done(rank) == self._control.step:
            return ""
        step, stage = self._control.progress(rank)
        stage = stage if step == self._control.step else 0
        labels = self._labels[rank]
        return f" at {labels[stage % len(labels)]}" if stage < len(labels) * (1 + self._record.ahead) else ""

    def _await_leaving(self, rank: int, step: int, deadline: float) -> None:
        """Waits until a survivor is out of the step, else kills it: nobody may still write when a new step starts."""
        while rank not in self._group.dead() and self._control.done(rank) != step:
            if time.monotonic() > deadline:
                self._group.kill(rank)
            time.sleep(0.001)
