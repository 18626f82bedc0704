"""Kernels `hand_off_wait` and `hand_off_answer`: a rank meets the card inside a step.

Owns how long a rank spins and gives its core away, and what it does where the card has nothing for it. The words and
their order are `bloomery.runtime.hand_off`'s. Unlike other kernels the wait makes system calls, since it computes
nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import argument, compiled, load_i32, store_i32
from bloomery.cpu_experts.stage import STEP_FAILURE, STEP_LAP, STEP_SKIP
from bloomery.runtime.hand_off import FLAG, RANK_FLAGS
from bloomery.runtime.step_record import ABORT, LAP_BITS, LINE, POISON, STAGE_BITS, STEP
from bloomery.runtime.sync import load_acquire, monotonic_ns, nap, pause, store_release, yield_core

_PAUSES: Final = 2048
_LOOKS: Final = 32  # at the flag between two looks at everything else
_YIELD_NS: Final = 2_000_000
_NAP_NS: Final = 20_000
# Arguments of hand_off_wait: words, control block, number of the hand-off, nanoseconds to wait at most, two words that
# the kernel writes, rows (index of the step's row count), ids, ids row stride, out, out row stride, elements of out,
# how many stages lie between it and the one that answers.
_CLOCK: Final = 4
_ROWS: Final = 6


@compiled
def _target(control: int, step: int, index: int) -> int:
    number: int = (load_acquire(control + STEP) << STAGE_BITS) | (argument(step, STEP_LAP) << LAP_BITS) | (index + 1)
    return number


@compiled
def _seen(args: int, rank: int, ranks: int, step: int, passed: bool) -> None:
    """What follows the card's flag: a hand-off without work is answered at once, by zeros in this rank's elements of
    out (those that `experts_sum` would write). Every rank finds the same ids, since they stay until all have answered.
    If the card is further already (`passed`) it had nothing for the host and looks at no answer.
    """
    if passed:
        store_release(step + 8 * STEP_SKIP, argument(args, _ROWS + 6))
        return
    rows, busy = argument(step, argument(args, _ROWS)), 0
    for row in range(rows):
        if load_i32(argument(args, _ROWS + 1) + row * argument(args, _ROWS + 2)) >= 0:
            busy += 1
    if busy > 0:
        return
    width = argument(args, _ROWS + 5)
    begin, end = share_start(width, rank, ranks), share_end(width, rank, ranks)
    for row in range(rows):
        out = argument(args, _ROWS + 3) + row * argument(args, _ROWS + 4)
        for element in range(begin, end):
            store_i32(out + 4 * element, 0)
    store_release(step + 8 * STEP_SKIP, argument(args, _ROWS + 6))


def hand_off_wait() -> Callable[[int, int, int, int], None]:
    """Kernel `hand_off_wait`. If no row has work for the host it writes the zeros of the sum, and STEP_SKIP lets the
    answer come next. Comes back at once if the step is cut short, which the interpreter finds before the next stage;
    if the card does not come in time it says so in STEP_FAILURE."""

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        flag, control, clock = argument(args, 0) + FLAG, argument(args, 1), args + 8 * _CLOCK
        wanted = _target(control, step, argument(args, 2))
        number = wanted >> STAGE_BITS
        for _ in range(_PAUSES):
            seen = load_acquire(flag)
            if seen >= wanted:
                _seen(args, rank, ranks, step, seen > wanted)
                return
            pause()
        start = monotonic_ns(clock)
        while True:
            for _ in range(_LOOKS):
                seen = load_acquire(flag)
                if seen >= wanted:
                    _seen(args, rank, ranks, step, seen > wanted)
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
        store_release(flag, _target(argument(args, 1), step, argument(args, 2)))

    return kernel
