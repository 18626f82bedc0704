"""The rows of one step: token histories from the record and the arena, row ids, rows into the arena.

Owns which rows a step wants and where they go. Those of one token, which most steps have, are brought by compiled code
(`quick_rows`). Knows neither flags nor processes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.arena import Arena
from bloomery.runtime.engram_hash import NO_TOKEN
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.program import Program
from bloomery.runtime.quick_rows import QuickRows
from bloomery.runtime.row_reader import RowReader
from bloomery.runtime.step_record import StepRecord


class StepFetch:
    """`bring` puts the rows of the step that the record describes into the arena."""

    def __init__(self, program: Program, arena: Arena, reader: RowReader) -> None:
        assert program.engram is not None
        self._hash, self._reader = program.engram, reader
        self._tables = engram_tables(program)
        self._record = StepRecord(arena.memory("record"), arena.layout.shape.max_rows)
        [tokens] = {table.tokens for table in self._tables}
        self._held: NDArray[np.int32] = arena.state(tokens)[:, :, 0]
        self._rows = [arena.memory(f"engram_rows:{table.site}").reshape(-1, table.row_bytes) for table in self._tables]
        self._places = [arena.memory(f"engram_places:{table.site}").view(np.int32) for table in self._tables]
        self._back = np.arange(self._hash.longest)
        self._straight = np.arange(self._hash.buckets, dtype=np.int32)
        self._quick: QuickRows | None = None
        if not reader.direct:
            self._quick = QuickRows(self._hash, tuple(table.site for table in self._tables), reader, 1)
            self._quick.compile()
        self._outs = np.array([rows.ctypes.data for rows in self._rows], np.int64)

    def bring(self, done: Callable[[int], None]) -> None:
        """Calls done(site) once the rows and places of a site are there. Raises what RowReader.fetch raises."""
        histories = self._histories()
        if self._quick and len(histories) == 1:
            self._quick.bring(histories, self._outs)
            for number, places in enumerate(self._places):
                places[: self._hash.buckets] = self._straight
                done(number)
            return
        contexts = self._hash.contexts(histories)
        wanted = []
        for table, rows, places in zip(self._tables, self._rows, self._places, strict=True):
            ids = self._hash.rows_of_contexts(table.site, contexts).reshape(-1)
            if len(contexts) == 1:  # heads have rows of their own: no two are equal
                places[: len(ids)] = self._straight
            else:
                ids, inverse = np.unique(ids, return_inverse=True)  # sorted, as the disk likes it
                places[: len(inverse)] = inverse
            wanted.append((ids, rows[: len(ids)]))
        self._reader.fetch(wanted, done)

    def _histories(self) -> NDArray[np.int64]:
        """(R, longest): each row's token and those before it, newest first, NO_TOKEN before the start."""
        tokens, slots, positions = self._record.read()
        if len(tokens) == 1:
            places = positions[0] - self._back
            history = self._held[slots[0], places % self._held.shape[1]]
            history[0] = tokens[0]
            return np.where(places < 0, NO_TOKEN, history).astype(np.int64)[None]
        used, which = np.unique(slots, return_inverse=True)
        held = self._held[used]  # a copy, into which the step's own tokens go as the workers write them
        held[which, positions % held.shape[1]] = tokens
        places = positions[:, None] - self._back
        return np.where(places < 0, NO_TOKEN, held[which[:, None], places % held.shape[1]]).astype(np.int64)
