"""Steps ahead: what a step launches that makes the step record that of the next one, so that nobody looks between.

Owns the kernels `next_record` and `await_rows`. How many steps follow each other is `card_executor`'s.
"""

from __future__ import annotations

from typing import Final

from bloomery.gpu_worker.launches import AheadAddresses, CardContext, KernelName, Launch
from bloomery.gpu_worker.lowering import lower
from bloomery.runtime.ops_deepseek4 import TableRows
from bloomery.runtime.program import Program, View

NEXT_RECORD: Final = KernelName("choices", "next_record")
AWAIT_ROWS: Final = KernelName("engram", "await_rows")


def ahead_launches(program: Program, context: CardContext, rows: int, ahead: AheadAddresses | None) -> list[Launch]:
    """The launches of a step of so many rows, all of them wanted, and last one that puts each row's greedy token and
    the position behind it into the step record, and counts the laps. Slots and wanted rows stay as they are. With
    n-gram tables, for which `ahead` is where they come from, a step waits for their rows before the op that takes them.
    """
    greedy, stride = context.view(View(program.argmax, 0, 1))
    told = (ahead.tokens, ahead.told) if ahead else (0, 0)
    words = (greedy, stride, rows, context.step.tokens, context.step.positions, context.step.laps, *told)
    launches = [*lower(program, context, rows, rows), Launch(NEXT_RECORD, (1, 1, 1), 32, words, "advance")]
    if ahead:
        floats = -(-rows * ahead.token_bytes // 16) * 4
        for op in program.ops:
            if isinstance(op, TableRows):
                moved = (ahead.flag, context.step.laps, ahead.rows[op.table], context.brought(op.table), floats)
                first = next(at for at, launch in enumerate(launches) if launch.label == op.name)
                launches.insert(first, Launch(AWAIT_ROWS, (1, 1, 1), 256, moved, f"{op.name} arrive"))
    return launches
