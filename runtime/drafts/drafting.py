"""Which rows of a step check guesses: asks the draft, decides what is worth its time, and learns from what came of it

Owns the draft's limits, the automatic switch-off and the counts. Knows sequences by what `Guessing` says of them; rows
and acceptance are theirs, steps the engine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.drafts.draft import MOST_TOKENS, Draft, Proposal, Wanted
from bloomery.runtime.drafts.synthetic import SyntheticAcceptance
from bloomery.runtime.drafts.worth import (
    PROBE_TOKENS,
    Acceptance,
    Probes,
    StepCosts,
    best_length,
    updated,
    worth_checking,
)
from bloomery.runtime.errors import WorkerLost
from bloomery.runtime.executor import StepResult, StepRows

log = logging.getLogger(__name__)

_REST_AFTER, _REST_SHARE, _LONGEST_REST = 64, 8, 32
"""After so many steps without a guess worth checking, the next that asks for one comes later by this part of their
number, but not by more than so many: a look takes the lookup draft about 60 us on cold caches."""


@dataclass(frozen=True)
class DraftLimits:
    """`most` and `least` tokens of a guess that is checked (shorter ones are dropped); `fixed`: every step asks, and
    checks as many as there are, without regard to whether it pays; `rates`: synthetic acceptance, see `synthetic`."""

    most: int = 7
    least: int = 0
    fixed: bool = False
    rates: tuple[float, ...] = ()


class Guessing(Protocol):
    """What a sequence tells of itself."""

    @property
    def cache_slot(self) -> int: ...

    @property
    def text(self) -> int:
        """See Wanted."""

    @property
    def known(self) -> NDArray[np.int32]:
        """Its tokens (int32)."""

    @property
    def seed(self) -> int: ...

    @property
    def guess_room(self) -> int:
        """How many tokens behind the last known one a step could check; 0 if it cannot have any."""

    def guess(self, tokens: Sequence[int], accepted: int | None) -> None:
        """Its next rows check these tokens; `accepted` of them whatever the model says, if that is not None."""

    @property
    def checked(self) -> tuple[int, int]:
        """Of the last step: guessed tokens checked, and accepted."""


G = TypeVar("G", bound=Guessing)


class Drafting:
    """For the engine's thread; `statistics` and `counts` for any."""

    def __init__(self, draft: Draft, limits: DraftLimits, max_rows: int) -> None:
        """`max_rows` is the greatest number of rows of a step, all of which may want logits."""
        self._draft, self._limits, self._max_rows = draft, limits, max_rows
        self._most = min(limits.most, MOST_TOKENS)
        self._costs, self._acceptance, self._probes = StepCosts(), Acceptance(), Probes()
        self._token_seconds = 0.0
        self._asked: dict[int, tuple[int, int]] = {}  # of each slot: text and length of the last question
        self._synthetic = SyntheticAcceptance(limits.rates) if limits.rates else None
        self._failed = ""
        self.tokens = self.accepted = self.steps = 0
        self._in_vain = self._next_look = 0  # steps since a guess was checked, and at how many to ask again
        self.accepted_at = [0] * MOST_TOKENS

    def extend(self, parts: list[tuple[G, int]]) -> list[tuple[G, int]]:
        """The parts of a step (one row each) with the rows that check guesses."""
        if self._in_vain < self._next_look:
            self._in_vain += 1
            return parts
        room = self._max_rows - len(parts)
        asking = [sequence for sequence, _ in parts if sequence.guess_room > 0]
        if not asking or room < 1 or self._failed:
            return parts
        wanted = self._wanted(asking, len(parts), room)
        if not wanted:
            self._looked_in_vain()
            return parts
        proposals = self._ask(wanted)
        counts = self._counts(wanted, proposals, len(parts), room)
        rows = {}
        for sequence, proposal, count in zip(asking, proposals, counts, strict=False):
            if count:
                sequence.guess(proposal.tokens[:count], self._forced(sequence, count))
                rows[id(sequence)] = 1 + count
        if not rows:
            self._looked_in_vain()
            return parts
        self._in_vain = self._next_look = 0
        return [(sequence, rows.get(id(sequence), 1)) for sequence, _ in parts]

    def observe(self, rows: StepRows, result: StepResult) -> None:
        """Every step of the model, prompts' included."""
        if not self._failed:
            self._draft.observe(rows, result)

    def learn(self, parts: Sequence[tuple[G, int]], seconds: float) -> None:
        """What came of a step without prompt rows, once its sequences have taken their results."""
        guessed = sum(rows - 1 for _, rows in parts)
        self._costs.observe(len(parts), guessed, seconds)
        if not guessed:
            return
        self.steps += 1
        for sequence, rows in parts:
            if rows > 1:
                checked, accepted = sequence.checked
                self.tokens += checked
                self.accepted += accepted
                for place in range(accepted):
                    self.accepted_at[place] += 1
                self._acceptance.observe(sequence.cache_slot, sequence.text, checked, accepted)

    def counts(self) -> dict[str, Any]:
        """For metrics: tokens checked and accepted, steps that checked any, accepted tokens by their place."""
        return {
            "draft_tokens": self.tokens,
            "draft_accepted": self.accepted,
            "draft_steps": self.steps,
            "draft_accepted_at": self.accepted_at[: self._most],
        }

    def statistics(self) -> dict[str, Any]:
        """For status."""
        return {
            "kind": self._draft.kind,
            "most": self._most,
            "failed": self._failed,
            "row_seconds": self._costs.row,
            "token_seconds": self._token_seconds,
            "steps_without": self._in_vain,
            **self.counts(),
            **self._draft.statistics(),
        }

    def close(self) -> None:
        self._draft.close()

    def _looked_in_vain(self) -> None:
        if self._in_vain >= _REST_AFTER and not self._limits.fixed:
            self._next_look = self._in_vain + min(self._in_vain // _REST_SHARE, _LONGEST_REST)
        self._in_vain += 1

    def _wanted(self, asking: Sequence[G], sequences: int, room: int) -> list[Wanted]:
        """The questions, in the order of `asking`; none if nothing should be guessed now."""
        most = [min(sequence.guess_room, self._most, room) for sequence in asking]
        if not self._limits.fixed:
            if not self._costs.known(sequences):
                return []
            if self._draft.costly:
                length = self._length(asking, sequences, min(max(most), room // len(asking)))
                most = [min(length, one) for one in most]
        if not max(most):
            return []
        return [
            Wanted(sequence.cache_slot, sequence.text, sequence.known, max(1, count))
            for sequence, count in zip(asking, most, strict=True)
        ]

    def _length(self, asking: Sequence[G], sequences: int, most: int) -> int:
        chances = [self._acceptance.of(sequence.cache_slot, sequence.text) for sequence in asking]
        base, row = self._costs.base(sequences), self._costs.row
        length = best_length(chances, base, row, self._token_seconds, most, sequences)
        if length:
            self._probes.paid()
        elif self._probes.due():
            length = min(PROBE_TOKENS, most)
        return max(length, min(self._limits.least, most)) if length else 0

    def _ask(self, wanted: list[Wanted]) -> list[Proposal]:
        near = all(self._follows(question) for question in wanted)
        begun = time.perf_counter()
        try:
            proposals = self._draft.propose(wanted)
        except WorkerLost as error:
            proposals = [Proposal()] * len(wanted)
            self._recover(error)
        except Exception as error:
            proposals = [Proposal()] * len(wanted)
            self._give_up(error)
        longest = max(len(proposal.tokens) for proposal in proposals)
        if self._draft.costly and near and longest:
            seconds = (time.perf_counter() - begun) / longest
            self._token_seconds = updated(self._token_seconds or seconds, seconds)
        return proposals

    def _follows(self, question: Wanted) -> bool:
        """Whether a question is asked right after another: an answer that had to catch up with a text says nothing of
        what the next one will take."""
        text, length = self._asked.get(question.slot, (-1, 0))
        self._asked[question.slot] = question.text, len(question.tokens)
        return text == question.text and len(question.tokens) - length <= 1 + MOST_TOKENS

    def _counts(self, wanted: list[Wanted], proposals: list[Proposal], sequences: int, room: int) -> list[int]:
        lengths = [min(len(proposal.tokens), question.most) for proposal, question in zip(proposals, wanted)]
        if self._limits.fixed or self._draft.costly:
            for index, length in enumerate(lengths):
                lengths[index] = min(length, room)
                room -= lengths[index]
        elif any(lengths):
            chances = [proposal.chances[:length] for proposal, length in zip(proposals, lengths, strict=True)]
            base, row = self._costs.base(sequences), self._costs.row
            lengths = worth_checking(chances, base, row, room, sequences)
            if any(lengths):
                self._probes.paid()
            elif self._probes.due():
                lengths[max(range(len(chances)), key=lambda index: chances[index][:1])] = 1
        return [length if length >= self._limits.least else 0 for length in lengths]

    def _forced(self, sequence: Guessing, count: int) -> int | None:
        if self._synthetic is None:
            return None
        return self._synthetic.accepted(sequence.text, sequence.seed, count)

    def _recover(self, error: WorkerLost) -> None:
        log.error("the draft lost a worker: %s", error)
        try:
            self._draft.recover()
        except Exception as failed:
            self._give_up(failed)

    def _give_up(self, error: Exception) -> None:
        """Goes on without guesses: answers do not depend on them."""
        self._failed = f"{type(error).__name__}: {error}"
        log.error("drafting is off from now on", exc_info=error)
