"""A language model small enough to be right by inspection, behind the StepExecutor interface.

Its cache row at (slot, position) is a hash of the cache row before it and the token, and the logits after a token are a
function of that hash: of everything that the slot's rows really say precedes it. Whoever feeds a wrong token, position
or slot, trusts a stale row or copies too little gets other logits from there on. A step that does not end scrambles its
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import StepAborted, WorkerLost
from bloomery.runtime.executor import StateSnapshot, StepResult, StepRows
from bloomery.runtime.requests import FinishReason, GenerationRequest
from bloomery.runtime.sampling import Sampler
from bloomery.runtime.tokenizer import Detokenizer, Tokenizer

MASK = (1 << 64) - 1
EMPTY = 0x9E3779B97F4A7C15
END = 0

# Pieces of a vocabulary with characters of one to four bytes, some of them cut in two.
PIECES: tuple[bytes, ...] = (
    b"</s>",
    *(bytes([letter]) for letter in b"abcdefgh \n"),
    b"ab",
    b"abc",
    b"cab",
    b"bca",
    "é".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
    "€".encode()[:2],
    "€".encode()[2:],
    "🙂".encode(),
    "🙂".encode()[:1],
    "🙂".encode()[1:3],
    "🙂".encode()[3:],
    b"",
)
VOCABULARY = len(PIECES)


class ToyTokenizer:
    """The part of a tokenizer that the engine uses: one token a byte string, text split into letters."""

    vocabulary = VOCABULARY
    add_space_prefix = False
    bos: int | None = None
    eos: int | None = END
    end_tokens = frozenset({END})

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [PIECES.index(character.encode()) for character in text]

    def piece(self, token: int, *, special: bool = True) -> bytes:
        return b"" if token == END and not special else PIECES[token]


TOKENIZER = cast(Tokenizer, ToyTokenizer())


def mix(before: int, token: int) -> int:
    value = (before ^ (token + 1) * 0xBF58476D1CE4E5B9) & MASK
    value = (value ^ value >> 29) * 0x94D049BB133111EB & MASK
    return value ^ value >> 32


@lru_cache(maxsize=1 << 16)
def logits_of(state: int) -> NDArray[np.float32]:
    """Logits (float32, V) after the tokens that `state` is the hash of; the end token is rare."""
    logits = np.random.Generator(np.random.PCG64(state)).normal(size=VOCABULARY).astype(np.float32) * 3
    logits[END] -= 4
    logits.setflags(write=False)
    return logits


def logits_after(tokens: list[int]) -> NDArray[np.float32]:
    state = EMPTY
    for token in tokens:
        state = mix(state, token)
    return logits_of(state)


@dataclass(frozen=True)
class Solo:
    """What a request gives when it is alone in the world."""

    tokens: list[int]
    text: str
    reason: FinishReason
    stop: str
    logits: list[NDArray[np.float32]]  # after every evaluated token
    prompt_logprobs: list[float]


def solo(request: GenerationRequest, context: int, seed: int) -> Solo:
    """One token after the other, everything looked up anew: text, stop strings, limits, the whole history."""
    assert request.tokens is not None
    prompt, ends = list(request.tokens), set(request.stop_tokens)
    sampler = Sampler(replace(request.sampling, seed=seed), frozenset({END}) if request.ignore_eos else frozenset())
    ends |= set() if request.ignore_eos else {END}
    logits = [logits_after(prompt[: length + 1]) for length in range(len(prompt))]
    wide = [row.astype(np.float64) for row in logits]
    scores = [float(row[token] - np.log(np.exp(row).sum())) for row, token in zip(wide, prompt[1:], strict=False)]
    tokens: list[int] = []
    shown: list[int] = []
    while True:
        if len(tokens) == request.max_tokens:
            return Solo(tokens, text_of(shown, True), "length", "", logits, scores)
        if len(prompt) + len(tokens) > context:
            return Solo(tokens, text_of(shown, True), "context", "", logits, scores)
        if tokens:
            logits.append(logits_after(prompt + tokens))
        token = sampler.choose(logits[-1], int(logits[-1].argmax()), np.array(prompt + tokens, dtype=np.int32))
        tokens.append(token)
        ended = token in ends
        if not ended:
            shown.append(token)
        full = ended or len(tokens) == request.max_tokens or len(prompt) + len(tokens) > context
        text, stop = cut_at_stop(text_of(shown, full), request.stop)
        if stop:
            return Solo(tokens, text, "stop", stop, logits, scores)
        if ended:
            return Solo(tokens, text, "stop", "", logits, scores)


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """The text before the first stop string to be complete, and that stop string ("" if none)."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, ""


