"""The host executor as the coordinator sees it: a pool of worker processes that run whole programs on the CPU.

Owns the coordinator's half of a step (write the record, raise the step number, wait, watch for deaths), aborting,
and recovery. Processes are `worker_group`'s, memory `arena`'s, the words both sides share `step_record`'s; of kernels
it knows nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime import router_choices, runtime_files
from bloomery.runtime.arena import TICKS_PER_STAGE, Arena, ArenaLayout, ArenaShape, Lowered
from bloomery.runtime.cpu_limits import affinity_mask, cpu_quota
from bloomery.runtime.engram_process import EngramProcess
from bloomery.runtime.errors import ModelFileError, PlanError, StepAborted, WorkerLost
from bloomery.runtime.executor import StateSnapshot, StepResult, StepRows
from bloomery.runtime.futex import FutexWaiter
from bloomery.runtime.program import Program
from bloomery.runtime.slot_states import SlotStates
from bloomery.runtime.step_record import ControlBlock, Status, StepRecord
from bloomery.runtime.step_watch import StallWatch, StopWatch
from bloomery.runtime.topology import Topology, default_processes
from bloomery.runtime.worker_group import Progress, WorkerGroup
from bloomery.runtime.worker_messages import EngramOptions, WorkerStart, lowered_of

MODEL_WORKLOAD = "bloomery.cpu_experts.model_workload:load"
LOGITS_BYTES = 64 << 20
"""Bound of the logits buffer, unless every slot must have a row."""

_WATCH_SECONDS = 0.05
_STALL_SECONDS = 60.0
_QUIET_SECONDS = 300.0
_STOPPED = "; it is stopped (by SIGSTOP, or Ctrl-Z on its terminal)"
_CLOSE_SECONDS = 2.0
_BARRIER_SPINS = 512
_IDLE_SPIN_NS = 2_000_000
_CROWDED_IDLE_NS = 200_000  # yielding all the while

_pool_numbers = itertools.count()


def deadline_scale() -> float:
    """BLOOMERY_DEADLINE_SCALE: factor on every deadline in wall time, for slow machines and for debuggers."""
    return float(os.environ.get("BLOOMERY_DEADLINE_SCALE", "1"))


class HostPool:
    """A StepExecutor whose steps are run by worker processes. Make one with `start`; close it, or it closes at exit.

    `step`, `recover` and `copy_prefix` belong to one thread at a time; `abort`, `statistics` and `close` to any.
    """

    def __init__(
        self,
        group: WorkerGroup,
        arena: Arena,
        program: Program,
        lowered: Lowered,
        labels: list[str],
        engram: EngramProcess | None,
    ) -> None:
        self._group = group
        self._engram = engram
        self._arena = arena
        self._lowered = lowered
        self._labels = labels
        self._shape = arena.layout.shape
        self._vocabulary = program.vocabulary
        states = {name: arena.state(name) for name in program.states}
        self._states = SlotStates(
            program.states, states, slots=self._shape.slots, context=self._shape.context, spare=self._shape.spare
        )
        self._ranks = range(self._shape.processes)
        self._record = StepRecord(arena.memory("record"), self._shape.max_rows)
        self._control = ControlBlock(arena.memory("control"), self._shape.processes)
        self._waiter = FutexWaiter(self._control.bell_address, _WATCH_SECONDS)
        self._logits = arena.buffer(program.logits)
        self._greedy = arena.buffer(program.argmax)[:, 0]
        view = program.hidden
        self._hidden = None if view is None else arena.buffer(view.buffer)[:, view.start : view.end]
        self._inputs = {name: arena.buffer(name) for name in program.inputs}
        self._reports = {name: (arena.buffer(name), program.buffers[name].rows) for name in program.reports}
        self._fence = threading.Lock()
        self._turn = threading.Lock()
        self._closed = False
        self._lost = ""
        self._running = 0
        self._stall_seconds = _STALL_SECONDS * deadline_scale()
        self._counts: dict[str, Any] = dict.fromkeys(("steps", "rows", "aborted", "restarts"), 0)
        self._seconds_last = self._seconds_total = 0.0
        atexit.register(self.close)

    @classmethod
    def start(
        cls,
        model_path: str,
        program: Program,
        *,
        context: int,
        slots: int,
        processes: int = 0,
        prompt_block: int = 512,
        cache_type: Literal["f32", "f16"] = "f16",
        progress: Progress = lambda stage, done, total: None,
        time_stages: bool = False,
        workload: str = MODEL_WORKLOAD,
        engram: EngramOptions | None = None,
        taps: tuple[int, ...] = (),
        target: str = "",
        keep_choices: bool = False,
    ) -> HostPool:
        """Starts the workers and returns when they can run steps.

        `processes` 0 means one for each core of the affinity mask and quota. `progress(stage, done, total)` is called
        with the stages "spawn", "compile" and "load". `workload` names what makes a worker's stages. `engram` is for
        the process that brings n-gram table rows, which only a program with engrams has. `taps` and `target` say how
        the workers build the program from the file (`architectures.load_program`). With `keep_choices` the pool runs
        the program that `router_choices` makes of this one, and `choices` tells what routers picked.
        Raises ModelFileError and PlanError as the workers found them, PlanError if the arena does not fit, WorkerLost.
        """
        runtime_files.sweep()
        program = router_choices.keep_choices(program) if keep_choices else program
        processes = processes or default_processes()
        max_rows = max(prompt_block, slots)
        max_out_rows = min(max_rows, max(slots, LOGITS_BYTES // (4 * program.vocabulary), 1))
        shape = ArenaShape(context, slots, max_rows, max_out_rows, processes, cache_type)
        name = f"pool{next(_pool_numbers)}"
        starts = _worker_starts(model_path, taps, target, shape, time_stages, workload, keep_choices)
        quiet = _QUIET_SECONDS * deadline_scale()
        group = WorkerGroup(name, starts, quiet)
        arena: Arena | None = None
        engram_process: EngramProcess | None = None
        try:
            if program.engram:
                engram_process = EngramProcess(f"{name}-engram", _engram_like(starts), engram or EngramOptions(), quiet)
            hellos = group.hellos(range(processes), progress)
            lowered = lowered_of(hellos[0])
            for rank, hello in hellos.items():
                if lowered_of(hello) != lowered:
                    raise WorkerLost(f"{group.describe(rank)} lowers the program differently from worker 0")
            arena = Arena.create(f"{runtime_files.owner_name()}-{name}", ArenaLayout(program, shape, lowered))
            group.compile(hellos[0]["kernels"], progress)
            if program.engram and engram_process:
                engram_process.attach(arena, lowered, len(program.engram.sites))
            group.attach(range(processes), arena, lowered, progress)
            pool = cls(group, arena, program, lowered, hellos[0]["labels"], engram_process)
        except BaseException:
            group.end(0.0)
            if engram_process is not None:
                engram_process.end(0.0)
            if arena is not None:
                arena.unlink()
                arena.close()
            raise
        try:
            pool._drill()
        except BaseException:
            pool.close()
            raise
        return pool

    @property
    def max_rows(self) -> int:
        return self._shape.max_rows

    @property
    def max_out_rows(self) -> int:
        return self._shape.max_out_rows

    @property
    def slots(self) -> int:
        return self._shape.slots

    @property
    def context(self) -> int:
        return self._shape.context

    def step(self, rows: StepRows) -> StepResult:
        """See StepExecutor. ValueError for rows that do not fit the pool (they would write outside their slot) and for
        a slot that cannot go on there."""
        begun = time.perf_counter()
        try:
            self._check(rows)
            with self._turn:
                if not self._lost and self._any_dead():
                    self._lose([], "between steps")
                self._refuse_if_lost()
                self._states.reach.begin(rows)
                self._record.write(rows)
                for name, buffer in self._inputs.items():
                    buffer[: len(rows.tokens)] = rows.inputs[name]
                self._run()
                if self._engram:
                    self._engram.check(self._control.step)
        finally:
            self._running = 0  # also if the announced step has not come so far
        seconds = time.perf_counter() - begun
        self._counts["steps"] += 1
        self._counts["rows"] += len(rows.tokens)
        self._seconds_last = seconds
        self._seconds_total += seconds
        wanted = len(rows.out_rows)
        hidden = None if self._hidden is None else self._hidden[:wanted]
        counts = {"step": len(rows.tokens), "out": wanted}
        reports = {name: buffer[: counts[kind]] for name, (buffer, kind) in self._reports.items()}
        return StepResult(self._logits[:wanted], self._greedy[:wanted], seconds, hidden, reports)

    def announce(self) -> None:
        self._running = self._control.step + 1

    def abort(self) -> None:
        running = self._running
        if running:
            self._control.abort(running)

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        self._check_slots(source, target)
        self._states.copy_prefix(source, target, positions)

    def continuable(self, slot: int) -> range:
        return self._states.reach.continuable(slot)

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        self._check_slots(slot)
        return self._states.snapshot(slot, positions, reach)

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int:
        return self._states.snapshot_bytes(positions, reach)

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None:
        self._check_slots(slot)
        if not 0 <= snapshot.positions <= self.context:
            raise ValueError(f"slot {slot} has no {snapshot.positions} positions")
        self._states.restore(slot, snapshot, positions)

    def _check_slots(self, *slots: int) -> None:
        for slot in slots:
            if not 0 <= slot < self.slots:
                raise ValueError(f"there is no slot {slot}, only 0 to {self.slots - 1}")

    def recover(self) -> None:
        with self._turn:
            step = self._control.step
            self._control.poison(step)
            deadline = time.monotonic() + self._stall_seconds
            for rank in self._ranks:
                self._await_leaving(rank, step, deadline)
            try:
                replaced = self._group.replace_dead(self._arena, self._lowered)
                if self._engram:
                    self._engram.replace_dead(self._arena, self._lowered)
            except (ModelFileError, PlanError) as error:
                raise WorkerLost(f"a worker could not be replaced: {error.message}", error.hint) from error
            self._counts["restarts"] += len(replaced)
            self._lost = ""
            self._drill()

    def statistics(self) -> dict[str, Any]:
        steps = self._counts["steps"]
        statistics = {
            "executor": "host",
            "processes": self._shape.processes,
            "pids": self._group.pids,
            **self._counts,
            "step_seconds_last": self._seconds_last,
            "step_seconds_mean": self._seconds_total / steps if steps else 0.0,
            "arena_bytes": sum(self._arena.layout.segments.values()),
            "lost": self._lost,
        }
        if self._engram:
            statistics["engram"] = self._engram.statistics()
        if not self._closed:
            statistics["sleeping"] = [self._control.sleeping(rank) for rank in self._ranks]
        return statistics

    def choices(self, rows: int) -> dict[int, NDArray[np.int32]]:
        """With `keep_choices`: for each routing layer the experts (rows, used) that it picked for the first `rows` rows
        of the last step; of the last layer for the first wanted rows. Views, valid until the next step."""
        names = {name: name.removeprefix("expert_ids:") for name in self._arena.layout.buffers}
        return {int(layer): self._arena.buffer(name)[:rows] for name, layer in names.items() if layer != name}

    def stage_shares(self) -> dict[str, tuple[float, float]]:
        """With `time_stages`: for each stage label the share of all steps' time that ranks spent in its kernel and
        waiting at its barrier. Labels are op names."""
        ticks = self.op_ticks()
        total = max(1, sum(kernel + barrier for kernel, barrier in ticks.values()))
        return {label: (kernel / total, barrier / total) for label, (kernel, barrier) in ticks.items()}

    def op_ticks(self) -> dict[str, tuple[int, int]]:
        """With `time_stages`: for each op name the time stamp counter's ticks that all ranks together have spent in its
        kernels and at its barriers since the start. Read it between steps."""
        ticks = self._arena.memory("ticks").view(np.int64).reshape(-1, self._lowered.stages, TICKS_PER_STAGE)
        sums: dict[str, tuple[int, int]] = {}
        for label, (kernel, barrier) in zip(self._labels, ticks.sum(axis=0)):
            before = sums.get(label, (0, 0))
            sums[label] = (before[0] + int(kernel), before[1] + int(barrier))
        return sums

    def close(self) -> None:
        self.abort()
        with self._turn:
            if self._closed:
                return
            self._closed, self._lost = True, "the pool is closed"
            atexit.unregister(self.close)
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

    def _check(self, rows: StepRows) -> None:
        """Rows come from this process, but a wrong one would overwrite another sequence's cache without a trace."""
        if len(rows.tokens) > self.max_rows or len(rows.out_rows) > self.max_out_rows:
            raise ValueError(f"{len(rows.tokens)} rows, {len(rows.out_rows)} wanted: more than the pool serves")
        limits = (
            ("token", rows.tokens, self._vocabulary),
            ("slot", rows.slots, self.slots),
            ("position", rows.positions, self.context),
            ("wanted row", rows.out_rows, len(rows.tokens)),
        )
        for what, values, limit in limits:
            if len(values) and not (values.min() >= 0 and values.max() < limit):
                raise ValueError(f"{what} outside 0..{limit - 1}: {values}")
        for name, buffer in self._inputs.items():
            if name not in rows.inputs or rows.inputs[name].shape != (len(rows.tokens), buffer.shape[1]):
                raise ValueError(f"input {name} is not {len(rows.tokens)} rows of {buffer.shape[1]}")

    def _refuse_if_lost(self) -> None:
        if self._lost:
            raise WorkerLost(self._lost, "the pool replaces its workers; send the request again")

    def _drill(self) -> None:
        """A step without rows: proves that all ranks wake up, meet at their barriers and report. An abort that was
        meant for the step before it only makes another one necessary."""
        while True:
            self._record.write_drill()
            with contextlib.suppress(StepAborted):
                return self._run()

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
            rank = statuses.index(Status.TIMED_OUT)
            self._lost = f"{self._group.describe(rank)} waited too long for worker {self._control.detail(rank)}"
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
            if self._any_dead():
                self._lose([], f"in step {step}")
            elif stops.found():
                self._lose(self._group.stopped(), f"in step {step}", engram=self._engram_stopped, seconds=stops.seconds)
            elif watch.stalled(sum(self._control.progress(rank)[1] for rank in self._ranks)):
                waits = self._engram is not None and self._engram.lags(step)  # then the ranks wait for its rows
                self._lose([] if waits else self._laggards(step), f"in step {step}", engram=waits)
            self._refuse_if_lost()

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
        return f" at {self._labels[stage]}" if stage < len(self._labels) else ""

    def _await_leaving(self, rank: int, step: int, deadline: float) -> None:
        """Waits until a survivor is out of the step, else kills it: nobody may still write when a new step starts."""
        while rank not in self._group.dead() and self._control.done(rank) != step:
            if time.monotonic() > deadline:
                self._group.kill(rank)
            time.sleep(0.001)


