"""The error table: every code that an ERROR message can carry, with its meaning, HTTP status and extra numbers.

Owns the rows that docs/protocol.md prints (a test compares them). It does not know who raises which code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorRow:
    """`status` is the HTTP status that a front end answers with, `details` the names of the extra values."""

    code: str
    status: int
    meaning: str
    details: tuple[str, ...] = ()
    origin: str = "daemon"


ERROR_TABLE: tuple[ErrorRow, ...] = (
    ErrorRow("invalid_message", 400, "The frames or the body cannot be read: not msgpack, not a map, nested too deep."),
    ErrorRow("unknown_kind", 400, "The kind byte means nothing to the daemon, or not on this socket.", ("kind",)),
    ErrorRow("version_mismatch", 400, "HELLO offers no version that the daemon speaks.", ("spoken",)),
    ErrorRow("no_session", 400, "The client has not sent HELLO, or the daemon has forgotten it. Send HELLO again."),
    ErrorRow("invalid_request", 400, "A field is missing, of a wrong type or out of range.", ("field",)),
    ErrorRow(
        "exceed_context_size",
        400,
        "The prompt does not fit into the context of a slot.",
        ("prompt_tokens", "context"),
    ),
    ErrorRow("not_found", 404, "No method of this name on this socket.", ("method",)),
    ErrorRow("client_stalled", 408, "Chunks waited for credit for longer than limits.stall_timeout_s."),
    ErrorRow("duplicate_request", 409, "A request with this id is already running for this client."),
    ErrorRow("too_large", 413, "The message is larger than limits.max_message.", ("bytes", "limit")),
    ErrorRow(
        "overloaded",
        429,
        "The queue is full, or the client has too many requests in flight.",
        ("retry_after_s", "limit", "queued"),
    ),
    ErrorRow("internal", 500, "A defect of the daemon; its log on standard error has the trace."),
    ErrorRow("unsupported", 501, "Understood, but not possible with this model file or plan."),
    ErrorRow("loading", 503, "The model is still being loaded.", ("stage", "done", "total")),
    ErrorRow("shutting_down", 503, "The daemon is draining or has been told to stop."),
    ErrorRow("worker_lost", 503, "A worker process died or hung during the request; it is being replaced."),
    ErrorRow("daemon_lost", 502, "The connection to the daemon broke, or it has fallen silent.", origin="client"),
    ErrorRow("timeout", 504, "No answer within the time that the caller allowed.", origin="client"),
)

ERROR_ROWS: dict[str, ErrorRow] = {row.code: row for row in ERROR_TABLE}


def http_status(code: str) -> int:
    """HTTP status of a code; 500 for a code that a newer daemon may have added."""
    row = ERROR_ROWS.get(code)
    return row.status if row else 500
