"""Running a few tokens through a step executor, the ways tests need it: at once, in blocks, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.architectures import build_program
from bloomery.runtime.executor import StepExecutor, StepRows
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.reference import ReferenceExecutor


def rows_of(tokens: Sequence[int] | NDArray[Any], *, slot: int = 0, start: int = 0, out: str = "all") -> StepRows:
    """One slot's rows at positions start...; logits of "all" rows, of the "last" or of "none"."""
    n = len(tokens)
    index = np.arange(n, dtype=np.int32)
    wanted = {"all": index, "last": index[-1:], "none": index[:0]}[out]
    return StepRows(np.asarray(tokens, np.int32), np.full(n, slot, np.int32), index + np.int32(start), wanted)


def joined(*parts: StepRows) -> StepRows:
    """The rows of several slots as one step."""
    starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
    return StepRows(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.slots for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.out_rows + start for part, start in zip(parts, starts, strict=False)]).astype(np.int32),
    )


def evaluate(
    executor: StepExecutor, tokens: Sequence[int] | NDArray[Any], *, block: int = 0, slot: int = 0, start: int = 0
) -> NDArray[np.float32]:
    """Logits after each token, the prompt taken in blocks of `block` rows (0: as many as fit a step)."""
    block = block or min(executor.max_rows, executor.max_out_rows)
    parts = []
    for first in range(0, len(tokens), block):
        piece = tokens[first : first + block]
        parts.append(executor.step(rows_of(piece, slot=slot, start=start + first)).logits.copy())
    return np.concatenate(parts)


def greedy(executor: StepExecutor, prompt: Sequence[int] | NDArray[Any], count: int, slot: int = 0) -> list[int]:
    """`count` greedy tokens after the prompt, one step each."""
    found: list[int] = []
    step = executor.step(rows_of(prompt, slot=slot, out="last"))
    while True:
        found.append(int(step.greedy[0]))
        if len(found) == count:
            return found
        step = executor.step(rows_of(found[-1:], slot=slot, start=len(prompt) + len(found) - 1))


def reference(path: Path, *, wide: bool = False, context: int = 256, **arguments: Any) -> ReferenceExecutor:
    """A reference executor for a file; `wide`: float64 with a float64 cache."""
    if wide:
        arguments = {"dtype": np.float64, "cache_type": "f64", **arguments}
    return ReferenceExecutor(build_program(ModelFile.open(path)), context=context, **arguments)
