"""What is done to a slot while no request uses it: its cache saved to a file, brought back from one, or forgotten.

Owns what each of these does, and how it ends. Run by the engine's thread; when is the engine's business, files are
`slot_files`'.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from bloomery.runtime.errors import BloomeryError, RequestError
from bloomery.runtime.executor import StepExecutor
from bloomery.runtime.slots import Slot

if TYPE_CHECKING:
    from bloomery.runtime.slot_files import SlotFiles

log = logging.getLogger(__name__)


class Errand:
    """Something to do with a slot while no request uses it."""

    def __init__(self, slot: Slot, work: Callable[[], dict[str, Any]]) -> None:
        self.slot, self._work = slot, work
        self.result: Future[dict[str, Any]] = Future()
        self.result.set_running_or_notify_cancel()  # nobody can cancel it any more

    def run(self) -> None:
        try:
            self.result.set_result(self._work())
        except Exception as error:
            self.result.set_exception(as_failure(error))


def slot_errand(action: str, slot: Slot, name: str, files: SlotFiles, executor: StepExecutor) -> Errand:
    """save, restore or erase; `name` is that of a file. The result has the number of tokens, for files also bytes and
    seconds. Raises RequestError at once for what cannot be meant."""
    path = files.path(name) if action != "erase" else None

    def work() -> dict[str, Any]:
        if action == "erase":
            slot.count, count = 0, slot.count
            return {"tokens": count}
        assert path is not None
        if action == "save":
            return files.save(path, slot.tokens[: slot.count], executor.snapshot(slot.index, slot.count))
        begun = time.perf_counter()
        tokens, snapshot, size = files.load(path, executor.context)
        slot.count = 0  # nothing is claimed while the rows are being overwritten
        try:
            executor.restore(slot.index, snapshot)
        except ValueError as error:
            raise RequestError("invalid_request", f"{name} cannot be restored: {error}") from None
        slot.tokens, slot.count = tokens, len(tokens)
        return {"tokens": len(tokens), "bytes": size, "seconds": time.perf_counter() - begun}

    return Errand(slot, work)


def as_failure(error: BaseException) -> RequestError:
    """What a client is told of an exception; one that is nobody's input is also logged with its trace."""
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, BloomeryError):
        log.error("internal error", exc_info=error)
    return RequestError("internal", f"{type(error).__name__}: {error}", "the daemon's log has the trace")
