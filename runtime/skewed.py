"""The skewed pass: neighbouring positions of a sequence go through the layers in one step, one stage apart

Owns the order and what makes it legal; knows no device. It is for machines on which the routed experts run elsewhere
than the rest: while one row's experts are computed there, the next row's attention and router are here. What a row
computes is what it computes in a step of its own, so the results are those of single steps, bit for bit.

A program is cut behind every router and behind every op of routed experts. A stage of row r needs the stage before it
of the same row, and of the rows before it the same stage only, for that has written the states (window, compressed
rows, keys, pooled positions, tokens) which row r reads in it: no op of a stage reads a state that a later one writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from bloomery.runtime.executor import StepResult, StepRows
from bloomery.runtime.ops_deepseek4 import SoftplusRouter
from bloomery.runtime.program import Op, Program, RoutedExperts, Router
from bloomery.runtime.reference import ReferenceExecutor
from bloomery.runtime.reference_buffers import ReferenceBuffers

MOST_ROWS = 8


def stages_of(program: Program) -> list[tuple[Op, ...]]:
    """The ops in order, cut behind routers and routed experts."""
    stages: list[list[Op]] = [[]]
    for op in program.ops:
        stages[-1].append(op)
        if isinstance(op, Router | SoftplusRouter | RoutedExperts):
            stages.append([])
    return [tuple(stage) for stage in stages if stage]


def skewed_order(stages: int, rows: int) -> Iterator[tuple[int, int]]:
    """(stage, row) in the order of service; what has the same sum of both may run at the same time."""
    for wave in range(stages + rows - 1):
        for row in range(rows):
            if 0 <= wave - row < stages:
                yield wave - row, row


class SkewedReference(ReferenceExecutor):
    """The reference executor with up to MOST_ROWS rows of a step in skewed order, each with buffers of its own; steps
    of more rows run as ever."""

    def step(self, rows: StepRows) -> StepResult:
        count = len(rows.tokens)
        if count > MOST_ROWS:
            return super().step(rows)
        self._check(rows)
        self._slot_states.reach.begin(rows)
        started = time.perf_counter()
        stages, singles = stages_of(self.program), [single(rows, row) for row in range(count)]
        buffers = [ReferenceBuffers(self.program, self.dtype) for _ in singles]
        for stage, row in skewed_order(len(stages), count):
            self._buffers = buffers[row]
            for op in stages[stage]:
                self._execute(op, singles[row])
        wanted = [buffers[row] for row in rows.out_rows]
        self._buffers = ReferenceBuffers(self.program, self.dtype)
        for name, buffer in self.program.buffers.items():
            parts = [own[name] for own in (buffers if buffer.rows == "step" else wanted)]
            self._buffers[name] = np.concatenate(parts) if parts else np.zeros((0, buffer.width), self.dtype)
        seconds = time.perf_counter() - started
        return StepResult(
            self._buffers[self.program.logits].astype(np.float32), self._buffers[self.program.argmax][:, 0], seconds
        )


def single(rows: StepRows, row: int) -> StepRows:
    """A row of a step as a step of its own."""
    mine = slice(row, row + 1)
    out = np.zeros(int(row in rows.out_rows), np.int32)
    return StepRows(rows.tokens[mine], rows.slots[mine], rows.positions[mine], out)
