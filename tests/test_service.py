"""The client socket alone: credit, stalls, clients that go away or talk nonsense. The engine is a scripted one, so that
every order of events can be produced; test_client.py and test_daemon.py run the real one."""

from __future__ import annotations

import os
import random
import socket as sockets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from bloomery.runtime.control import ControlSocket
from bloomery.runtime.endpoints import EndpointError
from bloomery.runtime.errors import RequestError
from bloomery.runtime.facts import Limits, ModelFacts, PlanFacts, Welcome
from bloomery.runtime.messages import chunk_cost, read_event
from bloomery.runtime.protocol import MAGIC, NO_REQUEST, Kind, Message, pack, unpack
from bloomery.runtime.requests import Admitted, Chunk, Event, Final, GenerationRequest
from bloomery.runtime.service import Served, Service
from bloomery.runtime.utility_calls import UtilityCalls

SECONDS = 5.0
LIMITS = Limits(
    max_message=1 << 20,
    max_in_flight=4,
    chunk_bytes=4096,
    buffer_bytes=8192,
    stall_timeout_s=0.6,
    heartbeat_s=0.1,
    client_timeout_s=0.5,
)
FACTS = ModelFacts("toy", "toy", "", "llama", 1, 1, "F32", 100, 64, 64, 2, None, 1, (1,), False, "digest", "")


def wait_for(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.005)
    return value


class ScriptedEngine:
    """Emits what a test says, through the sinks of what was submitted."""

    def __init__(self) -> None:
        self.requests: dict[bytes, GenerationRequest] = {}
        self.sinks: dict[bytes, Callable[[Event], None]] = {}
        self.aborted: list[bytes] = []
        self.holds: list[bool] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def submit(self, request: GenerationRequest, sink: Callable[[Event], None]) -> None:
        self.entered.set()
        assert self.gate.wait(SECONDS)
        self.requests[request.request_id] = request
        self.sinks[request.request_id] = sink
        sink(Admitted(request.request_id, 0, 3, 0))

    def abort(self, request_id: bytes) -> bool:
        self.aborted.append(request_id)
        sink = self.sinks.get(request_id)
        if sink:
            sink(final(request_id, "aborted"))
        return sink is not None

    def hold(self, request_id: bytes, held: bool) -> bool:
        self.holds.append(held)
        return True

    def emit(self, *events: Event) -> None:
        """To the only request."""
        (sink,) = self.sinks.values()
        for event in events:
            sink(event)


class LetterTokenizer:
    """One token a character."""

    vocabulary = 100

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if text == "break":
            raise RuntimeError("a defect")
        return [ord(character) % 100 for character in text]

    def decode(self, tokens: tuple[int, ...], *, special: bool) -> str:
        return "".join(chr(token) for token in tokens)

    def piece(self, token: int) -> bytes:
        return bytes([token])


class Peer:
    """A raw client."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, held: int = 1000) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.RCVHWM, held)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def send(self, kind: int, request_id: bytes = NO_REQUEST, **body: Any) -> None:
        self.socket.send_multipart(pack(Message(kind, request_id, body)))

    def receive(self, seconds: float = SECONDS, pong: bool = True) -> Message:
        deadline = time.monotonic() + seconds
        while True:
            assert self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))), "no message in time"
            message = unpack(self.socket.recv_multipart())
            if message.kind != Kind.PING:
                return message
            if pong:
                self.send(Kind.PONG, message.request_id)

    def silence(self, seconds: float) -> None:
        """Answers PING; anything else fails the test."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(int(left * 1000)):
                message = unpack(self.socket.recv_multipart())
                assert message.kind == Kind.PING, message
                self.send(Kind.PONG)

    def hello(self) -> Message:
        self.send(Kind.HELLO, versions=[1], client="test")
        return self.receive()

    def request(self, number: int = 1, **body: Any) -> bytes:
        request_id = bytes([number]) * 16
        self.send(Kind.REQUEST, request_id, **{"text": "abc", **body})
        assert self.receive().kind == Kind.ADMITTED
        return request_id


