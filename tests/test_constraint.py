"""Constraints and triggers, on masks and on generated text; what their languages mean is `test_constraint_languages`.

What is generated under a constraint is checked by other means: json.loads and a small schema check, Python's re, and
llama.cpp's rules written as Python. Planted once and seen to fail: masks shifted by one token; end tokens always or
never allowed; the freely chosen token taken unasked; tokens not told to the constraint; triggers that include no text
of the token they end in; `finished` ignored with ignore_eos.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from engine_client import Client, exhaust
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_data import trained_file

from bloomery.runtime.architectures import build_program
from bloomery.runtime.constraint import ConstraintCompiler, TokenConstraint
from bloomery.runtime.engine import Engine
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.requests import Chunk, Constraint, GenerationRequest, SamplingParameters
from bloomery.runtime.tokenizer import Tokenizer

GREEDY = SamplingParameters(temperature=0.0)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", "green"]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""


class Parts(NamedTuple):
    tokenizer: Tokenizer
    executor: HostPool
    compiler: ConstraintCompiler

    def client(self) -> Client:
        return Client(Engine(self.executor, self.tokenizer, None))


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    path = trained_file("tiny-qwen3moe-Q4_K_M")
    with ModelFile.open(path) as model:
        program = build_program(model)
        tokenizer = Tokenizer.from_model_file(model)
        pool = HostPool.start(str(path), program, context=256, slots=4, processes=1, prompt_block=64, cache_type="f16")
        try:
            yield Parts(tokenizer, pool, ConstraintCompiler(tokenizer))
        finally:
            pool.close()


class Outcome(NamedTuple):
    text: str
    tokens: list[int]
    reason: str
    cached: int


def run(parts: Parts, *requests: dict[str, Any], client: Client | None = None) -> list[Outcome]:
    client = client or parts.client()
    ids = []
    for fields in requests:
        request_id = len(client.events).to_bytes(16, "big")
        values = {"text": "Once upon a time", "max_tokens": 120, **fields}
        client.submit_request(GenerationRequest(request_id, **values))
        ids.append(request_id)
    exhaust(client)
    return [outcome(client, request_id) for request_id in ids]


def outcome(client: Client, request_id: bytes) -> Outcome:
    final = client.final(request_id)
    text = "".join(event.text for event in client.events[request_id] if isinstance(event, Chunk))
    return Outcome(text, client.tokens(request_id), final.reason, final.cached_tokens)


# What is generated.


def is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "tags", "ok"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"red", "blue", "green"}
        and value["ok"] in (True, False, None)
    )


def test_fifty_seeds_give_fifty_valid_answers(parts: Parts) -> None:
    """Also with a high temperature, at which the model alone says anything but JSON."""
    constraint = Constraint(json_schema=PERSON)
    requests = [
        {"constraint": constraint, "max_tokens": 230, "sampling": SamplingParameters(seed=seed, temperature=heat)}
        for seed, heat in enumerate([0.8, 1.5] * 25)
    ]
    outcomes = run(parts, *requests)
    assert all(answer.reason == "stop" for answer in outcomes), "an end token ended it, not the limit"
    values = [json.loads(answer.text) for answer in outcomes]
    assert all(map(is_person, values))
    assert len({answer.text for answer in outcomes}) > 45, "the seeds matter"
    alone = [{**request, "constraint": None} for request in requests[:4]]
    for answer in run(parts, *alone):
        with pytest.raises(ValueError, match="Expecting value"):
            json.loads(answer.text)


def test_every_seed_matches_regex_and_grammars(parts: Parts) -> None:
    forms = {
        r"[a-f]{3}-\d{2,4}(x|yz)?": Constraint(regex=r"[a-f]{3}-[0-9]{2,4}(x|yz)?"),
        r"(cat|dog)( and (cat|dog)){0,3}\.": Constraint(
            grammar='root ::= pet (" and " pet){0,3} "."\npet ::= "cat" | "dog"'
        ),
        r"é{1,3}ü": Constraint(lark="start: /é{1,3}ü/"),
        r"[A-Z]b": Constraint(grammar='%llguidance {"no_forcing": false}\nstart: /[A-Z]/ "b"'),
    }
    for pattern, constraint in forms.items():
        samplings = [SamplingParameters(seed=seed, temperature=2.0) for seed in range(8)] + [GREEDY]
        for answer in run(parts, *({"constraint": constraint, "sampling": sampling} for sampling in samplings)):
            assert answer.reason == "stop" and re.fullmatch(pattern, answer.text), answer.text


def test_recursive_gbnf_gives_json(parts: Parts) -> None:
    """The limit may cut an answer short; what is there is a beginning, what ended is whole."""
    requests = [
        {"constraint": Constraint(grammar=JSON_GBNF), "sampling": SamplingParameters(seed=seed)} for seed in range(12)
    ]
    ended = [answer for answer in run(parts, *requests) if answer.reason == "stop"]
    assert ended
    for answer in ended:
        assert isinstance(json.loads(answer.text), dict)


def test_greedy_takes_the_best_allowed_token(parts: Parts) -> None:
    constraint = Constraint(regex="(the|a) [a-z]{1,8}")
    answer = run(parts, {"constraint": constraint, "sampling": GREEDY, "logits": "generated", "max_tokens": 20})[0]
    assert re.fullmatch("(the|a) [a-z]{1,8}", answer.text)
    client = parts.client()
    request = GenerationRequest(
        bytes(16), text="Once upon a time", constraint=constraint, sampling=GREEDY, logits="generated", max_tokens=20
    )
    client.submit_request(request)
    exhaust(client)
    rows = [event.logits for event in client.events[bytes(16)] if isinstance(event, Chunk) and event.logits is not None]
    state = parts.compiler.start(constraint)
    for token, row in zip(client.tokens(bytes(16)), np.concatenate(rows), strict=True):
        assert token == int(state.masked(row).argmax())
        state.accept(token)


def test_a_constraint_that_is_met_anyway_changes_nothing(parts: Parts) -> None:
    for sampling in (GREEDY, SamplingParameters(seed=5)):
        free = run(parts, {"sampling": sampling, "max_tokens": 30})[0]
        bound = run(parts, {"sampling": sampling, "max_tokens": 30, "constraint": Constraint(regex="(?s:.*)")})[0]
        assert bound.tokens == free.tokens


def test_requests_beside_a_constrained_one_are_not_touched(parts: Parts) -> None:
    plain = [{"sampling": SamplingParameters(seed=seed), "max_tokens": 40} for seed in range(3)]
    alone = [run(parts, request)[0].tokens for request in plain]
    bound = {"constraint": Constraint(json_schema=PERSON), "sampling": SamplingParameters(seed=1)}
    beside = run(parts, plain[0], bound, plain[1], plain[2])
    assert [beside[index].tokens for index in (0, 2, 3)] == alone


def test_prefix_reuse_and_constraints(parts: Parts) -> None:
    client = parts.client()
    text = "The old blacksmith opened the door of the forge and looked at the iron that lay in the fire."
    request = {"text": text, "constraint": Constraint(json_schema=PERSON), "sampling": SamplingParameters(seed=3)}
    first = run(parts, request, client=client)[0]
    again = run(parts, request, client=client)[0]
    assert again.cached > 10 and again.tokens == first.tokens


def test_stop_strings_end_it_anywhere(parts: Parts) -> None:
    answer = run(parts, {"constraint": Constraint(json_schema=PERSON), "stop": ('"age"',), "sampling": GREEDY})[0]
    assert answer.reason == "stop" and re.fullmatch(r'\{\s*"name":[^}]*,\s*', answer.text)


def test_abort_and_limit(parts: Parts) -> None:
    client = parts.client()
    constraint = Constraint(json_schema=PERSON)
    client.submit_request(GenerationRequest(bytes(16), text="x", constraint=constraint, sampling=GREEDY))
    for _ in range(5):
        client.engine.turn()
    client.abort(bytes(16))
    exhaust(client)
    assert client.final(bytes(16)).reason == "aborted" and outcome(client, bytes(16)).text.startswith("{")
    assert run(parts, {"constraint": constraint, "max_tokens": 3, "sampling": GREEDY})[0].reason == "length"


def test_ignore_eos_ends_where_nothing_can_follow(parts: Parts) -> None:
    answer = run(parts, {"constraint": Constraint(regex="[ab]{5}"), "ignore_eos": True, "sampling": GREEDY})[0]
    assert answer.reason == "stop" and re.fullmatch("[ab]{5}", answer.text)
    assert not set(answer.tokens) & parts.tokenizer.end_tokens


def test_bias_applies_and_a_dead_end_is_an_error(parts: Parts) -> None:
    token = parts.tokenizer.encode("b", add_special=False)[0]
    sampling = SamplingParameters(temperature=0.0, logit_bias=((token, 1000.0),))
    assert run(parts, {"constraint": Constraint(regex="[ab]"), "sampling": sampling})[0].text == "b"
    client = parts.client()
    biases = tuple((token, -np.inf) for token in range(parts.tokenizer.vocabulary) if token != 5000)
    request = GenerationRequest(
        bytes(16), text="x", constraint=Constraint(regex="[ab]"), sampling=SamplingParameters(logit_bias=biases)
    )
    client.submit_request(request)
    exhaust(client)
    assert client.failure(bytes(16)).code == "invalid_request"


def test_triggers_wake_the_constraint(parts: Parts) -> None:
    """The text before is free; from the trigger on it is the grammar's, whatever token the trigger came in."""
    tokenizer = parts.tokenizer
    for trigger, before in (("<call>", "I will <"), (" the", "Say"), ("\u00e9", "caf")):
        state = parts.compiler.start(Constraint(regex=re.escape(trigger) + "[0-9]{3}", triggers=("never", trigger)))
        whole = before + trigger[before.endswith("<") :]
        tokens = tokenizer.encode(whole, add_special=False)
        for place, token in enumerate(tokens):
            assert state.allows(token) and not state.active, (whole, place)
            state.accept(token)
        assert state.active
        for digit in "123":
            token = tokenizer.encode(digit, add_special=False)[0]
            letter = tokenizer.encode("q", add_special=False)[0]
            assert state.allows(token) and not state.allows(letter)
            state.accept(token)
        assert state.finished and state.allows(min(tokenizer.end_tokens))


