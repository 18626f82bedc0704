"""The client socket alone: sessions, credit, stalls, clients that go away. The engine is a scripted one; test_client.py
and test_daemon.py run the real one."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from service_stand import FACTS, LIMITS, SECONDS, Peer, Stand, chunk, final, stand, wait_for

from bloomery.runtime.facts import Limits, Welcome
from bloomery.runtime.messages import chunk_cost, read_event
from bloomery.runtime.protocol import NO_REQUEST, Kind, Message
from bloomery.runtime.requests import Chunk, Event, Final, TokenLogprob
from bloomery.runtime.service import Service


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Stand]:
    with stand(tmp_path) as built:
        yield built


# ---- sessions ----


def test_hello_before_the_model_is_loaded(tmp_path: Path) -> None:
    service = Service(f"ipc://{tmp_path}/client", LIMITS, lambda: {"stage": "compile", "done": 3, "total": 9})
    context: zmq.Context[Any] = zmq.Context()
    peer = Peer(context, service.endpoint)
    answer = peer.hello()
    assert answer.body["code"] == "loading" and answer.body["details"] == {"stage": "compile", "done": 3, "total": 9}
    peer.socket.close()
    context.term()
    service.close()


def test_welcome_says_everything(served: Stand) -> None:
    welcome = Welcome.of(served.peer(greet=False).hello().body)
    assert (welcome.version, welcome.model, welcome.limits) == (1, FACTS, LIMITS)


def test_versions_without_overlap(served: Stand) -> None:
    peer = served.peer(greet=False)
    peer.send(Kind.HELLO, versions=[7, 8])
    answer = peer.receive()
    assert answer.body["code"] == "version_mismatch" and answer.body["details"] == {"spoken": "1"}
    peer.send(Kind.HELLO, versions=[1, 7])
    assert peer.receive().body["version"] == 1


def test_nothing_without_hello(served: Stand) -> None:
    peer = served.peer(greet=False)
    peer.send(Kind.REQUEST, b"r" * 16, text="x")
    answer = peer.receive()
    assert (answer.request_id, answer.body["code"]) == (b"r" * 16, "no_session")
    peer.send(Kind.PING)
    assert peer.receive().body["code"] == "no_session"
    assert not served.engine.requests


def test_socket_is_private(served: Stand) -> None:
    path = served.service.endpoint.removeprefix("ipc://")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


# ---- requests ----


def test_events_arrive_in_order_under_the_clients_own_id(served: Stand) -> None:
    peer = served.peer()
    request_id = peer.request(max_tokens=5, sampling={"temperature": 0})
    (internal,) = served.engine.requests
    assert internal != request_id
    assert served.engine.requests[internal].max_tokens == 5
    served.engine.emit(chunk(1), chunk(2, 3), final())
    received: list[Event] = []
    while not received or not isinstance(received[-1], Final):
        message = peer.receive()
        assert message.request_id == request_id
        received.append(read_event(message))
    tokens = [token for event in received if isinstance(event, Chunk) for token in event.tokens]
    text = "".join(event.text for event in received if isinstance(event, Chunk))
    assert (tokens, text) == ([1, 2, 3], "1 2 3 ")
    peer.silence(0.2)
    assert peer.request() == request_id, "the id is free again"


def test_two_clients_may_use_the_same_id(served: Stand) -> None:
    first, second = served.peer(), served.peer()
    first.request(), second.request()
    assert len(served.engine.requests) == 2
    first.send(Kind.ABORT, b"\1" * 16)
    assert first.receive().body["reason"] == "aborted"
    second.silence(0.2)


def test_a_repeated_id_leaves_the_running_request_alone(served: Stand) -> None:
    peer = served.peer()
    request_id = peer.request()
    peer.send(Kind.REQUEST, request_id, text="again")
    answer = peer.receive()
    assert (answer.request_id, answer.body["code"]) == (NO_REQUEST, "duplicate_request")
    assert answer.body["details"]["id"] == request_id.hex()
    served.engine.emit(final())
    assert (answer := peer.receive()).kind == Kind.FINAL and answer.request_id == request_id


def test_too_many_requests_in_flight(served: Stand) -> None:
    peer = served.peer()
    for number in range(1, 5):
        peer.request(number)
    peer.send(Kind.REQUEST, b"\5" * 16, text="x")
    answer = peer.receive()
    assert answer.body["code"] == "overloaded" and answer.body["details"] == {"retry_after_s": 1, "limit": 4}
    assert len(served.engine.requests) == 4


def test_abort_while_the_prompt_is_still_being_tokenised(served: Stand) -> None:
    peer = served.peer()
    served.engine.gate.clear()
    peer.send(Kind.REQUEST, b"\1" * 16, text="long")
    assert served.engine.entered.wait(SECONDS)
    peer.send(Kind.REQUEST, b"\2" * 16, text="behind it")
    peer.send(Kind.ABORT, b"\1" * 16)
    peer.send(Kind.ABORT, b"\2" * 16)
    wait_for(lambda: len(served.engine.aborted) >= 2)
    served.engine.gate.set()
    ends = [message for message in (peer.receive() for _ in range(3)) if message.kind == Kind.FINAL]
    assert {message.request_id for message in ends} == {b"\1" * 16, b"\2" * 16}
    assert all(message.body["reason"] == "aborted" for message in ends)
    assert len(served.engine.requests) == 1, "the second never reached the engine"


def test_a_bad_field_ends_only_that_request(served: Stand) -> None:
    peer = served.peer()
    running = peer.request()
    peer.send(Kind.REQUEST, b"\2" * 16, text="x", stop=[1])
    answer = peer.receive()
    assert (answer.request_id, answer.body["code"]) == (b"\2" * 16, "invalid_request")
    assert answer.body["details"] == {"field": "stop[0]"}
    served.engine.emit(final())
    assert peer.receive().request_id == running


def test_shutdown_ends_what_runs(tmp_path: Path) -> None:
    with stand(tmp_path) as served:
        peer = served.peer()
        request_id = peer.request(credit=0)
        served.engine.emit(chunk(1))
        served.engine.sinks.clear()
        served.service.refuse_new()
        peer.send(Kind.REQUEST, b"\2" * 16, text="x")
        assert peer.receive().body["code"] == "shutting_down"
        served.service.close()
        answer = peer.receive()
        assert (answer.request_id, answer.body["code"]) == (request_id, "shutting_down")
        served.service.close = lambda: None  # type: ignore[method-assign]


# ---- credit ----


def test_without_credit_chunks_are_merged_and_wait(served: Stand) -> None:
    peer = served.peer()
    request_id = peer.request(credit=1)
    served.engine.emit(chunk(1))
    assert peer.receive().body["tokens"] == [1]
    served.engine.emit(*(chunk(token) for token in range(2, 20)), final())
    peer.silence(0.3)
    peer.send(Kind.CREDIT, request_id, chunks=1)
    merged, end = peer.receive(), peer.receive()
    assert merged.body == {"tokens": list(range(2, 20)), "text": "".join(f"{token} " for token in range(2, 20))}
    assert end.kind == Kind.FINAL


def test_chunks_with_logprobs_stay_apart(served: Stand) -> None:
    """Tokens that came while others were on their way; their neighbours without logprobs merge as ever."""
    peer = served.peer()
    request_id = peer.request(credit=0)
    plain = [chunk(token) for token in range(6)]
    told = [replace(plain[token], logprobs=(TokenLogprob(token, -0.5, ()),)) for token in (2, 3)]
    served.engine.emit(*plain[:2], *told, *plain[4:], final())
    peer.send(Kind.CREDIT, request_id, chunks=9)
    messages = [peer.receive() for _ in range(5)]
    assert [message.body.get("tokens") for message in messages[:4]] == [[0, 1], [2], [3], [4, 5]]
    assert [len(message.body.get("logprobs", ())) for message in messages[:4]] == [0, 1, 1, 0]
    assert messages[4].kind == Kind.FINAL


def test_a_client_without_credit_for_too_long_has_stalled(served: Stand) -> None:
    peer = served.peer()
    request_id = peer.request(credit=0)
    other = peer.request(2)
    served.engine.sinks[next(iter(served.engine.sinks))](chunk(1))
    start = time.monotonic()
    answer = peer.receive()
    assert (answer.request_id, answer.body["code"]) == (request_id, "client_stalled")
    assert 0.9 * LIMITS.stall_timeout_s < time.monotonic() - start < LIMITS.stall_timeout_s + 1.0
    assert len(served.engine.aborted) == 1
    peer.silence(0.2)
    peer.send(Kind.ABORT, other)
    assert peer.receive().kind == Kind.FINAL


def test_an_event_that_cannot_be_packed_ends_its_request(served: Stand) -> None:
    peer = served.peer()
    request_id = peer.request()
    served.engine.emit(chunk(1), chunk(2, text="lone \ud800 surrogate"))
    while (answer := peer.receive()).kind == Kind.CHUNK:
        pass
    assert (answer.request_id, answer.body["code"]) == (request_id, "internal")
    assert len(served.engine.aborted) == 1


def test_abort_does_not_wait_for_credit(served: Stand) -> None:
    peer = served.peer()
    request_id = peer.request(credit=0)
    served.engine.emit(chunk(1), chunk(2))
    peer.silence(0.1)
    peer.send(Kind.ABORT, request_id)
    assert peer.receive().body["tokens"] == [1, 2]
    assert peer.receive().body["reason"] == "aborted"
    wait_for(lambda: served.service.counters()["requests_running"] == 0)


def test_progress_and_final_need_no_credit(served: Stand) -> None:
    peer = served.peer()
    peer.request(credit=0)
    served.engine.emit(final())
    assert peer.receive().kind == Kind.FINAL


def test_logits_are_cut_into_messages_and_cost_credit_by_size(tmp_path: Path) -> None:
    limits = Limits(**{**LIMITS.__dict__, "chunk_bytes": 3 << 20, "buffer_bytes": 64 << 20, "stall_timeout_s": 5.0})
    with stand(tmp_path, limits) as served:
        peer = served.peer()
        request_id = peer.request(credit=5, logits="all")
        rows = 9 * (1 << 20) // 400
        sent = np.random.default_rng(1).random((rows, 100), np.float32)
        first, second = sent[: rows // 2], sent[rows // 2 :]
        served.engine.emit(Chunk(b"", (1,), "x", logits=first), Chunk(b"", (2,), "y", logits=second))
        messages = [peer.receive()]
        while sum(map(chunk_cost, messages)) < 5:
            messages.append(peer.receive())
        peer.silence(0.2)
        peer.send(Kind.CREDIT, request_id, chunks=100)
        received = [read_event(message) for message in messages]
        while sum(len(logits_of(event)) for event in received) < rows:
            received.append(read_event(peer.receive()))
        assert all(logits_of(event).nbytes <= 3 << 20 for event in received)
        np.testing.assert_array_equal(np.concatenate([logits_of(event) for event in received]), sent)
        assert "".join(event.text for event in received if isinstance(event, Chunk)) == "xy"


def logits_of(event: Event) -> NDArray[np.float32]:
    assert isinstance(event, Chunk) and event.logits is not None
    return event.logits


def test_a_full_buffer_pauses_the_request(served: Stand) -> None:
    peer = served.peer()
    request_id = peer.request(credit=0, logits="all")
    for _ in range(3):
        served.engine.emit(chunk(1, rows=10))
    wait_for(lambda: served.engine.holds == [True])
    peer.send(Kind.CREDIT, request_id, chunks=100)
    wait_for(lambda: served.engine.holds == [True, False])
    rows = 0
    while rows < 30:
        logits = logits_of(read_event(peer.receive()))
        assert logits.nbytes <= LIMITS.chunk_bytes
        rows += len(logits)


def test_a_client_that_does_not_read_stalls_and_costs_bounded_memory(tmp_path: Path) -> None:
    limits = Limits(**{**LIMITS.__dict__, "client_timeout_s": 30.0})
    with stand(tmp_path, limits) as served:
        peer = served.peer(held=1)
        peer.request(credit=2**31 - 1)
        engine, done = served.engine, threading.Event()

        def flood() -> None:
            while not engine.aborted and not done.wait(0.0005):
                engine.emit(chunk(1, text="x" * 2000))

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            wait_for(lambda: engine.aborted, 20.0)
        finally:
            done.set()
            thread.join()


# ---- liveness ----


def test_a_client_that_goes_away_is_noticed_within_a_heartbeat_or_two(served: Stand) -> None:
    peer = served.peer()
    peer.request()
    peer.socket.close()
    start = time.monotonic()
    wait_for(lambda: served.engine.aborted)
    assert time.monotonic() - start < LIMITS.client_timeout_s, "noticed by PING, not by silence"
    assert served.service.counters()["sessions"] == 0


def test_a_client_that_falls_silent_loses_its_requests(served: Stand) -> None:
    peer, other = served.peer(), served.peer()
    peer.request()
    start = time.monotonic()
    while not served.engine.aborted:
        other.silence(0.02)
        assert time.monotonic() - start < SECONDS
    assert time.monotonic() - start > 0.9 * LIMITS.client_timeout_s
    peer.send(Kind.PING)
    assert peer.receive(pong=False).kind in (Kind.ERROR, Kind.FINAL)
    assert other.hello().kind == Kind.WELCOME


def test_bye_aborts(served: Stand) -> None:
    peer = served.peer()
    peer.request()
    peer.send(Kind.BYE)
    wait_for(lambda: served.engine.aborted)
    assert served.service.counters()["sessions"] == 0


def test_answering_ping_is_enough_to_stay(served: Stand) -> None:
    peer = served.peer()
    peer.request()
    peer.silence(3 * LIMITS.client_timeout_s)
    assert not served.engine.aborted


# ---- utility calls ----


def call(peer: Peer, method: str, **arguments: Any) -> Message:
    peer.send(Kind.CALL, b"c" * 16, method=method, arguments=arguments)
    answer = peer.receive()
    assert answer.request_id == b"c" * 16
    return answer


def test_utility_calls(served: Stand) -> None:
    peer = served.peer()
    assert call(peer, "tokenize", text="AB").body == {"value": {"tokens": [65, 66]}}
    assert call(peer, "tokenize", text="AB", pieces=True).body["value"]["pieces"] == [b"A", b"B"]
    assert call(peer, "detokenize", tokens=[65, 66]).body == {"value": {"text": "AB"}}
    for method, arguments, code in (
        ("tokenize", {}, "invalid_request"),
        ("tokenize", {"text": 3}, "invalid_request"),
        ("detokenize", {"tokens": [65, 100]}, "invalid_request"),
        ("apply_template", {"messages": []}, "unsupported"),
        ("fly", {}, "not_found"),
        ("tokenize", {"text": "break"}, "internal"),
    ):
        assert call(peer, method, **arguments).body["code"] == code
    assert call(peer, "detokenize", tokens=[65, 100]).body["details"] == {"field": "arguments.tokens[1]"}
