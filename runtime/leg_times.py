"""How long the two legs of a step took: times that the card's kernels and its worker leave in the arena, when asked to.

Owns offsets, their meaning, and what of a step can be concluded from them. Knows neither kernels nor programs' ops.

Region `leg_times` of an arena with a card, written by the card's worker and its kernels only, read between steps:

| at                | words                                                                              |
|-------------------|------------------------------------------------------------------------------------|
| 0                 | STEP: the step that the next are of; CARD_NS: from its first launch to its last's  |
|                   | end; LINK_BYTES, LINK_NS: experts that came to the card meanwhile, and from the    |
|                   | first of these copies to the end of the last                                       |
| LINE + 32 * index | of hand-off `index`: SENT, BEGUN, SEEN                                              |

All three are 0 where the host had no part. SENT is when the card's flag of the hand-off was stored, BEGUN when all its
own work before the sum with the host's was done, SEEN when it had seen all of the host's flags, which it looks for
meanwhile: nanoseconds of the card's clock, which some cards advance by a microsecond at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.step_record import LINE

STEP, CARD_NS, LINK_BYTES, LINK_NS = 0, 8, 16, 24
HAND_OFF_BYTES: Final = 32
SENT, BEGUN, SEEN = 0, 1, 2


def leg_bytes(hand_offs: int) -> int:
    """Size of the region for hand-offs numbered below `hand_offs`."""
    return LINE + HAND_OFF_BYTES * hand_offs


def offset(index: int) -> int:
    """Where the times of a hand-off begin."""
    return LINE + HAND_OFF_BYTES * index


@dataclass(frozen=True)
class StepLegs:
    """One step on the card: its nanoseconds, and (hand-offs, 3) of SENT, BEGUN, SEEN in the order of its hand-offs. A
    block of a prompt to which experts came has none of these, but their bytes and how long they took."""

    card_ns: int
    hand_offs: NDArray[np.int64]
    link_bytes: int = 0
    link_ns: int = 0


class LegWords:
    """The words. `memory` is the region (uint8, leg_bytes); `hand_offs` are the numbers of the program's hand-offs."""

    def __init__(self, memory: NDArray[np.uint8], hand_offs: Collection[int]) -> None:
        self._words = memory[:LINE].view(np.int64)
        self._times = memory[LINE:].view(np.int64).reshape(-1, HAND_OFF_BYTES // 8)
        self._hand_offs = sorted(hand_offs)

    def note(self, step: int, card_ns: int, link_bytes: int = 0, link_ns: int = 0) -> None:
        """Said by the card's worker at the end of a step."""
        self._words[:4] = step, card_ns, link_bytes, link_ns

    def note_hand_off(self, index: int, which: int, ns: int) -> None:
        """Said by a card that is played in Python."""
        self._times[index, which] = ns

    def read(self, step: int) -> StepLegs | None:
        """What was noted of the step that has just ended; None if nothing was (a drill, or a step that was cut)."""
        if self._words[STEP // 8] != step:
            return None
        _, card_ns, link_bytes, link_ns = self._words[:4].tolist()
        times = self._times[[] if link_bytes else self._hand_offs, :3].copy()
        return StepLegs(card_ns, times, link_bytes, link_ns)


@dataclass(frozen=True)
class LegFigures:
    """Means of steps, in seconds a step. `card` is the card's own work: without what it waited for the host. `bound` is
    what the step would have taken had both legs of every hand-off overlapped whole: the card's work outside of
    hand-offs, and of each hand-off the longer leg. `round_trips` and `waits` (seconds) are of every hand-off in which
    the host had a part: from the card's flag to its sight of the host's, and the part of it in which the card had
    nothing to do."""

    card: float
    host: float
    wait: float
    bound: float
    round_trips: NDArray[np.float64]
    waits: NDArray[np.float64]


def leg_figures(steps: Sequence[StepLegs], host_seconds: Sequence[float]) -> LegFigures:
    """`host_seconds`: what the host's workers took a step for the experts of each hand-off, by their own clocks."""
    assert steps
    times = np.stack([step.hand_offs for step in steps]).astype(np.float64) / 1e9
    whole = float(np.mean([step.card_ns for step in steps])) / 1e9
    sent, begun, seen = (times[:, :, column] for column in (SENT, BEGUN, SEEN))
    waits, round_trips, legs = np.maximum(seen - begun, 0), seen - sent, begun - sent
    taken = sent > 0
    wait = float(waits.sum(axis=1).mean())
    host = np.asarray(host_seconds, np.float64)
    assert host.shape == (times.shape[1],)
    outside = whole - float(np.maximum(round_trips, legs).sum(axis=1).mean())
    bound = outside + float(np.maximum(legs.mean(axis=0), host).sum())
    return LegFigures(whole - wait, float(host.sum()), wait, bound, round_trips[taken], waits[taken])
