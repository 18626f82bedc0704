"""The endpoints that generate: from a JSON body to jobs and a shape, and the answer whole or as a stream.

Owns which fields each API adds to the common ones. It does not know routes (`app.py`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bloomery.launcher.chat_output import OutputFormat
from bloomery.launcher.http.chat_input import Conversation, read_conversation, template_source
from bloomery.launcher.http.chat_shape import ChatShape
from bloomery.launcher.http.constraints import read_constraint
from bloomery.launcher.http.errors import invalid
from bloomery.launcher.http.fields import RANDOM_SEED, flag, shown, string, string_list
from bloomery.launcher.http.generation import Step, run_jobs, whole_answers
from bloomery.launcher.http.parameters import Job, check_room, read_biases, read_prompts, read_values
from bloomery.launcher.http.shapes import NativeShape, Shape, TextShape
from bloomery.launcher.http.streaming import EventStream, until_disconnect
from bloomery.runtime.errors import RequestError
from bloomery.runtime.requests import Constraint, Reasoning

if TYPE_CHECKING:
    from bloomery.launcher.http.server import Server

Body = dict[str, Any]


async def whole_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises RequestError if it is larger than `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit:
            raise too_large(limit)
    return bytes(data)


async def json_body(request: Request, limit: int) -> Body:
    """The request's JSON object. Raises RequestError for anything else."""
    data = await whole_body(request, limit)
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, found {shown(body)}")
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def too_large(limit: int) -> RequestError:
    return RequestError("too_large", f"the body is larger than {limit} bytes", limit=limit)


async def jobs_of(
    server: Server,
    body: Body,
    values: Body,
    prompts: Sequence[tuple[int, ...]],
    constraint: Constraint | None,
    shown_tokens: tuple[int, ...] = (),
    reasoning: Reasoning | None = None,
    **extra: Any,
) -> list[Job]:
    """One job for each prompt and choice; choice i of a prompt has the seed plus i."""
    biases = await read_biases(server.backend, body, server.settings.defaults)
    count = values["n_cmpl"]
    if count > server.backend.facts.slots:
        raise invalid(f"n must be from 1 to {server.backend.facts.slots} (the slots), found {count}", field="n")
    jobs: list[Job] = []
    for prompt in prompts:
        check_room(prompt, server.backend.facts.context)
        for choice in range(count):
            seed = values["seed"] if values["seed"] == RANDOM_SEED else (values["seed"] + choice) % 2**32
            slot = values["id_slot"] if len(prompts) * count == 1 else -1
            own = {**values, "seed": seed, "id_slot": slot}
            jobs.append(Job(len(jobs), prompt, own, biases, constraint, shown_tokens, extra, reasoning))
    return jobs


async def answer(
    server: Server, request: Request, jobs: list[Job], shape: Shape, *, stream: bool, name: str = ""
) -> Response:
    """Runs the jobs and answers in the given shape; meanwhile `server.live` finds their answers by `name`. Raises
    RequestError if they fail before anything is sent."""

    def steps() -> AsyncIterator[Step]:
        running = run_jobs(server.backend, server.settings, jobs, show_prompt=shape.show_prompt)
        return server.watched(request, jobs, running, name)

    if stream:
        return await EventStream.begun(request, steps(), shape, jobs[0].values["sse_ping_interval"])

    async def run() -> Any:
        return shape.whole(await whole_answers(steps(), len(jobs)))

    return JSONResponse(await until_disconnect(request, run()))


async def completion(server: Server, request: Request) -> Response:
    """POST /completion."""
    body = await json_body(request, server.settings.max_body)
    return await native_completion(server, request, body)


async def native_completion(server: Server, request: Request, body: Body) -> Response:
    values = await read_values(server.backend, server.settings, body)
    if "prompt" not in body:
        raise invalid('"prompt" is required', field="prompt")
    prompts = await read_prompts(server.backend, body["prompt"])
    reasoning = native_reasoning(server, body, values)
    jobs = await jobs_of(server, body, values, prompts, _constraint(server, body), reasoning=reasoning)
    shape = NativeShape(server.model_name, server.backend.facts)
    return await answer(server, request, jobs, shape, stream=values["stream"])


def native_reasoning(server: Server, body: Body, values: Body) -> Reasoning | None:
    """The budget of a request in llama-server's own form, which names the marks itself, or means the template's."""
    if body.get("reasoning_budget_tokens") is None or values["reasoning_budget_tokens"] < 0:
        return None
    format = OutputFormat(template=template_source(server.backend, server.settings))
    marks = format.reasoning(values["reasoning_budget_tokens"], values["reasoning_budget_message"])
    ends = string_list(body, "reasoning_budget_end_tags") or string_list(body, "reasoning_budget_end_tag", single=True)
    start = string(body, "reasoning_budget_start_tag")
    return replace(marks, start=start or marks.start, ends=tuple(ends) or marks.ends)


