"""A daemon's life: starting and its errors, answering while busy, losing workers, and ending without a trace."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import wait_for

from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime.card_probe import may_have_card
from bloomery.runtime.client import Client, ControlClient, new_request_id
from bloomery.runtime.coordinator import Stopped, StopSwitch
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.endpoints import EndpointError
from bloomery.runtime.errors import BloomeryError, ModelFileError, PlanError, RequestError
from bloomery.runtime.private_daemon import PrivateDaemon
from bloomery.runtime.requests import Admitted, Chunk, Failed, Final, GenerationRequest, SamplingParameters
from bloomery.runtime.runtime_files import SHARED_MEMORY, runtime_directory, sweep

DEMO = str(demo_model_path("tiny-qwen3moe"))
CONFIG = DaemonConfig(DEMO, context=1024, slots=2, processes=2, prompt_block=64)
ALONE = replace(CONFIG, processes=1)  # where it does not matter how many workers there are: each takes time to start
SECONDS = 200.0


def greedy(max_tokens: int, **fields: Any) -> GenerationRequest:
    sampling = SamplingParameters(temperature=0)
    prompt = fields.pop("tokens", None) or (268,) * 5
    return GenerationRequest(
        new_request_id(), tokens=tuple(prompt), max_tokens=max_tokens, sampling=sampling, ignore_eos=True, **fields
    )


def files_of(pid: int) -> list[Path]:
    return [path for folder in (SHARED_MEMORY, runtime_directory()) for path in folder.glob(f"bloomery-{pid}-*")]


def start_child(config: DaemonConfig, *more: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bloomery.runtime", json.dumps(asdict(config)), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def lines_of(process: subprocess.Popen[str], until: str) -> list[dict[str, Any]]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(json.loads(line))
        if until in lines[-1]:
            return lines
    raise AssertionError(f"no {until} line: {lines}; {process.communicate()[1]}")


@contextmanager
def child(config: DaemonConfig) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = start_child(config)
    try:
        yield process, lines_of(process, "ready")[-1]["ready"]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with PrivateDaemon(CONFIG) as started:
        yield started
    assert not files_of(started.pid)


# ---- ready, status, metrics ----


def test_ready_and_status(daemon: PrivateDaemon) -> None:
    status = daemon.status
    assert (status["pid"], status["plan"], status["ctx"], status["slots"]) == (daemon.pid, "cpu", 1024, 2)
    # a session of its own would be a group of its own to the scheduler (`cpu_limits.session_groups`)
    assert os.getsid(daemon.pid) == os.getsid(0) and os.getpgid(daemon.pid) == daemon.pid != os.getpgid(0)
    for endpoint in (daemon.endpoint, daemon.control):
        path = Path(endpoint.removeprefix("ipc://"))
        assert path.parent == runtime_directory() and stat.S_IMODE(path.lstat().st_mode) == 0o600
    with ControlClient(daemon.control) as control:
        told = control.status()
    assert told["state"] == "ready" and told["model"] == status["model"]
    assert told["endpoint"] == daemon.endpoint and told["control"] == daemon.control
    assert told["memory"]["host experts"] > 1e6 and told["memory"]["KV cache"] > 1e6
    assert len(told["workers"]["pids"]) == 2 and all(psutil.pid_exists(pid) for pid in told["workers"]["pids"])
    assert [slot["slot"] for slot in told["engine"]["slots"]] == [0, 1]


def test_metrics_count(daemon: PrivateDaemon) -> None:
    with ControlClient(daemon.control) as control, Client(daemon.endpoint) as client:
        before = control.metrics()
        client.complete(greedy(7, cache_prompt=False))
        wait_for(lambda: control.metrics()["generated_tokens"] >= before["generated_tokens"] + 7)  # after the event
        after = control.metrics()
    assert after["generated_tokens"] - before["generated_tokens"] == 7
    assert after["service"]["requests"] - before["service"]["requests"] == 1
    assert after["service"]["sessions"] >= 1 and after["resident_bytes"] > 1e7


def test_progress_is_told_while_loading() -> None:
    seen: list[tuple[str, int, int]] = []
    with PrivateDaemon(CONFIG, progress=lambda stage, done, total: seen.append((stage, done, total))) as daemon:
        assert daemon.pid
    assert {"open", "load"} <= {stage for stage, _, _ in seen}
    assert all(0 <= done <= total for _, done, total in seen)


def test_sockets_answer_while_loading(tmp_path: Path) -> None:
    """The control socket tells the stage, the client socket "loading", until both are ready."""
    config = replace(ALONE, endpoint=f"ipc://{tmp_path}/d")
    process = start_child(config)
    try:
        wait_for(lambda: (tmp_path / "d").exists() and (tmp_path / "d.control").exists())
        states = []
        with ControlClient(f"{config.endpoint}.control") as control:
            while not states or states[-1]["state"] != "ready":
                states.append(control.status())
                time.sleep(0.005)
                assert len(states) < 10_000
        loading = [state for state in states if state["state"] == "loading"]
        assert loading and all({"stage", "done", "total"} == set(state["progress"]) for state in loading)
        assert len({state["progress"]["stage"] for state in loading}) >= 2
        with Client(config.endpoint) as client:
            assert client.control == f"{config.endpoint}.control"
    finally:
        process.terminate()
        assert process.communicate(timeout=20)[1] == ""
    assert process.returncode == 0 and not list(tmp_path.iterdir())


def test_a_client_waits_for_the_model(tmp_path: Path) -> None:
    config = replace(ALONE, endpoint=f"ipc://{tmp_path}/d")
    process = start_child(config)
    try:
        wait_for((tmp_path / "d").exists)
        with pytest.raises(RequestError) as caught:
            Client(config.endpoint, timeout=0.2)
        assert caught.value.code == "loading" and caught.value.details["stage"]
        with Client(config.endpoint, timeout=SECONDS) as client:
            assert client.complete(greedy(2)).tokens
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_starting_imports_nothing_that_it_does_not_need() -> None:
    """The sockets must answer early and a warm start be short; numba is the workers', the rest comes when it is due."""
    code = "import sys, bloomery.runtime.coordinator; print(' '.join(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"numba", "llvmlite", "gguf", "tokenizers", "regex", "jinja2", "rich", "psutil", "asyncio"}
    assert not heavy & set(loaded)


