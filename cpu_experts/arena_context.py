"""The lowering contexts: what lowering sees of memory, before there is an arena and in it.

Owns the translation from buffers, states and scratch names to this process's addresses. Knows no op and no kernel.
"""

from __future__ import annotations

from bloomery.cpu_experts.own_weights import OwnWeights
from bloomery.cpu_experts.stage import BroughtRows, CacheAddress, HandOffPlace
from bloomery.runtime.arena import Arena, ArenaShape, aligned
from bloomery.runtime.engram_record import FLAG
from bloomery.runtime.host_weights import HostWeights
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Program, View
from bloomery.runtime.step_record import LINE

_NOWHERE = 1 << 20
"""Stands for every address of the arena while there is none: aligned like a real one, never followed."""


class SizingContext:
    """Lowering without an arena, to learn what scratch the kernels want (`wanted`: name -> greatest bytes asked)."""

    def __init__(self, program: Program, shape: ArenaShape, own: OwnWeights | None = None) -> None:
        """`own` learns which rows of the weights this rank wants."""
        self._own = own
        self.max_rows = shape.handed_rows
        self.max_out_rows = min(shape.max_out_rows, shape.handed_rows)
        self.ranks = shape.processes
        self.context = shape.context
        self.cache_type: str = shape.cache_type
        self.wanted: dict[str, int] = {}
        self._program = program

    def view(self, view: View) -> tuple[int, int]:
        return _NOWHERE + 4 * view.start, aligned(4 * self._program.buffers[view.buffer].width, 64)

    def weight(self, name: str) -> tuple[int, Tensor]:
        tensor = self._program.weights[name]
        return tensor.data.ctypes.data, tensor

    def factor(self, name: str, before: int, total: int, matrices: int = 1) -> tuple[int, int]:
        if self._own:
            self._own.want(name, before, total, matrices)
        address, tensor = self.weight(name)
        return address, tensor.nbytes // matrices

    def lent(self, name: str, before: int, total: int, matrices: int = 1) -> tuple[tuple[int, int], ...]:
        return self._own.lent(name, before, total, matrices) if self._own else ()

    def kept(self, name: str) -> tuple[int, ...] | None:
        return self._own.kept(name) if self._own else None

    def state(self, name: str) -> CacheAddress:
        return CacheAddress(_NOWHERE, 64, 64, 1, 64)

    def brought(self, site: int) -> BroughtRows | None:
        return BroughtRows(_NOWHERE, _NOWHERE, _NOWHERE, _NOWHERE)

    def hand_off(self) -> HandOffPlace:
        return HandOffPlace(_NOWHERE, _NOWHERE, 0)

    def scratch(self, name: str, nbytes: int) -> int:
        self.wanted[name] = max(nbytes, self.wanted.get(name, 0))
        return _NOWHERE


class ArenaContext:
    """Lowering into an attached arena."""

    def __init__(
        self,
        program: Program,
        arena: Arena,
        hand_off_ns: int = 0,
        weights: HostWeights | None = None,
        own: OwnWeights | None = None,
    ) -> None:
        """`hand_off_ns` is how long this rank waits for a card; `weights` the copy to read weights from, if any; `own`
        the rows of them that this rank has for itself."""
        self._weights = weights
        self._own = own
        self._hand_off_ns = hand_off_ns
        shape = arena.layout.shape
        self.max_rows = shape.handed_rows
        self.max_out_rows = min(shape.max_out_rows, shape.handed_rows)
        self.ranks = shape.processes
        self.context = shape.context
        self.cache_type: str = shape.cache_type
        self._program = program
        self._arena = arena

    def view(self, view: View) -> tuple[int, int]:
        stride = self._arena.layout.buffer_stride(view.buffer)
        return self._arena.address(f"buffer:{view.buffer}") + 4 * view.start, stride

    def weight(self, name: str) -> tuple[int, Tensor]:
        tensor = self._program.weights[name]
        copied = self._weights.address_of(name) if self._weights else None
        return tensor.data.ctypes.data if copied is None else copied, tensor

    def factor(self, name: str, before: int, total: int, matrices: int = 1) -> tuple[int, int]:
        if self._own:
            return self._own.factor(name, before, total, matrices)
        address, tensor = self.weight(name)
        return address, tensor.nbytes // matrices

    def lent(self, name: str, before: int, total: int, matrices: int = 1) -> tuple[tuple[int, int], ...]:
        return self._own.lent(name, before, total, matrices) if self._own else ()

    def kept(self, name: str) -> tuple[int, ...] | None:
        return self._own.kept(name) if self._own else None

    def state(self, name: str) -> CacheAddress:
        layout, address = self._arena.layout, self._arena.address(f"state:{name}")
        strides = (layout.slot_stride(name), layout.state_stride(name))
        return CacheAddress(address, *strides, layout.state_rows(name), layout.head_stride(name))

    def brought(self, site: int) -> BroughtRows | None:
        address = self._arena.address
        flag = address("engram") + site * LINE + FLAG
        return BroughtRows(flag, address("control"), address(f"engram_rows:{site}"), address(f"engram_places:{site}"))

    def hand_off(self) -> HandOffPlace:
        address = self._arena.address
        return HandOffPlace(address("hand_off"), address("control"), self._hand_off_ns)

    def scratch(self, name: str, nbytes: int) -> int:
        region = self._arena.layout.regions[f"scratch:{name}"]
        assert nbytes <= region.nbytes, f"scratch {name}: {nbytes} bytes asked, {region.nbytes} reported before"
        return self._arena.address(f"scratch:{name}")
