"""Special tokens inside a text: finds them before anything else is tokenised.

Owns the order in which they are looked for. Knows nothing of words and merges.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

SPACE = " \t\n\v\f\r"

Fragment: TypeAlias = str | int
"""A stretch of text that is still to be tokenised, or a special token's id."""


@dataclass(frozen=True)
class SpecialToken:
    """`plain`: found even where special tokens are not parsed. Stripping removes ASCII white space beside the token."""

    id: int
    text: str
    plain: bool
    strip_left: bool = False
    strip_right: bool = False


class SpecialTokens:
    """Partition of texts by special tokens as llama.cpp does it: the longest token first (in UTF-8 bytes; lower ids
    first among equals), everywhere in the text, then the next one in what is left. This is not the leftmost match: of
    two overlapping tokens the longer wins wherever it starts."""

    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        ordered = sorted((token for token in tokens if token.text), key=lambda token: (-_bytes(token.text), token.id))
        self._every = _Finder(ordered)
        self._plain = _Finder([token for token in ordered if token.plain])

    def partition(self, text: str, parse_special: bool) -> list[Fragment]:
        """The fragments of `text` in order; no empty ones."""
        fragments: list[Fragment] = [text] if text else []
        for token in (self._every if parse_special else self._plain).present(text):
            fragments = [piece for fragment in fragments for piece in _split(fragment, token)]
        return fragments


class _Finder:
    """Which of some tokens occur in a text at all: one pass, because a vocabulary may have a thousand of them."""

    def __init__(self, ordered: Sequence[SpecialToken]) -> None:
        self._ordered = ordered
        self._place = {token.text: place for place, token in enumerate(ordered)}
        self._lengths: dict[str, list[int]] = {}  # first character -> lengths of the tokens that begin with it
        for text in self._place:
            lengths = self._lengths.setdefault(text[0], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        pattern = "|".join(re.escape(text) for text in self._place)
        self._any = re.compile(pattern) if pattern else None

    def present(self, text: str) -> list[SpecialToken]:
        """The tokens that occur in `text`, overlapping ones too, in the order of the search."""
        found: set[int] = set()
        match = self._any.search(text) if self._any else None
        while match is not None and self._any is not None:
            start = match.start()
            for length in self._lengths[text[start]]:
                place = self._place.get(text[start : start + length])
                if place is not None:
                    found.add(place)
            match = self._any.search(text, start + 1)
        return [self._ordered[place] for place in sorted(found)]


def _split(fragment: Fragment, token: SpecialToken) -> list[Fragment]:
    if isinstance(fragment, int) or token.text not in fragment:
        return [fragment]
    pieces: list[Fragment] = []
    start, found = 0, fragment.find(token.text)
    while found >= 0:
        before = fragment[start:found].rstrip(SPACE) if token.strip_left else fragment[start:found]
        if before:
            pieces.append(before)
        pieces.append(token.id)
        start = found + len(token.text)
        while token.strip_right and start < len(fragment) and fragment[start] in SPACE:
            start += 1
        found = fragment.find(token.text, start)
    if start < len(fragment):
        pieces.append(fragment[start:])
    return pieces


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))