def test_a_text_past_the_trigger_that_does_not_fit_leaves_it_asleep(parts: Parts) -> None:
    state = parts.compiler.start(Constraint(regex="aX+", triggers=("a",)))
    for token in parts.tokenizer.encode("cab", add_special=False):
        state.accept(token)
    fits = [token for token in range(parts.tokenizer.vocabulary) if parts.tokenizer.piece(token) == b"X"]
    single = next(token for token in range(parts.tokenizer.vocabulary) if parts.tokenizer.piece(token) == b"a")
    if not state.active:
        state.accept(single)
    assert state.active and state.allows(fits[0])


def test_control_tokens_are_text_only_where_they_are_shown(parts: Parts) -> None:
    """As in a form of tool calls whose marks are control tokens, with a trigger and without."""
    tokenizer = parts.tokenizer
    mark = next(token for token in range(tokenizer.vocabulary) if tokenizer.piece(token) == b"<|im_start|>")
    assert tokenizer.piece(mark, special=False) == b""
    free = Constraint(regex="(?s:.*)")
    assert not parts.compiler.start(free).allows(mark) and parts.compiler.start(free, (mark,)).allows(mark)
    for triggers in ((), ("<|im_start|>",)):
        constraint = Constraint(lark='start: "<|im_start|>" /[a-z]{3}/ "<|im_start|>"', triggers=triggers)
        state = parts.compiler.start(constraint, (mark,))
        for token in (mark, *tokenizer.encode("abc", add_special=False), mark):
            assert state.allows(token)
            state.accept(token)
        assert state.finished
    request = {"constraint": Constraint(regex=r"<\|im_start\|>[a-z]"), "sampling": GREEDY, "shown_tokens": (mark,)}
    answer = run(parts, {**request, "sampling": SamplingParameters(temperature=0.0, logit_bias=((mark, 1000.0),))})[0]
    assert answer.tokens[0] == mark and re.fullmatch(r"<\|im_start\|>[a-z]", answer.text)


