"""What the coordinator knows of whoever runs a program: one step in, logits out. Reference and worker pool both fit."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

MOST_AHEAD: Final = 15
"""Steps that may follow one without a look: what they leave in a ring can be taken back (`arena.LEAST_SPARE`)."""


@dataclass(frozen=True)
class StepRows:
    """The rows of one step: token, slot and position of each (int32, R), and the indices (int32, O, ascending) of the
    rows whose logits are wanted. Rows of one slot are in ascending, consecutive order of position. `inputs` fills the
    buffers that the program wants filled (float32, R x width).

    With `ahead` the step is followed by so many more without a look in between: each row's greedy token is its token of
    the next one, at the next position. All rows are wanted then, and each is of another slot.

    `shallow`: of these rows nothing has to be computed that only near ones read (`InShallow`). None is wanted then."""

    tokens: NDArray[np.int32]
    slots: NDArray[np.int32]
    positions: NDArray[np.int32]
    out_rows: NDArray[np.int32]
    inputs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    ahead: int = 0
    shallow: bool = False

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.slots) == len(self.positions) > 0
        assert len(self.out_rows) <= len(self.tokens)


@dataclass(frozen=True)
class StepResult:
    """logits (float32, O x V), greedy tokens (int32, O), the rows that the logits were made of (float32, O x width;
    None if the program's last op is no plain product) and the buffers that the program reports (float32, R or O x
    width): views that are valid until the next step. Of steps ahead the results follow, R rows each."""

    logits: NDArray[np.float32]
    greedy: NDArray[np.int32]
    seconds: float
    hidden: NDArray[np.float32] | None = None
    reports: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True)
class StateSnapshot:
    """Everything that a sequence of `positions` positions needs to go on, there or at one of the `reach` positions
    before: for each state its rows in order."""

    positions: int
    rows: Mapping[str, NDArray[Any]]
    reach: int = 0

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


class StepExecutor(Protocol):
    """Runs steps one at a time. `step` is called from one thread; `abort` may be called from any."""

    @property
    def max_rows(self) -> int:
        """Greatest R of a step."""

    @property
    def max_out_rows(self) -> int:
        """Greatest O of a step."""

    @property
    def slots(self) -> int: ...

    @property
    def context(self) -> int:
        """Positions a slot can hold."""

    def step(self, rows: StepRows) -> StepResult:
        """Runs one step to its end. Raises StepAborted after `abort`, WorkerLost if a worker died, hung or failed."""

    def most_ahead(self, rows: int) -> int:
        """How many steps a step of so many rows may be followed by (`StepRows.ahead`); 0: none."""

    def announce(self) -> None:
        """The next call is `step`: from now on `abort` is meant for that step, also before it has begun."""

    def abort(self) -> None:
        """Ends the running or announced step at the next op boundary. Without one it does nothing."""

    def continuable(self, slot: int) -> range:
        """The positions at which a step of this slot may begin, besides 0 (a new sequence): those that its last steps
        left whole. All, unless states are rings (`slot_reach`)."""

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        """Copies the cached rows of positions 0..positions-1 from one slot to another, bit for bit. `positions` is 0 or
        one at which the source can go on; the target can then go on there."""

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        """A copy of what the slot's first `positions` positions leave behind, from which the `reach` positions before
        can be gone on at, too. ValueError where that is not whole."""

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int:
        """`nbytes` of such a snapshot."""

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None:
        """The slot goes on at `positions` (None: `snapshot.positions`), bit for bit as if it had computed them."""

    def recover(self) -> None:
        """After WorkerLost: replaces dead workers and returns when steps can run again. Cache contents up to the last
        completed step stay valid. Raises WorkerLost if that is not possible."""

    def statistics(self) -> dict[str, Any]:
        """Counters for status and metrics (worker pids, restarts, step times); callable from any thread."""

    def close(self) -> None: ...


@runtime_checkable
class InPieces(Protocol):
    """What an executor may have besides: the same copies, a few MiB at a time. Between two pieces steps of other slots
    may run, but the slots concerned stay as they are; of a `source` that goes on, only the rows of its first
    `positions` positions have to, and what rings hold of them is copied with the first piece."""

    def copy_pieces(self, source: int, target: int, positions: int) -> Generator[None, None, None]: ...

    def snapshot_pieces(self, slot: int, positions: int, reach: int = 0) -> Generator[None, None, StateSnapshot]: ...

    def restore_pieces(
        self, slot: int, snapshot: StateSnapshot, positions: int | None = None
    ) -> Generator[None, None, None]: ...


@runtime_checkable
class InBlocks(Protocol):
    """What an executor may have besides: steps that take about as long however many rows of a prompt they have."""

    @property
    def stream_rows(self) -> int:
        """From so many neighbouring rows of a slot on; 0: there is no such number."""


@runtime_checkable
class InShallow(Protocol):
    """What an executor may have besides: steps of which less is computed, since only rows far behind will be wanted."""

    @property
    def shallow_reach(self) -> int:
        """A wanted row must be at least so many positions behind the last row of a shallow step; 0: there are none."""


def check_rows(rows: StepRows, executor: StepExecutor, vocabulary: int) -> None:
    """ValueError for rows that the executor does not serve. They come from this process, but a wrong one would
    overwrite another sequence's cache without a trace."""
    if len(rows.tokens) > executor.max_rows or len(rows.out_rows) > executor.max_out_rows:
        raise ValueError(f"{len(rows.tokens)} rows, {len(rows.out_rows)} wanted: more than the executor serves")
    if rows.ahead:
        distinct = len(np.unique(rows.slots)) == len(rows.slots)
        if not distinct or len(rows.out_rows) != len(rows.tokens):
            raise ValueError("steps ahead are for rows of different slots, all of them wanted")
        if not 0 <= rows.ahead <= executor.most_ahead(len(rows.tokens)):
            raise ValueError(f"{rows.ahead} steps ahead of {len(rows.tokens)} rows: more than the executor serves")
    if rows.shallow and (len(rows.out_rows) or rows.ahead):
        raise ValueError("of a shallow step no rows can be wanted")
    limits = (
        ("token", rows.tokens, vocabulary),
        ("slot", rows.slots, executor.slots),
        ("position", rows.positions + np.int32(rows.ahead), executor.context),
        ("wanted row", rows.out_rows, len(rows.tokens)),
    )
    for what, values, limit in limits:
        if len(values) and not (values.min() >= 0 and values.max() < limit):
            raise ValueError(f"{what} outside 0..{limit - 1}: {values}")
