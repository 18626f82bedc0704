"""A worker process's socket to its pool. Knows what a doorbell is and nothing of what wakes up."""

from __future__ import annotations

from typing import Any

import zmq

from bloomery.runtime.worker_messages import WorkerStart, decode, encode

_LONGEST_SLEEP_MS = 1000
_LINGER_MS = 500


class Link:
    """The socket to the pool: messages while starting, doorbells afterwards."""

    def __init__(self, start: WorkerStart) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, start.identity)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(start.endpoint)

    def send(self, kind: str, **fields: Any) -> None:
        self._socket.send(encode(kind, **fields))

    def receive(self) -> dict[str, Any]:
        """The next message."""
        return decode(self._socket.recv())

    def sleep(self) -> bool:
        """Sleeps until the doorbell rings, or a second has passed; whether it rang."""
        return bool(self._socket.poll(_LONGEST_SLEEP_MS))

    def take(self, milliseconds: int) -> list[dict[str, Any]]:
        """The messages that have come or come within the time; doorbells are taken and forgotten."""
        frames: list[bytes] = []
        while self._socket.poll(0 if frames else milliseconds):
            frames.append(self._socket.recv())
        return [decode(frame) for frame in frames if frame]

    def silence(self) -> None:
        """Takes the doorbells that have rung."""
        while self._socket.poll(0):
            self._socket.recv()

    def close(self) -> None:
        self._context.destroy(linger=_LINGER_MS)
