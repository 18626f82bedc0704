"""Drafts by themselves: what the lookup proposes, when checking pays, how a draft model's caches keep up.

Planted once and seen to fail: a draft model's caches that count one token too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from engine_client import GREEDY, PROMPT, Client, exhaust
from numpy.typing import NDArray
from toy_draft import ToyDraft
from toy_model import TOKENIZER, VOCABULARY, ToyExecutor, logits_after, solo

from bloomery.runtime.drafts import lookup
from bloomery.runtime.drafts.draft import Draft, Proposal, Wanted
from bloomery.runtime.drafts.drafting import Drafting, DraftLimits
from bloomery.runtime.drafts.lookup import LookupDraft
from bloomery.runtime.drafts.model import ModelDraft
from bloomery.runtime.drafts.synthetic import SyntheticAcceptance, check_rates, rates_of_length
from bloomery.runtime.drafts.worth import StepCosts, best_length, worth_checking
from bloomery.runtime.engine import Engine
from bloomery.runtime.errors import PlanError, WorkerLost
from bloomery.runtime.requests import Final, GenerationRequest, SamplingParameters


def array(tokens: list[int]) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


# ---- looking up ----


def published_text() -> list[int]:
    """The check text of the publisher's lookup draft: u32 random numbers, and now and then 40 to 44."""
    state, tokens = 1, list[int]()
    while len(tokens) < 4000:
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        number = state >> 16
        tokens += range(40, 45) if number % 7 == 0 else [number % 11]
    return tokens[:4000]


def test_lookup_makes_the_published_number_of_proposals() -> None:
    """3999 positions, 3983 proposals, 1644 of them right: the figures that were published for tables of 3, 2 and 1
    tokens which say what followed most recently."""
    tokens = array(published_text())
    draft, made, right = LookupDraft(), 0, 0
    for known in range(1, len(tokens)):
        [proposal] = draft.propose([Wanted(0, 1, tokens[:known], 1)])
        made += bool(proposal.tokens)
        right += proposal.tokens == (tokens[known],)
    assert (made, right) == (3983, 1644)


def test_lookup_knows_a_pattern_once_it_was_seen() -> None:
    tokens = array([11, 3, 7, 500, 2, 9, 4] * 70)
    draft = LookupDraft()
    for known in range(1, len(tokens) - 9):
        [proposal] = draft.propose([Wanted(0, 1, tokens[:known], 9)])
        assert list(proposal.tokens) == (tokens[known : known + 9].tolist() if known > 7 else [])
    chances = proposal.chances
    assert chances[0] > 0.95 and list(draft.statistics()["chances"])[-1] > 0.9


def test_lookup_of_several_slots_and_of_another_text_in_a_slot() -> None:
    draft = LookupDraft()
    text, other = [1, 2, 3, 4, 1, 2], [5, 6, 5]
    found = draft.propose([Wanted(0, 1, array(text), 2), Wanted(1, 2, array(other), 9)])
    assert [proposal.tokens for proposal in found] == [(3, 4), (6, 5, 6, 5, 6, 5, 6, 5, 6)]
    [proposal] = draft.propose([Wanted(0, 3, array([9, 1, 2]), 2)])
    assert not proposal.tokens, "what the slot's last text said is no longer true"
    [proposal] = draft.propose([Wanted(0, 3, array([9, 1, 2, 9]), 2)])
    assert proposal.tokens == (1, 2)


