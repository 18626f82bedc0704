"""Grammars that keep tool calls well-formed: the calls of each form, with arguments of the tools' schemas.

Owns the texts between names and arguments, as a reader of that form takes them. Grammars are in llguidance's dialect of
Lark. Knows no requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from bloomery.runtime.constraint import WHITESPACE, schema_problem
from bloomery.runtime.errors import RequestError
from bloomery.runtime.json_schema import enforceable

Function = Mapping[str, Any]


class ToolGrammar:
    """Rules for the calls of some tools. `strict`: a schema that cannot be enforced is refused, otherwise the arguments
    of such a tool are any JSON object."""

    def __init__(self, form: str, template: str, tools: Iterable[Mapping[str, Any]], strict: bool) -> None:
        self._form, self._template = form, template
        self._rules: list[str] = []
        functions = [tool["function"] for tool in tools]
        self._functions = [(str(function["name"]), self._schema(function, strict)) for function in functions]

    def grammar(self, *, parallel: bool, reasoning: tuple[str, str] | None = None, opened: bool = False) -> str:
        """One call, or one and more if `parallel`; after reasoning, if its tags are given and it comes."""
        calls = self._calls(parallel)
        before = ""
        if reasoning:
            before = "think blank " if opened else "(think_open think blank)? "
            self._rules.append(f"think_open: {quoted(reasoning[0])}")
            self._rules.append(f"think[lazy]: /(?s:.*){_escaped(reasoning[1])}/")
            self._rules.append("blank: /[ \\n\\t]*/")
        return "\n".join([f"start: {before}calls", f"calls: {calls}", *dict.fromkeys(self._rules)]) + "\n"

    def _schema(self, function: Function, strict: bool) -> dict[str, Any]:
        schema = function.get("parameters") or {}
        problem = schema_problem(schema) if isinstance(schema, dict) else "parameters must be a map"
        if problem and (strict or function.get("strict")):
            raise RequestError(
                "invalid_request",
                f"tools: the parameters of {function['name']} cannot be enforced: {problem}",
                "simplify the schema",
                field="tools",
            )
        return {"type": "object"} if problem else enforceable({"type": "object", **schema})

    def _calls(self, parallel: bool) -> str:
        """The body of the rule `calls`."""
        match self._form:
            case "hermes":
                return self._repeated('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n", parallel)
            case "llama3":
                return self._repeated('{"name": ', ', "parameters": ', "}", "; ", parallel)
            case "mistral" if "[ARGS]" in self._template:
                return self._repeated("[TOOL_CALLS]", "[ARGS]", "", "", parallel, quote=False)
            case "mistral":
                inner = self._repeated('{"name": ', ', "arguments": ', "}", ", ", parallel)
                return f'"[TOOL_CALLS][" {inner} "]"'
            case "deepseek":
                begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
                if "```json" in self._template:
                    begin, sep, end = begin + "function<｜tool▁sep｜>", "\n```json\n", "\n```" + end
                else:
                    sep = "<｜tool▁sep｜>"
                inner = self._repeated(begin, sep, end, "", parallel, quote=False)
                return f'"<｜tool▁calls▁begin｜>" {inner} "<｜tool▁calls▁end｜>"'
            case "qwen-xml":
                return self._marked(parallel, "<tool_call>\n<function={}>\n", "</function>\n</tool_call>", "\n")
            case "dsml":
                space = " " if "<｜DSML｜ " in self._template else ""
                block = " calls" if space else "tool_calls" if "tool_calls" in self._template else "function_calls"
                head, tail = f'<｜DSML｜{space}invoke name="{{}}">\n', f"</｜DSML｜{space}invoke>\n"
                inner = self._marked(parallel, head, tail, "", space)
                return f"{quoted(f'<｜DSML｜{block}>{chr(10)}')} {inner} {quoted(f'</｜DSML｜{block}>')}"
        raise AssertionError(self._form)

    def _repeated(self, begin: str, middle: str, end: str, between: str, parallel: bool, *, quote: bool = True) -> str:
        """Calls whose arguments are one JSON object."""
        names = []
        for index, (name, schema) in enumerate(self._functions):
            head = f"{begin}{json.dumps(name) if quote else name}{middle}"
            tail = f" {quoted(end)}" if end else ""
            self._rules.append(f"call_{index}: {quoted(head)} args_{index}{tail}")
            self._rules.append(f"args_{index}: {json_rule(schema)}")
            names.append(f"call_{index}")
        return self._one_or_more(names, between, parallel)

    def _one_or_more(self, names: list[str], between: str, parallel: bool) -> str:
        self._rules.append(f"call: {' | '.join(names)}")
        return f"call ({quoted(between)} call)*" if parallel and between else "call+" if parallel else "call"

    def _marked(self, parallel: bool, begin: str, end: str, between: str, space: str | None = None) -> str:
        """Calls whose parameters are marked one by one."""
        names = []
        for index, (name, schema) in enumerate(self._functions):
            parts = [quoted(begin.format(name))]
            required = schema.get("required") or ()
            for key, kind in (schema.get("properties") or {}).items():
                self._rules.append(f"p_{index}_{len(parts)}: {self._parameter(key, kind, schema, space)}")
                parts.append(f"p_{index}_{len(parts)}{'' if key in required else '?'}")
            self._rules.append(f"call_{index}: {' '.join(parts)} {quoted(end)}")
            names.append(f"call_{index}")
        return self._one_or_more(names, between, parallel)

    def _parameter(self, key: str, kind: Any, schema: Mapping[str, Any], space: str | None) -> str:
        """One parameter between its marks: text as it is, anything else as JSON."""
        kind = kind if isinstance(kind, dict) else {}
        enum = kind.get("enum")
        texts = enum if isinstance(enum, list) and enum and all(isinstance(value, str) for value in enum) else None
        is_text = texts is not None or kind.get("type") == "string"
        if space is None:
            begin, end = f"<parameter={key}>\n", "\n</parameter>\n"
        else:
            flag = "true" if is_text else "false"
            begin = f'<｜DSML｜{space}parameter name="{key}" string="{flag}">'
            end = f"</｜DSML｜{space}parameter>\n"
        if texts is not None:
            return f"{quoted(begin)} ({' | '.join(map(quoted, texts))}) {quoted(end)}"
        if is_text:
            limit = kind.get("maxLength")
            bounds = f"{{0,{limit}}}" if type(limit) is int and limit >= 0 else "*"
            rule = f"text_{len(self._rules)}"
            self._rules.append(f"{rule}[lazy]: /(?s:.{bounds}){_escaped(end)}/")
            return f"{quoted(begin)} {rule}"
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return f"{quoted(begin)} {json_rule({**shared, **kind})} {quoted(end)}"


def generic_schema(tools: Iterable[Mapping[str, Any]], strict: bool, parallel: bool, required: bool) -> dict[str, Any]:
    """The JSON schema of an answer in the generic form."""
    alternatives = []
    for tool in tools:
        function = tool["function"]
        schema = ToolGrammar("generic", "", [tool], strict)._functions[0][1]
        properties = {"name": {"const": function["name"]}, "arguments": schema}
        alternatives.append(_object(properties))
    call: dict[str, Any] = {"anyOf": alternatives}
    if parallel:
        answer = _object({"tool_calls": {"type": "array", "items": call, "minItems": 1}})
    else:
        answer = _object({"tool_call": call})
    return answer if required else {"anyOf": [answer, _object({"response": {"type": "string"}})]}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def quoted(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """The text as part of a regular expression between slashes."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):X}}}" for char in text)