def text_of(tokens: list[int], ended: bool) -> str:
    """Text of generated tokens: whole characters, and what is left of one at the end."""
    detokenizer = Detokenizer(TOKENIZER)
    return "".join(map(detokenizer.push, tokens)) + (detokenizer.flush() if ended else "")


class ToyExecutor:
    """`during` is called in the middle of every step, when its rows have been scrambled and not yet computed; what it
    raises, the step raises. `seconds` is what a step claims to have taken, given its rows."""

    def __init__(
        self, *, slots: int = 3, context: int = 64, max_rows: int = 16, max_out_rows: int = 8, seed: int = 0
    ) -> None:
        self.slots, self.context, self.max_rows, self.max_out_rows = slots, context, max_rows, max_out_rows
        self.noise = np.random.Generator(np.random.PCG64(seed))
        self.states = self.noise.integers(1, MASK, size=(slots, context), dtype=np.uint64)
        self.during: Callable[[], None] = lambda: None
        self.seconds: Callable[[int], float] = lambda rows: 0.001 * rows
        self.history: list[list[tuple[int, int, int]]] = []  # of each finished step: (slot, first position, rows)
        self.copies: list[tuple[int, int, int]] = []
        self.copying: Callable[[], None] = lambda: None  # called in the middle of every copy
        self.aborts = self.recoveries = 0
        self.recoverable = True
        self.broken = False
        self.stepping = self.abort_wanted = False

    def step(self, rows: StepRows) -> StepResult:
        assert not self.broken, "a step before recovery"
        assert len(rows.tokens) <= self.max_rows and len(rows.out_rows) <= self.max_out_rows
        assert all(array.dtype == np.int32 for array in (rows.tokens, rows.slots, rows.positions, rows.out_rows))
        assert (np.diff(rows.out_rows) > 0).all() and (rows.positions < self.context).all()
        parts = self._parts(rows)
        for slot, first, count in parts:
            self.states[slot, first : first + count] = self.noise.integers(1, MASK, size=count, dtype=np.uint64)
        self.stepping = True
        try:
            self.during()
            if self.abort_wanted:
                raise StepAborted
        except WorkerLost:
            self.broken = True
            raise
        finally:
            self.stepping = self.abort_wanted = False
        for token, slot, position in zip(rows.tokens.tolist(), rows.slots, rows.positions, strict=True):
            before = int(self.states[slot, position - 1]) if position else EMPTY
            self.states[slot, position] = mix(before, token)
        self.history.append(parts)
        found = [logits_of(int(self.states[rows.slots[row], rows.positions[row]])) for row in rows.out_rows]
        logits = np.array(found, dtype=np.float32).reshape(len(found), VOCABULARY)
        greedy = logits.argmax(axis=1).astype(np.int32)
        return StepResult(logits, greedy, self.seconds(len(rows.tokens)))

    def _parts(self, rows: StepRows) -> list[tuple[int, int, int]]:
        parts: list[tuple[int, int, int]] = []
        for slot, position in zip(rows.slots.tolist(), rows.positions.tolist(), strict=True):
            if parts and parts[-1][0] == slot:
                assert position == parts[-1][1] + parts[-1][2], "rows of one slot are consecutive"
                parts[-1] = (slot, parts[-1][1], parts[-1][2] + 1)
            else:
                assert all(slot != other for other, _, _ in parts), "rows of one slot stand together"
                parts.append((slot, position, 1))
        return parts

    def announce(self) -> None:
        self.stepping, self.abort_wanted = True, False

    def abort(self) -> None:
        self.aborts += 1
        if self.stepping:
            self.abort_wanted = True

    def continuable(self, slot: int) -> range:
        return range(self.context + 1)

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        assert source != target and 0 < positions <= self.context
        self.copies.append((source, target, positions))
        self.states[target, :positions] = self.noise.integers(1, MASK, size=positions, dtype=np.uint64)
        try:
            self.copying()
        except WorkerLost:
            self.broken = True
            raise
        self.states[target, :positions] = self.states[source, :positions]

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        assert positions - reach in self.continuable(slot)
        return StateSnapshot(positions, {"states": self.states[slot, :positions].copy()}, reach)

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int:
        return positions * self.states.itemsize

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None:
        positions = snapshot.positions if positions is None else positions
        assert snapshot.positions - snapshot.reach <= positions <= snapshot.positions
        self.states[slot, :positions] = snapshot.rows["states"][:positions]

    def recover(self) -> None:
        self.recoveries += 1
        if not self.recoverable:
            raise WorkerLost("worker 0 does not start", "see its log")
        self.broken = False

    def statistics(self) -> dict[str, Any]:
        return {"steps": len(self.history)}

    def close(self) -> None:
        self.broken = True
