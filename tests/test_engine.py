"""What the engine promises about results: turns, limits, prompts, refusals, and what it costs.

Planted once and seen to fail: admission out of order; a queue without its limit; a request's id accepted twice;
template variables dropped; `cache_prompt` ignored; logits passed on as views of the executor's buffer; an end token's
text shown; end tokens chosen in spite of `ignore_eos`; the context's end one token early; prompt tokens counted wrong.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from engine_client import GREEDY, PROMPT, Client, exhaust, made
from toy_model import END, TOKENIZER, VOCABULARY, ToyExecutor, ToyTokenizer, solo

from bloomery.runtime.engine import Engine
from bloomery.runtime.executor import StepResult, StepRows
from bloomery.runtime.requests import Admitted, Chunk, Event, Failed, GenerationRequest, SamplingParameters

if TYPE_CHECKING:
    from bloomery.runtime.chat_template import ChatTemplate


def test_the_second_turn_computes_only_what_is_new() -> None:
    executor, client = made()
    first = client.submit(max_tokens=10)
    exhaust(client)
    answer = client.tokens(first)
    rows_before = sum(count for step in executor.history for _, _, count in step)
    second = client.submit((*PROMPT, *answer, 3, 4), max_tokens=4)
    exhaust(client)
    assert client.final(second).cached_tokens == len(PROMPT) + len(answer) - 1, "the last token was never evaluated"
    rows = sum(count for step in executor.history for _, _, count in step) - rows_before
    assert rows == 3 + 3
    uncached = client.submit((*PROMPT, *answer, 3, 4), max_tokens=4, cache_prompt=False)
    exhaust(client)
    assert client.final(uncached).cached_tokens == 0 and client.tokens(uncached) == client.tokens(second)
    metrics = client.engine.metrics()
    assert metrics["cached_tokens"] == client.final(second).cached_tokens
    assert metrics["prompt_tokens"] == len(PROMPT) + 3 + len(PROMPT) + len(answer) + 2
    assert metrics["generated_tokens"] == 10 + 4 + 4
    assert metrics["rows"] == sum(count for step in executor.history for _, _, count in step)
    assert sum(metrics["rows_per_step"].values()) == metrics["steps"] == len(executor.history)


def test_a_full_queue_refuses_with_numbers() -> None:
    _, client = made(queue_limit=2, slots=1)
    accepted = [client.submit() for _ in range(3)]
    refused = client.submit()
    failure = client.failure(refused)
    assert failure.code == "overloaded" and client.events[refused] == [failure]
    assert failure.details["limit"] == 2 and failure.details["queued"] == 3
    assert float(failure.details["retry_after_s"]) >= 1
    exhaust(client)
    assert all(client.final(request_id).reason in ("stop", "context") for request_id in accepted)
    client.submit()
    assert client.engine.status()["queue"] == 1


def test_no_queue_still_uses_every_slot() -> None:
    _, client = made(queue_limit=0, slots=2)
    requests = [client.submit() for _ in range(3)]
    assert [client.last(request_id) is None for request_id in requests] == [True, True, False]


def test_first_come_first_served() -> None:
    _, client = made(slots=1)
    order: list[bytes] = []
    for number in range(4):
        request_id = number.to_bytes(16, "big")
        request = GenerationRequest(request_id, tokens=PROMPT[number:], max_tokens=2, sampling=GREEDY)
        client.engine.submit(request, lambda e: order.append(e.request_id) if isinstance(e, Admitted) else None)
    exhaust(client)
    assert order == [number.to_bytes(16, "big") for number in range(4)]


def test_streams_go_on_while_a_long_prompt_runs() -> None:
    """A row takes 10 ms: prompt steps are cut to 20 rows, and half of the time the stream runs alone."""
    executor, client = made(slots=2, context=6000, max_rows=512, max_out_rows=8)
    executor.seconds = lambda rows: 0.01 * rows
    stream = client.submit(max_tokens=5000, ignore_eos=True)
    for _ in range(100):
        client.engine.turn()
    long = client.submit(tuple([1, 2] * 1000), max_tokens=1)
    steps_before = len(executor.history)
    while client.last(long) is None:
        assert client.engine.turn()
    steps = executor.history[steps_before:]
    assert all(any(slot == 0 for slot, _, _ in step) for step in steps), "the stream is in every step"
    seconds = [0.01 * sum(count for _, _, count in step) for step in steps]
    assert max(seconds[1:]) <= 0.25
    assert len(steps) >= 0.5 * sum(seconds) / 0.01, "and has half of its own pace"
    assert client.final(long).prompt_tokens == 2000
    assert client.last(stream) is None


def test_logits_and_scores_come_in_pieces_that_fit_the_executors_buffer() -> None:
    _, client = made(max_rows=32, max_out_rows=5)
    request_id = client.submit(max_tokens=3, logits="all", score_prompt=True, ignore_eos=True)
    exhaust(client)
    chunks = [event for event in client.events[request_id] if isinstance(event, Chunk)]
    arrays = [chunk.logits for chunk in chunks if chunk.logits is not None]
    assert max(map(len, arrays)) == 5 and sum(map(len, arrays)) == len(PROMPT) + 2
    assert all(array.dtype == np.float32 and array.flags.owndata for array in arrays)
    expected = solo(GenerationRequest(request_id, tokens=PROMPT, max_tokens=3, sampling=GREEDY, ignore_eos=True), 64, 0)
    assert np.array_equal(np.concatenate(arrays), np.array(expected.logits))
    scores = [score for chunk in chunks for score in chunk.prompt_logprobs]
    assert scores == pytest.approx(expected.prompt_logprobs, abs=1e-5)


def test_only_the_prompt() -> None:
    _, client = made()
    request_id = client.submit(max_tokens=0)
    exhaust(client)
    final = client.final(request_id)
    assert (final.reason, final.generated_tokens, client.tokens(request_id)) == ("length", 0, [])
    again = client.submit((*PROMPT, 1), max_tokens=1)
    exhaust(client)
    assert client.final(again).cached_tokens == len(PROMPT)


def test_the_end_of_the_context() -> None:
    _, client = made(context=42)
    fits, full, too_long = (client.submit(tokens) for tokens in (PROMPT, (*PROMPT, 1, 2), (*PROMPT, 1, 2, 3)))
    exhaust(client)
    assert client.failure(too_long).code == "exceed_context_size"
    assert client.failure(too_long).details == {"prompt_tokens": 43, "context": 42}
    assert (client.final(full).reason, client.final(full).generated_tokens) == ("context", 1)
    assert client.final(fits).reason in ("context", "stop") and client.final(fits).generated_tokens <= 3


def test_end_tokens_are_reported_but_not_shown_and_ignore_eos_excludes_them() -> None:
    _, client = made(slots=1, context=600, queue_limit=100)
    sampling = SamplingParameters(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    ends = [client.submit(PROMPT[:3], sampling=replace(sampling, seed=seed)) for seed in range(10)]
    free = client.submit(PROMPT[:3], sampling=sampling, ignore_eos=True, max_tokens=500)
    exhaust(client)
    ended = [request_id for request_id in ends if client.final(request_id).reason == "stop"]
    assert ended and all(client.tokens(request_id)[-1] == END for request_id in ended)
    texts = ["".join(e.text for e in client.events[r] if isinstance(e, Chunk)) for r in ended]
    assert not any("/" in text for text in texts) and all(client.final(r).stop == "" for r in ended)
    assert END not in client.tokens(free) and client.final(free).generated_tokens == 500


class Template:
    """Shows contents one after the other, and "gh" where the answer begins."""

    def render_tokens(self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        text = "".join(message["content"] for message in messages) + variables.get("tail", "")
        return ToyTokenizer().encode(text + "gh" * add_generation_prompt)


def test_prompts_of_text_and_messages() -> None:
    client = Client(Engine(ToyExecutor(), TOKENIZER, cast("ChatTemplate", Template())))
    chat = GenerationRequest(b"c" * 16, messages=({"content": "abc"},), max_tokens=4, sampling=GREEDY)
    text = GenerationRequest(b"t" * 16, text="abcgh", max_tokens=4, sampling=GREEDY)
    variables = {"add_generation_prompt": False, "tail": "hg"}
    other = GenerationRequest(b"o" * 16, text="abchg", max_tokens=4, sampling=GREEDY)
    client.submit_request(chat)
    client.submit_request(text)
    client.submit_request(other)
    client.submit_request(replace(chat, request_id=b"d" * 16, template_variables=variables))
    exhaust(client)
    assert {client.final(request_id).prompt_tokens for request_id in client.events} == {5}
    assert client.tokens(b"c" * 16) == client.tokens(b"t" * 16) != client.tokens(b"o" * 16)
    assert client.tokens(b"d" * 16) == client.tokens(b"o" * 16)
    client.submit_request(replace(chat, request_id=b"e" * 16, template_variables={"messages": 1}))
    assert client.failure(b"e" * 16).code == "invalid_request"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tokens": ()}, "tokens is 'empty'"),
    ({"tokens": (1, VOCABULARY)}, f"tokens is {VOCABULARY}, expected an integer from 0 to {VOCABULARY - 1}"),
    ({"tokens": (1, -1)}, "tokens is -1"),
    ({"tokens": (1, "a")}, "tokens is 'a'"),
    ({"tokens": (1, 2.0)}, "tokens is 2.0"),
    ({"tokens": (1, 2**70)}, "tokens is 1180591620717411303424"),
    ({"tokens": (1, (2,))}, "tokens is (2,)"),
    ({"tokens": "abc"}, "tokens is 'abc', expected a list"),
    ({"max_tokens": -2}, "max_tokens is -2, expected an integer from -1"),
    ({"stop": ("a", "")}, "stop is '', expected strings that are not empty"),
    ({"stop": "a"}, "stop is 'a', expected a list"),
    ({"stop_tokens": (VOCABULARY,)}, f"stop_tokens is {VOCABULARY}"),
    ({"logits": "some"}, "logits is 'some'"),
    ({"sampling": replace(GREEDY, top_p=2)}, "top_p is 2, expected a number from 0 to 1"),
]


@pytest.mark.parametrize("fields, message", BAD, ids=lambda value: str(value)[:30])
def test_bad_requests_are_named(fields: dict[str, Any], message: str) -> None:
    _, client = made()
    failure = client.failure(client.submit(**{"tokens": PROMPT, **fields}))
    assert failure.code == "invalid_request" and message in failure.message
    assert client.engine.wait_idle(0) and not client.engine.turn()


def test_other_refusals() -> None:
    _, client = made()
    client.submit()
    seen: list[Event] = []
    client.engine.submit(GenerationRequest(bytes(16), tokens=PROMPT), seen.append)
    assert [cast(Failed, event).code for event in seen] == ["duplicate_request"]
    client.submit_request(GenerationRequest(b"m" * 16, messages=({"role": "user", "content": "a"},)))
    assert client.failure(b"m" * 16).code == "unsupported"
    client.submit_request(GenerationRequest(b"t" * 16, text="xyz"))
    assert client.failure(b"t" * 16).code == "internal", "the toy tokenizer raises"
    exhaust(client)
    assert client.engine.wait_idle(0)


def test_python_spends_little_on_a_decode_step() -> None:
    """One greedy stream on an executor that takes no time."""

    class Instant(ToyExecutor):
        logits = np.zeros((1, VOCABULARY), dtype=np.float32)
        greedy = np.array([5], dtype=np.int32)

        def step(self, rows: StepRows) -> StepResult:
            return StepResult(self.logits[: len(rows.out_rows)], self.greedy[: len(rows.out_rows)], 1e-6)

    client = Client(Engine(Instant(context=5000), TOKENIZER, None))
    client.submit(max_tokens=4000)
    client.engine.turn()
    best = float("inf")
    for _ in range(8):
        begun = time.perf_counter()
        for _ in range(400):
            client.engine.turn()
        best = min(best, (time.perf_counter() - begun) / 400)
    print(f"{best * 1e6:.1f} us a step")
    assert best < 150e-6
