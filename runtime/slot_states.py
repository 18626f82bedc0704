"""The states of an executor as rows by (slot, row), and their copies.

Owns what is copied of every kind of state; what the kinds mean is in `states`, where a slot can go on in `slot_reach`.
Knows neither ops nor whose memory the rows are in.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.executor import StateSnapshot
from bloomery.runtime.slot_reach import SlotReach
from bloomery.runtime.states import CacheState, RingState, pieces

PIECE_BYTES = 4 << 20
"""Of copies that are made in pieces: about a millisecond."""


class RowStore(Protocol):
    """Where the rows of states are kept. `logical` is a range of a state's logical rows."""

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of what a state's rows hold."""

    def width(self, name: str) -> int:
        """How many of them a row holds."""

    def read(self, name: str, slot: int, logical: range) -> NDArray[Any]:
        """A copy (rows, width)."""

    def write(self, name: str, slot: int, logical: range, rows: NDArray[Any]) -> None: ...

    def copy(self, source: int, target: int, positions: int) -> None:
        """The live rows of all states after so many positions, from one slot to another."""


class ArrayRows:
    """Rows in arrays of this process: `arrays` maps each state to (slots, rows(context, spare), stored width), or the
    width as (heads, width of one)."""

    def __init__(self, states: Mapping[str, CacheState], arrays: Mapping[str, NDArray[Any]]) -> None:
        self._states, self.arrays = states, arrays

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.arrays[name].dtype

    def width(self, name: str) -> int:
        return math.prod(self.arrays[name].shape[2:])

    def read(self, name: str, slot: int, logical: range) -> NDArray[Any]:
        rows = np.empty((len(logical), self.width(name)), self.dtype(name))
        self.read_into(name, slot, logical, rows)
        return rows

    def read_into(self, name: str, slot: int, logical: range, rows: NDArray[Any]) -> None:
        """`read` without another copy; `rows` lie without gaps."""
        assert rows.flags.c_contiguous  # so that its parts can be seen as heads
        held, done = self.arrays[name][slot], 0
        for piece in pieces(logical, len(held)):
            count = piece.stop - piece.start
            rows[done : done + count].reshape(count, *held.shape[1:])[...] = held[piece]
            done += count

    def write(self, name: str, slot: int, logical: range, rows: NDArray[Any]) -> None:
        held, done = self.arrays[name][slot], 0
        for piece in pieces(logical, len(held)):
            count = piece.stop - piece.start
            held[piece] = rows[done : done + count].reshape(count, *held.shape[1:])
            done += count

    def copy(self, source: int, target: int, positions: int) -> None:
        for name, state in self._states.items():
            live = state.live(positions)
            self.write(name, target, live, self.read(name, source, live))


