"""The control block and the step record: the words through which coordinator and workers run a step together.

Owns offsets, their meaning and the ordering rules. Knows neither where the arena is mapped (`arena.py`) nor who waits
how (`host_pool.py`, `cpu_experts/interpreter.py`).

Every word has one writer. All are 64-bit, little-endian, naturally aligned; words that different processes write are in
different 128-byte lines (two 64-byte cache lines, because the prefetcher fetches pairs).

A step, in order:
1. The coordinator fills the step record, then stores the step number n into STEP (release). Whoever sees n in STEP
   (acquire) sees the record. It does not touch the record again before step n is over.
2. Before its stages a rank checks ABORT and POISON against n, and again before each stage: equal means leave.
3. After stage k (from 1) a rank stores n << STAGE_BITS | k into its PROGRESS (release); stages of the steps ahead, the
   laps of step n, are counted on. The barrier after stage k is
   passed when the PROGRESS of every rank has reached that value (acquire): then every rank's stores of stages 1..k are
   visible. Values only grow, from step to step too, so nothing is ever reset, and what a dead worker left behind is
   less than what anybody will wait for. The last stage has no barrier: its place is taken by 4.
4. A rank stores STATUS and DETAIL, then n into DONE (release), passes a full fence, and reads every rank's DONE. If all
   are n it stores n into BELL and wakes the coordinator's futex. The full fence between own store and the reads makes
   the last one see all; more than one may, and they store the same value.
5. The coordinator sleeps on BELL with a time-out, at which it looks for dead or stuck workers. Once all DONE are n no
   worker touches the arena's step data until the next step number.

Falling asleep without missing a step: a worker stores 1 into SLEEPING, passes a full fence and reads STEP and STOP;
only if there is nothing new does it wait for a doorbell. The coordinator stores STEP (or STOP), passes a full fence and
reads SLEEPING; if it is 1 it rings. In every interleaving at least one of the two sees the other's store: the worker
stays awake, or the doorbell rings and stays in the socket until the worker polls it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.executor import StepRows

LINE = 128
STAGE_BITS = 20
LAP_BITS = 10

# Command line: written by the coordinator only.
STEP = 0
ABORT = 8
POISON = 16
STOP = 24
# Bell line: written by whichever worker ends the step. The futex is the low half of the word.
BELL = LINE
# Two lines a rank, written by that rank only; the others spin on the first, so it holds nothing else.
RANK_LINES = 2 * LINE
RANK_BYTES = 2 * LINE
PROGRESS = 0
DONE = LINE
STATUS = LINE + 8
DETAIL = LINE + 16
SLEEPING = LINE + 24

# Step record: R, O, steps ahead, whether the card computes the step alone (the ranks of the host then leave it at
# once: no hand-off comes), whether it is shallow (then ranks run the first stages only), four int32 arrays.
ROWS = 0
OUT_ROWS = 8
AHEAD = 16
ALONE = 24
SHALLOW = 32
RECORD_ARRAYS = ("tokens", "slots", "positions", "out_rows")


class Status(IntEnum):
    """How a rank left a step. DETAIL holds the stage it was at; for TIMED_OUT the rank that it waited for."""

    COMPLETED = 0
    ABORTED = 1
    POISONED = 2
    TIMED_OUT = 3


def control_bytes(processes: int) -> int:
    return RANK_LINES + processes * RANK_BYTES


def record_array_offset(index: int, max_rows: int) -> int:
    """Byte offset of RECORD_ARRAYS[index] in the step record; with index 4, the record's size."""
    return LINE + index * (-(-4 * max_rows // LINE) * LINE)


def record_bytes(max_rows: int) -> int:
    return record_array_offset(len(RECORD_ARRAYS), max_rows)


class StepRecord:
    """The step record as the coordinator writes it and other Python processes read it. `memory` is the record's region
    (uint8, record_bytes)."""

    def __init__(self, memory: NDArray[np.uint8], max_rows: int) -> None:
        self._counts = memory[: 5 * 8].view(np.int64)
        starts = [record_array_offset(index, max_rows) for index in range(len(RECORD_ARRAYS))]
        self._arrays = [memory[start : start + 4 * max_rows].view(np.int32) for start in starts]

    def write(self, rows: StepRows, alone: bool = False) -> None:
        """`alone`: the ranks of the host have no part in it."""
        count = len(rows.tokens)
        self._counts[0] = count
        self._counts[1] = len(rows.out_rows)
        self._counts[2] = rows.ahead
        self._counts[3] = alone
        self._counts[4] = rows.shallow
        tokens, slots, positions, out_rows = self._arrays
        tokens[:count] = rows.tokens
        slots[:count] = rows.slots
        positions[:count] = rows.positions
        out_rows[: len(rows.out_rows)] = rows.out_rows

    @property
    def ahead(self) -> int:
        return int(self._counts[2])

    def read(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Copies of the step's tokens, slots and positions (R each)."""
        count = int(self._counts[0])
        tokens, slots, positions, _ = (array[:count].copy() for array in self._arrays)
        return tokens, slots, positions

    def read_rows(self) -> StepRows | None:
        """The whole step as the executor sees it, in views of the record; None for a drill."""
        count, wanted = int(self._counts[0]), int(self._counts[1])
        if not count:
            return None
        tokens, slots, positions, out_rows = self._arrays
        lines = (tokens[:count], slots[:count], positions[:count], out_rows[:wanted])
        return StepRows(*lines, ahead=self.ahead, shallow=bool(self._counts[4]))

    def write_drill(self) -> None:
        """No rows: the ranks meet at their barriers and run no stage."""
        self._counts[:] = 0


class ControlBlock:
    """The coordinator's side of the control block. `memory` is its region (uint8, control_bytes).

    Stores are plain: on x86-64 aligned 8-byte stores are atomic and seen in program order. The only place that needs
    more, a store before a load of another word, is the caller's (`fence` of host_pool).
    """

    def __init__(self, memory: NDArray[np.uint8], processes: int) -> None:
        assert memory.ctypes.data % LINE == 0
        self._words = memory.data.cast("B").cast("q")
        self._ranks = [(RANK_LINES + rank * RANK_BYTES) // 8 for rank in range(processes)]
        self.bell_address = memory.ctypes.data + BELL

    @property
    def step(self) -> int:
        return self._words[STEP // 8]

    @step.setter
    def step(self, step: int) -> None:
        self._words[STEP // 8] = step

    def abort(self, step: int) -> None:
        """Ends that step at the next op boundary; any other step, earlier or later, is not touched."""
        self._words[ABORT // 8] = step

    def poison(self, step: int) -> None:
        """Like abort, said by the coordinator when a rank is lost and the others must not wait for it."""
        self._words[POISON // 8] = step

    def stop(self) -> None:
        """Tells the workers to leave for good."""
        self._words[STOP // 8] = 1

    @property
    def bell(self) -> int:
        return self._words[BELL // 8]

    def progress(self, rank: int) -> tuple[int, int]:
        """(step, stages completed) of a rank."""
        word = self._words[self._ranks[rank] + PROGRESS // 8]
        return word >> STAGE_BITS, word & ((1 << STAGE_BITS) - 1)

    def done(self, rank: int) -> int:
        return self._words[self._ranks[rank] + DONE // 8]

    def status(self, rank: int) -> Status:
        return Status(self._words[self._ranks[rank] + STATUS // 8])

    def detail(self, rank: int) -> int:
        return self._words[self._ranks[rank] + DETAIL // 8]

    def sleeping(self, rank: int) -> bool:
        return self._words[self._ranks[rank] + SLEEPING // 8] != 0


class RankWords:
    """The side of one rank, for ranks that are written in Python. `memory` is the control block's region."""

    def __init__(self, memory: NDArray[np.uint8], rank: int, ranks: int) -> None:
        assert memory.ctypes.data % LINE == 0
        self._words = memory.data.cast("B").cast("q")
        self._own = (RANK_LINES + rank * RANK_BYTES) // 8
        self._done = [(RANK_LINES + other * RANK_BYTES + DONE) // 8 for other in range(ranks)]
        self.bell_address = memory.ctypes.data + BELL

    @property
    def step(self) -> int:
        return self._words[STEP // 8]

    @property
    def stop(self) -> bool:
        return self._words[STOP // 8] != 0

    @property
    def sleeping(self) -> bool:
        return self._words[self._own + SLEEPING // 8] != 0

    @sleeping.setter
    def sleeping(self, sleeping: bool) -> None:
        self._words[self._own + SLEEPING // 8] = sleeping

    def aborted(self, step: int) -> bool:
        return self._words[ABORT // 8] == step

    def poisoned(self, step: int) -> bool:
        return self._words[POISON // 8] == step

    def reached(self, step: int, stage: int) -> None:
        """Publishes how many stages of the step are behind this rank."""
        self._words[self._own + PROGRESS // 8] = step << STAGE_BITS | stage

    def leave(self, step: int, status: Status, detail: int) -> None:
        """Publishes the end of the step here. A full fence has to follow before `all_done`."""
        self._words[self._own + STATUS // 8] = status
        self._words[self._own + DETAIL // 8] = detail
        self._words[self._own + DONE // 8] = step

    def all_done(self, step: int) -> bool:
        return all(self._words[place] == step for place in self._done)

    def ring(self, step: int) -> None:
        """Says that the step is over; who waits for it has to be woken."""
        self._words[BELL // 8] = step
