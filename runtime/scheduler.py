"""Chooses the rows of the next step. Knows sequences only as numbers of rows, and time only from measured steps.

Every running stream (a sequence with one row to compute) has its row in every step. Prompt rows fill the rest of the
step, with two limits while other work waits: a step with prompt rows is cut to about `PROMPT_STEP_SECONDS`, and it has
to be earned back: streams then run alone until they have had `STREAM_SHARE` of the time. Where from `block_rows` rows
of a prompt on a step takes about as long as one of many more (`executor.InBlocks`), such steps are not cut.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Protocol, TypeVar

PROMPT_STEP_SECONDS = 0.2
STREAM_SHARE = 0.5
# Rows of a cut prompt step before the first measurement, and the fewest ever: below it a step costs about as much.
FIRST_ROWS = 32
LEAST_ROWS = 16
_NEVER = 1 << 62
_DECAY = 0.7  # weight of earlier steps in the measured rate


class Schedulable(Protocol):
    @property
    def rows_left(self) -> int:
        """Known tokens that are not yet in the cache: 1 for a stream."""

    @property
    def held(self) -> bool:
        """Not to be scheduled for now."""

    def out_rows(self, rows: int) -> int:
        """How many of its next `rows` rows need logits. Grows with `rows` by at most one a row."""


S = TypeVar("S", bound=Schedulable)


class Scheduler:
    def __init__(self, max_rows: int, max_out_rows: int, block_rows: int = 0) -> None:
        """`block_rows` 0: every row of a prompt takes about as long."""
        self._max_rows, self._max_out_rows = max_rows, max_out_rows
        self._block_rows = block_rows or _NEVER
        self._rows = self._seconds = 0.0
        self._cut = (0.0, 0.0)  # rows and seconds, of steps without blocks
        self._owed = 0.0

    @property
    def prompt_rate(self) -> float:
        """Rows a second of recent prompt steps; 0 before the first."""
        return self._rows / self._seconds if self._seconds else 0.0

    def plan(self, running: List[S], others_wait: bool) -> list[tuple[S, int]]:
        """The sequences of the next step, in the order of their rows, with their numbers of rows. `running` is in order
        of admission; `others_wait` tells of work that is not in it."""
        ready = [sequence for sequence in running if not sequence.held]
        streams = [sequence for sequence in ready if sequence.rows_left == 1]
        parts = [(sequence, 1) for sequence in streams]
        if len(streams) == len(ready) or (streams and self._owed > 0):
            return parts
        rows = self._max_rows - len(streams)
        out_rows = self._max_out_rows - sum(sequence.out_rows(1) for sequence in streams)
        prompts = [sequence for sequence in ready if sequence.rows_left > 1]
        if len(ready) > 1 or others_wait:
            sure = rows if len(prompts) == 1 else -(-rows // 2)  # of a prompt, however long the others are
            rows = min(rows, self._cut_rows(min(sure, max(sequence.rows_left for sequence in prompts))))
        shares: dict[int, int] = {}
        # The oldest prompt gets at least half of the rows, so that it ends; the shortest the others, so that it need
        # not wait for that.
        for sequence, limit in [(prompts[0], -(-rows // 2)), *((s, rows) for s in sorted(prompts, key=_rows_left))]:
            have = shares.get(id(sequence), 0)
            take = min(limit, rows, sequence.rows_left - have)
            spare = out_rows + sequence.out_rows(have)
            while take and sequence.out_rows(have + take) > spare:
                take -= sequence.out_rows(have + take) - spare
            if take <= 0:
                continue
            shares[id(sequence)] = have + take
            rows -= take
            out_rows = spare - sequence.out_rows(have + take)
        return parts + [(sequence, shares[id(sequence)]) for sequence in prompts if id(sequence) in shares]

    def observe(self, rows: int, prompt_rows: int, streams: int, seconds: float) -> None:
        """Learns from a finished step: its rows, those of prompts among them, the streams it served, its duration."""
        if prompt_rows:
            self._rows = _DECAY * self._rows + rows
            self._seconds = _DECAY * self._seconds + max(seconds, 1e-6)
        if 0 < prompt_rows < self._block_rows:
            self._cut = _DECAY * self._cut[0] + rows, _DECAY * self._cut[1] + max(seconds, 1e-6)
        if not streams:
            self._owed = 0.0
        elif prompt_rows:
            self._owed += seconds * STREAM_SHARE / (1 - STREAM_SHARE)
        else:
            self._owed = max(0.0, self._owed - seconds)

    def _cut_rows(self, longest: int) -> int:
        rows, seconds = self._cut
        if longest >= self._block_rows:
            return self._max_rows
        if not seconds:
            return FIRST_ROWS
        return max(LEAST_ROWS, int(rows / seconds * PROMPT_STEP_SECONDS))


def _rows_left(sequence: Schedulable) -> int:
    return sequence.rows_left
