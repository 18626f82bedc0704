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
from bloomery.gpu_worker.launches import (
    MAX_ROWS,
    RECORD_LINES,
    STATE_WORDS,
    HandOffAddresses,
    StateAddress,
    StepAddresses,
)
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.errors import PlanError
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Program, RoutedExperts, View
from bloomery.runtime.states import element_type, pieces

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
        spare: int,
        prompt_rows: int,
        out_rows: int,
        cache_type: str,
        progress: Callable[[str, int, int], None],
        tiers: ExpertTiers | None = None,
    ) -> None:
        """`tiers` says which experts come to the card (None: all)."""
        self._card = card
        self._program = program
        self.context, self.cache_type = context, cache_type
        self.multiprocessors, self.block_shared = card.multiprocessors, card.block_shared
        self._types = {name: element_type(state, cache_type) for name, state in program.states.items()}
        self._rows = {name: state.rows(context, spare) for name, state in program.states.items()}
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
            row = state.width * self._types[state.name].itemsize
            self._allocate(f"cache {state.name}", slots * self._rows[state.name] * row)
        tables = {table.weight: table.row_bytes for table in engram_tables(program)}
        for name, row_bytes in tables.items():
            assert program.engram is not None
            self._allocate(f"rows {name}", most["step"] * program.engram.buckets * row_bytes)
        some = self._slots(tiers or ExpertTiers.everything(program))
        weights = {name: tensor for name, tensor in program.weights.items() if name not in tables}
        total = sum(_resident(tensor, some.get(name)) for name, tensor in weights.items())
        done = 0
        for name, tensor in weights.items():
            self._upload_weight(name, tensor, some.get(name))
            done += _resident(tensor, some.get(name))
            progress("upload", done, total)
        self._hand_off: HandOffAddresses | None = None

    def _slots(self, tiers: ExpertTiers) -> dict[str, tuple[int, ...]]:
        """Uploads slot maps; for each expert tensor the ids that come to the card, in the order of their slots."""
        found: dict[str, tuple[int, ...]] = {}
        for op in self._program.ops:
            if isinstance(op, RoutedExperts):
                ids = tiers.on_card[op.gate]
                places = np.full(self._program.weights[op.gate].shape[2], -1, np.int32)
                places[list(ids)] = np.arange(len(ids), dtype=np.int32)
                self._upload(f"slot map {op.gate}", places)
                found |= dict.fromkeys((op.gate, op.up, op.down), ids)
        return found

    def _upload_weight(self, name: str, tensor: Tensor, ids: tuple[int, ...] | None) -> None:
        if ids is None or len(ids) == tensor.shape[2]:
            self._upload(f"weight {name}", tensor.data)
            return
        each = tensor.nbytes // tensor.shape[2]
        address = self._allocate(f"weight {name}", each * len(ids))
        for slot, expert in enumerate(ids):
            self._card.cuda.memcpy_htod(address + slot * each, tensor.data[expert * each : (expert + 1) * each])

    def reserve(self, name: str, nbytes: int) -> int:
        """Address of memory that somebody else fills."""
        return self._allocate(name, nbytes)

    @property
    def hand_off(self) -> HandOffAddresses:
        assert self._hand_off is not None, "this program meets no host"
        return self._hand_off

    def meet_host(self, addresses: Callable[[int], HandOffAddresses]) -> None:
        """`addresses` is given STATE_WORDS zeroed words of the card's memory."""
        self._upload("hand-off state", np.zeros(STATE_WORDS, np.int64))
        self._hand_off = addresses(self.address("hand-off state"))

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
        return StateAddress(self.address(f"cache {name}"), self._rows[name] * width, width, self._rows[name])

    def scratch(self, name: str, nbytes: int) -> int:
        if not self._settled:
            self._scratch[name] = max(nbytes, self._scratch.get(name, 0))
            return _ALIGN
        assert nbytes <= self._scratch[name], f"scratch {name} was sized for {self._scratch[name]} bytes, not {nbytes}"
        return self.address(f"scratch {name}")

    def brought(self, table: str) -> int:
        return self.address(f"rows {table}")

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

    # ---- RowStore
    def dtype(self, name: str) -> np.dtype[Any]:
        return self._types[name]

    def width(self, name: str) -> int:
        return self._program.states[name].width

    def read(self, name: str, slot: int, logical: range) -> NDArray[Any]:
        rows = np.empty((len(logical), self._program.states[name].width), self._types[name])
        flat, done = rows.reshape(-1).view(np.uint8), 0
        for place, nbytes in self._pieces(name, slot, logical):
            self._card.cuda.memcpy_dtoh(flat[done : done + nbytes], place)
            done += nbytes
        return rows

    def write(self, name: str, slot: int, logical: range, rows: NDArray[Any]) -> None:
        flat, done = np.ascontiguousarray(rows).reshape(-1).view(np.uint8), 0
        for place, nbytes in self._pieces(name, slot, logical):
            self._card.cuda.memcpy_htod(place, flat[done : done + nbytes])
            done += nbytes

    def copy(self, source: int, target: int, positions: int) -> None:
        for name, state in self._program.states.items():
            live = state.live(positions)
            pairs = zip(self._pieces(name, source, live), self._pieces(name, target, live), strict=True)
            for (from_place, nbytes), (to_place, _) in pairs:
                self._card.cuda.memcpy_dtod(to_place, from_place, nbytes)

    def _pieces(self, name: str, slot: int, logical: range) -> list[tuple[int, int]]:
        """(address, bytes) of the pieces in which logical rows of a state lie."""
        row = self._program.states[name].width * self._types[name].itemsize
        start = self.address(f"cache {name}") + slot * self._rows[name] * row
        found = pieces(logical, self._rows[name])
        return [(start + piece.start * row, (piece.stop - piece.start) * row) for piece in found]

    # ---- contents of buffers
    def buffer(self, view: View, rows: int) -> NDArray[Any]:
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
        record = self._allocate(name, RECORD_LINES * rows * 4)
        return StepAddresses(*(record + 4 * rows * i for i in range(RECORD_LINES)))

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


class CardStore:
    """The memory's states for callers outside the card's context."""

    def __init__(self, card: Card, memory: CardMemory) -> None:
        self._card, self._memory = card, memory

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._memory.dtype(name)

    def width(self, name: str) -> int:
        return self._memory.width(name)

    def read(self, name: str, slot: int, logical: range) -> NDArray[Any]:
        with self._card.current("reading a slot"):
            return self._memory.read(name, slot, logical)

    def write(self, name: str, slot: int, logical: range, rows: NDArray[Any]) -> None:
        with self._card.current("restoring a slot"):
            self._memory.write(name, slot, logical, rows)

    def copy(self, source: int, target: int, positions: int) -> None:
        with self._card.current("copying a prefix"):
            self._memory.copy(source, target, positions)


def _resident(tensor: Tensor, ids: tuple[int, ...] | None) -> int:
    """Bytes of a tensor that come to the card."""
    return tensor.nbytes if ids is None else tensor.nbytes // tensor.shape[2] * len(ids)
