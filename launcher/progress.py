"""Progress of long work on standard error, with rate and time left: a bar on a terminal, plain lines elsewhere.

Owns how progress looks. Does not know what the work is: whoever does it reports (stage, done, total) as often as it
likes, and this module decides how often a person wants to hear of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

QUIET_SECONDS = 1.0  # a stage that is over sooner is not mentioned
LINE_SECONDS = 5.0  # between two plain lines
MEBIBYTE = 1 << 20
WORDS = {  # a daemon's stages, for people
    "open": "open the model",
    "compile": "compile kernels for this CPU",
    "spawn": "start worker processes",
    "map": "map the model file",
    "weights": "copy weights to memory",
    "upload": "copy weights to the card",
    "card kernels": "compile kernels for this card",
    "lock": "lock experts for the card",
}


def amount(value: float, total: float) -> str:
    """A count, or MiB where the total can only be bytes (nothing else that is reported reaches a million)."""
    if total >= MEBIBYTE:
        return f"{value / MEBIBYTE:.0f} MiB"
    return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Stage:
    """One stage's pace: when it began, from where, how far it is."""

    def __init__(self, name: str, done: int, now: float) -> None:
        self.name = name
        self.began = self.spoke = now
        self.first = done
        self.mentioned = False

    def line(self, done: int, total: int, now: float) -> str:
        """ "name 3 of 12, 1.5/s, 6 s left"; the rate is the mean since the stage began."""
        text = f"{WORDS.get(self.name, self.name)} {amount(done, total)} of {amount(total, total)}"
        elapsed = now - self.began
        rate = (done - self.first) / elapsed if elapsed > 0 else 0.0
        if rate > 0:
            text += f", {amount(rate, total)}/s"
            text += f", {duration((total - done) / rate)} left" if done < total else f", took {duration(elapsed)}"
        return text


class ProgressDisplay:
    """Call it as `display(stage, done, total)`; use it as a context manager so that a bar never outlives its work."""

    def __init__(self, program: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._program = program
        self._stream = stream or sys.stderr
        self._clock = clock
        self._stage: Stage | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if self._stage is None or self._stage.name != stage:
            self._end_bar()
            self._stage = Stage(stage, done, now)
        if self._stream.isatty():
            self._draw(self._stage, done, total, now)
        else:
            self._print(self._stage, done, total, now)
        if done >= total:
            self._end_bar()
            self._stage = None

    def _print(self, stage: Stage, done: int, total: int, now: float) -> None:
        due = now - stage.spoke >= (LINE_SECONDS if stage.mentioned else QUIET_SECONDS)
        if due or (stage.mentioned and done >= total):
            print(f"{self._program}: {stage.line(done, total, now)}", file=self._stream, flush=True)
            stage.mentioned, stage.spoke = True, now

    def _draw(self, stage: Stage, done: int, total: int, now: float) -> None:
        if self._bar is None:
            if now - stage.began < QUIET_SECONDS:
                return
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            console = Console(file=self._stream)
            self._bar = Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True)
            self._task = self._bar.add_task(stage.line(done, total, now), total=total, completed=done)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total, description=stage.line(done, total, now))

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_bar()
        self._stage = None
