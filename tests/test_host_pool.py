"""The pool: barriers, doorbells, aborting and closing, shown with kernels that any early step would break."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ring_workload
from pool_kit import (
    BLOCK,
    CONTEXT,
    SLOTS,
    check_step,
    left_behind,
    make_rows,
    start_pool,
    wait_until,
    worker_children,
    worker_environment,
)

from bloomery.runtime.arena import ArenaShape
from bloomery.runtime.errors import BloomeryError, ModelFileError, PlanError, StepAborted, WorkerLost
from bloomery.runtime.executor import StepRows
from bloomery.runtime.host_pool import HostPool, worker_starts


@pytest.fixture(autouse=True)
def find_ring_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_steps_are_right_for_any_number_of_processes(processes: int) -> None:
    rng = np.random.default_rng(processes)
    progress: list[tuple[str, int, int]] = []
    pool = start_pool(processes, stages=30, delays=[20], progress=lambda *report: progress.append(report))
    try:
        assert (pool.max_rows, pool.max_out_rows, pool.slots, pool.context) == (BLOCK, BLOCK, SLOTS, CONTEXT)
        for count in (1, BLOCK, 3, 1, 17, 2):
            check_step(pool, make_rows(rng, count, slot=int(rng.integers(SLOTS))), stages=30)
        statistics = pool.statistics()
        assert (statistics["steps"], statistics["rows"], statistics["restarts"]) == (6, BLOCK + 24, 0)
        assert sorted(statistics["pids"]) == sorted(child.pid for child in worker_children())
        assert 0 < statistics["step_seconds_mean"] < 5
    finally:
        pool.close()
    kernels = 1 + len(ring_workload.KERNELS)
    assert progress[-1] == ("load", processes, processes)
    assert [done for stage, done, total in progress if stage == "compile" and total == kernels] == [*range(kernels + 1)]
    assert list(dict.fromkeys(stage for stage, _, _ in progress)) == ["spawn", "compile", "load"]


@pytest.mark.parametrize(
    ("processes", "steps", "yields"), [(2, 50, True), (3, 20, True), (2, 20, False), (3, 5, False)]
)
def test_barriers_hold_under_random_delays(processes: int, steps: int, yields: bool) -> None:
    """500 barriers a step, 47,500 in all; ranks arrive in every order, at a few even after the others have begun to nap
    (2 ms)."""
    rng = np.random.default_rng(20 + processes)
    delays = [0, 0, 40, 300] * 125
    delays[57] = delays[400] = 80_000
    pool = start_pool(processes, stages=500, delays=delays, yields=yields)
    try:
        for _ in range(steps):
            check_step(pool, make_rows(rng, 1), stages=500)
    finally:
        pool.close()


@pytest.mark.parametrize("yields", [True, False])
def test_no_wake_up_is_lost(yields: bool) -> None:
    """Steps that begin around the moment at which a worker falls asleep. A lost one costs its longest sleep;
    the time for which somebody only waits for a processor does not count."""
    rng = np.random.default_rng(31)
    pool = start_pool(2, stages=3, yields=yields)
    slow = 0
    try:
        for gap in rng.uniform(0, 0.006, 150):
            time.sleep(gap)
            begun, before = time.perf_counter(), _queued(pool)
            check_step(pool, make_rows(rng, 1), stages=3)
            seconds = time.perf_counter() - begun
            slow += seconds - (_queued(pool) - before) > 0.4
    finally:
        pool.close()
    assert slow == 0


def test_idle_workers_sleep_and_wake() -> None:
    pool = start_pool(2, stages=3)
    try:
        check_step(pool, make_rows(np.random.default_rng(1), 1), stages=3)
        assert wait_until(lambda: all(pool.statistics()["sleeping"]), 5)
        before, mine = _cpu_seconds(pool), _scheduled("thread-self")
        time.sleep(2.5)
        asleep = _scheduled("thread-self") - mine  # some virtual machines charge 0.5 % of a core for mere sleep
        assert _cpu_seconds(pool) - before - 2 * asleep < 0.01 * 2.5
        check_step(pool, make_rows(np.random.default_rng(2), 5), stages=3)
    finally:
        pool.close()


def _cpu_seconds(pool: HostPool) -> float:
    """Processor time of all workers, in the scheduler's nanoseconds."""
    return sum(_scheduled(str(pid)) for pid in pool.statistics()["pids"])


def _scheduled(task: str) -> float:
    return int(Path(f"/proc/{task}/schedstat").read_text().split()[0]) / 1e9


