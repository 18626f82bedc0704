"""An assistant's text taken apart while it streams: content, reasoning, tool calls.

Owns the interface that all chat shapes use and the parser for text that is all content. It does not know shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of the tool call `index`: `id` and `name` on its first piece, then more of `arguments` (JSON text)."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Delta:
    """What one piece of text adds. Exactly one of the three is set."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """The answer so far."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        if call := delta.tool_call:
            if call.index == len(self.tool_calls):
                self.tool_calls.append(ToolCall(call.id, call.name))
            self.tool_calls[call.index].arguments += call.arguments


class ChatOutput(Protocol):
    """Fed with the text of one answer in pieces; together the deltas hold all of it."""

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """What was held back, when no more text will come."""


class PlainOutput:
    """All text is content."""

    def push(self, text: str) -> list[Delta]:
        return [Delta(content=text)] if text else []

    def finish(self) -> list[Delta]:
        return []


@dataclass(frozen=True)
class OutputFormat:
    """How answers to one conversation are to be read. `template` is the Jinja source that made the prompt and
    `prompt_end` the prompt's last characters, which may have opened a reasoning block already."""

    reads_tool_calls: ClassVar[bool] = False

    template: str = ""
    prompt_end: str = ""
    reasoning_format: str = "deepseek"
    tools: tuple[dict[str, Any], ...] = ()
    parallel_tool_calls: bool = True
    stops: tuple[str, ...] = ()

    def reader(self) -> ChatOutput:
        """A reader for one answer."""
        return PlainOutput()
