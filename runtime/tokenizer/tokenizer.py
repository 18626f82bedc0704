"""The tokenizer of a model file: text to token ids and back, equal to llama.cpp's on the same file.

Owns the order of steps: special tokens first, then words, then BOS and EOS as the file says. The parts do the work:
`vocabulary`, `special_tokens`, `pre_tokenizers` and `bpe`, or `sentencepiece`.
"""

from __future__ import annotations

from collections.abc import Iterable

from bloomery.runtime.errors import ModelFileError, RequestError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer.bpe import BYTE_OF, BytePairEncoder
from bloomery.runtime.tokenizer.sentencepiece import SPACE_MARK, PieceEncoder
from bloomery.runtime.tokenizer.special_tokens import SpecialTokens
from bloomery.runtime.tokenizer.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary


class Tokenizer:
    """Immutable after construction apart from its caches; threads may share one."""

    def __init__(self, model: ModelFile, vocabulary: Vocabulary) -> None:
        self.vocabulary = len(vocabulary.texts)
        self.digest = vocabulary.digest
        self.end_tokens = vocabulary.end_tokens
        self.add_bos = vocabulary.add_bos
        self.add_eos = vocabulary.add_eos
        self.add_space_prefix = vocabulary.add_space_prefix
        self.special = dict(vocabulary.special)
        self._words = vocabulary
        self._special_tokens = SpecialTokens(vocabulary.special_tokens)
        self._encoder: BytePairEncoder | PieceEncoder = (
            BytePairEncoder(model, vocabulary) if vocabulary.model == "gpt2" else PieceEncoder(vocabulary)
        )
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_model_file(cls, model: ModelFile) -> Tokenizer:
        """ModelFileError if the file has no tokenizer, or one of a kind that is not supported (it is named)."""
        return cls(model, Vocabulary.from_model_file(model))

    @property
    def bos(self) -> int | None:
        return self.special.get("bos")

    @property
    def eos(self) -> int | None:
        return self.special.get("eos")

    @property
    def eot(self) -> int | None:
        """End of turn."""
        return self.special.get("eot")

    @property
    def unknown(self) -> int | None:
        return self.special.get("unk")

    @property
    def padding(self) -> int | None:
        return self.special.get("pad")

    @property
    def mask(self) -> int | None:
        return self.special.get("mask")

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` puts BOS and EOS around it where the file says so (`add_bos`, `add_eos`); `parse_special` finds
        control tokens in the text, otherwise only user-defined ones are found. Surrogate escapes (of
        `bytes.decode(errors="surrogateescape")`) stand for bytes that are no UTF-8, other surrogates for U+FFFD.
        """
        ids: list[int] = []
        if add_special and self.add_bos:
            ids.append(self.special["bos"])
        text = _without_surrogates(text)
        after_special = True
        for fragment in self._special_tokens.partition(text, parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
            elif isinstance(self._encoder, PieceEncoder):
                prefix = " " if self.add_space_prefix and after_special else ""
                ids.extend(self._encoder.encode((prefix + fragment).replace(" ", SPACE_MARK)))
            else:
                ids.extend(self._encoder.encode(_replaced(fragment)))
            after_special = isinstance(fragment, int)
        if add_special and self.add_eos:
            ids.append(self.special["eos"])
        return ids

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """The bytes that `token` stands for; none for a control token unless `special`, and none for an unused one.

        They need not be whole characters. RequestError if the vocabulary has no such token.
        """
        if not 0 <= token < self.vocabulary:
            raise RequestError(
                "invalid_request",
                f"token {token} is not in the vocabulary, expected 0 to {self.vocabulary - 1}",
                "use the tokenizer of the model that the tokens came from",
            )
        if not special and self._words.kinds[token] & (CONTROL | UNKNOWN):
            return b""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token)
        return piece

    def decode_bytes(self, tokens: Iterable[int], *, special: bool = False, continuation: bool = False) -> bytes:
        """The bytes of `tokens` in a row.

        A SentencePiece vocabulary puts a space before the first word; it is taken off again (if the first token begins
        with it), unless the tokens are the `continuation` of others. Nothing is added or cleaned up.
        """
        pieces = [self.piece(token, special=special) for token in tokens]
        if pieces and self.add_space_prefix and not continuation:
            pieces[0] = pieces[0].removeprefix(b" ")
        return b"".join(pieces)

    def decode(self, tokens: Iterable[int], *, special: bool = False, continuation: bool = False) -> str:
        """`decode_bytes` as text; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens, special=special, continuation=continuation).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """The token as the file stores it (`Ġthe`, `▁the`)."""
        return self._words.texts[token]

    def token_id(self, text: str) -> int | None:
        """The token that the file stores as `text`."""
        return self._words.id_of.get(text)

    def is_control(self, token: int) -> bool:
        return bool(self._words.kinds[token] & CONTROL)

    def _piece(self, token: int) -> bytes:
        text, kind = self._words.texts[token], self._words.kinds[token]
        if kind & (CONTROL | UNKNOWN | USER_DEFINED):
            return _raw(text)
        if kind & NORMAL:
            return _raw(text.replace(SPACE_MARK, " ")) if self._words.model == "llama" else _alphabet_bytes(text)
        if kind & BYTE:
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                raise ModelFileError(
                    f"token {token} is {text!r} and of the byte type, expected a text such as '<0x0A>'",
                    "convert the model again",
                ) from None
        return b""


def _alphabet_bytes(text: str) -> bytes:
    """The bytes that a byte-pair token's characters stand for. One outside the alphabet shows as llama.cpp shows it."""
    piece = bytearray()
    for character in text:
        byte = BYTE_OF.get(character)
        if byte is None:
            piece += b"[UNK_BYTE_0x" + _raw(character).hex().encode() + _raw(text) + b"]"
        else:
            piece.append(byte)
    return bytes(piece)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _without_surrogates(text: str) -> str:
    """`text` with surrogates other than escapes replaced."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" else c for c in text)
    return text


def _replaced(text: str) -> str:
    """`text` with U+FFFD for every surrogate escape: a byte-pair vocabulary sees characters only."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    return text
