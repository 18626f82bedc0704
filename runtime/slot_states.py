"""The states of an executor as arrays of rows by (slot, row), and their copies.

Owns what is copied of every kind of state; what the kinds mean is in `states`, where a slot can go on in `slot_reach`.
Knows neither ops nor whose memory the arrays are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.executor import StateSnapshot
from bloomery.runtime.slot_reach import SlotReach
from bloomery.runtime.states import CacheState, pieces


class SlotStates:
    """`arrays` maps each state to (slots, rows(context, spare), width); `reach` says where a slot can go on."""

    def __init__(
        self,
        states: Mapping[str, CacheState],
        arrays: Mapping[str, NDArray[Any]],
        *,
        slots: int,
        context: int,
        spare: int,
    ) -> None:
        self._states = states
        self.arrays = arrays
        self.reach = SlotReach(states.values(), slots=slots, context=context, spare=spare)

    def rows(self, name: str, logical: NDArray[Any]) -> NDArray[Any]:
        """Where logical rows lie in a slot of state `name`."""
        return np.asarray(logical % self.arrays[name].shape[1])

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        """The first `positions` positions of one slot become another's. ValueError where they are not whole."""
        self.restore(target, self.snapshot(source, positions))

    def snapshot(self, slot: int, positions: int) -> StateSnapshot:
        """A copy of what the slot's first `positions` positions leave behind. ValueError where that is not whole."""
        self.reach.require(slot, positions)
        found = {}
        for state in self._states.values():
            rows = self.arrays[state.name][slot]
            live = pieces(state.live(positions), len(rows))
            found[state.name] = np.concatenate([rows[:0], *(rows[piece] for piece in live)])
        return StateSnapshot(positions, found)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """The slot goes on at `snapshot.positions`, and at no earlier position. ValueError, and nothing changed, for a
        snapshot of other states."""
        for state in self._states.values():
            expected = (len(state.live(snapshot.positions)), state.width)
            stored, dtype = snapshot.rows.get(state.name), self.arrays[state.name].dtype
            if stored is None or stored.shape != expected or stored.dtype != dtype:
                raise ValueError(f"the snapshot does not fit state {state.name}: expected {dtype} {expected}")
        for state in self._states.values():
            rows, stored, done = self.arrays[state.name][slot], snapshot.rows[state.name], 0
            for piece in pieces(state.live(snapshot.positions), len(rows)):
                count = piece.stop - piece.start
                rows[piece] = stored[done : done + count]
                done += count
        self.reach.restored(slot, snapshot.positions)