class Stand:
    """A service with its engine, and raw clients of it."""

    def __init__(self, service: Service, engine: ScriptedEngine, context: zmq.Context[Any]) -> None:
        self.service, self.engine, self._context = service, engine, context
        self.peers: list[Peer] = []

    def peer(self, greet: bool = True, held: int = 1000) -> Peer:
        peer = Peer(self._context, self.service.endpoint, held)
        self.peers.append(peer)
        if greet:
            assert peer.hello().kind == Kind.WELCOME
        return peer


@contextmanager
def stand(folder: Path, limits: Limits = LIMITS) -> Iterator[Stand]:
    engine, context = ScriptedEngine(), zmq.Context()
    service = Service(f"ipc://{folder}/client", limits, lambda: {"stage": "load", "done": 1, "total": 2})
    welcome = Welcome(1, "bloomery/test", "ipc:///control", FACTS, PlanFacts("cpu", "0"), limits)
    service.serve(Served(engine, UtilityCalls(cast(Any, LetterTokenizer()), None), welcome))
    built = Stand(service, engine, context)
    try:
        yield built
    finally:
        for peer in built.peers:
            peer.socket.close()
        context.term()
        engine.gate.set()
        service.close()
        assert not list(folder.glob("client*")), "the socket is removed"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Stand]:
    with stand(tmp_path) as built:
        yield built


def final(request_id: bytes = b"", reason: Any = "stop") -> Final:
    return Final(request_id, reason, "", 3, 0, 5, 1, 0.0, 0.0, 0.0)


def chunk(*tokens: int, text: str = "", rows: int = 0) -> Chunk:
    logits = np.full((rows, 100), tokens[0], np.float32) if rows else None
    return Chunk(b"", tokens, text or "".join(f"{token} " for token in tokens), logits=logits)


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


# ---- hostile input ----


def test_random_messages_do_no_harm(served: Stand) -> None:
    seed = 20240517
    print(f"seed {seed}")
    source = random.Random(seed)
    hostile, good = served.peer(), served.peer()
    request_id = good.request()
    for _ in range(1500):
        match source.randrange(4):
            case 0:
                frames = [source.randbytes(source.randrange(20)) for _ in range(source.randrange(1, 8))]
            case 1:
                frames = [MAGIC, source.randbytes(1), source.randbytes(16), source.randbytes(source.randrange(40))]
            case 2:
                body = msgpack.packb({source.choice("abc"): source.choice([None, [[]], {}, -1, "x", b"y", 1.5])})
                frames = [MAGIC, bytes([source.choice(list(Kind))]), source.choice([NO_REQUEST, b"x" * 16]), body]
            case _:
                body = msgpack.packb(
                    {"text": "x", source.choice(["stop", "sampling", "tokens"]): source.choice([3, {}, []])}
                )
                frames = [MAGIC, bytes([Kind.REQUEST]), source.randbytes(16), body, b"extra"]
        hostile.socket.send_multipart(frames)
    served.engine.sinks = dict(list(served.engine.sinks.items())[:1])
    while hostile.socket.poll(100):
        unpack(hostile.socket.recv_multipart())
    served.engine.emit(chunk(1), final())
    assert good.receive().body["tokens"] == [1]
    assert good.receive().request_id == request_id
    assert served.service.counters()["messages_dropped"] > 100


def test_unknown_kinds_are_answered(served: Stand) -> None:
    peer = served.peer()
    for kind in (0x00, 0x77, Kind.CHUNK, Kind.WELCOME):
        peer.send(kind, b"k" * 16)
        answer = peer.receive()
        assert (answer.request_id, answer.body["code"]) == (NO_REQUEST, "unknown_kind")
        assert answer.body["details"] == {"kind": kind, "id": (b"k" * 16).hex()}


def test_a_deeply_nested_body_is_refused(served: Stand) -> None:
    peer = served.peer()
    bodies = (b"\x81\xa1a" + b"\x91" * 100 + b"\x01", b"\x81\xa1a" + b"\x91" * 900_000 + b"\x01")
    for body in bodies:
        peer.socket.send_multipart([MAGIC, bytes([Kind.REQUEST]), b"d" * 16, body])
        answer = peer.receive()
        assert (answer.request_id, answer.body["code"]) == (b"d" * 16, "invalid_message")


