"""A server whose start is given up before the daemon is there: the daemon still comes, and is ended. A server that its
daemon has forgotten comes back to it.

Planted once and seen to fail: a future that who waits for it can cancel (InvalidStateError in the starting thread); a
backend that replaces its daemon whenever the connection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading

import pytest

from bloomery.launcher.demo_model import demo_model_path
from bloomery.launcher.http.backend import Backend
from bloomery.launcher.http.starting import PrivateSource
from bloomery.runtime.completion import new_request_id
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.errors import RequestError
from bloomery.runtime.private_daemon import PrivateDaemon
from bloomery.runtime.protocol import Kind, Message
from bloomery.runtime.requests import Failed, GenerationRequest


class Daemon:
    endpoint = "ipc:///nowhere/at/all"
    runs = True
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


def test_a_daemon_that_has_forgotten_its_client_is_not_replaced() -> None:
    """As after a time in which the server itself got nothing to run on: requests are over, model and caches are not."""
    model = demo_model_path("tiny-qwen3moe")
    config = DaemonConfig(model, executor="reference", context=256, slots=1, prompt_block=32)
    source = PrivateSource(lambda: PrivateDaemon(config))

    async def forgotten() -> None:
        backend = Backend(source, source.start())
        await backend.open()
        before = (await backend.control("status"))["pid"]
        events = backend.generate(GenerationRequest(new_request_id(), tokens=(5,), max_tokens=200, ignore_eos=True))
        backend.client._connection.send(Message(Kind.BYE))
        last = [event async for event in events][-1]
        assert isinstance(last, Failed) and "has forgotten" in last.message and backend.lost
        await backend.reopen()
        assert backend.state == "ready" and (await backend.control("status"))["pid"] == before
        assert await backend.tokenize("and on it goes")
        os.kill(before, signal.SIGKILL)
        while not backend.lost:
            await asyncio.sleep(0.02)
            with contextlib.suppress(RequestError):
                await backend.tokenize("until it is noticed")
        await backend.reopen()
        assert backend.state == "ready" and (await backend.control("status"))["pid"] != before
        await backend.close()

    try:
        asyncio.run(asyncio.wait_for(forgotten(), 60))
    finally:
        source.stop()
