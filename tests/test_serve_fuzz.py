"""Bodies that no client would send: whatever comes, the server answers with an error object and never fails itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from serving import Answer, Serving, serving

from bloomery.launcher.http.app import ROUTES
from bloomery.launcher.http.fields import FIELDS
from bloomery.launcher.http.openapi import document

SEED = 20
ROUNDS = 25
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "x", "n_predict": 2, "logit_bias": [[1, 2]], "stop": ["y"], "n_probs": 2},
    "/v1/completions": {"prompt": ["x", [1, 2]], "max_tokens": 2, "logprobs": 1, "stream_options": {}},
    "/v1/chat/completions": CHAT
    | {"tools": [TOOL], "tool_choice": "auto", "chat_template_kwargs": {}, "reasoning_budget_tokens": 1},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "y"},
        ],
        "max_output_tokens": 2,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
    },
    "/v1/messages": {
        "max_tokens": 2,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "y"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1},
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/chat/completions/input_tokens": CHAT,
    "/v1/chat/completions/control": {"id": "x", "action": "reasoning_end"},
    "/apply-template": CHAT,
    "/tokenize": {"content": ["x", 1], "add_special": True},
    "/detokenize": {"tokens": [1, 2]},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "t"}]},
    "/v1/embeddings": {"input": ["x"], "encoding_format": "float"},
    "/slots/0?action=erase": {"filename": "x"},
}
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**70, 1.5, -1e308, "", "x", "\ud800", "\x00", "é" * 50, [], [[]], [None], {}, {"": None},
    {"type": 1}, [1, "x", None], {"role": "user"}, [{"type": "text"}],
)  # fmt: skip


def mutated(value: Any, dice: random.Random) -> Any:
    """The value with one thing in it replaced, left out or doubled."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice(list(value))
        if dice.random() < 0.1:
            return {name: entry for name, entry in value.items() if name != key}
        return {**value, key: mutated(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        return [*value[:place], mutated(value[place], dice), *value[place + (dice.random() < 0.8) :]]
    return dice.choice(ODD)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--demo", "tiny-qwen3moe", "--threads", "1", "--embeddings", "-np", "2", "-c", "512") as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_odd_bodies_never_fail(server: Serving, path: str) -> None:
    dice = random.Random(f"{SEED} {path}")
    print(f"seed {SEED}")
    for _ in range(ROUNDS):
        body = mutated(BODIES[path], dice)
        body = mutated(body, dice) if dice.random() < 0.4 else body
        data = json.dumps(body).encode()
        answer = server.request("POST", path, data)
        require_no_failure(answer, data)


@pytest.mark.parametrize("path", BODIES)
def test_cut_bytes_never_fail(server: Serving, path: str) -> None:
    dice = random.Random(f"{SEED} bytes {path}")
    data = json.dumps(BODIES[path]).encode()
    for _ in range(8):
        place = dice.randrange(len(data))
        damaged = (
            data[:place] if dice.random() < 0.5 else data[:place] + bytes([dice.randrange(256)]) + data[place + 1 :]
        )
        answer = server.request("POST", path, damaged)
        assert answer.status < 500 or answer.status == 501, (damaged, answer.data)
    assert server.get("/health").status == 200


def require_no_failure(answer: Any, data: Any) -> None:
    """No status of a failed server, and an error object wherever something is refused."""
    if answer.status == 500:  # llama-server's status for images
        assert "input is not supported" in answer.json["error"]["message"], (data, answer.data)
    assert answer.status in (500, 501) or answer.status < 500, (data, answer.data)
    if answer.status >= 400:
        assert answer.json["error"]["message"] and answer.json["error"]["type"], (data, answer.data)


HUGE = b"abc def " * (1 << 17)
MONSTERS = {
    "a megabyte that is no JSON": HUGE,
    "a megabyte in one string": b'{"%s": "' + HUGE + b'"}',
    "a megabyte in one name": b'{"' + HUGE + b'": 1, "%s": 0}',
    "deep lists": b'{"%s": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": b'{"%s": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "an open end": b'{"%s": ' + b"[" * 200_000,
    "a long number": b'{"%s": ' + b"9" * 100_000 + b"}",
    "invalid UTF-8": b'{"%s": "\xff\xfe\xed\xa0\x80"}',
    "UTF-16": '{"%s": "x"}'.encode("utf-16"),
    "a null byte": b'{"%s": "x"}\x00',
    "not an object": b'["%s"]',
    "nothing": b"",
}


@pytest.mark.parametrize(
    "path", ["/completion", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/embeddings"]
)
def test_monstrous_bodies_are_refused_or_answered(server: Serving, path: str) -> None:
    field = next(iter(BODIES[path])).encode()
    for name, monster in MONSTERS.items():
        answer = server.request("POST", path, monster.replace(b"%s", field))
        require_no_failure(answer, name)
        if b"%s" not in monster or name in ("deep objects", "invalid UTF-8", "a null byte", "an open end"):
            assert answer.status == 400, (name, answer.data)


def test_the_description_has_every_route_and_field(server: Serving) -> None:
    described = server.get("/openapi.json").json
    assert described == json.loads(json.dumps(document(ROUTES)))
    operations = {(method, path) for path, entry in described["paths"].items() for method in entry}
    assert operations == {(method.lower(), path) for method, paths, _ in ROUTES for path in paths}
    properties = described["components"]["schemas"]["Generation"]["properties"]
    assert {name for field in FIELDS for name in (field.name, *field.aliases)} <= properties.keys()
    bodies = [path for path, entry in described["paths"].items() if "requestBody" in entry.get("post", {})]
    missing = {path.split("?")[0].replace("/0", "/{slot}") for path in BODIES} - set(bodies)
    assert not missing, "bodies that the description does not know"


def test_requests_made_from_the_description(server: Serving) -> None:
    """A few of each operation, by its schema and against it; docs/http.md has the longer run."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    described = server.get("/openapi.json").json
    first = {paths[-1] for _, paths, _ in ROUTES}  # the other addresses of a route lead to the same function
    known = [result.ok() for result in schemathesis.openapi.from_dict(described).get_all_operations()]
    operations = [operation for operation in known if operation.path in first]
    assert len(operations) > 20
    for operation in operations:
        has_body = "requestBody" in described["paths"][operation.path][operation.method]
        for mode in ("positive", "negative") if has_body else ("positive",):
            strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))

            @seed(SEED)
            @settings(max_examples=2, deadline=None, database=None, phases=[Phase.generate],
                      suppress_health_check=list(HealthCheck))  # fmt: skip
            @given(case=strategy)
            def ask(case: Any) -> None:
                response = case.call(base_url=server.url)
                body = response.request.body
                require_no_failure(Answer(response.status_code, {}, response.content), (case.path, body))

            ask()
