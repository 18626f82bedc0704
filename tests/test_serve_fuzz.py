"""Bodies that no client would send: whatever comes, the server answers with an error object and never fails itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Serving, serving

SEED = 20
ROUNDS = 25
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "x", "n_predict": 2, "logit_bias": [[1, 2]], "stop": ["y"], "n_probs": 2},
    "/v1/completions": {"prompt": ["x", [1, 2]], "max_tokens": 2, "logprobs": 1, "stream_options": {}},
    "/v1/chat/completions": CHAT | {"tools": [TOOL], "tool_choice": "auto", "chat_template_kwargs": {}},
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
        "thinking": {"type": "enabled"},
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/chat/completions/input_tokens": CHAT,
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
        if answer.status == 500:  # llama-server's status for images
            assert "input is not supported" in answer.json["error"]["message"], (data, answer.data)
        else:
            assert answer.status < 500 or answer.status == 501, (data, answer.data)
        if answer.status >= 400:
            error = answer.json["error"]
            assert error["message"] and error["type"], (data, answer.data)


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
