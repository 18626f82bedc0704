"""The draft that proposes a block at once: a DSpark module, which reads what the target computed at each position

Owns what is kept of the target's features until the module has them, and how far each of its slots is. Its executor
runs a program with `draft` facts and has a slot for each of the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.architectures.deepseek4_layers import FEATURES
from bloomery.runtime.architectures.dflash import CONFIDENCE
from bloomery.runtime.drafts.draft import Proposal, Wanted
from bloomery.runtime.executor import StateSnapshot, StepExecutor, StepResult, StepRows
from bloomery.runtime.prefixes import common_prefix
from bloomery.runtime.program import Program, RingState

KEPT_BEHIND = 32
"""Positions whose features are kept beyond a window: what steps may take back, and then some."""


class BlockDraft:
    """Greedy proposals, the blocks of all slots in one step. A guess ends before a token of which the module's
    confidence is less than `least_chance`.

    The module sees a window of positions, so of a long prompt it needs the last ones only: a slot that cannot go on
    where it was begins anew at the first position of the window (or, if the features of some are missing because their
    rows were copied from a slot of which no features are left, a little later, and guesses worse for a while).
    """

    kind = "dspark"
    costly = True

    def __init__(self, executor: StepExecutor, program: Program, least_chance: float = 0.0) -> None:
        assert program.draft is not None
        self._executor, self._facts, self._least = executor, program.draft, least_chance
        self._states = program.states
        self._window = max(state.span for state in program.states.values() if isinstance(state, RingState)) - 1
        width = program.buffers[FEATURES].width
        self._texts = tuple(_Text(executor.context, width, self._window + KEPT_BEHIND) for _ in range(executor.slots))
        self._begun_late = 0

    def observe(self, rows: StepRows, result: StepResult) -> None:
        features = result.reports[FEATURES]
        for slot in np.unique(rows.slots):
            mine = np.flatnonzero(rows.slots == slot)
            text = self._texts[slot]
            text.seen(int(rows.positions[mine[0]]), rows.tokens[mine], features[mine[-text.room :]])

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        found = dict.fromkeys((question.slot for question in wanted), Proposal())
        block = self._facts.block
        most = max(1, min(self._executor.max_rows // (2 * block), self._executor.max_out_rows // block))
        for first in range(0, len(wanted), most):
            group = [q for q in wanted[first : first + most] if len(q.tokens) + block <= self._executor.context]
            if group:
                found |= self._draft(group)
        return [found[question.slot] for question in wanted]

    def recover(self) -> None:
        self._executor.recover()
        for text in self._texts:
            text.committed = text.committed[:0]

    def statistics(self) -> dict[str, Any]:
        return {"block": self._facts.block, "begun_late": self._begun_late, "executor": self._executor.statistics()}

    def close(self) -> None:
        self._executor.close()

    def _catch_up(self, question: Wanted, room: int) -> int:
        """Brings the slot's window to where at most `room` positions are missing; returns the first of them."""
        slot, known = question.slot, question.tokens[:-1]
        text = self._texts[slot]
        allowed = self._executor.continuable(slot)
        at = min(common_prefix(text.committed, known), allowed.stop - 1)
        if (at and at not in allowed) or not text.has(known, at).all():
            missing = np.flatnonzero(~text.has(known, max(0, len(known) - self._window)))
            at = max(0, len(known) - self._window) + (int(missing[-1]) + 1 if len(missing) else 0)
            self._begun_late += at > max(0, len(known) - self._window)
            self._begin(slot, at)
        while len(known) - at > room:
            rows = min(len(known) - at - room, self._executor.max_rows)
            self._step([self._part(question, at, at + rows, 0)])
            at += rows
            text.committed = known[:at].copy()
        return at

    def _begin(self, slot: int, at: int) -> None:
        """The slot's window is empty before position `at` (rows of zeros stand for what is not known)."""
        if at:
            like = self._executor.snapshot(slot, 0).rows
            rows = {
                name: np.zeros((len(state.live(at)), state.width), like[name].dtype)
                for name, state in self._states.items()
            }
            self._executor.restore(slot, StateSnapshot(at, rows))

    def _draft(self, group: list[Wanted]) -> dict[int, Proposal]:
        block = self._facts.block
        found: dict[int, Proposal] = {}
        room = self._executor.max_rows // len(group) - block
        parts = [
            self._part(question, self._catch_up(question, room), len(question.tokens) - 1, block) for question in group
        ]
        result = self._step(parts)
        confidence = 1.0 / (1.0 + np.exp(-result.reports[CONFIDENCE][:, 0].astype(np.float64)))
        for index, question in enumerate(group):
            self._texts[question.slot].committed = question.tokens[:-1].copy()
            mine = slice(index * block, index * block + min(block, question.most))
            chances = confidence[mine]
            unsure = np.flatnonzero(chances < self._least)
            count = int(unsure[0]) if len(unsure) else len(chances)
            found[question.slot] = Proposal(
                tuple(result.greedy[mine].tolist()[:count]), tuple(chances.tolist()[:count])
            )
        return found

    def _part(self, question: Wanted, at: int, end: int, block: int) -> StepRows:
        """Commits positions at..end-1 and drafts `block` rows behind them."""
        tokens = np.full(end - at + block, self._facts.mask, np.int32)
        tokens[: end - at] = question.tokens[at:end]
        tokens[end - at : end - at + min(block, 1)] = question.tokens[end : end + min(block, 1)]
        index = np.arange(len(tokens), dtype=np.int32)
        features = np.zeros((len(tokens), self._texts[question.slot].width), np.float32)
        features[: end - at] = self._texts[question.slot].of(at, end)
        slots = np.full(len(tokens), question.slot, np.int32)
        return StepRows(tokens, slots, index + np.int32(at), index[end - at :], {FEATURES: features})

    def _step(self, parts: list[StepRows]) -> StepResult:
        starts = np.cumsum([0, *(len(part.tokens) for part in parts)])[:-1]
        return self._executor.step(
            StepRows(
                np.concatenate([part.tokens for part in parts]),
                np.concatenate([part.slots for part in parts]),
                np.concatenate([part.positions for part in parts]),
                np.concatenate([part.out_rows + start for part, start in zip(parts, starts, strict=True)]).astype(
                    np.int32
                ),
                {FEATURES: np.concatenate([part.inputs[FEATURES] for part in parts])},
            )
        )


