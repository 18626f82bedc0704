"""Beside: what a decode step's graph does while the launches after it run, and which launch waits for it.

Owns the rule; streams and events are `side_stream`'s. In the order of the list every launch is right as well.

What reads a sublayer's residual copies without collapsing them (`hyper_read`) makes what nobody wants before the copies
are made anew, at the sublayer's end, and takes longer than most launches between. BLOOMERY_CARD_BESIDE=0 leaves it in
its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bloomery.gpu_worker.chains import Chained, Spreading
from bloomery.gpu_worker.hyper_lowering import HyperRead
from bloomery.gpu_worker.launches import Launch
from bloomery.runtime.program import MatMul, Op, Program, op_views, written_buffers

_SPREADERS: Final = ("spread_matmul", "close_experts")
"""Kernels that make a Spreading's copies; launches of it before them do no more than its product or experts."""

Lowered = tuple[Chained | HyperRead, range]
"""A part and its launches."""


@dataclass(frozen=True)
class _UnderWay:
    """A launch that may be beside, and the buffers that it reads and writes."""

    at: int
    read: set[str]
    written: set[str]

    def meets(self, ops: Iterable[Op]) -> bool:
        """Whether ops touch what it makes, or change what it reads."""
        views = [(view.buffer, writes) for op in ops for view, writes in op_views(op)]
        return any(buffer in self.written or (writes and buffer in self.read) for buffer, writes in views)


def put_beside(program: Program, lowered: Iterable[Lowered], launches: Sequence[Launch]) -> list[Launch]:
    """The same launches in the same order, marked. One without a launch to wait for it is waited for at the end of the
    graph."""
    marked = list(launches)
    if os.environ.get("BLOOMERY_CARD_BESIDE", "1") == "0":
        return marked
    named: dict[str, list[Op]] = {}
    for op in program.ops:
        named.setdefault(op.name, []).append(op)
    pending: _UnderWay | None = None
    for part, places in lowered:
        if not places:
            continue
        ops = [op for name in part.name.split(" & ") for op in named[name]]
        if pending is not None:
            joins = _joins(pending, part, places, ops, launches)
            if joins is not None:
                if joins > pending.at + 1:  # else nothing runs meanwhile
                    marked[pending.at] = replace(marked[pending.at], beside=True)
                    marked[joins] = replace(marked[joins], joins=True)
                pending = None
        read = isinstance(part, HyperRead) and part.collapse is None
        if read and [launches[at].kernel.function for at in places] == ["hyper_read"]:
            written = written_buffers(ops)
            touched = {view.buffer for op in ops for view, _ in op_views(op)}
            pending = _UnderWay(places[0], touched - written, written)
    if pending is not None and pending.at + 1 < len(launches):
        marked[pending.at] = replace(marked[pending.at], beside=True)
    return marked


def _joins(
    pending: _UnderWay, part: Chained | HyperRead, places: range, ops: list[Op], launches: Sequence[Launch]
) -> int | None:
    """Which of the part's launches is the first that has to wait."""
    if isinstance(part, HyperRead):  # all such launches hand words on in the same memory: never two at a time
        return places[0]
    if isinstance(part, Spreading) and launches[places[-1]].kernel.function in _SPREADERS:
        last: list[Op] = [part.post, *([part.collapse] if part.collapse else [])]
        if not pending.meets(op for op in ops if op not in last):
            # what rounds the product's input before it fetches nothing early, so it loses less by waiting
            place = places[0] if isinstance(part.op, MatMul) else places[-1]
            return place if pending.meets(last) else None
    return places[0] if pending.meets(ops) else None
