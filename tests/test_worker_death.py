"""Deaths: a worker that is killed, crashes or hangs, and a coordinator that is killed. Nobody waits, nothing stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import ring_workload
from pool_kit import SLOTS, TESTS, check_step, left_behind, make_rows, start_pool, wait_until, worker_environment

from bloomery.runtime import runtime_files
from bloomery.runtime.errors import WorkerLost
from bloomery.runtime.executor import StepRows
from bloomery.runtime.host_pool import HostPool

STAGES = 6


@pytest.fixture(autouse=True)
def find_ring_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[HostPool]:
    made = start_pool(getattr(request, "param", 2), stages=STAGES)
    yield made
    made.close()
    assert not left_behind()


def stuck_step(pool: HostPool, number: int, victim: int) -> tuple[WorkerLost, float]:
    """Runs a step in which the last rank never ends stage 2, and sends a signal to one rank in the middle of it.
    Returns the error and how long after the signal it came."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(pool.statistics()["pids"][victim], number)

    threading.Timer(0.15, send).start()
    with pytest.raises(WorkerLost) as caught:
        pool.step(make_rows(np.random.default_rng(1), 1, slot=1, first=ring_workload.STUCK))
    return caught.value, time.monotonic() - sent[0]


@pytest.mark.parametrize("pool", [1, 2, 3], indirect=True)
def test_a_worker_killed_in_a_step_is_replaced_alone_and_the_cache_is_kept(pool: HostPool) -> None:
    rng = np.random.default_rng(60)
    rows = make_rows(rng, 40, slot=2)
    check_step(pool, rows, STAGES)
    state = pool._arena.state("sums").view(np.int64)[..., 0]
    before, pids = state.copy(), pool.statistics()["pids"]
    assert before[2, :40].any()
    victim = len(pids) - 1  # the one that is stuck; the others wait at the barrier
    error, seconds = stuck_step(pool, signal.SIGKILL, victim)
    assert seconds < 0.6
    assert f"worker {victim} (pid {pids[victim]}) was killed by SIGKILL at mix.2 (in step" in str(error)
    with pytest.raises(WorkerLost, match="replaces its workers"):
        pool.step(rows)
    begun = time.monotonic()
    pool.recover()
    assert time.monotonic() - begun < 20
    after = pool.statistics()["pids"]
    assert [old == new for old, new in zip(pids, after)] == [rank != victim for rank in range(len(pids))]
    assert pool.statistics()["restarts"] == 1 and not os.path.exists(f"/proc/{pids[victim]}")
    np.testing.assert_array_equal(state, before)
    for count in (1, 30, 2):
        check_step(pool, make_rows(rng, count, slot=int(rng.integers(SLOTS))), STAGES)


def test_a_worker_killed_between_steps_is_noticed_at_the_next(pool: HostPool) -> None:
    pids = pool.statistics()["pids"]
    os.kill(pids[0], signal.SIGKILL)
    time.sleep(0.3)
    with pytest.raises(WorkerLost, match=rf"worker 0 \(pid {pids[0]}\) was killed by SIGKILL \(between steps\)"):
        pool.step(make_rows(np.random.default_rng(2), 1))
    pool.recover()
    check_step(pool, make_rows(np.random.default_rng(2), 3), STAGES)


def test_a_crash_names_the_signal_and_the_last_words(pool: HostPool) -> None:
    with pytest.raises(WorkerLost) as caught:
        pool.step(make_rows(np.random.default_rng(3), 1, first=ring_workload.CRASH))
    caught.match(
        r"worker 1 \(pid \d+\) was killed by SIGSEGV at mix.2; its last words: Fatal Python error: Segmentation"
    )
    pool.recover()
    check_step(pool, make_rows(np.random.default_rng(3), 3), STAGES)


def test_all_workers_may_die_at_once_and_again(pool: HostPool) -> None:
    rng = np.random.default_rng(4)
    for round in range(2):
        for pid in pool.statistics()["pids"]:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            while True:  # the signals may need a moment
                pool.step(make_rows(rng, 1))
        pool.recover()
        assert pool.statistics()["restarts"] == 2 * (round + 1)
        check_step(pool, make_rows(rng, 9), STAGES)


