"""Where a daemon stands, for the control socket: loading with what progress, ready, draining, stopping.

Owns one snapshot that the main thread replaces and other threads read without a lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

State: TypeAlias = Literal["loading", "ready", "draining", "stopping"]


@dataclass(frozen=True)
class StageProgress:
    stage: str
    done: int
    total: int


@dataclass
class DaemonState:
    """`facts` (model, plan, endpoints) and `parts` (callables that report on engine and workers) appear when known."""

    state: State = "loading"
    progress: StageProgress = StageProgress("start", 0, 1)
    facts: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def report(self, stage: str, done: int, total: int) -> None:
        self.progress = StageProgress(stage, done, total)

    def loading_details(self) -> dict[str, Any]:
        """The extra values of the error "loading"."""
        now = self.progress
        return {"stage": now.stage, "done": now.done, "total": now.total}

    def status(self) -> dict[str, Any]:
        """Plain values; `engine` and `workers` once they run. An engine that is not ready overrides the state."""
        status = {**self.facts, **{name: part() for name, part in self.parts.items()}}
        engine_state = status.get("engine", {}).get("state", "ready")
        status["state"] = self.state if self.state != "ready" else engine_state
        if self.state == "loading":
            status["progress"] = self.loading_details()
        return {**status, "uptime_seconds": time.monotonic() - self.started}
