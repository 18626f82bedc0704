"""Runs steps: waits for the step counter, calls every stage's kernel, meets the other ranks at the barriers.

Owns waiting and cutting short, in one Numba call without the GIL that returns to Python only when there has been
nothing to do for a while. The meaning and order of the control words are `bloomery.runtime.step_record`'s. Knows no
kernel: a stage is two addresses.

How a rank waits at a barrier: first it spins with `pause` (a hand-over costs 0.1 us); then it gives its core to whoever
wants it between two looks; after two milliseconds it naps between looks. There is no wake-up that could be lost. When
there are more ranks than cores it gives its core away at once.
"""

from __future__ import annotations

from enum import IntEnum

from numba import int64, njit

from bloomery.cpu_experts.stage import (
    STEP_FAILURE,
    STEP_LAP,
    STEP_NUMBER,
    STEP_OUT_ROWS,
    STEP_ROWS,
    STEP_SKIP,
    STEP_WORDS,
)
from bloomery.runtime.step_record import (
    ABORT,
    AHEAD,
    ALONE,
    BELL,
    DETAIL,
    DONE,
    OUT_ROWS,
    POISON,
    PROGRESS,
    RANK_BYTES,
    RANK_LINES,
    ROWS,
    SHALLOW,
    SLEEPING,
    STAGE_BITS,
    STATUS,
    STEP,
    STOP,
    Status,
)
from bloomery.runtime.sync import (
    call_kernel,
    exchange,
    load_acquire,
    monotonic_ns,
    nap,
    nap_exactly,
    pause,
    store_release,
    ticks,
    wake_sleeper,
    yield_core,
)

_COMPLETED = int(Status.COMPLETED)
_ABORTED = int(Status.ABORTED)
_POISONED = int(Status.POISONED)
_TIMED_OUT = int(Status.TIMED_OUT)

_YIELD_NS = 2_000_000
_NAP_NS = 50_000
_MOMENT_NS = 1_000  # takes some 20 us
_WORTH_A_MOMENT_NS = 30_000
_IDLE_PAUSES = 64
_DRILL_BARRIERS = 3


class Reason(IntEnum):
    """Why `serve` came back to Python."""

    IDLE = 0
    STOPPED = 1


_IDLE = int(Reason.IDLE)
_STOPPED = int(Reason.STOPPED)

# Words of a rank's private memory, which `serve` is given: a clock buffer of two words, then these.
LAST_STEP = 16
SPINS = 24
IDLE_NS = 32
DEADLINE_NS = 40
TICKS = 48
REPORTERS = 56  # ranks that report the end of a step: those that meet at barriers, then others
YIELDS = 64  # whether to wait by yielding the core, or by sleeping for moments
SHALLOW_STAGES = 72  # how many stages a shallow step has
POINTERS = 80
# A stage's entry in the table: kernel, arguments, whether a barrier follows.
STAGE_WORDS = 3
PRIVATE_WORDS = POINTERS // 8 + STEP_WORDS


@njit(nogil=True, cache=True)
def now_ticks() -> int:
    """The counter that times stages."""
    return ticks()


@njit(nogil=True, cache=True)
def _cut(control: int, step: int) -> int:
    """Whether the coordinator wants the step to end: _ABORTED, _POISONED, or 0."""
    if load_acquire(control + POISON) == step:
        return _POISONED
    if load_acquire(control + ABORT) == step:
        return _ABORTED
    return 0


@njit(nogil=True, cache=True)
def _give_way(private: int, waited: int) -> None:
    """Lets others have the core for a moment, in a wait that has lasted so many nanoseconds."""
    if load_acquire(private + YIELDS) != 0:
        yield_core()
    elif waited < _WORTH_A_MOMENT_NS:
        pause()
    else:
        nap(private, _MOMENT_NS)


@njit(nogil=True, cache=True)
def _await_rank(control: int, private: int, other: int, target: int, step: int) -> int:
    """Waits until a rank's progress has reached `target`; 0, or why not."""
    line = control + RANK_LINES + other * RANK_BYTES + PROGRESS
    for _ in range(load_acquire(private + SPINS)):
        if load_acquire(line) >= target:
            return 0
        pause()
    start = monotonic_ns(private)
    while True:
        if load_acquire(line) >= target:
            return 0
        cut = _cut(control, step)
        if cut != 0:
            return cut
        waited = monotonic_ns(private) - start
        if waited < _YIELD_NS:
            _give_way(private, waited)
        elif waited > load_acquire(private + DEADLINE_NS):
            return _TIMED_OUT
        else:
            nap(private, _NAP_NS)


@njit(nogil=True, cache=True)
def _barrier(control: int, private: int, rank: int, ranks: int, target: int, step: int, detail: int) -> int:
    """Waits for every other rank; 0, or why not. On a time-out `detail` (an address) gets the rank waited for."""
    for distance in range(1, ranks):
        other = (rank + distance) % ranks
        outcome = _await_rank(control, private, other, target, step)
        if outcome != 0:
            if outcome == _TIMED_OUT:
                store_release(detail, other)
            return outcome
    return 0


