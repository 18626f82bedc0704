"""What a private daemon writes to standard error: its last lines in memory, all of it in a file that can be named.

Owns the folder of these files, `logs` in `$BLOOMERY_CACHE`, else in `bloomery` in `$XDG_CACHE_HOME` or `~/.cache`, and
how many stay there. A daemon that writes nothing leaves no file.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from pathlib import Path
from typing import IO

from bloomery.runtime.cache_base import cache_base

LAST_LINES = 20
FILES_KEPT = 20


def log_folder() -> Path:
    """Where the files lie."""
    return cache_base() / "logs"


class DaemonLog:
    """Reads `stream` to its end in a thread of its own. A folder that cannot be written is done without."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self.path: Path | None = None  # once there is a file
        self._name = name
        self._lines: deque[bytes] = deque(maxlen=LAST_LINES)
        self._thread = threading.Thread(target=self._read, args=(stream,), name="bloomery-daemon-log", daemon=True)
        self._thread.start()

    def last_words(self) -> str:
        """The last lines."""
        return b"".join(self._lines).decode(errors="replace").strip()

    def join(self, seconds: float) -> None:
        """Waits until everything is read."""
        self._thread.join(seconds)

    def _read(self, stream: IO[bytes]) -> None:
        file: IO[bytes] | None = None
        with stream, contextlib.ExitStack() as stack, contextlib.suppress(ValueError):
            for line in stream:
                if file is None and not self._lines:
                    file = self._open(stack)
                self._lines.append(line)
                if file is not None:
                    with contextlib.suppress(OSError):
                        file.write(line)

    def _open(self, stack: contextlib.ExitStack) -> IO[bytes] | None:
        folder = log_folder()
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            older = sorted(folder.glob("daemon-*.log"), key=lambda path: path.stat().st_mtime)
            for path in older[: max(0, len(older) - FILES_KEPT + 1)]:
                path.unlink()
            file = stack.enter_context(open(folder / self._name, "wb", buffering=0))  # noqa: SIM115 (the stack does)
            self.path = folder / self._name
            return file
        return None
