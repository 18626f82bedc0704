"""The states of the reference executor: arrays of rows by (slot, row), their copies, and where a slot can go on.

Owns memory and bookkeeping of every kind of state; what the kinds mean is in `states`. Knows no ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bloomery.runtime.executor import StepRows
from bloomery.runtime.states import CacheState, RingState, pieces


@dataclass(frozen=True)
class StateSnapshot:
    """Everything that a sequence of `positions` positions needs to go on: for each state its live rows in order."""

    positions: int
    rows: Mapping[str, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


class SlotStates:
    """`arrays` maps each state to (slots, rows, width). A slot with rings can go on only where the rings still hold
    what is read there: `continuable`."""

    def __init__(
        self,
        states: Mapping[str, CacheState],
        *,
        slots: int,
        context: int,
        spare: int,
        cache_dtype: DTypeLike,
        dtype: DTypeLike,
    ) -> None:
        """`dtype` is that of states that are not cached in `cache_dtype` but kept as computed."""
        dtypes = {"cache": np.dtype(cache_dtype), "f32": np.dtype(dtype), "i32": np.dtype(np.int32)}
        self._states = states
        self._spare = spare
        self._rings = any(isinstance(state, RingState) for state in states.values())
        self._low, self._high = [0] * slots, [0] * slots
        self.context = context
        self.arrays: dict[str, NDArray[Any]] = {
            state.name: np.zeros((slots, state.rows(context, spare), state.width), dtypes[state.kind])
            for state in states.values()
        }

    def rows(self, name: str, logical: NDArray[Any]) -> NDArray[Any]:
        """Where logical rows lie in a slot of state `name`."""
        return np.asarray(logical % self.arrays[name].shape[1])

    def continuable(self, slot: int) -> range:
        """The positions at which a step of this slot may begin (besides 0, where every sequence begins)."""
        return range(self._low[slot], self._high[slot] + 1) if self._rings else range(self.context)

    def begin(self, rows: StepRows) -> None:
        """Notes the positions of a step that is about to run. ValueError (a defect of the caller) where a slot would go
        on at a position whose past is not there."""
        firsts = [(int(slot), rows.positions[rows.slots == slot]) for slot in np.unique(rows.slots)]
        for slot, positions in firsts:
            self._require(slot, int(positions[0]))
        for slot, positions in firsts:
            if positions[0] == 0:
                self._low[slot] = 0
            self._high[slot] = int(positions[-1]) + 1
            self._low[slot] = max(self._low[slot], self._high[slot] - self._spare - 1)

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        """The first `positions` positions of one slot become another's. ValueError where they are not whole."""
        self.restore(target, self.snapshot(source, positions))

    def snapshot(self, slot: int, positions: int) -> StateSnapshot:
        """A copy of what the slot's first `positions` positions leave behind. ValueError where that is not whole."""
        self._require(slot, positions)
        found = {}
        for state in self._states.values():
            rows = self.arrays[state.name][slot]
            live = pieces(state.live(positions), len(rows))
            found[state.name] = np.concatenate([rows[:0], *(rows[piece] for piece in live)])
        return StateSnapshot(positions, found)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """The slot goes on at `snapshot.positions`, and at no earlier position."""
        for state in self._states.values():
            rows, stored, done = self.arrays[state.name][slot], snapshot.rows[state.name], 0
            for piece in pieces(state.live(snapshot.positions), len(rows)):
                count = piece.stop - piece.start
                rows[piece] = stored[done : done + count]
                done += count
        self._low[slot] = self._high[slot] = snapshot.positions

    def _require(self, slot: int, position: int) -> None:
        allowed = self.continuable(slot)
        if position and position not in allowed:
            raise ValueError(
                f"slot {slot} cannot go on at position {position}; its states allow 0 and {allowed.start} to "
                f"{allowed.stop - 1}"
            )
