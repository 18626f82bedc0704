"""Runs lowered programs in the test's own process: all ranks of a stage one after the other, then the next stage.

Owns the memory of such a run. The kernels are the real ones, called at their addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.cpu_experts.compile_cache import compile_kernel
from bloomery.cpu_experts.lowering import lower
from bloomery.cpu_experts.stage import STEP_NUMBER, STEP_WORDS, BroughtRows, CacheAddress, Stage
from bloomery.runtime.arena import LEAST_SPARE
from bloomery.runtime.cache_types import stored_dtype, stored_width
from bloomery.runtime.executor import StepRows
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Program, View

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def aligned_bytes(nbytes: int, fill: int = 0) -> NDArray[np.uint8]:
    """A 64-byte aligned uint8 array, filled with `fill`."""
    raw = np.full(nbytes + 64, fill, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def run_kernel(
    name: str, arguments: Sequence[int], step: NDArray[np.int64], ranks: int = 1, some: Sequence[int] | None = None
) -> None:
    """Calls a kernel once for each rank, or for `some` of them."""
    kernel = KERNEL(compile_kernel(name))
    words = np.array(arguments, np.int64)
    for rank in range(ranks) if some is None else some:
        kernel(words.ctypes.data, rank, ranks, step.ctypes.data)


def step_words(rows: StepRows) -> NDArray[np.int64]:
    """The step record's pointers; `rows` must stay alive."""
    arrays = (rows.tokens, rows.slots, rows.positions, rows.out_rows)
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
    words = np.array([len(rows.tokens), len(rows.out_rows), *(array.ctypes.data for array in arrays)], np.int64)
    return np.concatenate([words, np.zeros(STEP_WORDS - len(words), np.int64)])


class InProcessExecutor:
    """A program in this process's memory. Scratch starts as garbage, so that nothing may rely on zeros."""

    def __init__(
        self,
        program: Program,
        *,
        context: int = 64,
        slots: int = 1,
        max_rows: int = 16,
        max_out_rows: int = 16,
        ranks: int = 1,
        cache_type: str = "f32",
        lends: bool = False,
    ) -> None:
        self.program, self.lends, self.steps = program, lends, 0
        self.context, self.slots, self.max_rows, self.max_out_rows = context, slots, max_rows, max_out_rows
        self.ranks, self.cache_type = ranks, cache_type
        self.buffers: dict[str, NDArray[Any]] = {}
        for buffer in program.buffers.values():
            rows = max_rows if buffer.rows == "step" else max_out_rows
            stride = (buffer.width + 15) // 16 * 16
            dtype = np.float32 if buffer.dtype == "f32" else np.int32
            self.buffers[buffer.name] = aligned_bytes(rows * stride * 4, 0xFF).view(dtype).reshape(rows, stride)
        spare = max(max_rows, LEAST_SPARE)
        self.states: dict[str, NDArray[Any]] = {}  # as the arena's
        for state in program.states.values():
            kind = cache_type if state.kind == "cache" else state.kind
            shape = (slots, state.heads, state.rows(context, spare), stored_width(kind, state.width) // state.heads)
            by_head = np.zeros(shape, stored_dtype(kind))
            self.states[state.name] = by_head.transpose(0, 2, 1, 3) if state.heads > 1 else by_head[:, 0]
        self.memory: dict[str, NDArray[np.uint8]] = {}
        self.settled = False
        lower(program, self)  # learns the greatest size of each scratch area
        self.settled = True
        self.stages: list[Stage] = lower(program, self)

    def view(self, view: View) -> tuple[int, int]:
        buffer = self.buffers[view.buffer]
        return buffer.ctypes.data + 4 * view.start, buffer.strides[0]

    def weight(self, name: str) -> tuple[int, Tensor]:
        tensor = self.program.weights[name]
        return tensor.data.ctypes.data, tensor

    def factor(self, name: str, before: int, total: int, matrices: int = 1) -> tuple[int, int]:
        address, tensor = self.weight(name)
        return address, tensor.nbytes // matrices

    def lent(self, name: str, before: int, total: int, matrices: int = 1) -> tuple[tuple[int, int], ...]:
        """With `lends` every rank sees all rows."""
        return (self.factor(name, before, total, matrices),) * self.ranks if self.lends else ()

    def kept(self, name: str) -> tuple[int, ...] | None:
        return None

    def state(self, name: str) -> CacheAddress:
        state = self.states[name]
        head_stride = state.strides[2] if state.ndim == 4 else 0
        return CacheAddress(state.ctypes.data, *state.strides[:2], state.shape[1], head_stride)

    def brought(self, site: int) -> BroughtRows | None:
        return None

    def scratch(self, name: str, nbytes: int) -> int:
        if nbytes > len(self.memory.get(name, ())):
            assert not self.settled, "lowering depends on addresses"
            self.memory[name] = aligned_bytes(nbytes, 0xFF)
        return self.memory[name].ctypes.data

    def read(self, view: View, rows: int) -> NDArray[Any]:
        """(rows, count, width)."""
        buffer = self.buffers[view.buffer]
        starts = view.start + view.stride * np.arange(view.count)
        return buffer[:rows, starts[:, None] + np.arange(view.width)]

    def step(self, rows: StepRows) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Logits (O, V) and greedy tokens (O), copied."""
        words = step_words(rows)
        self.steps += 1
        words[STEP_NUMBER] = self.steps
        for name, values in rows.inputs.items():
            self.buffers[name][: len(values), : values.shape[1]] = values
        for stage in self.stages:
            run_kernel(stage.kernel, stage.arguments, words, self.ranks)
        count = len(rows.out_rows)
        logits = self.buffers[self.program.logits][:count, : self.program.vocabulary]
        return logits.copy(), self.buffers[self.program.argmax][:count, 0].copy()
