"""The blocking Python client: requests, utility calls, and the control socket. It uses nothing but the protocol.

Owns what a caller of a thread-based program sees. Heartbeats and routing are `connection.py`'s; asyncio programs use
`async_client.py`.

    with Client("ipc:///run/user/1000/bloomery/demo/client") as client:
        for event in client.generate(GenerationRequest(new_request_id(), text="Once upon a time")):
            ...
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import zmq

from bloomery.runtime.completion import Completion, failure_error, gather, new_request_id
from bloomery.runtime.connection import RESTART_HINT, Connection, Delivery, Result, require_listener
from bloomery.runtime.credit import CreditWindow
from bloomery.runtime.errors import RequestError
from bloomery.runtime.facts import Limits, ModelFacts, PlanFacts
from bloomery.runtime.messages import DEFAULT_CREDIT, read_error, request_message
from bloomery.runtime.protocol import Kind, Message, NotOurs, pack, unpack
from bloomery.runtime.requests import Chunk, Event, Failed, Final, GenerationRequest

__all__ = ["Client", "ControlClient", "Generation", "new_request_id"]

CALL_TIMEOUT_S = 60.0


class Generation(Iterator[Event]):
    """The events of one request; the last is Final or Failed. Leaving it unfinished (close, `with`, garbage) aborts."""

    def __init__(self, connection: Connection, request: GenerationRequest, credit: int, timeout: float | None) -> None:
        self.request_id = request.request_id
        self._connection = connection
        self._events: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._window = CreditWindow(request.request_id, credit)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._done = True
        connection.start(request_message(request, credit), self._events.put)
        self._done = False

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Event:
        """Waits for the next event. Past the time-out the request is aborted and the event is Failed("timeout")."""
        if self._done:
            raise StopIteration
        try:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            event, cost = self._events.get(timeout=left)
        except queue.Empty:
            self.close()
            return Failed(self.request_id, "timeout", "the request took longer than the time allowed for it")
        assert not isinstance(event, Result)
        if isinstance(event, Chunk) and (grant := self._window.take(cost)):
            self._connection.send(grant)
        self._done = isinstance(event, (Final, Failed))
        return event

    def abort(self) -> None:
        """Asks for an early end; the events go on until Final with reason "aborted"."""
        if not self._done:
            self._connection.send(Message(Kind.ABORT, self.request_id))

    def close(self) -> None:
        """Aborts the request if it is still running and ends the iteration."""
        self.abort()
        self._done = True

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class Client:
    """A session with a daemon; safe to use from several threads, with several requests at once.

    `timeout` bounds the wait for the daemon to answer, loading of the model included. Raises RequestError with
    "daemon_lost", "timeout" or "version_mismatch" from the constructor; once the daemon is gone, running requests end
    with Failed("daemon_lost") and new ones raise. `runs` is `Connection`'s: for a daemon whose process is known.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        name: str = "bloomery-python",
        timeout: float = 60.0,
        runs: Callable[[], bool] | None = None,
    ) -> None:
        self._connection = Connection(endpoint, name=name, timeout=timeout, runs=runs)
        self.endpoint = endpoint
        self.control = self._connection.welcome.control
        self.facts: ModelFacts = self._connection.welcome.model
        self.plan: PlanFacts = self._connection.welcome.plan
        self.limits: Limits = self._connection.welcome.limits

    def generate(
        self, request: GenerationRequest, *, credit: int = DEFAULT_CREDIT, timeout: float | None = None
    ) -> Generation:
        """Starts a request and returns its events. `timeout` bounds the whole request, in seconds. `credit` is the
        number of chunks that may be under way before the caller has taken them.

        Raises RequestError ("daemon_lost", "duplicate_request", "too_large") only if the request cannot be sent; what
        the daemon objects to arrives as Failed.
        """
        return Generation(self._connection, request, credit, timeout)

    def complete(self, request: GenerationRequest, *, timeout: float | None = None) -> Completion:
        """Runs a request to its end. Raises RequestError if it fails."""
        with self.generate(request, timeout=timeout) as events:
            return gather(events)

    def abort(self, request_id: bytes) -> None:
        """Ends a running request early; unknown ids are ignored."""
        self._connection.send(Message(Kind.ABORT, request_id))

    def call(self, method: str, *, timeout: float = CALL_TIMEOUT_S, **arguments: Any) -> Any:
        """Calls a utility method of the daemon and returns its value. Raises RequestError."""
        answers: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        body = {"method": method, "arguments": arguments}
        self._connection.start(Message(Kind.CALL, new_request_id(), body), answers.put)
        try:
            answer, _ = answers.get(timeout=timeout)
        except queue.Empty:
            raise RequestError("timeout", f"no answer to {method} within {timeout:g} s") from None
        if isinstance(answer, Failed):
            raise failure_error(answer)
        assert isinstance(answer, Result)
        return answer.value

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text, as the model file says."""
        value = self.call("tokenize", text=text, add_special=add_special, parse_special=parse_special)
        return [int(token) for token in value["tokens"]]

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; `special` also writes control tokens out."""
        return str(self.call("detokenize", tokens=list(tokens), special=special)["text"])

    def apply_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text that the file's chat template makes of a conversation."""
        value = self.call(
            "apply_template",
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            template_variables=variables,
        )
        return str(value["text"])

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ControlClient:
    """Calls on the control socket, which answers while the model loads and while long prompts run. Thread-safe.

    Raises RequestError("daemon_lost") if nobody listens and "timeout" if no answer comes within `timeout` seconds.
    """

    def __init__(self, endpoint: str, *, timeout: float = 5.0) -> None:
        require_listener(endpoint)
        self.endpoint = endpoint
        self._timeout = timeout
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 200)
        self._socket.connect(endpoint)

    def call(self, method: str, **arguments: Any) -> Any:
        """Value of a control method. Raises RequestError."""
        request_id = new_request_id()
        deadline = time.monotonic() + self._timeout
        with self._lock:
            body = {"method": method, "arguments": arguments}
            try:
                self._socket.send_multipart(pack(Message(Kind.CALL, request_id, body)), zmq.NOBLOCK)
            except zmq.Again:
                raise RequestError("daemon_lost", f"nobody takes calls on {self.endpoint}", RESTART_HINT) from None
            while self._socket.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
                try:
                    answer = unpack(self._socket.recv_multipart())
                except NotOurs:
                    continue
                if answer.request_id == request_id and answer.kind == Kind.RESULT:
                    return answer.body.get("value")
                if answer.request_id == request_id and answer.kind == Kind.ERROR:
                    raise read_error(answer)
        require_listener(self.endpoint)
        raise RequestError("timeout", f"{self.endpoint} did not answer {method} within {self._timeout:g} s")

    def ping(self) -> float:
        """Round-trip time in seconds."""
        start = time.monotonic()
        self.call("ping")
        return time.monotonic() - start

    def status(self) -> dict[str, Any]:
        """State ("loading", "ready", "draining", "stopping"), progress, model, plan, slots, workers."""
        return dict(self.call("status"))

    def metrics(self) -> dict[str, Any]:
        """Counters and gauges by name."""
        return dict(self.call("metrics"))

    def drain(self) -> None:
        """Refuses new requests; running ones finish."""
        self.call("drain")

    def shutdown(self) -> None:
        """Ends the daemon: running requests fail with "shutting_down"."""
        self.call("shutdown")

    def close(self) -> None:
        with self._lock:
            self._socket.close()
            self._context.term()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
