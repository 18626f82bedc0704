"""Anthropic's /v1/messages and /v1/messages/count_tokens, by way of a chat request in OpenAI's form.

Owns both translations: the request into messages and tools, the answer into content blocks and their events.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bloomery.launcher.chat_output import Delta, Message, OutputFormat
from bloomery.launcher.http.chat_shape import Reader
from bloomery.launcher.http.endpoints import answer, chat_jobs, json_body
from bloomery.launcher.http.endpoints import count_tokens as count_chat_tokens
from bloomery.launcher.http.errors import anthropic_error, invalid
from bloomery.launcher.http.fields import shown, string_list
from bloomery.launcher.http.generation import Answer, Begun, Ended, Grown, Step
from bloomery.launcher.http.shapes import Event, random_id
from bloomery.runtime.errors import RequestError

if TYPE_CHECKING:
    from bloomery.launcher.http.server import Server

PASSED = [
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repeat_penalty",
    "cache_prompt",
    "id_slot",
    "timings_per_token",
    "return_progress",
    "chat_template_kwargs",
    "reasoning_format",
    "reasoning_effort",
    "reasoning_budget_tokens",
    "reasoning_budget_message",
    "thinking_budget_tokens",
    "grammar",
    "json_schema",
    "response_format",
    "logit_bias",
    "ignore_eos",
]
NO_LIMIT = 4096


async def messages(server: Server, request: Request) -> Response:
    """POST /v1/messages."""
    body = openai_body(await json_body(request, server.settings.max_body))
    body.setdefault("max_tokens", NO_LIMIT)
    jobs, conversation = await chat_jobs(server, body)
    shape = AnthropicShape(server.model_name, conversation.format)
    return await answer(server, request, jobs, shape, stream=jobs[0].values["stream"])


async def count_tokens(server: Server, request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    body = openai_body(await json_body(request, server.settings.max_body))
    return JSONResponse({"input_tokens": await count_chat_tokens(server, body)})


def openai_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same request in OpenAI's form."""
    if "messages" not in body:
        raise invalid("'messages' is required", field="messages")
    given = body["messages"]
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise invalid(f"'messages' must be an array of objects, found {shown(given)}", field="messages")
    converted: list[dict[str, Any]] = []
    if system := _system(body.get("system")):
        converted.append({"role": "system", "content": system})
    for message in given:
        converted += _messages(message)
    result: dict[str, Any] = {name: body[name] for name in PASSED if name in body}
    result["messages"] = converted
    if body.get("max_tokens") is not None:
        result["max_tokens"] = body["max_tokens"]
    if stops := string_list(body, "stop_sequences"):
        result["stop"] = stops
    if tools := body.get("tools"):
        result["tools"] = _tools(tools)
        result |= _tool_choice(body.get("tool_choice"))
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") in ("enabled", "disabled", "adaptive"):
        variables = dict(result.get("chat_template_kwargs") or {})
        variables.setdefault("enable_thinking", thinking["type"] != "disabled")
        result["chat_template_kwargs"] = variables
        if thinking["type"] == "enabled" and thinking.get("budget_tokens") is not None:
            result.setdefault("thinking_budget_tokens", thinking["budget_tokens"])
    return result


