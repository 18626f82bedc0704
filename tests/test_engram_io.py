"""The process that brings n-gram table rows: the right rows in the arena, results as with the tables in memory, and
what happens when it dies, hangs, or the file fails.

Planted once and seen to fail: places of another row of the step; a history without the step's own tokens, and one
without those before it; a step whose rows failed and that counts all the same.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepseek_data import _kit, program_of, tiny41
from engine_client import GREEDY, Client, exhaust
from in_process import InProcessExecutor
from numpy.typing import NDArray
from running import joined, rows_of
from service_stand import wait_for

from bloomery.runtime.engine import Engine
from bloomery.runtime.engram_hash import histories
from bloomery.runtime.engram_record import EngramWords, engram_bytes, engram_tables
from bloomery.runtime.errors import RequestError, StepAborted, WorkerLost
from bloomery.runtime.executor import StepRows
from bloomery.runtime.file_sizes import FileSizes
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer import Tokenizer
from bloomery.runtime.worker_messages import EngramOptions

BLOCK, SLOTS, CONTEXT = 16, 3, 64
TOKENS = np.random.default_rng(17).integers(0, 512, 48).astype(np.int32)
OTHERS = np.random.default_rng(18).integers(0, 512, 48).astype(np.int32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its tables at the end of the file, so that cutting it hurts nobody else."""
    kit = _kit("make_tiny_deepseek41")
    vars(kit).update(kit.VARIANTS["a"])
    path = tmp_path_factory.mktemp("engram") / "tables-last.gguf"
    kit.write(str(path), sorted(kit.make_tensors(), key=lambda tensor: "engram_embd" in tensor[0]), False)
    return path


@contextmanager
def open_pool(path: Path, processes: int = 1, cache_bytes: int = 0, **options: Any) -> Iterator[HostPool]:
    pool = HostPool.start(
        str(path),
        program_of(path),
        context=CONTEXT,
        slots=SLOTS,
        processes=processes,
        prompt_block=BLOCK,
        cache_type="f32",
        engram=EngramOptions(cache_bytes, **options),
    )
    try:
        yield pool
    finally:
        pool.close()


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def engram_of(pool: HostPool) -> dict[str, Any]:
    facts: dict[str, Any] = pool.statistics()["engram"]
    return facts


def check_rows(pool: HostPool, path: Path, expected: list[NDArray[np.int64]]) -> None:
    """What lies in the arena are the rows for these histories, one of which belongs to each row of the step."""
    program = program_of(path)
    assert program.engram is not None
    buckets = program.engram.buckets
    for table in engram_tables(program):
        tensor = program.weights[table.weight]
        ids = program.engram.row_ids(table.site, np.stack(expected))
        stored = tensor.data.reshape(-1, table.row_bytes)[ids]
        places = pool._arena.memory(f"engram_places:{table.site}").view(np.int32)[: ids.size].reshape(-1, buckets)
        rows = pool._arena.memory(f"engram_rows:{table.site}").reshape(-1, table.row_bytes)
        np.testing.assert_array_equal(rows[places], stored)


@pytest.mark.timeout(400)  # kernels may have to be compiled
def test_rows_and_results(path: Path) -> None:
    """Prompts in blocks, single rows, several slots in a step, a copied prefix: the logits have the bits of a run that
    takes rows from the mapped table, and the arena has the rows of the ids that the hash makes of whole texts."""
    expected = InProcessExecutor(program_of(path), context=CONTEXT, slots=SLOTS, max_rows=BLOCK, max_out_rows=BLOCK)
    first, second = histories(TOKENS, 4), histories(OTHERS, 4)
    steps: list[tuple[StepRows, list[NDArray[np.int64]]]] = [
        (rows_of(TOKENS[:16], out="last"), list(first[:16])),
        (joined(rows_of(OTHERS[:9], slot=2), rows_of(TOKENS[16:17], start=16)), [*second[:9], first[16]]),
        (rows_of(TOKENS[17:18], start=17), [first[17]]),
        (joined(rows_of(TOKENS[18:20], start=18), rows_of(OTHERS[9:10], slot=2, start=9)), [*first[18:20], second[9]]),
        (rows_of(np.repeat(TOKENS[:1], 12), slot=1), list(histories(np.repeat(TOKENS[:1], 12), 4))),
    ]
    with open_pool(path, processes=2, cache_bytes=1 << 20) as pool:
        pid = engram_of(pool)["pid"]
        for rows, wanted in steps:
            found = pool.step(rows).logits.copy()
            check_rows(pool, path, wanted)
            np.testing.assert_array_equal(found, expected.step(rows)[0])
        pool.copy_prefix(0, 1, 20)
        pool.step(rows_of(TOKENS[20:22], slot=1, start=20))
        check_rows(pool, path, list(first[20:22]))
        # counted after the rows are there; the drill wants none, and may be over before a busy machine lets it look
        wait_for(lambda: engram_of(pool)["fetches"] in (6, 7) and engram_of(pool)["rows_cached"])
        facts = engram_of(pool)
        assert facts["fetches"] in (6, 7)
        assert facts["rows_cached"] > 0 and facts["rows"] > facts["rows_cached"] and facts["restarts"] == 0
        assert facts["cache_bytes"] <= 1 << 20 and 0 < facts["nanoseconds_last"] <= facts["nanoseconds"]
    assert not alive(pid)


