"""The card executor as the coordinator sees it: a worker process on a card, and helpers for experts on the host.

Owns starting it and the CPU-expert workers that help it, what its steps mean (results, states, snapshots), and what is
lost with it. Steps are run by `step_runner`, processes are `worker_group`'s, how card and host meet is `hand_off`'s; of
CUDA it knows nothing.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime import runtime_files
from bloomery.runtime.arena import Arena, ArenaLayout, ArenaShape, Lowered
from bloomery.runtime.cache_types import CacheType
from bloomery.runtime.errors import StepAborted
from bloomery.runtime.executor import MOST_AHEAD, StateSnapshot, StepResult, StepRows, check_rows
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.host_pool import IDLE_SPIN_NS, hand_off_ns, quiet_seconds, stall_seconds, worker_starts
from bloomery.runtime.host_weights import check_room, lends
from bloomery.runtime.leg_times import LegWords, StepLegs
from bloomery.runtime.memory_terms import CARD_ROWS, LOGITS_BYTES, PROMPT_ROWS
from bloomery.runtime.program import Program
from bloomery.runtime.shallow_steps import shallow_reach
from bloomery.runtime.slot_states import SlotStates
from bloomery.runtime.split_program import host_part
from bloomery.runtime.stage_ticks import op_seconds
from bloomery.runtime.states import element_type
from bloomery.runtime.step_parts import step_parts
from bloomery.runtime.step_runner import StepRunner
from bloomery.runtime.weight_loading import own_facts
from bloomery.runtime.worker_group import Progress, WorkerGroup
from bloomery.runtime.worker_messages import CardStart, lowered_of

CARD_WORKLOAD = "bloomery.gpu_worker.model_workload:load"
EXPERT_WORKLOAD = "bloomery.cpu_experts.expert_workload:load"

log = logging.getLogger(__name__)
_pool_numbers = itertools.count()
T = TypeVar("T")
_LEAST_STREAMED: Final = 33
"""Rows of the shortest block that a card computes as one (`gpu_worker.prompt_lowering`)."""


class CardRows:
    """The RowStore of a card's worker: every call is an errand."""

    def __init__(self, group: WorkerGroup, rank: int, program: Program, cache_type: str) -> None:
        self._group, self._rank, self._states = group, rank, program.states
        self._dtypes = {name: element_type(state, cache_type) for name, state in program.states.items()}

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._dtypes[name]

    def width(self, name: str) -> int:
        return self._states[name].width

    def read(self, name: str, slot: int, logical: range) -> NDArray[Any]:
        answer = self._group.ask(self._rank, "read", name=name, slot=slot, first=logical.start, count=len(logical))
        return np.frombuffer(answer["rows"], self._dtypes[name]).reshape(len(logical), self._states[name].width)

    def write(self, name: str, slot: int, logical: range, rows: NDArray[Any]) -> None:
        self._group.ask(self._rank, "write", name=name, slot=slot, first=logical.start, rows=rows.tobytes())

    def copy(self, source: int, target: int, positions: int) -> None:
        self._group.ask(self._rank, "copy", source=source, target=target, positions=positions)


