"""Kernel `engram_wait`: waits until the engram I/O process has brought the rows of a site for the running step.

Owns how long it spins, gives its core away and naps. Unlike other kernels it makes system calls, since it computes
nothing meanwhile. Rows are usually there long before; every rank looks for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bloomery.cpu_experts.simd import argument
from bloomery.runtime.step_record import ABORT, POISON, STEP
from bloomery.runtime.sync import load_acquire, monotonic_ns, nap, pause, yield_core

_PAUSES: Final = 256
_YIELD_NS: Final = 2_000_000
_NAP_NS: Final = 50_000
_FLAG, _CONTROL, _CLOCK = 0, 1, 2
CLOCK_WORDS: Final = 2


def engram_wait() -> Callable[[int, int, int, int], None]:
    """Kernel `engram_wait`: flag, control block, then two words that it writes. Comes back at once if the step is cut
    short, which the interpreter finds before the next stage."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        flag, control, clock = argument(args, _FLAG), argument(args, _CONTROL), args + 8 * _CLOCK
        wanted = load_acquire(control + STEP)
        for _ in range(_PAUSES):
            if load_acquire(flag) == wanted:
                return
            pause()
        start = monotonic_ns(clock)
        while load_acquire(flag) != wanted:
            if load_acquire(control + ABORT) == wanted or load_acquire(control + POISON) == wanted:
                return
            if monotonic_ns(clock) - start < _YIELD_NS:
                yield_core()
            else:
                nap(clock, _NAP_NS)

    return kernel
