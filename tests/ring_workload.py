"""A worker's workload without a model: integer kernels whose result is wrong if one barrier lets anybody through early.

Row r of buffer `a` starts from its token; stage k computes b[i] = a[7*i+3] * (2k+1) + i + token, then a and b change
places. Every rank writes a third (or so) of the elements and reads those of all others. Before that it idles for a
pseudo-random time, so that ranks arrive in every order. Everything is int64, kept in f32 buffers of twice the width.

The model "path" is JSON: `stages`, `delays` (greatest idle times in pauses, in turns), and `refuse` (make lowering
fail). The token STUCK in a step's first row keeps the last rank in stage 2 for ever, CRASH makes it write to address 8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numba import cfunc, njit, void
from numba import int64 as i8

from bloomery.cpu_experts.stage import (
    STEP_OUT_INDICES,
    STEP_OUT_ROWS,
    STEP_POSITIONS,
    STEP_ROWS,
    STEP_SLOTS,
    STEP_TOKENS,
    LoweringContext,
    Stage,
)
from bloomery.runtime.errors import ModelFileError, PlanError
from bloomery.runtime.executor import StepRows
from bloomery.runtime.program import Buffer, CacheState, Program, View
from bloomery.runtime.sync import load_acquire, pause, store_release
from bloomery.runtime.worker_messages import WorkerStart

WIDTH = 48
VOCABULARY = 1000
STUCK, CRASH = 900, 901
HANG_PAUSES = 1 << 40


def program() -> Program:
    return Program(
        architecture="ring",
        buffers={
            "a": Buffer("a", 2 * WIDTH),
            "b": Buffer("b", 2 * WIDTH),
            "logits": Buffer("logits", VOCABULARY, rows="out"),
            "argmax": Buffer("argmax", 1, rows="out", dtype="i32"),
        },
        states={"sums": CacheState("sums", 2)},
        weights={},
        ops=(),
        vocabulary=VOCABULARY,
        context_length=4096,
        layers=1,
    )


def expected(rows: StepRows, stages: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(O, WIDTH) int64: what the first WIDTH words of each logits row must be."""
    index = np.arange(WIDTH)
    token = rows.tokens.astype(np.int64)[:, None]
    a = token + 0 * index
    for stage in range(stages):
        a = a[:, (7 * index + 3) % WIDTH] * (2 * stage + 1) + index + token
    return a[rows.out_rows]


@njit(nogil=True)
def _token(step: int, row: int) -> int:
    word = load_acquire(step + 8 * STEP_TOKENS) + 4 * row
    pair = load_acquire(word & ~7)
    return (pair >> 32 if word & 4 else pair) & 0xFFFFFFFF


@njit(nogil=True)
def _index(address: int, row: int) -> int:
    word = address + 4 * row
    pair = load_acquire(word & ~7)
    return (pair >> 32 if word & 4 else pair) & 0xFFFFFFFF


SIGNATURE = void(i8, i8, i8, i8)


def _first(args: int, rank: int, ranks: int, step: int) -> None:
    """a[r] = token[r]; args: address, stride."""
    address, stride = load_acquire(args), load_acquire(args + 8)
    for row in range(load_acquire(step + 8 * STEP_ROWS)):
        for element in range(rank, WIDTH, ranks):
            store_release(address + row * stride + 8 * element, _token(step, row))


def _mix(args: int, rank: int, ranks: int, step: int) -> None:
    """args: source, target, stride, stage, greatest delay."""
    source, target, stride = load_acquire(args), load_acquire(args + 8), load_acquire(args + 16)
    stage, delay = load_acquire(args + 24), load_acquire(args + 32)
    first = _token(step, 0)
    if stage == 2 and rank == ranks - 1 and first == STUCK:
        for _ in range(HANG_PAUSES):
            pause()
    if stage == 2 and rank == ranks - 1 and first == CRASH:
        store_release(8, 0)
    seed = (first * 1000003 + stage * 7919 + rank * 104729) * 2862933555777941757 + 3037000493
    for _ in range(((seed >> 33) & 0xFFFF) * delay >> 16):
        pause()
    for row in range(load_acquire(step + 8 * STEP_ROWS)):
        token = _token(step, row)
        for element in range(rank, WIDTH, ranks):
            value = load_acquire(source + row * stride + 8 * ((7 * element + 3) % WIDTH))
            store_release(target + row * stride + 8 * element, value * (2 * stage + 1) + element + token)


