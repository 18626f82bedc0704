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

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        """A copy of what the slot's first `positions` positions leave behind. ValueError where that is not whole."""
        self.reach.require(slot, positions)
        if reach and positions - reach not in self.reach.continuable(slot):
            raise ValueError(f"slot {slot} cannot go on at position {positions - reach}")
        found = {}
        for state in self._states.values():
            rows = self.arrays[state.name][slot]
            held = pieces(state.reaching(positions - reach, positions), len(rows))
            found[state.name] = np.concatenate([rows[:0], *(rows[piece] for piece in held)])
        return StateSnapshot(positions, found, reach)

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int:
        """Bytes of the rows of such a snapshot."""
        return sum(
            len(state.reaching(positions - reach, positions)) * state.width * self.arrays[state.name].itemsize
            for state in self._states.values()
        )

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None:
        """The slot goes on at `positions`, or as far before as the snapshot and its own rings reach. ValueError, and
        nothing changed, for a snapshot of other states or one that does not reach there."""
        positions = snapshot.positions if positions is None else positions
        first = snapshot.positions - snapshot.reach
        if not first <= positions <= snapshot.positions:
            raise ValueError(f"the snapshot goes on at {first} to {snapshot.positions}, not at {positions}")
        for state in self._states.values():
            expected = (len(state.reaching(first, snapshot.positions)), state.width)
            stored, dtype = snapshot.rows.get(state.name), self.arrays[state.name].dtype
            if stored is None or stored.shape != expected or stored.dtype != dtype:
                raise ValueError(f"the snapshot does not fit state {state.name}: expected {dtype} {expected}")
        begin = max(first, self.reach.lowest(positions))
        for state in self._states.values():
            rows, stored = self.arrays[state.name][slot], snapshot.rows[state.name]
            wanted = state.reaching(begin, positions)
            done = wanted.start - state.reaching(first, snapshot.positions).start
            for piece in pieces(wanted, len(rows)):
                count = piece.stop - piece.start
                rows[piece] = stored[done : done + count]
                done += count
        self.reach.restored(slot, positions, begin)
