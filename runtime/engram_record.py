"""The words through which the engram I/O process tells of the rows that it brings, and where it puts them.

Owns offsets, their meaning and the ordering rules. Knows neither files (`row_reader.py`) nor who waits how.

Regions of the arena for a program with engrams: `engram` has the words below; for site number s `engram_rows:s` has
table rows as the file has them, one after the other, and `engram_places:s` (i32, R x buckets) says which of them is
wanted at each place of a step, so that a row which many tokens share is read once.

The process looks at the same STEP and step record as the workers (`step_record`). It stores rows and places of a site,
then the step number into the site's FLAG; whoever sees the number there (acquire) sees both. FLAG is also raised if the
rows cannot be read: then the message and FAILED = step number are stored before it, the step runs to its end with
whatever is there, and the coordinator throws its result away. A step that is aborted is fetched to its end all the
same; nobody reads what comes of it. SLEEPING is as a rank's, but the sleep is at a futex, the low half of STEP, and
ends after a second at the latest: a message would have to pass two more threads before the process runs.

The history that n-grams need is in the `tokens` state: the workers write the tokens of the running step into it while
the process reads older ones, which lie in other rows (`states`); those of the step itself it takes from the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.ops_deepseek4 import EngramRows, TableRows
from bloomery.runtime.program import Program
from bloomery.runtime.step_record import LINE

FLAG = 0
"""In line s, for site number s."""

# In the line after the sites'.
SLEEPING = 0
FAILED = 8

# In the next line: counters, all of this process's life.
COUNTERS = ("fetches", "rows", "rows_cached", "rows_from_disk", "nanoseconds", "nanoseconds_last", "cache_bytes")

MESSAGE_BYTES = 8 * LINE
"""After the counters: the length of the message, then its bytes in UTF-8."""


@dataclass(frozen=True)
class EngramTable:
    """The table of a site: its weight, the state with the token history, and bytes of a row."""

    site: int
    weight: str
    tokens: str
    row_bytes: int


def engram_tables(program: Program) -> tuple[EngramTable, ...]:
    """In the order of sites: those whose rows the program takes from a table by ids of EngramRows."""
    found = {op.ids.buffer: op for op in program.ops if isinstance(op, EngramRows)}
    tables = []
    for op in program.ops:
        if isinstance(op, TableRows) and op.ids.buffer in found:
            tensor, source = program.weights[op.table], found[op.ids.buffer]
            row_bytes = tensor.quant_type.row_bytes(tensor.shape[0])
            tables.append(EngramTable(source.site, op.table, source.tokens, row_bytes))
    return tuple(sorted(tables, key=lambda table: table.site))


def engram_bytes(sites: int) -> int:
    return (sites + 2) * LINE + MESSAGE_BYTES


class EngramWords:
    """Both sides' view of the words. `memory` is their region (uint8, engram_bytes).

    Stores are plain: on x86-64 aligned 8-byte stores are atomic and seen in program order."""

    def __init__(self, memory: NDArray[np.uint8], sites: int) -> None:
        assert memory.ctypes.data % LINE == 0
        self._sites = sites
        self._words = memory.data.cast("B").cast("q")
        self._state = sites * LINE // 8
        self._counters = (sites + 1) * LINE // 8
        self._length = (sites + 2) * LINE // 8
        self._text: NDArray[Any] = memory[(sites + 2) * LINE + 8 :]

    def raise_flag(self, site: int, step: int) -> None:
        self._words[site * LINE // 8 + FLAG // 8] = step

    def brought(self, step: int) -> bool:
        """Whether the rows of all sites are there for this step, or given up."""
        return all(self._words[site * LINE // 8 + FLAG // 8] == step for site in range(self._sites))

    @property
    def sleeping(self) -> bool:
        return self._words[self._state + SLEEPING // 8] != 0

    @sleeping.setter
    def sleeping(self, sleeping: bool) -> None:
        self._words[self._state + SLEEPING // 8] = sleeping

    def fail(self, step: int, message: str) -> None:
        """Before the flags of that step are raised."""
        text = message.encode()[: len(self._text)]
        self._text[: len(text)] = np.frombuffer(text, np.uint8)
        self._words[self._length] = len(text)
        self._words[self._state + FAILED // 8] = step

    def failure(self, step: int) -> str:
        """Why the rows of this step could not be read; "" if they could."""
        if self._words[self._state + FAILED // 8] != step:
            return ""
        return self._text[: self._words[self._length]].tobytes().decode(errors="replace")

    def count(self, *values: int) -> None:
        """Publishes the values of COUNTERS."""
        for place, value in enumerate(values):
            self._words[self._counters + place] = value

    def counts(self) -> dict[str, int]:
        return {name: self._words[self._counters + place] for place, name in enumerate(COUNTERS)}
