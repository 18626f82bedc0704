"""One pinned process of the memory probe, and the handle that the prober has of it.

Owns the small conversation over a pipe: a reader is told when to start and for how long to read, and answers with what
it managed. Does not know what is made of the figures. A reader ends by itself when its prober is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Literal, Self

import psutil

from bloomery.runtime.errors import WorkerLost

START_SECONDS: Final = 120.0  # importing and, the first time, compiling, on a machine with many cores
CHUNK_WORDS: Final = 1 << 20  # 8 MiB between two looks at the clock
LATENCY_SECONDS: Final = 0.3
CHASE_STEPS: Final = 1 << 14
CHAIN_SEED: Final = 17

Command = tuple[Literal["read"], float, float] | tuple[Literal["latency"]]


class Reader:
    """A process pinned to `cpu` that owns a buffer of `nbytes` in its own node's memory."""

    def __init__(self, cpu: int, nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.cpu = cpu
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_reader_main, args=(theirs, cpu, nbytes), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def ask(self, command: Command) -> None:
        try:
            self._connection.send(command)
        except OSError:
            raise self._lost() from None

    def answer(self, timeout: float) -> Any:
        """What the process answers; WorkerLost if it ends, fails or says nothing for `timeout` seconds."""
        try:
            if self._connection.poll(timeout):
                result = self._connection.recv()
                if isinstance(result, Exception):
                    message = f"the probe process on CPU {self.cpu} failed: {result!r}"
                    raise WorkerLost(message, "see whether the affinity mask or free memory has changed meanwhile")
                return result
        except (EOFError, OSError):
            raise self._lost() from None
        raise WorkerLost(f"the probe process on CPU {self.cpu} did not answer for {timeout:.0f} s", "try again")

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _lost(self) -> WorkerLost:
        self._process.join(2)
        status = self._process.exitcode
        return WorkerLost(
            f"the probe process on CPU {self.cpu} ended with status {status}",
            "it may have been killed for lack of memory; probe with fewer processes (--processes)",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _reader_main(connection: Connection, cpu: int, nbytes: int) -> None:
    """Pins itself, prepares its buffer, answers "ready" and then each command until the pipe is closed."""
    with contextlib.suppress(EOFError, KeyboardInterrupt, OSError):
        try:
            psutil.Process().cpu_affinity([cpu])
            state = _ReaderState(nbytes)
            connection.send("ready")
        except Exception as error:
            connection.send(error)
            return
        while True:
            command: Command = connection.recv()
            connection.send(state.read(command[1], command[2]) if command[0] == "read" else state.latency())


class _ReaderState:
    """The buffer and the compiled loops; the kernels are imported here so that the prober itself needs no Numba."""

    def __init__(self, nbytes: int) -> None:
        from bloomery.runtime import probe_kernels

        self.kernels = probe_kernels
        self.words = probe_kernels.fresh_buffer(nbytes)
        self.linked = False

    def read(self, begin: float, seconds: float) -> tuple[int, float, float]:
        """Bytes read, the seconds that took and the seconds that this process had its CPU meanwhile.

        Reading starts at monotonic time `begin`, which is the same instant for all readers."""
        chunks = [self.words[first : first + CHUNK_WORDS] for first in range(0, self.words.size, CHUNK_WORDS)]
        while time.monotonic() < begin:
            pass
        start = now = time.monotonic()
        cpu = time.process_time()
        done = index = 0
        while now < begin + seconds or done == 0:
            self.kernels.read_all(chunks[index])
            done += chunks[index].nbytes
            index = (index + 1) % len(chunks)
            now = time.monotonic()
        return done, now - start, time.process_time() - cpu

    def latency(self) -> float:
        """Seconds of one load that depends on the load before, at random lines of the buffer; the best window of many,
        as whatever else runs on this CPU only adds to it."""
        if not self.linked:
            self.kernels.link_lines(self.words, CHAIN_SEED)
            self.linked = True
        place, best = 0, float("inf")
        start = now = time.perf_counter()
        while now < start + LATENCY_SECONDS:
            before = now
            place = int(self.kernels.chase(self.words, place, CHASE_STEPS))
            now = time.perf_counter()
            best = min(best, (now - before) / CHASE_STEPS)
        return best
