"""Ids of words seen before. Text repeats its words; looking one up is a hundred times faster than merging it.

Knows nothing of how a word becomes ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

MAX_WORDS = 1 << 18
MAX_LENGTH = 64  # longer words hardly ever come twice


class WordCache(dict[str, list[int]]):
    """A dict whose missing words are encoded. Emptied when full. Threads may share it: at worst a word is done twice.

    The lists are shared: callers must not change them.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> list[int]:
        ids = self._encode(word)
        if len(word) <= MAX_LENGTH:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def ids(self, words: Sequence[str]) -> list[int]:
        return list(chain.from_iterable(map(self.__getitem__, words)))
