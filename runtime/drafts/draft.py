"""What a draft is: whoever guesses how sequences go on, so that one step can check several tokens

Owns the interface between the engine and all kinds of drafts. A draft only ever costs or saves time: what is accepted
is decided by the tokens that the sequence's own sampler chooses from the model's logits (`Sequence.accept`). So a draft
may be wrong, and needs no word about which of its guesses were: it sees that from the tokens of the next question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.executor import StepResult, StepRows

MOST_TOKENS = 15
"""Tokens of one guess, at most: with the row before them 16, which every state can take back (`arena.LEAST_SPARE`)."""


@dataclass(frozen=True)
class Wanted:
    """A question: what may follow `tokens` (int32, every known token; the last one is not yet in the model's cache) of
    the sequence in `slot`? At most `most` (at least 1) tokens. Under the same number `text` a slot's tokens only grow;
    another number may mean any other text."""

    slot: int
    text: int
    tokens: NDArray[np.int32]
    most: int


@dataclass(frozen=True)
class Proposal:
    """Guessed tokens, none to `most` of them, and for each the chance that it is right if those before it are, as far
    as the draft knows."""

    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()


class Draft(Protocol):
    """Used by the engine's thread alone, but for `statistics`."""

    @property
    def kind(self) -> str:
        """Its name in options, status and documentation."""

    @property
    def costly(self) -> bool:
        """Whether a guess takes a share of a step's time, so that it should not even be asked for in vain."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """One proposal for each question, of different slots. Raises WorkerLost if its own executor failed."""

    def observe(self, rows: StepRows, result: StepResult) -> None:
        """A step of the model ended. Its views are valid during this call; guesses that were not accepted are among
        its rows, and later steps compute their positions again."""

    def recover(self) -> None:
        """After WorkerLost. Raises it again if there is no recovery."""

    def statistics(self) -> dict[str, Any]:
        """Plain values for status; from any thread."""

    def close(self) -> None: ...
