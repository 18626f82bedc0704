"""The daemon that a server stands in front of: a private one, started and stopped at will, or one that runs anyway.

Owns starting beside everything else, in a thread. Imports nothing heavy: it runs before the HTTP modules load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol


class Daemon(Protocol):
    """A daemon that this server started and has to stop."""

    endpoint: str

    @property
    def runs(self) -> bool: ...

    def close(self) -> None: ...


class DaemonSource(Protocol):
    private: bool
    """Whether it is this server's own: stopping it frees its memory, and a dead one can be replaced."""

    @property
    def runs(self) -> bool:
        """Whether a private daemon's process is there, however slow; False where nothing is known of it."""

    def start(self) -> Future[str]:
        """The endpoint of the daemon, once there is one; called again after `stop`, another one."""

    def stop(self) -> None:
        """Ends a private daemon; waits until it is gone."""


class PrivateSource:
    """`make` starts a daemon and returns when it is ready."""

    private = True

    def __init__(self, make: Callable[[], Daemon]) -> None:
        self._make = make
        self._daemon: Daemon | None = None
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        daemon = self._daemon
        return daemon is not None and daemon.runs

    def start(self) -> Future[str]:
        future: Future[str] = Future()
        future.set_running_or_notify_cancel()  # who stops waiting for it must not cancel it: the daemon still comes

        def run() -> None:
            try:
                self._daemon = self._make()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(self._daemon.endpoint)

        self._thread = threading.Thread(target=run, name="bloomery-start", daemon=True)
        self._thread.start()
        return future

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.join()
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.close()


class NamedSource:
    """A daemon that somebody else started."""

    private = False
    runs = False

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def start(self) -> Future[str]:
        future: Future[str] = Future()
        future.set_result(self._endpoint)
        return future

    def stop(self) -> None:
        pass