@njit(nogil=True, cache=True)
def _run_stages(control: int, table: int, stages: int, private: int, rank: int, ranks: int, step: int) -> int:
    """Runs the stages of one lap of a step, or the barriers of a drill if the step has no rows. Where a kernel leaves
    stages out progress grows by more than one, in every rank alike: nobody waits for what was left out."""
    own = control + RANK_LINES + rank * RANK_BYTES
    drill = load_acquire(private + POINTERS + 8 * STEP_ROWS) == 0
    count = _DRILL_BARRIERS if drill else stages
    base = (step << STAGE_BITS) + load_acquire(private + POINTERS + 8 * STEP_LAP) * count
    times = load_acquire(private + TICKS)
    following = 0
    while following < count:
        stage = following
        following += 1
        store_release(own + DETAIL, stage)
        cut = _cut(control, step)
        if cut != 0:
            return cut
        begun = ticks()
        if not drill:
            entry = table + 8 * STAGE_WORDS * stage
            call_kernel(load_acquire(entry), load_acquire(entry + 8), rank, ranks, private + POINTERS)
            if load_acquire(private + POINTERS + 8 * STEP_FAILURE) != 0:
                store_release(own + DETAIL, ranks)
                return _TIMED_OUT
            skipped = load_acquire(private + POINTERS + 8 * STEP_SKIP)
            if skipped != 0:
                store_release(private + POINTERS + 8 * STEP_SKIP, 0)
                following += skipped
        computed = ticks()
        target = base + stage + 1
        store_release(own + PROGRESS, target)
        meets = drill or load_acquire(table + 8 * STAGE_WORDS * stage + 16) != 0
        if stage + 1 < count and ranks > 1 and meets:
            outcome = _barrier(control, private, rank, ranks, target, step, own + DETAIL)
            if outcome != 0:
                return outcome
        if times != 0 and not drill:
            entry = times + 16 * stage
            store_release(entry, load_acquire(entry) + computed - begun)
            store_release(entry + 8, load_acquire(entry + 8) + ticks() - computed)
    return _COMPLETED


@njit(nogil=True, cache=True)
def _report(control: int, rank: int, reporters: int, step: int, status: int) -> None:
    """Publishes the end of the step; whoever sees that all have ended rings the coordinator's bell."""
    own = control + RANK_LINES + rank * RANK_BYTES
    store_release(own + STATUS, status)
    exchange(own + DONE, step)
    for other in range(reporters):
        if load_acquire(control + RANK_LINES + other * RANK_BYTES + DONE) != step:
            return
    store_release(control + BELL, step)
    wake_sleeper(control + BELL)


@njit(nogil=True, cache=True)
def _await_step(control: int, private: int, last: int) -> int:
    """Watches the step counter for the idle time; the new step, or `last` if there is none."""
    patience = load_acquire(private + IDLE_NS)
    start = monotonic_ns(private)
    while True:
        for _ in range(_IDLE_PAUSES):
            step = load_acquire(control + STEP)
            if step != last:
                return step
            pause()
        waited = monotonic_ns(private) - start
        if load_acquire(control + STOP) != 0 or waited >= patience:
            return last
        _give_way(private, waited)


@njit(nogil=True, cache=True)
def serve(control: int, record: int, table: int, stages: int, private: int, rank: int, ranks: int) -> int:
    """Serves steps until there is nothing to do for the idle time, or no reason to stay. Returns a Reason.

    All addresses are this process's: `control` and `record` in the arena, `table` of STAGE_WORDS a stage,
    `private` of PRIVATE_WORDS words, which keep the last step served from call to call.
    """
    if load_acquire(private + YIELDS) == 0:
        nap_exactly()
    while True:
        last = load_acquire(private + LAST_STEP)
        step = _await_step(control, private, last)
        if load_acquire(control + STOP) != 0:
            return _STOPPED
        if step == last:
            return _IDLE
        store_release(private + LAST_STEP, step)
        store_release(private + POINTERS + 8 * STEP_ROWS, load_acquire(record + ROWS))
        store_release(private + POINTERS + 8 * STEP_OUT_ROWS, load_acquire(record + OUT_ROWS))
        store_release(private + POINTERS + 8 * STEP_FAILURE, 0)
        store_release(private + POINTERS + 8 * STEP_SKIP, 0)
        store_release(private + POINTERS + 8 * STEP_NUMBER, step)
        outcome = _COMPLETED
        if load_acquire(record + ALONE) == 0:
            count = stages if load_acquire(record + SHALLOW) == 0 else load_acquire(private + SHALLOW_STAGES)
            for lap in range(1 + load_acquire(record + AHEAD)):
                store_release(private + POINTERS + 8 * STEP_LAP, lap)
                outcome = _run_stages(control, table, count, private, rank, ranks, step)
                if outcome != _COMPLETED:
                    break
        _report(control, rank, load_acquire(private + REPORTERS), step, outcome)


@njit(nogil=True, cache=True)
def prepare_to_sleep(control: int, private: int, rank: int) -> bool:
    """Announces sleep, then looks once more; whether this rank may wait for its doorbell (see step_record)."""
    exchange(control + RANK_LINES + rank * RANK_BYTES + SLEEPING, 1)
    return load_acquire(control + STEP) == load_acquire(private + LAST_STEP) and load_acquire(control + STOP) == 0


@njit(nogil=True, cache=True)
def wake_up(control: int, rank: int) -> None:
    """Takes the announcement back."""
    store_release(control + RANK_LINES + rank * RANK_BYTES + SLEEPING, 0)


def compile_interpreter() -> None:
    """Compiles or loads from the cache what a worker calls, so that no step waits for a compiler."""
    serve.compile((int64,) * 7)
    prepare_to_sleep.compile((int64,) * 3)
    wake_up.compile((int64,) * 2)
