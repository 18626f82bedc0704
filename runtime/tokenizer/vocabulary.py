"""The vocabulary of a model file: tokens, their kinds, the special ones, and the file's rules about adding them.

Owns every `tokenizer.ggml.*` key but the merges, with llama.cpp's defaults for absent ones. Knows nothing of how a text
becomes tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from bloomery.runtime.tokenizer.special_tokens import SpecialToken

# Kinds of a token, bits; a token can have several (a control token that a file calls normal has both).
UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = (1 << bit for bit in range(6))
_KIND_OF_TYPE = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}

# Texts that say what a token is for when no key does (and some that end a generation whatever the keys say).
_TURN_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
)  # fmt: skip
_GENERATION_ENDS = (
    *_TURN_ENDS, "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>", "<turn|>",
    "<|tool_response>", "[e~[",
)  # fmt: skip
_FILL_IN = {
    "fim_pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
_SHOWN_ALWAYS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")

_KEYS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "eot": "eot_token_id", "eom": "eom_token_id",
    "unk": "unknown_token_id", "sep": "seperator_token_id", "pad": "padding_token_id", "mask": "mask_token_id",
    "fim_pre": "fim_pre_token_id", "fim_suf": "fim_suf_token_id", "fim_mid": "fim_mid_token_id",
    "fim_pad": "fim_pad_token_id", "fim_rep": "fim_rep_token_id", "fim_sep": "fim_sep_token_id",
}  # fmt: skip
_OLD_KEYS = {"fim_pre": "prefix_token_id", "fim_suf": "suffix_token_id", "fim_mid": "middle_token_id"}
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unk": 0}, "gpt2": {"bos": 11, "eos": 11}}  # llama.cpp's, for absent keys


@dataclass(frozen=True)
class Vocabulary:
    """`model` is "gpt2" (byte-pair merges) or "llama" (SentencePiece); `texts` are the tokens as the file stores them
    (bytes that are not UTF-8 as surrogate escapes), `kinds` their bits, `scores` float32. `special` maps bos, eos, eot,
    ... to ids. `end_tokens` end a generation. `pre_tokenizer` is None for SentencePiece."""

    model: str
    texts: list[str]
    kinds: list[int]
    scores: NDArray[np.float32]
    id_of: dict[str, int]
    special: dict[str, int]
    end_tokens: frozenset[int]
    special_tokens: tuple[SpecialToken, ...]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    pre_tokenizer: PreTokenizer | None
    digest: str

    @classmethod
    def from_model_file(cls, model: ModelFile) -> Vocabulary:
        kind = model.key("tokenizer.ggml.model", str)
        if kind not in _DEFAULT_IDS:
            raise ModelFileError(
                f"{model.path}: metadata key tokenizer.ggml.model is {kind!r}, expected 'gpt2' (byte-pair) or 'llama'"
                " (SentencePiece)",
                "this tokenizer is not supported; choose a model of another family",
            )
        pre_tokenizer = _pre_tokenizer(model) if kind == "gpt2" else None
        texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(model.key("tokenizer.ggml.tokens", list[str]))]
        id_of = {text: index for index, text in enumerate(texts)}
        if len(id_of) != len(texts):
            index = next(index for index, text in enumerate(texts) if id_of[text] != index)
            raise ModelFileError(
                f"{model.path}: metadata key tokenizer.ggml.tokens has {texts[index]!r} twice, as tokens {index} and"
                f" {id_of[texts[index]]}, expected distinct tokens",
                "convert the model again",
            )
        types = _numbers(model, "token_type", len(texts))
        scores = _numbers(model, "scores", len(texts)).astype(np.float32)
        kinds = [_KIND_OF_TYPE.get(number, 0) for number in types.tolist()] if types.size else [NORMAL] * len(texts)
        special = _special_ids(model, kind, len(texts))
        end_tokens = _classify(id_of, kinds, special)
        return cls(
            model=kind,
            texts=texts,
            kinds=kinds,
            scores=scores if scores.size else np.zeros(len(texts), dtype=np.float32),
            id_of=id_of,
            special=special,
            end_tokens=end_tokens,
            special_tokens=tuple(_special_tokens(model.key("general.name", str, ""), texts, kinds)),
            add_bos=model.key(
                "tokenizer.ggml.add_bos_token", bool, pre_tokenizer.add_bos if pre_tokenizer is not None else True
            )
            and "bos" in special,
            add_eos=model.key("tokenizer.ggml.add_eos_token", bool, False) and "eos" in special,
            add_space_prefix=model.key("tokenizer.ggml.add_space_prefix", bool, kind == "llama"),
            pre_tokenizer=pre_tokenizer,
            digest=_digest(model),
        )


def _pre_tokenizer(model: ModelFile) -> PreTokenizer:
    name = model.key("tokenizer.ggml.pre", str, "default") or "default"
    if name not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"{model.path}: metadata key tokenizer.ggml.pre is {name!r}, expected one of {', '.join(PRE_TOKENIZERS)}",
            "this pre-tokenizer is not supported; choose a model of another family",
        )
    return PRE_TOKENIZERS[name]


def _numbers(model: ModelFile, name: str, count: int) -> NDArray[Any]:
    """An array with one number a token, or an empty one if the file has none."""
    key = f"tokenizer.ggml.{name}"
    values: NDArray[Any] = model.key(key, np.ndarray, np.empty(0))
    if key in model.metadata and values.size < count:
        raise ModelFileError(
            f"{model.path}: metadata key {key} has {values.size} numbers, expected one for each of {count} tokens",
            "convert the model again",
        )
    return values[:count]


def _special_ids(model: ModelFile, kind: str, count: int) -> dict[str, int]:
    special = {name: number for name, number in _DEFAULT_IDS[kind].items() if number < count}
    for name, key in (*_KEYS.items(), *_OLD_KEYS.items()):
        number = model.key(f"tokenizer.ggml.{key}", int, -1)
        if 0 <= number < count:
            special[name] = number
    return special


def _classify(id_of: dict[str, int], kinds: list[int], special: dict[str, int]) -> frozenset[int]:
    """Completes `special` and `kinds` by the tokens' texts and returns the tokens that end a generation.

    Some files mark such tokens as normal text, or lack the key that names them; llama.cpp goes by the text, and the
    results must not differ from it.
    """

    def present(texts: Iterable[str]) -> list[int]:
        return [id_of[text] for text in texts if text in id_of]

    for name, texts in {"eot": _TURN_ENDS, "eom": ("<|eom_id|>",), **_FILL_IN}.items():
        candidates = present(texts)
        if name not in special and candidates:
            special[name] = candidates[0]
            kinds[candidates[0]] |= CONTROL
    ends = {special[name] for name in ("fim_pad", "fim_rep", "fim_sep") if name in special}
    for token in present(_GENERATION_ENDS):
        ends.add(token)
        kinds[token] |= CONTROL
    for token in present(_SHOWN_ALWAYS):
        kinds[token] = USER_DEFINED
    ends.update(special[name] for name in ("eos", "eot", "eom") if name in special)

    def ending(text: str) -> bool:
        return id_of.get(text) in ends

    # In vocabularies with tool calls "<|end|>" ends a part of a turn only.
    calls = ending("<|call|>") or ending("<|calls|>")
    if ending("<|end|>") and calls and (ending("<|return|>") or ending("<|flush|>")):
        ends.discard(id_of["<|end|>"])
        kinds[id_of["<|end|>"]] = USER_DEFINED
    if ending("</s>") and (ending("<|tool_response>") or ending("<|plamo:eos|>")):
        ends.discard(id_of["</s>"])
        kinds[id_of["</s>"]] = NORMAL
    return frozenset(ends)


def _special_tokens(name: str, texts: list[str], kinds: list[int]) -> Iterable[SpecialToken]:
    # Phi-3 is the one supported model whose special tokens swallow the white space after them; files do not say so.
    strips = "phi-3" in name.lower() or "phi3" in name.lower()
    for token, kind in enumerate(kinds):
        if kind & (CONTROL | USER_DEFINED | UNKNOWN):
            text = texts[token]
            yield SpecialToken(
                id=token,
                text=text,
                plain=not kind & (CONTROL | UNKNOWN),
                strip_right=strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
            )


def _digest(model: ModelFile) -> str:
    """SHA-256 (hexadecimal) of everything that decides ids: two files with the same digest tokenise alike."""
    digest = hashlib.sha256()
    for key in sorted(model.metadata):
        if key.startswith("tokenizer.ggml."):
            value = model.metadata[key]
            if isinstance(value, list):
                data = "\0".join(value).encode("utf-8", "surrogateescape")
            else:
                data = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            digest.update(f"{key}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