def test_a_worker_that_hangs_is_found_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.runtime.host_pool._STALL_SECONDS", 8.0)
    monkeypatch.setenv("BLOOMERY_DEADLINE_SCALE", "0.15")  # of 8 s: stalled after 1.2 s
    pool = start_pool(3, stages=1000, delays=[30_000])
    try:
        pids = pool.statistics()["pids"]
        timer = threading.Timer(0.1, os.kill, (pids[1], signal.SIGSTOP))
        timer.start()
        begun = time.monotonic()
        with pytest.raises(WorkerLost, match=rf"worker 1 \(pid {pids[1]}\) made no progress for 1.2 s at mix\.\d+"):
            pool.step(make_rows(np.random.default_rng(5), 1))
        assert 1.2 < time.monotonic() - begun < 4
        pool.recover()
        assert [old == new for old, new in zip(pids, pool.statistics()["pids"])] == [True, False, True]
        check_step(pool, make_rows(np.random.default_rng(5), 1), 1000)
    finally:
        pool.close()


def test_a_stopped_worker_is_found_within_seconds(pool: HostPool) -> None:
    """Long before the deadline, in a step and before one. A worker that is only stopped for a moment stays."""
    pids = pool.statistics()["pids"]
    for number, delay in ((signal.SIGSTOP, 0.0), (signal.SIGCONT, 0.5)):
        threading.Timer(delay, os.kill, (pids[0], number)).start()
    time.sleep(0.1)
    check_step(pool, make_rows(np.random.default_rng(5), 1), STAGES)
    os.kill(pids[1], signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(WorkerLost, match=rf"worker 1 \(pid {pids[1]}\) made no progress for 2 s.*; it is stopped \(by"):
        pool.step(make_rows(np.random.default_rng(5), 1))
    assert time.monotonic() - begun < 5
    pool.recover()
    assert [old == new for old, new in zip(pids, pool.statistics()["pids"])] == [True, False]
    check_step(pool, make_rows(np.random.default_rng(5), 1), STAGES)


def test_a_survivor_that_does_not_leave_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.runtime.host_pool._STALL_SECONDS", 1.0)
    pool = start_pool(2, stages=STAGES)
    try:
        pids = pool.statistics()["pids"]
        stuck_step(pool, signal.SIGKILL, 0)  # rank 1 stays in its endless kernel
        pool.recover()
        assert not set(pids) & set(pool.statistics()["pids"])
        check_step(pool, make_rows(np.random.default_rng(5), 3), STAGES)
    finally:
        pool.close()


def test_signals_to_the_whole_group_are_the_coordinators_affair(pool: HostPool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        for pid in pool.statistics()["pids"]:
            os.kill(pid, number)
    time.sleep(0.1)
    check_step(pool, make_rows(np.random.default_rng(6), 3), STAGES)
    assert pool.statistics()["restarts"] == 0


@pytest.mark.parametrize(("processes", "mode"), [(2, "idle"), (3, "steps"), (1, "steps"), (2, "stuck")])
def test_when_the_coordinator_is_killed_the_workers_leave_and_tidy_up(processes: int, mode: str) -> None:
    coordinator = subprocess.Popen(
        [sys.executable, str(TESTS / "coordinator_process.py"), str(processes), mode], stdout=subprocess.PIPE
    )
    try:
        assert coordinator.stdout is not None
        facts = json.loads(coordinator.stdout.readline())
        names = left_behind(facts["owner"])
        assert len(names) == 5, names  # four segments and the socket
        time.sleep(0.3)
        assert all(runtime_files.process_start_time(pid) for pid in facts["pids"])
    finally:
        coordinator.kill()
        coordinator.communicate()
    assert wait_until(lambda: not any(runtime_files.process_start_time(pid) for pid in facts["pids"]), 2)
    assert not left_behind(facts["owner"])


def test_the_next_start_sweeps_when_nobody_was_left_to_tidy_up() -> None:
    coordinator = subprocess.Popen(
        [sys.executable, str(TESTS / "coordinator_process.py"), "2", "idle"], stdout=subprocess.PIPE
    )
    try:
        assert coordinator.stdout is not None
        facts = json.loads(coordinator.stdout.readline())
        for pid in facts["pids"]:  # the workers first, then the coordinator: nobody notices anything
            os.kill(pid, signal.SIGKILL)
    finally:
        coordinator.kill()
        coordinator.communicate()
    assert left_behind(facts["owner"])
    pool = start_pool(1, stages=STAGES)
    try:
        assert not left_behind(facts["owner"])
        check_step(pool, StepRows(*(np.zeros(1, np.int32) for _ in range(4))), STAGES)
    finally:
        pool.close()
