"""The client socket: sessions, requests and their events, back-pressure, liveness, in a thread of its own.

Owns who is connected, which request is whose, and what a client is told. It knows the engine only as something to
submit to and abort at; frames and bodies are `protocol.py`'s and `messages.py`'s, credit is `outflow.py`'s.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, Protocol

from bloomery.runtime.errors import RequestError
from bloomery.runtime.facts import Limits, Welcome
from bloomery.runtime.messages import (
    CALL_SCHEMA,
    CREDIT_SCHEMA,
    END_REASONING_SCHEMA,
    HELLO_SCHEMA,
    error_message,
    event_message,
    read_request,
)
from bloomery.runtime.outflow import Outflow
from bloomery.runtime.protocol import (
    ID_BYTES,
    NO_REQUEST,
    VERSIONS,
    Frame,
    Kind,
    Message,
    NotOurs,
    read_envelope,
    unpack_body,
)
from bloomery.runtime.requests import Chunk, Event, Failed, Final, GenerationRequest
from bloomery.runtime.router import Router, Sent
from bloomery.runtime.utility_calls import UtilityCalls, Workbench, as_request_error

log = logging.getLogger(__name__)

TICK_S = 0.05
IDLE_TICK_S = 1.0
IDLE_PING_HEARTBEATS = 10
CLIENT_NAME_CHARACTERS = 60
UNLIMITED = 2**31 - 1
COUNTERS = ("messages", "messages_dropped", "requests", "calls", "clients_gone", "clients_silent")


class Generator(Protocol):
    """What the service needs of the engine."""

    def submit(self, request: GenerationRequest, sink: Callable[[Event], None]) -> None: ...

    def abort(self, request_id: bytes) -> object: ...

    def hold(self, request_id: bytes, held: bool) -> object: ...

    def end_reasoning(self, request_id: bytes) -> bool: ...


@dataclass(frozen=True)
class Served:
    """What is there once the model is loaded. `welcome` is complete but for the version."""

    engine: Generator
    calls: UtilityCalls
    welcome: Welcome


@dataclass
class Running:
    """A request of a client. `internal` is its id inside the daemon: clients' ids are unique only for each client."""

    session: Session
    request_id: bytes
    internal: bytes
    outflow: Outflow
    cancelled: bool = False
    on_hold: bool = False


@dataclass
class Session:
    client: bytes
    name: str
    version: int
    heard: float
    pinged: float
    requests: dict[bytes, Running] = field(default_factory=dict)


