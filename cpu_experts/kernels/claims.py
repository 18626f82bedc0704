"""Claims: which rank computes the next piece of a share of the work, where ranks help those that are late.

Owns the claim word. Each rank's share of a stage has one, CLAIM_BYTES apart: the number of the step and lap it was last
used in, and how many pieces of the share have been claimed in it. A word of another step counts as none, so nothing has
to be reset, however a step ended.
"""

from __future__ import annotations

from typing import Final

from bloomery.cpu_experts.kernels.layouts import MOST_CLAIMS
from bloomery.cpu_experts.simd import argument, compiled
from bloomery.cpu_experts.stage import STEP_LAP, STEP_NUMBER
from bloomery.runtime.step_record import LAP_BITS
from bloomery.runtime.sync import compare_exchange, load_acquire

_COUNT_BITS: Final = 8


@compiled
def lap_tag(step: int) -> int:
    """What tells one lap of one step from all others."""
    tag: int = (argument(step, STEP_NUMBER) << LAP_BITS) | argument(step, STEP_LAP)
    return tag


@compiled
def claim(word: int, tag: int, pieces: int) -> int:
    """The next of so many (at most MOST_CLAIMS) pieces of the share whose word is at this address, for the caller to
    compute; -1 if all are claimed."""
    while True:
        seen = load_acquire(word)
        taken = seen & MOST_CLAIMS if seen >> _COUNT_BITS == tag else 0
        if taken >= pieces:
            return -1
        if compare_exchange(word, seen, (tag << _COUNT_BITS) | (taken + 1)) != 0:
            return taken
