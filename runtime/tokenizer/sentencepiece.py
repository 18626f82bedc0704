"""SentencePiece-style encoding (`tokenizer.ggml.model` "llama"): characters are joined, best score first.

Owns what is joined and spelled; `joining` does the joining. Knows nothing of special tokens. The rule is llama.cpp's:
of all neighbours whose joined text is a token, the pair with the greatest score is joined, the leftmost of equals,
until none is left; what is no token then is spelled in byte tokens. A text is first cut wherever two neighbouring
characters occur side by side in no token at all: no pair can be joined across such a border, so the pieces (mostly
words) are independent and can be remembered.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.tokenizer.joining import join
from bloomery.runtime.tokenizer.vocabulary import Vocabulary
from bloomery.runtime.tokenizer.word_cache import WordCache

SPACE_MARK = "▁"
LENGTHS = bytes([1] * 12 + [2, 2, 3, 4])  # bytes of a character by the upper half of its first byte


class PieceEncoder:
    """Token ids of texts without special tokens, white space already marked by `SPACE_MARK`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = [_raw(text) for text in vocabulary.texts]
        self._id_of = {text: number for number, text in enumerate(texts)}
        self._joinable = _side_by_side(vocabulary.texts)
        scores = np.nan_to_num(vocabulary.scores, nan=-np.inf)
        ranks = np.unique(-scores, return_inverse=True)[1]  # 0: the greatest score
        self._ranks = dict(zip(texts, ranks.tolist(), strict=True))
        unknown = vocabulary.special.get("unk")
        self._of_byte = [
            next(
                (self._id_of[text] for text in (b"<0x%02X>" % byte, bytes([byte])) if text in self._id_of),
                unknown,
            )
            for byte in range(0x100)
        ]
        self._pieces = WordCache(self._piece)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which surrogate escapes stand for bytes that are no UTF-8."""
        return self._pieces.ids(self._cut(text))

    def _cut(self, text: str) -> list[str]:
        """The independent pieces of `text`."""
        if len(text) < 2:
            return [text] if text else []
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.int64)
        if ((code_points >= 0xD800) & (code_points < 0xE000)).any():
            return [text]  # bytes that are no characters may join with what follows them
        pairs = code_points[:-1] << 21 | code_points[1:]
        place = np.searchsorted(self._joinable, pairs)
        borders = np.flatnonzero(self._joinable[np.minimum(place, self._joinable.size - 1)] != pairs) + 1
        ends = [*borders.tolist(), len(text)]
        return [text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _piece(self, piece: str) -> list[int]:
        data = _raw(piece)
        if data in self._id_of and len(piece) == 1:
            return [self._id_of[data]]
        starts = join(data, _symbol_starts(data), self._ranks)
        ids: list[int] = []
        for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
            number = self._id_of.get(data[start:end])
            if number is None:
                ids.extend(byte for byte in map(self._of_byte.__getitem__, data[start:end]) if byte is not None)
            else:
                ids.append(number)
        return ids


def _symbol_starts(data: bytes) -> list[int]:
    """Where each character begins; bytes that are no UTF-8 count as the character that their first byte announces."""
    starts = []
    position = 0
    while position < len(data):
        starts.append(position)
        position += LENGTHS[data[position] >> 4]
    return starts


def _side_by_side(texts: list[str]) -> NDArray[np.int64]:
    """Sorted pairs (first << 21 | second) of code points that occur next to each other in some token."""
    whole = "\0\0".join(texts)
    code_points = np.frombuffer(whole.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.int64)
    return np.unique(np.append(code_points[:-1] << 21 | code_points[1:], -1))


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