def test_lookup_forgets_the_oldest_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any length it proposes what a search of its newest tokens finds."""
    monkeypatch.setattr(lookup, "KEPT", 40)
    random, tokens, draft = Random(3), list[int](), LookupDraft()
    while len(tokens) < 700:
        tokens += [random.randrange(6) for _ in range(random.choice([1, 1, 2, 5, 60]))]
        [proposal] = draft.propose([Wanted(0, 1, array(tokens), 4)])
        kept = draft._texts[0].tokens
        assert len(kept) <= 2 * 40 and kept == tokens[-len(kept) :]
        expected = searched(kept, 4)
        assert proposal.tokens == expected


def searched(tokens: list[int], most: int) -> tuple[int, ...]:
    for size in (3, 2, 1):
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[len(tokens) - size :]:
                end = len(tokens)
                return tuple(tokens[place + offset % (end - place)] for offset in range(most))
    return ()


# ---- what pays ----


def test_rows_are_checked_while_each_raises_tokens_per_second() -> None:
    """Against all other choices."""
    random = Random(5)
    for _ in range(200):
        chances = [[random.random() for _ in range(random.randrange(4))] for _ in range(random.randrange(1, 4))]
        row, room = random.choice([0.05, 0.3, 0.9]), random.choice([2, 9])
        counts = worth_checking(chances, 1.0, row, room, len(chances))
        assert sum(counts) <= room
        best = max(speed(choice, chances, row) for choice in choices(chances) if sum(choice) <= room)
        assert speed(counts, chances, row) == pytest.approx(best)


def choices(chances: list[list[float]]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for guess in chances:
        found = [[*before, count] for before in found for count in range(len(guess) + 1)]
    return found


def speed(counts: list[int], chances: list[list[float]], row: float) -> float:
    tokens = float(len(chances))
    for count, guess in zip(counts, chances, strict=True):
        tokens += sum(float(np.prod(guess[: length + 1])) for length in range(count))
    return tokens / (1.0 + row * sum(counts))


def test_a_guess_that_takes_time_is_as_long_as_pays() -> None:
    assert best_length([0.9], 1.0, 0.1, 0.05, 7, 1) == 7
    assert best_length([0.9], 1.0, 0.1, 0.5, 7, 1) in range(1, 4)
    assert best_length([0.3], 1.0, 0.1, 0.5, 7, 1) == 0


def test_costs_are_found_through_noise() -> None:
    random, costs = Random(1), StepCosts()
    for _ in range(400):
        guessed = random.choice([0, 0, 3, 7])
        seconds = (0.010 + 0.002 * guessed) * random.uniform(0.9, 1.1) * (20 if random.random() < 0.01 else 1)
        costs.observe(1, guessed, seconds)
    assert costs.base(1) == pytest.approx(0.010, rel=0.15) and costs.row == pytest.approx(0.002, rel=0.3)


def test_synthetic_rates() -> None:
    draws = SyntheticAcceptance((0.75, 0.5, 0.5))
    counts = [draws.accepted(text, text, 3) for text in range(100) for _ in range(40)]
    shares = [sum(count > place for count in counts) / len(counts) for place in range(3)]
    assert shares == pytest.approx([0.75, 0.5, 0.5], abs=0.03)
    again, other = SyntheticAcceptance((0.75,) * 3), SyntheticAcceptance((0.75,) * 3)
    assert [again.accepted(1, 9, 3) for _ in range(20)] == [other.accepted(7, 9, 3) for _ in range(20)]
    assert 1 + sum(rates_of_length(2.5, 7)) == pytest.approx(2.5)
    for rates in ((1.5,), (0.2, 0.4), (float("nan"),)):
        with pytest.raises(PlanError):
            check_rates(rates)


# ---- in the engine ----


def drafted(draft: Draft, executor: ToyExecutor | None = None, limits: DraftLimits | None = None) -> Client:
    executor = executor or ToyExecutor(slots=2, context=600, max_rows=64, max_out_rows=64)
    limits = limits or DraftLimits(fixed=True)
    drafting = Drafting(draft, limits, min(executor.max_rows, executor.max_out_rows))
    return Client(Engine(executor, TOKENIZER, None, drafting=drafting))


class SilentDraft(ToyDraft):
    """Has nothing to say."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        return [Proposal() for _ in super().propose(wanted)]


@pytest.mark.parametrize("fixed", [True, False])
def test_a_draft_is_asked_in_every_step_only_if_that_is_wanted(fixed: bool) -> None:
    draft = SilentDraft(1.0)
    client = drafted(draft, limits=DraftLimits(fixed=fixed))
    request = client.submit(max_tokens=400, ignore_eos=True)
    exhaust(client)
    assert client.final(request).generated_tokens == 400
    assert draft.asked == 398 if fixed else 64 < draft.asked < 200, draft.asked


