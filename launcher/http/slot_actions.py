"""POST /slots/{id}?action=save|restore|erase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bloomery.launcher.http.endpoints import json_body
from bloomery.launcher.http.errors import invalid, unsupported
from bloomery.launcher.http.fields import string

if TYPE_CHECKING:
    from bloomery.launcher.http.server import Server

ACTIONS = ("save", "restore", "erase")
ACTION_SECONDS = 3600.0
"""A slot that is in use is waited for."""


async def slot_action(server: Server, request: Request) -> Response:
    action = request.query_params.get("action", "")
    if not server.settings.slot_save_path:
        raise unsupported("This server does not support slots action.", "start it with --slot-save-path")
    if action not in ACTIONS:
        raise invalid(f"Invalid action {action[:40]!r}", f"expected one of {', '.join(ACTIONS)}", field="action")
    text = request.path_params["slot"]
    slots = server.backend.facts.slots
    if not text.isascii() or not text.isdigit() or int(text) >= slots:
        raise invalid(f"Invalid slot ID {text[:40]!r}", f"there are {slots} slots", field="id_slot")
    slot, name = int(text), ""
    if action != "erase":
        body = await json_body(request, server.settings.max_body)
        name = string(body, "filename")
        if not name:
            raise invalid("Invalid filename", '"filename" is required', field="filename")
    value = await server.backend.call("slot", timeout=ACTION_SECONDS, action=action, slot=slot, name=name)
    answer: dict[str, Any] = {"id_slot": slot}
    if action == "erase":
        return JSONResponse(answer | {"n_erased": value["tokens"]})
    done, moved = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    answer |= {"filename": name, done: value["tokens"], moved: value["bytes"]}
    return JSONResponse(answer | {"timings": {f"{action}_ms": 1e3 * value["seconds"]}})
