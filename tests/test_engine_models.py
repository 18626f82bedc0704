"""The engine with real parts: a trained model, its tokenizer and chat template, reference executor and worker pool.

What a request gives must not depend on what runs beside it, on blocks, or on whether its prompt was cached: to the bit
on the pool, to rounding on the reference.

Planted once and seen to fail on the pool: matches one token too long; a slot that claims a row more than was cached;
rows of one sequence written into another's slot.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from engine_client import Client, exhaust, running
from numpy.typing import NDArray
from oracle_data import trained_file

from bloomery.runtime.architectures import build_program
from bloomery.runtime.chat_template import ChatTemplate
from bloomery.runtime.engine import Engine
from bloomery.runtime.executor import StepExecutor
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.reference import ReferenceExecutor
from bloomery.runtime.requests import Chunk, Failed, GenerationRequest, SamplingParameters
from bloomery.runtime.tokenizer import Tokenizer

CONTEXT, SLOTS = 256, 3
GREEDY = SamplingParameters(temperature=0.0)
TEXT = "The old blacksmith opened the door of the forge and looked at the iron that lay in the fire. He said to him "


class Parts(NamedTuple):
    tokenizer: Tokenizer
    template: ChatTemplate
    executor: StepExecutor
    bits: bool  # equal to the bit, else to rounding

    def client(self) -> Client:
        return Client(Engine(self.executor, self.tokenizer, self.template))


@pytest.fixture(scope="module", params=["reference", "pool, blocks of 512", "pool, blocks of 7"])
def parts(request: pytest.FixtureRequest) -> Iterator[Parts]:
    path = trained_file("tiny-qwen3moe-Q4_K_M")
    with ModelFile.open(path) as model:
        program = build_program(model)
        tokenizer = Tokenizer.from_model_file(model)
        template = ChatTemplate.from_model_file(model, tokenizer)
        executor: StepExecutor
        if request.param == "reference":
            executor = ReferenceExecutor(
                program, context=CONTEXT, slots=SLOTS, max_rows=64, cache_type="f64", dtype=np.float64
            )
        else:
            block = 512 if request.param.endswith("512") else 7
            executor = HostPool.start(
                str(path), program, context=CONTEXT, slots=SLOTS, processes=1, prompt_block=block, cache_type="f16"
            )
        try:
            yield Parts(tokenizer, template, executor, request.param != "reference")
        finally:
            executor.close()


class Outcome(NamedTuple):
    tokens: list[int]
    text: str
    logits: NDArray[np.float32]
    cached: int


def outcome(client: Client, request_id: bytes) -> Outcome:
    chunks = [event for event in client.events[request_id] if isinstance(event, Chunk)]
    arrays = [chunk.logits for chunk in chunks if chunk.logits is not None]
    text = "".join(chunk.text for chunk in chunks)
    return Outcome(client.tokens(request_id), text, np.concatenate(arrays), client.final(request_id).cached_tokens)


def run(parts: Parts, requests: list[GenerationRequest], client: Client | None = None) -> list[Outcome]:
    client = client or parts.client()
    for request in requests:
        client.submit_request(request)
    exhaust(client)
    return [outcome(client, request.request_id) for request in requests]


def asked(number: int, text: str, **fields: Any) -> GenerationRequest:
    defaults: dict[str, Any] = {"max_tokens": 12, "sampling": GREEDY, "logits": "generated", "ignore_eos": True}
    return GenerationRequest(number.to_bytes(16, "big"), text=text, **{**defaults, **fields})


def equal(parts: Parts) -> Callable[[Outcome, Outcome], bool]:
    def same(left: Outcome, right: Outcome) -> bool:
        if left.tokens != right.tokens or left.text != right.text:
            return False
        if parts.bits:
            return left.logits.tobytes() == right.logits.tobytes()
        return bool(np.abs(left.logits - right.logits).max() < 1e-5)

    return same


def test_alone_batched_and_cached_give_the_same(parts: Parts) -> None:
    same = equal(parts)
    draws = SamplingParameters(temperature=1.0, seed=5)
    length = 12 if parts.bits else 4  # the reference is slow
    requests = [
        asked(0, TEXT),
        asked(1, TEXT + "that", sampling=draws),
        asked(2, "Once upon a time"),
        asked(3, TEXT[:40], sampling=replace(draws, repeat_penalty=1.2)),
        asked(4, TEXT + "then", sampling=replace(draws, top_k=0), cache_prompt=False),
    ]
    requests = [replace(request, max_tokens=length) for request in requests]
    alone = [run(parts, [replace(request, cache_prompt=False)])[0] for request in requests]
    assert all(result.cached == 0 and len(result.tokens) == length for result in alone)
    assert len({tuple(result.tokens) for result in alone}) == len(alone)
    client = parts.client()
    together = run(parts, requests, client)
    assert all(map(same, together, alone))
    again = [replace(request, request_id=bytes(15) + bytes([10 + index])) for index, request in enumerate(requests)]
    cached = run(parts, again, client)
    assert all(map(same, cached, alone))
    assert sum(result.cached > 5 for result in cached) >= 3 and cached[4].cached == 0


def common_prefix(left: list[int], right: list[int]) -> int:
    differing = [index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other]
    return differing[0] if differing else min(len(left), len(right))


def test_a_conversation_grows_in_its_slot(parts: Parts) -> None:
    client = parts.client()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me about iron."}]
    held: list[int] = []
    for turn in range(3 if parts.bits else 2):
        request = replace(asked(turn, ""), text=None, messages=tuple(messages))
        [result] = run(parts, [request], client)
        tokens = parts.template.render_tokens(messages)
        assert client.final(request.request_id).prompt_tokens == len(tokens)
        assert result.cached == common_prefix(held, tokens) and (result.cached > 10 or turn == 0)
        held = [*tokens, *result.tokens[:-1]]
        again = replace(request, request_id=bytes(15) + bytes([10 + turn]), cache_prompt=False)
        [recomputed] = run(parts, [again], client)
        assert recomputed.cached == 0 and equal(parts)(result, recomputed)
        messages += [{"role": "assistant", "content": result.text}, {"role": "user", "content": f"And in year {turn}?"}]


def test_scores_of_a_prompt_are_its_log_probabilities(parts: Parts) -> None:
    client = parts.client()
    [result] = run(parts, [asked(0, TEXT, score_prompt=True, logits="all", max_tokens=1)], client)
    tokens = parts.tokenizer.encode(TEXT)
    rows = result.logits.astype(np.float64)
    assert len(rows) == len(tokens)
    expected = rows[np.arange(len(tokens) - 1), tokens[1:]] - np.log(np.exp(rows[:-1]).sum(axis=1))
    chunks = [event for event in client.events[bytes(16)] if isinstance(event, Chunk)]
    scores = [score for chunk in chunks for score in chunk.prompt_logprobs]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert np.mean(scores) > -8, "a trained model on English"


def test_stop_strings_and_text_of_a_real_vocabulary(parts: Parts) -> None:
    [free] = run(parts, [asked(0, TEXT, max_tokens=20)])
    assert free.text == parts.tokenizer.decode(free.tokens, continuation=True)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 5]
    client = parts.client()
    [stopped] = run(parts, [asked(0, TEXT, max_tokens=20, stop=(stop,))], client)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert client.final(bytes(16)).reason == "stop" and client.final(bytes(16)).stop == stop
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]


def test_a_killed_worker_costs_the_running_requests_and_nothing_else(parts: Parts) -> None:
    if not isinstance(parts.executor, HostPool):
        pytest.skip("the reference has no workers")
    client = parts.client()
    [before] = run(parts, [asked(0, TEXT)], client)
    with running(client):
        doomed = [asked(1, TEXT, max_tokens=200), asked(2, TEXT[:50], max_tokens=200), asked(3, "Iron", max_tokens=200)]
        for request in [*doomed, asked(4, TEXT)]:
            client.submit_request(request)
        while len(client.tokens(doomed[2].request_id)) < 3:
            time.sleep(0.001)
        killed = time.monotonic()
        os.kill(parts.executor.statistics()["pids"][0], signal.SIGKILL)
        ends = [client.wait(request.request_id) for request in doomed]
        assert time.monotonic() - killed < 2
        assert all(isinstance(end, Failed) and end.code == "worker_lost" for end in ends)
        client.wait(asked(4, "").request_id)
    after = outcome(client, asked(4, "").request_id)
    assert after.cached == len(parts.tokenizer.encode(TEXT)) - 1, "what was cached before is still there"
    assert equal(parts)(after, before)
