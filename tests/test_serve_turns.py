"""Five turns of chat and of tools through each of the three chat APIs, while others take the only slot in between.

From the second turn on only new tokens are computed, which the cached counts prove, and the answers are those of a
server that caches nothing. The demo model follows no tools by itself: a grammar made of the tools' schemas forces it.

Planted once and seen to fail: snapshots that are not restored; a restored prefix one token too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from serving import Serving, serving

# Messages between marks; tools, calls and results in the form that Hermes and Qwen models are trained on.
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Calls: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
DEMO = ("--demo", "tiny-qwen3moe", "--threads", "1", "--parallel", "1")
FLAGS = (*DEMO, "-c", "2048", "--metrics", "--chat-template", TEMPLATE)
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["river", "sea"]}, "again": {"type": "boolean"}},
    "required": ["place", "again"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look", "description": "Looks at a place.", "parameters": SCHEMA}
SAMPLING = {"temperature": 0.7, "seed": 4, "ignore_eos": True}
INTRUDER = {"prompt": "An intruder takes the slot over with a text of his own, which shares nothing.", "n_predict": 8}


class Turn(NamedTuple):
    """Numbers of an answer, what it said, and what follows in the conversation."""

    prompt: int
    cached: int
    generated: int
    said: Any
    follow: list[Any]


def chat(server: Serving, messages: list[Any], tools: bool, turn: int) -> Turn:
    body: dict[str, Any] = {"messages": messages, "max_tokens": 120 if tools else 12, **SAMPLING}
    if tools:
        body |= {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
        body |= {"parallel_tool_calls": False}
    answer = server.post("/v1/chat/completions", body).json
    message, usage = answer["choices"][0]["message"], answer["usage"]
    numbers = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
    if not tools:
        said = message["content"]
        follow = [{"role": "assistant", "content": said}, {"role": "user", "content": f"And then, after {turn}?"}]
        return Turn(*numbers, said, follow)
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": f"nothing new, time {turn}"}
    return Turn(*numbers, call["function"], [{"role": "assistant", "content": None, "tool_calls": [call]}, result])


def messages(server: Serving, history: list[Any], tools: bool, turn: int) -> Turn:
    body: dict[str, Any] = {"messages": history, "max_tokens": 120 if tools else 12, **SAMPLING}
    if tools:
        body["tools"] = [{"name": "look", "description": FUNCTION["description"], "input_schema": SCHEMA}]
        body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    answer = server.post("/v1/messages", body).json
    usage, block = answer["usage"], answer["content"][-1]
    cached = usage["cache_read_input_tokens"]
    numbers = usage["input_tokens"] + cached, cached, usage["output_tokens"]
    if not tools:
        user = {"role": "user", "content": f"And then, after {turn}?"}
        return Turn(*numbers, block["text"], [{"role": "assistant", "content": block["text"]}, user])
    assert answer["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": f"nothing new, time {turn}"}
    follow = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    return Turn(*numbers, (block["name"], block["input"]), follow)


def responses(server: Serving, history: list[Any], tools: bool, turn: int) -> Turn:
    body: dict[str, Any] = {"input": history, "max_output_tokens": 120 if tools else 12, **SAMPLING}
    if tools:
        body |= {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "parallel_tool_calls": False}
    answer = server.post("/v1/responses", body).json
    usage, (item,) = answer["usage"], answer["output"]
    numbers = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    if not tools:
        return Turn(
            *numbers, item["content"][0]["text"], [item, {"role": "user", "content": f"And then, after {turn}?"}]
        )
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": f"nothing new, time {turn}"}
    return Turn(*numbers, (item["name"], item["arguments"]), [item, output])


APIS: dict[str, Callable[[Serving, list[Any], bool, int], Turn]] = {
    "chat": chat,
    "messages": messages,
    "responses": responses,
}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Serving, Serving]]:
    """One that keeps what it can, one that keeps nothing."""
    with serving(*FLAGS) as caching, serving(*FLAGS, "--no-cache-prompt", "--cache-ram", "0") as plain:
        yield caching, plain


@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
@pytest.mark.parametrize("api", APIS)
def test_five_turns(servers: tuple[Serving, Serving], api: str, tools: bool) -> None:
    caching, plain = servers
    history: list[Any] = [{"role": "user", "content": f"Tell {api} about rivers, please, and look around."}]
    before: Turn | None = None
    again: list[int] = []  # tokens of answers that were not computed again
    for turn in range(5):
        found = APIS[api](caching, history, tools, turn)
        fresh = APIS[api](plain, history, tools, turn)
        assert (found.said, found.prompt, found.generated) == (fresh.said, fresh.prompt, fresh.generated)
        assert fresh.cached == 0
        if before:
            # The whole prompt before, and of the answer what its text has the same tokens of when it is read again; its
            # last token is in no cache yet.
            most = before.prompt + before.generated - 1
            assert before.prompt <= found.cached <= most, (turn, before, found)
            again.append(found.cached - before.prompt)
        assert caching.post("/completion", INTRUDER).status == 200
        history += found.follow
        before = found
    assert len(again) == 4 and max(again) >= (1 if tools else 11), "answers are cached, too"


def test_figures(servers: tuple[Serving, Serving]) -> None:
    for server, kept in zip(servers, (True, False), strict=True):
        lines = server.get("/metrics").data.decode().splitlines()
        numbers = {name: float(value) for name, value in (line.split() for line in lines if line[:1] not in ("#", ""))}
        assert (numbers["bloomery_snapshot_hits_total"] > 0) == (numbers["bloomery_snapshot_bytes"] > 0) == kept
        assert numbers["bloomery_snapshot_bytes"] <= numbers["bloomery_snapshot_limit_bytes"]
