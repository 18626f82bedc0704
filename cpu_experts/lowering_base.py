"""What lowering needs for every op: stages in order, and views, tensors and states as numbers that kernels understand.

Owns that translation. Which kernel an op becomes is `lowering`'s, for its family `lowering_deepseek4`'s.
"""

from __future__ import annotations

import math
import struct
from typing import Final

from bloomery.cpu_experts.stage import STEP_OUT_ROWS, STEP_ROWS, LoweringContext, Stage
from bloomery.runtime.cache_types import stored_bytes
from bloomery.runtime.errors import PlanError
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Program, View

F32_BYTES: Final = 4


class LoweringPass:
    """The stages emitted so far; `label` is the name of the op that is being lowered."""

    def __init__(self, program: Program, context: LoweringContext) -> None:
        self.program = program
        self.context = context
        self.out: list[Stage] = []
        self.tables: dict[tuple[object, ...], tuple[int, int]] = {}  # rope tables made so far: address, row stride
        self.label = ""

    def emit(self, kernel: str, *arguments: int, barrier: bool = True) -> None:
        self.out.append(Stage(kernel, arguments, self.label, barrier))

    def _rows(self, view: View) -> int:
        """Index of the step's row count that a buffer follows."""
        return STEP_ROWS if self.program.buffers[view.buffer].rows == "step" else STEP_OUT_ROWS

    def _max_rows(self, view: View) -> int:
        return self.context.max_rows if self._rows(view) == STEP_ROWS else self.context.max_out_rows

    def _heads(self, view: View) -> tuple[int, int, int]:
        """Address, row stride, head stride."""
        address, row_stride = self.context.view(view)
        return address, row_stride, F32_BYTES * (view.stride if view.count > 1 else view.width)

    def _contiguous(self, *views: View) -> None:
        for view in views:
            if not view.contiguous:
                raise PlanError(f"op {self.label}: its host kernel wants the heads of {view.buffer} without gaps")

    def _blocks(self, tensor: Tensor, inputs: int, outputs: int, matrices: int = 1) -> tuple[int, int]:
        """(bytes of a row, blocks of a row) of a weight with the given shape."""
        expected, found = ((inputs, outputs, matrices, 1), (*tensor.shape, 1, 1, 1)[:4])
        if found != expected:
            raise PlanError(
                f"{tensor.path}: tensor {tensor.name} of op {self.label} has shape {tensor.shape}, expected {expected}"
            )
        kind = tensor.quant_type
        if inputs % kind.block_elements:
            raise PlanError(
                f"{tensor.path}: tensor {tensor.name} of type {kind.name} has rows of {inputs} elements, expected a"
                f" multiple of {kind.block_elements}",
                "the file is damaged or was made by a faulty converter",
            )
        return kind.row_bytes(inputs), inputs // kind.block_elements

    def _write_state(self, x: View, name: str, start: int, ratio: int) -> None:
        """Rows of x go to elements `start`... of the state's rows, those that complete a group of `ratio` positions."""
        state, cache_type, heads = self.context.state(name), self._cache_type(name), self.program.states[name].heads
        if x.count == 1 and x.width % heads == 0:
            x = View(x.buffer, x.start, x.width // heads, heads, x.width // heads)
        address, row_stride, head_stride = self._heads(x)
        source = (address, row_stride, x.count, x.width, head_stride)
        target = (state.address + stored_bytes(cache_type, start), state.slot_stride, state.row_stride)
        apart = self._head_stride(name, x.count, x.width)
        self.emit(f"cache_write_{cache_type}", *source, *target, state.rows, apart, ratio, self._rows(x))

    def _head_stride(self, name: str, heads: int, width: int) -> int:
        """Bytes between the heads of `width` elements of a state's row, of which an op sees `heads`."""
        state = self.program.states[name]
        if state.heads == 1:
            return stored_bytes(self._cache_type(name), width)
        if (state.heads, state.width) != (heads, heads * width):
            raise PlanError(
                f"op {self.label}: state {name} has {state.heads} heads of {state.width // state.heads} elements, the"
                f" op takes {heads} of {width}"
            )
        return self.context.state(name).head_stride

    def _cache_type(self, state: str) -> str:
        """Type of a state's elements: "f32", "f16", "q8_0" or "i32"."""
        kind = self.program.states[state].kind
        return self.context.cache_type if kind == "cache" else kind


def bits_of(value: float) -> int:
    """The bit pattern of a float64 as the signed integer that an argument is."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def limit_of(limit: float) -> int:
    """The argument for a SwiGLU's limit: infinity if there is none."""
    return bits_of(limit if limit > 0 else math.inf)
