"""The engine on a model whose states are rings: a prefix is reused only where the slot's rings still reach.

Planted once and seen to fail: any match counted (the executor refuses the step).
"""

from __future__ import annotations

import numpy as np
import pytest
from deepseek_data import executor_of, tiny41
from engine_client import GREEDY, Client, exhaust
from numpy.typing import NDArray

from bloomery.runtime.engine import Engine
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.requests import Chunk
from bloomery.runtime.tokenizer import Tokenizer

BLOCK = 6  # rows of a step, and how far rings reach back
TOKENS = np.random.default_rng(11).integers(3, 500, 40).tolist()
Outcome = tuple[int, list[int], NDArray[np.float32]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with ModelFile.open(tiny41("a")) as model:
        return Tokenizer.from_model_file(model)


def client_of(tokenizer: Tokenizer, slots: int) -> Client:
    executor = executor_of(tiny41("a"), slots=slots, context=128, max_rows=BLOCK)
    return Client(Engine(executor, tokenizer, None))


def ask(client: Client, prompt: list[int], count: int) -> bytes:
    return client.submit(
        tuple(prompt), max_tokens=count, sampling=GREEDY, ignore_eos=True, logits="generated", cache_prompt=True
    )


def outcome(client: Client, request: bytes) -> Outcome:
    """Cached tokens, generated tokens and their logits."""
    exhaust(client)
    cached = client.final(request).cached_tokens
    chunks = [event for event in client.events[request] if isinstance(event, Chunk)]
    return cached, client.tokens(request), np.concatenate([c.logits for c in chunks if c.logits is not None])


def alone(tokenizer: Tokenizer, prompt: list[int], count: int) -> Outcome:
    """On a new daemon."""
    client = client_of(tokenizer, 1)
    return outcome(client, ask(client, prompt, count))


def same(found: Outcome, expected: Outcome) -> bool:
    count = len(found[1])
    assert found[1] == expected[1][:count]
    return float(np.abs(found[2] - expected[2][:count]).max()) < 1e-5


def test_second_requests_on_one_slot(tokenizer: Tokenizer) -> None:
    """A conversation that grows, one that is regenerated soon and late, one that shares its beginning only."""
    client = client_of(tokenizer, 1)
    first = outcome(client, ask(client, TOKENS[:18], 4))
    assert first[0] == 0 and same(first, alone(tokenizer, TOKENS[:18], 4))
    prompt = TOKENS[:18] + first[1] + TOKENS[18:22]
    grown, expected = outcome(client, ask(client, prompt, 9)), alone(tokenizer, prompt, 9)
    assert grown[0] == 21 and same(grown, expected)
    late = outcome(client, ask(client, prompt, 3))  # the slot ran to 34 and goes on from 27; the last token is at 25
    assert late[0] == 0 and same(late, expected)
    soon = outcome(client, ask(client, prompt, 3))
    assert soon[0] == 25 and same(soon, expected)
    prompt = TOKENS[:12] + TOKENS[30:36]
    shared = outcome(client, ask(client, prompt, 2))
    assert shared[0] == 0 and same(shared, alone(tokenizer, prompt, 2))


def test_a_prefix_of_a_running_request_is_copied_where_it_goes_on(tokenizer: Tokenizer) -> None:
    client = client_of(tokenizer, 2)
    first = ask(client, TOKENS[:24], 5)
    for _ in range(4):
        assert client.engine.turn()
    prompt = TOKENS[:23] + TOKENS[30:33]
    second = outcome(client, ask(client, prompt, 3))
    assert second[0] == 23 and same(second, alone(tokenizer, prompt, 3))
    assert same(outcome(client, first), alone(tokenizer, TOKENS[:24], 5))
