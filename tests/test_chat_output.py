"""Answers taken apart: every form of tool calls, reasoning, and what happens to text that is neither.

Planted once and seen to fail: a closing tag cut in two pieces; blanks before a call kept, or dropped where no call
comes; a failed block that loses its opener; unknown tools called; text values that keep the line end before their tag;
an opened reasoning block read as content; a JSON scanner that takes a comma before a bracket.
"""

# ruff: noqa: E501
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from engine_client import Client, exhaust
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_data import trained_file

from bloomery.launcher.chat_output import Delta, Message, OutputFormat, check_tools, generic_instruction, tool_choice
from bloomery.launcher.chat_output.detection import tool_format
from bloomery.launcher.chat_output.json_stream import JsonScanner
from bloomery.launcher.chat_output.reader import Reader
from bloomery.launcher.chat_output.tool_formats import FORMATS
from bloomery.runtime.architectures import build_program
from bloomery.runtime.engine import Engine
from bloomery.runtime.errors import RequestError
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.requests import Chunk, GenerationRequest, SamplingParameters
from bloomery.runtime.tokenizer import Tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 10},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "days", "unit"],
            "additionalProperties": False,
        },
    },
}
STOP: dict[str, Any] = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
PYTHON: dict[str, Any] = {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}
TOOLS = (WEATHER, STOP, PYTHON)
THINK = ("<think>", "</think>")

Result = tuple[str, str, list[tuple[str, str]]]


def read(form: str | None, pieces: list[str], tags: tuple[str, str] | None = THINK, **options: Any) -> Result:
    reader, message = Reader(FORMATS[form] if form else None, TOOLS, tags, **options), Message()
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.push(piece)
    deltas += reader.finish()
    for delta in deltas:
        assert (delta.content != "") + (delta.reasoning != "") + (delta.tool_call is not None) == 1, "one, not empty"
        message.add(delta)
    calls = [delta.tool_call for delta in deltas if delta.tool_call]
    begun: set[int] = set()
    for call in calls:
        assert bool(call.name and call.id) == (call.index not in begun), "name and id come first, and once"
        begun.add(call.index)
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


OSLO = '{"city": "Oslo", "days": 2}'
EXAMPLES: list[tuple[str, str, Result]] = [
    (
        "hermes",
        f'Hi\n\n<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {}, "name": "stop"}\n</tool_call>\n',
        ("Hi", "", [("weather", OSLO), ("stop", "{}")]),
    ),
    ("hermes", '<tool_call>{"name": "stop"}</tool_call>', ("", "", [("stop", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("stop", '{"a": 1}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call> x',
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call> x', "", []),
    ),
    ("hermes", 'a <tool_call> b {"name"', ('a <tool_call> b {"name"', "", [])),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Os', ("", "", [("weather", '{"city": "Os')])),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": }} z', ("}} z", "", [("weather", '{"city": ')])),
    (
        "qwen-xml",
        'x\n<tool_call>\n<function=weather>\n<parameter=city>\nOs\n"lo"\n</parameter>\n<parameter=days>\n2\n</parameter>\n'
        "<parameter=unit>\nC</parameter>\n</function>\n</tool_call>",
        ("x", "", [("weather", '{"city": "Os\\n\\"lo\\"", "days": 2, "unit": "C"}')]),
    ),
    (
        "qwen-xml",
        "<function=python>\n<parameter=a>\n[1, 2]\n</parameter>\n<parameter=b>\nno json\n</parameter>\n</function>",
        ("", "", [("python", '{"a": [1, 2], "b": "no json"}')]),
    ),
    ("qwen-xml", "<function=none>\n</function>", ("<function=none>\n</function>", "", [])),
    (
        "deepseek",
        f"ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{OSLO}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("ok", "", [("weather", OSLO), ("stop", "{}")]),
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OSLO}<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop"
        "<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", "", [("weather", OSLO), ("stop", "{}")]),
    ),
    (
        "dsml",
        'So.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">O "s\n'
        'lo</｜DSML｜ parameter>\n<｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
        '<｜DSML｜ invoke name="stop">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        ("So.", "", [("weather", '{"city": "O \\"s\\nlo", "days": 2}'), ("stop", "{}")]),
    ),
    (
        "dsml",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">A&lt;</｜DSML｜parameter>'
        "\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        ("", "", [("weather", '{"city": "A&lt;"}')]),
    ),
    ("llama3", f'{{"name": "weather", "parameters": {OSLO}}}', ("", "", [("weather", OSLO)])),
    (
        "llama3",
        f' <|python_tag|>{{"type": "function", "name": "weather", "parameters": {OSLO}}}; {{"name": "stop"}}',
        ("", "", [("weather", OSLO), ("stop", "{}")]),
    ),
    ("llama3", '{"name": "x", "parameters": {}} and', ('{"name": "x", "parameters": {}} and', "", [])),
    ("llama3", 'It is {"name": "stop"}', ('It is {"name": "stop"}', "", [])),
    ("llama3", '<|python_tag|>print("a")\n', ("", "", [("python", '{"code": "print(\\"a\\")\\n"}')])),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}, "id": "abc"}}]',
        ("", "", [("weather", OSLO)]),
    ),
    (
        "mistral",
        f"a[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]stop[ARGS]{{}}",
        ("a", "", [("weather", OSLO), ("stop", "{}")]),
    ),
    ("generic", '{"response": "a\\n\\ud83d\\ude00\\""}', ('a\n😀"', "", [])),
    ("generic", f'{{"tool_call": {{"name": "weather", "arguments": {OSLO}}}}}', ("", "", [("weather", OSLO)])),
    (
        "generic",
        '{"tool_calls": [{"name": "stop", "arguments": {}}, {"name": "stop"}]}',
        ("", "", [("stop", "{}"), ("stop", "{}")]),
    ),
    ("generic", "Hello {", ("Hello {", "", [])),
    ("generic", '{"other": 1} ', ('{"other": 1} ', "", [])),
    ("hermes", "<think>\n hm \n\nso \n</think>\n\nYes. ", ("Yes. ", "hm \n\nso", [])),
    ("hermes", '<think>a</think><tool_call>{"name": "stop"}</tool_call>', ("", "a", [("stop", "{}")])),
    ("hermes", "No <think>a</think>", ("No <think>a</think>", "", [])),
    ("hermes", "<think>never closed", ("", "never closed", [])),
    ("hermes", "  <thin", ("  <thin", "", [])),
]


