"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bloomery.launcher.http.endpoints import json_body
from bloomery.launcher.http.errors import invalid
from bloomery.launcher.http.fields import flag, shown
from bloomery.launcher.http.parameters import mixed_tokens

if TYPE_CHECKING:
    from bloomery.launcher.http.server import Server


async def tokenize(server: Server, request: Request) -> Response:
    """`content` (text, or a list of texts and ids), `add_special`, `parse_special`, `with_pieces`."""
    body = await json_body(request, server.settings.max_body)
    content = body.get("content", "")
    add_special, parse_special = flag(body, "add_special", False), flag(body, "parse_special", True)
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise invalid(f"content must be a string or a list, found {shown(content)}", field="content")
    backend = server.backend
    tokens = await mixed_tokens(backend, content, add_special=add_special, parse_special=parse_special)
    if not flag(body, "with_pieces", False):
        return JSONResponse({"tokens": tokens})
    pieces = await backend.pieces(tokens)
    return JSONResponse({"tokens": [{"id": token, "piece": _piece(pieces[token])} for token in tokens]})


def _piece(piece: bytes) -> Any:
    """Text, or the bytes as numbers where they are not whole characters."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(server: Server, request: Request) -> Response:
    """`tokens` to `content`, control tokens written out."""
    body = await json_body(request, server.settings.max_body)
    tokens = body.get("tokens", [])
    limit = server.backend.facts.vocabulary
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < limit for token in tokens):
        raise invalid(f"tokens must be a list of ids below {limit}, found {shown(tokens)}", field="tokens")
    return JSONResponse({"content": await server.backend.shown(tokens)})
