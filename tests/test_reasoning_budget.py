"""A budget of reasoning: what is counted, what is forced, and that nothing else changes.

Planted once and seen to fail: one token too many before the end is forced; a character cut in two; the first token of
the forced text only; forced tokens that draw no random number; a constraint that a mention of a call within reasoning
wakes.
"""

from __future__ import annotations

import codecs
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from engine_client import GREEDY, PROMPT, Client, exhaust, made
from hypothesis import example, given
from hypothesis import strategies as st
from toy_draft import ToyDraft
from toy_model import TOKENIZER, ToyExecutor, logits_after, text_of

from bloomery.runtime.drafts.drafting import Drafting, DraftLimits
from bloomery.runtime.engine import Engine
from bloomery.runtime.reasoning import ReasoningWatch
from bloomery.runtime.requests import Constraint, Reasoning, SamplingParameters
from bloomery.runtime.sampling import Sampler
from bloomery.runtime.tokenizer import Tokenizer

MARKS = Reasoning("hh", ("gg",))
OPENED = (*PROMPT, *TOKENIZER.encode("hh\n"))
END = TOKENIZER.encode("gg")


class ByteTokenizer:
    """One token a byte."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def piece(self, token: int, *, special: bool = True) -> bytes:
        return bytes([token])


BYTES = cast(Tokenizer, ByteTokenizer())


def watched(text: str, reasoning: Reasoning, prompt: str = "") -> tuple[str, int]:
    """What becomes of a text if its tokens are chosen where nothing is forced, and how many tokens were reasoning."""
    watch = ReasoningWatch(reasoning, BYTES, list(prompt.encode()))
    out: list[int] = []
    for byte in text.encode():
        while (forced := watch.forced) is not None:
            out.append(forced)
            watch.accept(forced)
        out.append(byte)
        watch.accept(byte)
    return bytes(out).decode(), watch.tokens


THINK = Reasoning("<think>", ("</think>", "<|end|>"))


@pytest.mark.parametrize(
    ("text", "budget", "prompt", "expected"),
    [
        ("<think>abcdef</think>x", 3, "", ("<think>abc</think>def</think>x", 3 + 8)),
        (" \n<think>abcdef", 3, "", (" \n<think>abc</think>def", 3 + 8)),
        ("abcdef</think>x", 3, "u<think>\n", ("abc</think>def</think>x", 3 + 8)),
        ("ab</think>x", 11, "<think>", ("ab</think>x", 2 + 8)),
        ("ab<|end|>xyz", 12, "<think>", ("ab<|end|>xyz", 2 + 7)),
        ("abc", 0, "<think>", ("</think>abc", 8)),
        ("<think>abc", 0, "", ("<think></think>abc", 8)),
        ("a€b", 2, "<think>", ("a€</think>b", 4 + 8)),
        ("abc <think>defg", 2, "", ("abc <think>defg", 0)),
        ("abc", 2, "<think>\n\n</think>\n\n", ("abc", 0)),
        ("<thinking>abc", 2, "", ("<thinking>abc", 0)),
        ("abcdef", -1, "<think>", ("abcdef", 6)),
    ],
)
def test_what_is_counted_and_forced(text: str, budget: int, prompt: str, expected: tuple[str, int]) -> None:
    assert watched(text, replace(THINK, budget=budget), prompt) == expected


def test_a_message_comes_before_the_end() -> None:
    assert watched("abcd", replace(THINK, budget=2, message="!\n"), "<think>") == ("ab!\n</think>cd", 2 + 2 + 8)


@given(st.text("ab<>/think€ ", max_size=40), st.integers(0, 12), st.booleans())
@example("</think>", 1, True)
def test_no_text_gets_past_the_budget(text: str, budget: int, opened: bool) -> None:
    whole, tokens = watched(text, replace(THINK, budget=budget), "<think>" if opened else "")
    stripped = whole.lstrip(" ")
    if not opened and not stripped.startswith("<think>"):
        assert whole == text and not tokens
        return
    inside = (whole if opened else stripped[len("<think>") :]).partition("</think>")[0]
    assert len(inside.encode()) <= budget + 2 + len("</think>") - 1, "a character and a mark that just did not end"
    end = "</think>"  # put in once or not at all, and nothing else is changed
    assert text in (whole, *(whole[:i] + whole[i + len(end) :] for i in range(len(whole)) if whole.startswith(end, i)))


def test_bytes_that_never_become_characters_do_not_hold_the_end_back() -> None:
    watch = ReasoningWatch(replace(THINK, budget=2), BYTES, b"<think>")
    for count in range(9):
        if watch.forced is not None:
            assert count == 5
            return
        watch.accept(0xE2)
    raise AssertionError("never forced")


@pytest.mark.parametrize("wrong", [{"start": ""}, {"ends": ()}, {"ends": ("",)}, {"budget": -2}])
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    _, client = made()
    failed = client.submit(reasoning=replace(MARKS, **wrong))
    assert client.failure(failed).code == "invalid_request" and "reasoning" in client.failure(failed).message


def answers(*requests: dict[str, Any], draft: bool = False) -> list[list[int]]:
    executor = ToyExecutor(context=120)
    drafting = Drafting(ToyDraft(0.8), DraftLimits(fixed=True), 8) if draft else None
    client = Client(Engine(executor, TOKENIZER, None, drafting=drafting))
    ids = [client.submit(OPENED, **{"max_tokens": 30, "ignore_eos": True, **request}) for request in requests]
    exhaust(client)
    return [client.tokens(one) for one in ids]


SAMPLINGS = [
    GREEDY,
    SamplingParameters(temperature=1.3, seed=4),
    SamplingParameters(temperature=1.3, seed=4, mirostat=2),
    SamplingParameters(temperature=0.9, seed=5, repeat_penalty=1.3, logit_bias=((END[0], -np.inf),)),
]


def whole(tokens: list[int]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(TOKENIZER.piece(token) for token in tokens))
    return not decoder.getstate()[0]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_the_answer_is_free_before_and_behind(sampling: SamplingParameters) -> None:
    """Token by token with a sampler of its own; a character at hand is finished first."""
    budget, forced = 7, list(END)
    (found,) = answers({"sampling": sampling, "reasoning": replace(MARKS, budget=budget)})
    sampler = Sampler(sampling, frozenset({0}))
    tokens = list(OPENED)
    for place in range(30):
        logits = logits_after(tokens)
        history = np.array(tokens, dtype=np.int32)
        if place >= budget and forced and (len(forced) == 1 or whole(tokens[len(OPENED) :])):
            tokens.append(sampler.force(forced.pop(0), len(logits), history))
        else:
            tokens.append(sampler.choose(logits, int(logits.argmax()), history))
    assert found == tokens[len(OPENED) :]
    assert not forced and "gg" in text_of(found[budget : budget + 5], True)


def test_forced_tokens_draw_random_numbers_as_chosen_ones_do() -> None:
    parameters = SamplingParameters(temperature=3.0, seed=9, min_p=0)
    forced, chosen = Sampler(parameters), Sampler(parameters)
    logits, history = logits_after([1, 2]), np.array([1, 2], dtype=np.int32)
    alone = np.full_like(logits, -np.inf)
    alone[5] = logits[5]
    assert forced.force(5, len(logits), history) == chosen.choose(alone, 5, history) == 5
    draws = [(forced.choose(logits, 0, history), chosen.choose(logits, 0, history)) for _ in range(20)]
    assert all(one == other for one, other in draws) and len({one for one, _ in draws}) > 3


def test_requests_side_by_side_and_guesses_change_nothing() -> None:
    requests: list[dict[str, Any]] = [
        {"sampling": sampling, "reasoning": replace(MARKS, budget=budget)}
        for sampling in SAMPLINGS[:2]
        for budget in (0, 5, -1)
    ]
    alone = [answers(request)[0] for request in requests]
    assert answers(*requests) == alone == answers(*requests, draft=True)
    assert len({tuple(one) for one in alone}) == len(alone)


class Recorder:
    """A constraint that sleeps, and notes what it is told."""

    active = finished = False

    def __init__(self) -> None:
        self.told: list[int] = []

    def start(self, constraint: Constraint, shown: Any = ()) -> Recorder:
        return self

    def allows(self, token: int) -> bool:
        return True

    def accept(self, token: int) -> None:
        self.told.append(token)


def test_a_constraint_with_triggers_does_not_hear_of_reasoning() -> None:
    _, client = made(context=120)
    recorder = client.engine._tools.constraints = Recorder()  # type: ignore[assignment]
    calls = Constraint(regex="a", triggers=("x",))
    request = client.submit(
        OPENED, max_tokens=20, ignore_eos=True, constraint=calls, reasoning=replace(MARKS, budget=6)
    )
    exhaust(client)
    reasoned = client.final(request).reasoning_tokens
    assert recorder.told == client.tokens(request)[reasoned - 1 :], "from the token on that has ended it"


def test_the_end_says_how_many_tokens_were_reasoning() -> None:
    _, client = made(context=120)
    with_budget = client.submit(OPENED, max_tokens=20, ignore_eos=True, reasoning=replace(MARKS, budget=6))
    without = client.submit(PROMPT, max_tokens=20, ignore_eos=True, reasoning=replace(MARKS, budget=6))
    cut = client.submit(OPENED, max_tokens=3, ignore_eos=True, reasoning=replace(MARKS, budget=6))
    exhaust(client)
    counts = [client.final(one).reasoning_tokens for one in (with_budget, without, cut)]
    assert counts == [6 + len(END), 0, 3]
    assert client.final(with_budget).generated_tokens == 20 and client.final(cut).reason == "length"


def test_reasoning_is_ended_by_hand() -> None:
    _, client = made(context=120)
    request = client.submit(OPENED, max_tokens=40, ignore_eos=True, reasoning=MARKS)
    assert not client.engine.end_reasoning(bytes(15) + b"\x63"), "an unknown request"
    for _ in range(5):
        client.engine.turn()
    before = client.tokens(request)
    assert client.engine.end_reasoning(request)
    exhaust(client)
    assert client.tokens(request)[: len(before) + 2] == [*before, *END]
    assert client.final(request).reasoning_tokens == len(before) + 2
    assert not client.engine.end_reasoning(request)