def test_counts_and_steps() -> None:
    executor = ToyExecutor(slots=1, context=600, max_rows=64, max_out_rows=64)
    client = drafted(ToyDraft(1.0), executor, DraftLimits(most=7, fixed=True))
    request = client.submit(max_tokens=161, ignore_eos=True, sampling=SamplingParameters(temperature=0, seed=1))
    exhaust(client)
    final = client.final(request)
    generate_steps = len(executor.history) - sum(count > 9 for step in executor.history for _, _, count in step)
    assert final.generated_tokens == 161 and 0 < final.draft_accepted <= final.draft_tokens
    assert generate_steps == 160 - final.draft_accepted, "a step brings one token and the accepted ones"
    metrics = client.engine.metrics()
    assert metrics["draft_tokens"] == final.draft_tokens and metrics["draft_accepted"] == final.draft_accepted
    assert sum(metrics["draft_accepted_at"]) == final.draft_accepted and metrics["generated_tokens"] == 161
    status = client.engine.status()["draft"]
    assert status["kind"] == "toy" and status["failed"] == ""


def test_a_draft_that_loses_is_switched_off_and_tried_again() -> None:
    """Rows cost half a step each, so guesses pay that are right more often than that; a draft turns bad and good."""
    executor = ToyExecutor(slots=1, context=6000, max_rows=64, max_out_rows=64)
    executor.seconds = lambda rows: 0.01 + 0.005 * (rows - 1)
    draft = ToyDraft(0.95)
    client = drafted(draft, executor, DraftLimits(most=7))
    client.submit(max_tokens=5900, ignore_eos=True)

    def rows_of_the_next(steps: int) -> list[int]:
        before = len(executor.history)
        while len(executor.history) < before + steps:
            assert client.engine.turn()
        return [count for step in executor.history[before:] for _, _, count in step]

    rows_of_the_next(20)
    assert np.mean(rows_of_the_next(100)) > 2
    draft.right = 0.05
    off = rows_of_the_next(400)
    assert sum(off) - len(off) <= 0.02 * len(off), "extra rows while it says itself that it is bad"
    draft.right = 0.95
    assert np.mean(rows_of_the_next(100)[20:]) > 2


def test_a_costly_draft_that_loses_is_hardly_asked() -> None:
    executor = ToyExecutor(slots=1, context=6000, max_rows=64, max_out_rows=64)
    executor.seconds = lambda rows: 0.0001 + 0.00001 * (rows - 1)  # less than a question takes
    draft = ToyDraft(0.3, costly=True)
    client = drafted(draft, executor, DraftLimits(most=7))
    request = client.submit(max_tokens=1500, ignore_eos=True)
    exhaust(client)
    assert client.final(request).generated_tokens == 1500 and 0 < draft.asked < 60


@pytest.mark.parametrize("recovers", [True, False])
def test_a_draft_that_fails_costs_no_request(recovers: bool) -> None:
    draft = ToyDraft(1.0)

    def fail() -> None:
        if draft.asked == 3:
            raise WorkerLost("the draft's worker 0 died") if recovers else ZeroDivisionError("a defect")

    draft.during = fail
    client = drafted(draft)
    request = client.submit(max_tokens=60, ignore_eos=True)
    exhaust(client)
    asked = GenerationRequest(request, tokens=PROMPT, max_tokens=60, sampling=GREEDY, ignore_eos=True)
    assert client.tokens(request) == solo(asked, 600, 0).tokens
    assert (draft.asked > 3) == recovers and draft.recoveries == recovers
    assert ("ZeroDivisionError" in client.engine.status()["draft"]["failed"]) == (not recovers)