# ---- errors of a start ----


def start_error(kind: type[BloomeryError], **fields: Any) -> BloomeryError:
    with pytest.raises(kind) as caught:
        PrivateDaemon(replace(CONFIG, **fields)).close()
    assert type(caught.value) is kind and caught.value.hint
    return caught.value


def test_a_missing_file(tmp_path: Path) -> None:
    assert f"{tmp_path}/none.gguf" in start_error(ModelFileError, model=f"{tmp_path}/none.gguf").message


def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(Path(DEMO).read_bytes()[:100_000])
    assert str(path) in start_error(ModelFileError, model=str(path)).message


@pytest.mark.parametrize("plan", ["b", "bp", "c"])
def test_a_plan_that_is_not_available(plan: str) -> None:
    message = start_error(PlanError, plan=plan, model="/not/even/looked/at").message
    assert (f"plan {plan} " in message and "is not built yet" in message) or "no plan 'c'" in message


@pytest.mark.skipif(may_have_card(), reason="there may be a card")
def test_plan_a_names_what_is_missing() -> None:
    message = start_error(PlanError, plan="a").message
    assert "plans with a card need PyCUDA" in message or "no NVIDIA driver" in message


def test_a_cache_that_does_not_fit() -> None:
    message = start_error(PlanError, context=1 << 30).message
    assert "does not fit: KV cache takes" in message and "too many" in message and "host experts 15" in message


def test_an_endpoint_that_is_not_allowed() -> None:
    assert "loopback" in start_error(EndpointError, endpoint="tcp://0.0.0.0:5555").message


def test_a_daemon_that_dies_while_starting() -> None:
    def family() -> set[int]:
        return {process.pid for process in psutil.Process().children(recursive=True)}

    def kill(stage: str, done: int, total: int) -> None:
        started = family() - before
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        killed.update(started)

    before: set[int] = family()
    killed: set[int] = set()
    with pytest.raises(BloomeryError, match="was killed by SIGKILL before it was ready"):
        PrivateDaemon(CONFIG, progress=kill)
    wait_for(lambda: family() <= before)
    sweep()
    assert killed and not any(files_of(pid) for pid in killed)


def test_the_log_of_a_daemon_that_dies_is_shown_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bloomery.runtime.daemon_log.log_folder", lambda: tmp_path)
    daemon = PrivateDaemon(ALONE)
    with ControlClient(daemon.control) as control:
        (worker,) = control.status()["workers"]["pids"]
        os.kill(worker, signal.SIGKILL)  # the daemon writes a line about it
        with Client(daemon.endpoint) as client:
            list(client.generate(greedy(2), timeout=SECONDS))
    os.kill(daemon.pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(daemon.pid) or psutil.Process(daemon.pid).status() == "zombie")
    daemon.close()
    (file,) = tmp_path.iterdir()
    assert "worker" in file.read_text() and "was killed by SIGKILL" in file.read_text()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the daemon (pid {daemon.pid}) was killed by SIGKILL; its log: {file}; its")
    assert record.getMessage().endswith(file.read_text().strip())
    sweep()


# ---- the control socket while the model is busy ----


