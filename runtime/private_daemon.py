"""A daemon that belongs to one program: started as a child, gone with its parent however that ends.

Owns starting, the ready line, passing errors and progress on, and stopping. What the daemon does is `coordinator.py`'s,
what it writes to standard error is kept by `daemon_log.py`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from types import TracebackType
from typing import IO, Any

from bloomery.runtime import endpoints, errors
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.daemon_log import DaemonLog
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.process_tree import signal_name

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
_STOPPED = (0, -signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)  # ends that were asked for
_ERROR_TYPES: dict[str, type[BloomeryError]] = {
    kind.__name__: kind
    for kind in (errors.ModelFileError, errors.PlanError, errors.WorkerLost, endpoints.EndpointError)
}


class PrivateDaemon:
    """Starts the daemon and returns when it is ready. `progress(stage, done, total)` is called in this thread.

    Raises the daemon's own BloomeryError if it cannot start. `endpoint`, `control` and `status` are those of its ready
    line. The child has a process group of its own, so that Ctrl-C in a terminal reaches only the program that owns it,
    but not a session: where the kernel groups tasks by session (`session_groups`), one that waits by yielding its core
    holds other sessions up for a second at a time (Linux 6.18).
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
            process_group=0,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._log = DaemonLog(self._process.stderr, f"daemon-{self._process.pid}.log")
        self._started = False
        try:
            self.status = self._await_ready(self._process.stdout, progress)
        except BaseException:
            self.close()
            raise
        self._started = True
        self.endpoint = str(self.status["endpoint"])
        self.control = str(self.status["control"])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether its process is there, however slow."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """The last lines that the daemon wrote to standard error."""
        return self._log.last_words()

    def close(self) -> None:
        """SIGTERM, and SIGKILL if it is still there after STOP_SECONDS. Warns of one that had ended by itself, with its
        last lines, and of anything else that it wrote."""
        ended = self._process.poll() is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        else:
            # one that dies while its threads still exit is no zombie yet when it is polled
            ended = ended or self._process.returncode not in _STOPPED
        self._log.join(1.0)
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._started:
            self._started = False
            self._tell(ended)

    def _tell(self, ended: bool) -> None:
        words, where = self.last_words(), f"; its log: {self._log.path}" if self._log.path else ""
        if ended:
            lines = f"; its last lines:\n{words}" if words else ""
            log.warning("the daemon (pid %d) %s%s%s", self.pid, self._end(), where, lines)
        elif where:
            log.warning("the daemon (pid %d) had something to say%s", self.pid, where)

    def _end(self) -> str:
        status = self._process.returncode
        return f"ended with exit status {status}" if status >= 0 else f"was killed by {signal_name(-status)}"

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
        self._log.join(1.0)
        words = self.last_words().splitlines()
        raise BloomeryError(
            f"the daemon {self._end()} before it was ready" + (f"; its last words: {words[-1]}" if words else ""),
            f"its log: {self._log.path}" if self._log.path else "it wrote nothing; start it again, or bloomery-launch",
        )


def _exception(description: dict[str, str]) -> BloomeryError:
    kind = _ERROR_TYPES.get(description["type"], BloomeryError)
    return kind(description["message"], description["hint"])