def _queued(pool: HostPool) -> float:
    """Seconds for which this thread and the workers were ready to run while others had their processors."""
    tasks = ("thread-self", *map(str, pool.statistics()["pids"]))
    return sum(int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) for task in tasks) / 1e9


def test_workers_are_pinned_to_one_cpu_each() -> None:
    pool = start_pool(2)
    try:
        masks = [psutil.Process(pid).cpu_affinity() for pid in pool.statistics()["pids"]]
    finally:
        pool.close()
    assert all(len(mask) == 1 for mask in masks)
    if len(psutil.Process().cpu_affinity()) > 1:
        assert masks[0] != masks[1]


def test_more_workers_than_the_quota_allows_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = ring_workload.program()
    for quota, processes, told in ((1.5, 1, False), (1.5, 2, True), (None, 1, False)):
        monkeypatch.setattr("bloomery.runtime.host_pool.cpu_quota", lambda quota=quota: quota)
        caplog.clear()
        starts = worker_starts("", program, ArenaShape(CONTEXT, SLOTS, BLOCK, BLOCK, processes, "f32"), False, "")
        assert [start.spins > 0 for start in starts] == [not told] * processes
        assert ("2 worker processes take turns on 1.5 cores" in caplog.text) == told


@pytest.mark.parametrize("processes", [1, 3])
def test_abort_ends_the_running_step_only(processes: int) -> None:
    rng = np.random.default_rng(40)
    pool = start_pool(processes, stages=4000, delays=[30_000])  # seconds if it were not cut
    try:
        pool.abort()  # nothing runs: nothing happens
        for pause in (0.0, 0.02, 0.1):
            cut: list[float] = []

            def abort(cut: list[float] = cut) -> None:
                pool.abort()
                cut.append(time.monotonic())

            timer = threading.Timer(pause, abort)
            timer.start()
            with pytest.raises(StepAborted):
                while True:  # an abort before the step has begun does nothing: the step then runs; cut it later
                    threading.Timer(0.3, pool.abort).start()
                    pool.step(make_rows(rng, 1))
            timer.join()
            assert time.monotonic() - cut[0] < 1.0
        assert pool.statistics()["aborted"] == 3
    finally:
        pool.close()


def test_an_abort_of_an_announced_step_is_not_lost() -> None:
    rng = np.random.default_rng(42)
    pool = start_pool(2, stages=2000, delays=[30_000])  # seconds if it were not cut
    try:
        for _ in range(3):
            pool.announce()
            pool.abort()
            begun = time.monotonic()
            with pytest.raises(StepAborted):
                pool.step(make_rows(rng, 1))
            assert time.monotonic() - begun < 1
        pool.announce()
        with pytest.raises(ValueError, match="outside"):
            pool.step(make_rows(rng, 1, slot=99))
        pool.abort()  # the announced step did not come: nothing runs
        pool._runner.drill()
        assert pool.statistics()["aborted"] == 3
    finally:
        pool.close()


def test_an_abort_is_for_one_step_and_never_for_another() -> None:
    rng = np.random.default_rng(41)
    pool = start_pool(2, stages=200, delays=[600])  # a few milliseconds, more where others run
    aborted = rounds = 0
    try:
        check_step(pool, make_rows(rng, 1), stages=200)
        while rounds < 60 or (not aborted and rounds < 600):  # where others run, any one may come before its step
            rounds += 1
            pause = rng.uniform(0, 1.5) * pool.statistics()["step_seconds_last"]
            timer = threading.Timer(pause, pool.abort)
            timer.start()
            try:
                check_step(pool, make_rows(rng, 1), stages=200)
            except StepAborted:
                aborted += 1
            timer.join()
            pool.abort()  # nothing runs
            check_step(pool, make_rows(rng, 1), stages=200)
    finally:
        pool.close()
    assert 0 < aborted == pool.statistics()["aborted"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_workers_were_told_to_leave_has_no_result(processes: int) -> None:
    """As if a worker were lost, while none is: what the step left in its outputs must not pass as its result."""
    rng = np.random.default_rng(43)
    pool = start_pool(processes, stages=50, delays=[100])
    try:
        check_step(pool, make_rows(rng, 1), stages=50)
        pids = pool.statistics()["pids"]
        control = pool._runner._control
        control.poison(control.step + 1)
        with pytest.raises(WorkerLost, match=r"worker 0 .*left its work.*no worker was lost \(in step"):
            pool.step(make_rows(rng, 1))
        with pytest.raises(WorkerLost, match="left its work"):
            pool.step(make_rows(rng, 1))
        pool.recover()
        check_step(pool, make_rows(rng, 1), stages=50)
        statistics = pool.statistics()
        assert (statistics["restarts"], statistics["steps"], statistics["pids"]) == (0, 2, pids)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("refuse", "kind", "message"),
    [
        (
            "file",
            ModelFileError,
            r"ring\.gguf: tensor ring\.weight is bent \(reported by CPU-expert worker \d .*unbend",
        ),
        ("plan", PlanError, r"tensor ring\.weight has type Q9_Z, which has no kernel .*requantise the file"),
        ("defect", WorkerLost, r"CPU-expert worker 1 \(pid \d+\) failed: ZeroDivisionError: one rank only"),
    ],
)
def test_what_a_worker_cannot_start_with_reaches_the_caller(
    refuse: str, kind: type[BloomeryError], message: str
) -> None:
    with pytest.raises(BloomeryError) as caught:
        start_pool(2, refuse=refuse)
    assert type(caught.value) is kind
    caught.match(message.partition(" .*")[0])
    assert not worker_children() and not left_behind()


