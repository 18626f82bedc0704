"""A daemon that belongs to one program: started as a child, gone with its parent however that ends.

Owns starting, the ready line, passing errors and progress on, and stopping. What the daemon does is `coordinator.py`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from types import TracebackType
from typing import IO, Any

from bloomery.runtime import endpoints, errors
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.errors import BloomeryError

STOP_SECONDS = 10.0
LAST_WORDS = 20
_ERROR_TYPES: dict[str, type[BloomeryError]] = {
    kind.__name__: kind
    for kind in (errors.ModelFileError, errors.PlanError, errors.WorkerLost, endpoints.EndpointError)
}


class PrivateDaemon:
    """Starts the daemon and returns when it is ready. `progress(stage, done, total)` is called in this thread.

    Raises the daemon's own BloomeryError if it cannot start. `endpoint`, `control` and `status` are those of its ready
    line. The child has a session of its own, so that Ctrl-C in a terminal reaches only the program that owns it.
    """

    def __init__(
        self, config: DaemonConfig, progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    ) -> None:
        configuration = json.dumps(asdict(replace(config, exit_with_parent=True)))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bloomery.runtime", configuration, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._words: deque[bytes] = deque(maxlen=LAST_WORDS)
        self._listener = threading.Thread(
            target=_keep_last, args=(self._process.stderr, self._words), name="bloomery-daemon-log", daemon=True
        )
        self._listener.start()
        try:
            self.status = self._await_ready(self._process.stdout, progress)
        except BaseException:
            self.close()
            raise
        self.endpoint = str(self.status["endpoint"])
        self.control = str(self.status["control"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_words(self) -> str:
        """The last lines that the daemon wrote to standard error."""
        return b"".join(self._words).decode(errors="replace").strip()

    def close(self) -> None:
        """SIGTERM, and SIGKILL if it is still there after STOP_SECONDS."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(1.0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> PrivateDaemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_ready(self, lines: IO[bytes], progress: Callable[[str, int, int], None]) -> dict[str, Any]:
        for line in lines:
            entry = json.loads(line)
            if "progress" in entry:
                progress(*entry["progress"])
            elif "error" in entry:
                raise _exception(entry["error"])
            else:
                return dict(entry["ready"])
        self._process.wait()
        self._listener.join(1.0)
        words = self.last_words().splitlines()
        raise BloomeryError(
            f"the daemon ended before it was ready, exit status {self._process.returncode}"
            + (f"; its last words: {words[-1]}" if words else ""),
            "start it with bloomery-launch to see its whole log",
        )


def _exception(description: dict[str, str]) -> BloomeryError:
    kind = _ERROR_TYPES.get(description["type"], BloomeryError)
    return kind(description["message"], description["hint"])


def _keep_last(stream: IO[bytes], words: deque[bytes]) -> None:
    with stream, contextlib.suppress(ValueError):
        words.extend(stream)