def _keep(args: int, rank: int, ranks: int, step: int) -> None:
    """sums[slot, position] = source[row][0]; args: source, stride, state, slot stride, row stride."""
    source, stride, state = load_acquire(args), load_acquire(args + 8), load_acquire(args + 16)
    slot_stride, row_stride = load_acquire(args + 24), load_acquire(args + 32)
    for row in range(rank, load_acquire(step + 8 * STEP_ROWS), ranks):
        slot = _index(load_acquire(step + 8 * STEP_SLOTS), row)
        position = _index(load_acquire(step + 8 * STEP_POSITIONS), row)
        store_release(state + slot * slot_stride + position * row_stride, load_acquire(source + row * stride))


def _select(args: int, rank: int, ranks: int, step: int) -> None:
    """logits[o] = source[out_rows[o]]; args: source, stride, logits, logits stride, argmax, argmax stride."""
    source, stride, logits = load_acquire(args), load_acquire(args + 8), load_acquire(args + 16)
    logits_stride, argmax, argmax_stride = load_acquire(args + 24), load_acquire(args + 32), load_acquire(args + 40)
    for out in range(rank, load_acquire(step + 8 * STEP_OUT_ROWS), ranks):
        row = _index(load_acquire(step + 8 * STEP_OUT_INDICES), out)
        for element in range(WIDTH):
            store_release(logits + out * logits_stride + 8 * element, load_acquire(source + row * stride + 8 * element))
        store_release(argmax + out * argmax_stride, _token(step, row))


KERNELS = {"first": _first, "mix": _mix, "keep": _keep, "select": _select}


class RingWorkload:
    def __init__(self, start: WorkerStart) -> None:
        self._settings = json.loads(start.model)
        self.program = program()
        self._compiled: dict[str, Any] = {}
        self.kept: dict[str, tuple[int, ...]] = {}
        if self._settings.get("refuse") == "file":
            raise ModelFileError("ring.gguf: tensor ring.weight is bent", "unbend it")
        if self._settings.get("refuse") == "defect" and start.rank == 1:
            raise ZeroDivisionError("one rank only")

    def map_weights(self, besides: Collection[str], progress: Callable[[int, int], None]) -> None:
        pass

    def stages(self, context: LoweringContext) -> list[Stage]:
        if self._settings.get("refuse") == "plan":
            raise PlanError("tensor ring.weight has type Q9_Z, which has no kernel", "requantise the file")
        delays = self._settings["delays"]
        (a, stride), (b, _) = context.view(View("a", 0, WIDTH)), context.view(View("b", 0, WIDTH))
        stages = [Stage("first", (a, stride), "first")]
        for stage in range(self._settings["stages"]):
            stages.append(Stage("mix", (a, b, stride, stage, delays[stage % len(delays)]), f"mix.{stage}"))
            a, b = b, a
        state = context.state("sums")
        stages.append(Stage("keep", (a, stride, state.address, state.slot_stride, state.row_stride), "keep"))
        logits, argmax = context.view(View("logits", 0, WIDTH)), context.view(View("argmax", 0, 1))
        stages.append(Stage("select", (a, stride, *logits, *argmax), "select"))
        return stages

    def compile(self, kernel: str) -> int:
        if kernel not in self._compiled:
            self._compiled[kernel] = cfunc(SIGNATURE, cache=True)(KERNELS[kernel])
        return int(self._compiled[kernel].address)


def load(start: WorkerStart) -> RingWorkload:
    return RingWorkload(start)
