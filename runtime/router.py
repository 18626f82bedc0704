"""A bound ROUTER socket and the loop of the one thread that uses it; service and control are built on it.

Owns binding, waking the thread, receiving whole messages and sending without ever waiting. It does not know what the
messages mean.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import zmq

from bloomery.runtime.endpoints import bind, remove_socket
from bloomery.runtime.protocol import Frame, Message, pack

log = logging.getLogger(__name__)

BURST = 64
SEND_HIGH_WATER = 4096
COPY_BELOW = 65536


class Sent(Enum):
    """What became of a message: handed to ZeroMQ; the client's pipe is full, try later; the client is gone."""

    YES = "yes"
    FULL = "full"
    GONE = "gone"


class Router:
    """Listens from construction on, serves once `start` is called. `post` may be called from any thread; everything
    else of a running router belongs to its own thread."""

    def __init__(self, endpoint: str, max_message: int) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.MAXMSGSIZE, max_message)
        self._socket.set(zmq.SNDHWM, SEND_HIGH_WATER)
        self._socket.set(zmq.LINGER, 1000)
        try:
            self.endpoint = bind(self._socket, endpoint)
        except BaseException:
            self._context.destroy(0)
            raise
        self._posted: deque[Callable[[], object]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ring = threading.Lock()
        self._rung = self._stopping = False
        self._thread: threading.Thread | None = None

    def start(
        self,
        name: str,
        receive: Callable[[bytes, Sequence[Frame]], None],
        after: Callable[[], None],
        tick: Callable[[], None],
        interval: Callable[[], float],
    ) -> None:
        """Starts the thread: `receive(client, frames)` for every message, `after()` once what had piled up is done,
        `tick()` every `interval()` seconds."""
        loop = partial(self._run, receive, after, tick, interval)
        self._thread = threading.Thread(target=loop, name=name, daemon=True)
        self._thread.start()

    def post(self, task: Callable[[], object]) -> None:
        """Runs `task` in the router's thread, in the order of posting."""
        self._posted.append(task)
        if not self._rung:
            with self._ring:
                if self._wake >= 0:
                    self._rung = True
                    os.eventfd_write(self._wake, 1)

    def send(self, client: bytes, message: Message) -> Sent:
        """Never waits."""
        frames = [client, *pack(message)]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=all(len(frame) < COPY_BELOW for frame in frames))
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        return Sent.YES

    def close(self, last: Callable[[], object] | None = None) -> None:
        """Runs what was posted and then `last` in the thread, ends it, and removes the socket."""
        if last:
            self.post(last)
        self.post(self._stop)
        if self._thread:
            self._thread.join()
        self._socket.close()
        self._context.term()
        remove_socket(self.endpoint)
        with self._ring:
            os.close(self._wake)
            self._wake = -1

    def _stop(self) -> None:
        self._stopping = True

    def _run(
        self,
        receive: Callable[[bytes, Sequence[Frame]], None],
        after: Callable[[], None],
        tick: Callable[[], None],
        interval: Callable[[], float],
    ) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        ticked = time.monotonic()
        while not self._stopping:
            left = ticked + interval() - time.monotonic()
            poller.poll(max(1, int(left * 1000)))
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._receive(receive)
            self._run_posted()
            self._guarded(after)
            if time.monotonic() - ticked >= interval():
                ticked = time.monotonic()
                self._guarded(tick)

    def _receive(self, receive: Callable[[bytes, Sequence[Frame]], None]) -> None:
        for _ in range(BURST):
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._guarded(partial(receive, client, frames))

    def _run_posted(self) -> None:
        for _ in range(len(self._posted)):
            self._guarded(self._posted.popleft())

    def _guarded(self, step: Callable[[], object]) -> None:
        """A defect in handling one message must not end the thread that everybody depends on."""
        try:
            step()
        except Exception:
            log.exception("%s: a message or event could not be handled", threading.current_thread().name)
