"""The buffers of a step in NumPy: arrays by name, read and written through the views that ops have of them.

Owns how a view is laid out in its buffer's array. Knows no op's meaning (`reference_ops`) and no state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.executor import StepRows
from bloomery.runtime.program import Op, Program, View, op_views


class ReferenceBuffers(dict[str, NDArray[Any]]):
    """(rows, width) of each buffer that an op has written, by its name: `dtype` where the program says f32, or i32."""

    def __init__(self, program: Program, dtype: np.dtype[Any]) -> None:
        super().__init__()
        self._program, self._dtype = program, dtype

    def allocate(self, op: Op, rows: StepRows) -> None:
        """Sizes the buffers that the op writes to this step's rows; keeps what parts of them were written before."""
        for view, writes in op_views(op):
            buffer = self._program.buffers[view.buffer]
            count = len(rows.tokens) if buffer.rows == "step" else len(rows.out_rows)
            if writes and (view.buffer not in self or len(self[view.buffer]) != count):
                dtype = self._dtype if buffer.dtype == "f32" else np.dtype(np.int32)
                self[view.buffer] = np.zeros((count, buffer.width), dtype)

    def read(self, view: View) -> NDArray[Any]:
        """(rows, view.count, view.width): the view's elements."""
        buffer = self[view.buffer]
        if view.contiguous:
            return buffer[:, view.start : view.end].reshape(len(buffer), view.count, view.width)
        starts = view.start + view.stride * np.arange(view.count)
        return buffer[:, starts[:, None] + np.arange(view.width)]

    def flat(self, view: View) -> NDArray[Any]:
        """(rows, view.elements)."""
        return self.read(view).reshape(-1, view.elements)

    def write(self, view: View, value: NDArray[Any]) -> None:
        """`value`: as many elements a row as the view has, in any shape."""
        buffer = self[view.buffer]
        heads = value.reshape(len(buffer), view.count, view.width)
        if view.contiguous:
            buffer[:, view.start : view.end] = heads.reshape(len(buffer), view.elements)
        else:
            for head in range(view.count):
                start = view.start + head * view.stride
                buffer[:, start : start + view.width] = heads[:, head]
