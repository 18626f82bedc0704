"""The card executor: a StepExecutor that runs whole programs on one card, one captured graph a row count.

Owns kernels' modules, graphs, the step record and the coordinator's side of a step. Memory is `card_memory`'s, what is
launched `lowering`'s, the driver `driver`'s.

A step's rows run in order: neighbours of one slot, if they are many, as a prompt block (`prompt_lowering`), all others
in groups of up to MAX_ROWS by the kernels of a decode step. Every kernel's result for a row depends on that row's
sequence alone, so results do not depend on how rows are grouped; but a prompt block rounds otherwise than a decode
step. With `deterministic` there are no prompt blocks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from bloomery.gpu_worker.card_memory import CardMemory, CardStore
from bloomery.gpu_worker.driver import Card, CardError, Graph, MappedMemory
from bloomery.gpu_worker.expert_stream import ExpertStream
from bloomery.gpu_worker.hand_off_lowering import HostSide
from bloomery.gpu_worker.kernel_functions import Kernels
from bloomery.gpu_worker.launches import MAX_ROWS, RECORD_LINES, KernelName, Launch, fill_record
from bloomery.gpu_worker.lowering import lower
from bloomery.gpu_worker.prompt_lowering import LEAST_ROWS, lower_all, lower_prompt
from bloomery.gpu_worker.results import Results
from bloomery.gpu_worker.step_ahead import ahead_launches
from bloomery.runtime.arena import LEAST_SPARE
from bloomery.runtime.errors import BloomeryError, StepAborted, WorkerLost
from bloomery.runtime.executor import MOST_AHEAD, StateSnapshot, StepResult, StepRows, check_rows
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.ops_deepseek4 import TableRows
from bloomery.runtime.program import Program, View
from bloomery.runtime.shallow_steps import shallow_program, shallow_reach
from bloomery.runtime.slot_states import SlotStates
from bloomery.runtime.split_program import without_hand_offs
from bloomery.runtime.step_parts import step_parts

if TYPE_CHECKING:
    from bloomery.gpu_worker.engram_feed import EngramFeed

LOGITS_BYTES: Final = 64 << 20
_BLOCKS_KEPT: Final = 16
"""Launch lists of prompt blocks that are kept, one for each number of rows."""
_AHEAD: Final = 4
"""Groups of a step that may be under way at once: an abort takes effect after so many."""


@dataclass
class _Prepared:
    """What runs a group of a given number of rows and wanted rows: launches, and the graph of them once captured."""

    launches: list[Launch]
    graph: Graph | None = None


class CardExecutor:
    """A StepExecutor on one card. `step`, `copy_prefix` and `recover` belong to one thread at a time, `abort` and
    `statistics` to any. With BLOOMERY_CARD_SYNC=1 every launch is waited for, so that a failure names its op."""

    def __init__(
        self,
        program: Program,
        *,
        context: int,
        slots: int = 1,
        prompt_block: int = 2048,
        deterministic: bool = False,
        cache_type: Literal["f32", "f16"] = "f16",
        card: int = 0,
        graphs: bool = True,
        results: Results | None = None,
        host: HostSide | None = None,
        is_cut: Callable[[], bool] = lambda: False,
        on_end: Callable[[int], None] | None = None,
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        """PlanError if there is no card, the program has an op or type without a kernel, or memory does not suffice.
        `results` is memory of others that results go to, `host` the host's part where the program has hand-offs,
        `is_cut` says before a part whether the step is to end. `on_end` is told how many nanoseconds each step took the
        card, from its first copy or launch to the end of the last."""
        self.program = program
        self._context, self._slots = context, slots
        self._max_rows = max(prompt_block, slots)
        self._max_out_rows = min(self._max_rows, max(slots, LOGITS_BYTES // (4 * program.vocabulary), 1))
        self._sync = os.environ.get("BLOOMERY_CARD_SYNC", "") == "1"
        self._graphs = graphs and not self._sync
        self._prepared: dict[tuple[int, int, bool], _Prepared] = {}
        self._blocks: dict[tuple[int, int, bool], list[Launch]] = {}
        none = self._max_rows + 1
        least = (host.stream_rows or none) if host else LEAST_ROWS
        self._least_block = none if deterministic else max(LEAST_ROWS, least)
        self._lock = threading.Lock()
        self._running = self._aborted = self._closed = False
        self._lost = ""
        self._is_cut, self._on_end, self._results, self._host = is_cut, on_end, results, host
        self._experts: ExpertStream | None = None
        self._tables = {op.name: op.table for op in program.ops if isinstance(op, TableRows)}
        spare = max(self._max_rows, LEAST_SPARE)
        self._counts = {"steps": 0, "rows": 0, "aborted": 0}
        self._seconds = 0.0
        self.card = Card(card)
        try:
            with self.card.current("loading the model"):
                self._start(slots, spare, cache_type, progress)
            self._store = CardStore(self.card, self.memory)
            blocks = self._least_block <= self._max_rows
            self.shallow_reach = shallow_reach(without_hand_offs(program)) if blocks else 0
            sizes = {"slots": slots, "context": context, "spare": spare}
            self._states = SlotStates(program.states, self._store, **sizes, shallow_reach=self.shallow_reach)
        except BaseException:
            if self._experts:
                with contextlib.suppress(Exception), self.card.current("closing"):
                    self._experts.close()
            self.card.close()
            raise

    def _start(self, slots: int, spare: int, cache_type: str, progress: Callable[[str, int, int], None]) -> None:
        cuda, program = self.card.cuda, self.program
        self._register(self._results or self._own_results())
        blocks = self._max_rows >= self._least_block
        self.memory = CardMemory(
            self.card,
            program,
            context=self._context,
            slots=slots,
            spare=spare,
            tiers=self._host.tiers if self._host else None,
            prompt_rows=self._max_rows if blocks else MAX_ROWS,
            out_rows=self._max_out_rows if blocks else MAX_ROWS,
            cache_type=cache_type,
            progress=progress,
        )
        if self._host:
            self.memory.meet_host(partial(self._host.addresses, self._on_card))
            if blocks:
                there = self._host.there or ((0, ExpertTiers.everything(program)),)
                self._experts = ExpertStream(self.card, program, self.memory, self._host.tiers, there)
        self._feed: EngramFeed | None = None
        if program.engram:
            from bloomery.gpu_worker.engram_feed import EngramFeed  # brings Numba: not for programs without tables

            self._feed = EngramFeed(program, self._max_rows, self._pinned)
            self._feed.get_ready(partial(MappedMemory, self.card))
        rows = self._max_rows if blocks else 0
        of_blocks = self._experts.kind(rows).context if self._experts else self.memory
        where = self._feed.ahead if self._feed else None
        launches = lower_all(program, self.memory, rows, self._max_out_rows, of_blocks, where)
        for kind in self._experts.handed if self._experts else ():
            launches += lower_prompt(program, kind.context, rows, self._max_out_rows)
        self.memory.settle()
        self._kernels = Kernels(self.card)
        names = {launch.kernel for launch in launches}
        for name in [name for name in names if name.function.startswith("matmul_")]:
            names |= {KernelName(name.file, f"matmul_{n}", name.quant_type) for n in (1, 2, 4, 8)}
        self._kernels.load(names, progress)
        if self._experts:
            self._experts.connect(progress)
        groups = -(-self._max_rows // MAX_ROWS) + self._max_rows // self._least_block
        self._records = cuda.pagelocked_empty((groups, RECORD_LINES, MAX_ROWS), np.int32)
        self._block_record = cuda.pagelocked_empty((RECORD_LINES, self._max_rows if blocks else MAX_ROWS), np.int32)
        self._events = [cuda.Event(cuda.event_flags.DISABLE_TIMING) for _ in range(_AHEAD)]

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def max_out_rows(self) -> int:
        return self._max_out_rows

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def context(self) -> int:
        return self._context

    def step(self, rows: StepRows) -> StepResult:
        """See StepExecutor. ValueError for rows that do not fit."""
        begun = time.perf_counter()
        if not self._running:
            self.announce()
        try:
            check_rows(rows, self, self.program.vocabulary)
            self.recover()
            if self._results is None:  # else the pool knows where slots can go on
                self._states.reach.begin(rows)
            with self.card.current(f"a step of {len(rows.tokens)} rows; BLOOMERY_CARD_SYNC=1 finds the op"):
                if self._on_end is None:
                    self._run(rows)
                else:
                    self._run_timed(rows, self._on_end)
        except WorkerLost as error:
            self._lost = error.message
            raise
        finally:
            with self._lock:
                self._running = False
        seconds = time.perf_counter() - begun
        self._counts["steps"] += 1
        self._counts["rows"] += len(rows.tokens)
        self._seconds += seconds
        wanted = len(rows.out_rows) * (1 + rows.ahead)
        hidden = None if self._hidden is None else self._hidden[:wanted]
        return StepResult(self._logits[:wanted], self._greedy[:wanted], seconds, hidden)

    def announce(self) -> None:
        with self._lock:
            self._running, self._aborted = True, False

    def abort(self) -> None:
        with self._lock:
            self._aborted = self._running

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        self._states.copy_prefix(source, target, positions)

    def continuable(self, slot: int) -> range:
        return self._states.reach.continuable(slot)

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        return self._states.snapshot(slot, positions, reach)

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int:
        return self._states.snapshot_bytes(positions, reach)

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None:
        self._states.restore(slot, snapshot, positions)

    @property
    def store(self) -> CardStore:
        """The rows of the states."""
        return self._store

    def recover(self) -> None:
        """A lost context does not come back in the same process. Raises WorkerLost if it is lost."""
        if self._lost:
            raise WorkerLost(self._lost, "start the card executor anew")

    def statistics(self) -> dict[str, Any]:
        return {
            "executor": "card",
            "card": self.card.name,
            "architecture": self.card.architecture,
            **self._counts,
            "step_seconds_mean": self._seconds / self._counts["steps"] if self._counts["steps"] else 0.0,
            "graph_nodes": {f"{r}x{o}{'+' * a}": p.graph.nodes for (r, o, a), p in self._prepared.items() if p.graph},
            "card_bytes": sum(self.memory.sizes.values()),
            "experts_from": self.experts_from,
            "lost": self._lost,
        }

    @property
    def experts_from(self) -> str:
        """How experts on the host come to prompt blocks; "" where none do."""
        return self._experts.source if self._experts else ""

    @property
    def experts_brought(self) -> tuple[int, int]:
        """Of the last step: bytes of experts that came from the host, and nanoseconds from the first to the last."""
        return (self._experts.nbytes, self._experts.ns) if self._experts else (0, 0)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception), self.card.current("closing"):
            closing = [*(prepared.graph for prepared in self._prepared.values()), self._feed, self._experts]
            ends = [each.close for each in closing if each]
            for end in (*ends, self.memory.free, *(mapped.close for mapped in self._mapped)):
                with contextlib.suppress(Exception):  # of one, so that the others come to an end
                    end()
            del self._records, self._block_record, self._logits, self._greedy, self._hidden, self._events, self._kernels
        self.card.close()

    # ---- one step
    def launches(self, rows: int, out_rows: int) -> list[Launch]:
        """What a group of so many rows launches."""
        return self._prepare(rows, out_rows).launches

    def _prepare(self, rows: int, out_rows: int, advance: bool = False) -> _Prepared:
        key = (rows, out_rows, advance)
        if key not in self._prepared:
            assert not advance or rows == out_rows
            where = self._feed.ahead if self._feed else None
            make = ahead_launches(self.program, self.memory, rows, where) if advance else None
            self._prepared[key] = _Prepared(make or lower(self.program, self.memory, rows, out_rows))
        return self._prepared[key]

    def most_ahead(self, rows: int) -> int:
        if rows > MAX_ROWS:
            return 0
        return max(0, min(MOST_AHEAD, self._max_out_rows // rows - 1))

    def _run_ahead(self, rows: StepRows, begun: Any) -> None:
        """Steps on each other's greedy tokens. The record goes to the card once, and its last launch of each step moves
        it on; the copies of a step's results are on the stream before the next step writes them."""
        count, record = len(rows.tokens), self._records[0]
        fill_record(record, rows.tokens, rows.slots, rows.positions, rows.out_rows, rows.ahead)
        prepared = self._prepare(count, count, advance=True)
        with self._feed.serving(rows, self._history) if self._feed else contextlib.nullcontext():
            if begun:
                begun.record(self.card.stream)
            self.card.cuda.memcpy_htod_async(self.memory.step.tokens, record, self.card.stream)
            for number in range(rows.ahead + 1):
                self._look_up(number, "step", number)
                self._launch(prepared)
                self._fetch(number * count, count)
                self._events[number % _AHEAD].record(self.card.stream)
            self.card.stream.synchronize()

    def _history(self, state: str, slot: int, before: range) -> NDArray[np.int32]:
        """The tokens at these positions."""
        return self.memory.read(state, slot, before)[:, 0]

    def _copy_brought(self, part: slice, tables: Iterable[str]) -> None:
        """Sends rows of n-gram tables on their way to the card, once they are there."""
        for table in tables:
            assert self._feed is not None
            try:
                brought = self._feed.need(table)
            except BloomeryError:
                self._settle()
                raise
            self.card.cuda.memcpy_htod_async(self.memory.brought(table), brought[part], self.card.stream)

    def _look_up(self, number: int, what: str, which: int) -> None:
        """Before part `number`: waits until few are under way, and raises StepAborted if the step is to end."""
        if number >= _AHEAD:
            self._events[number % _AHEAD].synchronize()
        self._end_if_cut(f"{what} {which}")

    def _settle(self) -> None:
        """Returns with nothing under way."""
        if self._experts:
            self._experts.end()
        self.card.stream.synchronize()

    def _end_if_cut(self, before: str) -> None:
        """StepAborted, with nothing under way, if the step is to end."""
        if self._is_cut() or self._aborted:
            self._settle()
            self._counts["aborted"] += 1
            raise StepAborted(f"aborted before {before}")

    def _run(self, rows: StepRows, begun: Any = None) -> None:
        """`begun` is recorded before the first copy or launch: what the host does before it is not the card's time."""
        if rows.ahead:
            self._run_ahead(rows, begun)
            return
        if self._experts:
            self._experts.nbytes = self._experts.ns = 0
        with self._feed.bringing(rows, self._history) if self._feed else contextlib.nullcontext():
            self._run_parts(rows, begun)

    def _run_parts(self, rows: StepRows, begun: Any) -> None:
        cuda, stream = self.card.cuda, self.card.stream
        done = groups = 0
        if begun:
            begun.record(stream)
        for number, (first, last, block) in enumerate(
            step_parts(rows.slots, rows.positions, MAX_ROWS, self._least_block)
        ):
            self._look_up(number, "row", first)
            part = slice(first, last)
            wanted = rows.out_rows[(rows.out_rows >= first) & (rows.out_rows < last)] - first
            if block:
                stream.synchronize()  # an earlier block's record may still be on its way
                record: NDArray[np.int32] = self._block_record
            else:
                record, groups = self._records[groups], groups + 1
            fill_record(record, rows.tokens[part], rows.slots[part], rows.positions[part], wanted)
            place = self.memory.prompt_step if block else self.memory.step
            cuda.memcpy_htod_async(place.tokens, record, stream)
            if block:
                self._launch_block(part, len(wanted), rows.shallow)
            else:
                self._copy_brought(part, self._tables.values())
                self._launch(self._prepare(last - first, len(wanted)))
            if len(wanted):
                self._fetch(done, len(wanted))
                done += len(wanted)
            self._events[number % _AHEAD].record(stream)
        stream.synchronize()

    def _run_timed(self, rows: StepRows, on_end: Callable[[int], None]) -> None:
        begun, ended = self.card.cuda.Event(), self.card.cuda.Event()
        self._run(rows, begun)
        ended.record(self.card.stream)
        ended.synchronize()
        on_end(int(1e6 * ended.time_since(begun)))

    def _block(self, rows: int, out_rows: int, shallow: bool = False) -> list[Launch]:
        """What a prompt block of so many rows launches. One that hands rows over is computed whole."""
        launches = self._blocks.pop((rows, out_rows, shallow), None)
        if launches is None:
            kind = self._experts.kind(rows) if self._experts else None
            alone = kind is None or kind.alone
            program = without_hand_offs(self.program) if alone else self.program
            if shallow and alone and self.shallow_reach:
                program = shallow_program(program)
            launches = lower_prompt(program, kind.context if kind else self.memory, rows, out_rows)
        self._blocks[rows, out_rows, shallow] = launches
        while len(self._blocks) > _BLOCKS_KEPT:
            del self._blocks[next(iter(self._blocks))]
        return launches

    def _fetch(self, first: int, count: int) -> None:
        """Sends a part's results on their way to host memory, where rows may lie apart."""
        logits, argmax = View(self.program.logits, 0, self.program.vocabulary), View(self.program.argmax, 0, 1)
        pairs: list[tuple[NDArray[Any], View]] = [(self._logits, logits), (self._greedy[:, None], argmax)]
        if self._hidden is not None and self.program.hidden is not None:
            pairs.append((self._hidden, self.program.hidden))
        for target, view in pairs:
            address, stride = self.memory.view(view)
            for row in range(count):
                self.card.cuda.memcpy_dtoh_async(target[first + row], address + 4 * stride * row, self.card.stream)

    def _pinned(self, rows: int, nbytes: int) -> NDArray[np.uint8]:
        made: NDArray[np.uint8] = self.card.cuda.pagelocked_empty((rows, nbytes), np.uint8)
        return made

    def _own_results(self) -> Results:
        cuda, rows, view = self.card.cuda, self._max_out_rows, self.program.hidden
        logits = cuda.pagelocked_empty((rows, self.program.vocabulary), np.float32)
        hidden = cuda.pagelocked_empty((rows, view.elements), np.float32) if view else None
        return Results(logits, cuda.pagelocked_empty(rows, np.int32), hidden)

    def _register(self, results: Results) -> None:
        self._logits, self._greedy, self._hidden = results.logits, results.greedy, results.hidden
        self._mapped = [MappedMemory(self.card, *area) for area in results.areas]

    def _on_card(self, address: int) -> int:
        """The card's address of registered memory of this process."""
        return next(mapped.address_of(address) for mapped in self._mapped if mapped.holds(address))

    def _launch(self, prepared: _Prepared) -> None:
        """Replays the group's graph. The first time it runs eagerly, waiting for each launch, and is then captured."""
        if prepared.graph is not None:
            prepared.graph.launch()
            return
        self._launch_eagerly(prepared.launches, wait=self._sync or self._graphs)
        if self._graphs:
            graph = Graph(self.card)
            with graph.capture(), self._kernels.beside():
                self._launch_eagerly(prepared.launches, wait=False)
            prepared.graph = graph

    def _launch_block(self, part_rows: slice, out_rows: int, shallow: bool) -> None:
        """A prompt block. Where experts come from the host their layers are boundaries at which a step can end. Rows of
        an n-gram table are waited for where its op takes them."""
        rows = part_rows.stop - part_rows.start
        launches = self._block(rows, out_rows, shallow)
        bring = partial(self._copy_brought, part_rows)
        if self._experts is None:
            self._launch_eagerly(launches, wait=self._sync, bring=bring)
            return
        kind = self._experts.kind(rows)
        parts = [(label, list(part)) for label, part in groupby(launches, lambda launch: launch.label)]
        brought = [label for label, _ in parts if label in kind.ways]
        self._experts.begin(kind, brought)
        for label, part in parts:
            if label not in kind.ways:
                self._launch_eagerly(part, wait=self._sync, bring=bring)
                continue
            number = brought.index(label)
            self._end_if_cut(f"op {label}")
            self._experts.before(number, wait=self._sync)
            self._launch_eagerly(part, wait=self._sync)
            self._experts.after(number)
        self._experts.end()

    def _launch_eagerly(
        self, launches: list[Launch], wait: bool, bring: Callable[[Iterable[str]], None] = lambda tables: None
    ) -> None:
        """`bring` is asked for the tables that an op takes rows of, before it."""
        for launch in launches:
            if launch.label in self._tables:
                bring((self._tables[launch.label],))
            self._kernels.launch(launch)
            if wait:
                try:
                    self.card.stream.synchronize()
                except self.card.cuda.Error as error:
                    raise CardError(
                        f"{self.card.name}: {error} (in {launch.kernel} of op {launch.label})", "start it anew"
                    ) from error
