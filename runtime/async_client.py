"""The asyncio client: the same session as `client.py`, with awaitable calls and asynchronous iteration.

Owns the hand-over from the connection's thread to the event loop; heartbeats therefore go on while the loop is busy.

    async with await AsyncClient.connect(endpoint) as client:
        async for event in client.generate(request):
            ...
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

from bloomery.runtime.client import CALL_TIMEOUT_S
from bloomery.runtime.completion import Completion, CompletionBuilder, failure_error, new_request_id
from bloomery.runtime.connection import Connection, Deliver, Delivery, Result
from bloomery.runtime.credit import CreditWindow
from bloomery.runtime.errors import RequestError
from bloomery.runtime.facts import Limits, ModelFacts, PlanFacts
from bloomery.runtime.messages import DEFAULT_CREDIT, request_message
from bloomery.runtime.protocol import Kind, Message
from bloomery.runtime.requests import Chunk, Event, Failed, Final, GenerationRequest


def _into(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Delivery]) -> Deliver:
    """A callback for the connection's thread that puts into a queue of the loop; a closed loop drops what arrives."""

    def deliver(delivery: Delivery) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(events.put_nowait, delivery)

    return deliver


class AsyncGeneration(AsyncIterator[Event]):
    """The events of one request; the last is Final or Failed. Leaving it unfinished (aclose, `async with`) aborts it,
    and so does cancelling the task that waits for an event."""

    def __init__(self, connection: Connection, request: GenerationRequest, credit: int, timeout: float | None) -> None:
        self.request_id = request.request_id
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Delivery] = asyncio.Queue()
        self._window = CreditWindow(request.request_id, credit)
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._done = True
        connection.start(request_message(request, credit), _into(self._loop, self._events))
        self._done = False

    def __aiter__(self) -> AsyncGeneration:
        return self

    async def __anext__(self) -> Event:
        """Waits for the next event. Past the time-out the request is aborted and the event is Failed("timeout")."""
        if self._done:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout_at(self._deadline):
                event, cost = await self._events.get()
        except TimeoutError:
            await self.aclose()
            return Failed(self.request_id, "timeout", "the request took longer than the time allowed for it")
        except asyncio.CancelledError:
            await self.aclose()
            raise
        assert not isinstance(event, Result)
        if isinstance(event, Chunk) and (grant := self._window.take(cost)):
            self._connection.send(grant)
        self._done = isinstance(event, (Final, Failed))
        return event

    def abort(self) -> None:
        """Asks for an early end; the events go on until Final with reason "aborted"."""
        if not self._done:
            self._connection.send(Message(Kind.ABORT, self.request_id))

    async def aclose(self) -> None:
        """Aborts the request if it is still running and ends the iteration."""
        self.abort()
        self._done = True

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.abort()


class AsyncClient:
    """A session with a daemon inside an event loop. Made by `await AsyncClient.connect(endpoint)`, or used as
    `async with AsyncClient(endpoint) as client`. Errors are those of `Client`."""

    def __init__(
        self,
        endpoint: str,
        *,
        name: str = "bloomery-python-asyncio",
        timeout: float = 60.0,
        runs: Callable[[], bool] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._name = name
        self._timeout = timeout
        self._runs = runs
        self._connected: Connection | None = None

    @classmethod
    async def connect(
        cls,
        endpoint: str,
        *,
        name: str = "bloomery-python-asyncio",
        timeout: float = 60.0,
        runs: Callable[[], bool] | None = None,
    ) -> AsyncClient:
        client = cls(endpoint, name=name, timeout=timeout, runs=runs)
        await client._open()
        return client

    async def _open(self) -> None:
        if self._connected is None:
            self._connected = await asyncio.to_thread(
                Connection, self.endpoint, name=self._name, timeout=self._timeout, runs=self._runs
            )

    @property
    def _connection(self) -> Connection:
        if self._connected is None:
            raise RequestError("daemon_lost", "the client is not connected", "use `async with` or AsyncClient.connect")
        return self._connected

    @property
    def alive(self) -> bool:
        """Whether there is a connection and the daemon is still at its other end, as far as is known."""
        return self._connected is not None and self._connected.alive

    @property
    def facts(self) -> ModelFacts:
        return self._connection.welcome.model

    @property
    def plan(self) -> PlanFacts:
        return self._connection.welcome.plan

    @property
    def limits(self) -> Limits:
        return self._connection.welcome.limits

    @property
    def control(self) -> str:
        return self._connection.welcome.control

    def generate(
        self, request: GenerationRequest, *, credit: int = DEFAULT_CREDIT, timeout: float | None = None
    ) -> AsyncGeneration:
        """Starts a request and returns its events; see `Client.generate`."""
        return AsyncGeneration(self._connection, request, credit, timeout)

    async def complete(self, request: GenerationRequest, *, timeout: float | None = None) -> Completion:
        """Runs a request to its end. Raises RequestError if it fails."""
        builder = CompletionBuilder()
        async with self.generate(request, timeout=timeout) as events:
            async for event in events:
                builder.add(event)
        return builder.result()

    def abort(self, request_id: bytes) -> None:
        """Ends a running request early; unknown ids are ignored."""
        self._connection.send(Message(Kind.ABORT, request_id))

    async def call(self, method: str, *, timeout: float = CALL_TIMEOUT_S, **arguments: Any) -> Any:
        """Calls a utility method of the daemon and returns its value. Raises RequestError."""
        answers: asyncio.Queue[Delivery] = asyncio.Queue()
        body = {"method": method, "arguments": arguments}
        deliver = _into(asyncio.get_running_loop(), answers)
        self._connection.start(Message(Kind.CALL, new_request_id(), body), deliver)
        try:
            answer, _ = await asyncio.wait_for(answers.get(), timeout)
        except TimeoutError:
            raise RequestError("timeout", f"no answer to {method} within {timeout:g} s") from None
        if isinstance(answer, Failed):
            raise failure_error(answer)
        assert isinstance(answer, Result)
        return answer.value

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text, as the model file says."""
        value = await self.call("tokenize", text=text, add_special=add_special, parse_special=parse_special)
        return [int(token) for token in value["tokens"]]

    async def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; `special` also writes control tokens out."""
        return str((await self.call("detokenize", tokens=list(tokens), special=special))["text"])

    async def apply_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text that the file's chat template makes of a conversation."""
        value = await self.call(
            "apply_template",
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            template_variables=variables,
        )
        return str(value["text"])

    async def close(self) -> None:
        if self._connected is not None:
            connection, self._connected = self._connected, None
            await asyncio.to_thread(connection.close)

    async def __aenter__(self) -> AsyncClient:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
