"""What the tests of the engine share: a client that keeps what comes back, an engine thread, a gate in a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from toy_model import TOKENIZER, VOCABULARY, ToyExecutor

from bloomery.runtime.engine import Engine
from bloomery.runtime.requests import Chunk, Event, Failed, Final, GenerationRequest, SamplingParameters
from bloomery.runtime.tokenizer import Tokenizer

GREEDY = SamplingParameters(temperature=0.0)
PROMPT = tuple(np.random.default_rng(2).integers(1, VOCABULARY, 40).tolist())


class Client:
    """Numbers its requests and keeps what comes back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: dict[bytes, list[Event]] = {}
        self.threads: dict[bytes, int] = {}  # that delivered the last event

    def submit(self, tokens: tuple[int, ...] = PROMPT, **fields: Any) -> bytes:
        request_id = len(self.events).to_bytes(16, "big")
        self.submit_request(GenerationRequest(request_id, tokens=tokens, **{"sampling": GREEDY, **fields}))
        return request_id

    def submit_request(self, request: GenerationRequest) -> None:
        events = self.events[request.request_id] = []

        def sink(event: Event) -> None:
            self.threads[request.request_id] = threading.get_ident()
            events.append(event)

        self.engine.submit(request, sink)

    def abort(self, request_id: bytes) -> None:
        assert self.engine.abort(request_id)

    def last(self, request_id: bytes) -> Event | None:
        events = self.events[request_id]
        return events[-1] if events and isinstance(events[-1], (Final, Failed)) else None

    def wait(self, request_id: bytes) -> Event:
        deadline = time.monotonic() + 20
        while self.last(request_id) is None:
            assert time.monotonic() < deadline, "no end"
            time.sleep(0.001)
        return self.events[request_id][-1]

    def failure(self, request_id: bytes) -> Failed:
        last = self.events[request_id][-1]
        assert isinstance(last, Failed)
        return last

    def final(self, request_id: bytes) -> Final:
        last = self.events[request_id][-1]
        assert isinstance(last, Final), last
        return last

    def tokens(self, request_id: bytes) -> list[int]:
        return [token for event in self.events[request_id] if isinstance(event, Chunk) for token in event.tokens]


def made(queue_limit: int = 8, tokenizer: Tokenizer = TOKENIZER, **executor: Any) -> tuple[ToyExecutor, Client]:
    toy = ToyExecutor(**executor)
    return toy, Client(Engine(toy, tokenizer, None, queue_limit=queue_limit))


def exhaust(client: Client) -> None:
    while client.engine.turn():
        pass


@contextmanager
def running(client: Client) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=client.engine.run)
    thread.start()
    try:
        yield thread
    finally:
        client.engine.close()
        thread.join(20)
        assert not thread.is_alive()


class Gate:
    """Stops a toy executor in the middle of a step until it is opened or the step is aborted."""

    def __init__(self, executor: ToyExecutor) -> None:
        self.executor = executor
        self.entered, self.open = threading.Event(), threading.Event()
        executor.during = self.pass_through

    def pass_through(self) -> None:
        self.entered.set()
        deadline = time.monotonic() + 20
        while not self.open.is_set() and not self.executor.abort_wanted:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
