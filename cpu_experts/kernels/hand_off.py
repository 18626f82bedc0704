"""Kernels `hand_off_wait` and `hand_off_answer`: a rank meets the card inside a step.

Owns how long a rank spins and gives its core away. The words and their order are `bloomery.runtime.hand_off`'s. Unlike
other kernels the wait makes system calls, since it computes nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bloomery.cpu_experts.simd import argument, compiled
from bloomery.cpu_experts.stage import STEP_FAILURE
from bloomery.cpu_experts.sync import load_acquire, monotonic_ns, nap, pause, store_release, yield_core
from bloomery.runtime.hand_off import FLAG, RANK_FLAGS
from bloomery.runtime.step_record import ABORT, LINE, POISON, STAGE_BITS, STEP

_PAUSES: Final = 2048
_LOOKS: Final = 32  # at the flag between two looks at everything else
_YIELD_NS: Final = 2_000_000
_NAP_NS: Final = 20_000
_CLOCK: Final = 4


@compiled
def _target(control: int, index: int) -> int:
    return (load_acquire(control + STEP) << STAGE_BITS) | (index + 1)


def hand_off_wait() -> Callable[[int, int, int, int], None]:
    """Kernel `hand_off_wait`: words, control block, number of the hand-off, nanoseconds to wait at most, then two words
    that it writes. Comes back at once if the step is cut short, which the interpreter finds before the next stage; if
    the card does not come in time it says so in STEP_FAILURE."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        flag, control, clock = argument(args, 0) + FLAG, argument(args, 1), args + 8 * _CLOCK
        wanted = _target(control, argument(args, 2))
        number = wanted >> STAGE_BITS
        for _ in range(_PAUSES):
            if load_acquire(flag) >= wanted:
                return
            pause()
        start = monotonic_ns(clock)
        while True:
            for _ in range(_LOOKS):
                if load_acquire(flag) >= wanted:
                    return
                pause()
            if load_acquire(control + ABORT) == number or load_acquire(control + POISON) == number:
                return
            waited = monotonic_ns(clock) - start
            if waited > argument(args, 3):
                store_release(step + 8 * STEP_FAILURE, 1)
                return
            if waited < _YIELD_NS:
                yield_core()
            else:
                nap(clock, _NAP_NS)

    return kernel


def hand_off_answer() -> Callable[[int, int, int, int], None]:
    """Kernel `hand_off_answer`: words, control block, number of the hand-off. Raises this rank's flag."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        flag = argument(args, 0) + RANK_FLAGS + rank * LINE + FLAG
        store_release(flag, _target(argument(args, 1), argument(args, 2)))

    return kernel