async def text_completion(server: Server, request: Request) -> Response:
    """POST /v1/completions."""
    body = await json_body(request, server.settings.max_body)
    if flag(body, "echo", False):
        raise invalid("echo is not supported", field="echo")
    if body.get("suffix"):
        raise invalid("suffix is not supported", "use /infill", field="suffix")
    if body.get("logprobs") is not None and body.get("n_probs") is None:
        body = {**body, "n_probs": body["logprobs"]}
    values = await read_values(server.backend, server.settings, body)
    if "prompt" not in body:
        raise invalid('"prompt" is required', field="prompt")
    prompts = await read_prompts(server.backend, body["prompt"])
    jobs = await jobs_of(server, body, values, prompts, _constraint(server, body))
    shape = TextShape(
        server.model_name,
        server.backend.facts,
        server.fingerprint,
        verbose=values["verbose"],
        include_usage=values["include_usage"],
        jobs=len(jobs),
    )
    return await answer(server, request, jobs, shape, stream=values["stream"])


async def chat_jobs(server: Server, body: Body) -> tuple[list[Job], Conversation]:
    """The jobs of a chat request in OpenAI's form."""
    body = _with_logprobs(body)
    values = await read_values(server.backend, server.settings, body)
    conversation = await read_conversation(server.backend, server.settings, body)
    format = conversation.format
    values["stop"] = [*values["stop"], *format.stops]
    tokens = tuple(await server.prompt_tokens(conversation.prompt))
    constraint = chat_constraint(body, format, server.settings.defaults)
    shown = await server.shown_tokens(format)
    reasoning = format.reasoning(values["reasoning_budget_tokens"], values["reasoning_budget_message"])
    jobs = await jobs_of(server, body, values, [tokens], constraint, shown, reasoning, **conversation.settings())
    return jobs, conversation


def _constraint(server: Server, body: Body) -> Constraint | None:
    """The request's, or the operator's for one that asks for none."""
    return read_constraint(body) or read_constraint(server.settings.defaults)


def chat_constraint(body: Body, format: OutputFormat, defaults: Body) -> Constraint | None:
    """What the answer's text has to be: what the request says, what keeps tool calls well-formed, or what the operator
    says, who does not know of tools."""
    own = read_constraint(body)
    if own is None and not format.tools:
        own = read_constraint(defaults)
    if own is None:
        return format.tool_constraint()
    if format.tools and own.grammar:
        raise invalid("Cannot use custom grammar constraints with tools.", field="grammar")
    if format.tools:
        raise invalid("response_format and tools cannot be used together", field="response_format")
    return format.after_reasoning(own)


def _with_logprobs(body: Body) -> Body:
    wanted = flag(body, "logprobs", False)
    if wanted:
        return {**body, "n_probs": body.get("top_logprobs", 20) or 20}
    if body.get("top_logprobs"):
        raise invalid("top_logprobs requires logprobs to be set to true", field="top_logprobs")
    return body


async def chat_completion(server: Server, request: Request) -> Response:
    """POST /v1/chat/completions."""
    body = await json_body(request, server.settings.max_body)
    jobs, conversation = await chat_jobs(server, body)
    values = jobs[0].values
    shape = ChatShape(
        server.model_name,
        server.backend.facts,
        server.fingerprint,
        conversation.format,
        verbose=values["verbose"],
        include_usage=values["include_usage"],
        jobs=len(jobs),
    )
    name = shape.id if values["reasoning_control"] else ""
    return await answer(server, request, jobs, shape, stream=values["stream"], name=name)


async def control(server: Server, request: Request) -> Response:
    """POST /v1/chat/completions/control: ends the reasoning of an answer that is being generated."""
    body = await json_body(request, server.settings.max_body)
    if not (name := string(body, "id")):
        raise invalid("missing completion id", field="id")
    if string(body, "action") != "reasoning_end":
        raise invalid("unknown control action", "the only one is reasoning_end", field="action")
    live = server.live.get(name)
    if live is None:
        message = "no active completion for this id, or one without reasoning_control"
        return JSONResponse({"success": False, "message": message})
    for one in live.values():
        await server.backend.call("end_reasoning", request=one.request_id)
    return JSONResponse({"success": True})


async def apply_template(server: Server, request: Request) -> Response:
    """POST /apply-template."""
    body = await json_body(request, server.settings.max_body)
    conversation = await read_conversation(server.backend, server.settings, body)
    return JSONResponse({"prompt": conversation.prompt})


async def chat_input_tokens(server: Server, request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens."""
    body = await json_body(request, server.settings.max_body)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": await count_tokens(server, body)})


async def count_tokens(server: Server, body: Body) -> int:
    """Tokens of the prompt of a chat request in OpenAI's form."""
    conversation = await read_conversation(server.backend, server.settings, body)
    return len(await server.prompt_tokens(conversation.prompt))


async def infill(server: Server, request: Request) -> Response:
    """POST /infill: the prompt is made of what comes before and after the gap, and of other files."""
    from bloomery.launcher.http.infill import infill_prompt

    body = await json_body(request, server.settings.max_body)
    values = await read_values(server.backend, server.settings, body)
    prompt = await infill_prompt(server.backend, body, values["n_predict"], server.prompt_block)
    return await native_completion(server, request, {**body, "prompt": prompt})
