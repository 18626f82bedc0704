"""The daemon behind the server: connecting to it, its facts, and small calls whose answers are kept.

Owns the client connection and what is known of the model. It does not know HTTP, nor how a private daemon is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

from bloomery.launcher.http.errors import as_request_error
from bloomery.launcher.http.starting import DaemonSource
from bloomery.runtime.async_client import AsyncClient, AsyncGeneration
from bloomery.runtime.client import ControlClient
from bloomery.runtime.errors import RequestError
from bloomery.runtime.facts import ModelFacts
from bloomery.runtime.requests import GenerationRequest

log = logging.getLogger(__name__)

State: TypeAlias = Literal["loading", "ready", "sleeping", "failed"]
CREDIT = 1024
RETRY_SECONDS = 1.0
LOADING_SECONDS = 600.0
REUNION_SECONDS = 10.0
"""How long a daemon that runs may take to answer anew before it is replaced."""
KEPT_PIECES = 1 << 20


class Backend:
    """`state` is "loading", "ready", "sleeping" or "failed". Calls raise RequestError("loading") before it is ready."""

    def __init__(self, source: DaemonSource, endpoint: Future[str]) -> None:
        """`endpoint` is what `source.start` gave."""
        self.state: State = "loading"
        self.error: BaseException | None = None
        self._source, self._endpoint = source, endpoint
        self._client: AsyncClient | None = None
        self._control: ControlClient | None = None
        self._facts: ModelFacts | None = None
        self._turn = asyncio.Lock()  # opening, closing, sleeping and waking come one after the other
        self._pieces: dict[bool, dict[int, bytes]] = {True: {}, False: {}}
        self._running: WeakSet[AsyncGeneration] = WeakSet()

    async def open(self) -> None:
        """Connects when the daemon is there. Never raises: `state` and `error` say how it went."""
        async with self._turn:
            await self._open()

    async def _open(self, timeout: float = LOADING_SECONDS) -> None:
        runs = (lambda: self._source.runs) if self._source.private else None
        try:
            endpoint = await asyncio.wrap_future(self._endpoint)
            self._client = await AsyncClient.connect(endpoint, name="bloomery-serve", timeout=timeout, runs=runs)
            self._control = await asyncio.to_thread(ControlClient, self._client.control)
            self._facts = self._client.facts
            self.error, self.state = None, "ready"
        except Exception as error:
            self.error, self.state = error, "failed"

    async def close(self) -> None:
        async with self._turn:
            await self._close()

    async def _close(self) -> None:
        client, self._client = self._client, None
        control, self._control = self._control, None
        if client is not None:
            await client.close()
        if control is not None:
            await asyncio.to_thread(control.close)

    @property
    def lost(self) -> bool:
        """Whether a daemon that was there has gone."""
        return self.state == "ready" and (self._client is None or not self._client.alive)

    async def reopen(self) -> None:
        """After a loss: a private daemon is replaced, another one is looked for until it is back. A private daemon that
        runs has only forgotten a client from which nothing came for long: it is connected to again, with its model and
        caches as they are."""
        async with self._turn:
            self.state = "loading"
            await self._close()
            if self._source.runs:
                await self._open(REUNION_SECONDS)
                if self.error is None:
                    return
                self.state = "loading"
            while not await self._restart() and not self._source.private:
                self.state = "loading"
                await asyncio.sleep(RETRY_SECONDS)

    async def _restart(self) -> bool:
        await asyncio.to_thread(self._source.stop)
        self._pieces = {True: {}, False: {}}
        self._endpoint = self._source.start()
        await self._open()
        return self.error is None

    @property
    def can_sleep(self) -> bool:
        return self._source.private and self.state == "ready" and not self._running

    async def sleep(self) -> None:
        """Ends the private daemon; the next call of `wake` starts another."""
        async with self._turn:
            if self.can_sleep:
                self.state = "sleeping"
                await self._close()
                await asyncio.to_thread(self._source.stop)

    async def wake(self) -> None:
        """Returns when a sleeping daemon is back; at once if it does not sleep."""
        if self.state != "sleeping":
            return
        async with self._turn:
            if self.state == "sleeping":
                await self._restart()

    def require_ready(self) -> None:
        """Raises RequestError("loading"), or why the daemon cannot be used."""
        assert self.client is not None

    @property
    def client(self) -> AsyncClient:
        if self._client is None:
            if self.error is not None:
                raise as_request_error(self.error)
            raise RequestError("loading", "the model is still being loaded")
        return self._client

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model, also while it sleeps."""
        return self._facts or self.client.facts

    def generate(self, request: GenerationRequest) -> AsyncGeneration:
        events = self.client.generate(request, credit=CREDIT)
        self._running.add(events)
        return events

    def ended(self, events: AsyncGeneration) -> None:
        self._running.discard(events)

    def abort_all(self) -> None:
        """Running generations end early, each with its final event."""
        for events in tuple(self._running):
            events.abort()

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return dict(await self.client.call(method, **arguments))

    async def control(self, method: str) -> dict[str, Any]:
        """A call on the control socket, which answers while long prompts run."""
        client = self.client
        assert client is not None and self._control is not None
        return dict(await asyncio.to_thread(self._control.call, method) or {})

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return await self.client.tokenize(text, add_special=add_special, parse_special=parse_special)

    async def pieces(self, tokens: Iterable[int], *, special: bool = True) -> dict[int, bytes]:
        """The bytes of tokens, those of control tokens only if `special`. Each token is asked for once."""
        wanted, kept = set(tokens), self._pieces[special]
        missing = sorted(wanted - kept.keys())
        if missing:
            if len(kept) > KEPT_PIECES:
                kept.clear()
                missing = sorted(wanted)
            found = (await self.call("pieces", tokens=missing, special=special))["pieces"]
            kept.update(zip(missing, found, strict=True))
        return {token: kept[token] for token in wanted}

    async def shown(self, tokens: Sequence[int]) -> str:
        """Text of tokens, control tokens written out."""
        return await self.client.detokenize(tokens, special=True)

    async def apply_template(
        self, messages: Sequence[dict[str, Any]], template: str, add_generation_prompt: bool, variables: dict[str, Any]
    ) -> str:
        """The prompt text of a conversation; `template` is Jinja source, "" for the model file's own."""
        value = await self.call(
            "apply_template",
            messages=list(messages),
            template=template,
            add_generation_prompt=add_generation_prompt,
            template_variables=variables,
        )
        return str(value["text"])
