"""A server whose start is given up before the daemon is there: the daemon still comes, and is ended.

Planted once and seen to fail: a future that who waits for it can cancel (InvalidStateError in the starting thread).
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from bloomery.launcher.http.backend import Backend
from bloomery.launcher.http.starting import PrivateSource


class Daemon:
    endpoint = "ipc:///nowhere/at/all"
    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_start_that_is_given_up() -> None:
    go, daemon = threading.Event(), Daemon()

    def make() -> Daemon:
        assert go.wait(20)
        return daemon

    source = PrivateSource(make)

    async def give_up() -> None:
        opening = asyncio.create_task(Backend(source, endpoint).open())
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    endpoint = source.start()
    asyncio.run(give_up())
    assert not endpoint.cancelled()
    go.set()
    assert endpoint.result(20) == daemon.endpoint
    source.stop()
    assert daemon.closed == 1
