"""What the server says about itself: health, props, models, slots, metrics.

Owns the shapes of these answers. Figures come from the daemon's control socket and from the record of requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from bloomery.launcher.http.chat_input import template_source
from bloomery.launcher.http.errors import error_response, unsupported
from bloomery.launcher.http.fields import DRAFT_NAMES, read_fields, settings_object
from bloomery.launcher.http.metrics import metrics_text
from bloomery.runtime.errors import RequestError

if TYPE_CHECKING:
    from bloomery.launcher.http.server import Server


VOCABULARY_TYPES = {"llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6}
"""llama.cpp's numbers for what model files call their tokenizers."""


async def health(server: Server, request: Request) -> Response:
    """GET /health: never asks the daemon, so it is as quick as the event loop."""
    backend = server.backend
    if backend.state in ("ready", "sleeping"):
        return JSONResponse({"status": "ok"})
    if backend.state == "failed":
        return error_response(RequestError("worker_lost", f"the model cannot be served: {backend.error}"))
    return error_response(RequestError("loading", "the model is still being loaded"))


async def props(server: Server, request: Request) -> Response:
    """GET /props."""
    backend, settings = server.backend, server.settings
    facts = backend.facts
    special = await server.end_texts()
    values = read_fields({}, settings.defaults)
    values["speculative.types"] = DRAFT_NAMES.get(facts.draft, facts.draft)
    shown = {
        "grammar": settings.defaults.get("grammar", ""),
        "logit_bias": [{"bias": bias, "token": token} for token, bias in settings.defaults.get("logit_bias", [])],
    }
    template = template_source(backend, settings)
    return JSONResponse(
        {
            "default_generation_settings": {"params": settings_object(values, **shown), "n_ctx": facts.context},
            "total_slots": facts.slots,
            "model_alias": server.model_name,
            "model_ftype": facts.file_type,
            "model_path": facts.path,
            "modalities": {"vision": False, "video": False, "audio": False},
            "media_marker": "",
            "endpoint_slots": settings.slots_endpoint,
            "endpoint_props": settings.props_endpoint,
            "endpoint_metrics": settings.metrics_endpoint,
            "ui": settings.page,
            "ui_settings": {},
            "chat_template": template,
            "chat_template_caps": template_abilities(template),
            "bos_token": special[0],
            "eos_token": special[1],
            "build_info": server.fingerprint,
            "is_sleeping": backend.state == "sleeping",
            "cors_proxy_enabled": settings.proxy,
        }
    )


def template_abilities(template: str) -> dict[str, bool]:
    """What a template's source mentions: a hint for clients, not a promise."""
    tools = "tools" in template
    return {
        "supports_tools": tools,
        "supports_tool_calls": "tool_calls" in template,
        "supports_parallel_tool_calls": tools,
        "supports_system_role": "system" in template or "message['role']" in template or "message.role" in template,
    }


async def change_props(server: Server, request: Request) -> Response:
    """POST /props: there is nothing to change yet."""
    if not server.settings.props_endpoint:
        raise unsupported("This server does not support changing global properties.", "start it with --props")
    return JSONResponse({"success": True})


async def tools(server: Server, request: Request) -> Response:
    """/tools, with which llama-server's own page has things run once its operator allows it."""
    raise RequestError("permission", "/tools is not enabled: this server runs nothing for pages")


async def adapters(server: Server, request: Request) -> Response:
    """GET /lora-adapters: there are none."""
    return JSONResponse([])


async def not_here(server: Server, request: Request) -> Response:
    """What llama-server has and this server has not."""
    raise unsupported("This server does not support this endpoint.")


async def models(server: Server, request: Request) -> Response:
    """GET /v1/models."""
    facts, settings = server.backend.facts, server.settings
    name = server.model_name
    entry: dict[str, Any] = {
        "id": name,
        "aliases": list(settings.aliases) or [name],
        "tags": list(settings.tags),
        "object": "model",
        "created": int(server.started),
        "owned_by": "llamacpp",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": {
            "vocab_type": VOCABULARY_TYPES.get(facts.tokenizer, 0),
            "n_embd": facts.width,
            "n_vocab": facts.vocabulary,
            "n_ctx": facts.context,
            "n_ctx_train": facts.trained_context,
            "n_params": facts.parameters,
            "size": facts.file_bytes,
            "architecture": facts.architecture,
        },
    }
    listed = {
        "name": name,
        "model": name,
        "type": "model",
        "capabilities": ["completion"],
        "details": {"format": "gguf"},
    }
    return JSONResponse({"models": [listed], "object": "list", "data": [entry]})


async def slots(server: Server, request: Request) -> Response:
    """GET /slots."""
    if not server.settings.slots_endpoint:
        raise unsupported("This server does not support slots endpoint.", "start it with --slots")
    status = await server.backend.control("status")
    states = status["engine"]["slots"]
    if request.query_params.get("fail_on_no_slot") and all(state["request"] for state in states):
        raise RequestError("loading", "no slot available")
    return JSONResponse([_slot(server, state) for state in states])


def _slot(server: Server, state: dict[str, Any]) -> dict[str, Any]:
    busy = bool(state["request"])
    body: dict[str, Any] = {
        "id": state["slot"],
        "n_ctx": state["context"],
        "speculative": server.backend.facts.draft != "none",
        "is_processing": busy,
    }
    record = server.records.get(state["slot"])
    if record is None:
        return body
    answer, values = record.answer, record.answer.job.values
    limit = values["n_predict"]
    return body | {
        "id_task": record.task,
        "n_prompt_tokens": state["cached"],
        "n_prompt_tokens_processed": max(0, answer.processed - answer.cached),
        "n_prompt_tokens_cache": answer.cached,
        "params": answer.job.settings(end_tokens=server.backend.facts.end_tokens),
        "next_token": [
            {
                "has_next_token": busy,
                "has_new_line": "\n" in answer.text,
                "n_remain": limit - answer.generated if busy and limit >= 0 else -1,
                "n_decoded": answer.generated if busy else 0,
            }
        ],
    }


def no_metrics() -> RequestError:
    return unsupported("This server does not support metrics endpoint.", "start it with --metrics")


async def metrics(server: Server, request: Request) -> Response:
    """GET /metrics: Prometheus text."""
    if not server.settings.metrics_endpoint:
        raise no_metrics()
    text = metrics_text(await server.metrics(), server.longest, server.rates)
    response = PlainTextResponse(text, media_type="text/plain; version=0.0.4")
    response.raw_headers.append((b"Process-Start-Time-Unix", str(int(server.started)).encode()))
    return response
