"""bloomery on a Ray cluster: every replica owns a daemon, requests return to the replica that knows their beginning.

Owns the Ray Serve application (docs/ray.md): the front, which reads requests, the router, which chooses replicas, the
replica, which runs bloomery-serve's own HTTP application, and the board, on which replicas leave their figures. Needs
the extra `bloomery[ray]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Message

from bloomery.launcher.http.app import HEALTH, has_key, make_app, no_key
from bloomery.launcher.http.backend import Backend
from bloomery.launcher.http.endpoints import too_large
from bloomery.launcher.http.errors import error_object, error_response
from bloomery.launcher.http.metrics import Rates, metrics_text
from bloomery.launcher.http.run import DEFAULT_BLOCK, watch
from bloomery.launcher.http.server import Server
from bloomery.launcher.http.settings import ServerSettings
from bloomery.launcher.http.starting import PrivateSource
from bloomery.launcher.http.state import no_metrics
from bloomery.launcher.ray_metrics import Figures
from bloomery.launcher.ray_routing import Memory, beginnings
from bloomery.launcher.serve import DEFAULT_SLOTS, build_parser, daemon_of, settings_of
from bloomery.runtime.errors import BloomeryError, RequestError
from bloomery.runtime.private_daemon import PrivateDaemon

log = logging.getLogger("ray.serve")

NAME_HEADER = "x-bloomery-replica"
ATTEMPTS = 3
REPORT_SECONDS = 2.0
HeaderLines: TypeAlias = list[tuple[bytes, bytes]]


class PrefixRouter(RequestRouter):
    """Ray's interface to `Memory`: the first argument of a call is the keys of its conversation's beginnings."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._memory = Memory(**kwargs)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica a rank, so that Ray takes the next one only where the slots of those before are all taken."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # all of them have been offered
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not pending_request.args[0]:
            return [candidate_replicas]  # says nothing that a cache could know: the least loaded one
        return [[named[name]] for name in self._memory.order(pending_request.args[0], named)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._memory.record(pending_request.args[0], replica_id.unique_id)


class Board:
    """The figures of all replicas. Asking it waits for no replica, however busy they are."""

    def __init__(self) -> None:
        self._figures = Figures()

    async def report(self, replica: str, text: str) -> None:
        self._figures.report(replica, text)

    async def text(self, labelled: bool) -> str:
        return self._figures.labelled() if labelled else self._figures.summed()


class Replica:
    """A private daemon and bloomery-serve's application in front of it, in one Ray actor."""

    def __init__(self, flags: str, board: DeploymentHandle) -> None:
        args = build_parser().parse_args(shlex.split(flags))
        config = daemon_of(args)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._source = PrivateSource(lambda: PrivateDaemon(config))
        endpoint = self._source.start()
        endpoint.result()  # raises what kept it from starting; until then this replica gets no requests
        self._backend = Backend(self._source, endpoint)
        self._server = Server(settings_of(args), self._backend)
        self._server.prompt_block = args.batch_size or DEFAULT_BLOCK
        self._app = make_app(self._server)
        self._board, self._rates = board, Rates()
        self._watching: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Called once before the first request, then at intervals: Ray replaces a replica whose daemon is lost for
        good. (One that dies is started again by this replica.)"""
        if self._watching is None:
            opened = asyncio.Event()
            self._watching = asyncio.create_task(watch(self._server, opened.set, opened.set))
            await opened.wait()
            if self._server.settings.metrics_endpoint:
                self._reporting = asyncio.create_task(self._report())
        if self._backend.state == "failed":
            raise BloomeryError(f"the daemon cannot be used: {self._backend.error}")

    async def _report(self) -> None:
        """Leaves this replica's figures on the board, again and again."""
        while True:
            try:
                text = metrics_text(await self._server.metrics(), self._server.longest, self._rates)
                await self._board.report.remote(self._name, text)
            except Exception as error:  # a daemon or a board that is being replaced
                log.info("no report: %s", error)
            await asyncio.sleep(REPORT_SECONDS)

    async def ask(
        self, keys: tuple[str, ...], method: str, path: str, query: bytes, headers: HeaderLines, body: bytes
    ) -> AsyncIterator[Any]:
        """Status and headers, then pieces of the answer's body. `keys` are the router's."""
        gone = asyncio.Event()
        said: asyncio.Queue[Message | None] = asyncio.Queue()
        unread = [body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query,
            "headers": headers,
        }

        async def run() -> None:
            try:
                await self._app(scope, receive, said.put)
            finally:
                said.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            while (message := await said.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message["headers"], (NAME_HEADER.encode(), self._name.encode())]
                elif message.get("body"):
                    yield message["body"]
            await running
        finally:  # also when the client has gone: the application sees it and frees the slot
            gone.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(running)

    def __del__(self) -> None:
        """Ray's call when it takes a replica away; a killed one's daemon ends by itself."""
        for task in (getattr(self, "_watching", None), getattr(self, "_reporting", None)):
            if task:
                task.cancel()  # or it would start another daemon
        if source := getattr(self, "_source", None):
            source.stop()


class Front:
    """Reads requests and hands them to replicas: whatever is sent to it looks like bloomery-serve."""

    def __init__(
        self, replicas: DeploymentHandle, board: DeploymentHandle, settings: ServerSettings, application: str
    ) -> None:
        self._board = board
        self._replicas = replicas.options(method_name="ask", stream=True)
        self._settings = settings
        self._application = application
        prefix = settings.prefix.rstrip("/")
        self._health = {prefix + path for path in HEALTH}
        self._metrics = f"{prefix}/metrics"

    async def __call__(self, request: Request) -> Response:
        if request.url.path in self._health:
            return await self._state()
        try:
            if request.method == "GET" and request.url.path == self._metrics:
                return await self._figures(request)
            body = await read_body(request, self._settings.max_body)
            return await self._forward(request, body)
        except RequestError as error:
            return error_response(error, anthropic=request.url.path.startswith("/v1/messages"))

    async def _state(self) -> Response:
        """Health of the whole: asks Ray, not the replicas, so that full ones cannot keep it waiting."""
        status = await asyncio.to_thread(serve.status)
        application = status.applications.get(self._application)
        deployment = application.deployments.get("Replica") if application else None
        running = deployment.replica_states.get("RUNNING", 0) if deployment else 0
        if not running:
            return error_response(RequestError("loading", "no replica is ready"))
        return JSONResponse({"status": "ok", "replicas": running})

    async def _figures(self, request: Request) -> Response:
        """Of all replicas: their sums, or with ?by=replica each one's."""
        if not has_key(request.headers, self._settings.api_keys):
            raise no_key()
        if not self._settings.metrics_endpoint:
            raise no_metrics()
        labelled = request.query_params.get("by") == "replica"
        text = await self._board.text.remote(labelled)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _forward(self, request: Request, body: bytes) -> Response:
        keys: tuple[str, ...] = ()
        with contextlib.suppress(ValueError, RecursionError):  # not JSON: the replica says so
            keys = beginnings(json.loads(body)) if body else ()
        path, query = request.url.path, request.scope["query_string"]
        headers = [(name, value) for name, value in request.headers.raw if name != b"transfer-encoding"]
        for attempt in range(1, ATTEMPTS + 1):
            answer = aiter(self._replicas.remote(keys, request.method, path, query, headers, body))
            try:
                status, lines = await anext(answer)
                break
            except BackPressureError:
                raise RequestError("overloaded", "every replica's slots and the queue are full") from None
            except RayActorError as error:  # nothing has been said yet, so another one may answer
                log.warning("a replica died before it answered, attempt %d of %d: %s", attempt, ATTEMPTS, error)
        else:
            raise RequestError("worker_lost", f"replicas died in {ATTEMPTS} attempts to answer")
        response = StreamingResponse(_rest(answer, lines), status)
        response.raw_headers = list(lines)
        return response


async def _rest(answer: AsyncIterator[bytes], lines: HeaderLines) -> AsyncIterator[bytes]:
    """The body; a stream whose replica dies ends with an error event."""
    try:
        async for piece in answer:
            yield piece
    except RayActorError:
        if not any(value.startswith(b"text/event-stream") for name, value in lines if name == b"content-type"):
            raise
        error = error_object(RequestError("worker_lost", "the replica died while it answered"))
        yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes. Raises RequestError("too_large")."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit:
            raise too_large(limit)
    return bytes(data)


def app(options: dict[str, str]) -> serve.Application:
    """The application, for `serve run bloomery.launcher.ray_serve:app key=value ...` or a Serve config file.

    Options: `flags`, bloomery-serve's command line (-m, -c, --parallel, ...); `replicas` (1), or `min_replicas` and
    `max_replicas` for as many as the load asks for; `cpus` that Ray sets aside for each (1); `per_node`, replicas on
    one machine at most (1; 0: no limit); `queue`, requests that may wait before full replicas (64); `name`, that of
    the application (bloomery). Raises BloomeryError for anything else.
    """
    given = {**_DEFAULTS, **{name: str(value) for name, value in options.items()}}
    if unknown := given.keys() - _DEFAULTS.keys():
        raise BloomeryError(f"unknown option {', '.join(sorted(unknown))}", f"there are {', '.join(_DEFAULTS)}")
    args = build_parser().parse_args(shlex.split(given["flags"]))
    if args.endpoint is not None:
        raise BloomeryError("--endpoint has no meaning here: every replica starts a daemon of its own", "leave it out")
    numbers = {name: _number(name, text) for name, text in given.items() if name not in ("flags", "name")}
    slots = args.parallel if args.parallel and args.parallel > 0 else DEFAULT_SLOTS
    scale: dict[str, Any] = {"num_replicas": numbers["replicas"]}
    if numbers["max_replicas"]:
        scale = {
            "autoscaling_config": {
                "min_replicas": numbers["min_replicas"],
                "max_replicas": numbers["max_replicas"],
                "target_ongoing_requests": max(1, slots // 2),
            }
        }
    replicas = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": numbers["cpus"]},
        max_replicas_per_node=numbers["per_node"] or None,
        max_ongoing_requests=slots,
        max_queued_requests=numbers["queue"],
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=20,
        **scale,
    )
    light: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": numbers["queue"] + 10_000}
    board = serve.deployment(Board, name="Board", **light).bind()
    front = serve.deployment(Front, name="Front", **light)
    return front.bind(replicas.bind(given["flags"], board), board, settings_of(args), given["name"])


def _number(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise BloomeryError(f"{name} {text!r} is not a number", f"such as {name}=1")
    return number


_DEFAULTS = {
    "flags": "",
    "replicas": "1",
    "min_replicas": "1",
    "max_replicas": "0",
    "cpus": "1",
    "per_node": "1",
    "queue": "64",
    "name": "bloomery",
}