def _worker_starts(
    model_path: str,
    taps: tuple[int, ...],
    target: str,
    shape: ArenaShape,
    time_stages: bool,
    workload: str,
    keep_choices: bool,
) -> list[WorkerStart]:
    """One start for each rank, pinned in the topology's order. More ranks than cores share them and yield to wait."""
    order = Topology.read().within(affinity_mask()).pin_order()
    quota = cpu_quota()
    oversubscribed = shape.processes > min(len(order), len(order) if quota is None else quota)
    return [
        WorkerStart(
            rank=rank,
            generation=0,
            endpoint="",
            owner=runtime_files.owner_name(),
            parent=os.getpid(),
            model=model_path,
            taps=taps,
            target=target,
            shape=shape,
            cpu=order[rank % len(order)],
            spins=0 if oversubscribed else _BARRIER_SPINS,
            idle_ns=_CROWDED_IDLE_NS if oversubscribed else _IDLE_SPIN_NS,
            deadline_ns=int(2e9 * _STALL_SECONDS * deadline_scale()),
            time_stages=time_stages,
            workload=workload,
            keep_choices=keep_choices,
        )
        for rank in range(shape.processes)
    ]


def _engram_like(starts: list[WorkerStart]) -> WorkerStart:
    """What the engram I/O process has of a worker's start. It watches for steps as long as a worker only where it has
    a core to itself; elsewhere a worker would have to wait for its own core."""
    cores = len(affinity_mask())
    quota = cpu_quota()
    spare = len(starts) < (cores if quota is None else min(cores, quota))
    return starts[0] if spare else replace(starts[0], idle_ns=min(starts[0].idle_ns, _CROWDED_IDLE_NS))
