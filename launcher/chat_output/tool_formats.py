"""The forms in which models write tool calls, one reader each.

Owns what each form looks like. A reader consumes one block of calls, which begins with one of `openers` anywhere in the
text or with one of `starts` at its very beginning, and raises Mismatch where the text does not go on as the form says.
It does not know what becomes of the text then (`reader.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from bloomery.launcher.chat_output.calls import MAX_NAME, Calls, as_json, object_call
from bloomery.launcher.chat_output.deltas import Delta
from bloomery.launcher.chat_output.json_stream import parsed, streamed_value, whole_value
from bloomery.launcher.chat_output.source import Mismatch, Reading, Source, Wait


@dataclass(frozen=True)
class ToolFormat:
    name: str
    openers: tuple[str, ...]
    block: Callable[[Source, Calls], Reading[None]]
    starts: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    """Further strings of the form that a vocabulary may have as control tokens."""


def hermes(source: Source, calls: Calls) -> Reading[None]:
    """<tool_call> {"name": ..., "arguments": {...}} </tool_call>"""
    yield from source.expect("<tool_call>")
    yield from source.blanks()
    yield from object_call(source, calls)
    yield from source.blanks()
    yield from source.expect("</tool_call>")


def qwen_xml(source: Source, calls: Calls) -> Reading[None]:
    """<tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> ... </function> </tool_call>"""
    wrapped = yield from source.optional("<tool_call>")
    yield from source.blanks()
    yield from source.expect("<function=")
    name = (yield from source.until(">", MAX_NAME)).strip()
    yield calls.start(name)
    yield calls.arguments("{")
    comma = ""
    yield from source.blanks()
    while (yield from source.optional("<parameter=")):
        key = (yield from source.until(">", MAX_NAME)).strip()
        yield calls.arguments(f"{comma}{as_json(key)}: ")
        yield from source.optional("\n")
        ends = ("\n</parameter>", "</parameter>")
        yield from _marked_value(source, calls, calls.is_text(name, key), ends)
        yield from source.expect(*ends)
        comma = ", "
        yield from source.blanks()
    yield calls.arguments("}")
    yield from source.expect("</function>")
    if wrapped:
        yield from source.blanks()
        yield from source.expect("</tool_call>")


def _marked_value(source: Source, calls: Calls, is_text: bool | None, ends: tuple[str, ...]) -> Reading[None]:
    """A value between marks, as JSON: text as a string, as it comes; anything else as it is if it is JSON."""
    if is_text:
        yield calls.arguments('"')
        for piece in source.pieces_until(ends):
            yield piece if isinstance(piece, Wait) else calls.arguments(as_json(piece)[1:-1])
        yield calls.arguments('"')
        return
    value = ""
    for piece in source.pieces_until(ends):
        if isinstance(piece, Wait):
            yield piece
        else:
            value += piece
    yield calls.arguments(_as_value(value))


def _as_value(text: str) -> str:
    try:
        json.loads(text)
    except ValueError:
        return as_json(text)
    return text.strip()


_DEEPSEEK_BEGIN = ("<｜tool▁calls▁begin｜>", "<｜tool_calls_begin｜>", "<｜tool calls begin｜>")
_DEEPSEEK_END = ("<｜tool▁calls▁end｜>", "<｜tool_calls_end｜>", "<｜tool calls end｜>")
_CALL_BEGIN, _CALL_SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def deepseek(source: Source, calls: Calls) -> Reading[None]:
    """DeepSeek R1 and V3 (kind, name, arguments in a fence) and V3.1 (name, arguments), between their marks."""
    wrapped = yield from source.optional(*_DEEPSEEK_BEGIN)
    yield from source.blanks()
    first = True
    while first or (yield from source.begins_with((_CALL_BEGIN,))):
        first = False
        yield from source.expect(_CALL_BEGIN)
        name = (yield from source.until(_CALL_SEP, MAX_NAME)).strip()
        yield from source.blanks()
        fenced = not (yield from source.begins_with(("{",)))
        if fenced:
            name = (yield from source.until("```json", MAX_NAME)).strip()
            yield from source.blanks()
        if not (yield from source.begins_with(("{",))):
            raise Mismatch
        yield calls.start(name)
        yield from streamed_value(source, calls.arguments)
        yield from source.blanks()
        if fenced:
            yield from source.expect("```")
            yield from source.blanks()
        yield from source.expect(_CALL_END)
        yield from source.blanks()
    if wrapped:
        yield from source.expect(*_DEEPSEEK_END)


_DSML = "<｜DSML｜"
_DSML_BLOCKS = (" calls>", "tool_calls>", "function_calls>")


def dsml(source: Source, calls: Calls) -> Reading[None]:
    """DeepSeek V3.2, V4 and V4.1: invokes with parameters, in tags that begin with the DSML mark."""
    block = (yield from source.expect(*(_DSML + name for name in _DSML_BLOCKS))).removeprefix(_DSML)
    space = " " if block.startswith(" ") else ""
    yield from source.blanks()
    while (yield from source.optional(f'{_DSML}{space}invoke name="')):
        name = yield from source.until('"', MAX_NAME)
        yield from source.blanks()
        yield from source.expect(">")
        yield calls.start(name)
        yield from _dsml_parameters(source, calls, space)
        yield from source.expect(f"</｜DSML｜{space}invoke>")
        yield from source.blanks()
    yield from source.expect(f"</｜DSML｜{block}")


def _dsml_parameters(source: Source, calls: Calls, space: str) -> Reading[None]:
    yield calls.arguments("{")
    comma = ""
    yield from source.blanks()
    while (yield from source.optional(f'{_DSML}{space}parameter name="')):
        key = yield from source.until('"', MAX_NAME)
        yield from source.blanks()
        kind = yield from source.expect('string="true">', 'string="false">')
        yield calls.arguments(f"{comma}{as_json(key)}: ")
        end = f"</｜DSML｜{space}parameter>"
        yield from _marked_value(source, calls, kind == 'string="true">', (end,))
        yield from source.expect(end)
        comma = ", "
        yield from source.blanks()
    yield calls.arguments("}")


_CODE_TOOLS = ("python", "ipython", "code_interpreter")


def llama3(source: Source, calls: Calls) -> Reading[None]:
    """Llama 3: a JSON object with name and parameters, at the beginning or after <|python_tag|>; several of them with
    semicolons between; or code for a tool of that kind."""
    tagged = yield from source.optional("<|python_tag|>")
    yield from source.blanks()
    if tagged and not (yield from source.begins_with(("{",))):
        name = next((tool for tool in _CODE_TOOLS if calls.knows(tool)), "")
        yield calls.start(name)
        yield calls.arguments('{"code": "')
        for piece in source.pieces_until(()):
            yield piece if isinstance(piece, Wait) else calls.arguments(as_json(piece)[1:-1])
        yield calls.arguments('"}')
        return
    while True:
        yield from object_call(source, calls)
        yield from source.blanks()
        if not (yield from source.optional(";")):
            return
        yield from source.blanks()


def mistral(source: Source, calls: Calls) -> Reading[None]:
    """Mistral: [TOOL_CALLS] and an array of objects with name and arguments; or name, [ARGS], arguments for each."""
    yield from source.expect("[TOOL_CALLS]")
    yield from source.blanks()
    if (yield from source.begins_with(("[",))):
        yield from source.expect("[")
        yield from source.blanks()
        while True:
            yield from object_call(source, calls)
            yield from source.blanks()
            if not (yield from source.optional(",")):
                break
            yield from source.blanks()
        yield from source.expect("]")
        return
    name = yield from source.until("[ARGS]", MAX_NAME)
    if not (yield from source.begins_with(("{",))):
        raise Mismatch
    yield calls.start(name.strip())
    yield from streamed_value(source, calls.arguments)


def generic(source: Source, calls: Calls) -> Reading[None]:
    """One JSON object: {"tool_call": {...}}, {"tool_calls": [{...}, ...]} or {"response": "text"}."""
    yield from source.expect("{")
    yield from source.blanks()
    key = yield from source.expect('"tool_call"', '"tool_calls"', '"response"')
    yield from source.blanks()
    yield from source.expect(":")
    yield from source.blanks()
    if key == '"response"':
        yield from _response(source)
    elif key == '"tool_call"':
        yield from object_call(source, calls)
    else:
        yield from source.expect("[")
        yield from source.blanks()
        while True:
            yield from object_call(source, calls)
            yield from source.blanks()
            if not (yield from source.optional(",")):
                break
            yield from source.blanks()
        yield from source.expect("]")
    yield from source.blanks()
    yield from source.expect("}")


def _response(source: Source) -> Reading[None]:
    """A string as content, as it comes, one character of JSON or escape sequence at a time; another value as it is."""
    if not (yield from source.begins_with(('"',))):
        yield Delta(content=(yield from whole_value(source)))
        return
    yield from source.expect('"')
    while (yield from source.more()):
        rest = source.rest
        plain = min((place for place in (rest.find('"'), rest.find("\\")) if place >= 0), default=len(rest))
        if plain:
            source.skip(plain)
            yield Delta(content=rest[:plain])
        elif rest[0] == '"':
            source.skip(1)
            return
        else:
            yield Delta(content=(yield from _escape(source)))
    raise Mismatch


def _escape(source: Source) -> Reading[str]:
    """The character of an escape sequence; of two, if they are a surrogate pair."""
    text = yield from _exactly(source, 2)
    if text[1] == "u":
        text += yield from _exactly(source, 4)
        if text[2:4].lower() in ("d8", "d9", "da", "db") and (yield from source.begins_with(("\\u",))):
            text += yield from _exactly(source, 6)
    value = parsed(f'"{text}"')
    return str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _exactly(source: Source, count: int) -> Reading[str]:
    text = ""
    while len(text) < count:
        if not (yield from source.more()):
            raise Mismatch
        piece = source.rest[: count - len(text)]
        source.skip(len(piece))
        text += piece
    return text


FORMATS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat("hermes", ("<tool_call>",), hermes, marks=("</tool_call>",)),
        ToolFormat("qwen-xml", ("<tool_call>", "<function="), qwen_xml, marks=("</tool_call>",)),
        ToolFormat(
            "deepseek",
            (*_DEEPSEEK_BEGIN, _CALL_BEGIN),
            deepseek,
            marks=(_CALL_SEP, _CALL_END, _DEEPSEEK_END[0]),
        ),
        ToolFormat("dsml", tuple(_DSML + name for name in _DSML_BLOCKS), dsml, marks=("｜DSML｜",)),
        ToolFormat("llama3", ("<|python_tag|>",), llama3, starts=("{",)),
        ToolFormat("mistral", ("[TOOL_CALLS]",), mistral, marks=("[ARGS]",)),
        ToolFormat("generic", (), generic, starts=("{",)),
    )
}
