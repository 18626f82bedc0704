"""The block draft between a model and its module: what it proposes is what the published program drafts, however the
positions came.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from deepseek_data import draft_program, executor_of, figures41, tapped_program, tiny41
from numpy.typing import NDArray
from running import joined, rows_of

from bloomery.runtime.dequantised_weights import DequantisedWeights
from bloomery.runtime.drafts.block import BlockDraft
from bloomery.runtime.drafts.draft import Wanted
from bloomery.runtime.executor import StepResult
from bloomery.runtime.reference import ReferenceExecutor

FIGURES = figures41("tiny-deepseek41-draft")
IDS: NDArray[np.int32] = figures41("tiny-deepseek41-a")["ids"].astype(np.int32)
OTHERS = np.random.default_rng(3).integers(6, 500, 60).astype(np.int32)
FIRST = int(FIGURES["positions"][0])


@cache
def weights() -> DequantisedWeights:
    return DequantisedWeights(draft_program(), np.float32, 1 << 30)


@cache
def features_of(text: bytes) -> NDArray[np.float32]:
    """What the real target reports at each position of a text: computed once for all tests."""
    tokens = np.frombuffer(text, np.int32)
    target = executor_of(tiny41("a"), program=tapped_program(), wide=False, context=96, max_rows=40)
    return target.step(rows_of(tokens)).reports["features"].copy()


def draft(slots: int = 1, max_rows: int = 40, **arguments: Any) -> BlockDraft:
    executor = ReferenceExecutor(draft_program(), context=96, slots=slots, max_rows=max_rows)
    executor._weights = weights()
    return BlockDraft(executor, draft_program(), **arguments)


def run(drafts: BlockDraft, start: int, stop: int, behind: int = 0, text: NDArray[np.int32] = IDS) -> None:
    """The draft sees positions start..stop-1 of a text, and so many rows behind them that are taken back."""
    features, others = (features_of(each[:40].tobytes()) for each in (text, OTHERS))
    rows = rows_of(np.concatenate([text[start:stop], OTHERS[:behind]]), start=start)
    drafts.observe(rows, reported(np.concatenate([features[start:stop], others[:behind]])))


def reported(features: NDArray[np.float32]) -> StepResult:
    """A step's result of which only the reports are looked at."""
    nothing = np.empty((0, 0), np.float32)
    return StepResult(nothing, np.empty(0, np.int32), 0.0, reports={"features": features})


def proposed(drafts: BlockDraft, position: int, most: int = 5, slot: int = 0, text: int = 0) -> list[int]:
    """What is proposed behind position + 1 of the figures' text."""
    (proposal,) = drafts.propose([Wanted(slot, text, IDS[: position + 2], most)])
    return list(proposal.tokens)


def expected(position: int) -> list[int]:
    return [int(token) for token in FIGURES["proposals"][position - FIRST]]


def test_after_every_position() -> None:
    """Row by row, with rows between that are taken back; confidences are the stored ones."""
    drafts = draft()
    run(drafts, 0, FIRST)
    for position in range(FIRST, FIRST + 12):
        run(drafts, position, position + 1, behind=0 if position % 3 else 3)
        (proposal,) = drafts.propose([Wanted(0, 0, IDS[: position + 2], 5)])
        assert list(proposal.tokens) == expected(position)
        logits = FIGURES["confidence"][position - FIRST].astype(np.float64)
        np.testing.assert_allclose(proposal.chances, 1 / (1 + np.exp(-logits)), atol=1e-5)
        assert proposed(drafts, position, most=2) == expected(position)[:2]


def test_a_long_prompt_at_once_and_in_small_steps() -> None:
    """Only the window's positions are brought, in steps as small as the module's executor wants."""
    for max_rows in (10, 40):
        drafts = draft(max_rows=max_rows)
        run(drafts, 0, 36)
        assert proposed(drafts, 35) == expected(35)
        run(drafts, 36, 39)
        assert proposed(drafts, 38) == expected(38)
        assert drafts.statistics()["begun_late"] == 0


def test_another_text_in_the_slot_and_back() -> None:
    drafts = draft()
    run(drafts, 0, 20)
    assert proposed(drafts, 19) == expected(19)
    run(drafts, 0, 30, text=OTHERS)
    drafts.propose([Wanted(0, 1, OTHERS[:31], 5)])
    run(drafts, 0, 20)
    assert proposed(drafts, 19, text=2) == expected(19)


def test_slots_together_are_slots_alone() -> None:
    drafts = draft(slots=2)
    rows = joined(rows_of(IDS[:20], slot=0), rows_of(IDS[:15], slot=1))
    features = features_of(IDS[:40].tobytes())
    drafts.observe(rows, reported(np.concatenate([features[:20], features[:15]])))
    both = drafts.propose([Wanted(0, 0, IDS[:21], 5), Wanted(1, 1, IDS[:16], 4)])
    assert [list(proposal.tokens) for proposal in both] == [expected(19), expected(14)[:4]]


def test_where_features_are_missing_it_begins_late() -> None:
    """Rows copied from another slot bring none; proposals come all the same, and right ones once the window is full."""
    drafts = draft()
    run(drafts, 0, 20)
    drafts._texts[0]._at[:] = -1  # as if the slot had been filled by a copy
    run(drafts, 20, 22)
    assert len(proposed(drafts, 21)) == 5 and drafts.statistics()["begun_late"] == 1
    for position in range(22, 34):
        run(drafts, position, position + 1)
        found = proposed(drafts, position)
    assert found == expected(33) and drafts.statistics()["begun_late"] == 1


@pytest.mark.parametrize("least", [0.5, 1.0])
def test_unsure_tokens_are_not_guessed(least: float) -> None:
    drafts = draft(least_chance=least)
    run(drafts, 0, 25)
    sure = FIGURES["confidence"][24 - FIRST] >= np.log(least / (1 - least)) if least < 1 else np.zeros(5, bool)
    count = int(np.argmin(sure)) if not sure.all() else 5
    assert proposed(drafts, 24) == expected(24)[:count]
