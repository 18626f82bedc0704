"""Errors as HTTP clients know them: status, headers and the `error` object.

Owns the mapping from codes of the protocol's error table to llama-server's error types. It raises nothing itself.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from bloomery.runtime.error_table import http_status
from bloomery.runtime.errors import BloomeryError, RequestError

_OWN_STATUS = {"authentication": 401, "permission": 403, "not_found": 404, "method_not_allowed": 405}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPES = {**_TYPES, 500: "api_error", 503: "overloaded_error", 413: "request_too_large"}


def invalid(message: str, hint: str = "", **details: int | float | str) -> RequestError:
    """An error that answers 400."""
    return RequestError("invalid_request", message, hint, **details)


def unsupported(message: str, hint: str = "") -> RequestError:
    """An error that answers 501."""
    return RequestError("unsupported", message, hint)


def status_of(error: RequestError) -> int:
    return _OWN_STATUS.get(error.code) or http_status(error.code)


def error_object(error: RequestError) -> dict[str, Any]:
    """The value of the key `error`."""
    status = status_of(error)
    if error.code == "loading":
        return {"code": status, "message": "Loading model", "type": _TYPES[503]}
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    body: dict[str, Any] = {"code": status, "message": message, "type": _TYPES.get(status, "server_error")}
    if status in (409, 413, 408, 405):
        body["type"] = _TYPES[400]
    if error.code == "exceed_context_size":
        body["type"] = "exceed_context_size_error"
        body["n_prompt_tokens"] = error.details.get("prompt_tokens", 0)
        body["n_ctx"] = error.details.get("context", 0)
    if "field" in error.details:
        body["param"] = error.details["field"]
    return body


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """The whole body of an error on the Anthropic endpoints."""
    body = error_object(error)
    kind = _ANTHROPIC_TYPES.get(status_of(error), "invalid_request_error")
    return {"type": "error", "error": {**body, "type": kind if kind in _ANTHROPIC_TYPES.values() else body["type"]}}


def error_headers(error: RequestError) -> dict[str, str]:
    headers = {}
    if status_of(error) in (429, 503):
        headers["Retry-After"] = str(max(1, round(float(error.details.get("retry_after_s", 1)))))
    if error.code == "authentication":
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: RequestError, *, anthropic: bool = False) -> Response:
    body = anthropic_error(error) if anthropic else {"error": error_object(error)}
    return JSONResponse(body, status_of(error), error_headers(error))


def as_request_error(error: BaseException) -> RequestError:
    """What a client is told of an exception that is not meant for it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BloomeryError):
        return RequestError("internal", error.message, error.hint)
    return RequestError("internal", f"{type(error).__name__}: {error}", "the server's log has the trace")
