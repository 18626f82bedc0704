"""Listening sockets and the event loop: from settings to a server that runs until it is told to stop.

Owns the order of the end: no new connections, running answers get a moment, then they are cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future

import uvicorn

from bloomery.launcher.http.app import make_app
from bloomery.launcher.http.backend import Backend
from bloomery.launcher.http.server import Server
from bloomery.launcher.http.settings import ServerSettings
from bloomery.launcher.http.starting import DaemonSource
from bloomery.runtime.errors import BloomeryError

log = logging.getLogger(__name__)

BACKLOG = 1024
WATCH_SECONDS = 0.25
DEFAULT_BLOCK = 512
SWITCH_INTERVAL_S = 0.0005
"""How long the connection's thread may keep the interpreter from the event loop (Python's default: 5 ms)."""
END_SECONDS = 2.0
"""How long answers that are cut may take to send their last words."""


def listen(settings: ServerSettings) -> list[socket.socket]:
    """A listening socket for every address; port 0 chooses one. Raises BloomeryError naming the address."""
    sockets: list[socket.socket] = []
    port = settings.port
    for host in settings.hosts:
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            server = socket.socket(family, kind)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            server.bind(address)
            server.listen(BACKLOG)
        except OSError as error:
            raise BloomeryError(f"cannot listen on {host}:{port}: {error.strerror}", "choose another --port") from None
        port = server.getsockname()[1]
        sockets.append(server)
    return sockets


def run_server(
    settings: ServerSettings,
    source: DaemonSource,
    endpoint: Future[str],
    *,
    timeout: float,
    prompt_block: int | None,
    say: Callable[[str], None],
) -> int:
    """Serves until SIGTERM or SIGINT; `endpoint` is what `source.start` gave. `say` gets a line when it listens and one
    when the model is ready. Raises what kept the daemon from starting."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sockets = listen(settings)
    backend = Backend(source, endpoint)
    server = Server(settings, backend)
    server.prompt_block = prompt_block or DEFAULT_BLOCK
    config = uvicorn.Config(
        make_app(server),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=max(1, round(timeout)),
        timeout_graceful_shutdown=max(1, round(settings.stop_seconds + END_SECONDS)),
        server_header=False,
        ws="none",
    )
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    say(f"listening on {', '.join(map(_shown, sockets))}")

    def ready() -> None:
        facts = backend.facts
        say(f"{server.model_name} is ready: {facts.slots} slots of {facts.context} tokens")

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(uvicorn.Server(config), sockets, server, ready))
    if backend.state == "failed" and backend.error is not None:
        raise backend.error
    return 0


async def _serve(
    http: uvicorn.Server,
    sockets: list[socket.socket],
    server: Server,
    ready: Callable[[], None],
) -> None:
    loop = asyncio.get_running_loop()
    backend = server.backend

    def stop() -> None:
        if http.should_exit:
            http.force_exit = True
            backend.abort_all()
        http.should_exit = True
        loop.call_later(server.settings.stop_seconds, backend.abort_all)

    http.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    watching = asyncio.create_task(watch(server, ready, stop))
    serving = asyncio.create_task(http._serve(sockets))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await serving
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    await backend.close()


async def watch(server: Server, ready: Callable[[], None], stop: Callable[[], None]) -> None:
    """Opens the backend, replaces a daemon that is lost, lets an idle one sleep. Ends the server if none can start."""
    backend = server.backend
    await backend.open()
    if backend.state == "ready":
        ready()
    while backend.state != "failed":
        await asyncio.sleep(WATCH_SECONDS)
        if backend.lost:
            log.error("the connection to the daemon is lost: making another")
            await backend.reopen()
        elif server.idle_seconds > server.settings.sleep_seconds > 0 and backend.can_sleep:
            await server.fall_asleep()
    stop()


def _shown(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"
