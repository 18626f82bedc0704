"""OpenAI's /v1/responses, by way of a chat request.

Owns both translations: input items into messages, the answer into output items and their events.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bloomery.launcher.chat_output import Delta, Message, OutputFormat
from bloomery.launcher.http.chat_shape import Reader
from bloomery.launcher.http.endpoints import answer, chat_jobs, count_tokens, json_body
from bloomery.launcher.http.errors import error_object, invalid, unsupported
from bloomery.launcher.http.fields import shown, string
from bloomery.launcher.http.generation import Answer, Begun, Ended, Grown, Processed, Step
from bloomery.launcher.http.shapes import Event, random_id
from bloomery.runtime.errors import RequestError

if TYPE_CHECKING:
    from bloomery.launcher.http.server import Server


async def create(server: Server, request: Request) -> Response:
    """POST /v1/responses."""
    body = chat_body(await json_body(request, server.settings.max_body))
    jobs, conversation = await chat_jobs(server, body)
    shape = ResponseShape(server.model_name, conversation.format)
    return await answer(server, request, jobs, shape, stream=jobs[0].values["stream"])


async def input_tokens(server: Server, request: Request) -> Response:
    """POST /v1/responses/input_tokens."""
    body = chat_body(await json_body(request, server.settings.max_body))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": await count_tokens(server, body)})


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same request as a chat request."""
    if "input" not in body:
        raise invalid("'input' is required", field="input")
    if any(body.get(name) not in (None, 1) for name in ("n", "n_cmpl")):
        raise invalid("n: a response has one answer", "leave it out", field="n")
    if body.get("previous_response_id"):
        raise unsupported(
            "previous_response_id: this server keeps no responses", "send the whole conversation as input"
        )
    converted = {key: value for key, value in body.items() if key not in ("input", "instructions", "text", "tools")}
    messages: list[dict[str, Any]] = []
    if instructions := string(body, "instructions"):
        messages.append({"role": "system", "content": instructions})
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _add_item(messages, item)
    else:
        raise invalid(f"'input' must be a string or an array of items, found {shown(given)}", field="input")
    converted["messages"] = messages
    if body.get("max_output_tokens") is not None:
        converted["max_tokens"] = body["max_output_tokens"]
    if tools := body.get("tools"):
        converted["tools"] = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and "name" in choice:
        converted["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and isinstance(reasoning.get("effort"), str):
        converted["reasoning_effort"] = reasoning["effort"]
    text = body.get("text")
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        converted["response_format"] = _response_format(text["format"])
    return converted


def _response_format(format: dict[str, Any]) -> dict[str, Any]:
    if format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": {"name": format.get("name"), "schema": format.get("schema", {})}}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise invalid(f"'type' of tool must be 'function', found {shown(tool)}", field="tools")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


def _add_item(messages: list[dict[str, Any]], item: Any) -> None:
    """Appends the message of an input item; what an assistant says and calls in a row is one message."""
    if not isinstance(item, dict):
        raise invalid(f"'input' holds {shown(item)}, expected items", field="input")
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "message" and role in ("user", "system", "developer"):
        messages.append({"role": "system" if role == "developer" else role, "content": _parts(item.get("content"))})
        return
    if kind == "function_call_output":
        output = item.get("output")
        content = _parts(output) if isinstance(output, list) else str(output if output is not None else "")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id", ""), "content": content})
        return
    if not (kind in ("function_call", "reasoning") or (kind == "message" and role == "assistant")):
        raise invalid(f"'input' holds an item of type {shown(kind)} and role {shown(role)}", field="input")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    message = messages[-1]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
        message.setdefault("tool_calls", []).append(
            {"id": item.get("call_id", ""), "type": "function", "function": function}
        )
    elif kind == "reasoning":
        parts = item.get("content")
        texts = [part.get("text", "") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        message["reasoning_content"] = message.get("reasoning_content", "") + "".join(map(str, texts))
    else:
        parts = _parts(item.get("content"))
        message["content"] += parts if isinstance(parts, str) else "".join(part["text"] for part in parts)


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"content must be a string or an array, found {shown(content)}", field="input")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            parts.append({"type": "text", "text": part["refusal"]})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {}})
        else:
            raise invalid(f"content holds an unsupported part: {shown(part)}", field="input")
    return parts


