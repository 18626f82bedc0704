"""Steps ahead: what a step launches that makes the step record that of the next one, so that nobody looks between.

Owns the kernel `next_record`. How many steps follow each other is `card_executor`'s.
"""

from __future__ import annotations

from bloomery.gpu_worker.launches import CardContext, KernelName, Launch
from bloomery.gpu_worker.lowering import lower
from bloomery.runtime.program import Program, View


def ahead_launches(program: Program, context: CardContext, rows: int) -> list[Launch]:
    """The launches of a step of so many rows, all of them wanted, and last one that puts each row's greedy token and
    the position behind it into the step record, and counts the laps. Slots and wanted rows stay as they are."""
    greedy, stride = context.view(View(program.argmax, 0, 1))
    words = (greedy, stride, rows, context.step.tokens, context.step.positions, context.step.laps)
    return [
        *lower(program, context, rows, rows),
        Launch(KernelName("choices", "next_record"), (1, 1, 1), 32, words, "advance"),
    ]
