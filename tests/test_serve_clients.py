"""bloomery-serve through the clients that people use: the openai and anthropic packages, against the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Serving, serving, wait_for

openai = pytest.importorskip("openai", reason="the openai client is not installed")
anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a word?"}]
SETTINGS: dict[str, Any] = {"model": "any", "messages": MESSAGES, "max_tokens": 16, "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--demo", "tiny-qwen3moe", "--threads", "1", "-np", "2", "-c", "2048", "--api-key", "k") as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[Any]:
    with openai.OpenAI(api_key="k", base_url=f"{server.url}/v1", max_retries=0) as made:
        yield made


def test_chat_and_its_stream(client: Any) -> None:
    whole = client.chat.completions.create(**SETTINGS)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 16
    content, usage, roles = "", None, []
    for chunk in client.chat.completions.create(**SETTINGS, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            roles.append(choice.delta.role)
    assert content == whole.choices[0].message.content != ""
    assert roles[0] == "assistant" and not any(roles[1:])
    assert usage.completion_tokens == 16 and usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_later_turns_process_new_tokens_only(client: Any) -> None:
    """Five turns: cached tokens grow by all that came before, and a run without cache gives the same answers."""
    messages: list[Any] = [{"role": "user", "content": "Tell me about rivers, please."}]
    seen = 0
    for turn in range(5):
        settings = {**SETTINGS, "messages": messages, "max_tokens": 12}
        cached = client.chat.completions.create(**settings)
        fresh = client.chat.completions.create(**settings, extra_body={"cache_prompt": False})
        text = cached.choices[0].message.content
        assert fresh.choices[0].message.content == text
        assert fresh.usage.prompt_tokens_details.cached_tokens == 0
        if turn:
            assert cached.usage.prompt_tokens_details.cached_tokens >= seen - 1
        seen = cached.usage.prompt_tokens
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]


def test_logprobs_join_to_the_text(client: Any) -> None:
    answer = client.chat.completions.create(**SETTINGS, logprobs=True, top_logprobs=4).choices[0]
    entries = answer.logprobs.content
    assert "".join(entry.token for entry in entries) == answer.message.content
    assert all(len(entry.top_logprobs) == 4 and entry.logprob <= 0 for entry in entries)


def test_several_choices(client: Any) -> None:
    settings = {**SETTINGS, "temperature": 1.2, "n": 2}
    both = [choice.message.content for choice in client.chat.completions.create(**settings).choices]
    alone = [
        client.chat.completions.create(**{**settings, "n": 1, "seed": seed}).choices[0].message.content
        for seed in (1, 2)
    ]
    assert both == alone
    texts = ["", ""]
    for chunk in client.chat.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == both


def test_prefill_is_continued(client: Any, server: Serving) -> None:
    prefill = [*MESSAGES, {"role": "assistant", "content": "A word is"}]
    key = {"Authorization": "Bearer k"}
    prompt = server.post("/apply-template", {"messages": prefill}, **key).json["prompt"]
    assert prompt.endswith("A word is")
    both = {"messages": prefill, "continue_final_message": True}
    assert server.post("/v1/chat/completions", both, **key).status == 400
    named = server.post("/apply-template", {**both, "add_generation_prompt": False}, **key).json["prompt"]
    assert named == prompt
    assert client.chat.completions.create(**{**SETTINGS, "messages": prefill}).choices[0].message.content


def test_completions(client: Any) -> None:
    settings: dict[str, Any] = {"model": "any", "prompt": "Once", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**settings).choices[0]
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**settings, stream=True))
    assert streamed == whole.text != "" and whole.finish_reason == "length"


def test_responses(client: Any) -> None:
    settings: dict[str, Any] = {"model": "any", "input": "What is a word?", "max_output_tokens": 10, "temperature": 0}
    whole = client.responses.create(instructions="Be brief.", **settings)
    assert whole.id.startswith("resp_") and whole.usage.output_tokens == 10 and whole.output_text
    kinds, text, last = [], "", None
    for event in client.responses.create(instructions="Be brief.", **settings, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert text == whole.output_text == last.response.output_text  # type: ignore[union-attr]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["river", "sea"]}, "again": {"type": "boolean"}},
            "required": ["place", "again"],
            "additionalProperties": False,
        },
    },
}
FORCED: dict[str, Any] = {**SETTINGS, "tools": [TOOL], "tool_choice": "required", "max_tokens": 120}


def check_call(name: str, arguments: str) -> None:
    assert name == "look"
    given = json.loads(arguments)
    assert given["place"] in ("river", "sea") and isinstance(given["again"], bool)


def test_forced_tool_calls(client: Any) -> None:
    """The demo model calls tools only because the grammar leaves it nothing else."""
    choice = client.chat.completions.create(**FORCED).choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    calls = choice.message.tool_calls
    for call in calls:
        check_call(call.function.name, call.function.arguments)
    found: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**FORCED, stream=True):
        for piece in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            name_and_text = found.setdefault(piece.index, ["", ""])
            name_and_text[0] += piece.function.name or ""
            name_and_text[1] += piece.function.arguments or ""
    assert [tuple(call) for call in found.values()] == [(c.function.name, c.function.arguments) for c in calls]


def test_five_turns_of_tools_process_new_tokens_only(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Look around."}]
    seen = 0
    for turn in range(5):
        answer = client.chat.completions.create(**{**FORCED, "messages": messages, "parallel_tool_calls": False})
        (call,) = answer.choices[0].message.tool_calls
        check_call(call.function.name, call.function.arguments)
        if turn:
            assert answer.usage.prompt_tokens_details.cached_tokens >= seen - 1
        seen = answer.usage.prompt_tokens
        said = {"id": call.id, "type": "function", "function": call.function.model_dump()}
        result = {"role": "tool", "tool_call_id": call.id, "content": f"nothing new, time {turn}"}
        messages = [*messages, {"role": "assistant", "content": None, "tool_calls": [said]}, result]


def test_forced_tools_of_the_other_apis(client: Any, server: Serving) -> None:
    function = TOOL["function"]
    tool = {"type": "function", **function}
    settings: dict[str, Any] = {"model": "any", "input": "Look.", "tools": [tool], "tool_choice": "required"}
    (item,) = client.responses.create(**settings, max_output_tokens=120, parallel_tool_calls=False).output
    check_call(item.name, item.arguments)
    stream = client.responses.create(**settings, max_output_tokens=120, parallel_tool_calls=False, stream=True)
    last = list(stream)[-1]
    assert last.type == "response.completed" and last.response.output[0].type == "function_call"
    body = {
        "max_tokens": 120,
        "messages": [{"role": "user", "content": "Look."}],
        "tools": [{"name": "look", "input_schema": function["parameters"]}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    answer = server.post("/v1/messages", body, **{"x-api-key": "k"}).json
    (block,) = answer["content"]
    assert answer["stop_reason"] == "tool_use" and block["type"] == "tool_use"
    check_call(block["name"], json.dumps(block["input"]))
    cut = server.post("/v1/messages", body | {"max_tokens": 12}, **{"x-api-key": "k"}).json
    assert cut["stop_reason"] == "max_tokens" and [block["type"] for block in cut["content"]] == ["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": "x"},
        {"tools": [3]},
        {"tools": [TOOL, TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [TOOL], "grammar": 'root ::= "a"'},
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
    ],
    ids=str,
)
def test_bad_tools_are_refused(server: Serving, fields: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", {**SETTINGS, **fields}, Authorization="Bearer k")
    assert answer.status == 400, answer.data


def test_errors_are_the_clients_own(client: Any, server: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="available context size"):
        client.chat.completions.create(**{**SETTINGS, "messages": [{"role": "user", "content": "x " * 3000}]})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**{**SETTINGS, "temperature": "hot"})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(api_key="other", base_url=f"{server.url}/v1", max_retries=0).models.list()
    assert [model.id for model in client.models.list()]


def test_a_closed_stream_frees_its_slot(client: Any, server: Serving) -> None:
    stream = client.chat.completions.create(
        **{**SETTINGS, "max_tokens": 900}, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()

    def idle() -> bool:
        slots = server.get("/slots", Authorization="Bearer k").json
        return not any(slot["is_processing"] for slot in slots)

    wait_for(idle, seconds=2)


# ---- anthropic ----


@pytest.fixture
def claude(server: Serving) -> Iterator[Any]:
    with anthropic.Anthropic(api_key="k", base_url=server.url, max_retries=0) as made:
        yield made


ASKED: dict[str, Any] = {
    "model": "any",
    "max_tokens": 12,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What is a word?"}]}],
}


def test_messages_and_their_stream(claude: Any) -> None:
    whole = claude.messages.create(**ASKED, extra_body={"temperature": 0})
    assert whole.content[0].type == "text" and whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 12 and whole.usage.input_tokens > 0
    with claude.messages.stream(**ASKED, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text != "" and final.usage.output_tokens == 12


def test_counting_tokens(claude: Any) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    counted = claude.messages.count_tokens(**asked).input_tokens
    usage = claude.messages.create(**ASKED).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_anthropic_errors(claude: Any, server: Serving) -> None:
    with pytest.raises(anthropic.BadRequestError, match="role"):
        claude.messages.create(**{**ASKED, "messages": [{"content": "x"}]})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(api_key="other", base_url=server.url, max_retries=0).messages.create(**ASKED)


def test_tool_results_become_messages(server: Serving) -> None:
    """A conversation with a tool call and its result is rendered whole."""
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"place": "river"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a quiet bank"}]}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    key = {"Authorization": "Bearer k"}
    with_result = server.post("/v1/messages/count_tokens", {"messages": messages}, **key)
    without = server.post("/v1/messages/count_tokens", {"messages": messages[:1]}, **key)
    assert with_result.status == without.status == 200
    assert with_result.json["input_tokens"] > without.json["input_tokens"] + 3
