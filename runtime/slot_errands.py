"""What is done to a slot while no request uses it: its cache saved to a file, brought back from one, or forgotten.

Owns what each of these does, and how it ends. Copies are the engine's thread's, in pieces between steps; files are read
and written by threads of their own, so that no step waits for a disk. When is the engine's business, what is in files
`slot_files`'.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.runtime.errors import BloomeryError, RequestError
from bloomery.runtime.executor import InPieces, StepExecutor
from bloomery.runtime.slots import Slot

if TYPE_CHECKING:
    from bloomery.runtime.slot_files import SlotFiles

log = logging.getLogger(__name__)


class Errand:
    """Something to do with a slot while no request uses it. `result` is set by whoever ends it."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.result: Future[dict[str, Any]] = Future()
        self.result.set_running_or_notify_cancel()  # nobody can cancel it any more
        self._moves: Iterator[None] | None = None

    def prepare(self, ready: Callable[[], None]) -> None:
        """Does what needs no slot; then `ready` is called, from any thread."""
        ready()

    def moves(self) -> Iterator[None]:
        """What the engine's thread does, piece by piece. The slot is nobody's meanwhile."""
        raise NotImplementedError

    @property
    def begun(self) -> bool:
        return self._moves is not None

    def begin(self) -> None:
        """From now on the slot is this errand's; called again it does nothing."""
        if self._moves is None:
            self._moves = self.moves()
            self.slot.lent += 1

    def advance(self, seconds: float) -> bool:
        """Goes on for about so long; True once the slot is free again. It has begun."""
        assert self._moves is not None
        end = time.perf_counter() + seconds
        try:
            for _ in self._moves:
                if time.perf_counter() >= end:
                    return False
        except Exception as error:
            self.fail(as_failure(error))
            return True
        self.slot.lent -= 1
        return True

    def fail(self, failure: RequestError) -> None:
        """Ends it before its time."""
        if self._moves is not None:
            self.slot.lent -= 1
        self.result.set_exception(failure)

    def in_thread(self, work: Callable[[], None]) -> None:
        """Runs something that waits for a disk; what it raises is the result."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self.result.set_exception(as_failure(error))

        threading.Thread(target=run, name="bloomery-slot-file", daemon=True).start()


class Errands:
    """Those that wait and those that have begun. Begun ones are the engine's thread's, the others anybody's."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._all: list[Errand] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def copying(self) -> bool:
        return any(errand.begun for errand in tuple(self._all))

    def add(self, errand: Errand) -> None:
        """The lock is held."""
        self._all.append(errand)

    def run(self, seconds: float) -> None:
        """Goes on with those whose slots are idle, in their order; of one slot one after the other."""
        end = time.perf_counter() + seconds
        for errand in tuple(self._all):
            with self._lock:
                if errand not in self._all or not (errand.begun or errand.slot.free):
                    continue
                errand.begin()
            if errand.advance(end - time.perf_counter()):
                with self._lock:
                    self._all.remove(errand)

    def fail(self, failure: RequestError, *, begun: bool) -> None:
        with self._lock:
            failed = [errand for errand in self._all if errand.begun is begun]
            self._all = [errand for errand in self._all if errand.begun is not begun]
        for errand in failed:
            errand.fail(failure)


class Erase(Errand):
    def moves(self) -> Iterator[None]:
        self.slot.count, count = 0, self.slot.count
        self.result.set_result({"tokens": count})
        yield from ()


class Save(Errand):
    """Its slot is free again once the copy is made; the file comes later."""

    def __init__(self, slot: Slot, path: Path, files: SlotFiles, executor: StepExecutor) -> None:
        super().__init__(slot)
        self._path, self._files, self._executor = path, files, executor

    def moves(self) -> Iterator[None]:
        index, count, executor = self.slot.index, self.slot.count, self._executor
        tokens = self.slot.tokens[:count].copy()
        if count and self.slot.usable(count) < count:
            message = f"slot {index} cannot be saved: what it holds of its last prompt is not whole"
            raise RequestError("invalid_request", message, "send the prompt again, and let it end")
        if isinstance(executor, InPieces):
            snapshot = yield from executor.snapshot_pieces(index, count)
        else:
            snapshot = executor.snapshot(index, count)
        self.in_thread(lambda: self.result.set_result(self._files.save(self._path, tokens, snapshot)))


class Restore(Errand):
    """The file is read before the slot is asked for."""

    def __init__(self, slot: Slot, path: Path, files: SlotFiles, executor: StepExecutor) -> None:
        super().__init__(slot)
        self._path, self._files, self._executor = path, files, executor
        self._begun = time.perf_counter()

    def prepare(self, ready: Callable[[], None]) -> None:
        def load() -> None:
            self._tokens, self._snapshot, self._bytes = self._files.load(self._path, self._executor.context)
            ready()

        self.in_thread(load)

    def moves(self) -> Iterator[None]:
        slot, executor = self.slot, self._executor
        slot.count = 0  # nothing is claimed while the rows are being overwritten
        try:
            if isinstance(executor, InPieces):
                yield from executor.restore_pieces(slot.index, self._snapshot)
            else:
                executor.restore(slot.index, self._snapshot)
        except ValueError as error:
            raise RequestError("invalid_request", f"{self._path.name} cannot be restored: {error}") from None
        slot.tokens, slot.count = self._tokens, len(self._tokens)
        seconds = time.perf_counter() - self._begun
        self.result.set_result({"tokens": slot.count, "bytes": self._bytes, "seconds": seconds})


def slot_errand(action: str, slot: Slot, name: str, files: SlotFiles, executor: StepExecutor) -> Errand:
    """save, restore or erase; `name` is that of a file. The result has the number of tokens, for files also bytes and
    seconds. Raises RequestError at once for what cannot be meant."""
    if action == "erase":
        return Erase(slot)
    kind = Save if action == "save" else Restore
    return kind(slot, files.path(name), files, executor)


def as_failure(error: BaseException) -> RequestError:
    """What a client is told of an exception; one that is nobody's input is also logged with its trace."""
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, BloomeryError):
        log.error("internal error", exc_info=error)
    return RequestError("internal", f"{type(error).__name__}: {error}", "the daemon's log has the trace")
