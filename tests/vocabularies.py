"""The vocabularies that tokenizer tests use, what llama.cpp makes of them, and how that was recorded.

`python tests/vocabularies.py` records tests/data/vocab/expected.json anew from an installed llama.cpp wheel. Everything
in it is llama.cpp's answer, hashed where it is long; a hash covers one chunk of texts, so that a difference is found.
"""

from __future__ import annotations

import functools
import hashlib
import json
import lzma
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from random_texts import random_texts

HERE = Path(__file__).parent
FOLDER = HERE / "data" / "vocab"
EXPECTED = FOLDER / "expected.json"
NAMES = ("deepseek-coder", "deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "qwen2", "qwen35")
MODELS = {
    "tiny-qwen3moe": HERE.parent / "launcher" / "demo" / "tiny-qwen3moe-Q4_K_M.gguf",
    "tiny-deepseek2": HERE / "data" / "models" / "tiny-deepseek2-Q3_K_M.gguf",
}
SEPARATOR = "\n__ggml_vocab_test__\n"
SEED, COUNT, CHUNK = 20261129, 10_000, 500


@functools.cache
def unpacked() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bloomery-vocab-")


@functools.cache
def path_of(name: str) -> Path:
    """The model file with this vocabulary."""
    if name in MODELS:
        return MODELS[name]
    path = Path(unpacked().name) / f"{name}.gguf"
    path.write_bytes(lzma.decompress((FOLDER / f"ggml-vocab-{name}.gguf.xz").read_bytes()))
    return path


def pairs(name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's own test texts with their ids, without BOS and special tokens."""
    with open(FOLDER / f"ggml-vocab-{name}.gguf.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split(SEPARATOR)[:-1]
    lines = (FOLDER / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    return [(text, [int(part) for part in line.split()]) for text, line in zip(texts, lines, strict=True)]


def long_text(name: str) -> str:
    """prose or code: several hundred kilobytes."""
    return lzma.decompress((FOLDER / f"{name}.txt.xz").read_bytes()).decode("utf-8")


def special_texts(name: str) -> list[str]:
    """Texts of special tokens to mix into random texts: the first and the last of the vocabulary's."""
    from bloomery.runtime.model_file import ModelFile
    from bloomery.runtime.tokenizer.vocabulary import Vocabulary

    with ModelFile.open(path_of(name)) as model:
        texts = [token.text for token in Vocabulary.from_model_file(model).special_tokens]
    return texts[:40] + texts[40:][-40:]


def cases(name: str, count: int = COUNT) -> Iterator[tuple[str, bool, bool]]:
    """(text, add_special, parse_special): the same for the same vocabulary, always."""
    for index, text in enumerate(random_texts(count, SEED, special_texts(name))):
        yield text, index // 2 % 2 == 1, index % 2 == 1


def edge_texts() -> list[str]:
    """Texts with every code point at which a Unicode category or a pre-tokenizer's set begins or ends, and both its
    neighbours, in several surroundings. A table with a wrong entry is wrong at some edge."""
    from bloomery.runtime.tokenizer.pre_tokenizers import _SETS
    from bloomery.runtime.tokenizer.unicode_categories import WHITESPACE, categories

    edges = {*np.flatnonzero(np.diff(categories())).tolist(), *WHITESPACE}
    for spans in _SETS.values():
        edges |= {int(number, 16) for span in spans.split() for number in span.split("-")}
    near = sorted({edge + offset for edge in edges for offset in (-1, 0, 1)})
    characters = [chr(point) for point in near if 0 < point < 0xD800 or 0xE000 <= point < 0x110000]
    texts = [f"a{c} {c}b1{c}2.{c}!\n{c}{c}'{c}s  {c}A{c}я{c}中{c}9\n" for c in characters]
    return ["".join(texts[start : start + 200]) for start in range(0, len(texts), 200)]


def hashed(rows: Iterable[list[int]]) -> str:
    """SHA-256 of lists of ids: each as its length and then the ids, int32 little-endian."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.array([len(row), *row], dtype="<i4").tobytes())
    return digest.hexdigest()


def hashed_pieces(size: int, piece: Callable[[int, bool], bytes]) -> str:
    """SHA-256 of the bytes of every token, special tokens shown and not, with lengths."""
    digest = hashlib.sha256()
    for token in range(size):
        for special in (True, False):
            data = piece(token, special)
            digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()


def expected(name: str) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads(EXPECTED.read_text())[name]
    return answers


def answers_of_llama_cpp(name: str) -> dict[str, Any]:
    from llama_vocabulary import LlamaVocabulary

    vocabulary = LlamaVocabulary(path_of(name))
    rows = [
        vocabulary.encode(text.encode(), add_special=add_special, parse_special=parse_special)
        for text, add_special, parse_special in cases(name)
    ]
    answers = {
        "vocabulary": vocabulary.size,
        "bos": vocabulary.token("bos"),
        "eos": vocabulary.token("eos"),
        "pad": vocabulary.token("pad"),
        "add_bos": vocabulary.adds("bos"),
        "add_eos": vocabulary.adds("eos"),
        "end_tokens": sorted(vocabulary.end_tokens()),
        "pieces": hashed_pieces(vocabulary.size, lambda token, special: vocabulary.piece(token, special=special)),
        "long_texts": {text: hashed([vocabulary.encode(long_text(text).encode())]) for text in ("prose", "code")},
        "edge_texts": [
            hashed([vocabulary.encode(text.encode(), add_special=False, parse_special=False)]) for text in edge_texts()
        ],
        "random_texts": [hashed(rows[start : start + CHUNK]) for start in range(0, COUNT, CHUNK)],
    }
    vocabulary.close()
    return answers


if __name__ == "__main__":
    EXPECTED.write_text(json.dumps({name: answers_of_llama_cpp(name) for name in (*NAMES, *MODELS)}, indent=1) + "\n")
