"""What the engine promises while something happens: aborts, lost workers, raising sinks, drain, close, many threads.

Planted once and seen to fail: an abort that waits for the prompt step; a step cut although it serves others; an abort
lost while the prompt is tokenised; queued requests failed with a lost worker's; no recovery; submits accepted after a
failed one; a sink's exception ending the engine; the lock held during a step; a close that waits for the step; a drain
that keeps the queue; `hold` ignored.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from engine_client import GREEDY, PROMPT, Gate, exhaust, made, running
from toy_model import VOCABULARY, ToyExecutor, ToyTokenizer, solo

from bloomery.runtime.errors import RequestError, WorkerLost
from bloomery.runtime.executor import StepResult, StepRows
from bloomery.runtime.requests import Chunk, Event, Failed, Final, GenerationRequest, SamplingParameters
from bloomery.runtime.tokenizer import Tokenizer


def test_a_queued_request_is_aborted_at_once_and_by_the_caller() -> None:
    executor, client = made(slots=1)
    gate = Gate(executor)
    with running(client):
        busy, queued = client.submit(), client.submit()
        assert gate.entered.wait(20)
        assert client.engine.abort(queued)
        assert client.final(queued).reason == "aborted" and client.threads[queued] == threading.get_ident()
        assert client.last(busy) is None and executor.aborts == 0
        assert not client.engine.abort(queued) and not client.engine.abort(b"?" * 16)
        gate.open.set()
        client.wait(busy)


def test_a_long_prompt_step_is_cut_short_by_its_abort() -> None:
    executor, client = made(slots=2)
    gate = Gate(executor)
    with running(client):
        request_id = client.submit()
        assert gate.entered.wait(20)
        client.engine.abort(request_id)
        final = client.wait(request_id)
        assert isinstance(final, Final) and final.reason == "aborted" and not gate.open.is_set()
        assert final.prompt_seconds > 0 and final.generate_seconds == 0
        assert executor.history == [] and client.engine.metrics()["aborted_steps"] == 1
        gate.open.set()
        again = client.submit(max_tokens=3)
        client.wait(again)
    assert (
        client.tokens(again)
        == solo(GenerationRequest(again, tokens=PROMPT, max_tokens=3, sampling=GREEDY), 64, 0).tokens
    )


def test_an_abort_just_before_the_step_begins_is_not_lost() -> None:
    executor, client = made(slots=1)
    step = executor.step

    def late(rows: StepRows) -> StepResult:
        client.abort(request_id)  # the engine has decided on this step, the executor has not begun it
        return step(rows)

    executor.step = late  # type: ignore[method-assign]
    request_id = client.submit()
    client.engine.turn()
    assert executor.aborts == 1 and executor.history == [] and client.engine.metrics()["aborted_steps"] == 1
    exhaust(client)
    assert client.final(request_id).reason == "aborted"


def test_a_step_that_serves_others_too_is_not_cut() -> None:
    executor, client = made(slots=2, max_rows=100, max_out_rows=8)
    executor.during = lambda: client.abort(one)
    one, other = client.submit(PROMPT[:10]), client.submit(PROMPT[5:], max_tokens=2)
    client.engine.turn()
    assert executor.aborts == 0 and len(executor.history[0]) == 2
    executor.during = lambda: None
    exhaust(client)
    assert client.final(one).reason == "aborted" and client.final(other).reason == "length"


def test_abort_with_a_failure_ends_as_failed() -> None:
    _, client = made(slots=1)
    request_id, queued = client.submit(), client.submit()
    client.engine.turn()
    for which in (request_id, queued):
        assert client.engine.abort(which, RequestError("client_stalled", "reads nothing", "read", limit=3))
    exhaust(client)
    for which in (request_id, queued):
        assert client.failure(which).code == "client_stalled" and client.failure(which).details == {"limit": 3}


def test_an_abort_while_the_prompt_is_tokenised_is_not_lost() -> None:
    class Slow(ToyTokenizer):
        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
            assert client.engine.abort(request_id)
            assert not client.engine.wait_idle(0)
            return super().encode(text)

    request_id = b"a" * 16
    executor, client = made(tokenizer=cast(Tokenizer, Slow()))
    client.submit_request(GenerationRequest(request_id, text="abc"))
    assert client.final(request_id).reason == "aborted" and not client.engine.turn() and executor.history == []
    assert client.engine.wait_idle(0)


def test_a_lost_worker_ends_the_running_and_spares_the_queued() -> None:
    executor, client = made(slots=2)
    kept = client.submit(PROMPT[:20], max_tokens=2)
    exhaust(client)
    lost = [client.submit(max_tokens=20), client.submit(PROMPT[::-1], max_tokens=20)]
    queued = client.submit((*PROMPT[:20], 1, 2), max_tokens=5)
    for _ in range(6):
        client.engine.turn()

    def lose() -> None:
        executor.during = lambda: None
        raise WorkerLost("worker 1 (pid 7) died: killed", "")

    executor.during = lose
    assert client.engine.turn()
    for request_id in lost:
        assert client.failure(request_id).code == "worker_lost" and "pid 7" in client.failure(request_id).message
        assert client.failure(request_id).hint
    assert executor.recoveries == 1 and client.engine.state == "ready" and client.last(queued) is None
    exhaust(client)
    assert client.final(kept).reason == client.final(queued).reason == "length"
    expected = solo(GenerationRequest(queued, tokens=(*PROMPT[:20], 1, 2), max_tokens=5, sampling=GREEDY), 64, 0)
    assert client.tokens(queued) == expected.tokens
    assert client.engine.metrics()["requests"] == {"length": 2, "worker_lost": 2}


def test_a_failed_recovery_is_told_and_refused() -> None:
    executor, client = made(slots=1)
    executor.recoverable = False

    def lose() -> None:
        raise WorkerLost("worker 0 died", "")

    executor.during = lose
    running_one, queued = client.submit(), client.submit()
    client.engine.turn()
    assert client.failure(running_one).code == client.failure(queued).code == "worker_lost"
    assert client.engine.state == "failed" and "worker 0 does not start" in client.engine.status()["error"]
    assert client.failure(client.submit()).code == "worker_lost"
    assert not client.engine.turn() and client.engine.wait_idle(0)


def test_recovery_shows_as_loading_and_accepts_requests() -> None:
    executor, client = made(slots=1)
    states: list[str] = []
    during_recovery: list[bytes] = []

    def recover() -> None:
        states.append(client.engine.state)
        during_recovery.append(client.submit(max_tokens=2))
        ToyExecutor.recover(executor)

    def lose() -> None:
        executor.during = lambda: None
        raise WorkerLost("worker 0 died", "")

    executor.recover, executor.during = recover, lose  # type: ignore[method-assign]
    client.submit()
    exhaust(client)
    assert states == ["loading"] and client.final(during_recovery[0]).reason == "length"


def test_a_sink_that_raises_ends_only_its_request() -> None:
    _, client = made(slots=2)
    seen: list[Event] = []

    def bad(event: Event) -> None:
        seen.append(event)
        if isinstance(event, Chunk):
            raise RuntimeError("full")

    client.engine.submit(GenerationRequest(b"b" * 16, tokens=PROMPT, sampling=GREEDY), bad)
    good = client.submit(max_tokens=5)
    exhaust(client)
    assert [type(event) for event in seen[-2:]] == [Chunk, Failed] and sum(isinstance(e, Failed) for e in seen) == 1
    assert cast(Failed, seen[-1]).code == "internal" and client.final(good).generated_tokens == 5
    assert client.engine.wait_idle(0)


def test_a_request_whose_sampling_fails_ends_alone() -> None:
    _, client = made(slots=2)
    everything = tuple((token, -np.inf) for token in range(VOCABULARY))
    bad = client.submit(sampling=replace(GREEDY, logit_bias=everything))
    good = client.submit(max_tokens=5)
    exhaust(client)
    assert client.failure(bad).code == "invalid_request" and client.final(good).generated_tokens == 5


def test_a_held_request_keeps_its_slot_and_stands_still() -> None:
    _, client = made(slots=2)
    held, other = client.submit(max_tokens=5), client.submit(PROMPT[3:], max_tokens=5)
    client.engine.turn()
    assert client.engine.hold(held, True)
    exhaust(client)
    assert client.last(held) is None and client.final(other).generated_tokens == 5
    assert [slot["request"] for slot in client.engine.status()["slots"]] == [held.hex(), ""]
    assert client.engine.hold(held, False)
    exhaust(client)
    assert client.final(held).generated_tokens == 5 and not client.engine.hold(held, True)


def test_drain_finishes_the_running_and_fails_the_rest() -> None:
    _, client = made(slots=1)
    running_one, queued = client.submit(max_tokens=5), client.submit()
    client.engine.turn()
    client.engine.drain()
    assert client.engine.state == "draining" and client.failure(queued).code == "shutting_down"
    assert client.failure(client.submit()).code == "shutting_down"
    assert not client.engine.wait_idle(0)
    exhaust(client)
    assert client.final(running_one).reason == "length" and client.engine.wait_idle(0)


def test_close_ends_a_running_step_and_every_request() -> None:
    executor, client = made(slots=1)
    gate = Gate(executor)
    with running(client) as thread:
        requests = [client.submit(), client.submit()]
        assert gate.entered.wait(20)
        client.engine.close()
        thread.join(5)
        assert not thread.is_alive() and not gate.open.is_set()
    assert [client.failure(request_id).code for request_id in requests] == ["shutting_down"] * 2
    assert client.failure(client.submit()).code == "shutting_down"


def test_a_defect_of_the_engine_is_told_to_everybody() -> None:
    _, client = made(slots=1)
    requests = [client.submit(), client.submit()]
    client.engine._scheduler.plan = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        client.engine.run()
    assert [client.failure(request_id).code for request_id in requests] == ["internal"] * 2
    assert client.engine.state == "failed" and client.failure(client.submit()).code == "internal"


def test_status_and_metrics_never_wait_for_a_step() -> None:
    executor, client = made(slots=2)
    gate = Gate(executor)
    with running(client):
        request_id = client.submit()
        assert gate.entered.wait(20)
        times = []
        for _ in range(200):
            begun = time.perf_counter()
            status, _ = client.engine.status(), client.engine.metrics()
            times.append(time.perf_counter() - begun)
        assert sorted(times)[190] < 0.005
        [slot] = [slot for slot in status["slots"] if slot["request"] == request_id.hex()]
        assert slot["phase"] == "prompt" and slot["prompt_tokens"] == len(PROMPT) and slot["cached"] == 0
        assert client.engine._lock.acquire(timeout=1), "the lock is free during a step"
        client.engine._lock.release()
        gate.open.set()
        client.wait(request_id)


def test_many_threads_at_once() -> None:
    """60 requests of 12 threads, a third of them aborted at random moments, with the engine in its own thread."""
    _, client = made(queue_limit=100, slots=4, max_rows=24, max_out_rows=8)
    requests = [
        GenerationRequest(
            number.to_bytes(16, "big"),
            tokens=PROMPT[: 5 + number % 30],
            max_tokens=12,
            sampling=SamplingParameters(seed=number, temperature=1.0),
        )
        for number in range(60)
    ]

    def drive(mine: list[GenerationRequest]) -> None:
        for request in mine:
            client.submit_request(request)
            if request.request_id[-1] % 3 == 0:
                time.sleep(0.0003 * (request.request_id[-1] % 7))
                client.engine.abort(request.request_id)

    with running(client):
        threads = [threading.Thread(target=drive, args=(requests[start::12],)) for start in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for request in requests:
            client.wait(request.request_id)
        assert client.engine.wait_idle(20)
    for request in requests:
        final = client.final(request.request_id)
        expected = solo(request, 64, request.sampling.seed or 0)
        tokens = client.tokens(request.request_id)
        if final.reason == "aborted":
            assert request.request_id[-1] % 3 == 0 and tokens == expected.tokens[: len(tokens)]
        else:
            assert (tokens, final.reason) == (expected.tokens, expected.reason)