def test_synthetic_acceptance_takes_what_the_model_would_not() -> None:
    request = GenerationRequest(bytes(16), tokens=PROMPT, max_tokens=50, sampling=GREEDY, ignore_eos=True)
    expected = solo(request, 600, 0).tokens
    for rates, accepted in (((0.0,) * 7, 0), ((1.0,) * 7, 43)):
        client = drafted(ToyDraft(0.0), limits=DraftLimits(7, 0, True, rates))
        found = client.submit(max_tokens=50, ignore_eos=True)
        exhaust(client)
        final = client.final(found)
        assert isinstance(final, Final) and final.draft_tokens > 0 and final.generated_tokens == 50
        assert (client.tokens(found) == expected) == (accepted == 0)
        assert final.draft_accepted == (final.draft_tokens if accepted else 0)


# ---- a draft model ----


def test_a_draft_model_keeps_up_whatever_becomes_of_its_guesses() -> None:
    """Its guesses are those of the draft model on the very tokens, after right and wrong guesses, for several slots,
    after another text in the slot, and with room for a few rows only."""
    random = Random(2)
    for max_rows in (64, 5):
        executor = ToyExecutor(slots=3, context=200, max_rows=max_rows, max_out_rows=min(max_rows, 4))
        draft = ModelDraft(executor, VOCABULARY)
        texts = {slot: (slot, [random.randrange(VOCABULARY) for _ in range(20)]) for slot in range(3)}
        guessed = 0
        for round_ in range(60):
            slots = random.sample(range(3), random.randrange(1, 4))
            wanted = [Wanted(slot, texts[slot][0], array(texts[slot][1]), random.randrange(1, 6)) for slot in slots]
            for question, proposal in zip(wanted, draft.propose(wanted), strict=True):
                _, tokens = texts[question.slot]
                assert len(proposal.tokens) in (0, question.most)
                assert proposal.tokens == greedy(tokens, len(proposal.tokens))
                guessed += len(proposal.tokens)
                tokens += proposal.tokens[: random.randrange(len(proposal.tokens) + 1)]
                tokens.append(random.randrange(VOCABULARY))
                if random.random() < 0.1:
                    texts[question.slot] = 100 + round_, [*tokens[: random.randrange(1, len(tokens))], 3, 4]
        assert guessed > 100
        assert all(len(tokens) < 200 for _, tokens in texts.values())


def greedy(tokens: list[int], count: int) -> tuple[int, ...]:
    found: list[int] = []
    while len(found) < count:
        found.append(int(logits_after(tokens + found).argmax()))
    return tuple(found)


def test_a_draft_model_stops_at_improbable_tokens_and_at_the_end_of_its_context() -> None:
    executor = ToyExecutor(slots=1, context=64, max_rows=64, max_out_rows=4)
    sure, unsure = ModelDraft(executor, VOCABULARY, 0.0), ModelDraft(executor, VOCABULARY, 0.999)
    tokens = array([random % VOCABULARY for random in range(30)])
    [proposal] = sure.propose([Wanted(0, 1, tokens, 6)])
    assert len(proposal.tokens) == 6
    [proposal] = unsure.propose([Wanted(0, 1, tokens, 6)])
    assert len(proposal.tokens) < 6
    [proposal] = sure.propose([Wanted(0, 2, array([1] * 60), 6)])
    assert not proposal.tokens


def test_a_draft_model_that_is_the_model_is_always_right() -> None:
    target = ToyExecutor(slots=2, context=200, max_rows=64, max_out_rows=64)
    draft = ModelDraft(ToyExecutor(slots=2, context=200, max_rows=64, max_out_rows=64, seed=9), VOCABULARY)
    client = drafted(draft, target)
    first = client.submit(max_tokens=50, ignore_eos=True)
    second = client.submit(PROMPT[5:], max_tokens=50, ignore_eos=True)
    exhaust(client)
    again = client.submit((*PROMPT, *client.tokens(first), 4), max_tokens=50, ignore_eos=True)
    exhaust(client)
    for request in (first, second, again):
        final = client.final(request)
        assert final.draft_tokens == final.draft_accepted > 30
