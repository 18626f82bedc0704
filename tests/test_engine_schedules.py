"""Random schedules of requests, aborts, holds and failures on a model whose output gives every mistake away.

Whatever happens around it, a request that ends by itself has the tokens, text and numbers of its solo run, one that is
ended has a beginning of them, each gets exactly one last event, and nothing is left behind.

Planted once and seen to fail: a slot's count raised before the step has ended; a position off by one after a copy; the
out rows of two sequences swapped; an aborted request's slot kept; tokens of a failed step kept; a cached prefix used
for a scored prompt; the seed shared by two requests; a second Final for an abort in the same turn as the last token;
text held back at an abort lost; queued requests failed together with the running ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_model import EMPTY, END, TOKENIZER, VOCABULARY, Solo, ToyExecutor, mix, solo

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

PROMPTS = st.builds(
    lambda shared, own: (*STEM[:shared], *own)[: CONTEXT + 5],
    st.integers(0, CONTEXT),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
)
SAMPLINGS = st.one_of(
    st.just(SamplingParameters(temperature=0.0)),
    st.builds(
        SamplingParameters,
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 3, 40]),
        top_p=st.sampled_from([0.8, 1.0]),
        repeat_penalty=st.sampled_from([1.0, 1.4]),
        frequency_penalty=st.sampled_from([0.0, 0.8]),
        repeat_last_n=st.sampled_from([-1, 8]),
        seed=st.integers(0, 2**32 - 1),
        logprobs=st.sampled_from([0, 0, 2]),
    ),
)
REQUESTS = st.builds(
    GenerationRequest,
    request_id=st.just(bytes(16)),
    tokens=PROMPTS,
    max_tokens=st.sampled_from([-1, 0, 1, 2, 5, 12, 30]),
    sampling=SAMPLINGS,
    stop=st.lists(st.sampled_from(["ab", "abc", "b", "é", "c a", "🙂", "�", "gg"]), max_size=2).map(tuple),
    stop_tokens=st.lists(st.integers(1, VOCABULARY - 1), max_size=1).map(tuple),
    ignore_eos=st.booleans(),
    cache_prompt=st.sampled_from([True, True, True, False]),
    score_prompt=st.sampled_from([False, False, False, True]),
    logits=st.sampled_from(["none", "none", "generated", "all"]),
)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), REQUESTS),
    st.tuples(st.just("turn"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["abort", "hold", "abort in step", "abort by sink"]), st.integers(0, 30)),
    st.tuples(st.just("submit in step"), REQUESTS),
    st.tuples(st.sampled_from(["lose worker", "lose worker in copy", "cut step", "break step"]), st.none()),
)


class Run:
    """An engine, everything that was asked of it and everything that it said."""

    def __init__(self, executor: ToyExecutor, queue_limit: int = 4) -> None:
        self.executor = executor
        self.engine = Engine(executor, TOKENIZER, None, queue_limit=queue_limit)
        self.requests: list[GenerationRequest] = []
        self.events: dict[bytes, list[Event]] = {}
        self.aborted: set[bytes] = set()
        self.on_sink: Callable[[Event], None] = lambda event: None

    def submit(self, request: GenerationRequest) -> GenerationRequest:
        request = replace(request, request_id=len(self.requests).to_bytes(16, "big"))
        self.requests.append(request)
        events = self.events[request.request_id] = []

        def sink(event: Event) -> None:
            events.append(event)
            self.on_sink(event)

        self.engine.submit(request, sink)
        return request

    def abort(self, which: int) -> None:
        if self.requests:
            request_id = self.requests[which % len(self.requests)].request_id
            if self.engine.abort(request_id):
                self.aborted.add(request_id)

    def finish(self) -> None:
        self.executor.during = self.executor.copying = lambda: None
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
        if len(prompt) > CONTEXT:
            assert last.code == "exceed_context_size"
            assert last.details == {"prompt_tokens": len(prompt), "context": CONTEXT}
        else:
            assert last.code in ("overloaded", "worker_lost", "internal")
        return
    seed = last.seed if isinstance(last, Final) else (request.sampling.seed or 0)
    expected = solo(request, CONTEXT, seed)
    admitted = events[0] if isinstance(events[0], Admitted) else None
    check_output(request, events, expected, admitted.cached_tokens if admitted else 0)
    if isinstance(last, Failed):
        assert last.code in ("worker_lost", "internal")
        return
    tokens = [token for event in events if isinstance(event, Chunk) for token in event.tokens]
    text = "".join(event.text for event in events if isinstance(event, Chunk))
    assert last.generated_tokens == len(tokens) and last.prompt_tokens == len(request.tokens or ())
    assert min(last.queue_seconds, last.prompt_seconds, last.generate_seconds) >= 0
    if last.reason == "aborted":
        assert aborted
        assert expected.text.startswith(text.rstrip("\ufffd"))
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


def once(run: Run, attribute: str, action: Callable[[], None]) -> None:
    """Does something in the middle of the next step (or copy) and never again."""

    def hook() -> None:
        setattr(run.executor, attribute, lambda: None)
        action()

    setattr(run.executor, attribute, hook)


def lose() -> None:
    raise WorkerLost("worker 1 died", "wait")


def break_step() -> None:
    raise ValueError("a defect of the executor")


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(ACTIONS, max_size=25),
    st.integers(1, 4),
    st.sampled_from([4, 7, 16, 100]),
    st.integers(4, 12),
    st.floats(0.0001, 0.1),
)
def test_any_schedule(
    actions: list[tuple[str, object]], slots: int, max_rows: int, max_out_rows: int, row_seconds: float
) -> None:
    executor = ToyExecutor(slots=slots, context=CONTEXT, max_rows=max_rows, max_out_rows=min(max_out_rows, max_rows))
    executor.seconds = lambda rows: 0.001 + row_seconds * rows
    run = Run(executor)
    for name, value in actions:
        if name == "submit":
            assert isinstance(value, GenerationRequest)
            run.submit(value)
        elif name == "submit in step":
            assert isinstance(value, GenerationRequest)
            once(run, "during", lambda request=value: run.submit(request) and None)  # type: ignore[misc]
        elif name == "turn":
            assert isinstance(value, int)
            for _ in range(value):
                run.engine.turn()
        elif name == "hold":
            assert isinstance(value, int)
            if run.requests:
                run.engine.hold(run.requests[value % len(run.requests)].request_id, value % 2 == 0)
        elif name == "abort":
            assert isinstance(value, int)
            run.abort(value)
        elif name == "abort in step":
            once(run, "during", lambda which=value: run.abort(which))  # type: ignore[misc]
        elif name == "abort by sink":
            run.on_sink = aborting_sink(run, value)
        elif name == "lose worker":
            once(run, "during", lose)
        elif name == "lose worker in copy":
            once(run, "copying", lose)
        elif name == "cut step":
            once(run, "during", executor.abort)
        elif name == "break step":
            once(run, "during", break_step)
    run.finish()
    run.check()


def aborting_sink(run: Run, which: object) -> Callable[[Event], None]:
    def on_sink(event: Event) -> None:
        run.on_sink = lambda event: None
        assert isinstance(which, int)
        run.abort(which)

    return on_sink
