"""The engine on a model whose states are rings: a prefix is reused only where the slot's rings still reach, and on the
worker pool what is reused is to the bit what would be computed again.

Planted once and seen to fail: any match counted (the executor refuses the step); a prefix copied without the f32 rows
of its open groups; one token too many counted as cached.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from deepseek_data import executor_of, tiny41
from engine_client import GREEDY, Client, exhaust
from numpy.typing import NDArray
from test_engine_drafts import Replay

from bloomery.runtime.architectures import build_program
from bloomery.runtime.drafts.drafting import Drafting, DraftLimits
from bloomery.runtime.engine import Engine
from bloomery.runtime.host_pool import HostPool
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


def ask(client: Client, prompt: list[int], count: int, *, cache_prompt: bool = True) -> bytes:
    return client.submit(
        tuple(prompt), max_tokens=count, sampling=GREEDY, ignore_eos=True, logits="generated", cache_prompt=cache_prompt
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


@pytest.fixture(scope="module")
def pool() -> Iterator[HostPool]:
    path = tiny41("a")
    with ModelFile.open(path) as model:
        program = build_program(model)
        started = HostPool.start(str(path), program, context=256, slots=2, processes=2, prompt_block=24)
        try:
            yield started
        finally:
            started.close()


Case = tuple[list[int], int, Outcome]


def cases(client: Client) -> list[Case]:
    """Prompts, how much of them is cached, and what came: a turn that goes on in its slot, one asked again, one whose
    beginning is copied from a slot that is generating."""
    text = TOKENS[:9] * 7
    first = outcome(client, ask(client, text, 20))
    prompt = text + first[1] + TOKENS[9:14]
    grown = outcome(client, ask(client, prompt, 20))
    again = outcome(client, ask(client, prompt, 7))
    running = ask(client, prompt, 40)
    while len(client.tokens(running)) < 3:
        assert client.engine.turn()
    branch = prompt[:-2] + TOKENS[20:33]
    copied = outcome(client, ask(client, branch, 12))
    whole, copy = len(prompt) - 1, len(prompt) - 2
    found = [(text, 0, first), (prompt, len(text) + 19, grown), (prompt, whole, again)]
    return [*found, (prompt, whole, outcome(client, running)), (branch, copy, copied)]


def test_on_the_pool_a_cached_prefix_is_a_recomputed_one_bit_for_bit(tokenizer: Tokenizer, pool: HostPool) -> None:
    """Without drafts, and with a draft that is right four times of five."""
    undrafted = cases(Client(Engine(pool, tokenizer, None)))
    draft = Replay([[*prompt, *found[1]] for prompt, _, found in undrafted], 0.8)
    drafting = Drafting(draft, DraftLimits(6, fixed=True), pool.max_out_rows)
    drafted = Client(Engine(pool, tokenizer, None, drafting=drafting))
    plain = Client(Engine(pool, tokenizer, None))
    for number, (prompt, cached, found) in enumerate([*undrafted, *cases(drafted)]):
        expected = outcome(plain, ask(plain, prompt, len(found[1]), cache_prompt=False))
        assert (found[0], expected[0]) == (cached, 0), number
        assert found[1] == expected[1], number
        np.testing.assert_array_equal(found[2], expected[2], f"case {number}")
    metrics = drafted.engine.metrics()
    assert metrics["draft_tokens"] > metrics["draft_accepted"] > 30