class ResponseShape:
    """Output items: reasoning, a message, function calls. Events are numbered as OpenAI numbers them."""

    show_prompt = False
    last_words: tuple[str, ...] = ()

    def __init__(self, model: str, format: OutputFormat) -> None:
        self._model, self._created = model, int(time.time())
        self._id, self._message_id, self._reasoning_id = random_id("resp_"), random_id("msg_"), random_id("rs_")
        self._reader = Reader(format)
        self._order: list[str] = []  # "reasoning", "message", "call 0", ... as they began
        self._number = 0
        self._begun = False

    def events(self, step: Step) -> list[Event]:
        answer, values = step.answer, step.answer.job.values
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            events += [self._event(f"response.{name}", response=self._head()) for name in ("created", "in_progress")]
        if isinstance(step, Processed) and values["return_progress"]:
            events = events or [self._event("response.in_progress", response=self._head())]
            events[-1][1]["prompt_progress"] = answer.progress()
            if values["timings_per_token"]:
                events[-1][1]["timings"] = answer.timings()
        if isinstance(step, (Begun, Processed)):
            return events
        for delta in self._reader.read(step):
            events += self._delta(delta)
        if events and isinstance(step, Grown) and values["timings_per_token"]:
            events[-1][1]["timings"] = answer.timings()
        if isinstance(step, Ended):
            events += self._end(answer)
        return events

    def whole(self, answers: list[Answer]) -> Any:
        message = self._reader.message(answers[0])
        self._order = [
            *(["reasoning"] if message.reasoning else []),
            *(["message"] if message.content else []),
            *(f"call {index}" for index in range(len(message.tool_calls))),
        ]
        return self._response(answers[0], message)

    def failure(self, error: RequestError) -> Event:
        return self._event("error", **error_object(error))

    def _event(self, kind: str, **data: Any) -> Event:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number - 1, **data}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": "in_progress",
            "output": [],
        }

    def _delta(self, delta: Delta) -> list[Event]:
        if call := delta.tool_call:
            events = self._begin(f"call {call.index}")
            place = self._order.index(f"call {call.index}")
            item = self._item(f"call {call.index}", self._reader.messages[0])["id"]
            kind = "response.function_call_arguments.delta"
            more = [self._event(kind, output_index=place, item_id=item, delta=call.arguments)] if call.arguments else []
            return events + more
        kind, text = ("reasoning", delta.reasoning) if delta.reasoning else ("message", delta.content)
        events = self._begin(kind)
        where = {"output_index": self._order.index(kind), "content_index": 0}
        if kind == "reasoning":
            return [
                *events,
                self._event("response.reasoning_text.delta", item_id=self._reasoning_id, delta=text, **where),
            ]
        data = {"item_id": self._message_id, "delta": text, "logprobs": [], **where}
        return [*events, self._event("response.output_text.delta", **data)]

    def _begin(self, kind: str) -> list[Event]:
        if kind in self._order:
            return []
        self._order.append(kind)
        place = len(self._order) - 1
        item = self._item(kind, self._reader.messages[0]) | {"status": "in_progress"}
        item["arguments" if kind.startswith("call") else "content"] = "" if kind.startswith("call") else []
        events = [self._event("response.output_item.added", output_index=place, item=item)]
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            where = {"output_index": place, "content_index": 0}
            events.append(self._event("response.content_part.added", item_id=self._message_id, part=part, **where))
        return events

    def _end(self, answer: Answer) -> list[Event]:
        message = self._reader.messages[0]
        events: list[Event] = []
        for place, kind in enumerate(self._order):
            item = self._item(kind, message)
            if kind == "message":
                where = {"item_id": self._message_id, "output_index": place, "content_index": 0}
                events += [
                    self._event("response.output_text.done", text=message.content, logprobs=[], **where),
                    self._event("response.content_part.done", part=item["content"][0], **where),
                ]
            elif kind.startswith("call"):
                where = {"item_id": item["id"], "output_index": place, "name": item["name"]}
                data = {"arguments": item["arguments"], **where}
                events.append(self._event("response.function_call_arguments.done", **data))
            events.append(self._event("response.output_item.done", output_index=place, item=item))
        kind = "response.completed" if answer.stopped or not answer.truncated else "response.incomplete"
        done = self._event(kind, response=self._response(answer, message))
        done[1]["timings"] = answer.timings()
        return [*events, done]

    def _item(self, kind: str, message: Message) -> dict[str, Any]:
        """An output item with all that is known of it."""
        if kind == "reasoning":
            content = [{"type": "reasoning_text", "text": message.reasoning}]
            head = {"id": self._reasoning_id, "type": "reasoning", "status": "completed"}
            return head | {"summary": [], "content": content, "encrypted_content": ""}
        if kind == "message":
            part = {"type": "output_text", "annotations": [], "logprobs": [], "text": message.content}
            head = {"id": self._message_id, "type": "message", "status": "completed", "role": "assistant"}
            return head | {"content": [part]}
        call = message.tool_calls[int(kind.split()[1])]
        return {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "status": "completed",
            "arguments": call.arguments,
            "call_id": call.id,
            "name": call.name,
        }

    def _response(self, answer: Answer, message: Message) -> dict[str, Any]:
        incomplete = answer.truncated and not answer.stopped
        return self._head() | {
            "completed_at": int(time.time()),
            "status": "incomplete" if incomplete else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "output": [self._item(kind, message) for kind in self._order],
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "output_tokens": answer.generated,
                "total_tokens": answer.prompt_tokens + answer.generated,
                "input_tokens_details": {"cached_tokens": answer.cached},
                "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            },
        }
