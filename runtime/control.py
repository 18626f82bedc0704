"""The control socket: ping, status, metrics, drain, shutdown, in a thread of its own that never waits for the engine.

Owns the table of methods and their answers. It does not know where the values come from: every method is a callable
that returns at once.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bloomery.runtime.errors import RequestError
from bloomery.runtime.messages import CALL_SCHEMA, error_message
from bloomery.runtime.protocol import NO_REQUEST, Frame, Kind, Message, NotOurs, read_envelope, unpack_body
from bloomery.runtime.router import Router
from bloomery.runtime.utility_calls import as_request_error

log = logging.getLogger(__name__)

MAX_MESSAGE = 1 << 20
IDLE_S = 3600.0


class ControlSocket:
    """Serves `methods` (name -> callable without arguments, returning plain values) from construction on."""

    def __init__(self, endpoint: str, methods: Mapping[str, Callable[[], Any]]) -> None:
        self._methods = {"ping": lambda: None, **methods}
        self._router = Router(endpoint, MAX_MESSAGE)
        self.endpoint = self._router.endpoint
        self._router.start("bloomery-control", self._receive, lambda: None, lambda: None, lambda: IDLE_S)

    def close(self) -> None:
        """Ends the thread and removes the socket; answers that are under way are still sent."""
        self._router.close()

    def _receive(self, client: bytes, frames: Sequence[Frame]) -> None:
        try:
            envelope = read_envelope(frames)
        except NotOurs:
            return
        try:
            answer = self._answer(envelope.kind, envelope.request_id, frames[3])
        except Exception as error:
            request_id = envelope.request_id if envelope.kind == Kind.CALL else NO_REQUEST
            answer = error_message(request_id, as_request_error(error))
        self._router.send(client, answer)

    def _answer(self, kind: int, request_id: bytes, body: Frame) -> Message:
        if kind == Kind.PING:
            return Message(Kind.PONG, request_id)
        if kind != Kind.CALL:
            raise RequestError("unknown_kind", f"kind {kind:#04x} has no meaning on the control socket", kind=kind)
        method = CALL_SCHEMA.read(unpack_body(body))["method"]
        if method not in self._methods:
            names = ", ".join(self._methods)
            raise RequestError(
                "not_found", f"no method {method[:60]!r} on the control socket; there are {names}", method=method[:60]
            )
        return Message(Kind.RESULT, request_id, {"value": plain(self._methods[method]())})


def plain(value: Any) -> Any:
    """The value in the protocol's types: NumPy numbers become numbers, tuples arrays, anything else its text."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return str(value)
