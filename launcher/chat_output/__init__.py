"""An assistant's text taken apart while it streams: reasoning, content, tool calls; and what keeps it readable.

Pure functions of text: no sockets, no files. For a server:

    tools = check_tools(body.get("tools") or [])
    choice = tool_choice(body.get("tool_choice"), tools)            # "none": pass no tools
    format = OutputFormat(template, prompt[-200:], reasoning_format, tools, parallel_tool_calls, choice=choice)
    if format.is_generic: tell the model generic_instruction(tools, parallel) in a system message
    request = GenerationRequest(..., constraint=format.tool_constraint(), shown_tokens=...)
    reader = format.reader()                                        # one an answer
    for text in stream: deltas = reader.push(text)                  # Delta: content, reasoning or tool_call
    deltas = reader.finish()

`shown_tokens` are the ids of those strings of `format.shown()` that tokenise, special tokens parsed, to a single
token. A constraint of the content (response_format) goes through `format.after_reasoning`. Concatenated deltas do not
depend on how the text was cut into pieces; a text that is no call after all is content, to the last character.
"""

from bloomery.launcher.chat_output.deltas import ChatOutput, Delta, Message, ToolCall, ToolCallDelta
from bloomery.launcher.chat_output.output_format import OutputFormat, check_tools, generic_instruction, tool_choice

__all__ = [
    "ChatOutput",
    "Delta",
    "Message",
    "OutputFormat",
    "ToolCall",
    "ToolCallDelta",
    "check_tools",
    "generic_instruction",
    "tool_choice",
]
