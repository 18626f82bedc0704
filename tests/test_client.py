"""The Python clients against a real daemon with the demo model: events, credit, time-outs, and losing the daemon."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import left_behind
from service_stand import chunk, final, stand

from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime import connection
from bloomery.runtime.async_client import AsyncClient
from bloomery.runtime.client import Client, ControlClient, new_request_id
from bloomery.runtime.completion import Completion, gather
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.errors import RequestError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.private_daemon import PrivateDaemon
from bloomery.runtime.requests import (
    Admitted,
    Chunk,
    Event,
    Failed,
    Final,
    GenerationRequest,
    Progress,
    SamplingParameters,
)

DEMO = demo_model_path("tiny-qwen3moe")
CONFIG = DaemonConfig(str(DEMO), context=512, slots=4, processes=1, prompt_block=64)
PROMPTS = ("Once upon a time", "The history of the", "In the beginning", "A small house", "Water is", "Two men")
SECONDS = 200.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    before = left_behind()
    with PrivateDaemon(CONFIG) as started:
        yield started
    assert left_behind() <= before


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint) as connected:
        yield connected


def greedy(prompt: str, max_tokens: int = 12, **fields: Any) -> GenerationRequest:
    sampling = SamplingParameters(temperature=0, logprobs=fields.pop("logprobs", 0))
    return GenerationRequest(new_request_id(), text=prompt, max_tokens=max_tokens, sampling=sampling, **fields)


def endless(**fields: Any) -> GenerationRequest:
    return greedy("Once upon a time", 400, ignore_eos=True, **fields)


def content(completion: Completion) -> tuple[tuple[int, ...], str]:
    return completion.tokens, completion.text


def wait_for(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.01)


def error_of(function: Callable[..., Any], *arguments: Any, **named: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        function(*arguments, **named)
    return caught.value


# ---- a session ----


def test_facts_are_those_of_the_file(client: Client) -> None:
    with ModelFile.open(DEMO) as model:
        assert client.facts.architecture == model.architecture
        assert client.facts.name == model.metadata["general.name"]
        assert client.facts.chat_template == model.metadata["tokenizer.chat_template"]
        assert client.facts.parameters == sum(int(np.prod(tensor.shape)) for tensor in model.tensors.values())
        assert client.facts.vocabulary == len(model.metadata["tokenizer.ggml.tokens"])
    assert (client.facts.context, client.facts.slots, client.plan.name) == (512, 4, "cpu")
    assert client.facts.eos in client.facts.end_tokens
    assert len(client.facts.tokenizer_digest) >= 16 and client.plan.digest


def test_events_of_one_request(client: Client) -> None:
    events = list(client.generate(greedy("Once upon a time", 8), timeout=SECONDS))
    assert isinstance(events[0], Admitted) and events[0].prompt_tokens > 0
    assert any(isinstance(event, Progress) for event in events)
    tokens = [token for event in events if isinstance(event, Chunk) for token in event.tokens]
    assert isinstance(events[-1], Final)
    assert (events[-1].reason, events[-1].generated_tokens, len(tokens)) == ("length", 8, 8)
    text = "".join(event.text for event in events if isinstance(event, Chunk))
    assert text == client.detokenize(tokens)


def test_utility_calls(client: Client) -> None:
    text = "Grüße, 世界! \n 🙂 hello"
    assert client.detokenize(client.tokenize(text)) == text
    conversation = [{"role": "user", "content": "Hello"}]
    prompt = client.apply_template(conversation)
    assert "Hello" in prompt and prompt != client.apply_template(conversation, add_generation_prompt=False)
    by_messages = GenerationRequest(new_request_id(), messages=tuple(conversation), max_tokens=0)
    by_text = GenerationRequest(new_request_id(), text=prompt, max_tokens=0)
    counts = {client.complete(request).final.prompt_tokens for request in (by_messages, by_text)}
    assert len(counts) == 1
    assert error_of(client.detokenize, [client.facts.vocabulary]).code == "invalid_request"
    assert error_of(client.call, "no such method").code == "not_found"


def test_numbers_asked_for_arrive(client: Client) -> None:
    request = greedy("Once upon a time", 5, logprobs=3, score_prompt=True, logits="all")
    completion = client.complete(request, timeout=SECONDS)
    prompt = completion.final.prompt_tokens
    assert completion.logits is not None
    assert completion.logits.shape == (prompt + 4, client.facts.vocabulary)
    assert len(completion.prompt_logprobs) == prompt - 1
    assert tuple(completion.logits[prompt - 1 :].argmax(axis=1)) == completion.tokens
    shifted = completion.logits.astype(np.float64) - completion.logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    for row, entry in enumerate(completion.logprobs):
        assert entry.token == completion.tokens[row] == entry.top[0][0] and len(entry.top) == 3
        assert entry.logprob == pytest.approx(logprobs[prompt - 1 + row, entry.token], abs=1e-4)
    prompt_tokens = client.tokenize("Once upon a time")
    expected = [logprobs[row, token] for row, token in enumerate(prompt_tokens[1:])]
    assert completion.prompt_logprobs == pytest.approx(expected, abs=1e-4)


def test_what_the_daemon_refuses(client: Client) -> None:
    too_long = GenerationRequest(new_request_id(), tokens=(5,) * 600, max_tokens=1)
    error = error_of(client.complete, too_long)
    assert (error.code, error.details) == ("exceed_context_size", {"prompt_tokens": 600, "context": 512})
    unknown = GenerationRequest(new_request_id(), tokens=(client.facts.vocabulary,), max_tokens=1)
    failed = list(client.generate(unknown))[-1]
    assert isinstance(failed, Failed) and failed.code == "invalid_request"


def test_what_the_client_refuses_to_send(client: Client) -> None:
    huge = GenerationRequest(new_request_id(), text="x" * (client.limits.max_message + 1))
    assert error_of(client.generate, huge).details["limit"] == client.limits.max_message
    broken = GenerationRequest(new_request_id(), text="\ud800")
    assert error_of(client.generate, broken).code == "invalid_request"
    request = endless()
    with client.generate(request):
        assert error_of(client.generate, request).code == "duplicate_request"
    assert client.complete(greedy("Water is", 1)).tokens


# ---- several at once ----


def test_concurrent_requests_of_one_client_equal_single_ones(client: Client) -> None:
    alone = [content(client.complete(greedy(prompt), timeout=SECONDS)) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: content(client.complete(greedy(prompt), timeout=SECONDS)), PROMPTS))
    assert together == alone
    assert len(set(alone)) == len(PROMPTS)


def test_clients_do_not_disturb_each_other(daemon: PrivateDaemon, client: Client) -> None:
    with Client(daemon.endpoint) as other:
        streams = [client.generate(endless()), other.generate(endless())]
        for stream in streams:
            assert isinstance(next(stream), Admitted)
        streams[0].abort()
        assert gather(streams[0]).final.reason == "aborted"
        assert isinstance(next(streams[1]), (Progress, Chunk))
        streams[1].close()


# ---- ends that come early ----


def running(daemon: PrivateDaemon) -> int:
    with ControlClient(daemon.control) as control:
        metrics = control.metrics()
    return int(metrics["running"] + metrics["service"]["requests_running"])


def test_abort_ends_with_a_final(daemon: PrivateDaemon, client: Client) -> None:
    stream = client.generate(endless(), timeout=SECONDS)
    while not isinstance(next(stream), Chunk):
        pass
    start = time.monotonic()
    client.abort(stream.request_id)
    completion = gather(stream)
    assert completion.final.reason == "aborted" and time.monotonic() - start < 2.0
    assert completion.final.generated_tokens < 400


def test_an_abandoned_stream_is_aborted(daemon: PrivateDaemon, client: Client) -> None:
    for event in client.generate(endless()):
        if isinstance(event, Chunk):
            break
    gc.collect()
    wait_for(lambda: running(daemon) == 0)


def test_a_time_out_aborts(daemon: PrivateDaemon, client: Client) -> None:
    events = list(client.generate(greedy("Once upon a time", 450, ignore_eos=True, logits="all"), timeout=0.05))
    assert isinstance(events[-1], Failed) and events[-1].code == "timeout"
    wait_for(lambda: running(daemon) == 0)
    assert error_of(client.complete, endless(), timeout=0.02).code == "timeout"


def test_closing_the_client_ends_its_streams(daemon: PrivateDaemon) -> None:
    client = Client(daemon.endpoint)
    stream = client.generate(endless())
    client.close()
    assert isinstance((last := list(stream)[-1]), Failed) and last.code == "daemon_lost"
    assert error_of(client.generate, endless()).code == "daemon_lost"
    wait_for(lambda: running(daemon) == 0)


def test_a_slow_reader_with_little_credit_gets_everything(client: Client) -> None:
    expected = content(client.complete(greedy("Two men", 40), timeout=SECONDS))
    events = []
    for event in client.generate(greedy("Two men", 40), credit=2, timeout=SECONDS):
        events.append(event)
        time.sleep(0.02)
    assert content(gather(events)) == expected
    assert sum(isinstance(event, Chunk) for event in events) < 40, "chunks were merged while it slept"


def test_logits_pass_with_the_smallest_credit(client: Client) -> None:
    request = greedy("Once upon a time", 100, ignore_eos=True, logits="all")
    completion = gather(client.generate(request, credit=1, timeout=SECONDS))
    assert completion.logits is not None and len(completion.logits) == completion.final.prompt_tokens + 99


# ---- a daemon that is not there ----


def test_nobody_listens(tmp_path: Path) -> None:
    for endpoint in (f"ipc://{tmp_path}/none", "tcp://127.0.0.1:1"):
        start = time.monotonic()
        error = error_of(Client, endpoint, timeout=10.0)
        assert error.code == "daemon_lost" and endpoint in error.message and error.hint
        assert time.monotonic() - start < 2.0
    with sockets.socket(sockets.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    for kind in (Client, ControlClient):
        error = error_of(kind, f"ipc://{tmp_path}/dead")
        assert error.code == "daemon_lost" and "refused" in error.message.lower()


def test_a_listener_that_does_not_answer(tmp_path: Path) -> None:
    with sockets.socket(sockets.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        deaf.listen(4)
        start = time.monotonic()
        assert error_of(Client, f"ipc://{tmp_path}/deaf", timeout=0.5).code == "timeout"
        assert 0.4 < time.monotonic() - start < 3.0


def test_a_killed_daemon_is_noticed_within_two_seconds() -> None:
    with PrivateDaemon(CONFIG) as daemon, Client(daemon.endpoint) as client:
        control = ControlClient(daemon.control, timeout=1.0)
        streams = [client.generate(endless()) for _ in range(3)]
        assert isinstance(next(streams[0]), Admitted)
        start = time.monotonic()
        os.kill(daemon.pid, signal.SIGKILL)
        for stream in streams:
            last = list(stream)[-1]
            assert isinstance(last, Failed) and last.code == "daemon_lost" and last.hint
        assert time.monotonic() - start < 2.0
        assert error_of(client.generate, endless()).code == "daemon_lost"
        assert error_of(client.tokenize, "x").code == "daemon_lost"
        assert error_of(control.ping).code == "daemon_lost"
        control.close()


def test_a_stopped_daemon_counts_as_lost_after_five_heartbeats() -> None:
    with PrivateDaemon(CONFIG) as daemon, Client(daemon.endpoint) as client:
        stream = client.generate(endless())
        assert isinstance(next(stream), Admitted)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            last = list(stream)[-1]
            assert isinstance(last, Failed) and "silent" in last.message
            assert 4.0 < time.monotonic() - start < 10.0
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


def test_a_daemon_that_is_known_to_run_is_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process is silent but runs, as a starved one. Planted and seen to fail: a rule without `runs`."""
    monkeypatch.setattr(connection, "SILENT_HEARTBEATS", 1)
    with PrivateDaemon(CONFIG) as daemon, Client(daemon.endpoint, runs=lambda: daemon.runs) as client:
        stream = client.generate(endless(), timeout=SECONDS)
        assert isinstance(next(stream), Admitted)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            wait_for(lambda: "is silent for" in caplog.text)
            time.sleep(0.5)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert gather(stream).final.generated_tokens == 400
        assert caplog.text.count("is silent for") == 1
        monkeypatch.setattr(connection, "PATIENCE_S", 2.0)
        stream = client.generate(endless(), timeout=SECONDS)
        assert isinstance(next(stream), Admitted)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            last = list(stream)[-1]
            assert isinstance(last, Failed) and last.code == "daemon_lost" and "silent" in last.message
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


