"""Compiled rows of n-gram tables: those of the Python readers, for whatever history, cache and file."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepseek_data import program_of, tiny41
from numpy.typing import NDArray

from bloomery.runtime.engram_hash import NO_TOKEN, EngramHash
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.quick_rows import FLAG, LINE, RELEASED, STOP, TOLD, QuickRows
from bloomery.runtime.row_reader import RowReader, RowTable, TableReadError

pytestmark = pytest.mark.timeout(120)
MOST = 3


class Stand:
    """Tables of tiny V4.1 in a copy of its file, room for the rows of MOST tokens, and what the rows should be."""

    def __init__(self, folder: Path, **options: Any) -> None:
        program = program_of(tiny41("a"))
        assert program.engram is not None
        self.hash: EngramHash = program.engram
        self.path = folder / "model.gguf"
        shutil.copy(tiny41("a"), self.path)
        tables = engram_tables(program)
        self.rows_of = [RowTable.of(program.weights[table.weight]) for table in tables]
        self.reader = RowReader(
            [RowTable(str(self.path), t.offset, t.rows, t.row_bytes, t.name) for t in self.rows_of], **options
        )
        self.sites = tuple(table.site for table in tables)
        self.quick = QuickRows(self.hash, self.sites, self.reader, MOST)
        self.out = np.zeros(self.quick.shape, np.uint8)
        self.outs = self.out.ctypes.data + self.out.strides[0] * np.arange(len(self.sites))
        contents = self.path.read_bytes()
        self.tables = [
            np.frombuffer(contents, np.uint8, t.rows * t.row_bytes, t.offset).reshape(t.rows, t.row_bytes)
            for t in self.rows_of
        ]

    def wanted(self, history: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        pairs = zip(self.sites, self.tables, strict=True)
        return [table[self.hash.row_ids(site, history).reshape(-1)] for site, table in pairs]

    def check(self, history: NDArray[np.int64]) -> None:
        for found, rows in zip(self.out, self.wanted(history), strict=True):
            np.testing.assert_array_equal(found[: len(rows)], rows)

    def histories(self, rng: np.random.Generator, rows: int, most: int = 60) -> NDArray[np.int64]:
        """Some begin their sequence, some have an image in them."""
        made = rng.integers(0, most, (rows, self.hash.longest))
        return np.where(rng.random(made.shape) < 0.1, NO_TOKEN, made)


@pytest.mark.parametrize("cache_bytes", (0, 20_000, 1 << 24))
@pytest.mark.parametrize("keep_pages", (True, False))
def test_rows_are_those_of_their_histories(tmp_path: Path, cache_bytes: int, keep_pages: bool) -> None:
    """And the cache serves both readers, which take turns."""
    stand = Stand(tmp_path, cache_bytes=cache_bytes, keep_pages=keep_pages)
    rng, asked = np.random.default_rng(3), 0
    for turn in range(200):
        history = stand.histories(rng, 1 + turn % MOST)
        asked += len(history) * stand.hash.buckets * len(stand.sites)
        stand.out[:] = 0
        if turn % 4 == 3:
            ids = [np.unique(stand.hash.row_ids(site, history)) for site in stand.sites]
            outs = [np.empty((len(each), stand.reader.row_bytes), np.uint8) for each in ids]
            stand.reader.fetch(list(zip(ids, outs, strict=True)))
            for each, found, table in zip(ids, outs, stand.tables, strict=True):
                np.testing.assert_array_equal(found, table[each])
            asked += sum(map(len, ids)) - len(history) * stand.hash.buckets * len(stand.sites)
        else:
            stand.quick.bring(history, stand.outs)
            stand.check(history)
        stand.reader.tidy()
    counters = stand.reader.counters
    assert (counters.fetches, counters.rows) == (200, asked)
    assert counters.cached < asked if cache_bytes else counters.cached == 0
    if cache_bytes > 1 << 20:
        before = counters.cached
        stand.quick.bring(history, stand.outs)
        assert counters.cached == before + history.shape[0] * stand.hash.buckets * len(stand.sites), "all are kept"
    stand.reader.close()


def test_what_went_through_the_page_cache_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(tmp_path, cache_bytes=0, keep_pages=False)
    history = stand.histories(np.random.default_rng(1), 2)
    stand.quick.bring(history, stand.outs)
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, first, length, advice: dropped.append((first, length)))
    stand.reader.tidy()
    for site, table in zip(stand.sites, stand.rows_of, strict=True):
        for number in stand.hash.row_ids(site, history).reshape(-1):
            first = table.offset + int(number) * table.row_bytes
            assert any(start <= first and first + table.row_bytes <= start + length for start, length in dropped)
    stand.reader.close()


def test_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    stand = Stand(tmp_path, cache_bytes=0, keep_pages=True)
    history = np.full((1, stand.hash.longest), 7)
    numbers = stand.hash.row_ids(stand.sites[0], history).reshape(-1)
    last, table = int(numbers.max()), stand.rows_of[0]
    os.truncate(stand.path, table.offset + last * table.row_bytes + 10)
    with pytest.raises(TableReadError, match=rf"row {last} of table {table.name} .* 10 of {table.row_bytes} bytes"):
        stand.quick.bring(history, stand.outs)
    unreadable = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    os.dup2(unreadable, stand.reader.files[0])
    with pytest.raises(TableReadError, match="cannot be read: Bad file descriptor"):
        stand.quick.bring(history, stand.outs)
    os.close(unreadable)
    stand.reader.close()


class Teller:
    """The other side of `serve`: another thread's, as the card is."""

    def __init__(self, stand: Stand, laps: int, rows: int) -> None:
        self.stand, self.laps = stand, laps
        self.words = np.zeros(3 * LINE // 8, np.int64)
        self.tokens = np.zeros(MOST, np.int32)
        self.history = stand.histories(np.random.default_rng(2), rows)
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, args=(self.history.copy(),))
        self._thread.start()

    def _serve(self, history: NDArray[np.int64]) -> None:
        try:
            self.stand.quick.serve(self.words.ctypes.data, self.tokens, self.laps, history, self.stand.outs)
        except TableReadError as error:
            self.failure = error

    def tell(self, lap: int, tokens: NDArray[np.int32]) -> None:
        self.tokens[: len(tokens)] = tokens
        self.words[TOLD * LINE // 8] = lap

    def wait(self, lap: int) -> None:
        wait_for(lambda: self.words[FLAG * LINE // 8] >= lap)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def test_steps_that_follow_each_other_get_the_rows_of_their_tokens(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    rng, laps, rows = np.random.default_rng(4), 12, 2
    teller = Teller(stand, laps, rows)
    history = teller.history
    for lap in range(1, laps + 1):
        assert teller.words[FLAG * LINE // 8] == lap - 1, "nothing comes before it is asked for"
        tokens = rng.integers(0, 60, rows).astype(np.int32)
        history = np.concatenate([tokens[:, None], history[:, :-1]], axis=1)
        teller.tell(lap, tokens)
        teller.wait(lap)
        stand.check(history)
    teller.join()
    assert stand.reader.counters.fetches == laps and teller.failure is None
    stand.reader.close()


@pytest.mark.parametrize("told", (0, 3))
def test_serving_ends_when_it_is_told_to(tmp_path: Path, told: int) -> None:
    stand = Stand(tmp_path)
    teller = Teller(stand, 9, 1)
    for lap in range(1, told + 1):
        teller.tell(lap, np.zeros(1, np.int32))
        teller.wait(lap)
    teller.words[STOP * LINE // 8] = 1
    teller.join()
    assert teller.words[FLAG * LINE // 8] == RELEASED and teller.failure is None
    stand.reader.close()


def test_nobody_waits_for_rows_that_cannot_be_read(tmp_path: Path) -> None:
    stand = Stand(tmp_path, cache_bytes=0)
    os.truncate(stand.path, min(table.offset for table in stand.rows_of))
    teller = Teller(stand, 9, 1)
    teller.tell(1, np.zeros(1, np.int32))
    teller.join()
    assert teller.words[FLAG * LINE // 8] == RELEASED
    assert "cannot be read" in str(teller.failure)
    stand.reader.close()
