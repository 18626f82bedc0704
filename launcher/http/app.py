"""Routes, and what is true for all of them: keys, CORS, errors, 503 while the model loads.

Owns which path leads to which endpoint. The application is plain ASGI around a starlette router.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bloomery.launcher.http import (
    anthropic,
    cors_proxy,
    embeddings,
    endpoints,
    responses,
    slot_actions,
    state,
    vocabulary_calls,
)
from bloomery.launcher.http.errors import as_request_error, error_response
from bloomery.launcher.http.openapi import document
from bloomery.launcher.http.server import Server
from bloomery.launcher.http.settings import ServerSettings
from bloomery.runtime.errors import RequestError

log = logging.getLogger(__name__)

Endpoint = Callable[[Server, Request], Awaitable[Response]]

HEALTH = ("/health", "/v1/health")
RESTFUL = (*HEALTH, "/props", "/models", "/v1/models", "/metrics", "/openapi.json")
"""Paths that do not wake a sleeping model. (What they need they ask for, and fail while it loads.)"""
NOT_HERE = (
    "/lora-adapters",
    "/rerank",
    "/reranking",
    "/v1/rerank",
    "/v1/reranking",
    "/audio/transcriptions",
    "/v1/audio/transcriptions",
)
ASSETS = ("/", "/index.html", "/sw.js", "/manifest.webmanifest", "/_app/version.json", "/favicon.ico")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; manifest-src 'self'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}


async def description(server: Server, request: Request) -> Response:
    """GET /openapi.json: these routes."""
    return JSONResponse(document(ROUTES, server.settings.prefix.rstrip("/")))


ROUTES: tuple[tuple[str, tuple[str, ...], Endpoint], ...] = (
    ("GET", HEALTH, state.health),
    ("GET", ("/props",), state.props),
    ("POST", ("/props",), state.change_props),
    ("GET", ("/models", "/v1/models"), state.models),
    ("GET", ("/slots",), state.slots),
    ("POST", ("/slots/{slot}",), slot_actions.slot_action),
    ("GET", ("/metrics",), state.metrics),
    ("POST", ("/completion", "/completions"), endpoints.completion),
    ("POST", ("/v1/completions",), endpoints.text_completion),
    ("POST", ("/chat/completions", "/v1/chat/completions"), endpoints.chat_completion),
    (
        "POST",
        ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"),
        endpoints.chat_input_tokens,
    ),
    ("POST", ("/v1/chat/completions/control",), endpoints.control),
    ("POST", ("/apply-template",), endpoints.apply_template),
    ("POST", ("/infill",), endpoints.infill),
    ("POST", ("/embedding", "/embeddings"), embeddings.native),
    ("POST", ("/v1/embeddings",), embeddings.openai),
    ("POST", ("/responses", "/v1/responses"), responses.create),
    ("POST", ("/responses/input_tokens", "/v1/responses/input_tokens"), responses.input_tokens),
    ("POST", ("/v1/messages",), anthropic.messages),
    ("POST", ("/v1/messages/count_tokens",), anthropic.count_tokens),
    ("GET", ("/openapi.json",), description),
    ("GET", ("/cors-proxy",), cors_proxy.forward),
    ("POST", ("/cors-proxy",), cors_proxy.forward),
    ("GET", ("/lora-adapters",), state.adapters),
    ("POST", NOT_HERE, state.not_here),
    ("GET", ("/tools",), state.tools),
    ("POST", ("/tools",), state.tools),
    ("POST", ("/tokenize",), vocabulary_calls.tokenize),
    ("POST", ("/detokenize",), vocabulary_calls.detokenize),
)


def make_app(server: Server) -> ASGIApp:
    """The ASGI application."""
    prefix = server.settings.prefix.rstrip("/")
    routes = [
        Route(prefix + path, _guarded(server, endpoint, path), methods=[method])
        for method, paths, endpoint in ROUTES
        for path in paths
    ]
    if server.settings.page:
        routes += [Route(prefix + path, _asset, methods=["GET"]) for path in ASSETS]
    return _Envelope(Starlette(routes=routes, exception_handlers={HTTPException: _http_error}), server.settings)


def _guarded(server: Server, endpoint: Endpoint, path: str) -> Callable[[Request], Awaitable[Response]]:
    anthropic_errors = path.startswith("/v1/messages")

    async def run(request: Request) -> Response:
        try:
            if path in RESTFUL:
                return await endpoint(server, request)
            with server.active():
                await server.backend.wake()
                server.backend.require_ready()
                return await endpoint(server, request)
        except RequestError as error:
            return error_response(error, anthropic=anthropic_errors)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            log.exception("%s failed", path)
            return error_response(as_request_error(error), anthropic=anthropic_errors)

    return run


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    message = {404: "File Not Found", 405: f"{request.method} is not allowed here"}.get(error.status_code)
    response = error_response(RequestError(code, message or str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _asset(request: Request) -> Response:
    """The chat page and the few files that browsers ask for beside it."""
    name = request.url.path.rsplit("/", 1)[-1]
    if name == "sw.js":  # no offline copy: the page is one request
        return Response("self.addEventListener('fetch', () => {});\n", media_type="text/javascript")
    if name == "manifest.webmanifest":
        manifest = {"name": "bloomery", "short_name": "bloomery", "start_url": "./", "display": "standalone"}
        return JSONResponse(manifest, media_type="application/manifest+json")
    if name == "version.json":
        from importlib.metadata import version

        return JSONResponse({"version": version("bloomery")})
    if name == "favicon.ico":
        return Response(status_code=204)
    page = files("bloomery.launcher.http").joinpath("page.html").read_text(encoding="utf-8")
    return HTMLResponse(page, headers=PAGE_HEADERS)


class _Envelope:
    """CORS headers on every answer, OPTIONS answered here, keys checked before any route."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        prefix = settings.prefix.rstrip("/")
        self._public = {prefix + path for path in (*HEALTH, *(ASSETS if settings.page else ()))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        cors = self._cors(headers)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *raw_headers(cors)]
            await send(message)

        if scope["method"] == "OPTIONS":
            cors |= {
                "Access-Control-Allow-Credentials": "true" if self._settings.cors_credentials else "false",
                "Access-Control-Allow-Methods": self._settings.cors_methods,
                "Access-Control-Allow-Headers": self._settings.cors_headers,
            }
            await Response("", media_type="text/html")(scope, receive, with_headers)
        elif not self._allowed(scope["path"], headers):
            response = error_response(no_key(), anthropic=scope["path"].startswith("/v1/messages"))
            await response(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)

    def _allowed(self, path: str, headers: Headers) -> bool:
        return path in self._public or has_key(headers, self._settings.api_keys)

    def _cors(self, headers: Headers) -> dict[str, str]:
        origins, origin = self._settings.cors_origins, headers.get("origin", "")
        if origins == "*":
            allowed = origin if self._settings.cors_credentials and origin else "*"
        elif origins == "localhost":
            allowed = origin if is_local(origin) else ""
        else:
            allowed = origins
        return {"Access-Control-Allow-Origin": allowed, "Vary": "Origin"} if allowed else {}


def has_key(headers: Headers, keys: Iterable[str]) -> bool:
    """Whether a request shows one of the keys, or needs none."""
    given = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
    shown = given.encode("latin-1")  # the bytes that were sent
    found = [hmac.compare_digest(shown, key.encode()) for key in keys]  # all, whichever fits
    return not found or any(found)


def no_key() -> RequestError:
    return RequestError("authentication", "Invalid API Key", "send it as Authorization: Bearer or x-api-key")


def raw_headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    """Header lines whose names keep their capitals, for clients that compare them letter by letter."""
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


def is_local(origin: str) -> bool:
    """Whether an Origin header names this machine's loopback."""
    try:
        return urlsplit(origin).hostname in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return False
