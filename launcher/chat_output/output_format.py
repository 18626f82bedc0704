"""How the answers to one conversation are read and what keeps them readable: the way into this package.

Owns the choice of the reader and of the constraint for one request. Does not know HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from bloomery.launcher.chat_output.deltas import ChatOutput
from bloomery.launcher.chat_output.detection import opens_reasoning, think_tags, tool_format
from bloomery.launcher.chat_output.reader import Reader
from bloomery.launcher.chat_output.tool_formats import ToolFormat
from bloomery.launcher.chat_output.tool_grammar import ToolGrammar, generic_schema, json_rule
from bloomery.runtime.errors import RequestError
from bloomery.runtime.requests import Constraint, Reasoning


@dataclass(frozen=True)
class OutputFormat:
    """`template` is the Jinja source that made the prompt and `prompt_end` the prompt's last characters, which may have
    opened reasoning already. `tools` are OpenAI's, checked by `check_tools`; `choice` is "auto", "required" or the name
    of the tool that has to be called."""

    reads_tool_calls: ClassVar[bool] = True

    template: str = ""
    prompt_end: str = ""
    reasoning_format: str = "deepseek"
    tools: tuple[dict[str, Any], ...] = ()
    parallel_tool_calls: bool = True
    stops: tuple[str, ...] = ()
    choice: str = "auto"

    @property
    def form(self) -> ToolFormat | None:
        """The form of tool calls; None if there are no tools."""
        return tool_format(self.template) if self.tools else None

    @property
    def is_generic(self) -> bool:
        """Whether the template knows of no tools, so that `generic_instruction` has to tell of them."""
        return self.form is not None and self.form.name == "generic"

    @property
    def _tags(self) -> tuple[str, str]:
        return think_tags(self.template, self.prompt_end)

    @property
    def _opened(self) -> bool:
        return opens_reasoning(self.prompt_end, self._tags[0])

    def reader(self) -> ChatOutput:
        """A reader for one answer."""
        return Reader(
            self.form,
            self.tools,
            None if self.reasoning_format == "none" else self._tags,
            opened=self._opened,
            legacy=self.reasoning_format == "deepseek-legacy",
        )

    def reasoning(self, budget: int = -1, message: str = "") -> Reasoning:
        """How an answer's reasoning is marked, for who generates it; `budget` and `message` are Reasoning's."""
        return Reasoning(self._tags[0], (self._tags[1],), budget, message)

    def shown(self) -> tuple[str, ...]:
        """Strings of the form and of reasoning. Where the vocabulary has one of them as a single control token, it has
        to be shown in the text (`GenerationRequest.shown_tokens`)."""
        marks = (*self.form.openers, *self.form.marks) if self.form else ()
        return (*self._tags, *marks)

    def tool_constraint(self) -> Constraint | None:
        """What keeps calls well-formed: from the beginning of a call on, or from the beginning of the answer on if one
        has to come. RequestError for a schema that cannot be enforced where it has to be."""
        form = self.form
        if form is None:
            return None
        forced = self.choice != "auto"
        tools = [tool for tool in self.tools if self.choice in ("auto", "required", tool["function"]["name"])]
        if form.name == "generic":
            schema = generic_schema(tools, forced, self.parallel_tool_calls, forced)
            return self.after_reasoning(Constraint(json_schema=schema))
        if not forced and form.starts:
            return None  # calls have no beginning that text cannot have
        grammar = ToolGrammar(form.name, self.template, tools, forced)
        if forced:
            reasoning = self._tags if self._reasons else None
            lark = grammar.grammar(parallel=self.parallel_tool_calls, reasoning=reasoning, opened=self._opened)
            return Constraint(lark=lark)
        return Constraint(lark=grammar.grammar(parallel=self.parallel_tool_calls), triggers=form.openers[:1])

    @property
    def _reasons(self) -> bool:
        return self._opened or self._tags[1] in self.template

    def after_reasoning(self, constraint: Constraint) -> Constraint:
        """A constraint of the answer's content, when the prompt has opened reasoning: that comes first and is free."""
        if not self._opened or constraint.json_schema is None:
            return constraint
        schema = constraint.json_schema
        rule = json_rule(schema) if isinstance(schema, dict) else f"%json {str(schema).lower()}"
        end = "".join(f"\\x{{{ord(char):X}}}" for char in self._tags[1])
        lark = f"start: think blank answer\nthink[lazy]: /(?s:.*){end}/\nblank: /[ \\n\\t]*/\nanswer: {rule}\n"
        return Constraint(lark=lark)


def check_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """OpenAI's `tools`. RequestError("invalid_request") that names the tool at fault."""
    if not isinstance(tools, list):
        raise _invalid("tools must be an array", "tools")
    names = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise _invalid(f"{where} must be of type function and have a function", where)
        name = function.get("name")
        if not isinstance(name, str) or not name or name in names:
            raise _invalid(f"{where}.function.name must be a text that no other tool has", f"{where}.function.name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise _invalid(f"{where}.function.parameters must be an object", f"{where}.function.parameters")
        names.add(name)
    return tuple(tools)


def tool_choice(choice: Any, tools: tuple[dict[str, Any], ...]) -> str:
    """OpenAI's `tool_choice` as "none", "auto", "required" or the name of a tool. RequestError otherwise."""
    if choice in (None, "auto", "none", "required"):
        return choice or "auto"
    if choice == "any":
        return "required"
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in {tool["function"]["name"] for tool in tools}:
        raise _invalid("tool_choice must be auto, none, required or one of the tools", "tool_choice")
    return str(name)


def generic_instruction(tools: tuple[dict[str, Any], ...], parallel: bool) -> str:
    """What a model whose template knows of no tools is told, in a system message."""
    call = (
        '{"tool_calls": [{"name": ..., "arguments": {...}}, ...]}'
        if parallel
        else ('{"tool_call": {"name": ..., "arguments": {...}}}')
    )
    listed = "\n".join(quoted_tool(tool) for tool in tools)
    return (
        f"You can call these functions, given as JSON schemas, one a line:\n{listed}\n"
        f'Answer with one JSON object: {call} to call functions, or {{"response": "..."}} to reply to the user.'
    )


def quoted_tool(tool: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in tool["function"].items() if key != "strict"}, ensure_ascii=False)


def _invalid(message: str, field: str) -> RequestError:
    return RequestError("invalid_request", message, f"correct {field}", field=field)
