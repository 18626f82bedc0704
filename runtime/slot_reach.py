"""Where each slot can go on: how far the rings of its states reach back.

Owns the bookkeeping that every executor of a program with rings needs, by the rule that `states` states. Knows
positions only; neither the states' rows nor who runs the steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bloomery.runtime.executor import StepRows
from bloomery.runtime.states import CacheState, RingState


class SlotReach:
    """A slot that ran up to position high - 1 can go on at high - spare - 1 to high, and at no position before one that
    it was restored to. Position 0 begins a new sequence and is always possible. Without rings every position is, unless
    what the slots held is lost (`forget`). Behind the last row of a shallow step only its own sequence goes on, whose
    next wanted row is `shallow_reach` positions further."""

    def __init__(
        self, states: Iterable[CacheState], *, slots: int, context: int, spare: int, shallow_reach: int = 0
    ) -> None:
        self._rings = any(isinstance(state, RingState) for state in states)
        self._context, self._spare = context, spare
        self._low, self._high = [0] * slots, [0] * slots
        self._shallow_reach = shallow_reach
        self._deep = [0] * slots  # the first position from which rows have been computed whole
        self._whole = [context] * slots  # positions that are not known to be lost

    def continuable(self, slot: int) -> range:
        """The positions at which a step of this slot may begin, besides 0, if its first row may be wanted."""
        allowed = self._held(slot)
        return range(max(allowed.start, self._first_wanted(self._deep[slot])), allowed.stop)

    def _held(self, slot: int) -> range:
        """The positions up to which states hold what all later rows read."""
        if self._rings:
            return range(self._low[slot], self._high[slot] + 1)
        return range(self._whole[slot] + 1)

    def _first_wanted(self, deep: int) -> int:
        return deep + self._shallow_reach if deep else 0

    def forget(self) -> None:
        """What the slots held is gone: they begin anew."""
        for slot in range(len(self._high)):
            self._low[slot] = self._high[slot] = self._whole[slot] = self._deep[slot] = 0

    def require(self, slot: int, position: int) -> None:
        """Raises ValueError (a defect of the caller) if the slot cannot go on at `position`."""
        _require(slot, position, self.continuable(slot))

    def begin(self, rows: StepRows) -> None:
        """Notes the positions of a step that is about to run; all or, with `require`'s ValueError, none of them. A step
        that is aborted counts: its rows may have been written."""
        runs = {int(slot): rows.positions[rows.slots == slot] for slot in np.unique(rows.slots)}
        deep = {}
        for slot, positions in runs.items():
            first = int(positions[0])
            _require(slot, first, self._held(slot))
            deep[slot] = int(positions[-1]) + 1 if rows.shallow else min(self._deep[slot], first)
        for row in rows.out_rows if any(deep.values()) else ():
            slot, position = int(rows.slots[row]), int(rows.positions[row])
            if position < self._first_wanted(deep[slot]):
                raise ValueError(
                    f"the row of slot {slot} at position {position} is wanted, which needs rows before that were not"
                    f" computed whole; {self._first_wanted(deep[slot])} is the first that can be"
                )
        for slot, positions in runs.items():
            low = self._low[slot] if positions[0] else 0
            self._deep[slot] = deep[slot]
            self._high[slot] = int(positions[-1]) + 1 + rows.ahead
            self._low[slot] = max(low, self._high[slot] - self._spare - 1)
            self._whole[slot] = max(self._whole[slot], self._high[slot])

    def lowest(self, positions: int) -> int:
        """The first position at which a slot that ran up to there can still go on, as far as its rings reach."""
        return max(0, positions - self._spare - 1)

    def restored(self, slot: int, positions: int, first: int | None = None) -> None:
        """The slot now holds what a sequence needs to go on at any position from `first` (None: `positions`) to
        `positions`, and nothing older."""
        self._deep[slot] = 0
        self._low[slot] = positions if first is None else first
        self._high[slot] = positions
        self._whole[slot] = max(self._whole[slot], positions)


def _require(slot: int, position: int, allowed: range) -> None:
    if position and position not in allowed:
        raise ValueError(
            f"slot {slot} cannot go on at position {position}; its states allow 0 and {allowed.start} to "
            f"{allowed.stop - 1}"
        )