class _Text:
    """What was seen of one of the model's slots: tokens by position, and the features of the last `room` positions.
    `committed`: the tokens whose positions the module's slot holds."""

    def __init__(self, context: int, width: int, room: int) -> None:
        self.width, self.room = width, room
        self.committed = np.empty(0, np.int32)
        self._tokens = np.full(context, -1, np.int32)
        self._at = np.full(room, -1, np.int64)
        self._features = np.empty((0, width), np.float32)

    def seen(self, first: int, tokens: NDArray[np.int32], features: NDArray[np.float32]) -> None:
        """Rows of a step from position `first` on, and the features of the last of them."""
        if not len(self._features):
            self._features = np.zeros((self.room, self.width), np.float32)
        self._tokens[first : first + len(tokens)] = tokens
        positions = np.arange(first + len(tokens) - len(features), first + len(tokens))
        self._at[positions % self.room] = positions
        self._features[positions % self.room] = features

    def has(self, known: NDArray[np.int32], first: int) -> NDArray[np.bool_]:
        """Of which positions first... of the tokens `known` the features are there."""
        positions = np.arange(first, len(known))
        return np.asarray((self._at[positions % self.room] == positions) & (self._tokens[positions] == known[first:]))

    def of(self, first: int, end: int) -> NDArray[np.float32]:
        return np.asarray(self._features[np.arange(first, end) % self.room])
