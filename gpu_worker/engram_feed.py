"""Rows of n-gram tables for the card's steps: numbered from the tokens, read from the file, put into the card's memory.

Owns which rows a step wants and the pinned memory on their way. `row_reader` reads those of many tokens, in a thread of
the feed's, table after table, while the layers before each table's op run; `quick_rows` those of a few and, for steps
that follow each other, `rows_ahead`. The history of a slot before the step is asked of whoever has the states. Programs
without engrams have no feed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from bloomery.gpu_worker.launches import MAX_ROWS, AheadAddresses
from bloomery.gpu_worker.rows_ahead import Mapped, RowsAhead
from bloomery.runtime.engram_hash import NO_TOKEN
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.executor import StepRows
from bloomery.runtime.program import Program
from bloomery.runtime.quick_rows import QuickRows
from bloomery.runtime.row_reader import RowReader, RowTable

History = Callable[[str, int, range], NDArray[np.int32]]
"""(state, slot, positions) -> the tokens at these positions."""


class EngramFeed:
    """`rows[weight]` (max_rows, bytes of all rows of a token): what was read for the rows of a step, in their order,
    once `need` has returned. One thread at a time."""

    def __init__(
        self,
        program: Program,
        max_rows: int,
        memory: Callable[[int, int], NDArray[np.uint8]] = lambda rows, nbytes: np.empty((rows, nbytes), np.uint8),
    ) -> None:
        """`memory(rows, bytes)` makes the arrays. Raises TableReadError naming a file that cannot be opened."""
        assert program.engram is not None
        self._hash, self._tables = program.engram, engram_tables(program)
        tensors = [program.weights[table.weight] for table in self._tables]
        self._reader = RowReader([RowTable.of(tensor) for tensor in tensors])
        buckets = self._hash.buckets
        sites = tuple(table.site for table in self._tables)
        self._quick = QuickRows(self._hash, sites, self._reader, MAX_ROWS)
        self._few = np.empty(self._quick.shape, np.uint8)
        self._places = self._few.ctypes.data + self._few.strides[0] * np.arange(len(sites))
        self._ahead: RowsAhead | None = None
        self._thread = ThreadPoolExecutor(1, "n-gram rows")
        self._arrived: dict[str, Future[None]] = {}
        self.rows = {table.weight: memory(max_rows, buckets * table.row_bytes) for table in self._tables}

    def get_ready(self, register: Callable[[int, int], Mapped]) -> None:
        """Compiles what has to be, and makes memory for steps ahead known to the card."""
        self._quick.compile()
        self._ahead = RowsAhead(self._quick, tuple(self.rows), register, self._thread)

    @property
    def ahead(self) -> AheadAddresses | None:
        """Where steps ahead find their rows."""
        return self._ahead.addresses if self._ahead else None

    @contextmanager
    def serving(self, step: StepRows, history: History) -> Iterator[None]:
        """Brings the rows of this step and of those ahead of it; see RowsAhead."""
        assert self._ahead is not None
        with self._ahead.serving(self._histories(step, history), step.ahead):
            yield
        self._reader.tidy()

    @contextmanager
    def bringing(self, step: StepRows, history: History) -> Iterator[None]:
        """Rows of a step for the launches inside, which are waited for inside, too."""
        self._begin(step, history)
        try:
            yield
        finally:
            wait(self._arrived.values())  # so that nobody writes to `rows` any more
        self._reader.tidy()

    def _begin(self, step: StepRows, history: History) -> None:
        """Those of a few tokens are there when this returns."""
        histories, count = self._histories(step, history), len(step.tokens)
        self._arrived = {name: Future() for name in self.rows}
        if count > MAX_ROWS:
            self._thread.submit(self._bring, histories)
            return
        self._quick.bring(histories, self._places)
        for table, read in zip(self._tables, self._few, strict=True):
            to = self.rows[table.weight][:count]
            to[:] = read[: count * self._hash.buckets].reshape(to.shape)
            self._arrived[table.weight].set_result(None)

    def need(self, table: str) -> NDArray[np.uint8]:
        """Waits for the rows of a table. Raises TableReadError if they cannot be read."""
        self._arrived[table].result()
        return self.rows[table]

    def _bring(self, histories: NDArray[np.int64]) -> None:
        arrived = list(self._arrived.values())
        wanted: list[tuple[NDArray[np.int32], NDArray[np.uint8]]] = []
        places: list[NDArray[np.intp]] = []

        def done(index: int) -> None:
            table, read = self._tables[index], wanted[index][1]
            to = self.rows[table.weight][: len(histories)]
            np.take(read, places[index], axis=0, out=to.reshape(-1, table.row_bytes))
            arrived[index].set_result(None)

        try:
            contexts = self._hash.contexts(histories)
            for table in self._tables:
                ids = self._hash.rows_of_contexts(table.site, contexts).reshape(-1)
                distinct, inverse = np.unique(ids, return_inverse=True)  # sorted, as the disk likes it
                wanted.append((distinct, np.empty((len(distinct), table.row_bytes), np.uint8)))
                places.append(inverse.reshape(-1))
            self._reader.fetch(wanted, done)
        except BaseException as error:
            for each in arrived:
                if not each.done():
                    each.set_exception(error)

    def close(self) -> None:
        if self._ahead:
            self._ahead.close()
        self._thread.shutdown()
        self._reader.close()
        self.rows.clear()

    def _histories(self, step: StepRows, history: History) -> NDArray[np.int64]:
        """(R, longest): each row's token and those before it, newest first, NO_TOKEN before the start."""
        longest, [state] = self._hash.longest, {table.tokens for table in self._tables}
        found = np.empty((len(step.tokens), longest), np.int64)
        for slot in np.unique(step.slots):
            mine = np.flatnonzero(step.slots == slot)
            first = int(step.positions[mine[0]])
            before = range(max(0, first - longest + 1), first)
            held = history(state, int(slot), before) if before else np.empty(0, np.int32)
            missing = np.full(longest - 1 - len(before), NO_TOKEN, np.int64)
            line = np.concatenate([missing, held, step.tokens[mine]]).astype(np.int64)
            found[mine] = np.lib.stride_tricks.sliding_window_view(line, longest)[:, ::-1]
        return found
