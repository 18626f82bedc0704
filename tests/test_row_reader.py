"""Rows of tables: what the cache holds, what reaches the disk, and files that fail.

Planted once and seen to fail: the cache's rows put one place off; hits of another table; places of a set counted from
its front always; a row at the end of a page cut; misses not put into `out`; a table that is done before its rows are
there; pages kept in spite of `keep_pages`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bloomery.runtime import row_reader
from bloomery.runtime.disk_probe import cached_share
from bloomery.runtime.row_cache import RowCache
from bloomery.runtime.row_reader import RowReader, RowTable, TableReadError

ROW = 110
ROWS = (9001, 4003)  # odd numbers of rows, so that rows lie across pages and the last page is not full


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[RowTable, NDArray[np.uint8]]]:
    """Two tables in two files, behind and before other bytes, written through to the disk; and their contents."""
    rng = np.random.default_rng(3)
    made = []
    for number, rows in enumerate(ROWS):
        path = tmp_path_factory.mktemp("tables") / f"shard{number}"
        before, after = (777, 0) if number == 0 else (0, 5000)
        contents = rng.integers(0, 256, (rows, ROW), dtype=np.uint8)
        with path.open("wb") as file:
            file.write(bytes(before) + contents.tobytes() + bytes(after))
            os.fsync(file.fileno())
        made.append((RowTable(str(path), before, rows, ROW), contents))
    return made


def evict(path: str) -> None:
    """Skips the test where the file system keeps its pages (tmpfs)."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_share(file.fileno(), os.path.getsize(path)) > 0.1:
            pytest.skip("this file system does not let pages go")


def cached(path: str) -> float:
    with open(path, "rb") as file:
        return cached_share(file.fileno(), os.path.getsize(path))


def fetch(reader: RowReader, ids: list[NDArray[np.int32]]) -> list[NDArray[np.uint8]]:
    outs = [np.full((len(numbers), ROW), 0xEE, np.uint8) for numbers in ids]
    seen: list[NDArray[np.uint8]] = []
    reader.fetch(list(zip(ids, outs, strict=True)), lambda table: seen.append(outs[table].copy()))
    assert len(seen) == len(outs) and all(map(np.array_equal, seen, outs)), "done before the rows are there"
    return outs


Opener = Callable[..., RowReader]


