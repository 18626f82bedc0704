"""JSON text as it comes: where a value ends, and whether what is there can still become JSON.

Owns a scanner that takes single characters. Knows nothing of what values mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bloomery.launcher.chat_output.deltas import Delta
from bloomery.launcher.chat_output.source import BLANKS, WAIT, Mismatch, Reading, Source

MAX_DEPTH = 500
_LITERALS = ("true", "false", "null")
_ESCAPED = '"\\/bfnrt'


class JsonScanner:
    """Reads one object, array, string or literal; `done` once it is complete. Numbers, which do not say where they end,
    are read inside of objects and arrays only."""

    def __init__(self) -> None:
        self.done = self.failed = False
        self._stack: list[str] = []
        self._state: Callable[[str], None] = self._value
        self._literal = ""
        self._hex = 0
        self._number = ""

    def feed(self, text: str) -> int:
        """How many characters belong to the value; fewer than all if it is complete or the next one is wrong."""
        for index, char in enumerate(text):
            if self.done or self.failed:
                return index
            self._state(char)
            if self.failed:
                return index
        return len(text)

    def _fail(self) -> None:
        self.failed = True

    def _value(self, char: str) -> None:
        if char in BLANKS:
            return
        if char == '"':
            self._state = self._string
        elif char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return self._fail()
            self._stack.append(char)
            self._state = self._first_key if char == "{" else self._first_item
        elif char in "tfn":
            self._literal, self._state = char, self._word
        elif self._stack and char in "-0123456789":
            self._number, self._state = char, self._digits
        else:
            self._fail()

    def _first_item(self, char: str) -> None:
        if char == "]":
            self._close()
        else:
            self._value(char)

    def _first_key(self, char: str) -> None:
        if char == "}":
            self._close()
        else:
            self._key(char)

    def _key(self, char: str) -> None:
        if char == '"':
            self._stack.append("key")
            self._state = self._string
        elif char not in BLANKS:
            self._fail()

    def _colon(self, char: str) -> None:
        if char == ":":
            self._state = self._value
        elif char not in BLANKS:
            self._fail()

    def _string(self, char: str) -> None:
        if char == '"':
            if self._stack and self._stack[-1] == "key":
                self._stack.pop()
                self._state = self._colon
            else:
                self._complete()
        elif char == "\\":
            self._state = self._escape
        elif char < " ":
            self._fail()

    def _escape(self, char: str) -> None:
        if char == "u":
            self._hex, self._state = 0, self._hex_digit
        elif char in _ESCAPED:
            self._state = self._string
        else:
            self._fail()

    def _hex_digit(self, char: str) -> None:
        if char not in "0123456789abcdefABCDEF":
            return self._fail()
        self._hex += 1
        if self._hex == 4:
            self._state = self._string

    def _word(self, char: str) -> None:
        self._literal += char
        if self._literal in _LITERALS:
            self._complete()
        elif not any(word.startswith(self._literal) for word in _LITERALS):
            self._fail()

    def _digits(self, char: str) -> None:
        if char in "0123456789.eE+-":
            self._number += char
            return
        try:
            json.loads(self._number)
        except ValueError:
            return self._fail()
        self._complete()
        self._state(char)

    def _close(self) -> None:
        self._stack.pop()
        self._complete()

    def _complete(self) -> None:
        """A value has ended."""
        if not self._stack:
            self.done = True
        self._state = self._after

    def _after(self, char: str) -> None:
        if char in BLANKS:
            return
        if char == ",":
            self._state = self._key if self._stack[-1] == "{" else self._value
        elif char == ("}" if self._stack[-1] == "{" else "]"):
            self._close()
        else:
            self._fail()


def streamed_value(source: Source, emit: Callable[[str], Delta]) -> Reading[None]:
    """Passes one JSON value on as it comes. Mismatch if the text does not go on as JSON."""
    scanner = JsonScanner()
    while True:
        count = scanner.feed(source.rest)
        if count:
            piece = source.rest[:count]
            source.skip(count)
            yield emit(piece)
        if scanner.done:
            return
        if scanner.failed or source.ended:
            raise Mismatch
        yield WAIT


def whole_value(source: Source) -> Reading[str]:
    """The text of one JSON value, when it is complete; a number too."""
    yield from source.more()
    rest = source.rest
    if rest[:1] in tuple("-0123456789"):
        count = 0
        while True:
            rest = source.rest
            while count < len(rest) and rest[count] in "0123456789.eE+-":
                count += 1
            if count < len(rest) or source.ended:
                break
            yield WAIT
        source.skip(count)
        return rest[:count]
    scanner, text = JsonScanner(), ""
    while True:
        count = scanner.feed(source.rest)
        text += source.rest[:count]
        source.skip(count)
        if scanner.done:
            return text
        if scanner.failed or source.ended:
            raise Mismatch
        yield WAIT


def parsed(text: str) -> Any:
    """The value of a JSON text. Mismatch if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        raise Mismatch from None
