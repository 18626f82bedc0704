"""What a trace counts: the experts that routers pick over a text, and the table rows that a row cache would hold.

Owns the counting. Knows neither options nor how figures look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.architectures import build_program
from bloomery.runtime.engram_hash import histories
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.executor import StepRows
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.hot_list import model_name, routed_layers
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program
from bloomery.runtime.row_cache import RowCache
from bloomery.runtime.tokenizer import Tokenizer
from bloomery.runtime.worker_group import Progress

CACHE_SIZES: Final = 9
"""So many caches are compared, each twice as large as the one before."""

Counts = dict[int, NDArray[np.int64]]
"""How often each expert of each routing layer was picked."""


@dataclass(frozen=True)
class CacheRates:
    """Shares of table row look-ups that a cache of so many bytes holds, one token a step. `distinct` of `lookups` were
    of different rows: `ceiling` is what a cache of any size can hold of them."""

    rates: dict[int, float]
    lookups: int
    distinct: int

    @property
    def ceiling(self) -> float:
        return 1.0 - self.distinct / max(1, self.lookups)


class TraceModel:
    """An open model file: what has to be known of it before any step runs. Close it."""

    def __init__(self, path: str) -> None:
        """Raises ModelFileError, and BloomeryError for a model that routes nothing."""
        with ExitStack() as stack:
            self.path = path
            model = stack.enter_context(ModelFile.open(path))
            self.program: Program = build_program(model)
            self.name = model_name(model)
            self.routed = routed_layers(self.program)
            if not self.routed:
                raise BloomeryError(f"{path}: {model.architecture} has no routed experts", "trace a mixture of experts")
            self._tokenizer = Tokenizer.from_model_file(model)
            self._stack = stack.pop_all()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without BOS."""
        return self._tokenizer.encode(text, add_special=False, parse_special=False)

    @property
    def bos(self) -> int | None:
        """The token that sequences of this model begin with, if there is one."""
        return self._tokenizer.bos if self._tokenizer.add_bos else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class RouterTrace:
    """Worker processes that run the model and tell which experts they picked. Close it."""

    def __init__(self, model: TraceModel, *, threads: int, context: int, prompt_block: int, progress: Progress) -> None:
        self._model = model
        self._context = context
        self._pool = HostPool.start(
            model.path,
            model.program,
            context=context,
            slots=1,
            processes=threads,
            prompt_block=min(prompt_block, context),
            progress=progress,
            keep_choices=True,
        )
        self._block = min(self._pool.max_rows, self._pool.max_out_rows)  # the last layer routes wanted rows only

    def record(self, tokens: Sequence[int], done: Callable[[int], None]) -> Counts:
        """Picks over a text, cut into sequences of `context` tokens (BOS included, whose picks do not count).
        `done(n)`: so many tokens of it have run."""
        counts = {layer: np.zeros(experts, np.int64) for layer, experts in self._model.routed.items()}
        bos = self._model.bos
        lead = [] if bos is None else [bos]
        fresh = self._context - len(lead)
        for first in range(0, len(tokens), fresh):
            piece = tokens[first : first + fresh]
            sequence = np.array([*lead, *piece], np.int32)
            for start in range(0, len(sequence), self._block):
                part = sequence[start : start + self._block]
                places = np.arange(len(part), dtype=np.int32)
                self._pool.step(StepRows(part, np.zeros_like(places), places + np.int32(start), places))
                for layer, picked in self._pool.choices(len(part)).items():
                    kept = picked[max(0, len(lead) - start) :]
                    counts[layer] += np.bincount(kept.reshape(-1), minlength=len(counts[layer]))
                done(min(first + start + len(part), len(tokens)))
        return counts

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def cache_rates(
    program: Program, tokens: Sequence[int], sizes: Sequence[int], progress: Callable[[int, int], None]
) -> CacheRates:
    """Hit rates of row caches of `sizes` bytes over the table rows of a text, one token a step, all caches empty at its
    start. The caches are those of the engram I/O process; only the rows' bytes are left out."""
    assert program.engram is not None
    tables, engram = engram_tables(program), program.engram
    [row_bytes] = {table.row_bytes for table in tables}
    contexts = engram.contexts(histories(tokens, engram.longest))
    ids = [engram.rows_of_contexts(table.site, contexts).astype(np.int64) for table in tables]
    distinct = sum(len(np.unique(rows)) for rows in ids)
    rates = {}
    row = np.zeros((engram.buckets, row_bytes), np.uint8)
    for number, size in enumerate(sizes):
        cache = RowCache(row_bytes, size)
        for place in range(len(tokens)):
            missing = [rows[place][cache.take(site, rows[place], row)] for site, rows in enumerate(ids)]
            for site, rows in enumerate(missing):  # as a fetch does it: nothing is kept before all was looked up
                cache.put(site, rows, row[: len(rows)])
        rates[size] = cache.hits / max(1, cache.hits + cache.misses)
        progress(number + 1, len(sizes))
    return CacheRates(rates, len(tables) * ids[0].size, distinct)


def cache_sizes(program: Program, tokens: Sequence[int]) -> list[int]:
    """CACHE_SIZES sizes in bytes, powers of two, up to the first that has room for twice the rows of a text."""
    assert program.engram is not None
    engram, tables = program.engram, engram_tables(program)
    contexts = engram.contexts(histories(tokens, engram.longest))
    rows = sum(len(np.unique(engram.rows_of_contexts(table.site, contexts))) for table in tables)
    largest = 1 << (2 * rows * tables[0].row_bytes).bit_length()
    return [largest >> halving for halving in reversed(range(CACHE_SIZES))]
