"""Random schedules of requests, aborts, holds and failures on a model whose output gives every mistake away.

Whatever happens around it, a request that ends by itself has the tokens, text and numbers of its solo run, one that is
ended has a beginning of them, each gets exactly one last event, and nothing is left behind.

Planted once and seen to fail: a slot's count raised before the step has ended, or kept from a failed step; positions
off by one behind a cached prefix; results of two sequences mixed up; an aborted request's slot kept; a cached prefix
used for a scored prompt; scores of the token before; one seed for all; a second Final for an abort; text held back
lost at an abort or at the end; a stop string's reason lost; a token more than `max_tokens`; other logits than those
chosen from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_draft import ToyDraft
from toy_model import EMPTY, END, TOKENIZER, VOCABULARY, Solo, ToyExecutor, cut_at_stop, mix, solo, text_of

from bloomery.runtime.drafts.drafting import Drafting, DraftLimits
from bloomery.runtime.engine import Engine
from bloomery.runtime.errors import WorkerLost
from bloomery.runtime.requests import (
    Admitted,
    Chunk,
    Event,
    Failed,
    Final,
    GenerationRequest,
    Progress,
    SamplingParameters,
)

CONTEXT = 48
STEM = np.random.default_rng(1).integers(1, VOCABULARY, CONTEXT + 10).tolist()

ACTIONS = ("submit", "turns", "abort", "hold", "abort in step", "abort by sink", "submit in step")
FAULTS = ("lose worker", "lose worker in copy", "cut step", "break step")


def any_request(random: Random) -> GenerationRequest:
    """Prompts share beginnings, settings are mixed; `Run.submit` gives it its id."""
    shared = random.choice([0, 0, 5, 18, 22, 30, 40])
    own = [random.randrange(VOCABULARY) for _ in range(random.choice([1, 1, 3, 12]))]
    sampling = SamplingParameters(
        temperature=random.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=random.choice([0, 3, 40]),
        top_p=random.choice([0.8, 1.0]),
        repeat_penalty=random.choice([1.0, 1.4]),
        frequency_penalty=random.choice([0.0, 0.8]),
        repeat_last_n=random.choice([-1, 8]),
        seed=random.choice([None, random.randrange(2**32)]),
        logprobs=random.choice([0, 0, 2]),
    )
    return GenerationRequest(
        bytes(16),
        tokens=(*STEM[:shared], *own),
        max_tokens=random.choice([-1, 0, 1, 2, 5, 12, 30]),
        sampling=sampling if random.random() < 0.7 else SamplingParameters(temperature=0.0),
        stop=tuple(random.sample(["ab", "abc", "b", "é", "c a", "🙂", "\ufffd", "gg"], random.choice([0, 1, 2]))),
        stop_tokens=tuple(random.sample(range(1, VOCABULARY), random.choice([0, 0, 1]))),
        ignore_eos=random.random() < 0.5,
        cache_prompt=random.random() < 0.8,
        score_prompt=random.random() < 0.2,
        logits=random.choice(["none", "none", "none", "generated", "all"]),
        draft_tokens=random.choice([None, None, None, 0, 1, 4]),
    )


class Run:
    """An engine, everything that was asked of it and everything that it said."""

    def __init__(
        self,
        executor: ToyExecutor,
        queue_limit: int = 4,
        snapshot_bytes: int = 0,
        drafting: Drafting | None = None,
    ) -> None:
        self.executor = executor
        self.engine = Engine(
            executor, TOKENIZER, None, queue_limit=queue_limit, snapshot_bytes=snapshot_bytes, drafting=drafting
        )
        self.requests: list[GenerationRequest] = []
        self.events: dict[bytes, list[Event]] = {}
        self.aborted: set[bytes] = set()
        self.on_sink: Callable[[], object] = lambda: None

    def submit(self, request: GenerationRequest) -> GenerationRequest:
        request = replace(request, request_id=len(self.requests).to_bytes(16, "big"))
        self.requests.append(request)
        events = self.events[request.request_id] = []

        def sink(event: Event) -> None:
            events.append(event)
            self.on_sink()

        self.engine.submit(request, sink)
        return request

    def abort(self, which: int) -> None:
        if self.requests:
            request_id = self.requests[which % len(self.requests)].request_id
            if self.engine.abort(request_id):
                self.aborted.add(request_id)

    def hold(self, which: int, held: bool) -> None:
        if self.requests:
            self.engine.hold(self.requests[which % len(self.requests)].request_id, held)

    def finish(self) -> None:
        self.executor.during = self.executor.copying = self.on_sink = lambda: None
        for request in self.requests:
            self.engine.hold(request.request_id, False)
        for _ in range(5000):
            if not self.engine.turn():
                break
        else:
            raise AssertionError("the engine does not come to an end")

    def check(self) -> None:
        for request in self.requests:
            check_events(request, self.events[request.request_id], request.request_id in self.aborted)
        engine = self.engine
        assert engine.wait_idle(0) and engine.status()["queue"] == 0 and engine.metrics()["running"] == 0
        assert all(slot["request"] == "" for slot in engine.status()["slots"])
        snapshots = engine.status()["snapshots"]
        assert 0 <= snapshots["bytes"] <= snapshots["limit_bytes"]
        for slot in engine._pool.slots:
            assert not slot.busy
            state = EMPTY
            for position in range(slot.count):
                state = mix(state, int(slot.tokens[position]))
                assert int(self.executor.states[slot.index, position]) == state, "a slot claims what it does not hold"
        assert sum(engine.metrics()["requests"].values()) == len(self.requests)


def check_events(request: GenerationRequest, events: list[Event], aborted: bool) -> None:
    assert all(event.request_id == request.request_id for event in events)
    kinds = [type(event) for event in events]
    assert kinds and kinds[-1] in (Final, Failed) and not {Final, Failed} & set(kinds[:-1])
    assert Admitted not in kinds[1:]
    last = events[-1]
    if isinstance(last, Failed) and kinds == [Failed]:
        prompt = request.tokens or ()
        assert last.code in ("exceed_context_size", "overloaded", "worker_lost")
        if last.code == "exceed_context_size":
            assert last.details == {"prompt_tokens": len(prompt), "context": CONTEXT}
        return
    assert len(request.tokens or ()) <= CONTEXT
    seed = last.seed if isinstance(last, Final) else request.sampling.seed
    if seed is None:
        return  # a failed request does not tell the seed that was drawn for it
    expected = solo(request, CONTEXT, seed)
    admitted = events[0] if isinstance(events[0], Admitted) else None
    check_output(request, events, expected, admitted.cached_tokens if admitted else 0)
    if not isinstance(last, Final):
        assert isinstance(last, Failed) and last.code in ("worker_lost", "internal")
        assert "worker 1 died" in last.message or "a defect of the executor" in last.message
        return
    tokens = [token for event in events if isinstance(event, Chunk) for token in event.tokens]
    text = "".join(event.text for event in events if isinstance(event, Chunk))
    assert last.draft_accepted <= min(last.draft_tokens, len(tokens))
    assert request.draft_tokens != 0 or not last.draft_tokens
    assert last.generated_tokens == len(tokens) and last.prompt_tokens == len(request.tokens or ())
    assert min(last.queue_seconds, last.prompt_seconds, last.generate_seconds) >= 0
    if last.reason == "aborted":
        assert aborted
        assert text == cut_at_stop(text_of(tokens, True), request.stop)[0], "nothing held back is lost"
        return
    assert admitted is not None and last.cached_tokens == admitted.cached_tokens
    assert (tokens, text, last.reason, last.stop) == (expected.tokens, expected.text, expected.reason, expected.stop)


def check_output(request: GenerationRequest, events: list[Event], expected: Solo, cached: int) -> None:
    """Everything delivered so far is a beginning of what the solo run delivers."""
    chunks = [event for event in events if isinstance(event, Chunk)]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert tokens == expected.tokens[: len(tokens)]
    scores = [score for chunk in chunks for score in chunk.prompt_logprobs]
    rows = [row for chunk in chunks if chunk.logits is not None for row in chunk.logits]
    ended_well = isinstance(events[-1], Final) and events[-1].reason != "aborted"
    prompt_length = len(request.tokens or ())
    if request.score_prompt:
        assert cached == 0
        wanted = expected.prompt_logprobs
        assert scores == pytest.approx(wanted[: len(scores)], abs=1e-5)
        assert not ended_well or len(scores) == prompt_length - 1
    else:
        assert not scores
    if request.logits == "none":
        assert not rows
    else:
        every = request.logits == "all"
        assert not every or cached == 0
        wanted_rows = expected.logits if every else expected.logits[prompt_length - 1 :]
        assert all(np.array_equal(row, wanted) for row, wanted in zip(rows, wanted_rows, strict=False))
        tokens_back = len(expected.tokens) or (1 if every else 0)
        assert not ended_well or len(rows) == (prompt_length - 1 if every else 0) + tokens_back
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs]
    if request.sampling.logprobs:
        assert [entry.token for entry in logprobs] == tokens
        for entry, row in zip(logprobs, expected.logits[prompt_length - 1 :], strict=False):
            wide = row.astype(np.float64)
            assert entry.logprob == pytest.approx(wide[entry.token] - np.log(np.exp(wide).sum()), abs=1e-5)
            assert len(entry.top) == 2 and entry.top[0][0] == int(row.argmax())
    else:
        assert not logprobs
    progress = [event for event in events if isinstance(event, Progress)]
    done = [cached, *(event.processed for event in progress)]
    assert all(earlier < later for earlier, later in pairwise(done))
    assert all(event.total == prompt_length and event.cached == cached for event in progress)
    assert not (tokens or ended_well) or progress[-1].processed == prompt_length
    assert END not in tokens[:-1] or request.ignore_eos


def once(run: Run, place: str, action: Callable[[], object]) -> None:
    """Does something in the middle of the next step or copy, or when the next event is delivered, and never again."""
    owner = run if place == "on_sink" else run.executor

    def hook() -> None:
        setattr(owner, place, lambda: None)
        action()

    setattr(owner, place, hook)


def lose() -> None:
    raise WorkerLost("worker 1 died", "wait")


def break_step() -> None:
    raise ValueError("a defect of the executor")


def act(run: Run, random: Random, name: str) -> None:
    which, executor = random.randrange(100), run.executor
    actions: dict[str, Callable[[], object]] = {
        "submit": lambda: run.submit(any_request(random)),
        "turns": lambda: [run.engine.turn() for _ in range(random.choice([1, 2, 5, 20]))],
        "abort": lambda: run.abort(which),
        "hold": lambda: run.hold(which, random.random() < 0.5),
        "abort in step": lambda: once(run, "during", lambda: run.abort(which)),
        "abort by sink": lambda: once(run, "on_sink", lambda: run.abort(which)),
        "submit in step": lambda: once(run, "during", lambda: run.submit(any_request(random))),
        "lose worker": lambda: once(run, "during", lose),
        "lose worker in copy": lambda: once(run, "copying", lose),
        "cut step": lambda: once(run, "during", executor.abort),
        "break step": lambda: once(run, "during", break_step),
    }
    actions[name]()


def any_drafting(random: Random, executor: ToyExecutor) -> Drafting | None:
    """Of every kind and quality; some fail now and then, some with a defect."""
    if random.random() < 0.3:
        return None
    draft = ToyDraft(random.choice([0.0, 0.5, 0.9, 1.0]), costly=random.random() < 0.3, seed=random.randrange(2**32))
    failure = random.choice([lambda: None, lambda: None, lose, break_step])
    draft.during = lambda: failure() if random.random() < 0.1 else None
    limits = DraftLimits(random.choice([1, 2, 7, 15]), random.choice([0, 0, 2]), random.random() < 0.6)
    return Drafting(draft, limits, min(executor.max_rows, executor.max_out_rows))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 4), st.sampled_from([4, 7, 16, 100]))
def test_any_schedule(seed: int, length: int, slots: int, max_rows: int) -> None:
    random = Random(seed)
    executor = ToyExecutor(
        slots=slots, context=CONTEXT, max_rows=max_rows, max_out_rows=random.randint(slots, max_rows), seed=seed
    )
    row_seconds = random.choice([0.0001, 0.01, 0.1])
    executor.seconds = lambda rows: 0.001 + row_seconds * rows
    run = Run(executor, snapshot_bytes=random.choice([0, 1000, 1 << 20]), drafting=any_drafting(random, executor))
    fault_weight = random.choice([0, 1])
    names = random.choices([*ACTIONS, *FAULTS], [8, 8, 1, 1, 1, 1, 1] + 4 * [fault_weight], k=length)
    for name in names:
        act(run, random, name)
    run.finish()
    run.check()