@pytest.fixture(params=["advice", "direct"])
def opened(request: pytest.FixtureRequest) -> Opener:
    def make(tables: list[tuple[RowTable, NDArray[np.uint8]]], **options: object) -> RowReader:
        try:
            return RowReader([table for table, _ in tables], direct=request.param == "direct", **options)  # type: ignore[arg-type]
        except TableReadError as error:
            if "no direct reads" in error.message:
                pytest.skip(error.message)
            raise

    return make


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("cache", [0, 40_000, 1 << 20])
def test_rows_are_those_of_the_file(
    tables: list[tuple[RowTable, NDArray[np.uint8]]], opened: Opener, cache: int, keep: bool
) -> None:
    """Single tokens and prompts, first and last rows, nothing at all; cold, from the page cache and from the rows'."""
    rng = np.random.default_rng(cache + keep)
    reader = opened(tables, cache_bytes=cache, keep_pages=keep)
    known = [rng.choice(rows, 700, replace=False).astype(np.int32) for rows in ROWS]
    for turn in range(30):
        counts = [24, 24] if turn % 3 else [int(rng.integers(0, 700)), 0]
        ids = [rng.choice(of, count, replace=False) for of, count in zip(known, counts, strict=True)]
        if turn % 4 == 0:
            ids[0] = np.array([ROWS[0] - 1, 0, 37], np.int32)
        found = fetch(reader, ids)
        for numbers, rows, (_, contents) in zip(ids, found, tables, strict=True):
            np.testing.assert_array_equal(rows, contents[numbers])
        if turn % 5 == 0:
            reader.tidy()
    counters = reader.counters
    assert counters.fetches == 30 and counters.rows == reader.cache.hits + reader.cache.misses
    assert counters.cached == reader.cache.hits
    assert (counters.cached > counters.rows // 4) == (cache > 100_000)
    assert reader.cache.nbytes <= cache
    reader.close()


def test_what_reaches_the_disk(tables: list[tuple[RowTable, NDArray[np.uint8]]]) -> None:
    """Without a row cache: cold rows come from the disk, then from the page cache, unless pages are let go."""
    table, contents = tables[0]
    ids = np.arange(0, ROWS[0], 190, dtype=np.int32)  # far apart: more than four pages from one to the next
    for keep in (True, False):
        reader = RowReader([table], cache_bytes=0, keep_pages=keep)
        evict(table.path)
        for cold in (True, not keep):
            assert (cached(table.path) < 0.01) == cold
            counts: list[int] = []
            while not counts or (cold and counts[-1] < len(ids) - 5 and len(counts) < 20):
                if counts:  # the disk may have been quicker than the next try, which then finds the page
                    evict(table.path)
                before = reader.counters.from_disk
                np.testing.assert_array_equal(fetch(reader, [ids])[0], contents[ids])
                counts.append(reader.counters.from_disk - before)
                reader.tidy()
            assert len(ids) - 5 <= counts[-1] <= len(ids) if cold else counts[-1] <= 5
        share = cached(table.path)
        assert 0.1 < share < 0.5 if keep else share < 0.01, "a row brings its own pages and no others"
        evict(table.path)
        fetch(reader, [np.arange(ROWS[0], dtype=np.int32)])
        assert cached(table.path) > 0.9
        reader.tidy()
        assert (cached(table.path) > 0.9) == keep
        reader.close()


def test_direct_reads_leave_the_page_cache_alone(
    tables: list[tuple[RowTable, NDArray[np.uint8]]],
) -> None:
    table, contents = tables[1]
    try:
        reader = RowReader([table], cache_bytes=0, direct=True)
    except TableReadError as error:
        pytest.skip(error.message)
    evict(table.path)
    ids = np.arange(ROWS[1], dtype=np.int32)[::7]
    np.testing.assert_array_equal(fetch(reader, [ids])[0], contents[ids])
    assert cached(table.path) < 0.01 and reader.counters.from_disk == len(ids)
    reader.close()


def test_files_that_fail(tmp_path: Path, opened: Opener) -> None:
    contents = np.random.default_rng(5).integers(0, 256, (1000, ROW), dtype=np.uint8)
    path = tmp_path / "table"
    path.write_bytes(contents.tobytes())
    table = RowTable(str(path), 0, 1000, ROW)
    with pytest.raises(
        TableReadError, match=r"table: has 110000 bytes, its table at byte 0 of 1001 rows ends at 110110"
    ):
        opened([(RowTable(str(path), 0, 1001, ROW), contents)])
    with pytest.raises(TableReadError, match="nowhere: No such file"):
        opened([(RowTable(str(tmp_path / "nowhere"), 0, 1, ROW), contents)])
    reader = opened([(table, contents)], cache_bytes=0, keep_pages=True)
    with pytest.raises(ValueError, match=r"outside 0\.\.999"):
        fetch(reader, [np.array([3, 1000], np.int32)])
    os.truncate(path, 999 * ROW + 10)
    with pytest.raises(TableReadError, match="row 999 of table at byte 0 cannot be read: 10 of 110 bytes"):
        fetch(reader, [np.array([3, 999, 4], np.int32)])
    ids = np.array([998, 0], np.int32)
    np.testing.assert_array_equal(fetch(reader, [ids])[0], contents[ids])
    unreadable = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    os.dup2(unreadable, reader.files[0])
    with pytest.raises(TableReadError, match=r"row 7 of table .* Bad file descriptor"):
        fetch(reader, [np.array([7], np.int32)])
    os.close(unreadable)
    reader.close()


def test_threads_share_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with many cores. A fetch that fails has ended when it says so."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(row_reader, "_ROWS_A_THREAD", 8)
    contents = np.random.default_rng(6).integers(0, 256, (5000, ROW), dtype=np.uint8)
    path = tmp_path / "table"
    path.write_bytes(contents.tobytes())
    reader = RowReader([RowTable(str(path), 0, 5000, ROW)], cache_bytes=0, keep_pages=True)
    ids = np.random.default_rng(7).permutation(5000)[:900].astype(np.int32)
    np.testing.assert_array_equal(fetch(reader, [ids])[0], contents[ids])
    assert reader._threads is not None, "it was one thread's"
    os.truncate(path, 0)
    with pytest.raises(TableReadError, match="0 of 110 bytes are there"):
        fetch(reader, [ids])
    reader.close()
    written = []

    def late() -> None:
        time.sleep(0.2)
        written.append(1)

    with ThreadPoolExecutor(2) as threads, pytest.raises(ZeroDivisionError):
        tasks = [threads.submit(lambda: 1 / 0), threads.submit(late)]
        try:
            row_reader._all_ended(tasks)
        finally:
            assert written


def test_the_cache_against_a_dictionary() -> None:
    """Whatever is found is right, the room is never exceeded, and rows used lately stay."""
    rng = np.random.default_rng(9)
    cache = RowCache(ROW, 60_000)
    rows = rng.integers(0, 256, (2, 3000, ROW), dtype=np.uint8)
    hot = np.arange(0, 200, dtype=np.int64)
    for _ in range(300):
        table = int(rng.integers(2))
        cold = rng.choice(np.arange(200, 3000), 20, replace=False)
        ids = np.concatenate([rng.choice(hot, 30, replace=False), cold])
        out = np.zeros((len(ids), ROW), np.uint8)
        absent = cache.take(table, ids, out)
        present = np.setdiff1d(np.arange(len(ids)), absent)
        np.testing.assert_array_equal(out[present], rows[table, ids[present]])
        assert not out[absent].any()
        cache.put(table, ids[absent], rows[table, ids[absent]])
    assert cache.nbytes <= 60_000 and 256 < cache.held <= 60_000 // (ROW + 16)
    out = np.zeros((200, ROW), np.uint8)
    assert len(cache.take(0, hot, out)) < 120, "hot rows were given up for cold ones"


def test_a_cache_without_room_keeps_nothing() -> None:
    cache = RowCache(ROW, 500)
    cache.put(0, np.array([1]), np.zeros((1, ROW), np.uint8))
    assert cache.take(0, np.array([1, 2]), np.zeros((2, ROW), np.uint8)).tolist() == [0, 1]
    assert (cache.hits, cache.misses, cache.nbytes) == (0, 2, 0)
