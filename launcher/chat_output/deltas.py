"""What an answer is made of, and what one piece of its text adds to it.

Owns the values that the readers of this package give to whoever shapes answers. Knows no format.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Protocol


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


def new_call_id() -> str:
    """32 letters and digits, as llama-server's."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(32))
