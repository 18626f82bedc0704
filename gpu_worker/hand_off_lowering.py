"""Lowering of hand-offs: where the card's two kernels find their words, and memory of the host as the card sees it.

Owns the addresses of the arena's hand-off buffers on the card, and the parameters of both halves: as kernels, and as
parts of other kernels.
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
from bloomery.runtime.program import Add, View

if TYPE_CHECKING:
    from bloomery.gpu_worker.lowering import Lowering

_THREADS: Final = 512
_LINGER_NS: Final = 200_000  # what the block that sent looks for an answer at most while others of its launch work
_MOST_BROUGHT: Final = 12288  # floats that `receive` brings at a time: what every card gives a block


@dataclass(frozen=True)
class HostSide:
    """The host's part in a card's steps: where experts lie, the arena that both sides see, and how long the card waits
    for one of `ranks` workers. `first` and `last` are the numbers of the program's first and last hand-off. `timed`:
    kernels note times. To blocks of at least `stream_rows` rows the experts come (0: there are none); `there` says from
    how many rows on which ones stand on the card meanwhile, ascending (none: all)."""

    tiers: ExpertTiers
    arena: Arena
    ranks: int
    deadline_ns: int
    first: int
    last: int
    timed: bool = False
    stream_rows: int = 0
    there: tuple[tuple[int, ExpertTiers], ...] = ()

    def addresses(self, on_card: Callable[[int], int], state: int) -> HandOffAddresses:
        """`on_card` gives the card's address for one of this process; `state` is STATE_WORDS words of the card's
        memory, 0 at first."""
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
        waits = (self.ranks, self.deadline_ns, self.first, self.last)
        own = (state, state + 8, state + 16, state + 24, state + 32)
        return HandOffAddresses(words, control, *own, *waits, buffers, times)


def lower_hand_off(lowering: Lowering, op: HandOffSend | HandOffReceive) -> None:
    """The launch of a hand-off's half that nothing beside it takes in."""
    if isinstance(op, HandOffSend):
        _lower_send(lowering, op)
    else:
        lower_receive(lowering, op, None)


def _lower_send(lowering: Lowering, op: HandOffSend) -> None:
    """One block: x, the ids that lie on the host, their weights, the flag."""
    chosen = (*lowering._row(op.ids), *lowering._row(op.mix), lowering.context.slot_map(op.experts))
    sizes = (lowering._count(op.x), op.x.elements, op.ids.elements)
    lowering.emit("hand_off", "send", (1,), _THREADS, *chosen, *sizes, *sending(lowering, op))


def lower_receive(lowering: Lowering, op: HandOffReceive, add: Add | None) -> None:
    """One block: every rank's flag, then the sum, and perhaps the sum of it and something else."""
    added = (0,) * 4
    if add is not None:
        plus = add.y if add.x == op.out else add.x
        added = (*lowering.context.view(plus), *lowering.context.view(add.out))
    count, width = lowering._count(op.x), op.x.elements
    if not count:
        return
    fit = min(count, max(1, _MOST_BROUGHT // width))
    words = (*lowering._row(op.x), *lowering._row(op.out), count, width, fit, *_receiving(lowering, op), *added)
    lowering.emit("hand_off", "receive", (1,), _THREADS, *words, shared=4 * width * fit)


def sending(lowering: Lowering, op: HandOffSend | None) -> tuple[int, ...]:
    """The Sending of hand_off.cuh; of no op: one that sends nothing."""
    if op is None:
        return (0,) * 17
    place = lowering.context.hand_off
    to = _payload(lowering, op.x)
    ours = (place.control, place.words, place.step, place.decided, lowering.step.laps)
    which = (op.index, int(op.index == place.first), int(op.index == place.last))
    return (*lowering._row(op.x), *to.x, *to.ids, *to.mix, *ours, *which, _times(place, op.index))


def _receiving(lowering: Lowering, op: HandOffReceive) -> tuple[int, ...]:
    """The Receiving of hand_off.cuh."""
    place = lowering.context.hand_off
    waits = (op.index, place.ranks, place.deadline_ns)
    ours = (place.control, place.words, place.step, place.decided, place.cut, lowering.step.laps)
    return (*_payload(lowering, op.x).out, *ours, *waits, _times(place, op.index))


def landing(lowering: Lowering, op: HandOffReceive | None, early: bool) -> tuple[int, ...]:
    """The Landing of hand_off.cuh, `early` if the launch that sends looks for it, too; of no op: one that nothing lands
    at."""
    if op is None:
        return (0,) * 17
    width = op.x.elements
    rows = lowering.context.scratch("landed", 4 * width * lowering._room(op.x))
    place = lowering.context.hand_off
    return (*_receiving(lowering, op), rows, width, place.landed, place.done if early else 0, _LINGER_NS)


def _payload(lowering: Lowering, x: View) -> HandOffBuffers:
    return lowering.context.hand_off.buffers[lowering.program.buffers[x.buffer].rows]


def _times(place: HandOffAddresses, index: int) -> int:
    """Where a hand-off's times go, if somebody asked for them."""
    return place.times + offset(index) if place.times else 0
