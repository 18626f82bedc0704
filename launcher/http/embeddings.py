"""POST /embedding, /embeddings and /v1/embeddings: hidden states of a text as one vector, or one for each token.

Owns the forms of input and output and the normalisation. Pooling happens where the rows are computed.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bloomery.launcher.http.backend import Backend
from bloomery.launcher.http.endpoints import json_body
from bloomery.launcher.http.errors import invalid, unsupported
from bloomery.launcher.http.fields import INT_MAX, shown, string
from bloomery.launcher.http.parameters import check_room, read_prompts
from bloomery.launcher.http.streaming import until_disconnect
from bloomery.runtime.completion import failure_error, new_request_id
from bloomery.runtime.requests import Chunk, Failed, GenerationRequest

if TYPE_CHECKING:
    from bloomery.launcher.http.server import Server

Vectors = NDArray[np.float32]
_POOLINGS = {"none": "all", "mean": "mean", "cls": "first", "last": "last"}
EUCLIDEAN = 2


async def native(server: Server, request: Request) -> Response:
    """llama-server's shape: a list of {index, embedding: [[...], ...]}."""
    body = await _body(server, request)
    _, vectors = await _embeddings(server, request, body)
    return JSONResponse([{"index": index, "embedding": rows.tolist()} for index, rows in enumerate(vectors)])


async def openai(server: Server, request: Request) -> Response:
    """OpenAI's shape."""
    body = await _body(server, request)
    if server.settings.pooling == "none":
        raise invalid("Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    format = string(body, "encoding_format", "float")
    if format not in ("float", "base64"):
        raise invalid("encoding_format must be float or base64", field="encoding_format")
    prompts, vectors = await _embeddings(server, request, body)
    data = [
        {"object": "embedding", "index": index, "embedding": _shown(rows[0], format)}
        for index, rows in enumerate(vectors)
    ]
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "model": server.model_name, "data": data, "usage": usage})


def _shown(row: Vectors, format: str) -> Any:
    values = row.tolist()
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode() if format == "base64" else values


async def _body(server: Server, request: Request) -> dict[str, Any]:
    if not server.settings.embeddings:
        raise unsupported("This server does not support embeddings.", "start it with --embeddings")
    return await json_body(request, server.settings.max_body)


async def _embeddings(
    server: Server, request: Request, body: dict[str, Any]
) -> tuple[list[tuple[int, ...]], list[Vectors]]:
    """The prompts' tokens and their rows."""
    given = body.get("input", body.get("content"))
    if given is None:
        raise invalid('"input" or "content" must be provided', field="input")
    norm = body.get("embd_normalize", EUCLIDEAN)
    if type(norm) is not int or not -1 <= norm <= INT_MAX:
        raise invalid(
            f"embd_normalize must be -1, 0 or the power of a norm, found {shown(norm)}", field="embd_normalize"
        )
    several = isinstance(given, list) and not any(type(part) is int for part in given)
    entries = [_entry(part) for part in given] if several else _entry(given)
    if entries == []:
        raise invalid('"input" must not be empty', field="input")
    prompts = await read_prompts(server.backend, entries)
    for prompt in prompts:
        check_room(prompt, server.backend.facts.context + 1)
    vectors = await until_disconnect(request, _run(server.backend, prompts, server.settings.pooling))
    if server.settings.pooling != "none":
        vectors = [normalised(rows, norm) for rows in vectors]
    return prompts, vectors


def _entry(entry: Any) -> Any:
    """An input as a prompt: `{"content": [parts]}` becomes its text."""
    if not isinstance(entry, dict) or "content" not in entry:
        return entry
    parts = entry["content"]
    if not isinstance(parts, list):
        raise invalid(f"content must be an array of parts, found {shown(parts)}", field="input")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"content holds an unsupported part: {shown(part)}", field="input")
    return "".join(part["text"] for part in parts)


async def _run(backend: Backend, prompts: Sequence[tuple[int, ...]], pooling: str) -> list[Vectors]:
    """One after the other: each fills its steps by itself."""
    return [await _one(backend, prompt, pooling) for prompt in prompts]


async def _one(backend: Backend, prompt: tuple[int, ...], pooling: str) -> Vectors:
    request = GenerationRequest(new_request_id(), tokens=prompt, max_tokens=0, embeddings=_POOLINGS[pooling])  # type: ignore[arg-type]
    rows: list[Vectors] = []
    async with backend.generate(request) as events:
        async for event in events:
            if isinstance(event, Failed):
                raise failure_error(event)
            if isinstance(event, Chunk) and event.logits is not None:
                rows.append(event.logits)
    return np.concatenate(rows)


def normalised(rows: Vectors, norm: int) -> Vectors:
    """Each row divided by its p-norm (2: Euclidean); 0: by its greatest magnitude / 32760; -1: not at all."""
    if norm < 0:
        return rows
    magnitudes = np.abs(rows.astype(np.float64))
    greatest = magnitudes.max(axis=1, keepdims=True)
    if norm == 0:
        sizes = greatest / 32760
    else:  # shares of the greatest, so that no power is too large
        shares = magnitudes / np.where(greatest > 0, greatest, 1)
        sizes = greatest * (shares**norm).sum(axis=1, keepdims=True) ** (1 / norm)
    return (rows / np.where(sizes > 0, sizes, 1)).astype(np.float32)