def test_a_reader_that_thinks_long_keeps_its_request(tmp_path: Path) -> None:
    """Heartbeats do not depend on the caller: its thread may be busy for several times as long as the daemon waits for
    a sign. The service is a daemon's that waits for half a second. Planted and seen to fail: neither PING nor PONG."""
    with stand(tmp_path) as served, Client(served.service.endpoint) as client:
        stream = client.generate(endless(), credit=2, timeout=SECONDS)
        assert isinstance(next(stream), Admitted)
        time.sleep(4 * client.limits.client_timeout_s)
        assert not served.engine.aborted
        served.engine.emit(chunk(1, 2, 3), final())
        assert gather(stream).tokens == (1, 2, 3)


# ---- asyncio ----


def test_async_client_equals_the_blocking_one(daemon: PrivateDaemon, client: Client) -> None:
    expected = [content(client.complete(greedy(prompt), timeout=SECONDS)) for prompt in PROMPTS]

    async def main() -> list[tuple[tuple[int, ...], str]]:
        async with AsyncClient(daemon.endpoint) as connected:
            assert connected.facts == client.facts and connected.plan == client.plan
            assert await connected.detokenize(await connected.tokenize("hello")) == "hello"
            assert "hi" in await connected.apply_template([{"role": "user", "content": "hi"}])
            jobs = [connected.complete(greedy(prompt), timeout=SECONDS) for prompt in PROMPTS]
            return [content(completion) for completion in await asyncio.gather(*jobs)]

    assert asyncio.run(main()) == expected


