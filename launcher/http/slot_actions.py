"""POST /slots/{id}?action=save|restore|erase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bloomery.launcher.http.errors import invalid, unsupported

if TYPE_CHECKING:
    from bloomery.launcher.http.server import Server

ACTIONS = ("save", "restore", "erase")


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
    raise unsupported(f"{action}: slot files are not there yet")
    return JSONResponse({})
