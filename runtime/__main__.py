"""`python -m bloomery.runtime CONFIG [PARENT]`: the coordinator as a child process.

Owns the lines on standard output, one JSON object each: {"progress": [stage, done, total]} while loading, then
{"ready": {...}} or {"error": {...}}. CONFIG is a DaemonConfig as JSON, PARENT the pid to end with. People start
`bloomery-launch`; this is what `private_daemon.py` starts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from typing import Any

from bloomery.runtime.coordinator import describe_error, run_daemon
from bloomery.runtime.daemon_config import DaemonConfig


def main(arguments: list[str]) -> int:
    # Standard output belongs to the parent's reader: whatever else might print must not end up between its lines.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")

    def write(name: str, value: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            lines.write(json.dumps({name: value}) + "\n")
            lines.flush()

    try:
        config = DaemonConfig(**json.loads(arguments[0]))
        parent = int(arguments[1]) if len(arguments) > 1 else None
        return run_daemon(
            config,
            on_ready=lambda status: write("ready", status),
            progress=lambda *stage: write("progress", stage),
            parent=parent,
        )
    except Exception as error:
        description = describe_error(error)
        if not description["type"]:
            logging.getLogger("bloomery").exception("the daemon failed")
        write("error", description)
        return getattr(error, "exit_status", 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