@pytest.mark.parametrize("form, text, expected", EXAMPLES, ids=[f"{form}{n}" for n, (form, *_) in enumerate(EXAMPLES)])
def test_examples_whole_and_letter_by_letter(form: str, text: str, expected: Result) -> None:
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected
    for size in (2, 3, 7):
        assert read(form, [text[i : i + size] for i in range(0, len(text), size)]) == expected


def test_model_ids_are_kept() -> None:
    reader = Reader(FORMATS["mistral"], TOOLS, None)
    deltas = reader.push('[TOOL_CALLS] [{"id": "call9", "name": "stop", "arguments": {}}]')
    assert deltas[0].tool_call and deltas[0].tool_call.id == "call9"


def test_reasoning_formats() -> None:
    text = "deep\n</think>\n\nYes"
    assert read("hermes", list(text), opened=True) == ("Yes", "deep", [])
    assert read("hermes", list("<think>\n" + text), opened=True) == ("Yes", "deep", []), "opened twice"
    assert read(None, list(text), opened=True) == ("Yes", "deep", [])
    assert read("hermes", list(text), None, opened=True) == (text, "", [])
    whole = "<think>deep</think> Yes"
    assert read("hermes", list(whole), legacy=True) == (whole, "deep", [])
    assert read(None, ["[THINK]a", "[/THINK]b"], ("[THINK]", "[/THINK]")) == ("b", "a", [])
    assert read(None, ["a ", " <tool_call>", "\n"]) == ("a  <tool_call>\n", "", [])


def test_arguments_come_as_they_are_written() -> None:
    reader = Reader(FORMATS["hermes"], TOOLS, THINK)
    assert reader.push("Let me see <tool") == [Delta(content="Let me see")]
    assert reader.push('_call>{"name": "weather", "argu') == []
    seen = reader.push('ments": {"city": "O')
    assert [delta.tool_call.name if delta.tool_call else "" for delta in seen] == ["weather", ""]
    assert seen[1].tool_call and seen[1].tool_call.arguments == '{"city": "O'
    more = reader.push("slo")
    assert more[0].tool_call and more[0].tool_call.arguments == "slo" and not more[0].tool_call.id


# Whatever the text.

