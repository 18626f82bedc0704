"""Lowering of hand-offs: where the card's two kernels find their words, and memory of the host as the card sees it.

Owns the addresses of the arena's hand-off buffers on the card and the parameters of both kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bloomery.gpu_worker.launches import HandOffAddresses, HandOffBuffers
from bloomery.runtime.arena import Arena
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.hand_off import BUFFERS
from bloomery.runtime.leg_times import offset
from bloomery.runtime.ops_hand_off import HandOffReceive, HandOffSend

if TYPE_CHECKING:
    from bloomery.gpu_worker.lowering import Lowering

_THREADS: Final = 512


@dataclass(frozen=True)
class HostSide:
    """The host's part in a card's steps: where experts lie, the arena that both sides see, and how long the card waits
    for one of `ranks` workers. `first` is the number of the program's first hand-off. `timed`: kernels note times.
    To blocks of at least `stream_rows` rows the experts come (0: there are none); `there` says from how many rows on
    which ones stand on the card meanwhile, ascending (none: all)."""

    tiers: ExpertTiers
    arena: Arena
    ranks: int
    deadline_ns: int
    first: int
    timed: bool = False
    stream_rows: int = 0
    there: tuple[tuple[int, ExpertTiers], ...] = ()

    def addresses(self, on_card: Callable[[int], int], state: int) -> HandOffAddresses:
        """`on_card` gives the card's address for one of this process; `state` is two words of the card's memory."""
        layout, address = self.arena.layout, self.arena.address

        def place(name: str) -> tuple[int, int]:
            return on_card(address(f"buffer:{name}")), layout.buffer_stride(name) // 4

        buffers = {
            rows: HandOffBuffers(*(place(name) for name in names))
            for rows, names in BUFFERS.items()
            if names[0] in layout.buffers
        }
        words, control = on_card(address("hand_off")), on_card(address("control"))
        times = on_card(address("leg_times")) if self.timed else 0
        waits = (self.ranks, self.deadline_ns, self.first)
        return HandOffAddresses(words, control, state, state + 8, *waits, buffers, times)


def lower_hand_off(lowering: Lowering, op: HandOffSend | HandOffReceive) -> None:
    """The launch of a hand-off's half."""
    if isinstance(op, HandOffSend):
        _lower_send(lowering, op)
    else:
        _lower_receive(lowering, op)


def _lower_send(lowering: Lowering, op: HandOffSend) -> None:
    """One block: x, the ids that lie on the host, their weights, the flag."""
    place = lowering.context.hand_off
    sources = (*lowering._row(op.x), *lowering._row(op.ids), *lowering._row(op.mix))
    sizes = (lowering._count(op.x), op.x.elements, op.ids.elements)
    to = place.buffers[lowering.program.buffers[op.x.buffer].rows]
    words = (*sources, lowering.context.slot_map(op.experts), *sizes, *to.x, *to.ids, *to.mix)
    state = (place.control, place.words, place.step, op.index, int(op.index == place.first))
    _emit(lowering, "send", op.index, *words, *state)


def _lower_receive(lowering: Lowering, op: HandOffReceive) -> None:
    """One block: every rank's flag, then the sum."""
    place = lowering.context.hand_off
    answer = place.buffers[lowering.program.buffers[op.x.buffer].rows].out
    words = (*lowering._row(op.x), *lowering._row(op.out), lowering._count(op.x), op.x.elements, *answer)
    state = (place.control, place.words, place.step, place.cut, op.index, place.ranks, place.deadline_ns)
    _emit(lowering, "receive", op.index, *words, *state)


def _emit(lowering: Lowering, kernel: str, index: int, *words: int) -> None:
    """The kernel, or the one that also notes times, if they are asked for."""
    times = lowering.context.hand_off.times
    if times:
        kernel, words = f"{kernel}_timed", (*words, times + offset(index))
    lowering.emit("hand_off", kernel, (1,), _THREADS, *words)