def _system(system: Any) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    if not isinstance(system, list):
        raise invalid(f"system must be a string or an array of blocks, found {shown(system)}", field="system")
    texts = [block.get("text") for block in system if isinstance(block, dict) and block.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str))


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that one message makes: its own, then one for each tool result in it."""
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thinking = ""
    for block in content:
        if not isinstance(block, dict):
            raise invalid(f"content holds {shown(block)}, expected blocks", field="messages")
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": block.get("text")})
            case "image":
                parts.append({"type": "image_url", "image_url": {}})
            case "thinking":
                thinking += str(block.get("thinking", ""))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id", ""), "type": "function", "function": function})
            case "tool_result":
                result = _result(block.get("content"))
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": result})
            case other:
                raise invalid(f"content holds a block of type {shown(other)}", field="messages")
    own: dict[str, Any] = {"role": message.get("role"), "content": parts or ""}
    if calls:
        own["tool_calls"] = calls
    if thinking:
        own["reasoning_content"] = thinking
    return ([own] if parts or calls or thinking else []) + results


def _result(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    blocks = content if isinstance(content, list) else []
    if any(isinstance(block, dict) and block.get("type") == "image" for block in blocks):
        return [{"type": "image_url", "image_url": {}}]
    return "".join(str(block.get("text", "")) for block in blocks if isinstance(block, dict))


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid(f"tools must be an array of objects, found {shown(tools)}", field="tools")
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name", ""),
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in tools
    ]


def _tool_choice(choice: Any) -> dict[str, Any]:
    kind = choice.get("type") if isinstance(choice, dict) else None
    parallel = {"parallel_tool_calls": False} if kind and choice.get("disable_parallel_tool_use") else {}
    match kind:
        case "any":
            return {"tool_choice": "required", **parallel}
        case "tool":
            return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **parallel}
        case "none":
            return {"tool_choice": "none"}
    return parallel


class AnthropicShape:
    """Content blocks come one after the other: thinking, text, tool calls, in the order of the text."""

    show_prompt = False
    last_words: tuple[str, ...] = ()

    def __init__(self, model: str, format: OutputFormat) -> None:
        self._model, self._id = model, random_id("msg_")
        self._reader = Reader(format)
        self._started = False
        self._open = ""  # kind of the open block; "tool 3" for the tool call 3
        self._index = -1

    def events(self, step: Step) -> list[Event]:
        if not isinstance(step, (Begun, Grown, Ended)):
            return []
        events: list[Event] = []
        if not self._started:
            self._started = True
            events.append(_event("message_start", message=self._message(step.answer, [], None)))
        if isinstance(step, Begun):
            return events
        for delta in self._reader.read(step):
            events += self._delta(delta)
        if isinstance(step, Ended):
            message = self._reader.messages[step.answer.job.index]
            if self._index < 0:  # an answer without text still has one block
                events += self._delta(Delta())
            events += self._close()
            reason = stop_reason(step.answer, message)
            final = step.answer.final
            change = {"stop_reason": reason, "stop_sequence": (final.stop if final else "") or None}
            events.append(_event("message_delta", delta=change, usage={"output_tokens": step.answer.generated}))
            events.append(_event("message_stop"))
        return events

    def whole(self, answers: list[Answer]) -> Any:
        message = self._reader.message(answers[0])
        if any(_object(call.arguments) is None for call in message.tool_calls):
            message = Message(answers[0].text)  # a call that was cut is no call: its text, as it came
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        for call in message.tool_calls:
            blocks.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments) or {}}
            )
        return self._message(answers[0], blocks, stop_reason(answers[0], message))

    def failure(self, error: RequestError) -> Event:
        return "error", anthropic_error(error)

    def _message(self, answer: Answer, blocks: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self._model,
            "stop_reason": reason,
            "stop_sequence": (answer.final.stop or None) if answer.final else None,
            "usage": {
                "cache_read_input_tokens": answer.cached,
                "input_tokens": answer.prompt_tokens - answer.cached,
                "output_tokens": answer.generated if answer.final else 0,
            },
        }

    def _delta(self, delta: Delta) -> list[Event]:
        if call := delta.tool_call:
            start = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            events = self._block(f"tool {call.index}", start)
            change = {"type": "input_json_delta", "partial_json": call.arguments}
            return events + ([self._change(change)] if call.arguments else [])
        if delta.reasoning:
            events = self._block("thinking", {"type": "thinking", "thinking": ""})
            return [*events, self._change({"type": "thinking_delta", "thinking": delta.reasoning})]
        events = self._block("text", {"type": "text", "text": ""})
        return events + ([self._change({"type": "text_delta", "text": delta.content})] if delta.content else [])

    def _block(self, kind: str, start: dict[str, Any]) -> list[Event]:
        """Opens a block unless it is the open one."""
        if kind == self._open:
            return []
        events = self._close()
        self._open, self._index = kind, self._index + 1
        return [*events, _event("content_block_start", index=self._index, content_block=start)]

    def _close(self) -> list[Event]:
        kind, self._open = self._open, ""
        if not kind:
            return []
        signature = [self._change({"type": "signature_delta", "signature": ""})] if kind == "thinking" else []
        return [*signature, _event("content_block_stop", index=self._index)]

    def _change(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=self._index, delta=delta)


def stop_reason(answer: Answer, message: Message) -> str:
    if not answer.stopped:
        return "max_tokens"
    if message.tool_calls:
        return "tool_use"
    return "stop_sequence" if answer.final and answer.final.stop else "end_turn"


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}


def _object(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None if they are no JSON object."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
