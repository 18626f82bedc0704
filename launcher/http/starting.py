"""Starting the private daemon beside everything else. Imports nothing heavy: it runs before the HTTP modules load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol


class Daemon(Protocol):
    """A daemon that this server started and has to stop."""

    endpoint: str

    def close(self) -> None: ...


class StartedDaemon:
    """Starts a daemon in a thread of its own, at once, so that loading overlaps with whatever the program does next."""

    def __init__(self, start: Callable[[], Daemon]) -> None:
        self._daemon: Daemon | None = None
        self._future: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, args=(start,), name="bloomery-start", daemon=True)
        self._thread.start()

    def _run(self, start: Callable[[], Daemon]) -> None:
        try:
            self._daemon = start()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._daemon.endpoint)

    @property
    def endpoint(self) -> Future[str]:
        return self._future

    def close(self) -> None:
        self._thread.join()
        if self._daemon is not None:
            self._daemon.close()


def named(endpoint: str) -> Future[str]:
    """An endpoint that is there already."""
    future: Future[str] = Future()
    future.set_result(endpoint)
    return future