ECHO = """
import sys, threading
from bloomery.runtime.control import ControlSocket
socket = ControlSocket(sys.argv[1], {"status": dict, "metrics": dict})
print("listening", flush=True)
sys.stdin.read()
socket.close()
"""


@pytest.fixture
def idle_control(tmp_path: Path) -> Iterator[ControlClient]:
    """A control socket in a process that does nothing else: what the machine's own load costs."""
    endpoint = f"ipc://{tmp_path}/idle"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", ECHO, endpoint], text=True, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "listening\n"
    with ControlClient(endpoint) as control:
        yield control
    process.communicate(timeout=10)


def test_control_answers_within_ten_milliseconds_while_a_long_prompt_runs(
    daemon: PrivateDaemon, idle_control: ControlClient
) -> None:
    """p99 of 300 calls of each method, less what an idle process of the same load takes (under 1 ms on a machine that
    has nothing else to do). One of three rounds has to do."""
    late = []
    for _ in range(3):
        values = busy_latency(daemon, idle_control)
        print("p99 in ms (busy, idle):", values)
        late.append(max(busy - idle for busy, idle in values))
        if late[-1] < 10.0:
            break
    assert late[-1] < 10.0, late


def busy_latency(daemon: PrivateDaemon, idle_control: ControlClient) -> list[tuple[float, float]]:
    """99th percentiles in ms of ping, status and metrics: of the busy daemon and, in turn with it, the idle process."""
    stop, prompts = threading.Event(), 0

    def load() -> None:
        nonlocal prompts
        with Client(daemon.endpoint) as client:
            while not stop.is_set():
                tokens = tuple((index * 7 + prompts) % 8000 for index in range(1000))
                client.complete(greedy(1, tokens=tokens, cache_prompt=False), timeout=SECONDS)
                prompts += 1

    def timed(control: ControlClient, method: str) -> float:
        start = time.perf_counter()
        control.call(method)
        return 1e3 * (time.perf_counter() - start)

    thread = threading.Thread(target=load)
    with ControlClient(daemon.control) as control:
        thread.start()
        try:
            wait_for(lambda: control.metrics()["running"] > 0)
            percentiles = []
            for method in ("ping", "status", "metrics"):
                times = [(timed(control, method), timed(idle_control, method)) for _ in range(300)]
                busy, idle = (sorted(values)[int(0.99 * len(values))] for values in zip(*times))
                percentiles.append((round(busy, 2), round(idle, 2)))
        finally:
            stop.set()
            thread.join()
    assert prompts >= 1, "the model was busy"
    return percentiles


# ---- losing processes ----


def test_a_killed_worker_ends_the_request_and_is_replaced(daemon: PrivateDaemon) -> None:
    with Client(daemon.endpoint) as client, ControlClient(daemon.control) as control:
        expected = client.complete(greedy(20), timeout=SECONDS).tokens
        victim = control.status()["workers"]["pids"][1]
        stream = client.generate(greedy(900), timeout=SECONDS)
        while not isinstance(next(stream), Chunk):
            pass
        start = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        last = list(stream)[-1]
        seconds = time.monotonic() - start
        assert isinstance(last, Failed) and last.code == "worker_lost" and "SIGKILL" in last.message
        assert seconds < 2.0
        assert client.complete(greedy(20), timeout=SECONDS).tokens == expected
        pids = control.status()["workers"]["pids"]
        assert victim not in pids and len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
        assert control.metrics()["recoveries"] >= 1 and control.status()["state"] == "ready"


def test_a_killed_coordinator_leaves_nothing_after_the_next_start() -> None:
    process = start_child(ALONE)
    ready = lines_of(process, "ready")[-1]["ready"]
    with ControlClient(ready["control"]) as control, Client(ready["endpoint"]) as client:
        workers = control.status()["workers"]["pids"]
        stream = client.generate(greedy(900))
        assert isinstance(next(stream), Admitted)
        process.kill()
        process.communicate()
        assert isinstance(list(stream)[-1], Failed)
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in workers))
    with PrivateDaemon(ALONE):
        assert not files_of(process.pid)


