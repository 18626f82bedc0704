"""One running server: settings, the daemon behind it, and what it remembers of its requests.

Owns names, the record of each slot's last request, and the log of requests. Routes are `app.py`'s.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.requests import Request

from bloomery.launcher.chat_output import OutputFormat
from bloomery.launcher.http.backend import Backend
from bloomery.launcher.http.generation import Answer, Begun, Ended, Step
from bloomery.launcher.http.metrics import Rates
from bloomery.launcher.http.parameters import Job
from bloomery.launcher.http.settings import ServerSettings
from bloomery.runtime.errors import RequestError

COUNTERS = (
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "prompt_seconds",
    "generate_seconds",
    "steps",
    "aborted_steps",
    "recoveries",
    "sequences",
    "draft_tokens",
    "draft_accepted",
    "draft_steps",
)


@dataclass
class SlotRecord:
    """The last request of a slot. `task` counts the server's requests."""

    task: int
    answer: Answer
    running: bool = True


class Server:
    def __init__(self, settings: ServerSettings, backend: Backend) -> None:
        self.settings, self.backend = settings, backend
        self.fingerprint = f"bloomery-{version('bloomery')}"
        self.started = time.time()
        self.records: dict[int, SlotRecord] = {}
        self.live: dict[str, dict[int, Answer]] = {}
        self.longest = 0
        self.rates = Rates()
        self.prompt_block = 512
        self._tasks = itertools.count()
        self._asleep: dict[str, Any] = {}  # the daemon's counters when it fell asleep
        self._gone: dict[str, float] = {}  # sums of the counters of daemons that have slept since
        self._single: dict[str, int | None] = {}  # texts that are one token
        self._end_texts: tuple[str, str] | None = None
        self._active, self._last_active = 0, time.monotonic()

    @property
    def model_name(self) -> str:
        if self.settings.aliases:
            return self.settings.aliases[0]
        facts = self.backend.facts
        return Path(facts.path).name or facts.alias

    @property
    def idle_seconds(self) -> float:
        """Since the last request that needs the model; 0 while there is one."""
        return 0.0 if self._active else time.monotonic() - self._last_active

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around whatever needs the model."""
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self._last_active = time.monotonic()

    async def fall_asleep(self) -> None:
        """Ends an idle private daemon, after what is shown while it sleeps has been read."""
        await self.end_texts()
        self._asleep = await self.backend.control("metrics")
        await self.backend.sleep()

    async def metrics(self) -> dict[str, Any]:
        """The daemon's counters, those of daemons that slept meanwhile included; asked for without waking one."""
        asleep = self.backend.state == "sleeping"
        values = self._asleep if asleep else await self.backend.control("metrics")
        if self._asleep and not asleep:
            for name in COUNTERS:
                self._gone[name] = self._gone.get(name, 0.0) + self._asleep.get(name, 0)
            self._asleep = {}
        return values | {name: values.get(name, 0) + gone for name, gone in self._gone.items()}

    async def end_texts(self) -> tuple[str, str]:
        """How BOS and EOS are written; asked for once, so that a sleeping daemon need not be woken."""
        if self._end_texts is None:
            tokens = (self.backend.facts.bos, self.backend.facts.eos)
            pieces = await self.backend.pieces(token for token in tokens if token is not None)
            bos, eos = ("" if t is None else pieces[t].decode("utf-8", "replace") for t in tokens)
            self._end_texts = bos, eos
        return self._end_texts

    async def prompt_tokens(self, prompt: str) -> list[int]:
        """Token ids of a rendered conversation: no second BOS where the template has written one."""
        facts = self.backend.facts
        if facts.add_bos and facts.bos is not None:
            shown = (await self.backend.pieces([facts.bos]))[facts.bos].decode("utf-8", "replace")
            prompt = prompt.removeprefix(shown)
        return await self.backend.tokenize(prompt)

    async def shown_tokens(self, format: OutputFormat) -> tuple[int, ...]:
        """Control tokens whose spelling a reader of answers has to see."""
        for text in format.shown():
            if text not in self._single:
                tokens = await self.backend.tokenize(text, add_special=False)
                self._single[text] = tokens[0] if len(tokens) == 1 else None
        return tuple(token for text in format.shown() if (token := self._single[text]) is not None)

    async def watched(
        self, request: Request, jobs: list[Job], steps: AsyncIterator[Step], name: str = ""
    ) -> AsyncIterator[Step]:
        """The same steps, recorded; while they come `live` has the answers under a name that is not empty."""
        task = next(self._tasks)
        begun, code = time.monotonic(), ""
        answers: dict[int, Answer] = {}
        if name:
            self.live[name] = answers
        try:
            async with aclosing(steps) as inner:  # type: ignore[type-var]
                async for step in inner:
                    answer = step.answer
                    if isinstance(step, Begun):
                        answers[answer.job.index] = answer
                        self.records[answer.slot] = SlotRecord(task, answer)
                    elif isinstance(step, Ended):
                        self._end(answer)
                    yield step
        except RequestError as error:
            code = error.code
            raise
        finally:
            self.live.pop(name, None)
            for answer in answers.values():
                self._end(answer)
            if self.settings.json_log:
                self._log(request, task, jobs, answers, begun, code)

    def _end(self, answer: Answer) -> None:
        record = self.records.get(answer.slot)
        if record is not None and record.answer is answer:
            record.running = False
        self.longest = max(self.longest, answer.prompt_tokens + answer.generated)

    def _log(
        self, request: Request, task: int, jobs: list[Job], answers: dict[int, Answer], begun: float, code: str
    ) -> None:
        """One JSON line on standard error."""
        done = list(answers.values())
        first = min((answer.first_token_at for answer in done if answer.first_token_at), default=None)
        timings = [answer.timings() for answer in done]
        entry: dict[str, Any] = {
            "time": round(time.time(), 3),
            "task": task,
            "path": request.url.path,
            "client": request.client.host if request.client else "",
            "choices": len(jobs),
            "prompt_tokens": sum(answer.prompt_tokens for answer in done),
            "cached_tokens": sum(answer.cached for answer in done),
            "generated_tokens": sum(answer.generated for answer in done),
            "draft_tokens": sum(answer.final.draft_tokens for answer in done if answer.final),
            "draft_accepted": sum(answer.final.draft_accepted for answer in done if answer.final),
            "seconds": round(time.monotonic() - begun, 4),
            "first_token_seconds": None if first is None else round(first - begun, 4),
            "prompt_tokens_per_second": round(sum(t["prompt_per_second"] for t in timings), 2),
            "generated_tokens_per_second": round(sum(t["predicted_per_second"] for t in timings), 2),
            "finish": [answer.final.reason if answer.final else "cancelled" for answer in done],
            "error": code or None,
        }
        print(json.dumps(entry), file=sys.stderr, flush=True)
