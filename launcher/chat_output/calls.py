"""The tool calls of one answer as they are read: their numbers, their names, the schemas of their parameters.

Owns what all formats share. Knows no format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from bloomery.launcher.chat_output.deltas import Delta, ToolCallDelta, new_call_id
from bloomery.launcher.chat_output.json_stream import parsed, streamed_value, whole_value
from bloomery.launcher.chat_output.source import Mismatch, Reading, Source

MAX_NAME = 256


class Calls:
    """`started` counts the calls that have begun."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        functions = [tool.get("function") for tool in tools]
        self._tools: dict[str, Mapping[str, Any]] = {
            str(function.get("name")): function for function in functions if isinstance(function, Mapping)
        }
        self.started = 0

    def knows(self, name: str) -> bool:
        return name in self._tools

    def start(self, name: str, call_id: str = "") -> Delta:
        """The beginning of the next call. Mismatch if there is no such tool."""
        if name not in self._tools:
            raise Mismatch
        self.started += 1
        return Delta(tool_call=ToolCallDelta(self.started - 1, id=call_id or new_call_id(), name=name))

    def arguments(self, text: str) -> Delta:
        """More of the arguments of the last call."""
        return Delta(tool_call=ToolCallDelta(self.started - 1, arguments=text))

    def is_text(self, tool: str, parameter: str) -> bool | None:
        """Whether the schema wants a string; None if it does not say."""
        parameters = self._tools[tool].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind is None and isinstance(schema, Mapping) and isinstance(schema.get("enum"), list):
            return all(isinstance(value, str) for value in schema["enum"])
        return None if kind is None else kind == "string"


NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")


def object_call(source: Source, calls: Calls) -> Reading[None]:
    """A call as a JSON object with a name and arguments; other members are passed over, an `id` is taken."""
    name, call_id, kept, begun = "", "", "", False
    yield from source.expect("{")
    yield from source.blanks()
    while not (yield from source.optional("}")):
        key = parsed((yield from _string(source)))
        yield from source.blanks()
        yield from source.expect(":")
        yield from source.blanks()
        if key in NAME_KEYS and not name:
            name = parsed((yield from _string(source)))
        elif key == "id" and (yield from source.begins_with(('"',))):
            call_id = parsed((yield from _string(source)))
        elif key in ARGUMENT_KEYS and not begun and not kept:
            if name and (yield from source.begins_with(("{",))):
                yield calls.start(name, call_id)
                begun = True
                yield from streamed_value(source, calls.arguments)
            else:
                kept = yield from whole_value(source)
        else:
            yield from whole_value(source)
        yield from source.blanks()
        if not (yield from source.optional(",")):
            yield from source.expect("}")
            break
        yield from source.blanks()
    if not begun:
        if not name:
            raise Mismatch
        yield calls.start(name, call_id)
        yield calls.arguments(_as_object(kept))


def _string(source: Source) -> Reading[str]:
    if not (yield from source.begins_with(('"',))):
        raise Mismatch
    return (yield from whole_value(source))


def _as_object(text: str) -> str:
    """Arguments that were given as an object, as a string that holds one, or not at all."""
    if not text:
        return "{}"
    value = parsed(text)
    if isinstance(value, str):
        text, value = value, parsed(value or "{}")
    if not isinstance(value, dict):
        raise Mismatch
    return text or "{}"


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
