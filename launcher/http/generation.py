"""Running generations: events of the daemon turned into what every shape of answer is made of.

Owns counting, timing, log-probabilities of tokens and the merging of several generations. It does not know any shape.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bloomery.launcher.http.backend import Backend
from bloomery.launcher.http.parameters import Job, generation_request
from bloomery.launcher.http.settings import ServerSettings
from bloomery.runtime.async_client import AsyncGeneration
from bloomery.runtime.completion import failure_error
from bloomery.runtime.errors import RequestError
from bloomery.runtime.requests import Admitted, Chunk, Failed, Final, GenerationRequest, Progress, TokenLogprob

LEAST_LOGPROB = -3.4028234663852886e38
"""What stands for a probability of zero: JSON has no infinity."""


@dataclass
class Answer:
    """One generation as far as it has got. `text`, `tokens` and `probabilities` hold everything so far; `text` ends
    before a stop string. `prompt` is the prompt's text, with control tokens written out, if asked for."""

    job: Job
    request_id: bytes = b""
    prompt: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    probabilities: list[dict[str, Any]] = field(default_factory=list)
    slot: int = -1
    cached: int = 0
    processed: int = 0
    prompt_seconds: float = 0.0
    generate_seconds: float = 0.0
    first_token_at: float = 0.0
    started_at: float = field(default_factory=time.monotonic)
    final: Final | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.job.tokens)

    @property
    def generated(self) -> int:
        return self.final.generated_tokens if self.final else len(self.tokens)

    @property
    def reasoning_tokens(self) -> int:
        return self.final.reasoning_tokens if self.final else 0

    @property
    def stop_type(self) -> str:
        if self.final is None or self.final.reason == "aborted":
            return "limit" if self.final else "none"
        if self.final.reason != "stop":
            return "limit"
        return "word" if self.final.stop else "eos"

    @property
    def stopped(self) -> bool:
        """Whether the model itself came to an end."""
        return self.stop_type in ("word", "eos")

    @property
    def truncated(self) -> bool:
        """Whether the context, not the request, set the end."""
        limit = self.job.values["n_predict"]
        if self.final is None:
            return False
        cut = self.stop_type == "limit" and (limit < 0 or self.generated < limit)
        return cut or self.final.shifted_tokens > 0

    def timings(self) -> dict[str, Any]:
        """llama-server's timings; the rate leaves out the first token, which the prompt's last step gives. Drafts are
        counted at the end."""
        prompt_n = max(0, self.processed - self.cached)
        prompt_ms, predicted_ms = 1e3 * self.prompt_seconds, 1e3 * self.generate_seconds
        steps = max(0, self.generated - 1)
        drafts: dict[str, Any] = {}
        if self.final and self.final.draft_tokens:
            drafts = {"draft_n": self.final.draft_tokens, "draft_n_accepted": self.final.draft_accepted}
        return {
            "cache_n": self.cached,
            "prompt_n": prompt_n,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
            "prompt_per_second": 1e3 * prompt_n / prompt_ms if prompt_ms else 0.0,
            "predicted_n": self.generated,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
            "predicted_per_second": 1e3 / predicted_ms * steps if steps and predicted_ms else 0.0,
            **drafts,
        }

    def progress(self) -> dict[str, Any]:
        return {
            "total": self.prompt_tokens,
            "cache": self.cached,
            "processed": self.processed,
            "time_ms": 1e3 * self.prompt_seconds,
        }


@dataclass(frozen=True)
class Begun:
    """The request has its slot."""

    answer: Answer


@dataclass(frozen=True)
class Processed:
    """More of the prompt is done; the first comes before any work, with `processed` equal to `cached`."""

    answer: Answer


@dataclass(frozen=True)
class Grown:
    """New text (not empty), the tokens that it came from and their probabilities, if asked for."""

    answer: Answer
    text: str
    tokens: tuple[int, ...]
    probabilities: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Ended:
    answer: Answer


Step = Begun | Processed | Grown | Ended


