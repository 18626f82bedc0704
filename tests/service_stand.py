"""A client socket with a scripted engine behind it, and raw clients in front: every order of events can be produced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import zmq

from bloomery.runtime.facts import Limits, ModelFacts, PlanFacts, Welcome
from bloomery.runtime.protocol import NO_REQUEST, Kind, Message, pack, unpack
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

    def end_reasoning(self, request_id: bytes) -> bool:
        return request_id in self.requests

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


def final(request_id: bytes = b"", reason: Any = "stop") -> Final:
    return Final(request_id, reason, "", 3, 0, 5, 1, 0.0, 0.0, 0.0)


def chunk(*tokens: int, text: str = "", rows: int = 0) -> Chunk:
    logits = np.full((rows, 100), tokens[0], np.float32) if rows else None
    return Chunk(b"", tokens, text or "".join(f"{token} " for token in tokens), logits=logits)
