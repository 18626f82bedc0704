"""Conversations as OpenAI's clients send them: checked, and rendered into a prompt by the chat template.

Owns prefill (a last assistant message that is to be continued) and what templates are told. It does not know how
answers are read (`launcher/chat_output`).
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bloomery.launcher.chat_output import OutputFormat, check_tools, generic_instruction, tool_choice
from bloomery.launcher.http.backend import Backend
from bloomery.launcher.http.errors import invalid
from bloomery.launcher.http.fields import flag, reasoning_budget, shown, string
from bloomery.launcher.http.settings import ServerSettings
from bloomery.runtime.chat_template import CHATML
from bloomery.runtime.errors import RequestError

MAX_MESSAGES = 1 << 16
MEDIA = {"image_url": "image", "input_audio": "audio", "input_video": "video"}
REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")


@dataclass(frozen=True)
class Conversation:
    """A prompt ready to be tokenised, and how its answer is to be read."""

    prompt: str
    format: OutputFormat

    def settings(self) -> dict[str, Any]:
        """What `generation_settings` says of it."""
        return {"reasoning_format": self.format.reasoning_format, "reasoning_in_content": False}


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a request. Raises RequestError that names the message at fault."""
    if messages is None:
        raise invalid("'messages' is required", field="messages")
    if not isinstance(messages, list):
        raise invalid(f"'messages' must be an array, found {shown(messages)}", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid(f"{len(messages)} messages, at most {MAX_MESSAGES} are allowed", field="messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object, found {shown(message)}", field=where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise invalid(f"{where}.role must be a string, found {shown(role)}", field=f"{where}.role")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls must be an array", field=f"{where}.tool_calls")
    if "content" not in message and not (role == "assistant" and calls):
        raise invalid(f"{where} must contain 'content'", field=f"{where}.content")
    if not (content is None or isinstance(content, (str, list))):
        raise invalid(f"{where}.content must be a string or an array, found {shown(content)}", field=f"{where}.content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict):
                raise invalid(f"{where}.content holds {shown(part)}, expected objects", field=f"{where}.content")
            kind = part.get("type")
            if kind in MEDIA:
                # 500 as in llama-server, whose clients look for it
                raise RequestError("internal", f"{MEDIA[kind]} input is not supported by this model")
            if kind != "text" or not isinstance(part.get("text"), str):
                raise invalid(f"{where}.content holds an unsupported part: {shown(part)}", field=f"{where}.content")
    return message


def text_of(content: Any, joint: str = "\n") -> str:
    """Content as one text."""
    if isinstance(content, list):
        return joint.join(part["text"] for part in content)
    return content or ""


def template_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: the arguments of tool calls as objects, names where they belong."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_template_call(call) for call in message["tool_calls"]]}


def _template_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"a tool call must have a function with a name, found {shown(call)}", field="tool_calls")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # else it is the model's own text, shown as it was
            arguments = json.loads(arguments or "{}")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def template_source(backend: Backend, settings: ServerSettings) -> str:
    """Jinja source of the template in use: the operator's, the file's, or ChatML."""
    return settings.chat_template or backend.facts.chat_template or CHATML


def template_variables(settings: ServerSettings, body: dict[str, Any], tools: list[Any]) -> dict[str, Any]:
    """What the template is told besides messages: chat_template_kwargs over the operator's, thinking, tools."""
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise invalid("chat_template_kwargs must be an object", field="chat_template_kwargs")
    variables = {**settings.chat_template_kwargs, **(given or {})}
    thinking = variables.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise invalid('invalid type for "enable_thinking" (expected boolean)', field="chat_template_kwargs")
    effort = string(body, "reasoning_effort")
    if effort == "none":
        variables["enable_thinking"] = False
        variables.pop("reasoning_effort", None)
    elif effort:
        variables["reasoning_effort"] = effort
    # a budget of none is also said to templates, which may know how to do without
    variables.setdefault(
        "enable_thinking", settings.reasoning != "off" and reasoning_budget(body, settings.defaults) != 0
    )
    if tools:
        variables["tools"] = tools
    return {**_older_names(tools), **variables}


def _older_names(tools: list[Any]) -> dict[str, Any]:
    """Names by which templates from before `strftime_now` and `tools` ask for the date and the tools."""
    now = datetime.now()
    return {
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y %H:%M:%S"),
        "functions": json.dumps(tools, indent=2, ensure_ascii=False) if tools else "",
    }


async def read_conversation(backend: Backend, settings: ServerSettings, body: dict[str, Any]) -> Conversation:
    """The prompt of a chat request. Raises RequestError."""
    messages = [template_message(message) for message in check_messages(body.get("messages"))]
    given, choice = body.get("tools"), "auto"
    tools: tuple[dict[str, Any], ...] = ()
    if given:
        if not settings.jinja:
            raise invalid("tools param requires --jinja flag", field="tools")
        tools = check_tools(given)
        choice = tool_choice(body.get("tool_choice"), tools)
        tools = () if choice == "none" else tools
    parallel = flag(body, "parallel_tool_calls", True)
    template = template_source(backend, settings)
    if OutputFormat(template=template, tools=tools).is_generic:
        messages = _with_instruction(messages, generic_instruction(tools, parallel))
    add_prompt, continued = _continuation(settings, body, messages)
    prefill = ""
    shown_messages = messages
    if continued:
        prefill, shown_messages, add_prompt = text_of(messages[-1].get("content"), "\n\n"), messages[:-1], True
    variables = template_variables(settings, body, list(tools))
    prompt = await backend.apply_template(shown_messages, template, add_prompt, variables)
    reasoning = string(body, "reasoning_format", settings.reasoning_format)
    if reasoning not in REASONING_FORMATS:
        raise invalid(f"reasoning_format must be one of {', '.join(REASONING_FORMATS)}", field="reasoning_format")
    return Conversation(
        prompt + prefill,
        OutputFormat(
            template=template,
            prompt_end=(prompt + prefill)[-200:],
            reasoning_format=reasoning,
            tools=tools,
            parallel_tool_calls=parallel,
            choice=choice,
        ),
    )


def _with_instruction(messages: list[dict[str, Any]], instruction: str) -> list[dict[str, Any]]:
    """The conversation with more text in its system message."""
    if messages and messages[0]["role"] == "system":
        text = text_of(messages[0].get("content")) + "\n\n" + instruction
        return [{**messages[0], "content": text}, *messages[1:]]
    return [{"role": "system", "content": instruction}, *messages]


def _continuation(settings: ServerSettings, body: dict[str, Any], messages: list[dict[str, Any]]) -> tuple[bool, bool]:
    """Whether the template adds the beginning of an answer, and whether the last message is continued instead."""
    add_prompt = flag(body, "add_generation_prompt", True)
    last_is_ours = bool(messages) and messages[-1]["role"] == "assistant"
    continued = body.get("continue_final_message") not in (None, False)
    if continued and add_prompt:
        raise invalid("Cannot set both add_generation_prompt and continue_final_message to true.")
    if not continued and settings.prefill_assistant and last_is_ours:
        if len(messages) > 1 and messages[-2]["role"] == "assistant":
            raise invalid("Cannot have 2 or more assistant messages at the end of the list.", field="messages")
        continued = True
    if continued and not last_is_ours:
        raise invalid("continue_final_message: the last message is not the assistant's", field="messages")
    if continued and messages[-1].get("tool_calls"):
        raise invalid("Cannot continue an assistant message that contains tool calls.", field="messages")
    return add_prompt, continued
