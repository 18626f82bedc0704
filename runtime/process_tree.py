"""Child processes of a coordinator: starting them, noticing their death, their last words, dying with the parent.

Owns process handling on Linux. Knows nothing of what a child computes or how it is talked to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import IO

from bloomery.runtime.runtime_files import process_state

_LAST_WORDS_BYTES = 8192


class Child:
    """A Python module running as a child process, its standard error kept in a bounded buffer."""

    def __init__(self, module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        # -P: the current directory must not shadow modules that the child imports.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        self.pid = self._process.pid
        try:
            self.descriptor = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.communicate()
            raise
        assert self._process.stderr is not None
        self._words: deque[bytes] = deque()
        self._reader = threading.Thread(
            target=_keep_tail, args=(self._process.stderr, self._words), name=f"stderr of {self.pid}", daemon=True
        )
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether a signal keeps it from running until another one comes."""
        return process_state(self.pid) == "T"

    @property
    def killed_by(self) -> int:
        """The number of the signal that ended it; 0 if none did."""
        return max(0, -(self._process.poll() or 0))

    def describe_exit(self, where: str = "") -> str:
        """`was killed by SIGKILL` or `ended with exit status 3`, where, and its last words if there are any."""
        status = self._process.poll()
        if status is None:
            return f"is still running{where}"
        if status < 0:
            return f"was killed by {signal_name(-status)}{where}{self._quoted_words()}"
        return f"ended with exit status {status}{where}{self._quoted_words()}"

    def last_words(self) -> str:
        """The end of what the child wrote to standard error."""
        if not self.alive:
            self._reader.join(0.2)  # what is still in the pipe
        return b"".join(list(self._words)).decode(errors="replace")[-_LAST_WORDS_BYTES:].strip()

    def _quoted_words(self) -> str:
        """The line that says most: of a crash its first, of a traceback its last."""
        lines = [line.strip() for line in self.last_words().splitlines()]
        crash = [line for line in lines if line.startswith("Fatal Python error")]
        return f"; its last words: {(crash or lines)[-1]}" if lines else ""

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def join(self, deadline: float) -> bool:
        """Waits until the process is gone or `time.monotonic()` reaches the deadline; whether it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        return not self.alive

    def release(self) -> None:
        """Reaps the process, which must be gone, and closes what is left of it here."""
        self._process.wait()
        self._reader.join(1.0)
        os.close(self.descriptor)


def _keep_tail(stream: IO[bytes], words: deque[bytes]) -> None:
    """Reads a stream to its end and keeps the last _LAST_WORDS_BYTES or a little more."""
    with stream:
        held = 0
        while chunk := os.read(stream.fileno(), 4096):
            words.append(chunk)
            held += len(chunk)
            while held - len(words[0]) >= _LAST_WORDS_BYTES:
                held -= len(words.popleft())


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class DeathWatch:
    """Tells which of some children have died, in one system call."""

    def __init__(self, children: Iterable[Child]) -> None:
        self._poll = select.poll()
        for child in children:
            self._poll.register(child.descriptor, select.POLLIN)

    def any_dead(self) -> bool:
        return bool(self._poll.poll(0))


def watch_parent(parent: int, on_death: Callable[[], None]) -> None:
    """Starts a thread that calls `on_death` and then ends this process, whatever it is doing, once the parent is gone.

    A thread rather than PR_SET_PDEATHSIG, which fires when only the parent's *thread* that started this process ends,
    and whose signal would wait for a long computation outside Python.
    """

    def watch() -> None:
        try:
            descriptor = os.pidfd_open(parent)
            watcher = select.poll()
            watcher.register(descriptor, select.POLLIN)
            while os.getppid() == parent and not watcher.poll():
                pass
        except ProcessLookupError:
            pass
        on_death()
        os._exit(0)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