PARTS = [
    *(text for _, text, _ in EXAMPLES),
    "<tool_call>",
    "</tool_call>",
    '{"name": "weather", "arguments": ',
    '{"city": "Oslo"}',
    "}",
    "<function=weather>",
    "<parameter=city>",
    "</parameter>",
    "</function>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "weather<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜DSML｜ calls>",
    '<｜DSML｜ invoke name="weather">',
    "<｜DSML｜",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    '{"tool_call": ',
    '{"response": "',
    "\\u12",
    "<think>",
    "</think>",
    "<",
    "é\n",
    " ",
    "\n\n",
    "text",
    "🙂",
]


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from([*FORMATS, None]),
    st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=4)), max_size=6).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([THINK, None]),
)
def test_pieces_do_not_matter(
    form: str | None, text: str, sizes: list[int], opened: bool, tags: tuple[str, str] | None
) -> None:
    pieces, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        pieces.append(text[at : at + size])
        at, turn = at + size, turn + 1
    whole = read(form, [text], tags, opened=opened)
    assert read(form, pieces, tags, opened=opened) == whole
    content, reasoning, calls = whole
    if not calls and form != "generic" and (tags is None or not reasoning):
        kept = text if tags is None or not opened else content
        assert content == kept or tags, "text that is nothing else is content, to the last character"
        if tags is None:
            assert content == text
    if form != "generic":
        letters = iter(text)
        assert all(char in letters for char in content), "content is part of the text, in its order"


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=10,
    ),
    st.sampled_from([None, 1]),
    st.text(max_size=3),
)
def test_the_scanner_finds_the_end_of_any_json(value: Any, indent: int | None, after: str) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=False)
    scanner = JsonScanner()
    assert scanner.feed(text + after) == len(text) and scanner.done and not scanner.failed


ODD = [
    "1,]",
    '{"a":1,}]',
    ",]",
    '{"a"}]',
    '{"a":}]',
    "-]",
    "01]",
    "1.]",
    ".5]",
    "1e5]",
    "-0.5E+3]",
    '"\\x"]',
    '"\\u12g4"]',
    "tru]",
    "true]",
    "1 2]",
]


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet='{}[]",:01.-e\\u tfalsn', max_size=14))
def test_the_scanner_accepts_what_python_accepts(text: str) -> None:
    check_scanner(text)


def check_scanner(text: str) -> None:
    text = ("[" + text).rstrip()
    scanner = JsonScanner()
    complete = scanner.feed(text) == len(text) and scanner.done and not scanner.failed
    try:
        json.loads(text)
    except ValueError:
        assert not complete
    else:
        assert complete


@pytest.mark.parametrize("text", ODD)
def test_the_scanner_on_odd_texts(text: str) -> None:
    check_scanner(text)


# From template to reader and constraint.