async def run_job(backend: Backend, request: GenerationRequest, answer: Answer) -> AsyncIterator[Step]:
    """The steps of one generation. Raises RequestError if it fails. Leaving it early aborts the request."""
    waiting: list[int] = []
    probabilities: list[dict[str, Any]] = []
    deadline = answer.job.values["t_max_predict_ms"] / 1e3
    async with backend.generate(request) as events, _noted(backend, events):
        async for event in events:
            match event:
                case Admitted(slot=slot, cached_tokens=cached):
                    answer.slot, answer.cached, answer.processed = slot, cached, cached
                    answer.started_at = time.monotonic()
                    yield Begun(answer)
                    yield Processed(answer)
                case Progress(processed=processed, seconds=seconds):
                    answer.processed, answer.prompt_seconds = processed, seconds
                    yield Processed(answer)
                case Chunk(tokens=tokens, text=text, logprobs=logprobs):
                    _note_time(answer, bool(tokens))
                    if logprobs:
                        found = await token_probabilities(backend, answer, logprobs)
                        answer.probabilities += found
                        probabilities += found
                    answer.tokens += tokens
                    answer.text += text
                    waiting += tokens
                    if text:
                        yield Grown(answer, text, tuple(waiting), tuple(probabilities))
                        waiting, probabilities = [], []
                    if 0 < deadline < answer.generate_seconds and "\n" in answer.text:
                        events.abort()
                case Failed():
                    raise failure_error(event)
                case Final():
                    answer.final = event
                    answer.prompt_seconds = event.prompt_seconds
                    answer.generate_seconds = event.generate_seconds
                    yield Ended(answer)


@asynccontextmanager
async def _noted(backend: Backend, events: AsyncGeneration) -> AsyncIterator[None]:
    try:
        yield
    finally:
        backend.ended(events)


def _note_time(answer: Answer, has_tokens: bool) -> None:
    now = time.monotonic()
    if has_tokens and not answer.first_token_at:
        answer.first_token_at = now
    if answer.first_token_at:
        answer.generate_seconds = now - answer.first_token_at


async def run_jobs(
    backend: Backend, settings: ServerSettings, jobs: Sequence[Job], *, show_prompt: bool
) -> AsyncIterator[Step]:
    """The steps of all jobs as they come. Each job's prompt is checked before any begins. Raises RequestError."""
    context = backend.facts.context
    requests = [generation_request(job, settings, context) for job in jobs]
    answers = [Answer(job, request.request_id) for job, request in zip(jobs, requests, strict=True)]
    if show_prompt:
        for answer in answers:
            answer.prompt = await backend.shown(answer.job.tokens)
    if len(jobs) == 1:
        async with aclosing(run_job(backend, requests[0], answers[0])) as steps:  # type: ignore[type-var]
            async for step in steps:
                yield step
        return
    queue: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()
    turn = asyncio.Semaphore(backend.facts.slots)  # a list of prompts fills the slots, not the queue that all share

    async def pump(request: GenerationRequest, answer: Answer) -> None:
        try:
            async with turn, aclosing(run_job(backend, request, answer)) as steps:  # type: ignore[type-var]
                async for step in steps:
                    queue.put_nowait(step)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(request, answer)) for request, answer in zip(requests, answers, strict=True)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def token_probabilities(
    backend: Backend, answer: Answer, logprobs: Sequence[TokenLogprob]
) -> list[dict[str, Any]]:
    """llama-server's entries, one for each token: id, text, bytes, logprob and the most probable alternatives."""
    chosen = await backend.pieces((entry.token for entry in logprobs), special=False)
    pieces = await backend.pieces(token for entry in logprobs for token, _ in entry.top)
    post = answer.job.values["post_sampling_probs"]
    name, names = ("prob", "top_probs") if post else ("logprob", "top_logprobs")

    def entry(token: int, value: float, piece: bytes) -> dict[str, Any]:
        text = piece.decode("utf-8", "ignore")
        shown = math.exp(value) if post else max(value, LEAST_LOGPROB)
        return {"id": token, "token": text, "bytes": list(piece), name: shown}

    ends = backend.facts.end_tokens  # they add nothing to the text
    return [
        {
            **entry(given.token, given.logprob, b"" if given.token in ends else chosen[given.token]),
            names: [entry(token, value, pieces[token]) for token, value in given.top],
        }
        for given in logprobs
    ]


async def whole_answers(steps: AsyncIterator[Step], jobs: int) -> list[Answer]:
    """Runs all of `jobs` jobs to their ends; the answers in the order of the jobs. Raises RequestError."""
    answers: dict[int, Answer] = {}
    async with aclosing(steps) as running:  # type: ignore[type-var]
        async for step in running:
            if isinstance(step, Ended):
                answers[step.answer.job.index] = step.answer
    if len(answers) != jobs:
        raise RequestError("internal", "a generation ended without a final event")
    return [answers[index] for index in range(jobs)]
