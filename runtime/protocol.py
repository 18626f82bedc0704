"""Frames of the client protocol: what one message looks like on a ZeroMQ socket.

Owns the magic, the kinds, and the packing of a `Message` into frames and back. It does not know what the bodies mean
(`messages.py`) nor who sends what when (`service.py`, `control.py`, `client.py`). The specification
is docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import msgpack

from bloomery.runtime.errors import RequestError

MAGIC = b"BLM1"
VERSIONS: tuple[int, ...] = (1,)
ID_BYTES = 16
NO_REQUEST = bytes(ID_BYTES)
MAX_FRAMES = 16
MAX_NESTING = 128

Frame: TypeAlias = bytes | bytearray | memoryview


class Kind(IntEnum):
    """The kind byte. 0x0_ belong to the session, 0x1_ go to the daemon, 0x2_ come from it, 0x3_ are calls."""

    HELLO = 0x01
    WELCOME = 0x02
    PING = 0x03
    PONG = 0x04
    BYE = 0x05
    REQUEST = 0x10
    ABORT = 0x11
    CREDIT = 0x12
    ADMITTED = 0x20
    PROGRESS = 0x21
    CHUNK = 0x22
    FINAL = 0x23
    ERROR = 0x24
    CALL = 0x30
    RESULT = 0x31


class NotOurs(Exception):
    """Frames without the magic, a kind byte and an id: there is nothing that an answer could refer to."""


@dataclass(frozen=True)
class Message:
    """One message: kind byte (a `Kind`, or a number that this version does not know), id, body map, raw buffers."""

    kind: int
    request_id: bytes = NO_REQUEST
    body: dict[str, Any] = field(default_factory=dict)
    buffers: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Envelope:
    """The frames before the body: enough to answer a message whose body cannot be read."""

    kind: int
    request_id: bytes


def pack(message: Message) -> list[Frame]:
    """Frames of a message: magic, kind, id, msgpack body, buffers. Raises RequestError("invalid_request") for a body
    that msgpack cannot carry (an integer of more than 64 bits, a lone surrogate, a foreign type)."""
    try:
        body = msgpack.packb(message.body, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError("invalid_request", f"the message cannot be packed: {error}") from error
    return [MAGIC, bytes((message.kind,)), message.request_id, body, *message.buffers]


def read_envelope(frames: Sequence[Frame]) -> Envelope:
    """Kind and id. Raises NotOurs for frames that are not a message of this protocol."""
    if not 4 <= len(frames) <= MAX_FRAMES or bytes(frames[0]) != MAGIC:
        raise NotOurs("not a message of this protocol")
    if len(frames[1]) != 1 or len(frames[2]) != ID_BYTES:
        raise NotOurs("kind is not one byte or the id not 16 bytes")
    return Envelope(frames[1][0], bytes(frames[2]))


def unpack(frames: Sequence[Frame]) -> Message:
    """Message of the frames. Raises NotOurs, or RequestError("invalid_message") when the body is not a plain map."""
    envelope = read_envelope(frames)
    return Message(envelope.kind, envelope.request_id, unpack_body(frames[3]), tuple(frames[4:]))


def unpack_body(frame: Frame) -> dict[str, Any]:
    """The body map: string keys; values nil, booleans, integers, floats, strings, binary, arrays and maps, nested at
    most MAX_NESTING deep. Raises RequestError("invalid_message")."""
    try:
        body = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise RequestError("invalid_message", f"the body is not valid msgpack: {reason}") from error
    if not isinstance(body, dict):
        raise RequestError("invalid_message", f"the body must be a map, found {type(body).__name__}")
    _require_plain(body)
    return body


_SCALARS: frozenset[type] = frozenset((type(None), bool, int, float, str, bytes))
_CONTAINERS: frozenset[type] = frozenset((dict, list))


def _require_plain(body: dict[str, Any]) -> None:
    """Walks the body level by level, so that no input can exhaust the interpreter's stack."""
    level: list[Any] = [body]
    for _ in range(MAX_NESTING):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
                raise RequestError("invalid_message", "map keys must be strings")
            members = value.values() if isinstance(value, dict) else value
            types = set(map(type, members))
            if foreign := types - _SCALARS - _CONTAINERS:
                raise RequestError("invalid_message", f"{foreign.pop().__name__} values are not part of the protocol")
            if types & _CONTAINERS:
                inner.extend(member for member in members if type(member) in _CONTAINERS)
        if not inner:
            return
        level = inner
    raise RequestError("invalid_message", f"the body is nested more than {MAX_NESTING} levels deep")
