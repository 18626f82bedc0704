"""A whole answer, gathered from the events of one request.

Owns the gathering and the turning of a failure into an exception. It does not know where events come from.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import RequestError
from bloomery.runtime.messages import failure
from bloomery.runtime.protocol import ID_BYTES
from bloomery.runtime.requests import Admitted, Chunk, Event, Failed, Final, TokenLogprob


def new_request_id() -> bytes:
    """16 random bytes, never all zero in practice."""
    return secrets.token_bytes(ID_BYTES)


def failure_error(failed: Failed) -> RequestError:
    """The exception that says what a Failed event says."""
    return failure(failed.code, failed.message, failed.hint, failed.details)


@dataclass(frozen=True)
class Completion:
    """Everything that one request produced. `logits` is float32, rows x V, or None if none were asked for."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[float, ...]
    logits: NDArray[np.float32] | None
    final: Final


@dataclass
class CompletionBuilder:
    """Feed it every event of a request; `result` after the last one."""

    admitted: Admitted | None = None
    final: Final | None = None
    _chunks: list[Chunk] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Raises RequestError for Failed."""
        match event:
            case Failed():
                raise failure_error(event)
            case Admitted():
                self.admitted = event
            case Chunk():
                self._chunks.append(event)
            case Final():
                self.final = event

    def result(self) -> Completion:
        """Raises RequestError("internal") if the events ended without Final or Failed, which is the daemon's defect."""
        if self.final is None:
            raise RequestError("internal", "the request's events ended without a final one")
        logits = [chunk.logits for chunk in self._chunks if chunk.logits is not None]
        return Completion(
            text="".join(chunk.text for chunk in self._chunks),
            tokens=tuple(token for chunk in self._chunks for token in chunk.tokens),
            logprobs=tuple(entry for chunk in self._chunks for entry in chunk.logprobs),
            prompt_logprobs=tuple(value for chunk in self._chunks for value in chunk.prompt_logprobs),
            logits=np.concatenate(logits) if logits else None,
            final=self.final,
        )


def gather(events: Iterable[Event]) -> Completion:
    """The whole answer of a request. Raises RequestError if it failed."""
    builder = CompletionBuilder()
    for event in events:
        builder.add(event)
    return builder.result()