class Service:
    """Listens from construction on and answers HELLO with "loading" until `serve` gives it something to serve."""

    def __init__(self, endpoint: str, limits: Limits, loading: Callable[[], dict[str, Any]]) -> None:
        self.limits = limits
        self._loading = loading
        self._served: Served | None = None
        self._refusing = False
        self._sessions: dict[bytes, Session] = {}
        self._running: dict[bytes, Running] = {}
        self._dirty: dict[bytes, Running] = {}
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._workbench = Workbench()
        self._router = Router(endpoint, limits.max_message)
        self.endpoint = self._router.endpoint
        self._kinds: dict[int, Callable[[Session, bytes, dict[str, Any]], object]] = {
            Kind.REQUEST: self._on_request,
            Kind.ABORT: self._on_abort,
            Kind.CREDIT: self._on_credit,
            Kind.CALL: self._on_call,
            Kind.BYE: lambda session, *_: self._forget(session),
            Kind.PING: lambda session, request_id, _: self._send(session.client, Message(Kind.PONG, request_id)),
            Kind.PONG: lambda *_: None,
        }
        self._router.start("bloomery-service", self._receive, self._flush, self._tick, self._interval)

    # ---- any thread ----

    def serve(self, served: Served) -> None:
        """The model is loaded: HELLO is answered with WELCOME from now on."""
        self._served = served

    def refuse_new(self) -> None:
        """Answers HELLO and REQUEST with "shutting_down" from now on; running requests go on."""
        self._refusing = True

    def counters(self) -> dict[str, int]:
        """Messages, sessions, requests and errors so far, for metrics."""
        gauges = {"sessions": len(self._sessions), "requests_running": len(self._running)}
        return {**dict(self._counters), **gauges}

    def close(self) -> None:
        """Ends every request that still runs with "shutting_down", and the thread."""
        self.refuse_new()
        self._workbench.close()
        self._router.close(self._end_all)

    # ---- the router's thread: messages ----

    def _receive(self, client: bytes, frames: Sequence[Frame]) -> None:
        try:
            envelope = read_envelope(frames)
        except NotOurs:
            self._counters["messages_dropped"] += 1
            return
        self._counters["messages"] += 1
        try:
            self._dispatch(client, envelope.kind, envelope.request_id, frames[3])
        except RequestError as error:
            self._counters[f"refused_{error.code}"] += 1
            self._send(client, self._refusal(client, envelope.kind, envelope.request_id, error))

    def _dispatch(self, client: bytes, kind: int, request_id: bytes, body: Frame) -> None:
        if kind == Kind.HELLO:
            self._on_hello(client, unpack_body(body))
            return
        session = self._sessions.get(client)
        if session is None:
            if kind in (Kind.BYE, Kind.PONG):
                return
            raise RequestError("no_session", "no HELLO from this client", "send HELLO first")
        session.heard = time.monotonic()
        if kind not in self._kinds:
            raise RequestError("unknown_kind", f"kind {kind:#04x} is not one that a client sends here", kind=kind)
        if kind in (Kind.REQUEST, Kind.CALL) and request_id in session.requests:
            raise RequestError("duplicate_request", "a request with this id is already running", "use fresh random ids")
        self._kinds[kind](session, request_id, unpack_body(body))

    def _refusal(self, client: bytes, kind: int, request_id: bytes, error: RequestError) -> Message:
        """An ERROR with the id of a REQUEST or CALL ends it; one that ends nothing has the all-zero id."""
        session = self._sessions.get(client)
        running = session is not None and request_id in session.requests
        if kind in (Kind.REQUEST, Kind.CALL) and not running:
            return error_message(request_id, error)
        if request_id != NO_REQUEST:
            error.details = {**error.details, "id": request_id.hex()}
        return error_message(NO_REQUEST, error)

    def _on_hello(self, client: bytes, body: dict[str, Any]) -> None:
        values = HELLO_SCHEMA.read(body)
        spoken = [version for version in VERSIONS if version in values["versions"]]
        if not spoken:
            names = ", ".join(map(str, VERSIONS))
            raise RequestError(
                "version_mismatch", f"this daemon speaks version {names}", "update the client", spoken=names
            )
        if self._refusing:
            raise RequestError("shutting_down", "the daemon is shutting down")
        if self._served is None:
            raise RequestError(
                "loading", "the model is still being loaded", "send HELLO again later", **self._loading()
            )
        now = time.monotonic()
        known = self._sessions.get(client)
        requests = known.requests if known else {}
        session = Session(client, values["client"][:CLIENT_NAME_CHARACTERS], max(spoken), now, now, requests)
        self._sessions[client] = session
        for running in requests.values():
            running.session = session
        self._send(client, Message(Kind.WELCOME, body=self._served.welcome.body() | {"version": max(spoken)}))

    def _on_request(self, session: Session, request_id: bytes, body: dict[str, Any]) -> None:
        submission = read_request(Message(Kind.REQUEST, request_id, body))
        if self._refusing or self._served is None:
            raise RequestError("shutting_down", "the daemon takes no new requests", "connect to another daemon")
        limit = self.limits.max_in_flight
        if len(session.requests) >= limit:
            raise RequestError(
                "overloaded",
                f"{limit} requests of this client are running",
                "wait for one to end",
                retry_after_s=1,
                limit=limit,
            )
        internal = secrets.token_bytes(ID_BYTES)
        send = partial(self._send, session.client)
        outflow = Outflow(request_id, submission.credit, self.limits, send, time.monotonic)
        running = Running(session, request_id, internal, outflow)
        request = _renamed(submission.request, internal)
        self._workbench.put(partial(self._submit, self._served.engine, running, request))
        self._running[internal] = session.requests[request_id] = running
        self._counters["requests"] += 1

    def _on_abort(self, session: Session, request_id: bytes, body: dict[str, Any]) -> None:
        if running := session.requests.get(request_id):
            running.outflow.grant(
                UNLIMITED
            )  # the client wants the end now, not when it has granted credit for the rest
            self._dirty[running.internal] = running
            self._cancel(running)

    def _on_credit(self, session: Session, request_id: bytes, body: dict[str, Any]) -> None:
        chunks = CREDIT_SCHEMA.read(body)["chunks"]
        if running := session.requests.get(request_id):
            running.outflow.grant(chunks)
            self._dirty[running.internal] = running

    def _on_call(self, session: Session, request_id: bytes, body: dict[str, Any]) -> None:
        values = CALL_SCHEMA.read(body)
        assert self._served is not None  # there is a session
        self._counters["calls"] += 1
        if values["method"] == "end_reasoning":  # of a request that runs: it must not wait for others' prompts
            ended = self._end_reasoning(session, **END_REASONING_SCHEMA.read(values["arguments"], "arguments"))
            self._send(session.client, Message(Kind.RESULT, request_id, {"value": {"ended": ended}}))
            return
        self._workbench.put(partial(self._call, self._served.calls, session.client, request_id, **values))

    def _end_reasoning(self, session: Session, request: bytes) -> bool:
        running = session.requests.get(request)
        return running is not None and self._served is not None and self._served.engine.end_reasoning(running.internal)

    # ---- the utility thread ----

    def _submit(self, engine: Generator, running: Running, request: GenerationRequest) -> None:
        """Tokenising a long prompt takes its time; an abort meanwhile must not get lost."""
        sink = partial(self._from_engine, running.internal)
        if running.cancelled:
            sink(_aborted(running.internal))
            return
        engine.submit(request, sink)
        if running.cancelled:
            engine.abort(running.internal)

    def _call(
        self, calls: UtilityCalls, client: bytes, request_id: bytes, method: str, arguments: dict[str, Any]
    ) -> None:
        def respond(value: Callable[[], dict[str, Any]]) -> None:
            try:
                answer = Message(Kind.RESULT, request_id, {"value": value()})
            except Exception as error:
                answer = error_message(request_id, as_request_error(error))
            self._router.post(partial(self._send, client, answer))

        try:
            answer = calls.run(method, arguments)
        except Exception as error:
            failure = error
            respond(lambda: _raise(failure))
            return
        if isinstance(answer, Future):
            answer.add_done_callback(lambda future: respond(future.result))
        else:
            value = answer
            respond(lambda: value)

    # ---- any thread of the engine ----

    def _from_engine(self, internal: bytes, event: Event) -> None:
        self._router.post(partial(self._on_event, internal, event))

    # ---- the router's thread: events and time ----

    def _on_event(self, internal: bytes, event: Event) -> None:
        running = self._running.get(internal)
        if running is None:
            return
        if isinstance(event, Chunk):
            running.outflow.add(event)
        elif isinstance(event, (Final, Failed)):
            if isinstance(event, Failed):
                self._counters[f"failed_{event.code}"] += 1
            running.outflow.finish(event_message(event, running.request_id))
        elif running.outflow.notice(event_message(event, running.request_id)) is Sent.GONE:
            self._forget(running.session)
            return
        self._dirty[internal] = running

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for running in dirty.values():
            if running.internal not in self._running:
                continue
            try:
                sent = running.outflow.flush()
            except Exception as error:  # an event that cannot be packed must not leave its client waiting
                log.exception("an event could not be sent")
                self._fail(running, RequestError("internal", f"an event could not be sent: {error}"))
                continue
            if sent is Sent.GONE:
                self._forget(running.session)
            elif running.outflow.done:
                self._drop(running)
            elif running.outflow.overfull is not running.on_hold:
                self._hold(running)

    def _interval(self) -> float:
        return TICK_S if self._running else IDLE_TICK_S

    def _tick(self) -> None:
        now = time.monotonic()
        for running in list(self._running.values()):
            if reason := running.outflow.stalled():
                message = f"the request was ended: {reason}"
                self._fail(running, RequestError("client_stalled", message, "grant credit as chunks are read"))
            elif running.outflow.blocked:
                self._dirty[running.internal] = running
        for session in list(self._sessions.values()):
            self._check(session, now)

    def _check(self, session: Session, now: float) -> None:
        """Notices a client that is gone (nothing can be sent to it) or silent while requests of it are running."""
        silent = now - session.heard
        if session.requests and silent > self.limits.client_timeout_s:
            log.warning("client %s is silent for %.1f s: its requests are aborted", session.name, silent)
            self._counters["clients_silent"] += 1
            self._forget(session)
            return
        interval = self.limits.heartbeat_s * (1 if session.requests else IDLE_PING_HEARTBEATS)
        if now - max(session.heard, session.pinged) > interval:
            session.pinged = now
            self._send(session.client, Message(Kind.PING))

    def _send(self, client: bytes, message: Message) -> Sent:
        sent = self._router.send(client, message)
        if sent is Sent.GONE and (session := self._sessions.get(client)):
            self._counters["clients_gone"] += 1
            self._forget(session)
        return sent

    def _fail(self, running: Running, error: RequestError) -> None:
        """Ends a request from this side."""
        self._counters[f"failed_{error.code}"] += 1
        self._cancel(running)
        self._drop(running)
        self._send(running.session.client, error_message(running.request_id, error))

    def _hold(self, running: Running) -> None:
        """Full buffer: the request keeps its slot but takes part in no step until the client has caught up."""
        running.on_hold = not running.on_hold
        if self._served:
            self._served.engine.hold(running.internal, running.on_hold)

    def _cancel(self, running: Running) -> None:
        running.cancelled = True
        if self._served:
            self._served.engine.abort(running.internal)

    def _drop(self, running: Running) -> None:
        self._running.pop(running.internal, None)
        running.session.requests.pop(running.request_id, None)

    def _forget(self, session: Session) -> None:
        """The client is gone: ends its session and aborts its requests."""
        self._sessions.pop(session.client, None)
        for running in list(session.requests.values()):
            self._cancel(running)
            self._drop(running)

    def _end_all(self) -> None:
        """Last words: whatever still runs ends with "shutting_down"."""
        self._flush()
        error = RequestError("shutting_down", "the daemon was shut down")
        for running in list(self._running.values()):
            self._fail(running, error)


def _renamed(request: GenerationRequest, request_id: bytes) -> GenerationRequest:
    return replace(request, request_id=request_id)


def _raise(error: Exception) -> NoReturn:
    raise error


def _aborted(request_id: bytes) -> Final:
    return Final(request_id, "aborted", "", 0, 0, 0, 0, 0.0, 0.0, 0.0)
