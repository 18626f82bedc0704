"""The card's memory by name: weights, caches, buffers, scratch and constants of one program.

Owns every allocation on the card and what each is for, and gives lowering its addresses (`launches.CardContext`).
It knows neither kernels nor steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bloomery.gpu_worker.driver import Card
from bloomery.gpu_worker.launches import MAX_ROWS, StateAddress, StepAddresses
from bloomery.runtime.errors import PlanError
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Program, RoutedExperts, View

PADDING: Final = 256
"""Bytes that kernels may read past an allocation's end."""
_ALIGN: Final = 256


class CardMemory:
    """Memory of one program; make and use it while the card's context is current. Sizes are in bytes by name.
    Prompt blocks have up to `prompt_rows` rows, `out_rows` of which are wanted.

    Until `settle`, scratch only learns how much is wanted and its addresses mean nothing.
    """

    def __init__(
        self,
        card: Card,
        program: Program,
        *,
        context: int,
        slots: int,
        prompt_rows: int,
        out_rows: int,
        cache_type: str,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._card = card
        self._program = program
        self.context, self.cache_type = context, cache_type
        self.multiprocessors = card.multiprocessors
        self.element_bytes = 4 if cache_type == "f32" else 2
        self.sizes: dict[str, int] = {}
        self._allocations: dict[str, Any] = {}
        self._scratch: dict[str, int] = {}
        self._slot_maps: dict[str, str] = {}
        self._settled = False
        most = {"step": max(MAX_ROWS, prompt_rows), "out": max(MAX_ROWS, out_rows)}
        self.step = self._record("step record", MAX_ROWS)
        self.prompt_step = self._record("prompt record", most["step"])
        for buffer in program.buffers.values():
            self._allocate(f"buffer {buffer.name}", most[buffer.rows] * 4 * buffer.width)
        for state in program.states.values():
            self._allocate(f"cache {state.name}", slots * context * state.width * self.element_bytes)
        total = sum(tensor.nbytes for tensor in program.weights.values())
        done = 0
        for name, tensor in program.weights.items():
            self._upload(f"weight {name}", tensor.data)
            done += tensor.nbytes
            progress("load", done, total)
        for op in program.ops:
            if isinstance(op, RoutedExperts):
                experts = program.weights[op.gate].shape[2]
                self._upload(f"slot map {op.gate}", np.arange(experts, dtype=np.int32))

    def settle(self) -> None:
        """Allocates the scratch that has been asked for."""
        for name, nbytes in self._scratch.items():
            self._allocate(f"scratch {name}", nbytes)
        self._settled = True

    # ---- CardContext
    def view(self, view: View) -> tuple[int, int]:
        return self.address(f"buffer {view.buffer}") + 4 * view.start, self._program.buffers[view.buffer].width

    def weight(self, name: str) -> tuple[int, Tensor]:
        return self.address(f"weight {name}"), self._program.weights[name]

    def slot_map(self, name: str) -> int:
        return self.address(f"slot map {name}")

    def state(self, name: str) -> StateAddress:
        width = self._program.states[name].width
        return StateAddress(self.address(f"cache {name}"), self.context * width, width)

    def scratch(self, name: str, nbytes: int) -> int:
        if not self._settled:
            self._scratch[name] = max(nbytes, self._scratch.get(name, 0))
            return _ALIGN
        assert nbytes <= self._scratch[name], f"scratch {name} was sized for {self._scratch[name]} bytes, not {nbytes}"
        return self.address(f"scratch {name}")

    def constant(self, name: str, values: NDArray[Any]) -> int:
        if f"constant {name}" not in self._allocations:
            self._upload(f"constant {name}", values)
        return self.address(f"constant {name}")

    # ---- contents
    def address(self, name: str) -> int:
        return int(self._allocations[name])

    def set_slot_map(self, gate: str, places: NDArray[np.int32]) -> None:
        """Where the experts of the layer with this gate tensor lie; takes effect with the next step."""
        self._card.cuda.memcpy_htod(self.slot_map(gate), places)

    def copy_rows(self, source: int, target: int, positions: int) -> None:
        """Copies positions 0..positions-1 of all caches from one slot to another."""
        for state in self._program.states.values():
            base, row = self.address(f"cache {state.name}"), state.width * self.element_bytes
            slot = self.context * row
            self._card.cuda.memcpy_dtod(base + target * slot, base + source * slot, positions * row)

    def read(self, view: View, rows: int) -> NDArray[Any]:
        """(rows, count, width) of a buffer, for op-by-op comparisons."""
        buffer = self._program.buffers[view.buffer]
        whole = np.empty((rows, buffer.width), np.float32 if buffer.dtype == "f32" else np.int32)
        self._card.cuda.memcpy_dtoh(whole, self.address(f"buffer {view.buffer}"))
        starts = view.start + view.stride * np.arange(view.count)
        return whole[:, starts[:, None] + np.arange(view.width)]

    def free(self) -> None:
        for allocation in self._allocations.values():
            allocation.free()
        self._allocations.clear()

    def _record(self, name: str, rows: int) -> StepAddresses:
        record = self._allocate(name, 4 * rows * 4)
        return StepAddresses(*(record + 4 * rows * i for i in range(4)))

    def _allocate(self, name: str, nbytes: int) -> int:
        try:
            allocation = self._card.cuda.mem_alloc(nbytes + PADDING)
        except self._card.cuda.MemoryError as error:
            free = self._card.free_memory()
            raise PlanError(
                f"{self._card.name}: {name} needs {nbytes} bytes and {free} are free, {max(0, nbytes - free)} too few"
                f" ({sum(self.sizes.values())} bytes are allocated before it)",
                "choose a smaller context, fewer slots, or plan cpu",
            ) from error
        self._allocations[name], self.sizes[name] = allocation, nbytes
        return int(allocation)

    def _upload(self, name: str, values: NDArray[Any]) -> None:
        self._card.cuda.memcpy_htod(self._allocate(name, values.nbytes), np.ascontiguousarray(values))
