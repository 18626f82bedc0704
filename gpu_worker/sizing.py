"""Lowering without a card: whether every op has its kernels, and what scratch they want.

Owns a context whose addresses mean nothing. What cannot run on a card is refused with it before anything is loaded.
"""

from __future__ import annotations

from typing import Any, Final

from numpy.typing import NDArray

from bloomery.gpu_worker.launches import RECORD_LINES, HandOffAddresses, HandOffBuffers, StateAddress, StepAddresses
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Program, View

_NOWHERE: Final = 1 << 20
_BUFFERS: Final = HandOffBuffers((_NOWHERE, 0), (_NOWHERE, 0), (_NOWHERE, 0), (_NOWHERE, 0))


class SizingContext:
    """A CardContext that learns what scratch is wanted (`wanted`: name -> greatest bytes asked)."""

    block_shared = 94 << 10  # what every card has: where kernels do not fit, others take more scratch
    multiprocessors = 256  # no fewer than any card has: attention's parts grow with them
    step = prompt_step = StepAddresses(*[_NOWHERE] * RECORD_LINES)
    hand_off = HandOffAddresses(
        words=_NOWHERE,
        control=_NOWHERE,
        step=_NOWHERE,
        cut=_NOWHERE,
        landed=_NOWHERE,
        decided=_NOWHERE,
        done=_NOWHERE,
        ranks=1,
        deadline_ns=0,
        first=0,
        last=0,
        buffers={"step": _BUFFERS, "out": _BUFFERS},
    )

    def __init__(self, program: Program, context: int, cache_type: str) -> None:
        self._program = program
        self.context, self.cache_type = context, cache_type
        self.wanted: dict[str, int] = {}

    def view(self, view: View) -> tuple[int, int]:
        return _NOWHERE + 4 * view.start, self._program.buffers[view.buffer].width

    def weight(self, name: str) -> tuple[int, Tensor]:
        return _NOWHERE, self._program.weights[name]

    def slot_map(self, name: str) -> int:
        return _NOWHERE

    def state(self, name: str) -> StateAddress:
        width = self._program.states[name].width
        return StateAddress(_NOWHERE, self.context * width, width, self.context)

    def scratch(self, name: str, nbytes: int) -> int:
        self.wanted[name] = max(nbytes, self.wanted.get(name, 0))
        return _NOWHERE

    def brought(self, table: str) -> int:
        return _NOWHERE

    def constant(self, name: str, values: NDArray[Any]) -> int:
        return _NOWHERE
