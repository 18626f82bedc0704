"""Rows of large tables on disk, read as fast as the disk gives them: all that are missing are asked for at once.

Owns the files, the ways of reading and what stays in memory: a RowCache, and the page cache only where the tables are
small beside it. Knows neither what rows mean nor who wants them.

A fetch has two passes (`row_reads`). The first tries every row with RWF_NOWAIT, which copies what the page cache holds,
and asks the disk for the rest (`posix_fadvise(WILLNEED)`). The second waits for each missing row in turn; by then all
are under way. Many rows are shared by threads, since a system call for each is what takes time when the page cache
holds them. With `direct` the page cache is not used at all: the disk is asked by as many threads as keep it busy.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.row_cache import RowCache, cache_room

PAGE = 4096
DIRECT_THREADS = 16
CACHE_BYTES = 256 << 20
KEEP_SHARE = 8
"""Tables beyond one part in so many of the free memory do not stay in the page cache."""

_MOST_THREADS = 8
_ROWS_A_THREAD = 256
_Lines = NDArray[np.int64]  # of row_reads

_MERGE_PAGES = 4096  # of a fetch that touched more pages, all pages of the files are dropped at once


class TableReadError(BloomeryError):
    """Rows that cannot be read: an error of the disk, or a file that has become too short."""


@dataclass(frozen=True)
class RowTable:
    """`rows` rows of `row_bytes` bytes each, the first of them at byte `offset` of the file. `name`: the tensor's."""

    path: str
    offset: int
    rows: int
    row_bytes: int
    name: str = ""

    @classmethod
    def of(cls, tensor: Tensor) -> RowTable:
        """A matrix of a model file."""
        rows, row_bytes = math.prod(tensor.shape[1:]), tensor.quant_type.row_bytes(tensor.shape[0])
        return cls(str(tensor.path), tensor.offset, rows, row_bytes, tensor.name)

    @property
    def title(self) -> str:
        return f"table {self.name}" if self.name else f"table at byte {self.offset}"

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass
class ReadCounters:
    """Since the start: rows asked for, those found in the row cache, those that had to come from the disk, seconds of
    all fetches and of the last one. The others came from the page cache."""

    fetches: int = 0
    rows: int = 0
    cached: int = 0
    from_disk: int = 0
    seconds: float = 0.0
    seconds_last: float = 0.0


