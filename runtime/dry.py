"""DRY: a penalty for the tokens that would go on with a repetition.

If the text ends with a sequence that occurred before, the token that followed it then gets its logit lowered by
multiplier * base ** (length of the sequence - allowed length), for the longest such sequence of at least the allowed
length. Sequences do not reach back beyond a breaker. Owns the search for repetitions and how strings become breakers of
tokens, both equal to llama.cpp's; knows nothing of other samplers.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, defaultdict

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.candidates import Candidates, Ids, Row
from bloomery.runtime.requests import SamplingParameters
from bloomery.runtime.tokenizer import Tokenizer

Tokens = NDArray[np.int32]

MAX_BREAKER_BYTES = 40
MAX_TAIL_TOKENS = 20
_LOG_LARGEST = 88.7228391  # of float32
_LARGEST = 1e38  # penalty: leaves logits finite
_KEPT = 16  # sets of breakers of which the tokens are remembered

Tails = dict[int, list[tuple[int, ...]]]


class Breakers:
    """Token sequences that end a repetition: `tails[head]` lists what has to follow that token (maybe nothing)."""

    def __init__(self, tails: Tails) -> None:
        self.tails = tails
        self.heads: Tokens = np.array(sorted(tails), dtype=np.int32)
        self.single = frozenset(head for head, tail in tails.items() if () in tail)

    def repeat_limit(self, window: Tokens) -> int:
        """How many of the last tokens of `window` follow its last breaker."""
        for place in np.flatnonzero(np.isin(window, self.heads))[::-1]:
            rest = window[place + 1 :].tolist()
            lengths = [len(tail) for tail in self.tails[int(window[place])] if tuple(rest[: len(tail)]) == tail]
            if lengths:
                return len(rest) - max(lengths)
        return len(window)


class BreakerCache:
    """The breakers of one tokenizer, made once a set of strings (a look at every token). Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._made: OrderedDict[tuple[str, ...], Breakers] = OrderedDict()
        self._pieces: _Pieces | None = None
        self._lock = threading.Lock()

    def breakers(self, strings: tuple[str, ...]) -> Breakers:
        with self._lock:
            if strings not in self._made:
                self._made[strings] = Breakers(self._tails(strings))
                if len(self._made) > _KEPT:
                    self._made.popitem(last=False)
            self._made.move_to_end(strings)
            return self._made[strings]

    def _tails(self, strings: tuple[str, ...]) -> Tails:
        tokenizer = self._tokenizer
        if self._pieces is None:
            every = range(tokenizer.vocabulary)
            self._pieces = _Pieces([tokenizer.decode_bytes([token], special=True) for token in every])
        tails: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        cut_off = (string.encode("utf-8", "surrogatepass")[:MAX_BREAKER_BYTES] for string in strings)
        for breaker in dict.fromkeys(cut_off):
            holding = self._pieces.holding(breaker)
            for token in holding:
                tails[token].append(())
            for cut in range(len(breaker) - 1, 0, -1):  # the token ends inside the breaker
                ending = [token for token in self._pieces.ending(breaker[:cut]) if token not in holding]
                if ending:
                    rest = breaker[cut:].decode("utf-8", "surrogateescape")
                    tail = tuple(tokenizer.encode(rest, add_special=False, parse_special=False)[:MAX_TAIL_TOKENS])
                for token in ending:
                    if tail not in tails[token]:
                        tails[token].append(tail)
        return dict(tails)


class _Pieces:
    """The bytes of all tokens, one behind the other, to be searched at once."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._joined = b"".join(pieces)
        self._bytes = np.frombuffer(self._joined, dtype=np.uint8)
        self._lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        self._ends = np.cumsum(self._lengths)

    def holding(self, text: bytes) -> set[int]:
        """Tokens that contain `text`."""
        found, place = set(), self._joined.find(text)
        while place >= 0:
            token = int(np.searchsorted(self._ends, place, side="right"))
            end = int(self._ends[token])
            whole = place + len(text) <= end
            if whole:
                found.add(token)
            place = self._joined.find(text, end if whole else place + 1)
        return found

    def ending(self, text: bytes) -> list[int]:
        """Tokens that end with `text`, ascending."""
        found = np.flatnonzero(self._lengths >= len(text))
        for back, value in enumerate(reversed(text), 1):
            found = found[self._bytes[self._ends[found] - back] == value]
        return [int(token) for token in found]


class DryPenalty:
    def __init__(self, parameters: SamplingParameters, breakers: Breakers) -> None:
        self._multiplier, self._base = parameters.dry_multiplier, parameters.dry_base
        self._allowed, self._last = parameters.dry_allowed_length, parameters.dry_penalty_last_n
        self._breakers = breakers
        # beyond this length the power would overflow float32, so the penalty grows no further
        self._steps = int(_LOG_LARGEST / math.log(self._base)) if self._base > 1.000001 else 0

    def __call__(self, candidates: Candidates, history: Tokens) -> None:
        window = history if self._last < 0 else history[len(history) - min(self._last, len(history)) :]
        if self._last == 0 or len(window) <= self._allowed:
            return
        limit = self._breakers.repeat_limit(window)
        if limit < self._allowed:
            return
        repeats = next_repeats(window, self._allowed, min(limit, self._allowed + self._steps))
        repeats = {token: length for token, length in repeats.items() if token not in self._breakers.single}
        if not repeats:
            return
        lengths = np.array(list(repeats.values()), dtype=np.float64) - self._allowed
        penalties = np.minimum(self._multiplier * self._base**lengths, _LARGEST).astype(np.float32)

        def lowered(logits: Row, which: Ids) -> Row:
            return logits - penalties[which]

        candidates.change(np.array(list(repeats), dtype=np.intp), lowered)


def next_repeats(window: Tokens, shortest: int, longest: int) -> dict[int, int]:
    """For every token that would go on with a repetition of at least `shortest` tokens: the length of the longest one,
    at most `longest` (not less than `shortest`)."""
    repeats: dict[int, int] = {}
    ends = np.arange(len(window) - 1)  # places where an earlier occurrence of the end of `window` may end
    length = 0
    while len(ends):
        if length >= shortest:
            repeats.update(dict.fromkeys(window[ends + 1].tolist(), length))
        if length == longest:
            break
        ends = ends[ends >= length]
        ends = ends[window[ends - length] == window[len(window) - 1 - length]]
        length += 1
    return repeats
