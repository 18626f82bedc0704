"""The draft of a smaller model: the tokens that it would choose

Owns what the draft model's caches hold of each slot. Its executor has a slot for each of the model's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.candidates import log_sum_exp
from bloomery.runtime.drafts.draft import Proposal, Wanted
from bloomery.runtime.executor import StepExecutor, StepResult, StepRows


class ModelDraft:
    """Greedy guesses, all slots in the same steps. A guess ends before a token that the draft model gives less than
    `least_chance`.

    The caches go on where they agree with what is asked: guesses that were right are there already, others are written
    over. What they lack of a long text is computed in blocks of the executor's greatest step, one a question, and
    nothing is guessed for that slot meanwhile.
    """

    kind = "model"
    costly = True

    def __init__(self, executor: StepExecutor, vocabulary: int, least_chance: float = 0.0) -> None:
        """`vocabulary`: tokens that both models know; of others nothing is guessed."""
        self._executor, self._vocabulary, self._least = executor, vocabulary, least_chance
        self._caches = tuple(_Cache(executor.context) for _ in range(executor.slots))

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        room = self._executor.max_rows
        parts: list[tuple[int, NDArray[np.int32]]] = []
        ready: list[Wanted] = []
        for question in wanted:
            end = len(question.tokens)
            if room < 1 or end + question.most > self._executor.context:
                continue
            missing = self._missing(question)
            if missing.max() >= self._vocabulary:
                continue
            if len(missing) <= room and len(ready) < self._executor.max_out_rows:
                ready.append(question)
            parts.append((question.slot, missing[:room]))
            room -= len(parts[-1][1])
        found: dict[int, list[tuple[int, float]]] = {question.slot: [] for question in ready}
        going = {question.slot: question.most for question in ready}
        while parts:
            guesses = self._step(parts, going)
            parts = []
            for slot, guess in guesses.items():
                if guess[1] < self._least:
                    continue
                found[slot].append(guess)
                if len(found[slot]) < going[slot]:
                    parts.append((slot, np.array([guess[0]], np.int32)))
            going = {slot: going[slot] for slot, _ in parts}
        return [_proposal(found.get(question.slot, [])) for question in wanted]

    def observe(self, rows: StepRows, result: StepResult) -> None:
        pass

    def recover(self) -> None:
        self._executor.recover()

    def statistics(self) -> dict[str, Any]:
        return {"executor": self._executor.statistics()}

    def close(self) -> None:
        self._executor.close()

    def _missing(self, question: Wanted) -> NDArray[np.int32]:
        """The tokens whose rows the slot's cache lacks, at least the last one. The cache forgets what it has beyond."""
        cache, tokens = self._caches[question.slot], question.tokens
        have = min(cache.agree(question), len(tokens) - 1)
        allowed = self._executor.continuable(question.slot)
        have = min(have, allowed.stop - 1)
        cache.count = have if have >= allowed.start else 0
        return tokens[cache.count :]

    def _step(self, parts: list[tuple[int, NDArray[np.int32]]], going: dict[int, int]) -> dict[int, tuple[int, float]]:
        """Runs the rows of each slot behind what its cache holds; for slots that are `going` on, what the last row
        says: the most probable token and its probability (1 if nobody asks)."""
        tokens = np.concatenate([part for _, part in parts])
        slots, positions, outs, end = [], [], [], 0
        for slot, part in parts:
            count = self._caches[slot].count
            slots.append(np.full(len(part), slot, np.int32))
            positions.append(np.arange(count, count + len(part), dtype=np.int32))
            end += len(part)
            if slot in going:
                outs.append(end - 1)
        rows = StepRows(tokens, np.concatenate(slots), np.concatenate(positions), np.array(outs, np.int32))
        for slot, part in parts:
            self._caches[slot].writing(part)
        result = self._executor.step(rows)
        for slot, part in parts:
            self._caches[slot].count += len(part)
        return dict(zip((slot for slot, _ in parts if slot in going), map(self._chosen, result.logits), strict=True))

    def _chosen(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        token = int(logits[: self._vocabulary].argmax())
        if not self._least:
            return token, 1.0
        return token, math.exp(float(logits[token]) - log_sum_exp(logits))


class _Cache:
    """Which tokens a slot of the draft model's caches holds: `tokens[:count]`."""

    def __init__(self, context: int) -> None:
        self.tokens = np.empty(context, np.int32)
        self.count = 0
        self._text = -1
        self._known = 0  # tokens of that text that were compared before

    def agree(self, question: Wanted) -> int:
        """How many of the tokens held are those of the question."""
        begin = min(self._known, self.count) if question.text == self._text else 0
        end = min(self.count, len(question.tokens))
        differs = self.tokens[begin:end] != question.tokens[begin:end]
        self._text, self._known = question.text, len(question.tokens)
        return begin + int(differs.argmax()) if differs.any() else max(begin, end)

    def writing(self, tokens: NDArray[np.int32]) -> None:
        self.tokens[self.count : self.count + len(tokens)] = tokens


def _proposal(guess: list[tuple[int, float]]) -> Proposal:
    return Proposal(tuple(token for token, _ in guess), tuple(chance for _, chance in guess))
