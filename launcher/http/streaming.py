"""Server-sent events, and the end of a request whose client has gone.

Owns framing, pings while nothing happens, and noticing a disconnect. It does not know what events mean.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from bloomery.launcher.http.errors import as_request_error
from bloomery.launcher.http.generation import Step
from bloomery.launcher.http.shapes import Event, Shape
from bloomery.runtime.errors import RequestError

T = TypeVar("T")
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
PING = b": ping\n\n"


def frame(event: Event) -> bytes:
    """One server-sent event."""
    name, data = event
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode("utf-8", "replace")


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes. Raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for other in (task, watch):
            other.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Line:
    """The way to one client, with a comment whenever nothing else has been sent for a while."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._open = self._busy = False
        self._last = time.monotonic()

    async def send(self, message: Message) -> None:
        self._busy = True
        try:
            await self._send(message)
        finally:
            self._busy = False
        self._open, self._last = message.get("more_body", True), time.monotonic()

    async def ping(self, interval: int) -> None:
        """Runs until it is cancelled. One sleep for each interval, nothing for each event (0 or less: never)."""
        while interval > 0:
            left = self._last + interval - time.monotonic()
            if left <= 0 and self._open and not self._busy:
                await self.send({"type": "http.response.body", "body": PING, "more_body": True})
            else:
                await asyncio.sleep(left if left > 0 else interval)


class EventStream(StreamingResponse):
    """A stream of a shape's events. `begun` waits for the first step, so that failures before it are plain errors."""

    def __init__(self, first: list[Step], steps: AsyncIterator[Step], shape: Shape, ping: int) -> None:
        super().__init__(self._frames(first, steps, shape), media_type="text/event-stream", headers=HEADERS)
        self._steps, self._ping = steps, ping

    @classmethod
    async def begun(cls, request: Request, steps: AsyncIterator[Step], shape: Shape, ping: int) -> Response:
        async def first() -> list[Step]:
            return [await anext(steps)]

        try:
            return cls(await until_disconnect(request, first()), steps, shape, ping)
        except BaseException:
            await steps.aclose()  # type: ignore[attr-defined]
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the end or until the client has gone; the generations are aborted then."""
        line = _Line(send)
        sending = asyncio.ensure_future(self.stream_response(line.send))
        pinging = asyncio.ensure_future(line.ping(self._ping))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, watch), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with suppress(OSError):
                    sending.result()
        finally:
            for other in (sending, watch, pinging):
                other.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await sending
            await self._steps.aclose()  # type: ignore[attr-defined]

    async def _frames(self, first: list[Step], steps: AsyncIterator[Step], shape: Shape) -> AsyncIterator[bytes]:
        try:
            for begun in first:
                for event in shape.events(begun):
                    yield frame(event)
            async for step in steps:
                data = b"".join(frame(event) for event in shape.events(step))
                if data:
                    yield data
        except RequestError as error:
            yield frame(shape.failure(error))
        except Exception as error:
            yield frame(shape.failure(as_request_error(error)))
            raise
        for word in shape.last_words:
            yield f"data: {word}\n\n".encode()
