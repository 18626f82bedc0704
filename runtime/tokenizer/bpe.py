"""Byte-pair encoding of words, by the merges of a model file.

Owns the byte alphabet, the merges and a cache of words. Knows nothing of special tokens. The merging itself is the BPE
model of the `tokenizers` library; where its rules differ from llama.cpp's (merges whose result is no token, a missing
byte, a pair listed twice) the vocabulary given to it is completed so that the results do not.
"""

from __future__ import annotations

import re
from itertools import chain

from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer.pre_tokenizers import Splitter
from bloomery.runtime.tokenizer.vocabulary import Vocabulary
from bloomery.runtime.tokenizer.word_cache import WordCache


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-pair vocabularies: printable Latin-1 is itself, the others follow
    from U+0100 on in order (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]


BYTE_ALPHABET = _byte_alphabet()
BYTE_OF = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}
_ESCAPES = re.compile("[\udc80-\udcff]")
_TO_ALPHABET = dict(enumerate(BYTE_ALPHABET))
_LONG_WORD = 16384  # characters


class BytePairEncoder:
    """Token ids of texts without special tokens."""

    def __init__(self, model: ModelFile, vocabulary: Vocabulary) -> None:
        assert vocabulary.pre_tokenizer is not None
        self._splitter = Splitter(vocabulary.pre_tokenizer)
        self._whole_words = vocabulary.pre_tokenizer.whole_words
        self._id_of = vocabulary.id_of
        self._tokens = len(vocabulary.texts)
        merges = _merges(model)
        texts = dict(vocabulary.id_of)
        for text in chain(BYTE_ALPHABET, chain.from_iterable(merges), map("".join, merges)):
            if text not in texts:
                texts[text] = len(texts)
        # What llama.cpp emits for a merge result that is no token: those of its bytes that are tokens by themselves.
        single = {byte: vocabulary.id_of[chr(byte)] for byte in range(0x80) if chr(byte) in vocabulary.id_of}
        self._spelled = {
            number: [single[byte] for byte in _utf8(text) if byte in single]
            for text, number in texts.items()
            if number >= self._tokens
        }
        # A token that is no UTF-8 (a surrogate escape) cannot come out of a word's characters; the library refuses it.
        if not _is_utf8("".join(texts)):
            texts = {text: number for text, number in texts.items() if _is_utf8(text)}
            merges = {pair: None for pair in merges if _is_utf8("".join(pair))}
        self._merger = BPE(texts, list(merges))
        self._pipeline = Pipeline(self._merger)
        self._words = WordCache(self._word)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` (no surrogates)."""
        return self._words.ids(self._splitter.words(text))

    def _word(self, word: str) -> list[int]:
        spelled = word.encode("utf-8").decode("latin-1").translate(_TO_ALPHABET)
        if self._whole_words and spelled in self._id_of:
            return [self._id_of[spelled]]
        ids = self._merged(spelled)
        if self._spelled and max(ids, default=0) >= self._tokens:
            return [part for number in ids for part in self._spelled.get(number, (number,))]
        return ids

    def _merged(self, spelled: str) -> list[int]:
        """Ids of one word. A word of a megabyte takes a second: the library lets other threads run only in batches."""
        if len(spelled) > _LONG_WORD:
            (encoding,) = self._pipeline.encode_batch_fast([spelled], add_special_tokens=False)
            return list(encoding.ids)
        return [token.id for token in self._merger.tokenize(spelled)]


def _merges(model: ModelFile) -> dict[tuple[str, str], None]:
    """The pairs in order of rank; of a pair listed twice the first counts."""
    merges: dict[tuple[str, str], None] = {}
    for rank, line in enumerate(model.key("tokenizer.ggml.merges", list[str])):
        gap = line.find(" ", 1)
        if gap < 0 or gap == len(line) - 1:
            raise ModelFileError(
                f"{model.path}: metadata key tokenizer.ggml.merges has {line!r} at rank {rank}, expected two texts with"
                " a space between",
                "convert the model again",
            )
        merges.setdefault((line[:gap], line[gap + 1 :]))
    if not _is_utf8("".join(chain.from_iterable(merges))):
        return {pair: None for pair in merges if _is_utf8("".join(pair))}
    return merges


def _is_utf8(text: str) -> bool:
    return _ESCAPES.search(text) is None


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
