"""The placement pass: one program becomes the parts that the card, the host and the coordinator see.

Owns where hand-offs stand and which buffers the processes share. Knows no kernel and no memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from bloomery.runtime.hand_off import BUFFERS
from bloomery.runtime.ops_hand_off import HandOffAnswer, HandOffReceive, HandOffSend, HandOffWait
from bloomery.runtime.program import Buffer, Op, Program, RoutedExperts, View, op_views


def host_part(program: Program, host_layers: Collection[int]) -> Program:
    """What an arena holds and the host computes for a program that runs on a card: buffers of the results, and for the
    routed layers with these numbers (in the program's order) a wait, the experts, an answer. No states."""
    names = [program.logits, program.argmax]
    if program.hidden is not None:
        names.append(program.hidden.buffer)
    buffers = {name: program.buffers[name] for name in names}
    routed = [op for op in program.ops if isinstance(op, RoutedExperts)]
    ops: list[Op] = []
    for index in sorted(host_layers):
        op = routed[index]
        rows = program.buffers[op.x.buffer].rows
        widths = (op.x.elements, op.ids.elements, op.mix.elements, op.out.elements)
        x, ids, mix, out = (View(name, 0, width) for name, width in zip(BUFFERS[rows], widths, strict=True))
        for view in (x, ids, mix, out):
            before = buffers.get(view.buffer)
            widest = max(view.width, before.width if before else 0)
            buffers[view.buffer] = Buffer(view.buffer, widest, rows, "i32" if view is ids else "f32")
        ops.append(HandOffWait(f"{op.name} wait", index, (x, ids, mix)))
        ops.append(replace(op, x=x, ids=ids, mix=mix, out=out))
        ops.append(HandOffAnswer(f"{op.name} answer", index, out))
    return replace(program, buffers=buffers, states={}, ops=tuple(ops), engram=None)


def card_part(program: Program, host_layers: Collection[int]) -> Program:
    """The program with hand-offs at the routed layers with these numbers: sent before the layer's experts, received at
    the last moment, before another op touches what the experts put out, so that the card has work meanwhile."""
    ops: list[Op] = []
    waiting: HandOffReceive | None = None
    index = 0
    for op in program.ops:
        if waiting and any(_overlap(view, waiting.out) for view, _ in op_views(op)):
            ops.append(waiting)
            waiting = None
        if isinstance(op, RoutedExperts):
            if index in host_layers:
                assert waiting is None, op.name
                ops.append(HandOffSend(f"{op.name} send", index, op.x, op.ids, op.mix, op.gate))
                waiting = HandOffReceive(f"{op.name} receive", index, op.out, op.out)
            index += 1
        ops.append(op)
    return replace(program, ops=(*ops, *([waiting] if waiting else [])))


def without_hand_offs(program: Program) -> Program:
    """The program of `card_part` as the card computes it alone."""
    ops = tuple(op for op in program.ops if not isinstance(op, HandOffSend | HandOffReceive))
    return program if len(ops) == len(program.ops) else replace(program, ops=ops)


def _overlap(one: View, other: View) -> bool:
    return one.buffer == other.buffer and one.start < other.end and other.start < one.end