def test_a_process_that_cannot_be_started_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(PlanError, match="cannot start CPU-expert worker 0 of 2: No such file"):
        start_pool(2)
    assert not left_behind()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("tokens", [5, -1]),
        ("tokens", [ring_workload.VOCABULARY, 5]),
        ("slots", [0, SLOTS]),
        ("positions", [CONTEXT - 1, CONTEXT]),
        ("out_rows", [0, 2]),
    ],
)
def test_rows_that_would_write_elsewhere_are_refused(field: str, values: list[int]) -> None:
    pool = _shared_pool()
    rows = {"tokens": [1, 2], "slots": [0, 0], "positions": [0, 1], "out_rows": [1]} | {field: values}
    with pytest.raises(ValueError, match="outside"):
        pool.step(StepRows(**{name: np.array(value, np.int32) for name, value in rows.items()}))
    check_step(pool, make_rows(np.random.default_rng(3), 2), stages=20)


_pools: list[HostPool] = []


def _shared_pool() -> HostPool:
    if not _pools:
        _pools.append(start_pool(1))
    return _pools[0]


@pytest.fixture(scope="module", autouse=True)
def close_shared_pool() -> object:
    yield
    while _pools:
        _pools.pop().close()
    assert not left_behind() and not worker_children()


def test_cache_rows_land_in_their_slot_and_prefixes_are_copied() -> None:
    rng = np.random.default_rng(50)
    pool = start_pool(2, stages=4)
    try:
        state = pool._arena.state("sums").view(np.int64)[..., 0]
        kept = np.zeros((SLOTS, CONTEXT), np.int64)
        for slot, start, count in ((0, 0, 20), (3, 0, 7), (3, 7, 30), (1, CONTEXT - 5, 5)):
            rows = make_rows(rng, count, slot=slot, start=start)
            every = StepRows(rows.tokens, rows.slots, rows.positions, np.arange(count, dtype=np.int32))
            pool.step(every)
            kept[slot, start : start + count] = ring_workload.expected(every, 4)[:, 0]
        np.testing.assert_array_equal(state, kept)
        pool.copy_prefix(3, 2, 33)
        kept[2, :33] = kept[3, :33]
        np.testing.assert_array_equal(state, kept)
        for wrong in ((0, SLOTS, 1), (-1, 0, 1), (0, 1, CONTEXT + 1)):
            with pytest.raises(ValueError, match=r"there is no slot|cannot go on at position 257"):
                pool.copy_prefix(*wrong)
    finally:
        pool.close()


def test_stage_times_add_up() -> None:
    pool = start_pool(2, stages=10, delays=[20_000], time_stages=True)
    try:
        for _ in range(20):
            check_step(pool, make_rows(np.random.default_rng(4), 1), stages=10)
        shares = pool.stage_shares()
    finally:
        pool.close()
    assert list(shares) == ["first", *(f"mix.{stage}" for stage in range(10)), "keep", "select"]
    assert sum(kernel + barrier for kernel, barrier in shares.values()) == pytest.approx(1)
    short = sum(shares[name][0] for name in ("first", "keep", "select"))
    assert sum(shares[f"mix.{stage}"][0] for stage in range(10)) > 3 * short > 0


def test_close_leaves_nothing_and_may_be_called_twice() -> None:
    pool = start_pool(3)
    check_step(pool, make_rows(np.random.default_rng(5), 1), stages=20)
    assert [name for name in left_behind() if name.endswith("-cache")]
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < 4.0  # after two seconds those left are killed
    pool.close()
    assert not [child for child in worker_children() if child.pid in pool.statistics()["pids"]]
    with pytest.raises(WorkerLost, match="the pool is closed"):
        pool.step(make_rows(np.random.default_rng(5), 1))
