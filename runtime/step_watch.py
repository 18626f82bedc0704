"""What tells a step that takes long from one that nobody works on any more.

Knows numbers and time, no processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STOP_CHECK_SECONDS = 1.0


class StallWatch:
    """Tells when a number has not changed for too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._value, self._since = -1, time.monotonic()

    def stalled(self, value: int) -> bool:
        if value != self._value:
            self._value, self._since = value, time.monotonic()
        return time.monotonic() - self._since > self._seconds


class StopWatch:
    """Tells when `stopped` has said yes at two looks in a row. It is asked once a second, since it costs a system call
    for each process."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self._looked, self._times = time.monotonic(), 0
        self.seconds = 2 * STOP_CHECK_SECONDS

    def found(self) -> bool:
        now = time.monotonic()
        if now - self._looked >= STOP_CHECK_SECONDS:
            self._looked, self._times = now, self._times + 1 if self._stopped() else 0
        return self._times >= 2