class SlotStates:
    """`reach` says where a slot can go on. Rows are in a store, or in arrays as `ArrayRows` has them."""

    def __init__(
        self,
        states: Mapping[str, CacheState],
        store: RowStore | Mapping[str, NDArray[Any]],
        *,
        slots: int,
        context: int,
        spare: int,
        shallow_reach: int = 0,
    ) -> None:
        self._states = states
        self._store: RowStore = ArrayRows(states, store) if isinstance(store, Mapping) else store
        self._counts = {name: state.rows(context, spare) for name, state in states.items()}
        self._slots, self._context = slots, context
        sizes = {"slots": slots, "context": context, "spare": spare}
        self.reach = SlotReach(states.values(), **sizes, shallow_reach=shallow_reach)

    def rows(self, name: str, logical: NDArray[Any]) -> NDArray[Any]:
        """Where logical rows lie in a slot of state `name`."""
        return np.asarray(logical % self._counts[name])

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        """The first `positions` positions of one slot become another's. ValueError where they are not whole."""
        self._check(source, target)
        self.reach.require(source, positions)
        self._store.copy(source, target, positions)
        self.reach.restored(target, positions)

    def copy_pieces(self, source: int, target: int, positions: int) -> Generator[None, None, None]:
        """See InPieces. A store that is not of this process copies at once."""
        self._check(source, target)
        self.reach.require(source, positions)
        if isinstance(self._store, ArrayRows):
            states = sorted(self._states.items(), key=lambda item: not isinstance(item[1], RingState))
            for name, state in states:
                for part in self._parts(name, state.live(positions)):
                    self._store.write(name, target, part, self._store.read(name, source, part))
                    if not isinstance(state, RingState):
                        yield
        else:
            self._store.copy(source, target, positions)
        self.reach.restored(target, positions)

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        """A copy of what the slot's first `positions` positions leave behind. ValueError where that is not whole."""
        self._check_reach(slot, positions, reach)
        found = {}
        for name, state in self._states.items():
            found[name] = self._store.read(name, slot, state.reaching(positions - reach, positions))
        return StateSnapshot(positions, found, reach)

    def snapshot_pieces(self, slot: int, positions: int, reach: int = 0) -> Generator[None, None, StateSnapshot]:
        """See InPieces."""
        self._check_reach(slot, positions, reach)
        found = {}
        for name, state in self._states.items():
            logical = state.reaching(positions - reach, positions)
            rows = np.empty((len(logical), self._store.width(name)), self._store.dtype(name))
            for part in self._parts(name, logical):
                begin = part.start - logical.start
                target = rows[begin : begin + len(part)]
                if isinstance(self._store, ArrayRows):
                    self._store.read_into(name, slot, part, target)
                else:
                    target[:] = self._store.read(name, slot, part)
                yield
            found[name] = rows
        return StateSnapshot(positions, found, reach)

    def _parts(self, name: str, logical: range) -> Iterator[range]:
        """Logical rows in runs of at most PIECE_BYTES."""
        count = max(1, PIECE_BYTES // max(1, self._row_bytes(name)))
        for begin in range(0, len(logical), count):
            yield logical[begin : begin + count]

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int:
        """Bytes of the rows of such a snapshot."""
        return sum(
            len(state.reaching(positions - reach, positions)) * self._row_bytes(name)
            for name, state in self._states.items()
        )

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None:
        """The slot goes on at `positions`, or as far before as the snapshot and its own rings reach. ValueError, and
        nothing changed, for a snapshot of other states or one that does not reach there."""
        begin, positions = self._fit(slot, snapshot, positions)
        for name, wanted, rows in self._restored_rows(snapshot, begin, positions):
            self._store.write(name, slot, wanted, rows)
        self.reach.restored(slot, positions, begin)

    def restore_pieces(
        self, slot: int, snapshot: StateSnapshot, positions: int | None = None
    ) -> Generator[None, None, None]:
        """See InPieces."""
        begin, positions = self._fit(slot, snapshot, positions)
        for name, wanted, rows in self._restored_rows(snapshot, begin, positions):
            for part in self._parts(name, wanted):
                done = part.start - wanted.start
                self._store.write(name, slot, part, rows[done : done + len(part)])
                yield
        self.reach.restored(slot, positions, begin)

    def _fit(self, slot: int, snapshot: StateSnapshot, positions: int | None) -> tuple[int, int]:
        """The first position at which the slot can go on then, and the last. ValueError for one that does not fit."""
        positions = snapshot.positions if positions is None else positions
        self._check(slot)
        first = snapshot.positions - snapshot.reach
        if not first <= positions <= snapshot.positions:
            raise ValueError(f"the snapshot goes on at {first} to {snapshot.positions}, not at {positions}")
        if snapshot.positions > self._context:
            raise ValueError(f"slot {slot} has no {snapshot.positions} positions")
        for state in self._states.values():
            expected = (len(state.reaching(first, snapshot.positions)), self._store.width(state.name))
            stored, dtype = snapshot.rows.get(state.name), self._store.dtype(state.name)
            if stored is None or stored.shape != expected or stored.dtype != dtype:
                raise ValueError(f"the snapshot does not fit state {state.name}: expected {dtype} {expected}")
        return max(first, self.reach.lowest(positions)), positions

    def _restored_rows(
        self, snapshot: StateSnapshot, begin: int, positions: int
    ) -> Iterator[tuple[str, range, NDArray[Any]]]:
        """Of each state the logical rows to bring back, and what they hold."""
        first = snapshot.positions - snapshot.reach
        for name, state in self._states.items():
            wanted = state.reaching(begin, positions)
            done = wanted.start - state.reaching(first, snapshot.positions).start
            yield name, wanted, snapshot.rows[name][done : done + len(wanted)]

    def _check_reach(self, slot: int, positions: int, reach: int) -> None:
        self._check(slot)
        self.reach.require(slot, positions)
        if reach and positions - reach not in self.reach.continuable(slot):
            raise ValueError(f"slot {slot} cannot go on at position {positions - reach}")

    def _row_bytes(self, name: str) -> int:
        return self._store.width(name) * self._store.dtype(name).itemsize

    def _check(self, *slots: int) -> None:
        for slot in slots:
            if not 0 <= slot < self._slots:
                raise ValueError(f"there is no slot {slot}, only 0 to {self._slots - 1}")