def test_a_private_daemon_ends_with_its_killed_parent(tmp_path: Path) -> None:
    code = f"""
import sys, time, threading
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.private_daemon import PrivateDaemon
def start():
    daemon = PrivateDaemon(DaemonConfig({DEMO!r}, context=256, slots=1, processes=1))
    print(daemon.pid, daemon.control, flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()  # the thread that started the daemon has ended; the daemon must stay
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, control_endpoint = parent.stdout.readline().split()
    with ControlClient(control_endpoint) as control:
        time.sleep(0.5)
        workers = control.status()["workers"]["pids"]
    parent.kill()
    parent.communicate()
    wait_for(lambda: not any(psutil.pid_exists(number) for number in (int(pid), *workers)))
    assert not files_of(int(pid))


def test_a_daemon_whose_parent_is_gone_already_ends_at_once() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    process = start_child(replace(ALONE, exit_with_parent=True), str(gone.pid))
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and "ready" not in out and errors == ""
    assert not files_of(process.pid)


# ---- stopping ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_an_idle_daemon_at_once(number: int) -> None:
    with child(ALONE) as (process, ready), Client(ready["endpoint"]) as client:
        client.complete(greedy(2))
        with ControlClient(ready["control"]) as control:
            workers = control.status()["workers"]["pids"]
        start = time.monotonic()
        process.send_signal(number)
        out, errors = process.communicate(timeout=20)
        assert (process.returncode, out, errors) == (0, "", "")
        assert time.monotonic() - start < 3.0
        assert not files_of(process.pid) and not any(psutil.pid_exists(pid) for pid in workers)


def test_sigterm_ends_running_streams_cleanly() -> None:
    with child(ALONE) as (process, ready), Client(ready["endpoint"]) as client:
        streams = [client.generate(greedy(4000 if number else 1000)) for number in range(4)]
        assert isinstance(next(streams[0]), Admitted)
        process.send_signal(signal.SIGTERM)
        for stream in streams:
            last = list(stream)[-1]
            assert isinstance(last, Final) or last.code == "shutting_down", last
        process.communicate(timeout=20)
        assert process.returncode == 0 and not files_of(process.pid)


def test_shutdown_over_the_control_socket() -> None:
    with child(ALONE) as (process, ready), ControlClient(ready["control"]) as control:
        control.shutdown()
        process.communicate(timeout=20)
        assert process.returncode == 0 and not files_of(process.pid)


def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    with child(ALONE) as (process, ready), ControlClient(ready["control"]) as control:
        with Client(ready["endpoint"]) as client:
            stream = client.generate(greedy(300), timeout=SECONDS)
            assert isinstance(next(stream), Admitted)
            control.drain()
            assert control.status()["state"] == "draining"
            refused = list(client.generate(greedy(1)))[-1]
            assert isinstance(refused, Failed) and refused.code == "shutting_down"
            last = list(stream)[-1]
            assert isinstance(last, Final) and last.generated_tokens == 300
        with pytest.raises(RequestError) as caught:
            Client(ready["endpoint"])
        assert caught.value.code == "shutting_down"
        assert process.poll() is None
        control.shutdown()
        process.communicate(timeout=20)


def test_shutdown_after_drain_lets_everything_finish_until_told_again() -> None:
    with child(ALONE) as (process, ready), ControlClient(ready["control"]) as control:
        with Client(ready["endpoint"]) as client:
            streams = [client.generate(greedy(1000), timeout=SECONDS) for _ in range(2)]
            assert all(isinstance(next(stream), Admitted) for stream in streams)
            control.drain()
            control.shutdown()
            last = list(streams[0])[-1]
            assert isinstance(last, Final) and last.generated_tokens == 1000
        process.communicate(timeout=20)
        assert process.returncode == 0


@pytest.mark.parametrize("delay", [0.0, 0.2, 0.5, 1.0])
def test_sigterm_while_loading(delay: float, tmp_path: Path) -> None:
    process = start_child(replace(ALONE, endpoint=f"ipc://{tmp_path}/d"))
    wait_for((tmp_path / "d").exists)
    time.sleep(delay)
    process.terminate()
    out, errors = process.communicate(timeout=20)
    was_ready = '"ready"' in out  # a fast machine has loaded it all before the longest delay is over
    assert (process.returncode, errors) == (0 if was_ready else 128 + signal.SIGTERM, ""), out
    assert not files_of(process.pid) and not list(tmp_path.iterdir())


def test_a_stop_where_python_drops_exceptions(capsys: pytest.CaptureFixture[str]) -> None:
    """Planted once and seen to fail: without the hook the stop is printed and forgotten."""

    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1e-6)

    with StopSwitch() as stop, pytest.raises(Stopped), stop.loading():
        Finalised()
        wait_for(lambda: False)
    assert stop.signal == signal.SIGTERM and capsys.readouterr().err == ""


def test_the_queue_refuses_with_a_time_to_wait() -> None:
    with (
        PrivateDaemon(replace(ALONE, slots=1, queue_limit=2)) as daemon,
        Client(daemon.endpoint) as client,
    ):
        streams = [client.generate(greedy(900), timeout=SECONDS) for _ in range(6)]
        assert isinstance(next(streams[0]), Admitted)
        for stream in streams[3:]:
            failed = next(stream)
            assert isinstance(failed, Failed) and failed.code == "overloaded"
            assert float(failed.details["retry_after_s"]) > 0
        for stream in streams:
            stream.close()
