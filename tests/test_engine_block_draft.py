"""A DSpark draft in the engine, both on worker pools: answers are to the bit what they are without it, greedy and
drawn, however many of its tokens are accepted; and what it proposes does not depend on how the text came to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from deepseek_data import draft_program, tapped_program, tiny41, tiny_draft
from engine_client import GREEDY, Client, exhaust
from running import rows_of

from bloomery.runtime.drafts.block import BlockDraft
from bloomery.runtime.drafts.draft import Draft, Proposal, Wanted
from bloomery.runtime.drafts.drafting import Drafting, DraftLimits
from bloomery.runtime.engine import Engine
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.requests import SamplingParameters
from bloomery.runtime.tokenizer import Tokenizer

CONTEXT, SLOTS, LENGTH = 128, 2, 36
TEXTS = [np.random.default_rng(seed).integers(6, 500, 20).tolist() for seed in (1, 2)]
DRAWN = SamplingParameters(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with ModelFile.open(tiny41("a", "f32")) as model:
        return Tokenizer.from_model_file(model)


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[HostPool, HostPool]]:
    """(the model's, its draft's)"""
    sizes = {"context": CONTEXT, "slots": SLOTS, "processes": 1, "prompt_block": 32}
    model = HostPool.start(str(tiny41("a", "f32")), tapped_program("f32"), **sizes)  # type: ignore[arg-type]
    try:
        draft = HostPool.start(str(tiny_draft("f32")), draft_program("f32"), **sizes)  # type: ignore[arg-type]
        try:
            yield model, draft
        finally:
            draft.close()
    finally:
        model.close()


class Helped(BlockDraft):
    """Some of its guesses are replaced by what will be chosen, so that rows are accepted as well as taken back."""

    right: dict[int, list[int]]
    random: Random
    log: list[tuple[list[int], list[int]]]

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        proposals = super().propose(wanted)
        helped = []
        for question, proposal in zip(wanted, proposals, strict=True):
            self.log.append((question.tokens.tolist(), list(proposal.tokens)))
            known = question.tokens.tolist()
            whole = next(text for text in self.right.values() if text[: len(known)] == known)
            count = self.random.randrange(len(proposal.tokens) + 1)
            tokens = (*whole[len(known) : len(known) + count], *proposal.tokens[count:])
            helped.append(Proposal(tokens[: question.most], proposal.chances[: len(tokens)]))
        return helped


def answers(
    pool: HostPool, tokenizer: Tokenizer, sampling: SamplingParameters, draft: Draft | None = None
) -> list[list[int]]:
    """The texts' continuations, both at once."""
    drafting = Drafting(draft, DraftLimits(5, fixed=True), pool.max_out_rows) if draft else None
    client = Client(Engine(pool, tokenizer, None, drafting=drafting))
    asked = [
        client.submit(tuple(text), max_tokens=LENGTH, sampling=replace(sampling, seed=7 + number), ignore_eos=True)
        for number, text in enumerate(TEXTS)
    ]
    exhaust(client)
    if drafting:
        counts = drafting.counts()
        assert not drafting.statistics()["failed"] and counts["draft_tokens"] > 0
    return [client.tokens(one) for one in asked]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_answers_stay_what_they_are(
    pools: tuple[HostPool, HostPool], tokenizer: Tokenizer, sampling: SamplingParameters
) -> None:
    """Token for token, also those that are drawn: a guess is accepted only if the sampler, with the random number
    that it would have had, draws it. So the distribution is the sampler's, whatever is guessed."""
    model, module = pools
    plain = answers(model, tokenizer, sampling)
    assert answers(model, tokenizer, sampling, BlockDraft(module, draft_program("f32"))) == plain
    helped = Helped(module, draft_program("f32"))
    helped.right = {number: TEXTS[number] + text + [0] * 8 for number, text in enumerate(plain)}
    helped.random, helped.log = Random(5), []
    assert answers(model, tokenizer, sampling, helped) == plain
    # what was proposed on the way is what a module proposes that meets the text at once
    known, found = next(entry for entry in reversed(helped.log) if len(entry[1]) == 5)
    fresh = BlockDraft(module, draft_program("f32"))
    for first in range(0, len(known) - 1, 32):
        rows = rows_of(known[first : min(first + 32, len(known) - 1)], start=first, out="last")
        fresh.observe(rows, model.step(rows))
    (again,) = fresh.propose([Wanted(0, 99, np.array(known, np.int32), 5)])
    assert list(again.tokens) == found
