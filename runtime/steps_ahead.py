"""What steps ahead mean (`StepRows.ahead`), for executors that have no shorter way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bloomery.runtime.executor import StepResult, StepRows


def single_steps(step: Callable[[StepRows], StepResult], rows: StepRows) -> StepResult:
    """One step after the other, each on the greedy tokens of the one before it, one position further."""
    results, tokens = [], rows.tokens
    for number in range(rows.ahead + 1):
        made = step(replace(rows, tokens=tokens, positions=rows.positions + np.int32(number), ahead=0))
        hidden = None if made.hidden is None else made.hidden.copy()
        results.append(replace(made, logits=made.logits.copy(), greedy=made.greedy.copy(), hidden=hidden))
        tokens = results[-1].greedy
    rows_made_of = [result.hidden for result in results if result.hidden is not None]
    return StepResult(
        np.concatenate([result.logits for result in results]),
        np.concatenate([result.greedy for result in results]),
        sum(result.seconds for result in results),
        np.concatenate(rows_made_of) if rows_made_of else None,
    )
