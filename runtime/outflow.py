"""The way of one request's events to its client: credit, chunks held back without it, and the end that comes last.

Owns merging, cutting and the decision when a client has stalled. It does not know sockets or the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.facts import Limits
from bloomery.runtime.messages import chunk_cost, event_message
from bloomery.runtime.protocol import Message
from bloomery.runtime.requests import Chunk, TokenLogprob
from bloomery.runtime.router import Sent

LOGPROB_BYTES = 64
TOKEN_BYTES = 16


class Outflow:
    """`send` hands a message to the transport and says what became of it; `clock` is in seconds."""

    def __init__(
        self,
        request_id: bytes,
        credit: int,
        limits: Limits,
        send: Callable[[Message], Sent],
        clock: Callable[[], float],
    ) -> None:
        self._request_id, self._credit, self._limits = request_id, credit, limits
        self._send, self._clock = send, clock
        self._held: deque[_HeldChunks] = deque()
        self._held_bytes = 0
        self._next: Message | None = None
        self._end: Message | None = None
        self._stalled_since: float | None = None
        self.done = False

    @property
    def blocked(self) -> bool:
        """Whether something waits for credit or for room in the client's pipe."""
        return self._stalled_since is not None

    @property
    def overfull(self) -> bool:
        """Whether the client lags so far behind that the engine should not decode on for it."""
        return self.blocked and self._held_bytes > self._limits.buffer_bytes

    def add(self, chunk: Chunk) -> None:
        """Takes a chunk; it leaves with the next `flush`, or later, merged with its successors. Chunks with logprobs
        stay apart, so that text and probabilities of each token come together."""
        if not self._held or chunk.logprobs or self._held[-1].alone:
            self._held.append(_HeldChunks(self._request_id, alone=bool(chunk.logprobs)))
        self._held_bytes += self._held[-1].add(chunk)

    def finish(self, end: Message) -> None:
        """The FINAL or ERROR that follows the last chunk."""
        self._end = end

    def grant(self, chunks: int) -> None:
        self._credit += chunks

    def notice(self, message: Message) -> Sent:
        """Sends ADMITTED or PROGRESS, which cost no credit; dropped when the client's pipe is full."""
        return self._send(message)

    def flush(self) -> Sent:
        """Sends what credit and pipe allow. YES: nothing waits; FULL: something does; GONE: give up. `done` turns true
        with the end message."""
        while self._next or self._held:
            if self._credit <= 0:
                return self._blocked()
            if self._next is None:
                held = self._held[0]
                self._held_bytes -= held.nbytes
                self._next = event_message(held.take(self._limits.chunk_bytes), self._request_id)
                self._held_bytes += held.nbytes
                if not held.nbytes:
                    self._held.popleft()
            sent = self._send(self._next)
            if sent is not Sent.YES:
                return sent if sent is Sent.GONE else self._blocked()
            self._credit -= chunk_cost(self._next)
            self._next = self._stalled_since = None
        if self._end:
            sent = self._send(self._end)
            if sent is Sent.FULL:
                return self._blocked()
            self.done = True
            return sent
        self._stalled_since = None
        return Sent.YES

    def _blocked(self) -> Sent:
        if self._stalled_since is None:
            self._stalled_since = self._clock()
        return Sent.FULL

    def stalled(self) -> str:
        """Why the client counts as stalled, or "" if it does not."""
        if self._stalled_since is None:
            return ""
        waited = self._clock() - self._stalled_since
        if waited > self._limits.stall_timeout_s:
            return f"no credit for {waited:.1f} s, limit {self._limits.stall_timeout_s:g} s"
        return ""


class _HeldChunks:
    """Chunks that wait, as the one chunk that they merge into."""

    def __init__(self, request_id: bytes, alone: bool) -> None:
        self.nbytes = 0
        self.alone = alone
        self._request_id = request_id
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[float] = []
        self._logits: list[NDArray[np.float32]] = []

    def add(self, chunk: Chunk) -> int:
        """The bytes by which it has grown."""
        before = self.nbytes
        self._tokens += chunk.tokens
        self._text.append(chunk.text)
        self._logprobs += chunk.logprobs
        self._prompt_logprobs += chunk.prompt_logprobs
        self.nbytes += 1 + TOKEN_BYTES * (len(chunk.tokens) + len(chunk.prompt_logprobs)) + 4 * len(chunk.text)
        self.nbytes += LOGPROB_BYTES * sum(1 + len(entry.top) for entry in chunk.logprobs)
        if chunk.logits is not None:
            self._logits.append(chunk.logits)
            self.nbytes += chunk.logits.nbytes
        return self.nbytes - before

    def take(self, chunk_bytes: int) -> Chunk:
        """Everything but logits, and as many rows of logits (at least one) as fit into `chunk_bytes`."""
        logits = self._take_logits(chunk_bytes)
        chunk = Chunk(
            self._request_id,
            tuple(self._tokens),
            "".join(self._text),
            tuple(self._logprobs),
            tuple(self._prompt_logprobs),
            logits,
        )
        for held in (self._tokens, self._text, self._logprobs, self._prompt_logprobs):
            held.clear()
        self.nbytes = sum(rows.nbytes for rows in self._logits)
        return chunk

    def _take_logits(self, chunk_bytes: int) -> NDArray[np.float32] | None:
        if not self._logits:
            return None
        room = max(1, chunk_bytes // max(1, self._logits[0][:1].nbytes))
        taken: list[NDArray[np.float32]] = []
        while self._logits and room > 0:
            rows = self._logits[0]
            taken.append(rows[:room])
            if len(rows) > room:
                self._logits[0] = rows[room:]
            else:
                self._logits.pop(0)
            room -= len(taken[-1])
        return taken[0] if len(taken) == 1 else np.concatenate(taken)
