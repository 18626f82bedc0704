"""GET and POST /cors-proxy?url=...: fetches from other servers for a web page, if the operator allows it.

Owns what is passed on and what is not. A request's own headers stay here, keys and cookies above all: only those with
the prefix `x-llama-server-proxy-header-` go out, without it. Redirects are the page's to follow.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bloomery.launcher.http.endpoints import whole_body
from bloomery.launcher.http.errors import invalid
from bloomery.runtime.errors import RequestError

if TYPE_CHECKING:
    from bloomery.launcher.http.server import Server

PREFIX = "x-llama-server-proxy-header-"
SECONDS = 600.0
PIECE = 1 << 16
_STAY = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "set-cookie",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "content-security-policy",
    "x-content-type-options",
}
"""Headers of an answer that concern the connection, or would act in this server's name."""
_HARMLESS = {"Content-Security-Policy": "sandbox; default-src 'none'", "X-Content-Type-Options": "nosniff"}
"""A fetched page that is opened by its address here must not run as a page of this server."""


async def forward(server: Server, request: Request) -> Response:
    """Fetches `url`. 403 unless enabled, and for pages of other origins; 400 for a URL that is none; 502 if nobody
    answers."""
    if not server.settings.proxy:
        raise RequestError("permission", "/cors-proxy is not enabled", "start the server with --ui-mcp-proxy")
    _require_page(request, server.settings.cors_origins)
    target = _target(request.query_params.get("url", ""))
    headers = _outgoing(request.headers)
    body = await whole_body(request, server.settings.max_body) if request.method == "POST" else None
    connection = _connection(target)
    try:
        answer = await asyncio.to_thread(_ask, connection, request.method, target, body, headers)
    except (OSError, http.client.HTTPException, ValueError) as error:
        connection.close()
        raise RequestError("daemon_lost", f"{target.hostname} cannot be asked: {error}") from None
    given = {
        name: value
        for name, value in answer.getheaders()
        if name.lower() not in _STAY and not name.lower().startswith("access-control-")
    }
    return StreamingResponse(_pieces(connection, answer), answer.status, given | _HARMLESS)


def _require_page(request: Request, origins: str) -> None:
    """A page of another origin could not read the answer, but what it asks for would be done."""
    from bloomery.launcher.http.app import is_local

    origin = request.headers.get("origin")
    if origin is None or origins == "*" or origin == origins or (origins == "localhost" and is_local(origin)):
        return
    raise RequestError("permission", f"/cors-proxy does nothing for pages of {origin}")


def _target(url: str) -> SplitResult:
    try:
        target = urlsplit(url)
        port = target.port
    except ValueError as error:
        raise invalid(f"invalid target URL: {error}", field="url") from None
    if target.scheme not in ("http", "https"):
        raise invalid("unsupported URL scheme in target URL", "http or https", field="url")
    if not target.hostname or port == 0:
        raise invalid("invalid target URL: missing host", field="url")
    if target.username is not None or target.password is not None:
        raise invalid("authentication in target URL is not supported", f"send {PREFIX}authorization", field="url")
    return target


def _outgoing(headers: Headers) -> dict[str, str]:
    return {name[len(PREFIX) :]: value for name, value in headers.items() if name.startswith(PREFIX) and name != PREFIX}


def _connection(target: SplitResult) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    assert target.hostname is not None
    return kind(target.hostname, target.port, timeout=SECONDS)


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    target: SplitResult,
    body: bytes | None,
    headers: dict[str, str],
) -> http.client.HTTPResponse:
    path = (target.path or "/") + (f"?{target.query}" if target.query else "")
    connection.request(method, path, body, headers)
    return connection.getresponse()


async def _pieces(connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> AsyncIterator[bytes]:
    """The body as it comes, events of a stream at once."""
    try:
        while piece := await asyncio.to_thread(answer.read1, PIECE):
            yield piece
    finally:
        connection.close()
