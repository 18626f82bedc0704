"""The host executor as the coordinator sees it: a pool of worker processes that run whole programs on the CPU.

Owns starting such a pool and what its steps mean: states, logits, snapshots. Steps are run by `step_runner`, processes
are `worker_group`'s, memory is `arena`'s; of kernels it knows nothing.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime import router_choices, runtime_files
from bloomery.runtime.arena import Arena, ArenaLayout, ArenaShape, Lowered
from bloomery.runtime.cache_support import check_cache_type
from bloomery.runtime.cache_types import CacheType
from bloomery.runtime.cpu_limits import affinity_mask, cpu_quota
from bloomery.runtime.engram_process import EngramProcess
from bloomery.runtime.errors import WorkerLost
from bloomery.runtime.executor import StateSnapshot, StepResult, StepRows, check_rows
from bloomery.runtime.host_weights import (
    HostWeights,
    HostWeightsPlace,
    WeightLayout,
    check_room,
    copied_bytes,
    copied_tensors,
    lends,
    private_pays,
)
from bloomery.runtime.memory_terms import LOGITS_BYTES
from bloomery.runtime.program import Program
from bloomery.runtime.shallow_steps import shallow_reach
from bloomery.runtime.slot_states import SlotStates
from bloomery.runtime.stage_ticks import op_seconds, op_ticks
from bloomery.runtime.step_runner import StepRunner
from bloomery.runtime.topology import Topology, default_processes
from bloomery.runtime.weight_loading import fill_weights, lock_weights, own_facts
from bloomery.runtime.worker_group import Progress, WorkerGroup
from bloomery.runtime.worker_messages import EngramOptions, WorkerStart, lowered_of

MODEL_WORKLOAD = "bloomery.cpu_experts.model_workload:load"
_STALL_SECONDS = 60.0
_QUIET_SECONDS = 300.0
_BARRIER_SPINS = 512
IDLE_SPIN_NS = 2_000_000
_CROWDED_IDLE_NS = 200_000  # yielding all the while

_pool_numbers = itertools.count()
log = logging.getLogger(__name__)


def deadline_scale() -> float:
    """BLOOMERY_DEADLINE_SCALE: factor on every deadline in wall time, for slow machines and for debuggers."""
    return float(os.environ.get("BLOOMERY_DEADLINE_SCALE", "1"))


def stall_seconds() -> float:
    """How long a step may go on without any progress before the worker at fault is killed."""
    return _STALL_SECONDS * deadline_scale()


def hand_off_ns() -> int:
    """How long card and host wait for each other inside a step: less than what the pool takes for a stall, so that the
    side which waits can still say for whom."""
    return int(0.5e9 * stall_seconds())


def quiet_seconds() -> float:
    """How long a worker that starts may be silent before it counts as hung."""
    return _QUIET_SECONDS * deadline_scale()


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
        weights: HostWeights | None = None,
        weight_facts: dict[str, Any] | None = None,
    ) -> None:
        self._group = group
        self._engram = engram
        self._weights = weights
        self._weight_facts = weight_facts
        self._arena = arena
        self._lowered = lowered
        self._labels, self._tick_rate = labels, 0.0
        self._shape = arena.layout.shape
        self._vocabulary = program.vocabulary
        states = {name: arena.state(name) for name in program.states}
        self.shallow_reach = shallow_reach(program)
        sizes = {"slots": self._shape.slots, "context": self._shape.context, "spare": self._shape.spare}
        self._states = SlotStates(program.states, states, **sizes, shallow_reach=self.shallow_reach)
        every = [labels] * self._shape.processes
        self._runner = StepRunner(group, arena, every, stall_seconds(), engram)
        self._logits = arena.buffer(program.logits)
        self._greedy = arena.buffer(program.argmax)[:, 0]
        view = program.hidden
        self._hidden = None if view is None else arena.buffer(view.buffer)[:, view.start : view.end]
        self._inputs = {name: arena.buffer(name) for name in program.inputs}
        self._reports = {name: (arena.buffer(name), program.buffers[name].rows) for name in program.reports}
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
        cache_type: CacheType = "f16",
        progress: Progress = lambda stage, done, total: None,
        time_stages: bool = False,
        workload: str = MODEL_WORKLOAD,
        engram: EngramOptions | None = None,
        keep_choices: bool = False,
        host_weights: HostWeightsPlace = "mmap",
        mlock: bool = False,
        yields: bool = True,
        topology: Topology | None = None,
    ) -> HostPool:
        """Starts the workers and returns when they can run steps.

        `processes` 0 means one for each core of the affinity mask and quota. `progress(stage, done, total)` is called
        with the stages "spawn", "compile", "weights" and "load". `workload` names what makes a worker's stages.
        `engram` is for the process that brings n-gram table rows, which only a program with engrams has. With
        `keep_choices` the pool runs the program that `router_choices` makes of this one, and `choices` tells what
        routers picked. With `host_weights` "copy" weights are read into shared memory, near the ranks that compute with
        them, or each worker reads what it computes with into its own memory, where only that has huge pages; "shared"
        and "private" ask for one of these. `mlock` keeps weights from being swapped. Workers that wait yield their
        cores, which is right for a pool whose users are in this session (`cpu_limits.session_groups`), or sleep for
        moments. `topology` stands for the machine's in tests.
        Raises ModelFileError and PlanError as the workers found them, PlanError if the arena does not fit, WorkerLost.
        """
        runtime_files.sweep()
        program = router_choices.keep_choices(program) if keep_choices else program
        check_cache_type(program, cache_type)
        processes = processes or default_processes()
        max_rows = max(prompt_block, slots)
        max_out_rows = min(max_rows, max(slots, LOGITS_BYTES // (4 * program.vocabulary), 1))
        shape = ArenaShape(context, slots, max_rows, max_out_rows, processes, cache_type)
        name = f"pool{next(_pool_numbers)}"
        starts = worker_starts(
            model_path,
            program,
            shape,
            time_stages,
            workload,
            keep_choices=keep_choices,
            yields=yields,
            topology=topology,
        )
        weights: HostWeights | None = None
        if host_weights == "copy":
            host_weights = "private" if private_pays(copied_bytes(program)) else "shared"
        if host_weights == "shared":
            weights = HostWeights.create(WeightLayout(copied_tensors(program), starts[0].weight_nodes))
            starts = [replace(start, weight_files=weights.files) for start in starts]
        elif host_weights == "private":
            check_room(copied_bytes(program))
            starts = [
                replace(start, own_weights=True, mlock=mlock, lends=lends(program, processes)) for start in starts
            ]
        quiet = quiet_seconds()
        group: WorkerGroup | None = None
        arena: Arena | None = None
        engram_process: EngramProcess | None = None
        try:
            if program.engram:
                engram_process = EngramProcess(f"{name}-engram", _engram_like(starts), engram or EngramOptions(), quiet)
            group = WorkerGroup(name, starts, quiet)
            if weights is not None:
                fill_weights(weights, progress)
            hellos = group.hellos(range(processes), progress)
            lowered = lowered_of(hellos[0])
            for rank, hello in hellos.items():
                if lowered_of(hello) != lowered:
                    raise WorkerLost(f"{group.describe(rank)} lowers the program differently from worker 0")
            arena = Arena.create(f"{runtime_files.owner_name()}-{name}", ArenaLayout(program, shape, lowered))
            group.compile(range(processes), hellos[0]["kernels"], progress)
            if program.engram and engram_process:
                engram_process.attach(arena, lowered, len(program.engram.sites))
            ready = group.attach(range(processes), arena, lowered, progress)
            own = own_facts(ready, starts[0].weight_nodes)
            if mlock and not own:
                lock_weights(program, weights)
            facts = weights.facts() if weights else own
            pool = cls(group, arena, program, lowered, hellos[0]["labels"], engram_process, weights, facts)
            pool._tick_rate = ready[0].get("tick_rate", 0.0)
        except BaseException:
            if group is not None:
                group.end(0.0)
            if engram_process is not None:
                engram_process.end(0.0)
            if arena is not None:
                arena.unlink()
                arena.close()
            if weights is not None:
                weights.close()
            raise
        try:
            pool._runner.drill()
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

        def begin() -> None:
            self._states.reach.begin(rows)
            for name, buffer in self._inputs.items():
                buffer[: len(rows.tokens)] = rows.inputs[name]

        with self._runner.announced():
            self._check(rows)
            seconds = self._runner.step(rows, begin)
        wanted = len(rows.out_rows)
        hidden = None if self._hidden is None else self._hidden[:wanted]
        counts = {"step": len(rows.tokens), "out": wanted}
        reports = {name: buffer[: counts[kind]] for name, (buffer, kind) in self._reports.items()}
        return StepResult(self._logits[:wanted], self._greedy[:wanted], seconds, hidden, reports)

    def most_ahead(self, rows: int) -> int:
        return 0  # its workers' steps follow each other within microseconds anyway

    def _check(self, rows: StepRows) -> None:
        check_rows(rows, self, self._vocabulary)
        for name, buffer in self._inputs.items():
            if name not in rows.inputs or rows.inputs[name].shape != (len(rows.tokens), buffer.shape[1]):
                raise ValueError(f"input {name} is not {len(rows.tokens)} rows of {buffer.shape[1]}")

    def announce(self) -> None:
        self._runner.announce()

    def abort(self) -> None:
        self._runner.abort()

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        self._check_slots(source, target)
        self._states.copy_prefix(source, target, positions)

    def continuable(self, slot: int) -> range:
        return self._states.reach.continuable(slot)

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        self._check_slots(slot)
        return self._states.snapshot(slot, positions, reach)

    def copy_pieces(self, source: int, target: int, positions: int) -> Generator[None, None, None]:
        """See InPieces."""
        return self._states.copy_pieces(source, target, positions)

    def snapshot_pieces(self, slot: int, positions: int, reach: int = 0) -> Generator[None, None, StateSnapshot]:
        """See InPieces."""
        return self._states.snapshot_pieces(slot, positions, reach)

    def restore_pieces(
        self, slot: int, snapshot: StateSnapshot, positions: int | None = None
    ) -> Generator[None, None, None]:
        """See InPieces."""
        return self._states.restore_pieces(slot, snapshot, positions)

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
        self._runner.recover(self._replace_dead)

    def _replace_dead(self) -> int:
        if self._weight_facts and self._weights is None:
            for rank in self._group.dead():
                what = "takes over" if self._group.leaves_rows(rank) else "reads again"
                log.info("%s died; its successor %s its part of the weights", self._group.describe(rank), what)
        replaced = self._group.replace_dead(self._arena, self._lowered)
        if self._engram:
            self._engram.replace_dead(self._arena, self._lowered)
        return len(replaced)

    def statistics(self) -> dict[str, Any]:
        statistics = {"executor": "host", "processes": self._shape.processes, **self._runner.statistics()}
        if self._weight_facts:
            statistics["weights"] = self._weight_facts
        if self._engram:
            statistics["engram"] = self._engram.statistics()
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
        return op_ticks(self._arena, self._labels, self._lowered.stages)

    def op_seconds(self) -> dict[str, tuple[float, float]]:
        """With `time_stages`: the same in seconds that a rank has spent, the mean of all ranks."""
        return op_seconds(self._arena, self._labels, self._lowered.stages, self._shape.processes, self._tick_rate)

    def close(self) -> None:
        if self._runner.close():
            if self._weights is not None:
                self._weights.close()
            atexit.unregister(self.close)


def worker_starts(
    model_path: str,
    program: Program,
    shape: ArenaShape,
    time_stages: bool,
    workload: str,
    keep_choices: bool = False,
    hand_offs: tuple[int, ...] = (),
    yields: bool = True,
    topology: Topology | None = None,
) -> list[WorkerStart]:
    """One start for each rank, pinned in the topology's order. More ranks than cores share them and yield to wait."""
    machine = Topology.read().within(affinity_mask())
    order = machine.pin_order()
    placed = topology or machine
    nodes = [placed.node_of(placed.pin_order()[rank % len(placed.pin_order())]) for rank in range(shape.processes)]
    quota = cpu_quota()
    room = min(float(len(order)), len(order) if quota is None else quota)
    oversubscribed = shape.processes > room
    if oversubscribed:
        log.warning(
            "%d worker processes take turns on %g cores%s, and each waits for the others at every stage"
            " -> give at most %d (--threads)",
            shape.processes,
            room,
            "" if quota is None else " (the control group's CPU quota)",
            max(1, int(room)),
        )
    return [
        WorkerStart(
            rank=rank,
            generation=0,
            endpoint="",
            owner=runtime_files.owner_name(),
            parent=os.getpid(),
            model=model_path,
            shape=shape,
            cpu=order[rank % len(order)],
            spins=0 if oversubscribed else _BARRIER_SPINS,
            idle_ns=_CROWDED_IDLE_NS if oversubscribed else IDLE_SPIN_NS,
            deadline_ns=int(2e9 * stall_seconds()),
            time_stages=time_stages,
            workload=workload,
            keep_choices=keep_choices,
            yields=yields,
            taps=program.taps,
            target=program.target,
            hand_offs=hand_offs,
            hand_off_ns=hand_off_ns(),
            weight_nodes=tuple(nodes),
        )
        for rank in range(shape.processes)
    ]


def _engram_like(starts: list[WorkerStart]) -> WorkerStart:
    """What the engram I/O process has of a worker's start. It watches for steps as long as a worker only where it has
    a core to itself; elsewhere a worker would have to wait for its own core, so it sleeps at once."""
    cores = len(affinity_mask())
    quota = cpu_quota()
    spare = len(starts) < (cores if quota is None else min(cores, quota))
    return starts[0] if spare else replace(starts[0], idle_ns=0)
