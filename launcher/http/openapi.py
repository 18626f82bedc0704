"""GET /openapi.json: what this server can be asked, made from its routes and from the fields it reads.

Owns the description of bodies beyond the common fields of a generation (`fields.py`). It checks nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from bloomery.launcher.http.fields import FIELDS, SAMPLERS, Field

Schema = dict[str, Any]
Paths = Iterable[tuple[str, tuple[str, ...], Any]]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": ["boolean", "null"]}
TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
OBJECT: Schema = {"type": "object"}
PROMPT: Schema = {"anyOf": [TEXT, TOKENS, {"type": "array", "items": {"anyOf": [TEXT, TOKENS]}, "minItems": 1}]}
PARTS: Schema = {
    "type": "array",
    "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": TEXT}, "required": ["type", "text"]},
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"anyOf": [TEXT, PARTS]},
    },
    "required": ["role", "content"],
}
MESSAGES: Schema = {"type": "array", "items": MESSAGE, "minItems": 1}
TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": TEXT, "parameters": OBJECT}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
STRINGS: Schema = {"type": "array", "items": TEXT, "maxItems": 256}
BIAS: Schema = {"type": ["number", "boolean"]}


def field_schema(field: Field) -> Schema:
    """One entry of the table of fields. Fields that are moved into their range take any number."""
    schema: Schema = {"type": [{"int": "integer", "float": "number", "bool": "boolean"}[field.kind], "null"]}
    if not field.clamp:
        schema |= {"minimum": field.low} if field.low > -math.inf else {}
        schema |= {"maximum": field.high} if field.high < math.inf else {}
    return {**schema, "default": field.default}


def generation_properties() -> dict[str, Schema]:
    """Every field that a request for text may have, by all its names."""
    named = {name: field_schema(field) for field in FIELDS for name in (field.name, *field.aliases)}
    return {
        **named,
        "stop": {"anyOf": [TEXT, STRINGS, {"type": "null"}]},
        "samplers": {"anyOf": [{"type": "array", "items": {"enum": list(SAMPLERS)}}, TEXT]},
        "dry_sequence_breakers": STRINGS,
        "response_fields": STRINGS,
        "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
        "logit_bias": {
            "anyOf": [
                {"type": "object", "additionalProperties": BIAS},
                {"type": "array", "items": {"type": "array", "prefixItems": [{"type": ["integer", "string"]}, BIAS],
                                            "minItems": 2, "maxItems": 2}},
            ]
        },
        "grammar": {"type": ["string", "null"]},
        "reasoning_budget_message": {"type": ["string", "null"]},
        "json_schema": {"type": ["object", "null"]},
        "response_format": {
            "type": ["object", "null"],
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
        },
    }  # fmt: skip


_CHAT: dict[str, Schema] = {
    "messages": MESSAGES,
    "tools": {"type": "array", "items": TOOL},
    "tool_choice": {"type": ["string", "object"]},
    "parallel_tool_calls": FLAG,
    "chat_template_kwargs": OBJECT,
    "reasoning_format": {"enum": ["none", "auto", "deepseek", "deepseek-legacy"]},
    "reasoning_effort": TEXT,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "logprobs": FLAG,
    "top_logprobs": {"type": "integer", "minimum": 0},
}
_RESPONSES: dict[str, Schema] = {
    "input": {"anyOf": [TEXT, MESSAGES]},
    "instructions": {"type": ["string", "null"]},
    "max_output_tokens": {"type": ["integer", "null"]},
    "text": OBJECT,
    "reasoning": OBJECT,
    "tools": {"type": "array"},
}
_ANTHROPIC: dict[str, Schema] = {
    "messages": MESSAGES,
    "system": {"anyOf": [TEXT, PARTS]},
    "stop_sequences": STRINGS,
    "tools": {"type": "array", "items": {"type": "object", "properties": {"name": TEXT, "input_schema": OBJECT}}},
    "tool_choice": OBJECT,
    "thinking": {
        "type": "object",
        "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}, "budget_tokens": {"type": "integer"}},
    },
}
_MARKS: dict[str, Schema] = {
    "reasoning_budget_start_tag": TEXT,
    "reasoning_budget_end_tag": {"anyOf": [TEXT, STRINGS]},
    "reasoning_budget_end_tags": STRINGS,
}
_INFILL: dict[str, Schema] = {
    "input_prefix": TEXT,
    "input_suffix": TEXT,
    "input_extra": {"type": "array", "items": {"type": "object", "properties": {"filename": TEXT, "text": TEXT}}},
    "prompt": TEXT,
}
_EMBEDDING: dict[str, Schema] = {"input": PROMPT, "content": PROMPT, "encoding_format": {"enum": ["float", "base64"]}}
_MIXED: Schema = {"anyOf": [TEXT, {"type": "array", "items": {"type": ["string", "integer"]}}]}

# By the last part of an address: whether the fields of a generation belong to it, its own fields, the required ones.
_BODIES: dict[str, tuple[bool, dict[str, Schema], list[str]]] = {
    "/completion": (True, {"prompt": PROMPT, **_MARKS}, ["prompt"]),
    "/completions": (True, {"prompt": PROMPT, "echo": FLAG, "logprobs": {"type": ["integer", "null"]}}, ["prompt"]),
    "/chat/completions": (True, _CHAT, ["messages"]),
    "/chat/completions/control": (False, {"id": TEXT, "action": {"enum": ["reasoning_end"]}}, ["id", "action"]),
    "/chat/completions/input_tokens": (False, _CHAT, ["messages"]),
    "/apply-template": (False, _CHAT, ["messages"]),
    "/infill": (True, _INFILL, ["input_prefix", "input_suffix"]),
    "/embedding": (False, _EMBEDDING, []),
    "/embeddings": (False, _EMBEDDING, []),
    "/responses": (True, _RESPONSES, ["input"]),
    "/responses/input_tokens": (False, _RESPONSES, ["input"]),
    "/messages": (True, _ANTHROPIC, ["messages"]),
    "/messages/count_tokens": (False, _ANTHROPIC, ["messages"]),
    "/tokenize": (False, {"content": _MIXED, "add_special": FLAG, "parse_special": FLAG, "with_pieces": FLAG}, []),
    "/detokenize": (False, {"tokens": TOKENS}, ["tokens"]),
    "/slots/{slot}": (False, {"filename": TEXT}, []),
}


def document(routes: Paths, prefix: str = "") -> Schema:
    """The description of these routes in OpenAPI 3.1."""
    paths: dict[str, Schema] = {}
    for method, addresses, endpoint in routes:
        for address in addresses:
            paths.setdefault(prefix + address, {})[method.lower()] = _operation(method, address, endpoint)
    error = {
        "type": "object",
        "properties": {"code": {"type": "integer"}, "message": TEXT, "type": TEXT},
        "required": ["message", "type"],
    }
    schemas = {
        "Error": {"type": "object", "properties": {"error": error}, "required": ["error"]},
        "Generation": {"type": "object", "properties": generation_properties()},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "bloomery-serve", "version": version("bloomery")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(method: str, address: str, endpoint: Any) -> Schema:
    failed = {"description": "failed", "content": _json({"$ref": "#/components/schemas/Error"})}
    operation: Schema = {
        "summary": next(iter((endpoint.__doc__ or address).splitlines())),
        "operationId": f"{method.lower()}{address.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {"200": {"description": "answered"}, "default": failed},
    }
    if "{slot}" in address:
        actions = {"enum": ["save", "restore", "erase"]}
        operation["parameters"] = [
            {"name": "slot", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}},
            {"name": "action", "in": "query", "required": True, "schema": actions},
        ]
    if method == "POST" and (body := _BODIES.get(address.removeprefix("/v1"))):
        generates, own, required = body
        schema: Schema = {"type": "object", "properties": own, "required": required}
        if generates:
            schema = {"allOf": [{"$ref": "#/components/schemas/Generation"}, schema]}
            if not set(own).isdisjoint(generation_properties()):  # its own meaning of a name counts
                schema = {**schema["allOf"][1], "properties": {**generation_properties(), **own}}
        operation["requestBody"] = {"required": True, "content": _json(schema)}
    return operation


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}