class RowReader:
    """Reads rows of tables that all have the same `row_bytes`. One thread at a time."""

    def __init__(
        self,
        tables: Sequence[RowTable],
        *,
        cache_bytes: int = CACHE_BYTES,
        direct: bool = False,
        keep_pages: bool | None = None,
    ) -> None:
        """`keep_pages` (default: if the tables are small beside the free memory): leave what was read in the page
        cache. Raises TableReadError naming a file that cannot be opened or is shorter than its table."""
        assert tables and len({table.row_bytes for table in tables}) == 1
        self.tables = tuple(tables)
        self.row_bytes = tables[0].row_bytes
        total = sum(table.nbytes for table in tables)
        self.keep_pages = KEEP_SHARE * total <= available_memory() if keep_pages is None else keep_pages
        self.direct = direct
        self.cache = RowCache(self.row_bytes, cache_room(total, cache_bytes))
        self.counters = ReadCounters()
        self.files: list[int] = []
        self._touched: list[tuple[int, NDArray[np.int64]]] = []  # (table, offsets) that went through the page cache
        self._threads = ThreadPoolExecutor(DIRECT_THREADS, "table reads") if direct else None
        self._buffers = threading.local()
        try:
            for table in self.tables:
                self.files.append(_open(table, direct))
        except BaseException:
            self.close()
            raise

    def get_ready(self) -> None:
        """Compiles what fetches take: for who measures the first of them."""
        from bloomery.runtime import row_reads

        nothing, files = np.zeros((0, 4), np.int64), self.places()
        row_reads.ask(nothing, files, np.empty(2, np.int64))
        row_reads.wait(nothing, files)

    def fetch(
        self,
        wanted: Sequence[tuple[NDArray[np.integer[Any]], NDArray[np.uint8]]],
        done: Callable[[int], None] = lambda table: None,
    ) -> None:
        """For each table in turn (distinct row numbers (n), where to put them (n, row_bytes), contiguous): all rows of
        all tables are asked for, then each table is completed and `done(table)` called.

        Raises TableReadError; tables of which `done` was called are complete then. ValueError for numbers outside."""
        begun = time.perf_counter()
        counters = self.counters
        missing: list[tuple[NDArray[np.int64], NDArray[np.int64], _Lines]] = []
        for index, (numbers, out) in enumerate(wanted):
            ids = np.asarray(numbers, np.int64)
            table = self.tables[index]
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < table.rows):
                raise ValueError(f"row numbers outside 0..{table.rows - 1} of {table.path}")
            absent = self.cache.take(index, ids, out)
            counters.rows += len(ids)
            counters.cached += len(ids) - len(absent)
            missing.append((ids, absent, self._ask(index, ids, absent, out)))
        for index, ((_, out), (ids, absent, lines)) in enumerate(zip(wanted, missing, strict=True)):
            counters.from_disk += int(np.count_nonzero(lines[:, 3]))
            self._complete(index, lines, out)
            if len(absent):
                self.cache.put(index, ids[absent], out[absent])
            done(index)
        counters.fetches += 1
        counters.seconds_last = time.perf_counter() - begun
        counters.seconds += counters.seconds_last

    def tidy(self) -> None:
        """Drops from the page cache what fetches brought there, unless pages are kept. For quiet moments."""
        touched, self._touched = self._touched, []
        if self.keep_pages or not touched:
            return
        if sum(len(offsets) for _, offsets in touched) > _MERGE_PAGES:
            for file, table in zip(self.files, self.tables, strict=True):
                os.posix_fadvise(file, table.offset, table.nbytes, os.POSIX_FADV_DONTNEED)
            return
        for index, offsets in touched:
            first = offsets // PAGE
            for page, last in zip(first.tolist(), ((offsets + self.row_bytes - 1) // PAGE).tolist(), strict=True):
                start, length = page * PAGE, (last - page + 1) * PAGE
                os.posix_fadvise(self.files[index], start, length, os.POSIX_FADV_DONTNEED)

    def note_touched(self, index: int, offsets: NDArray[np.int64]) -> None:
        """Rows of a table at these offsets went through the page cache: for `tidy`."""
        if not self.keep_pages and len(offsets):
            self._touched.append((index, offsets.copy()))

    def failure(self, index: int, row: int, status: int) -> TableReadError:
        """That a row of a table could not be read: `status` is how many bytes were there, or -errno."""
        table = self.tables[index]
        why = f"{status} of {self.row_bytes} bytes are there" if status >= 0 else os.strerror(-status)
        return TableReadError(
            f"{table.path}: row {row} of {table.title} cannot be read: {why}",
            "the file has changed or its disk fails: check it, then send the request again",
        )

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown()
        for file in self.files:
            os.close(file)
        self.files = []

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Handles and first bytes of the tables, bytes of a row: `files` of `row_reads`."""
        starts = np.array([table.offset for table in self.tables], np.int64)
        return np.array(self.files, np.int64), starts, self.row_bytes

    def _ask(self, index: int, ids: NDArray[np.int64], absent: NDArray[np.int64], out: NDArray[np.uint8]) -> _Lines:
        """The first pass: what is at hand is copied, the rest asked for."""
        assert out.flags.c_contiguous
        lines = np.zeros((len(absent), 4), np.int64)
        lines[:, 0], lines[:, 1] = index, ids[absent]
        lines[:, 2] = out.ctypes.data + absent * self.row_bytes
        if self.direct:
            lines[:, 3] = 1
            return lines
        from bloomery.runtime.row_reads import ask  # compiles: not for who reads nothing

        self.note_touched(index, lines[:, 1] * self.row_bytes + self.tables[index].offset)
        files = self.places()
        self._shared(lines, lambda part: ask(part, files, np.empty(2, np.int64)))
        return lines

    def _complete(self, index: int, lines: _Lines, out: NDArray[np.uint8]) -> None:
        """The second pass: waits for the rows that are still missing."""
        if not len(lines):
            return
        if self.direct:
            bytes_of, start = out.data.cast("B"), out.ctypes.data
            offsets = (lines[:, 1] * self.row_bytes + self.tables[index].offset).tolist()
            pairs = list(zip(((lines[:, 2] - start) // self.row_bytes).tolist(), offsets, strict=True))
            shares = [pairs[share::DIRECT_THREADS] for share in range(min(DIRECT_THREADS, len(pairs)))]
            assert self._threads is not None
            _all_ended([self._threads.submit(self._read_direct, index, share, bytes_of) for share in shares])
            return
        from bloomery.runtime import row_reads

        files = self.places()

        def complete(part: _Lines) -> None:
            if (failed := row_reads.wait(part, files)) >= 0:
                raise self.failure(index, int(part[failed, 1]), int(part[failed, 3]))

        self._shared(lines, complete)

    def _shared(self, lines: _Lines, work: Callable[[_Lines], Any]) -> None:
        """Does the work, by several threads if it is for many rows."""
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2, len(lines) // _ROWS_A_THREAD)
        if threads < 2:
            work(lines)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MOST_THREADS, "table reads")
        _all_ended([self._threads.submit(work, part) for part in np.array_split(lines, threads)])

    def _read_direct(self, index: int, pairs: list[tuple[int, int]], bytes_of: memoryview) -> None:
        """Whole pages into a page-aligned buffer, the row copied out of them."""
        if not hasattr(self._buffers, "pages"):
            self._buffers.pages = mmap.mmap(-1, (self.row_bytes // PAGE + 2) * PAGE)
        pages = memoryview(self._buffers.pages)
        for place, offset in pairs:
            start = offset // PAGE * PAGE
            inside = offset - start
            length = -(-(inside + self.row_bytes) // PAGE) * PAGE
            try:
                got = os.preadv(self.files[index], [pages[:length]], start)
            except OSError as error:
                raise self._failed(index, offset, error) from error
            if got < inside + self.row_bytes:
                raise self._failed(index, offset, max(0, got - inside))
            first = place * self.row_bytes
            bytes_of[first : first + self.row_bytes] = pages[inside : inside + self.row_bytes]

    def _failed(self, index: int, offset: int, why: OSError | int) -> TableReadError:
        row = (offset - self.tables[index].offset) // self.row_bytes
        return self.failure(index, row, -(why.errno or errno.EIO) if isinstance(why, OSError) else why)


def _all_ended(tasks: list[Future[Any]]) -> None:
    """Raises what one of them has raised once none of them runs, since they write where others will."""
    wait(tasks)
    for task in tasks:
        task.result()


def _open(table: RowTable, direct: bool) -> int:
    hint = "check the model file; it must not change while it is in use"
    try:
        file = os.open(table.path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            raise TableReadError(
                f"{table.path}: its file system has no direct reads", "leave --engram-direct out"
            ) from error
        raise TableReadError(f"{table.path}: {error.strerror}", hint) from error
    size, end = os.fstat(file).st_size, table.offset + table.nbytes
    if size < end:
        os.close(file)
        raise TableReadError(
            f"{table.path}: has {size} bytes, its {table.title} of {table.rows} rows ends at {end}", hint
        )
    if not direct:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # a row brings its own pages only
    return file
