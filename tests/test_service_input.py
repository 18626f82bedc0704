"""Input that no client should send to the client and control sockets, and endpoints that no daemon should listen on."""

from __future__ import annotations

import random
import socket as sockets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from service_stand import LIMITS, SECONDS, Peer, Stand, chunk, final, stand, wait_for

from bloomery.runtime.control import ControlSocket
from bloomery.runtime.endpoints import EndpointError
from bloomery.runtime.errors import RequestError
from bloomery.runtime.protocol import MAGIC, NO_REQUEST, Kind, unpack


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Stand]:
    with stand(tmp_path) as built:
        yield built


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
    bodies = (b"\x81\xa1a" + b"\x91" * 300 + b"\x01", b"\x81\xa1a" + b"\x91" * 900_000 + b"\x01")
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