TEMPLATES = {
    "hermes": "{% for tool in tools %}<tool_call></tool_call>{% endfor %}",
    "qwen-xml": "tools <tool_call><function=example><parameter=a></parameter>",
    "deepseek": "tools <｜tool▁calls▁begin｜> ",
    "dsml": "tools <｜DSML｜ calls> ",
    "llama3": "<|start_header_id|> tools ",
    "mistral": "[TOOL_CALLS] tools [ARGS]",
    "generic": "{{ messages[0].content }}",
}
VARIANTS = {
    **TEMPLATES,
    "deepseek with a fence": "tools <｜tool▁calls▁begin｜>```json",
    "dsml of V4": "tools <｜DSML｜tool_calls>",
    "mistral with an array": "[TOOL_CALLS] tools",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_found_in_the_template(name: str) -> None:
    assert tool_format(TEMPLATES[name]).name == name
    assert OutputFormat(template=TEMPLATES[name], tools=TOOLS).is_generic == (name == "generic")


def test_no_tools_no_calls() -> None:
    text = '<tool_call>{"name": "stop"}</tool_call>'
    reader = OutputFormat(template=TEMPLATES["hermes"]).reader()
    assert reader.push(text) + reader.finish() == [Delta(content=text)]


def test_an_opened_prompt() -> None:
    format = OutputFormat(template="<think> </think>", prompt_end="<|assistant|><think>\n")
    assert [*format.reader().push("a</think>b")] == [Delta(reasoning="a"), Delta(content="b")]
    closed = OutputFormat(template="<think> </think>", prompt_end="<think>\n\n</think>\n\n").reader()
    assert closed.push("b") == [Delta(content="b")]
    raw = OutputFormat(prompt_end="<think>", reasoning_format="none").reader()
    assert raw.push("a</think>b") == [Delta(content="a</think>b")]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    path = trained_file("tiny-qwen3moe-Q4_K_M")
    with ModelFile.open(path) as model:
        pool = HostPool.start(
            str(path), build_program(model), context=512, slots=4, processes=1, prompt_block=64, cache_type="f16"
        )
        try:
            yield Engine(pool, Tokenizer.from_model_file(model), None)
        finally:
            pool.close()


def generated(engine: Engine, format: OutputFormat, seeds: range, ends: tuple[str, ...] = ("stop",)) -> list[Message]:
    client = Client(engine)
    for seed in seeds:
        client.submit_request(
            GenerationRequest(
                seed.to_bytes(16, "big"),
                text="The weather",
                max_tokens=400,
                constraint=format.tool_constraint(),
                sampling=SamplingParameters(seed=seed, temperature=1.0),
            )
        )
    exhaust(client)
    messages = []
    for request_id, events in client.events.items():
        assert client.final(request_id).reason in ends, "".join(e.text for e in events if isinstance(e, Chunk))
        reader, message = format.reader(), Message()
        for event in events:
            for delta in reader.push(event.text) if isinstance(event, Chunk) else []:
                message.add(delta)
        for delta in reader.finish():
            message.add(delta)
        messages.append(message)
    return messages


@pytest.mark.parametrize("name", VARIANTS)
def test_a_call_that_has_to_come_comes_and_is_read(engine: Engine, name: str) -> None:
    """Also by a model that knows nothing of tools."""
    format = OutputFormat(template=VARIANTS[name], tools=(WEATHER, STOP), choice="weather", parallel_tool_calls=False)
    for message in generated(engine, format, range(4)):
        assert message.content == "" and [call.name for call in message.tool_calls] == ["weather"]
        arguments = json.loads(message.tool_calls[0].arguments)
        assert list(arguments) == ["city", "days", "unit"]
        assert isinstance(arguments["city"], str) and arguments["days"] in range(1, 10) and arguments["unit"] in "CF"


def test_several_calls_and_reasoning_before_them(engine: Engine) -> None:
    """Any tool, one call or more; the reasoning that the prompt has opened is read as such."""
    short = {**WEATHER, "function": {**WEATHER["function"], "parameters": {"properties": {"days": {"enum": [1, 2]}}}}}
    format = OutputFormat(
        template=TEMPLATES["hermes"] + "<think></think>",
        prompt_end="<think>",
        tools=(short, STOP),
        choice="required",
    )
    constraint = format.tool_constraint()
    assert constraint and constraint.lark and "think" in constraint.lark
    plain = OutputFormat(template=TEMPLATES["hermes"], tools=(STOP,), choice="required")
    for message in generated(engine, plain, range(3), ends=("stop", "length")):
        assert message.tool_calls and all(call.name == "stop" for call in message.tool_calls)


def test_in_an_answer_that_may_call_only_calls_are_constrained() -> None:
    for name, template in TEMPLATES.items():
        constraint = OutputFormat(template=template, tools=TOOLS).tool_constraint()
        if name == "llama3":
            assert constraint is None
        elif name == "generic":
            assert constraint and constraint.json_schema and not constraint.triggers
        else:
            assert constraint and constraint.triggers == tool_format(template).openers[:1]
    assert OutputFormat(template=TEMPLATES["hermes"]).tool_constraint() is None


def test_schemas_of_tools_that_cannot_be_enforced() -> None:
    """Refused where arguments are promised, any object where they are not."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    format: dict[str, Any] = {"template": TEMPLATES["hermes"], "tools": ({"type": "function", "function": function},)}
    for promised in ({"choice": "f"}, {"tools": ({"type": "function", "function": {**function, "strict": True}},)}):
        with pytest.raises(RequestError, match=r"parameters of f cannot be enforced.*not") as caught:
            OutputFormat(**{**format, **promised}).tool_constraint()
        assert caught.value.code == "invalid_request" and caught.value.details["field"] == "tools"
    constraint = OutputFormat(**format).tool_constraint()
    assert constraint and constraint.lark and '"not"' not in constraint.lark


def test_tools_and_choices_are_checked() -> None:
    assert check_tools(list(TOOLS)) == TOOLS
    for bad, where in (
        ("x", "tools must be an array"),
        ([1], "tools[0] must be"),
        ([{"type": "web_search"}], "tools[0] must be"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([STOP, STOP], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}, {}], "tools[1] must be"),
        ([{"type": "function", "function": {"name": "a", "parameters": [1]}}], "tools[0].function.parameters"),
    ):
        with pytest.raises(RequestError) as caught:
            check_tools(bad)
        assert where in caught.value.message
    assert [tool_choice(choice, TOOLS) for choice in (None, "auto", "none", "any")] == [
        "auto",
        "auto",
        "none",
        "required",
    ]
    assert tool_choice({"type": "function", "function": {"name": "stop"}}, TOOLS) == "stop"
    for choice in ("stop", {"function": {"name": "x"}}, 5, {"function": 1}):
        with pytest.raises(RequestError, match="tool_choice"):
            tool_choice(choice, TOOLS)


def test_the_generic_instruction_names_tools_and_form() -> None:
    text = generic_instruction(TOOLS, parallel=True)
    assert "tool_calls" in text and '"response"' in text
    for line, tool in zip(text.splitlines()[1:], TOOLS, strict=False):
        assert json.loads(line) == tool["function"]
