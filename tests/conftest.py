"""What several test modules share: a running daemon with a shipped model, and the proof that nothing stays behind."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

# Before NumPy is loaded, here and in what tests start: the models are so small that threads of its products only wait
# for each other (a step of the reference takes two to twenty times the processor time), and on their number depends in
# which order is summed.
assert "numpy" not in sys.modules, "a plugin has loaded NumPy before its threads could be limited"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from bloomery.runtime.runtime_files import SHARED_MEMORY, owner_is_alive, runtime_directory  # noqa: E402

# A run in the background of a script ignores Ctrl-C and would hand that down. It goes on ignoring it, but by a handler,
# which is not inherited: programs that tests start and interrupt have the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda number, frame: None)

# Tests start programs and workers some hundred times. Where Python is told to keep no bytecode, each would compile all
# its modules, a quarter of what a daemon's start takes: it is kept for the time of the run.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", "") and "PYTHONPYCACHEPREFIX" not in os.environ:
    _bytecode = tempfile.TemporaryDirectory(prefix="bytecode-of-tests-", ignore_cleanup_errors=True)
    os.environ["PYTHONPYCACHEPREFIX"] = _bytecode.name

START_SECONDS = 280.0  # a first start compiles the kernels
LARGE = 400 << 20  # bytes; to look for what can be freed takes a quarter of a second


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a card nothing is prepared for tests that need one."""
    if item.get_closest_marker("gpu"):
        from card_stand import need_card

        need_card()


@pytest.fixture(scope="module", autouse=True)
def give_memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module keeps for its own tests ends with it, and freed memory goes back to the system: the process that
    runs all tests stays below a gigabyte."""
    yield
    for value in list(vars(request.module).values()):
        if getattr(value, "__module__", "") == request.module.__name__ and hasattr(value, "cache_clear"):
            value.cache_clear()
    if (data := sys.modules.get("deepseek_data")) is not None:
        data.forget()
    if psutil.Process().memory_info().rss > LARGE:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def left_behind() -> set[str]:
    """Names of segments and sockets whose owner is dead. Those of daemons that run beside the tests do not count, nor
    what another process of the run leaves for a moment that kills its own."""
    deadline = time.monotonic() + 5
    while True:
        names = [path.name for folder in (SHARED_MEMORY, runtime_directory()) for path in folder.glob("bloomery-*")]
        dead = {name for name in names if not owner_is_alive(name)}
        if not dead or time.monotonic() > deadline:
            return dead
        time.sleep(0.1)


def program(name: str, *arguments: str) -> list[str]:
    """Command line of one of our programs, run by the interpreter that runs the tests."""
    return [sys.executable, "-m", f"bloomery.launcher.{name}", *arguments]


@dataclass(frozen=True)
class Daemon:
    process: subprocess.Popen[str]
    ready: dict[str, Any]

    @property
    def endpoint(self) -> str:
        return str(self.ready["endpoint"])


def start_daemon(*arguments: str, seconds: float = START_SECONDS) -> Daemon:
    """bloomery-launch with --json-status; returns when it has printed its line."""
    command = program("launch", "--json-status", *arguments)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            readable = selector.select(seconds)
        line = process.stdout.readline() if readable else ""
    except BaseException:  # Ctrl-C and pytest's time-out too: no daemon outlives the tests
        process.kill()
        process.wait()
        raise
    if not line:
        process.kill()
        _, errors = process.communicate()
        raise AssertionError(f"no daemon after {seconds:.0f} s: {errors}")
    return Daemon(process, json.loads(line))


def stop_daemon(daemon: Daemon, seconds: float = 20.0) -> int:
    """SIGTERM, then the exit status. A daemon that does not go is killed, and the test fails."""
    if daemon.process.poll() is None:
        daemon.process.send_signal(signal.SIGTERM)
    try:
        daemon.process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        daemon.process.kill()
        daemon.process.communicate()
        raise AssertionError(f"the daemon still ran {seconds:.0f} s after SIGTERM") from None
    return daemon.process.returncode


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, f"processes {pids} are still there"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def demo_daemon() -> Iterator[Daemon]:
    """One daemon a test module, with the faster shipped model room for two sequences; clean exit, no segment left."""
    before = left_behind()
    daemon = start_daemon("--demo", "tiny-qwen3moe", "--parallel", "2")
    try:
        yield daemon
    finally:
        status = stop_daemon(daemon)
    assert status == 0
    assert left_behind() <= before, "segments or sockets stayed behind"
