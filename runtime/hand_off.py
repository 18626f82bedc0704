"""The words through which a step on the card hands expert work to the host and takes the sums back, without Python.

Owns offsets, their meaning and the ordering rules. Knows neither kernels nor who waits how.

Region `hand_off` of the arena, lines of 128 bytes with one writer each:

| line  | writer      | words                                                                       |
|-------|-------------|-----------------------------------------------------------------------------|
| 0     | card        | FLAG: how far the card is                                                   |
| 1     | card        | CUT_STEP, CUT_REASON, CUT_RANK: the step that it gave up, why, and for whom |
| 2 + r | host rank r | FLAG: how far the rank is                                                   |

Flags count: step << STAGE_BITS | lap << LAP_BITS | hand-off + 1. Hand-offs are numbered in the order of the program;
laps are a step's own (0) and those that it runs ahead (`StepRows.ahead`). Values only grow, so nothing is reset, and
what a dead peer left behind is less than what anybody waits for. Payloads are the buffers
hand_off.x, .ids, .mix (written by the card) and .out (written by the host): one set for all hand-offs of a step's rows,
one for those of layers that compute the wanted rows only.

A hand-off k of step n, in order:
1. One block of the card stores the payload into mapped memory (16 bytes at a time), passes a block barrier
   and a system fence, and stores k's number into its FLAG (release, system scope). Over PCIe the flag's write stays
   behind the payload's: who sees the flag (acquire) sees the payload.
2. Every host rank waits for that flag itself, and computes. Barriers among the ranks are the interpreter's.
3. Rank r stores its part of .out, then the same number into its FLAG (release). x86 keeps stores in order.
4. One block of the card waits for every rank's flag (acquire, system scope), one thread for each; after a block
   barrier it reads .out past its caches.
A hand-off in which no row has an expert on the host is not made: the card raises no flag, waits for none and adds
nothing. A rank that waits for it sees the flag of a later one, and goes on without computing or meeting others. The
last hand-off of a step's last lap is always told, so that nobody waits for ever; if it is empty (every row's ids begin
with -1) each rank finds that out for itself, writes zeros and answers, and the card does not look.
One set is enough: the card writes the payload of a hand-off only after it has seen the flags of all ranks for the one
made before it, and a rank raises its flag only when it has done with x, ids and mix; a rank writes .out of k only after
the card's flag of k, which the card raises after it has read .out of the one before. A rank that sees exactly the flag
of k sees the payload of k: the card raises no other before that rank has answered. The same holds for what ranks share
among themselves while they compute: who has seen the card's next flag knows that every rank has answered, and reads
nothing of it any more. So no barrier has to stand between two hand-offs; inside one they stand where a rank reads what
others wrote.

A lost peer ends the step on both sides. The block that waits looks at ABORT and POISON of the control block and at the
wall clock; when it gives up it notes the step in a word of the card's memory, so that later receives of the step do
not wait, and fills line 1 for its worker. A rank that waits looks at the same words and has a deadline of its own. What
a cut step computed is thrown away.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.step_record import LAP_BITS, LINE, STAGE_BITS

FLAG = 0
CUT_LINE = LINE
CUT_STEP = CUT_LINE
CUT_REASON = CUT_LINE + 8
CUT_RANK = CUT_LINE + 16
RANK_FLAGS = 2 * LINE

BUFFERS: Mapping[str, tuple[str, str, str, str]] = {
    "step": ("hand_off.x", "hand_off.ids", "hand_off.mix", "hand_off.out"),
    "out": ("hand_off.wanted.x", "hand_off.wanted.ids", "hand_off.wanted.mix", "hand_off.wanted.out"),
}
"""Names of x, ids, mix and out by the rows that a layer computes (Buffer.rows)."""
HAND_OFF_BUFFERS = frozenset(name for names in BUFFERS.values() for name in names)


class CutReason(IntEnum):
    """Why the card gave a step up."""

    TOLD = 1  # ABORT or POISON
    LATE = 2  # CUT_RANK did not answer in time


def hand_off_bytes(processes: int) -> int:
    return RANK_FLAGS + processes * LINE


def target(step: int, index: int, lap: int = 0) -> int:
    """The value of a flag once hand-off `index` of a lap of the step is there."""
    return step << STAGE_BITS | lap << LAP_BITS | (index + 1)


class HandOffWords:
    """The words for processes that are written in Python. `memory` is the region (uint8, hand_off_bytes)."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        assert memory.ctypes.data % LINE == 0
        self._words = memory.data.cast("B").cast("q")

    @property
    def card_flag(self) -> int:
        return self._words[FLAG // 8]

    @card_flag.setter
    def card_flag(self, value: int) -> None:
        self._words[FLAG // 8] = value

    def rank_flag(self, rank: int) -> int:
        return self._words[(RANK_FLAGS + rank * LINE + FLAG) // 8]

    def cut(self, step: int) -> tuple[CutReason, int] | None:
        """Why the card gave this step up, and the rank that it waited for; None if it did not."""
        if self._words[CUT_STEP // 8] != step:
            return None
        return CutReason(self._words[CUT_REASON // 8]), self._words[CUT_RANK // 8]