def test_a_dead_process_is_replaced(path: Path) -> None:
    rows = rows_of(TOKENS[:5], out="last")
    with open_pool(path) as pool:
        expected, before = pool.step(rows).logits.copy(), pool.statistics()
        for turn in range(2):
            pid = engram_of(pool)["pid"]
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.2 * turn)
            with pytest.raises(WorkerLost, match=rf"engram I/O process 0 \(pid {pid}\) was killed by SIGKILL"):
                while True:  # the signal may need a moment
                    pool.step(rows)
            with pytest.raises(WorkerLost, match="engram I/O process 0"):
                pool.step(rows)
            pool.recover()
            np.testing.assert_array_equal(pool.step(rows).logits, expected)
        after = pool.statistics()
        assert after["engram"]["restarts"] == 2 and after["engram"]["pid"] != before["engram"]["pid"]
        assert after["pids"] == before["pids"] and after["restarts"] == 0


def test_a_process_that_hangs_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(TOKENS[:5], out="last")
    monkeypatch.setattr("bloomery.runtime.host_pool._STALL_SECONDS", 1.5)
    with open_pool(path) as pool:
        pids = pool.statistics()["pids"]
        pool.step(rows)
        pid = engram_of(pool)["pid"]
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(WorkerLost, match=rf"engram I/O process 0 \(pid {pid}\) brought no rows for 1.5 s"):
            pool.step(rows)
        assert 1.5 < time.monotonic() - begun < 6
        pool.recover()
        pool.step(rows)
        assert not alive(pid) and pool.statistics()["pids"] == pids


def test_an_aborted_step_does_not_wait_for_rows(path: Path) -> None:
    rows = rows_of(TOKENS[:5], out="last")
    with open_pool(path) as pool:
        expected = pool.step(rows).logits.copy()
        pid = engram_of(pool)["pid"]
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(0.3, pool.abort)
        timer.start()
        with pytest.raises(StepAborted):
            pool.step(rows)
        os.kill(pid, signal.SIGCONT)
        np.testing.assert_array_equal(pool.step(rows).logits, expected)
        assert engram_of(pool)["pid"] == pid


def test_a_file_that_fails_fails_the_request_only(path: Path) -> None:
    """The last rows of the last table are cut off, then written again; other requests are served before and after."""
    contents, program = path.read_bytes(), program_of(path)
    last = max((program.weights[table.weight] for table in engram_tables(program)), key=lambda table: table.offset)
    end = last.offset + last.nbytes - 113 * 110  # every token has a row behind it

    def mend() -> None:
        with path.open("r+b") as file:
            file.write(contents)

    with ModelFile.open(path) as model, open_pool(path) as pool:
        client = Client(Engine(pool, Tokenizer.from_model_file(model), None))

        def ask() -> bytes:
            request = client.submit(tuple(TOKENS[:8].tolist()), max_tokens=3, sampling=GREEDY, cache_prompt=False)
            exhaust(client)
            return request

        before = client.tokens(ask())
        assert len(before) == 3
        pids = (pool.statistics()["pids"], engram_of(pool)["pid"])
        try:
            os.truncate(path, end)
            failure = client.failure(ask())
        finally:
            mend()
        assert failure.code == "internal"
        assert str(path) in failure.message and f" of table {last.name} " in failure.message
        assert "cannot be read: 0 of 110 bytes are there" in failure.message
        assert client.tokens(ask()) == before
        assert (pool.statistics()["pids"], engram_of(pool)["pid"]) == pids
        with pytest.raises(RequestError):
            os.truncate(path, end)
            try:
                pool.step(rows_of(TOKENS[:3]))
            finally:
                mend()


def test_a_file_cut_under_its_readers_is_named(tmp_path: Path) -> None:
    """Here tensors that workers have mapped are cut off, too, which kills them: the error says why."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny41("a").read_bytes())
    whole = path.stat().st_size
    with ModelFile.open(path) as model, open_pool(path) as pool:
        client = Client(Engine(pool, Tokenizer.from_model_file(model), None))
        request = client.submit(tuple(TOKENS[:8].tolist()), max_tokens=2, sampling=GREEDY)
        exhaust(client)
        assert len(client.tokens(request)) == 2
        os.truncate(path, whole // 8)
        request = client.submit(tuple(TOKENS[8:16].tolist()), max_tokens=2, sampling=GREEDY)
        exhaust(client)
        failure = client.failure(request)
        assert failure.code == "worker_lost" and "was killed by SIGBUS" in failure.message
        assert f"{path} has {whole // 8} bytes and had {whole} when it was opened" in failure.message


def test_sizes_of_a_split_model(tmp_path: Path) -> None:
    shards = [tmp_path / f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for shard in shards:
        shard.write_bytes(bytes(100))
    sizes = FileSizes(str(shards[0]))
    shards[0].write_bytes(bytes(101))
    shards[1].unlink()
    assert sizes.shortened() == ""
    os.truncate(shards[2], 99)
    assert sizes.shortened().startswith(f"{shards[2]} has 99 bytes and had 100 ")


def test_words() -> None:
    memory = np.zeros(engram_bytes(2) + 128, np.uint8)
    memory = memory[-memory.ctypes.data % 128 :][: engram_bytes(2)]
    writer, reader = EngramWords(memory, 2), EngramWords(memory, 2)
    writer.raise_flag(0, 7)
    assert not reader.brought(7)
    writer.raise_flag(1, 7)
    assert reader.brought(7) and not reader.brought(8)
    assert reader.failure(7) == ""
    writer.fail(7, "é" * 4000)
    assert reader.failure(7).startswith("ééé") and len(reader.failure(7)) < 600 and reader.failure(8) == ""
    writer.sleeping = True
    assert reader.sleeping and reader.brought(7)
    writer.count(1, 2, 3, 4, 5, 6, 7)
    assert list(reader.counts().values()) == [1, 2, 3, 4, 5, 6, 7]
    assert reader.sleeping and reader.failure(7).startswith("ééé")
