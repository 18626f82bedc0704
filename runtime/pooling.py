"""Hidden states of a prompt made into embeddings: which rows count and how they become one.

Owns the kinds of pooling. A row is the output of the final norm, the input of the logits. Knows no requests.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Pooling: TypeAlias = Literal["none", "last", "mean", "first", "all"]
POOLINGS: Final[tuple[Pooling, ...]] = ("none", "last", "mean", "first", "all")
"""none: no embeddings; last, first: that token's row; mean: of all rows (summed in float64); all: every row."""


class Pool:
    """Takes a prompt's rows in order, gives the embedding. A prompt computed in other pieces gives the same bits."""

    def __init__(self, kind: Pooling) -> None:
        self.kind = kind
        self._count = 0
        self._sum: NDArray[np.float64] | None = None
        self._rows: list[NDArray[np.float32]] = []

    @property
    def needs_all_rows(self) -> bool:
        return self.kind in ("mean", "first", "all")

    def add(self, rows: NDArray[np.float32]) -> None:
        """The next rows (float32, n x width)."""
        if self.kind == "mean":
            for row in rows:  # one after the other, so that pieces do not matter
                self._sum = row.astype(np.float64) if self._sum is None else self._sum + row
        elif self.kind == "all" or (self.kind == "first" and not self._count):
            self._rows.append(rows.copy() if self.kind == "all" else rows[:1].copy())
        elif self.kind == "last":
            self._rows = [rows[-1:].copy()]
        self._count += len(rows)

    def result(self) -> NDArray[np.float32]:
        """float32, 1 x width; for "all" tokens x width."""
        if self._sum is not None:
            return (self._sum / self._count).astype(np.float32)[None]
        return np.concatenate(self._rows)
