"""The chat format of DeepSeek V4.1 and V4 that files without a template get, and that its calls are read back.

Expectations are written out from the format's description. Planted once and seen to fail: reasoning kept in earlier
turns without tools, or dropped with them; tool results in turns of their own; values of strings as JSON.
"""

# ruff: noqa: E501
from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vocabularies import path_of

from bloomery.launcher.chat_output import Message, OutputFormat
from bloomery.runtime.chat_template import ChatTemplate
from bloomery.runtime.deepseek_template import chat_template_text, deepseek_template
from bloomery.runtime.errors import RequestError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer import Tokenizer

B, E = "<BOS>", "<EOS>"
EFFORT = "Reasoning Effort: 50 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}},
}
CALL: dict[str, Any] = {
    "id": "1",
    "type": "function",
    "function": {"name": "find", "arguments": {"what": 'a "b"\nc', "n": 2, "deep": {"x": [None]}}},
}
CALL_TEXT = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="find">\n<｜DSML｜ parameter name="what" string="true">a "b"\nc</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="n" string="false">2</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="deep" string="false">{"x": [null]}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


def said(role: str, content: Any = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with ModelFile.open(path_of("deepseek-llm")) as model:
        return Tokenizer.from_model_file(model)


def rendered(tokenizer: Tokenizer, *messages: dict[str, Any], version: str = "4.1", **variables: Any) -> str:
    template = ChatTemplate(deepseek_template(spaced=version == "4.1", system=version == "4.1"), tokenizer)
    return template.render(list(messages), **{"bos_token": B, "eos_token": E, **variables})


def test_turns_without_thinking(tokenizer: Tokenizer) -> None:
    turns = (
        said("system", "Be kind."),
        said("user", "Hi"),
        said("assistant", "Yo"),
        said("system", "Now!"),
        said("user", "?"),
    )
    text = rendered(tokenizer, *turns, enable_thinking=False)
    assert text == (
        f"{B}<｜System｜>Be kind.<｜User｜>Hi<｜Assistant｜></think>Yo{E}<｜System｜>Now!<｜User｜>?<｜Assistant｜></think>"
    )
    assert (
        rendered(tokenizer, said("user", "Hi"), enable_thinking=False, add_generation_prompt=False)
        == f"{B}<｜User｜>Hi"
    )


def test_thinking_names_its_effort(tokenizer: Tokenizer) -> None:
    assert rendered(tokenizer, said("user", "Hi")) == f"{B}<｜System｜>{EFFORT}<｜User｜>Hi<｜Assistant｜><think>"
    for effort, number in (("low", 25), ("xhigh", 75), ("max", 100), (7, 7)):
        text = rendered(tokenizer, said("user", "Hi"), reasoning_effort=effort)
        assert text.startswith(f"{B}<｜System｜>{EFFORT.replace('50', str(number))}<｜User｜>")
    for effort in ("huge", 0, 101):
        if effort:
            with pytest.raises(RequestError, match="reasoning_effort"):
                rendered(tokenizer, said("user", "Hi"), reasoning_effort=effort)


def test_reasoning_is_dropped_before_the_last_question_unless_there_are_tools(tokenizer: Tokenizer) -> None:
    turns = (said("user", "a"), said("assistant", "b", reasoning_content="r1"), said("user", "c"))
    last = said("assistant", "d", reasoning_content="r2")
    text = rendered(tokenizer, *turns, last, add_generation_prompt=False)
    assert text.endswith(f"<｜User｜>a<｜Assistant｜></think>b{E}<｜User｜>c<｜Assistant｜><think>r2</think>d{E}")
    text = rendered(tokenizer, *turns, last, add_generation_prompt=False, tools=[TOOL])
    assert text.endswith(
        f"<｜User｜>a<｜Assistant｜><think>r1</think>b{E}<｜User｜>c<｜Assistant｜><think>r2</think>d{E}"
    )


def test_tools_calls_and_results(tokenizer: Tokenizer) -> None:
    text = rendered(
        tokenizer,
        said("system", "S"),
        said("user", "a"),
        said("assistant", "b", tool_calls=[CALL]),
        said("tool", "one"),
        said("tool", "two"),
        said("user", "and?"),
        tools=[TOOL],
        enable_thinking=False,
    )
    system, _, rest = text.partition("<｜User｜>")
    assert system.startswith(f"{B}<｜System｜>S\n\n## Tools\n\n") and "### Available Tool Schemas\n\n" in system
    assert json.loads(system.splitlines()[-1]) == TOOL["function"]
    assert rest == (
        f"a<｜Assistant｜></think>b\n\n{CALL_TEXT}{E}<｜User｜><tool_result>one</tool_result>\n\n"
        "<tool_result>two</tool_result>\n\nand?<｜Assistant｜></think>"
    )
    with pytest.raises(RequestError, match="must be a JSON object"):
        rendered(tokenizer, said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "x"}}]))
    with pytest.raises(RequestError, match="unknown role judge"):
        rendered(tokenizer, said("judge", "x"))


def test_v4_has_tags_without_the_space(tokenizer: Tokenizer) -> None:
    turns = (said("user", "a"), said("assistant", "", tool_calls=[CALL]))
    text = rendered(tokenizer, *turns, version="4", enable_thinking=False, add_generation_prompt=False)
    v4 = CALL_TEXT.replace("<｜DSML｜ calls>", "<｜DSML｜tool_calls>").replace(
        "</｜DSML｜ calls>", "</｜DSML｜tool_calls>"
    )
    assert text == f"{B}<｜User｜>a<｜Assistant｜></think>\n\n{v4.replace('｜DSML｜ ', '｜DSML｜')}{E}"


def test_calls_are_read_back(tokenizer: Tokenizer) -> None:
    source = deepseek_template(spaced=True, system=True)
    for text in (CALL_TEXT, CALL_TEXT.replace("｜DSML｜ calls", "｜DSML｜tool_calls").replace("｜DSML｜ ", "｜DSML｜")):
        reader, message = (
            OutputFormat(template=source, prompt_end="<｜Assistant｜><think>", tools=(TOOL,)).reader(),
            Message(),
        )
        for delta in [*reader.push(f"why</think>b\n\n{text}"), *reader.finish()]:
            message.add(delta)
        assert (message.reasoning, message.content) == ("why", "b")
        assert json.loads(message.tool_calls[0].arguments) == CALL["function"]["arguments"]


def test_which_files_get_it() -> None:
    tokens = ["<｜User｜>", "<｜Assistant｜>", "<｜System｜>"]

    def file(architecture: str, **metadata: Any) -> ModelFile:
        def key(name: str, kind: type, default: Any) -> Any:
            return metadata.get(name, default)

        return cast(ModelFile, SimpleNamespace(architecture=architecture, metadata=metadata, key=key))

    assert "｜DSML｜ calls" in chat_template_text(file("deepseek41", **{"tokenizer.ggml.tokens": tokens}))
    v4 = chat_template_text(file("deepseek4", **{"tokenizer.ggml.tokens": tokens[:2]}))
    assert "｜DSML｜tool_calls" in v4 and "<｜System｜>" not in v4
    assert chat_template_text(file("deepseek41", **{"tokenizer.ggml.tokens": ["a"]})) == ""
    assert chat_template_text(file("llama", **{"tokenizer.ggml.tokens": tokens})) == ""
    own = file("deepseek41", **{"tokenizer.ggml.tokens": tokens, "tokenizer.chat_template": "own"})
    assert chat_template_text(own) == "own"
