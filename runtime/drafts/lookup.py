"""The lookup draft: what followed the last tokens when they occurred before in the same text

Owns an index of each slot's n-grams and the record of how often such guesses are right. Needs no model and no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bloomery.runtime.drafts.draft import Proposal, Wanted
from bloomery.runtime.executor import StepResult, StepRows

SIZES = (3, 2, 1)
"""Lengths of the n-grams that are looked up, in this order."""
LONGEST = 8
"""Matches are told apart by their length up to this one."""
KEPT = 1 << 17
"""Newest tokens that stay in an index that has grown to twice as many."""
_START = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75)  # chances by length of match before anything is known
_TEXT_WEIGHT, _SHARED_WEIGHT = 0.1, 0.02  # of the newest outcome, in a text's own chances and in those of all


class LookupDraft:
    """The longest of the n-grams at the end of a text that occurred before says how it goes on: as it did the last
    time. A longer match is a better guess, so chances are learned by length of match, from every guess, whether it was
    checked by the model or not: the text shows later what was right.

    A guess of several tokens is the text behind the match; its j-th token counts as one with a match longer by j, which
    is what it is if those before it are right.
    """

    kind = "lookup"
    costly = False

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self._sizes = sizes
        self._texts: dict[int, _Text] = {}
        self._chances = list(_START)

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        return [self._guess(question) for question in wanted]

    def observe(self, rows: StepRows, result: StepResult) -> None:
        pass

    def recover(self) -> None:
        pass

    def statistics(self) -> dict[str, Any]:
        """`chances` of the next token by length of match, over all texts."""
        return {"chances": [round(chance, 3) for chance in self._chances[1:]]}

    def close(self) -> None:
        self._texts.clear()

    def _guess(self, question: Wanted) -> Proposal:
        text = self._texts.get(question.slot)
        if text is None or text.number != question.text:
            text = self._texts[question.slot] = _Text(question.text, self._sizes, list(self._chances))
        new = question.tokens[text.length :].tolist()
        if text.guess:
            self._score(text, new)
        text.grow(new)
        place, match = text.match()
        if not match:
            return Proposal()
        tokens = text.tokens[place : place + question.most]
        period = len(text.tokens) - place
        while len(tokens) < question.most:  # the text repeats itself: it goes on with what it goes on with
            tokens.append(tokens[-period])
        text.guess, text.guess_match = tokens, match
        chances = text.chances[match : match + len(tokens)]
        chances += text.chances[-1:] * (len(tokens) - len(chances))
        return Proposal(tuple(tokens), tuple(chances))

    def _score(self, text: _Text, came: list[int]) -> None:
        """Compares the last guess with what came."""
        match, chances, shared = text.guess_match, text.chances, self._chances
        for guessed, token in zip(text.guess, came, strict=False):
            right = guessed == token
            chances[match] += _TEXT_WEIGHT * (right - chances[match])
            shared[match] += _SHARED_WEIGHT * (right - shared[match])
            if not right:
                break
            match = min(match + 1, LONGEST)
        text.guess = []


class _Text:
    """The end of one slot's text, with the place of the token that most recently followed each n-gram before the last.
    `length` counts all tokens, those that were dropped too."""

    def __init__(self, number: int, sizes: tuple[int, ...], chances: list[float]) -> None:
        self.number, self.chances = number, chances
        self.tokens: list[int] = []
        self.length = 0
        self._tables: tuple[tuple[int, dict[tuple[int, ...], int]], ...] = tuple((size, {}) for size in sizes)
        self.guess: list[int] = []
        self.guess_match = 0

    def grow(self, new: list[int]) -> None:
        first = len(self.tokens)
        self.tokens += new
        self.length += len(new)
        if len(self.tokens) > 2 * KEPT:
            first, self.tokens = 0, self.tokens[-KEPT:]
            for _, table in self._tables:
                table.clear()
        tokens, end = self.tokens, len(self.tokens)
        for size, table in self._tables:
            start = max(first, size)
            if start == end - 1:
                table[tuple(tokens[start - size : start])] = start
            elif start < end:
                before = tokens[start - size : end - 1]
                grams = zip(*(before[offset:] for offset in range(size)), strict=False)
                table.update(zip(grams, range(start, end), strict=False))

    def match(self) -> tuple[int, int]:
        """The place that the longest n-gram at the end says goes on the text, and how many tokens before both places
        agree (at most LONGEST); 0 of them if it says nothing."""
        tokens, end = self.tokens, len(self.tokens)
        for size, table in self._tables:
            place = table.get(tuple(tokens[end - size :])) if end >= size else None
            if place is not None:
                match = size
                while match < LONGEST and match < place and tokens[place - match - 1] == tokens[end - match - 1]:
                    match += 1
                return place, match
        return 0, 0
