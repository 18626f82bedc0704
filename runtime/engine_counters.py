"""What the engine has done, in numbers.

Written by the engine's thread (outcomes by any), read by all without a lock.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from bloomery.runtime.requests import Failed, Final

# Upper bounds of the buckets of the rows-per-step histogram.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_DECAY = 0.95  # of a recent step in the generation rate, for each later one
_SERVICE_WEIGHT = 0.1


class EngineCounters:
    """Totals since the start, plus two running means: the generation rate and the time a request spends in a slot."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.prompt_seconds = self.generate_seconds = 0.0
        self.steps = self.aborted_steps = self.recoveries = 0
        self.outcomes: Counter[str] = Counter()
        self.rows = [0] * (len(ROW_BUCKETS) + 1)
        self.rows_total = self.sequences = self.longest = 0
        self._recent_tokens = self._recent_seconds = 0.0
        self._service_seconds = 0.0

    def step(self, rows: int, prompt_rows: int, seconds: float, sequences: int, longest: int) -> None:
        """Counts a finished step of `sequences` sequences, the longest of which has `longest` tokens. A step
        with prompt rows counts as prompt time, any other as generation time."""
        self.steps += 1
        self.rows_total += rows
        self.sequences += sequences
        self.longest = max(self.longest, longest)
        bucket = (rows - 1).bit_length()
        self.rows[min(bucket, len(ROW_BUCKETS))] += 1
        if prompt_rows:
            self.prompt_seconds += seconds
        else:
            self.generate_seconds += seconds

    def generated(self, tokens: int, prompt_rows: int, seconds: float) -> None:
        """Counts the tokens that a step brought."""
        self.generated_tokens += tokens
        if not prompt_rows:
            self._recent_tokens = _DECAY * self._recent_tokens + tokens
            self._recent_seconds = _DECAY * self._recent_seconds + seconds

    def ended(self, outcome: Final | Failed | str) -> None:
        """Counts the end of a request by its reason or error code."""
        if isinstance(outcome, Final):
            seconds = outcome.prompt_seconds + outcome.generate_seconds
            weight = _SERVICE_WEIGHT if self._service_seconds else 1.0
            self._service_seconds += weight * (seconds - self._service_seconds)
            outcome = outcome.reason
        elif isinstance(outcome, Failed):
            outcome = outcome.code
        self.outcomes[outcome] += 1

    def wait_estimate(self, waiting: int) -> float:
        """Seconds until a slot is likely to be free for a request behind `waiting` others; at least 1."""
        return round(max(1.0, self._service_seconds * (waiting + 1) / self._slots), 1)

    @property
    def generation_rate(self) -> float:
        """Tokens a second of recent steps without prompt rows, all streams together; 0 before the first."""
        return self._recent_tokens / self._recent_seconds if self._recent_seconds else 0.0

    def values(self) -> dict[str, Any]:
        """Plain values: `rows_per_step` maps each bucket's upper bound ("inf" the last) to its number of steps."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "prompt_seconds": self.prompt_seconds,
            "generate_seconds": self.generate_seconds,
            "steps": self.steps,
            "aborted_steps": self.aborted_steps,
            "recoveries": self.recoveries,
            "rows": self.rows_total,
            "sequences": self.sequences,
            "longest": self.longest,
            "rows_per_step": dict(zip([*map(str, ROW_BUCKETS), "inf"], self.rows, strict=True)),
            "requests": dict(self.outcomes),
        }
