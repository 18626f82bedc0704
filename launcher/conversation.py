"""One conversation with a model: the messages so far, and one streamed answer at a time.

Knows requests and events, and how Ctrl-C ends an answer. Does not know where lines come from nor what commands look
like (`launcher/chat.py`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from bloomery.launcher.progress import ProgressDisplay
from bloomery.runtime.client import Client, Generation
from bloomery.runtime.completion import CompletionBuilder, new_request_id
from bloomery.runtime.requests import Chunk, Final, GenerationRequest, Progress, SamplingParameters


@dataclass(frozen=True)
class AnswerSettings:
    """What stays the same for every answer. max_tokens -1: until the model ends it or the context is full.

    `plain` is for models that know no roles: there is no chat template, and the model continues the text of all turns.
    """

    sampling: SamplingParameters
    max_tokens: int = -1
    stop: tuple[str, ...] = ()
    plain: bool = False


@dataclass
class Conversation:
    """`program` is who reports the progress of a long prompt."""

    client: Client
    settings: AnswerSettings
    program: str
    system: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)

    def reset(self) -> None:
        """Forgets what was said; the system message stays."""
        self.turns.clear()

    def ask(self, text: str, write: Callable[[str], object]) -> Final:
        """Sends the person's `text`; `write` gets the answer as it grows. A question that fails is not remembered."""
        self.turns.append({"role": "user", "content": text})
        try:
            return self._answer(write)
        except BaseException:
            self.turns.pop()
            raise

    def again(self, write: Callable[[str], object]) -> Final | None:
        """Another answer to the last question, with a fresh seed; None where nothing was asked yet."""
        if not self.turns:
            return None
        last = self.turns.pop()
        try:
            return self._answer(write, replace(self.settings.sampling, seed=None))
        except BaseException:
            self.turns.append(last)
            raise

    def _answer(self, write: Callable[[str], object], sampling: SamplingParameters | None = None) -> Final:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = (*system, *self.turns)
        request = GenerationRequest(
            request_id=new_request_id(),
            text=plain_text(messages) if self.settings.plain else None,
            messages=None if self.settings.plain else messages,
            max_tokens=self.settings.max_tokens,
            sampling=sampling or self.settings.sampling,
            stop=self.settings.stop,
        )
        builder = CompletionBuilder()
        with (
            self.client.generate(request) as events,
            interrupt_aborts(events),
            ProgressDisplay(self.program) as display,
        ):
            for event in events:
                builder.add(event)
                if isinstance(event, Chunk) and event.text:
                    write(event.text)
                elif isinstance(event, Progress):
                    display("prompt tokens", event.processed, event.total)
        answer = builder.result()
        self.turns.append({"role": "assistant", "content": answer.text})
        return answer.final


def plain_text(messages: Sequence[dict[str, Any]]) -> str:
    """The turns as one text: an answer follows its question directly, an empty line follows an answer."""
    text = ""
    for message in messages:
        text += str(message["content"]) + ("" if message["role"] == "user" else "\n\n")
    return text


@contextmanager
def interrupt_aborts(events: Generation) -> Iterator[None]:
    """Ctrl-C ends the request behind `events` and not the program; pressed again, it ends the program. One that was
    started to ignore Ctrl-C (in the background of a script) does so here, too."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)
        # In a thread of its own: the interrupted code may hold the connection's lock.
        threading.Thread(target=events.abort, daemon=True).start()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