class CardPool:
    """A StepExecutor whose steps run on a card. Make one with `start`; close it, or it closes at exit.

    `step`, `recover` and the copies belong to one thread at a time; `abort`, `statistics` and `close` to any. What the
    slots held is lost with the card's worker: after `recover` they begin anew. With experts on the host a step runs in
    parts, one after the other: blocks of a prompt that the card computes alone, while the experts come to it, and
    groups of a few rows that are handed over.
    """

    def __init__(
        self,
        group: WorkerGroup,
        arena: Arena,
        program: Program,
        lowered: Lowered,
        labels: list[str],
        limits: tuple[int, int],
        stream_rows: int = 0,
        alone_rows: int = 0,
    ) -> None:
        """`labels` are those of the CPU-expert workers' stages, `limits` the greatest R and O of a step. Blocks have at
        least `stream_rows` rows; from `alone_rows` on the hosts have no part in them."""
        self._group, self._arena, self._program, self._lowered = group, arena, program, lowered
        self._shape = shape = arena.layout.shape
        self._max_rows, self._max_out_rows = limits
        assert not 0 < stream_rows < _LEAST_STREAMED, "the card hands over what is shorter"
        self.stream_rows, self._alone_rows = stream_rows, alone_rows
        self._group_rows = min(shape.max_rows, CARD_ROWS) if shape.processes else shape.max_rows
        self._least_block = stream_rows or self._max_rows + 1
        self._card = shape.processes
        store = CardRows(group, self._card, program, shape.cache_type)
        sizes = {"slots": shape.slots, "context": shape.context, "spare": shape.spare}
        self.shallow_reach = shallow_reach(program)
        self._states = SlotStates(program.states, store, **sizes, shallow_reach=self.shallow_reach)
        self._runner = StepRunner(group, arena, [*[labels] * shape.processes, ()], stall_seconds())
        view = program.hidden
        shared = [arena.buffer(program.logits), arena.buffer(program.argmax)[:, 0]]
        if view is not None:
            shared.append(arena.buffer(view.buffer)[:, view.start : view.end])
        self._shared = shared
        whole = self._group_rows >= self._max_rows
        self._results = shared if whole else [np.empty((self._max_out_rows, *a.shape[1:]), a.dtype) for a in shared]
        self._stepping = self._aborted = False
        self._facts: dict[str, Any] = {}
        self._labels, self._tick_rate = labels, 0.0
        self._legs: LegWords | None = None
        self._step_legs: list[StepLegs] = []
        atexit.register(self.close)

    @classmethod
    def start(
        cls,
        model_path: str,
        program: Program,
        *,
        context: int,
        slots: int,
        prompt_block: int = 512,
        cache_type: CacheType = "f16",
        card: int = 0,
        tiers: ExpertTiers | None = None,
        processes: int = 1,
        stream_rows: int = 0,
        stream_tiers: tuple[tuple[int, str], ...] = (),
        deterministic: bool = False,
        time_legs: bool = False,
        progress: Progress = lambda stage, done, total: None,
        workload: str = CARD_WORKLOAD,
        host_workload: str = EXPERT_WORKLOAD,
        own_weights: bool = False,
    ) -> CardPool:
        """Starts the workers and returns when they can run steps.

        `tiers` says which experts lie on the card (None: all); for the others there are so many CPU-expert
        `processes`. To blocks of at least `stream_rows` rows of a prompt these experts come (0: there are no blocks),
        but for those that `stream_tiers` leaves to the host in blocks of few rows; `deterministic` means no blocks, of
        a whole model either (all three: `CardStart`). With `time_legs` both sides tell how long they take
        (`leg_times`). With `own_weights` each of the CPU-expert workers copies its rows of the experts on the host to
        its own memory. `progress(stage, done, total)` is called with the stages "spawn", "weights" (bytes), "compile",
        "load", "upload" (bytes), "card kernels" and "lock" (bytes). `workload` and `host_workload` name what makes the
        card's executor and the hosts' stages. Raises ModelFileError and PlanError as the workers found them (no PyCUDA,
        driver, compiler or card; memory that does not suffice), PlanError if the arena does not fit or there is no
        memory for the copies, WorkerLost.
        """
        runtime_files.sweep()
        hand_offs = tiers.host_layers if tiers else ()
        max_rows = max(prompt_block, slots)
        max_out_rows = min(max_rows, max(slots, LOGITS_BYTES // (4 * program.vocabulary), 1))
        streams = 0 < stream_rows <= max_rows and bool(hand_offs)
        group, hosts = (min(max_rows, CARD_ROWS), processes) if hand_offs else (max_rows, 0)
        rows, stream_tiers = (max_rows, stream_tiers) if streams else (group, ())
        assert not stream_tiers or not stream_tiers[-1][1], "long blocks are the card's alone"
        assert not (deterministic and streams)
        alone_rows = next((least for least, there in stream_tiers if not there), 0)
        handed = max(group, min(alone_rows - 1, max_rows)) if alone_rows else group
        shape = ArenaShape(context, slots, rows, min(rows, max_out_rows), hosts, cache_type, 1, handed)
        name = f"cards{next(_pool_numbers)}"
        text = tiers.text() if tiers else ""
        starts = worker_starts(model_path, program, shape, time_legs, host_workload, hand_offs=hand_offs)
        own_weights = own_weights and bool(hand_offs)
        if own_weights and tiers:
            check_room(tiers.host_bytes)
        starts = [replace(start, tiers=text, own_weights=own_weights, lends=lends(program, hosts)) for start in starts]
        start = card_start(model_path, program, shape, workload, card, hand_offs, text, time_legs)
        start = replace(start, stream_rows=stream_rows if streams else 0, stream_tiers=stream_tiers)
        starts.append(replace(start, deterministic=deterministic))
        workers = WorkerGroup(name, starts, quiet_seconds())
        arena: Arena | None = None
        try:
            hellos = workers.hellos(range(shape.ranks), progress)
            lowered = lowered_of(hellos[0])
            labels = hellos[0]["labels"]
            arena = Arena.create(
                f"{runtime_files.owner_name()}-{name}", ArenaLayout(host_part(program, hand_offs), shape, lowered)
            )
            ready: dict[int, dict[str, Any]] = {}
            if hosts:
                workers.compile(range(hosts), hellos[0]["kernels"], progress)
                ready = workers.attach(range(hosts), arena, lowered, progress)
            facts = workers.attach([hosts], arena, lowered, progress)[hosts]["facts"]
            limits = (max_rows, max_out_rows)
            blocks = (stream_rows, alone_rows) if streams else (0, 0)
            pool = cls(workers, arena, program, lowered, labels, limits, *blocks)
            if facts.get("experts_from"):
                log.info("blocks of a prompt get the experts on the host %s", facts["experts_from"])
            if deterministic or max_rows < PROMPT_ROWS or (hosts and not streams):
                pool.shallow_reach = 0  # there are no blocks, and groups of rows are computed whole
            pool._facts = {**facts, "expert_share_on_card": tiers.share if tiers else 1.0}
            if own := own_facts(ready, [start.weight_nodes[start.rank] for start in starts[:hosts]]):
                pool._facts["weights"] = own
            if time_legs:
                pool._legs = LegWords(arena.memory("leg_times"), hand_offs)
                pool._tick_rate = ready[0]["tick_rate"] if hosts else 0.0
        except BaseException:
            workers.end(0.0)
            if arena is not None:
                arena.unlink()
                arena.close()
            raise
        try:
            pool._runner.drill()
        except BaseException:
            pool.close()
            raise
        return pool

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def group_rows(self) -> int:
        """Rows that the workers take at once: with experts on the host a step of more may run in groups."""
        return self._shape.max_rows

    @property
    def max_out_rows(self) -> int:
        return self._max_out_rows

    @property
    def slots(self) -> int:
        return self._shape.slots

    @property
    def context(self) -> int:
        return self._shape.context

    def step(self, rows: StepRows) -> StepResult:
        """See StepExecutor. ValueError for rows that do not fit the pool and for a slot that cannot go on there."""
        if not self._stepping:
            self.announce()
        seconds, done, results = 0.0, 0, self._results
        try:
            check_rows(rows, self, self._program.vocabulary)
            parts = list(_parts(rows, self._group_rows, self._least_block))
            if len(parts) == 1:
                results = self._shared
            for part, block in parts:
                alone = block and len(part.tokens) >= self._alone_rows
                if part.shallow and self._shape.processes and not alone:
                    part = replace(part, shallow=False)  # ranks of the host go through all layers
                if self._aborted:
                    raise StepAborted(f"aborted before row {part.positions[0]}")
                seconds += self._runner.step(part, partial(self._states.reach.begin, part), alone)
                if self._legs and (legs := self._legs.read(self._runner.step_number)):
                    each = replace(legs, card_ns=legs.card_ns // (1 + part.ahead))
                    self._step_legs += [each] * (1 + part.ahead)
                wanted = len(part.out_rows) * (1 + part.ahead)
                if results is not self._shared:
                    for kept, shared in zip(results, self._shared, strict=True):
                        kept[done : done + wanted] = shared[:wanted]
                done += wanted
        finally:
            with self._runner.announced():
                self._stepping = False
        logits, greedy, *hidden = (array[:done] for array in results)
        return StepResult(logits, greedy, seconds, hidden[0] if hidden else None)

    def most_ahead(self, rows: int) -> int:
        """As many as the arena has room for."""
        if rows > CARD_ROWS:
            return 0
        return max(0, min(MOST_AHEAD, self._shape.max_out_rows // rows - 1))

    def announce(self) -> None:
        self._stepping, self._aborted = True, False
        self._runner.announce()

    def abort(self) -> None:
        self._aborted = self._stepping
        self._runner.abort()

    def continuable(self, slot: int) -> range:
        return self._states.reach.continuable(slot)

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        with self._runner.errand():
            self._states.copy_prefix(source, target, positions)

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        with self._runner.errand():
            return self._states.snapshot(slot, positions, reach)

    def copy_pieces(self, source: int, target: int, positions: int) -> Generator[None, None, None]:
        """See InPieces."""
        return self._errands(self._states.copy_pieces(source, target, positions))

    def snapshot_pieces(self, slot: int, positions: int, reach: int = 0) -> Generator[None, None, StateSnapshot]:
        """See InPieces."""
        return self._errands(self._states.snapshot_pieces(slot, positions, reach))

    def restore_pieces(
        self, slot: int, snapshot: StateSnapshot, positions: int | None = None
    ) -> Generator[None, None, None]:
        """See InPieces."""
        return self._errands(self._states.restore_pieces(slot, snapshot, positions))

    def _errands(self, pieces: Generator[None, None, T]) -> Generator[None, None, T]:
        """The same pieces, each an errand of its own, so that steps may run between them."""
        while True:
            try:
                with self._runner.errand():
                    next(pieces)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            yield

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int:
        return self._states.snapshot_bytes(positions, reach)

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None:
        with self._runner.errand():
            self._states.restore(slot, snapshot, positions)

    def recover(self) -> None:
        self._runner.recover(self._replace_dead)

    def _replace_dead(self) -> int:
        replaced = self._group.replace_dead(self._arena, self._lowered)
        if self._card in replaced:
            self._states.reach.forget()
        return len(replaced)

    def statistics(self) -> dict[str, Any]:
        return {"executor": "card", "processes": self._shape.processes, **self._facts, **self._runner.statistics()}

    def step_legs(self) -> list[StepLegs]:
        """With `time_legs`: what the card told of every step since the start, or since this was last asked for."""
        legs, self._step_legs = self._step_legs, []
        return legs

    def op_seconds(self) -> dict[str, tuple[float, float]]:
        """With `time_legs`: for each op of the host's part the seconds that a rank has spent in its kernels and at its
        barriers since the start, the mean of all ranks; empty where no expert lies on the host."""
        return op_seconds(self._arena, self._labels, self._lowered.stages, self._shape.processes, self._tick_rate)

    def close(self) -> None:
        if self._runner.close():
            atexit.unregister(self.close)


def _parts(rows: StepRows, group: int, least_block: int) -> Iterator[tuple[StepRows, bool]]:
    """The step in parts, in order, and whether they are blocks; the wanted rows of each are counted from
    its own first."""
    if rows.ahead or len(rows.tokens) <= group:
        yield rows, False
        return
    for first, last, block in step_parts(rows.slots, rows.positions, group, least_block):
        part = slice(first, last)
        wanted = rows.out_rows[(rows.out_rows >= first) & (rows.out_rows < last)] - np.int32(first)
        yield StepRows(rows.tokens[part], rows.slots[part], rows.positions[part], wanted, shallow=rows.shallow), block


def card_start(
    model_path: str,
    program: Program,
    shape: ArenaShape,
    workload: str,
    card: int,
    hand_offs: tuple[int, ...],
    tiers: str,
    time_legs: bool,
) -> CardStart:
    """The start of the worker of a card: not pinned, the last of the ranks."""
    return CardStart(
        rank=shape.processes,
        generation=0,
        endpoint="",
        owner=runtime_files.owner_name(),
        parent=os.getpid(),
        model=model_path,
        shape=shape,
        cpu=-1,
        spins=0,
        idle_ns=IDLE_SPIN_NS,
        deadline_ns=int(1e9 * stall_seconds()),
        time_stages=time_legs,
        workload=workload,
        taps=program.taps,
        target=program.target,
        keep_choices=False,
        hand_offs=hand_offs,
        hand_off_ns=hand_off_ns(),
        card=card,
        tiers=tiers,
    )
