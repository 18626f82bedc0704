"""A draft for the toy model that is right as often as it is told to be, and fails when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from toy_model import EMPTY, VOCABULARY, logits_of, mix

from bloomery.runtime.drafts.draft import Proposal, Wanted
from bloomery.runtime.executor import StepResult, StepRows


class ToyDraft:
    """Guesses the most probable tokens, each replaced by another with probability 1 - `right`; `during` is called in
    every question. It checks that what it is asked is in order."""

    kind = "toy"

    def __init__(self, right: float, *, costly: bool = False, seed: int = 0) -> None:
        self.right, self.costly, self._random = right, costly, Random(seed)
        self.during: Callable[[], object] = lambda: None
        self.asked = self.observed = self.recoveries = 0
        self._texts: dict[int, tuple[int, list[int]]] = {}

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        self.asked += 1
        self.during()
        assert len({question.slot for question in wanted}) == len(wanted) > 0
        return [self._guess(question) for question in wanted]

    def _guess(self, question: Wanted) -> Proposal:
        assert question.most >= 1
        tokens = question.tokens.tolist()
        text, before = self._texts.get(question.slot, (-1, []))
        assert text != question.text or tokens[: len(before)] == before, "a text only grows"
        self._texts[question.slot] = question.text, list(tokens)
        guess, state = list[int](), EMPTY
        for token in tokens:
            state = mix(state, token)
        while len(guess) < question.most and (not guess or self._random.random() < 0.9):
            token = int(logits_of(state).argmax())
            if self._random.random() >= self.right:
                token = self._random.randrange(VOCABULARY)
            guess.append(token)
            state = mix(state, token)
        return Proposal(tuple(guess), (self.right,) * len(guess))

    def observe(self, rows: StepRows, result: StepResult) -> None:
        assert len(result.logits) == len(rows.out_rows)
        self.observed += 1

    def recover(self) -> None:
        self.recoveries += 1

    def statistics(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def close(self) -> None:
        pass
