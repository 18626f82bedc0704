"""Tokens back to text, as they come: only whole characters leave, and every byte is accounted for.

Knows of a tokenizer only the bytes of a token.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class Pieces(Protocol):
    """What a detokenizer needs of a tokenizer."""

    add_space_prefix: bool

    def piece(self, token: int, *, special: bool = True) -> bytes: ...


class Detokenizer:
    """Incremental `Tokenizer.decode`: the pushed tokens' texts and the flush, joined, equal `decode` of all tokens with
    the same arguments. Bytes that no continuation can make a character become U+FFFD as soon as that is certain, an
    incomplete character waits for the next token.

    `special` shows control tokens' texts, `shown` those of some of them. `continuation` (default here): the tokens
    follow others, e.g. a prompt, so the space that a SentencePiece vocabulary puts before a text's first word belongs
    to the text.
    """

    def __init__(
        self,
        tokenizer: Pieces,
        special: bool = False,
        *,
        continuation: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._special, self._shown = special, shown
        self._drop_space = tokenizer.add_space_prefix and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The whole characters that `token` completes; may be empty."""
        piece = self._tokenizer.piece(token, special=self._special or token in self._shown)
        if self._drop_space:  # of the first token only, even if that shows nothing
            self._drop_space = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """U+FFFD if a character is left incomplete, else nothing. The detokenizer can be used again afterwards."""
        return self._decoder.decode(b"", final=True)