def test_an_oversized_frame_ends_only_its_own_connection(served: Stand) -> None:
    big, good = served.peer(), served.peer()
    request_id = good.request()
    monitor = big.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    big.socket.send_multipart([MAGIC, bytes([Kind.REQUEST]), b"b" * 16, bytes(LIMITS.max_message + 1)])
    assert monitor.poll(SECONDS * 1000), "the daemon closes the connection"
    big.socket.disable_monitor()
    monitor.close()
    served.engine.emit(final())
    assert good.receive().request_id == request_id


def test_many_frames_are_dropped(served: Stand) -> None:
    peer = served.peer()
    peer.socket.send_multipart([MAGIC, bytes([Kind.PING]), NO_REQUEST, b"\x80", *[b""] * 5000])
    wait_for(lambda: served.service.counters()["messages_dropped"] == 1)
    assert peer.hello().kind == Kind.WELCOME


# ---- endpoints ----


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("tcp://0.0.0.0:0", "not a loopback address"),
        ("tcp://*:5555", "not a loopback address"),
        ("tcp://192.168.1.1:5555", "not a loopback address"),
        ("tcp://example.com:5555", "not a loopback address"),
        ("inproc://x", "neither ipc:// nor tcp://"),
        ("ipc://relative", "must be absolute"),
        ("ipc:///no/such/folder/x", "no directory"),
        (f"ipc:///tmp/{'x' * 120}", "the system allows 107"),
    ],
)
def test_endpoints_that_are_refused(endpoint: str, words: str) -> None:
    with pytest.raises(EndpointError) as caught:
        ControlSocket(endpoint, {})
    assert words in caught.value.message and caught.value.hint


def test_loopback_tcp_works() -> None:
    control = ControlSocket("tcp://127.0.0.1:*", {"status": lambda: {"tuple": (1, np.int64(2), np.float32(0.5))}})
    context: zmq.Context[Any] = zmq.Context()
    peer = Peer(context, control.endpoint)
    peer.send(Kind.CALL, b"c" * 16, method="status")
    assert peer.receive().body == {"value": {"tuple": [1, 2, 0.5]}}
    peer.send(Kind.PING, b"p" * 16)
    assert peer.receive().request_id == b"p" * 16
    peer.send(Kind.CALL, b"c" * 16, method="nothing")
    assert peer.receive().body["code"] == "not_found"
    peer.send(Kind.HELLO, versions=[1])
    assert peer.receive().body["code"] == "unknown_kind"
    peer.socket.send_multipart([b"junk"])
    peer.send(Kind.PING)
    assert peer.receive().kind == Kind.PONG
    peer.socket.close()
    context.term()
    control.close()


def test_a_living_socket_is_not_stolen_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    first = ControlSocket(endpoint, {})
    with pytest.raises(EndpointError, match="another program listens there"):
        ControlSocket(endpoint, {})
    first.close()
    with sockets.socket(sockets.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "control"))
    ControlSocket(endpoint, {}).close()
    (tmp_path / "control").write_text("a file of somebody's")
    with pytest.raises(EndpointError, match="is not a socket"):
        ControlSocket(endpoint, {})


def test_a_failing_method_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    def fail() -> None:
        raise RequestError("unsupported", "not today")

    control = ControlSocket(f"ipc://{tmp_path}/control", {"fail": fail, "defect": lambda: 1 // 0})
    context: zmq.Context[Any] = zmq.Context()
    peer = Peer(context, control.endpoint)
    for method, code in (("fail", "unsupported"), ("defect", "internal"), ("fail", "unsupported")):
        peer.send(Kind.CALL, b"c" * 16, method=method)
        answer = peer.receive()
        assert (answer.request_id, answer.body["code"]) == (b"c" * 16, code)
    peer.socket.close()
    context.term()
    control.close()
