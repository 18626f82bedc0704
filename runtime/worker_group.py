"""The worker processes of a pool: started, brought to readiness, rung, watched, replaced, ended.

Owns the processes and the ROUTER socket through which they are reached outside steps. Knows nothing of steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import zmq

from bloomery.runtime.arena import Arena, Lowered
from bloomery.runtime.errors import BloomeryError, PlanError, WorkerLost
from bloomery.runtime.file_sizes import FileSizes
from bloomery.runtime.process_tree import Child, DeathWatch
from bloomery.runtime.runtime_files import socket_path
from bloomery.runtime.worker_messages import DOORBELL, WorkerStart, decode, encode, error_of, lowered_of

_POLL_MS = 50
_LAST_MESSAGE_MS = 200

Progress = Callable[[str, int, int], None]


class WorkerGroup:
    """One process for each of `starts`. Not thread-safe: one thread at a time."""

    def __init__(
        self,
        name: str,
        starts: Sequence[WorkerStart],
        quiet_seconds: float,
    ) -> None:
        """`quiet_seconds`: how long a start may go without any message before it counts as hung."""
        self._quiet_seconds = quiet_seconds
        self._path = socket_path(f"{name}.sock")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._children: list[Child] = []
        self._sizes = FileSizes(starts[0].model)
        self._rows = [""] * len(starts)  # of each worker where its rows are found, if others may read them
        self._held: list[int] = []  # their descriptors: they outlive who filled them
        try:
            self._bind()
            self._starts = [replace(start, endpoint=f"ipc://{self._path}") for start in starts]
            for start in self._starts:
                self._children.append(self._spawn(start))
        except BaseException:
            self.end(0.0)
            raise
        self._watch = DeathWatch(self._children)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def describe(self, rank: int) -> str:
        return f"{self._starts[rank].who} (pid {self._children[rank].pid})"

    def describe_exit(self, rank: int, where: str = "") -> str:
        child = self._children[rank]
        described = f"{self.describe(rank)} {child.describe_exit(where)}"
        if child.killed_by == signal.SIGBUS:
            model = self._sizes.shortened() or f"{self._starts[rank].model} cannot be read, or /dev/shm is full"
            described += f"; a page of its memory was not there: {model}"
        return described

    def any_dead(self) -> bool:
        """One system call: whether a worker has died since it was started."""
        return self._watch.any_dead()

    def dead(self) -> list[int]:
        return [rank for rank, child in enumerate(self._children) if not child.alive]

    def stopped(self) -> list[int]:
        """Those that a signal keeps from running."""
        return [rank for rank, child in enumerate(self._children) if child.stopped]

    def ring(self, rank: int) -> None:
        """Wakes a sleeping worker. One that has died is found by the death watch, not here."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([self._starts[rank].identity, DOORBELL], zmq.NOBLOCK)

    def kill(self, rank: int) -> None:
        self._children[rank].kill()

    def hellos(self, ranks: Iterable[int], progress: Progress | None = None) -> dict[int, dict[str, Any]]:
        """Waits until these workers have opened the model and lowered its program. Raises what the first one to fail
        reports: ModelFileError, PlanError, or WorkerLost."""
        found = self._collect("hello", ranks, "spawn", progress)
        for rank, hello in found.items():
            if hello.get("rows") and not self._starts[rank].generation:
                with contextlib.suppress(OSError):  # then nobody helps it
                    self._held.append(os.open(hello["rows"], os.O_RDWR | os.O_CLOEXEC))
                    self._rows[rank] = f"/proc/{os.getpid()}/fd/{self._held[-1]}"
        return found

    def leaves_rows(self, rank: int) -> bool:
        """Whether a worker's successor takes its rows over."""
        return bool(self._rows[rank])

    def compile(self, ranks: Iterable[int], kernels: Sequence[str], progress: Progress) -> None:
        """Has each kernel compiled, or found in the cache, by whichever of these is free; each by one only."""
        queue, compiled = list(reversed(kernels)), 0
        progress("compile", 0, len(kernels))
        for rank in ranks:
            if queue:
                self._send(rank, encode("compile", kernel=queue.pop()))
        while compiled < len(kernels):
            rank, _ = self._receive("compiled", "compiling kernels", None)
            compiled += 1
            progress("compile", compiled, len(kernels))
            if queue:
                self._send(rank, encode("compile", kernel=queue.pop()))

    def attach(
        self, ranks: Iterable[int], arena: Arena, lowered: Lowered, progress: Progress | None = None
    ) -> dict[int, dict[str, Any]]:
        """Shows these workers the arena and waits until they can run steps; what they say of themselves."""
        ranks = list(ranks)
        message = encode("attach", prefix=arena.prefix, scratch=lowered.scratch, stages=lowered.stages, rows=self._rows)
        for rank in ranks:
            self._send(rank, message)
        return self._collect("ready", ranks, "load", progress)

    def ask(self, rank: int, kind: str, **fields: Any) -> dict[str, Any]:
        """Sends a worker on an errand between steps and waits for its answer. WorkerLost if it dies meanwhile."""
        self._send(rank, encode(kind, **fields))
        return self._receive("done", f"waiting for {kind}", None)[1]

    def replace_dead(self, arena: Arena, lowered: Lowered) -> list[int]:
        """Starts a new process in the place of each dead one and attaches it; the others are not touched."""
        dead = self.respawn_dead()
        for rank, hello in self.hellos(dead).items():
            if hello["stages"] and lowered_of(hello) != lowered:
                raise WorkerLost(
                    f"{self.describe(rank)} lowers the program differently from its predecessor",
                    "the installation or the model file has changed under the running daemon: restart it",
                )
        self.attach(dead, arena, lowered)
        return dead

    def respawn_dead(self) -> list[int]:
        """Starts a new process in the place of each dead one; it will say hello."""
        dead = self.dead()
        for rank in dead:
            last = self._starts[rank]
            self._starts[rank] = replace(last, generation=last.generation + 1, rows=self._rows[rank])
            successor = self._spawn(self._starts[rank])
            self._children[rank].release()
            self._children[rank] = successor
        self._watch = DeathWatch(self._children)
        return dead

    def end(self, grace_seconds: float) -> None:
        """Waits for the workers, which have been told to stop; kills those left after the grace time; reaps all."""
        deadline = time.monotonic() + grace_seconds
        for child in self._children:
            if not child.join(deadline):
                child.kill()
            child.release()
        self._children = []
        for descriptor in self._held:
            os.close(descriptor)
        self._held = []
        self._context.destroy(linger=0)
        self._path.unlink(missing_ok=True)

    def _spawn(self, start: WorkerStart) -> Child:
        # NumPy's BLAS would start a thread for each core in every worker, which no kernel uses.
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            return Child(start.MODULE, [start.to_json()], threads)
        except OSError as error:
            raise PlanError(
                f"cannot start {start.who} of {len(self._starts)}: {error.strerror}",
                "start fewer (--threads), or raise the limits on processes, memory and open files (ulimit -u, -v, -n)",
            ) from error

    def _bind(self) -> None:
        try:
            self._socket.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            raise BloomeryError(
                f"cannot bind the workers' socket {self._path}: {error.strerror}",
                "set XDG_RUNTIME_DIR to a directory on a local file system",
            ) from error

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._socket.send_multipart([self._starts[rank].identity, message])
        except zmq.ZMQError as error:
            raise self._lost(rank) from error

    def _collect(
        self, kind: str, ranks: Iterable[int], stage: str, progress: Progress | None
    ) -> dict[int, dict[str, Any]]:
        waiting = set(ranks)
        total = len(waiting)
        messages: dict[int, dict[str, Any]] = {}
        while waiting:
            if progress:
                progress(stage, len(messages), total)
            rank, message = self._receive(kind, stage, progress)
            waiting.discard(rank)
            messages[rank] = message
        if progress:
            progress(stage, total, total)
        return messages

    def _receive(self, kind: str, doing: str, progress: Progress | None) -> tuple[int, dict[str, Any]]:
        """The next message of this kind; raises what an error message says, or that a worker is gone or silent."""
        quiet_since = time.monotonic()
        while True:
            if self._socket.poll(_POLL_MS):
                identity, frame = self._socket.recv_multipart()
                rank = int(identity.partition(b".")[0])
                if identity != self._starts[rank].identity:
                    continue  # the last words of a predecessor
                message = decode(frame)
                if message["kind"] == "error":
                    raise error_of(message, self.describe(rank))
                if message["kind"] == "progress":
                    quiet_since = time.monotonic()
                    if progress:
                        progress(message["stage"], message["done"], message["total"])
                if message["kind"] == kind:
                    return rank, message
            elif self.any_dead() and not self._socket.poll(_LAST_MESSAGE_MS):
                raise self._lost(self.dead()[0])
            elif time.monotonic() - quiet_since > self._quiet_seconds:
                raise WorkerLost(
                    f"no worker has reported for {self._quiet_seconds:.0f} s while {doing}",
                    "if the machine is merely slow, raise BLOOMERY_DEADLINE_SCALE",
                )

    def _lost(self, rank: int) -> WorkerLost:
        return WorkerLost(
            self.describe_exit(rank),
            "see its last words; start again once the cause is gone",
        )