def test_async_iteration_abort_and_time_out(daemon: PrivateDaemon) -> None:
    async def main() -> None:
        client = await AsyncClient.connect(daemon.endpoint)
        events: list[Event] = []
        stream = client.generate(endless())
        async for event in stream:
            events.append(event)
            if sum(isinstance(event, Chunk) for event in events) == 3:
                stream.abort()
        assert isinstance(events[-1], Final) and events[-1].reason == "aborted"
        late = [event async for event in client.generate(endless(logits="all"), timeout=0.02)]
        assert isinstance(late[-1], Failed) and late[-1].code == "timeout"
        with pytest.raises(RequestError, match="600 tokens"):
            await client.complete(GenerationRequest(new_request_id(), tokens=(5,) * 600))
        await client.close()
        with pytest.raises(RequestError, match="not connected"):
            client.generate(endless())

    asyncio.run(main())
    wait_for(lambda: running(daemon) == 0)


def test_a_cancelled_task_aborts_its_request(daemon: PrivateDaemon) -> None:
    async def main() -> None:
        async with AsyncClient(daemon.endpoint) as client:
            task = asyncio.create_task(client.complete(endless()))
            await asyncio.to_thread(wait_for, lambda: running(daemon) > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_for, lambda: running(daemon) == 0)

    asyncio.run(main())


def test_heartbeats_go_on_while_the_loop_is_busy(daemon: PrivateDaemon) -> None:
    async def main() -> int:
        async with AsyncClient(daemon.endpoint) as client:
            stream = client.generate(endless(), credit=2)
            await anext(stream)
            time.sleep(client.limits.heartbeat_s * 2.5)  # not asyncio.sleep: the loop stands still
            *_, last = [event async for event in stream]
            assert isinstance(last, Final)
            return last.generated_tokens

    assert asyncio.run(main()) == 400


def test_threads_and_files_are_gone_after_close(daemon: PrivateDaemon) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    Client(daemon.endpoint).close()
    before, threads = open_files(), threading.active_count()
    for _ in range(5):
        with Client(daemon.endpoint) as client:
            client.complete(greedy("Water is", 1))
        with ControlClient(daemon.control) as control:
            assert control.ping() < 1.0
    assert (open_files(), threading.active_count()) == (before, threads)
