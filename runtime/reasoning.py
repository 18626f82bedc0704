"""Where an answer stands with its reasoning: before it, in it, being brought to its end, behind it.

Owns the marks, the count of tokens and what is forced when the budget is used up. Knows tokens by their bytes alone;
who chooses them is `sequence`'s business, and how reasoning is shown that of the front ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import RequestError
from bloomery.runtime.requests import Reasoning
from bloomery.runtime.sampling_checks import check_integer, check_list, invalid
from bloomery.runtime.tokenizer import Tokenizer

BLANKS = b" \t\r\n"
_LAST_TOKENS = 64  # of the prompt, among which the mark has to be that opens reasoning there
_CHARACTER = 3  # bytes that can be missing of a character


class ReasoningWatch:
    """Fed with every token of one answer. Reasoning stands at its beginning, between marks, or has been opened by the
    end of the prompt already; marks further behind are text like any other."""

    def __init__(self, reasoning: Reasoning, tokenizer: Tokenizer, prompt: Sequence[int] | NDArray[np.int32]) -> None:
        self._tokenizer, self._budget = tokenizer, reasoning.budget
        self._start = reasoning.start.encode()
        self._ends = tuple(end.encode() for end in reasoning.ends)
        self._kept = max(map(len, self._ends)) - 1
        ending = reasoning.message + reasoning.ends[0]
        self._forced = tokenizer.encode(ending, add_special=False, parse_special=True)
        self._text = b""  # before: all of it; inside: its end, in which a mark may have begun
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._free = 0
        self._ended_by_hand = False
        self.tokens = 0
        """Generated so far between the marks, the closing one included."""
        self._state: Literal["before", "inside", "ending", "after"] = "before"
        last = b"".join(tokenizer.piece(int(token)) for token in prompt[-_LAST_TOKENS:])
        if last.rstrip(BLANKS).endswith(self._start):
            self._open(b"")

    @property
    def inside(self) -> bool:
        return self._state in ("inside", "ending")

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None: any."""
        if self._ended_by_hand and self._state == "inside":
            self._end()
        return self._forced[0] if self._state == "ending" else None

    def give_way(self) -> None:
        """A constraint does not let the forced token in: reasoning goes on, as long as it likes."""
        self._state, self._budget, self._ended_by_hand = "inside", -1, False

    def end(self) -> bool:
        """The next token is forced, whatever the budget; False if reasoning does not run. For any thread."""
        if self._state != "inside":
            return False
        self._ended_by_hand = True
        return True

    def accept(self, token: int) -> None:
        """The answer goes on with `token`."""
        if self._state == "after":
            return
        piece = self._tokenizer.piece(token)
        if self._state == "before":
            self._text = (self._text + piece).lstrip(BLANKS)
            if self._text.startswith(self._start):
                self._open(self._text[len(self._start) :])
            elif not self._start.startswith(self._text):
                self._state = "after"
            return
        self.tokens += 1
        if self._state == "ending":
            self._forced = self._forced[1:]
            if not self._forced:
                self._state = "after"
            return
        self._free += 1
        self._inside(piece)

    def _open(self, text: bytes) -> None:
        """Reasoning begins with `text`, the rest of the token that ended the mark."""
        self._state, self._text = "inside", b""
        self._inside(text)

    def _inside(self, piece: bytes) -> None:
        text = self._text + piece
        if any(end in text for end in self._ends):
            self._state = "after"
            return
        self._text = text[-self._kept :] if self._kept else b""
        self._characters.decode(piece)
        over = self._free - self._budget
        whole = not self._characters.getstate()[0]
        if self._budget >= 0 and over >= 0 and (whole or over >= _CHARACTER):
            self._end()

    def _end(self) -> None:
        self._state = "ending" if self._forced else "after"


def check_reasoning(reasoning: Reasoning) -> None:
    """Raises RequestError("invalid_request") that names the field."""
    if not isinstance(reasoning.start, str) or not reasoning.start.strip():
        raise invalid("reasoning.start", reasoning.start, "a text that is not empty")
    ends = check_list("reasoning.ends", reasoning.ends)
    if not ends or not all(isinstance(end, str) and end for end in ends):
        raise invalid("reasoning.ends", list(ends), "at least one text, none of them empty")
    check_integer("reasoning.budget", reasoning.budget, -1, 2**31 - 1)
    if not isinstance(reasoning.message, str):
        raise RequestError("invalid_request", "reasoning.message must be a text", field="reasoning.message")