# Masks.


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_single_checks_agree_with_masks(parts: Parts, seed: int) -> None:
    generator = np.random.default_rng(seed)
    constraint = [
        Constraint(json_schema=PERSON),
        Constraint(grammar=JSON_GBNF),
        Constraint(regex="([a-e]{1,3} ){2}(é|ü)+"),
    ][seed % 3]
    state = parts.compiler.start(constraint)
    logits = generator.normal(size=parts.tokenizer.vocabulary).astype(np.float32)
    for _ in range(12):
        mask = state.masked(logits) > -np.inf
        assert [state.allows(token) for token in range(0, len(logits), 7)] == mask[::7].tolist()
        for token in parts.tokenizer.end_tokens:
            assert state.allows(token) == mask[token]
        choices = [int(token) for token in np.flatnonzero(mask) if token not in parts.tokenizer.end_tokens]
        if not choices:
            assert state.finished
            return
        state.accept(choices[int(generator.integers(len(choices)))])


def test_a_grammar_that_forces_an_endless_text_is_cut_by_the_limit(parts: Parts) -> None:
    """Lexemes go as far as they can: after (ab)+ the text "ac" never has its turn."""
    endless = Constraint(lark='start: /(ab)+/ "ac"')
    answer = run(parts, {"constraint": endless, "max_tokens": 12, "sampling": GREEDY})[0]
    assert answer.reason == "length" and re.fullmatch("(ab)+a?", answer.text)


def test_a_bad_constraint_fails_the_request_at_once(parts: Parts) -> None:
    client = parts.client()
    client.submit_request(GenerationRequest(bytes(16), text="x", constraint=Constraint(json_schema={"not": {}})))
    failed = client.failure(bytes(16))
    assert failed.code == "invalid_request" and "not" in failed.message and failed.details["field"] == "json_schema"


def test_compiled_constraints_are_remembered_and_apart(parts: Parts) -> None:
    constraint = Constraint(json_schema={**PERSON, "description": "seen once"})
    first, second = parts.compiler.start(constraint), parts.compiler.start(constraint)
    token = parts.tokenizer.encode("{", add_special=False)[0]
    first.accept(token)
    assert second.allows(token) and not first.allows(token)
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        assert isinstance(parts.compiler.start(constraint), TokenConstraint)
        times.append(time.perf_counter() - begun)
    assert min(times) < 2e-3
