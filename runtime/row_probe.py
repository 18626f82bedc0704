"""How fast single rows of a large file can be had: the ways of reading them compared, from the disk and from memory.

Owns what is measured and how honest it is: every round reads fresh random rows, each way in turn, after the file's
pages were dropped, and every byte is compared with a second reading. Does not know what the rows are for.
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.disk_probe import cached_share
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.row_cache import WAYS
from bloomery.runtime.row_reader import RowReader, RowTable

ROWS: Final = 48
ROUNDS: Final = 15
BULK_ROWS: Final = 8192
ADVISED: Final = "advice on all rows, then pread"
READER: Final = "row reader"
_CACHE_BYTES: Final = 16 << 20
_SAMPLE_BYTES: Final = 1 << 30  # of the file's beginning; looking through all of a large one would take seconds

Rows = NDArray[np.uint8]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class WayTimes:
    """Median seconds of a fetch of all rows at once; `least` and `most` of all rounds."""

    way: str
    cold: float
    cold_least: float
    cold_most: float
    warm: float
    warm_least: float
    warm_most: float


@dataclass(frozen=True)
class RowReport:
    """`row_cache_seconds`: a fetch of rows that all are in the reader's own cache; nan if they never were.
    `bulk_cold` and `bulk_warm`: rows a
    second of `bulk_rows` random rows, sorted, from the disk and from the page cache. `cached_share`: of the file's
    first GiB, at worst, after its pages were dropped. `written_share`: of the file, on the disk; holes never touch it.
    `load`: of the machine, over the last minute."""

    path: str
    nbytes: int
    row_bytes: int
    rows: int
    rounds: int
    ways: tuple[WayTimes, ...]
    row_cache_seconds: float
    bulk_rows: int
    bulk_cold: float
    bulk_warm: float
    cached_share: float
    written_share: float
    load: float

    def way(self, name: str) -> WayTimes:
        return next(way for way in self.ways if way.way == name)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_rows(
    table: RowTable,
    *,
    rows: int = ROWS,
    rounds: int = ROUNDS,
    bulk_rows: int = BULK_ROWS,
    progress: Progress = lambda stage, done, total: None,
) -> RowReport:
    """Measures random rows of `table`. Raises BloomeryError if the file cannot be read or has too few rows, or if two
    ways of reading disagree."""
    if table.rows < rows:
        raise BloomeryError(f"{table.path}: has {table.rows} rows of {table.row_bytes} bytes, expected {rows} or more")
    rng = np.random.default_rng()
    with _ways(table) as (file, ways, reader):
        worst = 0.0
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
        hits: list[float] = []
        names = list(ways)
        for number in range(rounds):
            progress("reading rows", number, rounds)
            for turn in range(len(names)):  # each way comes first as often as last
                name = names[(number + turn) % len(names)]
                ids = rng.choice(table.rows, rows, replace=False).astype(np.int64)
                evict(file)
                worst = max(worst, cached_share(file, min(os.fstat(file).st_size, _SAMPLE_BYTES)))
                for kind in (0, 1):
                    out = np.zeros((rows, table.row_bytes), np.uint8)
                    begun = time.perf_counter()
                    ways[name](ids, out)
                    times[name][kind].append(time.perf_counter() - begun)
                    _compare(table, ids, out, name)
            with_cache = RowReader([table], cache_bytes=_CACHE_BYTES, keep_pages=True)
            for _ in range(1 + WAYS):  # a fetch adds one row to a set of the cache, so rows of one set come one by one
                cached = with_cache.counters.cached
                out = np.zeros((rows, table.row_bytes), np.uint8)
                with_cache.fetch([(ids, out)])
                if with_cache.counters.cached - cached == rows:
                    hits.append(with_cache.counters.seconds_last)
                    break
            _compare(table, ids, out, "row cache")
            with_cache.close()
        bulk = np.sort(rng.choice(table.rows, min(bulk_rows, table.rows), replace=False)).astype(np.int64)
        evict(file)
        seconds = []
        for _ in range(2):
            out = np.zeros((len(bulk), table.row_bytes), np.uint8)
            reader.fetch([(bulk, out)])
            seconds.append(reader.counters.seconds_last)
            _compare(table, bulk, out, READER)
        facts = os.fstat(file)
    found = [
        WayTimes(name, *(figure(times[name][kind]) for kind in (0, 1) for figure in (statistics.median, min, max)))
        for name in names
    ]
    return RowReport(
        path=table.path,
        nbytes=facts.st_size,
        row_bytes=table.row_bytes,
        rows=rows,
        rounds=rounds,
        ways=tuple(found),
        row_cache_seconds=statistics.median(hits) if hits else math.nan,
        bulk_rows=len(bulk),
        bulk_cold=len(bulk) / seconds[0],
        bulk_warm=len(bulk) / seconds[1],
        cached_share=worst,
        written_share=min(1.0, 512 * facts.st_blocks / max(1, facts.st_size)),
        load=os.getloadavg()[0],
    )


def evict(file: int) -> None:
    """Drops a file's pages from the page cache."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _ways(table: RowTable) -> Iterator[tuple[int, dict[str, Callable[[NDArray[np.int64], Rows], None]], RowReader]]:
    """The file, the ways of reading rows into an array, and the reader, which has no cache of its own here."""
    reader = RowReader([table], cache_bytes=0, keep_pages=True)
    reader.get_ready()
    file = os.open(table.path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    size = table.row_bytes

    def one_by_one(ids: NDArray[np.int64], out: Rows) -> None:
        places = out.data.cast("B")
        for place, offset in enumerate((ids * size + table.offset).tolist()):
            os.preadv(file, [places[place * size : (place + 1) * size]], offset)

    def advised(ids: NDArray[np.int64], out: Rows) -> None:
        for offset in (ids * size + table.offset).tolist():
            os.posix_fadvise(file, offset, size, os.POSIX_FADV_WILLNEED)
        one_by_one(ids, out)

    def mapped(ids: NDArray[np.int64], out: Rows) -> None:
        """A mapping made for the fetch: pages stay out of the page cache's reach while they are mapped."""
        with mmap.mmap(file, table.offset + table.nbytes, prot=mmap.PROT_READ) as memory:
            memory.madvise(mmap.MADV_RANDOM)
            for place, offset in enumerate((ids * size + table.offset).tolist()):
                out[place] = np.frombuffer(memory[offset : offset + size], np.uint8)

    def read(ids: NDArray[np.int64], out: Rows) -> None:
        reader.fetch([(ids, out)])

    try:
        yield file, {"pread, one at a time": one_by_one, ADVISED: advised, "mmap": mapped, READER: read}, reader
    finally:
        reader.close()
        os.close(file)


def _compare(table: RowTable, ids: NDArray[np.int64], found: Rows, way: str) -> None:
    """Against another descriptor's plain reads."""
    with open(table.path, "rb", buffering=0) as again:
        for number, row in zip(ids.tolist(), found, strict=True):
            offset = table.offset + number * table.row_bytes
            if os.pread(again.fileno(), table.row_bytes, offset) != row.tobytes():
                raise BloomeryError(f"{table.path}: {way} read other bytes at {offset} than a second reading")
