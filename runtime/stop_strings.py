"""Finds stop strings in a growing text, whatever pieces it arrives in. Knows nothing of tokens."""

from __future__ import annotations


class StopStrings:
    """Splits a stream of text at the first stop string to be completed (of several completed by the same character
    the longest). Text that may still become a stop string is held back; everything else passes at once.

    The result does not depend on how the text is cut into pieces: each stop string is followed by its own
    Knuth-Morris-Pratt automaton, one character at a time.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops)
        self.found = ""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Takes more text, returns what is certain not to belong to a stop string. After `found` it returns ""."""
        if not self._stops:
            return text
        if self.found:
            return ""
        held = self._held + text
        first = len(self._held)
        for index in range(first, len(held)):
            for which, stop in enumerate(self._stops):
                matched = self._advance(which, held[index])
                if matched == len(stop):
                    self.found, self._held = stop, ""
                    return held[: index + 1 - len(stop)]
        passed = len(held) - max(self._matched)
        self._held = held[passed:]
        return held[:passed]

    def finish(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, which: int, character: str) -> int:
        stop, borders, matched = self._stops[which], self._borders[which], self._matched[which]
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        self._matched[which] = matched
        return matched


def _borders(word: str) -> list[int]:
    """For each prefix of `word`: the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(word)
    length = 0
    for index in range(1, len(word)):
        while length and word[index] != word[length]:
            length = borders[length - 1]
        length += word[index] == word[length]
        borders[index] = length
    return borders
