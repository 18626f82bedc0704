"""The engram I/O process: sees a step begin, makes row ids of its tokens, brings the rows, raises the flags, sleeps.

Owns the process's side of `bloomery.runtime.engram_record`. How rows are read is `row_reader`'s, which rows
`step_fetch`'s. It leaves when the coordinator says so or is gone.
"""

from __future__ import annotations

import os
import threading
import time
import traceback

from bloomery.engram_io.step_fetch import StepFetch
from bloomery.runtime.architectures import load_program
from bloomery.runtime.arena import Arena, ArenaLayout
from bloomery.runtime.engram_record import EngramWords, engram_tables
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.futex import FutexWaiter
from bloomery.runtime.router_choices import keep_choices
from bloomery.runtime.row_reader import RowReader, RowTable
from bloomery.runtime.step_record import STEP, STOP
from bloomery.runtime.worker_life import live
from bloomery.runtime.worker_link import Link
from bloomery.runtime.worker_messages import EngramStart, lowered_of

_SLEEP_SECONDS = 1.0
_MOMENT = 20e-6  # seconds, and the kernel's slack
"""After which a sleeper looks whether it has been told to stop; a new step wakes it."""


def run(start: EngramStart) -> int:
    """The life of the process; returns its exit status."""
    return live(start, lambda link: EngramWorker(start, link))


class EngramWorker:
    """Construction opens the model and its tables; `serve_until_told` does the rest."""

    def __init__(self, start: EngramStart, link: Link) -> None:
        self._start, self._link = start, link
        _, program = load_program(start.model, start.taps)
        self._program = keep_choices(program) if start.keep_choices else program
        self._tables = engram_tables(self._program)
        tables = [RowTable.of(self._program.weights[table.weight]) for table in self._tables]
        self._reader = RowReader(tables, cache_bytes=start.cache_bytes, direct=start.direct)
        self._fence = threading.Lock()

    def serve_until_told(self) -> None:
        self._link.send("hello", scratch=[], stages=0)
        message = self._link.receive()
        assert message["kind"] == "attach", message
        arena = Arena.attach(message["prefix"], ArenaLayout(self._program, self._start.shape, lowered_of(message)))
        control = arena.memory("control").data.cast("B").cast("q")
        words = EngramWords(arena.memory("engram"), len(self._tables))
        fetch = StepFetch(self._program, arena, self._reader)
        last = control[STEP // 8]
        bell = FutexWaiter(arena.memory("control").ctypes.data + STEP, _SLEEP_SECONDS)
        self._link.send("ready")
        while not control[STOP // 8]:
            step = self._await_step(control, last)
            if step != last:
                last = step
                self._bring(fetch, words, step)
                self._reader.tidy()
                continue
            words.sleeping = True
            with self._fence:  # a full fence between the store and the loads (step_record)
                pass
            if control[STEP // 8] == last and not control[STOP // 8]:
                bell.wait(last)
            words.sleeping = False

    def _await_step(self, control: memoryview, last: int) -> int:
        """Watches the step number for the idle time; the new one, or `last` if there is none."""
        deadline = time.monotonic_ns() + self._start.idle_ns
        while True:
            step: int = control[STEP // 8]
            if step != last or time.monotonic_ns() >= deadline:
                return step
            if self._start.yields:
                os.sched_yield()  # a worker may want this core
            else:
                time.sleep(_MOMENT)

    def _bring(self, fetch: StepFetch, words: EngramWords, step: int) -> None:
        """All flags are raised for this step, whatever happens."""
        raised = 0

        def done(site: int) -> None:
            nonlocal raised
            words.raise_flag(site, step)
            raised = site + 1

        try:
            fetch.bring(done)
        except BloomeryError as error:
            words.fail(step, error.message)
        except Exception as error:
            traceback.print_exc()
            words.fail(step, f"engram rows: {type(error).__name__}: {error}")
        for site in range(raised, len(self._tables)):
            words.raise_flag(site, step)
        counters, cache = self._reader.counters, self._reader.cache
        nanoseconds = (int(1e9 * counters.seconds), int(1e9 * counters.seconds_last))
        words.count(counters.fetches, counters.rows, counters.cached, counters.from_disk, *nanoseconds, cache.nbytes)
