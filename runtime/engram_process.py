"""The engram I/O process as the pool sees it: started, rung at a step, watched, replaced.

Owns the process. What it does in a step is said by `engram_record`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bloomery.runtime.arena import Arena, Lowered
from bloomery.runtime.engram_record import EngramWords
from bloomery.runtime.errors import RequestError
from bloomery.runtime.futex import futex_wake
from bloomery.runtime.step_record import STEP
from bloomery.runtime.worker_group import WorkerGroup
from bloomery.runtime.worker_messages import EngramOptions, EngramStart, WorkerStart


class EngramProcess:
    """One process. `attach` before the first step. One thread at a time, but for `statistics`."""

    def __init__(self, name: str, like: WorkerStart, options: EngramOptions, quiet_seconds: float) -> None:
        """`like`: the start of a worker of the same pool."""
        fields = {**vars(like), "rank": 0, "cpu": -1, **asdict(options)}
        self._group = WorkerGroup(name, [EngramStart(**fields)], quiet_seconds)
        self._words: EngramWords | None = None
        self._step_address = 0
        self.restarts = 0

    def attach(self, arena: Arena, lowered: Lowered, sites: int) -> None:
        """Waits until the process serves steps. Raises what it reports: ModelFileError, PlanError, WorkerLost."""
        self._group.hellos([0])
        self._group.attach([0], arena, lowered)
        self._words = EngramWords(arena.memory("engram"), sites)
        self._step_address = arena.memory("control").ctypes.data + STEP

    @property
    def dead(self) -> bool:
        return self._group.any_dead()

    @property
    def stopped(self) -> bool:
        """Whether a signal keeps it from running."""
        return bool(self._group.stopped())

    @property
    def pid(self) -> int:
        return self._group.pids[0]

    def ring(self, unless_awake: bool = True) -> None:
        """Wakes the process if it sleeps, or in any case: at the futex that is the low half of STEP, so that no other
        thread has to run before it does."""
        if not unless_awake or (self._words and self._words.sleeping):
            futex_wake(self._step_address)

    def lags(self, step: int) -> bool:
        """Whether rows of a step are still missing."""
        return self._words is not None and not self._words.brought(step)

    def check(self, step: int) -> None:
        """Raises RequestError if rows of this step could not be read."""
        assert self._words is not None
        if message := self._words.failure(step):
            raise RequestError("internal", message, "check the model file and its disk, then send the request again")

    def kill(self) -> None:
        self._group.kill(0)

    def describe(self) -> str:
        return self._group.describe(0)

    def describe_exit(self) -> str:
        return self._group.describe_exit(0)

    def replace_dead(self, arena: Arena, lowered: Lowered) -> bool:
        """Starts a new process if this one has died; whether it had."""
        replaced = self._group.respawn_dead()
        if replaced:
            self._group.hellos(replaced)
            self._group.attach(replaced, arena, lowered)
            self.restarts += 1
        return bool(replaced)

    def statistics(self) -> dict[str, Any]:
        counts = self._words.counts() if self._words else {}
        return {"pid": self.pid, "restarts": self.restarts, **counts}

    def end(self, grace_seconds: float) -> None:
        self._group.end(grace_seconds)
        self._words = None
