"""Text that is still coming, read by generators that wait for more of it.

A reader is written as if the whole text were there: `yield from source.expect("x")`. Where the text at hand does not
settle a question the generator yields WAIT and is resumed when there is more; so what a reader does depends on the text
alone, never on the pieces it came in. Owns the text that is not yet consumed. Knows no format.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final, TypeAlias, TypeVar

from bloomery.launcher.chat_output.deltas import Delta


class Wait:
    """More text is needed."""


WAIT: Final = Wait()
BLANKS = " \t\r\n"

Result = TypeVar("Result")
Reading: TypeAlias = Generator[Delta | Wait, None, Result]


class Mismatch(Exception):
    """The text is not what the format says."""


class Source:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark = -1  # text from here on is kept
        self.ended = False

    def feed(self, text: str) -> None:
        keep = self._at if self._mark < 0 else self._mark
        self._text, self._at = self._text[keep:] + text, self._at - keep
        self._mark -= keep if self._mark >= 0 else 0

    @property
    def rest(self) -> str:
        """What is at hand and not consumed."""
        return self._text[self._at :]

    def skip(self, count: int) -> None:
        self._at += count

    def mark(self) -> None:
        """From here on everything is kept, to come back to by `rewind`."""
        self._mark = self._at

    def release(self) -> None:
        self._mark = -1

    def rewind(self) -> None:
        self._at, self._mark = self._mark, -1

    def more(self) -> Reading[bool]:
        """Waits until there is unconsumed text; False if none will come."""
        while self._at == len(self._text):
            if self.ended:
                return False
            yield WAIT
        return True

    def begins_with(self, options: tuple[str, ...]) -> Reading[str]:
        """The longest of the strings with which the text goes on, "" if it is none of them. Nothing is consumed."""
        while True:
            rest = self.rest
            found = max((option for option in options if rest.startswith(option)), key=len, default="")
            undecided = any(len(option) > max(len(found), len(rest)) and option.startswith(rest) for option in options)
            if not undecided or self.ended:
                return found
            yield WAIT

    def expect(self, *options: str) -> Reading[str]:
        """Consumes one of the strings (the longest that fits) or raises Mismatch."""
        found = yield from self.begins_with(options)
        if not found:
            raise Mismatch
        self.skip(len(found))
        return found

    def optional(self, *options: str) -> Reading[str]:
        found = yield from self.begins_with(options)
        self.skip(len(found))
        return found

    def blanks(self) -> Reading[str]:
        """Consumes white space."""
        skipped = ""
        while (yield from self.more()):
            rest = self.rest
            count = len(rest) - len(rest.lstrip(BLANKS))
            skipped += rest[:count]
            self.skip(count)
            if count < len(rest):
                break
        return skipped

    def until(self, end: str, limit: int = 1 << 16) -> Reading[str]:
        """The text before `end`, which is consumed too. Mismatch if it does not come within `limit` characters."""
        while (place := self.rest.find(end)) < 0:
            if self.ended or len(self.rest) > limit:
                raise Mismatch
            yield WAIT
        text = self.rest[:place]
        self.skip(place + len(end))
        return text

    def pieces_until(self, ends: tuple[str, ...]) -> Iterator[str | Wait]:
        """The text before any of `ends`, in pieces as it comes, WAIT in between; the end itself is not consumed. Ends
        too when the text does."""
        while True:
            rest = self.rest
            places = [place for end in ends if (place := rest.find(end)) >= 0]
            safe = min(places) if places else len(rest) - (0 if self.ended else held(rest, ends))
            if safe:
                self.skip(safe)
                yield rest[:safe]
            if places or (self.ended and not self.rest):
                return
            yield WAIT


def held(text: str, ends: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which one of `ends` may begin."""
    longest = min(max(map(len, ends), default=1) - 1, len(text))
    for count in range(longest, 0, -1):
        tail = text[len(text) - count :]
        if any(end.startswith(tail) and len(end) > count for end in ends):
            return count
    return 0
