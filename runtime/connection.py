"""A client's side of the protocol: one DEALER socket, owned by one thread that keeps the session alive.

Owns HELLO, heartbeats, the routing of messages to whoever waits for them, and noticing that the daemon is gone. It does
not know what callers do with events: `client.py` (blocking) and `async_client.py` (asyncio) do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import zmq

from bloomery.runtime.errors import RequestError
from bloomery.runtime.facts import Welcome
from bloomery.runtime.messages import chunk_cost, read_error, read_event
from bloomery.runtime.protocol import NO_REQUEST, VERSIONS, Kind, Message, NotOurs, pack, unpack
from bloomery.runtime.requests import Event, Failed, Final

log = logging.getLogger(__name__)

SILENT_HEARTBEATS = 5
PATIENCE_S = 120.0
"""How long a daemon whose process is known to run may be silent: on a crowded machine it may get no time for many
seconds, and starting another one, which loads the model anew, would only add to the crowd."""
LOADING_RETRY_S = 0.1
RESTART_HINT = "start the daemon again (bloomery-launch) and connect anew"


@dataclass(frozen=True)
class Result:
    """The value of a RESULT."""

    request_id: bytes
    value: Any


Delivery: TypeAlias = tuple[Event | Result, int]
"""What arrived for an id, and the credit that it used up (0 for anything but a chunk)."""
Deliver: TypeAlias = Callable[[Delivery], None]


def require_listener(endpoint: str) -> None:
    """Raises RequestError("daemon_lost") if nobody listens on a Unix-domain endpoint; ZeroMQ would retry for ever."""
    if not endpoint.startswith("ipc://"):
        return
    path = endpoint.removeprefix("ipc://")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect("\0" + path[1:] if path.startswith("@") else path)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise RequestError(
                "daemon_lost", f"no daemon listens on {endpoint}: {reason}", "start one with bloomery-launch"
            ) from error


class Connection:
    """A session with a daemon. Any thread may use it; callbacks run in its own thread and must not block.

    Raises RequestError from the constructor: "daemon_lost" (nobody listens), "timeout" (no WELCOME within `timeout`
    seconds, or still loading by then), "version_mismatch".

    `runs` tells whether the daemon's process runs, where that is known: such a daemon is waited for with a warning, at
    most PATIENCE_S, when it falls silent. Any other is given up after SILENT_HEARTBEATS.
    """

    def __init__(self, endpoint: str, *, name: str, timeout: float, runs: Callable[[], bool] | None = None) -> None:
        require_listener(endpoint)
        self.endpoint = endpoint
        self._runs = runs
        self._waiting: dict[bytes, Deliver] = {}
        self._lock = threading.Lock()
        self._outgoing: deque[Message] = deque()
        self._lost: RequestError | None = None
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.set(option, 0)
        self._socket.set(zmq.LINGER, 200)
        self._socket.set(zmq.RECONNECT_IVL, -1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        try:
            self._socket.connect(endpoint)
            self.welcome = self._greet(name, timeout)
        except (zmq.ZMQError, RequestError) as error:
            self._destroy()
            if isinstance(error, RequestError):
                raise
            raise RequestError("daemon_lost", f"cannot connect to {endpoint}: {error}", "check the endpoint") from error
        self._thread = threading.Thread(target=self._run, name="bloomery-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, message: Message, deliver: Deliver) -> None:
        """Sends a REQUEST or CALL; `deliver` receives everything that comes back, up to one Final, Failed or Result.

        Raises RequestError: "daemon_lost", "duplicate_request", "too_large".
        """
        frames = pack(message)
        size, limit = sum(len(frame) for frame in frames), self.welcome.limits.max_message
        if size > limit:
            raise RequestError(
                "too_large", f"a message of {size} bytes, limit {limit}", "shorten the request", bytes=size, limit=limit
            )
        with self._lock:
            if self._lost:
                raise self._lost
            if message.request_id in self._waiting:
                raise RequestError("duplicate_request", "a request with this id is already running")
            self._waiting[message.request_id] = deliver
        self._post(message)

    def send(self, message: Message) -> None:
        """Sends ABORT or CREDIT; without effect once the daemon is gone."""
        self._post(message)

    @property
    def alive(self) -> bool:
        """Whether the daemon is still there, as far as is known."""
        return self._lost is None

    def close(self) -> None:
        """Says BYE and ends the thread; requests that are still running fail with "daemon_lost"."""
        self._closing = True
        self._ring()
        self._thread.join()

    def _post(self, message: Message) -> None:
        self._outgoing.append(message)
        self._ring()

    def _ring(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _greet(self, name: str, timeout: float) -> Welcome:
        deadline = time.monotonic() + timeout
        while True:
            self._transmit(Message(Kind.HELLO, body={"versions": list(VERSIONS), "client": name}))
            answer = self._await_greeting(deadline)
            if answer.kind == Kind.WELCOME:
                return Welcome.of(answer.body)
            error = read_error(answer)
            if error.code != "loading" or time.monotonic() + LOADING_RETRY_S > deadline:
                raise error
            time.sleep(LOADING_RETRY_S)

    def _await_greeting(self, deadline: float) -> Message:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = dict(poller.poll(int(max(0.0, left) * 1000) + 1))
            if self._socket in ready:
                message = unpack(self._socket.recv_multipart())
                if message.kind in (Kind.WELCOME, Kind.ERROR):
                    return message
            elif self._monitor in ready:
                raise RequestError(
                    "daemon_lost", f"the connection to {self.endpoint} was refused or closed", RESTART_HINT
                )
            elif left <= 0:
                raise RequestError("timeout", f"no answer from {self.endpoint}", "is it the daemon's client endpoint?")

    def _run(self) -> None:
        error = RequestError("daemon_lost", "the connection was closed by this client")
        try:
            self._serve()
            self._transmit(Message(Kind.BYE))
        except RequestError as lost:
            error = lost
        except zmq.ZMQError as lost:
            error = RequestError("daemon_lost", f"the connection to {self.endpoint} broke: {lost}", RESTART_HINT)
        finally:
            with self._lock:
                self._lost = error
                waiting, self._waiting = self._waiting, {}
            for request_id, deliver in waiting.items():
                deliver((Failed(request_id, error.code, error.message, error.hint, error.details), 0))
            self._destroy()

    def _serve(self) -> None:
        """The thread's loop. Returns on close; raises RequestError("daemon_lost")."""
        heartbeat = max(0.01, self.welcome.limits.heartbeat_s)
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        heard = pinged = looked = time.monotonic()
        warned = False
        while not self._closing:
            idle = not self._waiting
            ready = dict(poller.poll(None if idle else int(heartbeat * 500)))
            now = time.monotonic()
            if idle or now - looked > 2 * heartbeat:
                heard = now  # nothing was due, or this process itself was stopped
            looked = now
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._outgoing:
                self._transmit(self._outgoing.popleft())
            if self._socket in ready:
                heard = now
                self._receive()
            elif self._monitor in ready:
                raise self._gone()
            if (silent := now - heard) <= SILENT_HEARTBEATS * heartbeat:
                warned = False
            elif self._runs is None or silent > PATIENCE_S or not self._runs():
                raise RequestError(
                    "daemon_lost", f"the daemon on {self.endpoint} is silent for {silent:.1f} s", RESTART_HINT
                )
            elif not warned:
                warned = True
                log.warning("the daemon runs but is silent for %.1f s; waiting for it (is the machine busy?)", silent)
            if self._waiting and now - pinged >= heartbeat:
                pinged = now
                self._transmit(Message(Kind.PING))

    def _transmit(self, message: Message) -> None:
        """Never waits: the queue has no bound, so only a connection that is gone refuses a message."""
        try:
            self._socket.send_multipart(pack(message), zmq.NOBLOCK)
        except zmq.Again:
            raise self._gone() from None

    def _gone(self) -> RequestError:
        return RequestError("daemon_lost", f"the daemon on {self.endpoint} is gone", RESTART_HINT)

    def _receive(self) -> None:
        """Routes everything that has arrived. One unreadable message ends the connection: its request would hang."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._route(unpack(frames))
            except NotOurs as error:
                raise RequestError("daemon_lost", f"{self.endpoint} does not speak this protocol: {error}") from error
            except RequestError as error:
                if error.code == "no_session":
                    raise RequestError(
                        "daemon_lost", f"the daemon on {self.endpoint} has forgotten this client", "connect anew"
                    ) from error
                raise RequestError(
                    "daemon_lost", f"unreadable message from {self.endpoint}: {error.message}"
                ) from error

    def _route(self, message: Message) -> None:
        if message.kind == Kind.PING:
            self._transmit(Message(Kind.PONG, message.request_id))
        elif message.kind == Kind.RESULT:
            self._finish(message.request_id, Result(message.request_id, message.body.get("value")))
        elif message.kind == Kind.ERROR and message.request_id == NO_REQUEST:
            error = read_error(message)
            if error.code == "no_session":
                raise error
        elif message.kind in (Kind.FINAL, Kind.ERROR):
            event = read_event(message)
            assert isinstance(event, (Final, Failed))
            self._finish(message.request_id, event)
        elif message.kind in (Kind.ADMITTED, Kind.PROGRESS, Kind.CHUNK):
            deliver = self._waiting.get(message.request_id)
            if deliver:
                deliver((read_event(message), chunk_cost(message) if message.kind == Kind.CHUNK else 0))

    def _finish(self, request_id: bytes, outcome: Event | Result) -> None:
        with self._lock:
            deliver = self._waiting.pop(request_id, None)
        if deliver:
            deliver((outcome, 0))

    def _destroy(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
        with self._lock:
            os.close(self._wake)
            self._wake = -1
