"""The tokenizer against llama.cpp: its own test pairs, recorded answers, and live where a wheel is installed."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from llama_vocabulary import LlamaVocabulary, require_library
from random_texts import random_texts
from vocabularies import (
    CHUNK,
    MODELS,
    NAMES,
    cases,
    edge_texts,
    expected,
    hashed,
    hashed_pieces,
    long_text,
    pairs,
    path_of,
)

from bloomery.runtime.errors import ModelFileError, RequestError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer import Tokenizer, joining
from bloomery.runtime.tokenizer.special_tokens import SpecialToken, SpecialTokens

EVERY = (*NAMES, *MODELS)
LIVE_TEXTS = {"deepseek-coder": 300, "deepseek-llm": 300, "tiny-deepseek2": 300}  # llama.cpp takes its time over these


@functools.lru_cache(maxsize=2)  # of all together: half a gigabyte
def tokenizer(name: str) -> Tokenizer:
    with ModelFile.open(path_of(name)) as model:
        return Tokenizer.from_model_file(model)


@pytest.mark.parametrize("name", NAMES, scope="module")
def test_pairs_of_llama_cpp(name: str) -> None:
    tests = pairs(name)
    assert len(tests) == (50 if name == "qwen35" else 46)
    for text, ids in tests:
        assert tokenizer(name).encode(text, add_special=False, parse_special=False) == ids, repr(text)


@pytest.mark.parametrize("name", EVERY, scope="module")
def test_vocabulary_facts(name: str) -> None:
    ours, answers = tokenizer(name), expected(name)
    assert ours.vocabulary == answers["vocabulary"]
    assert (ours.bos, ours.eos, ours.padding) == (answers["bos"], answers["eos"], answers["pad"])
    assert (ours.add_bos, ours.add_eos) == (answers["add_bos"], answers["add_eos"])
    assert sorted(ours.end_tokens) == answers["end_tokens"]
    assert (
        hashed_pieces(ours.vocabulary, lambda token, special: ours.piece(token, special=special)) == answers["pieces"]
    )


@pytest.mark.parametrize("name", EVERY, scope="module")
def test_ten_thousand_random_texts_as_recorded(name: str) -> None:
    ours = tokenizer(name)
    rows = [
        ours.encode(text, add_special=add_special, parse_special=parse_special)
        for text, add_special, parse_special in cases(name)
    ]
    chunks = [hashed(rows[start : start + CHUNK]) for start in range(0, len(rows), CHUNK)]
    wrong = [index for index, (a, b) in enumerate(zip(chunks, expected(name)["random_texts"], strict=True)) if a != b]
    assert not wrong, f"texts {[f'{index * CHUNK} to {index * CHUNK + CHUNK - 1}' for index in wrong]} differ"


@pytest.mark.parametrize("name", EVERY, scope="module")
def test_long_texts_as_recorded(name: str) -> None:
    ours = tokenizer(name)
    for text, answer in expected(name)["long_texts"].items():
        assert hashed([ours.encode(long_text(text))]) == answer, text


@pytest.mark.parametrize("name", EVERY, scope="module")
def test_edges_of_categories_as_recorded(name: str) -> None:
    ours = tokenizer(name)
    for text, answer in zip(edge_texts(), expected(name)["edge_texts"], strict=True):
        assert hashed([ours.encode(text, add_special=False, parse_special=False)]) == answer, f"{text[:20]!r}..."


@pytest.mark.parametrize("name", EVERY, scope="module")
def test_random_texts_live(name: str) -> None:
    """Other texts than the recorded ones, bytes that are no UTF-8 among them."""
    require_library()
    theirs, ours = LlamaVocabulary(path_of(name)), tokenizer(name)
    for index, text in enumerate(random_texts(LIVE_TEXTS.get(name, 1000), 4711, ["<s>", "<|im_end|>"])):
        data = text.encode()
        if index % 5 == 0:  # a piece out of the middle of characters
            data = data[index % 7 : len(data) - index % 3]
        escaped = data.decode("utf-8", "surrogateescape")
        for parse_special in (False, True):
            ids = theirs.encode(data, add_special=True, parse_special=parse_special)
            assert ours.encode(escaped, add_special=True, parse_special=parse_special) == ids, (name, data)
            special = index % 2 == 0
            if ours.vocabulary in (32000, 151936, 8192):  # the others clean up spaces, which would change a text
                assert ours.decode_bytes(ids, special=special) == theirs.detokenize(ids, special=special)
    theirs.close()


@pytest.mark.parametrize(
    ("name", "character"),
    [
        *(("llama-spm", character) for character in ("a", " ", "0", "=", "漢")),
        *(("qwen2", character) for character in ("a", " ", "\n")),
        ("deepseek-llm", "\n"),
        ("tiny-deepseek2", "0"),
    ],
)
def test_a_megabyte_of_one_character(name: str, character: str) -> None:
    text = character * (1_000_000 // len(character.encode()))
    ours = tokenizer(name)
    started = time.process_time()
    ids = ours.encode(text, add_special=False)
    assert (
        time.process_time() - started < 6.0
    )  # 0.1 to 0.9 s, 2.3 on a busy core of 2017; minutes if it grew by squares
    assert ours.decode(ids) == text


def test_a_long_word_lets_other_threads_run() -> None:
    """A daemon tokenises in a thread beside those that answer pings."""
    ours = tokenizer("qwen2")
    word = "".join(np.random.default_rng(7).choice(list("abcdefghijklmnopqrstuvwxyz"), 1_000_000))
    turns, done = [0], threading.Event()

    def other() -> None:
        while not done.wait(0.001):
            turns[0] += 1

    thread = threading.Thread(target=other)
    thread.start()
    ids = ours.encode(word)
    done.set()
    thread.join()
    assert turns[0] > 20  # 0 or 1 where the library keeps the lock
    assert ours.decode(ids) == word


def test_long_runs_live() -> None:
    """Pieces long enough for whole rounds, in the vocabulary that knows scores."""
    require_library()
    theirs, ours = LlamaVocabulary(path_of("llama-spm")), tokenizer("llama-spm")
    for text in (
        " " * 5003,
        "a" * 5001,
        "=" * 1999 + " " * 3000 + "x",
        "ab" * 3000,
        "\t \t" * 2000,
        "1" * 4000,
        "aaab" * 999,
    ):
        assert ours.encode(text) == theirs.encode(text.encode()), text[:4]
    theirs.close()


def test_long_natural_text_is_fast() -> None:
    ours = tokenizer("qwen2")
    text = long_text("code") + long_text("prose")
    started = time.process_time()
    ours.encode(text)
    assert len(text.encode()) / (time.process_time() - started) > 500_000  # bytes a second; 4 million when idle


def test_rounds_join_as_single_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining by whole rounds against the one pair after the other of which it is a shortcut; ties abound."""
    grown = []
    grow_runs = joining._grow_runs
    monkeypatch.setattr(joining, "_grow_runs", lambda *arguments: grown.append(grow_runs(*arguments)) or grown[-1])
    chance = np.random.default_rng(5)

    def word(letters: str, shortest: int, longest: int) -> str:
        return "".join(chance.choice(list(letters), chance.integers(shortest, longest)))

    shorter = 0
    for trial in range(200):
        letters = ("a", "ab", "abc")[trial % 3]
        tokens = {word(letters, 2, 7) for _ in range(chance.integers(3, 25))}
        if trial % 4 < 2:
            tokens |= {"a" * length for length in range(2, chance.integers(3, 12))}
        ranks = {token.encode(): int(chance.integers(0, (1, 2, 4, 100)[trial % 4])) for token in sorted(tokens)}
        texts = (
            word(letters, 1, 6) * 2000,
            word(letters, 2500, 2600),
            "".join(letter * int(chance.integers(1, 60)) for letter in word("aab", 200, 250)),
        )
        data = texts[trial // 3 % 3][:2500].encode()
        starts = list(range(len(data)))
        by_rounds = joining._join_in_rounds(data, starts, ranks)
        shorter += len(by_rounds) < len(starts)
        single = joining._join_one_by_one(data, starts, ranks)
        assert joining._join_one_by_one(data, by_rounds, ranks) == single, (trial, ranks, data[:20])
    assert shorter > 50
    assert sum(answer is not None for answer in grown) > 10
    assert sum(answer is None for answer in grown) > 10


def test_special_tokens_longest_first_wherever_they_start() -> None:
    tokens = SpecialTokens(
        [
            SpecialToken(1, "<a>", plain=True),
            SpecialToken(2, "a><b", plain=True),
            SpecialToken(3, "<b>", plain=False),
            SpecialToken(4, "[M]", plain=True, strip_left=True, strip_right=True),
            SpecialToken(5, "  ", plain=True, strip_right=True),
        ]
    )
    assert tokens.partition("<a><b>x<b>", True) == ["<", 2, ">x", 3]
    assert tokens.partition("<a> <b>x", False) == [1, " <b>x"]
    assert tokens.partition("x \n[M]\t y[M]", True) == ["x", 4, "y", 4]
    assert tokens.partition("a      b", True) == ["a", 5, "b"]  # white space taken with a token is not searched again
    assert tokens.partition("", True) == []


def write_vocabulary(path: Path, **changes: object) -> Path:
    """A small byte-pair vocabulary, with metadata changed (None: left out)."""
    tokens = [*(chr(byte) for byte in range(0x21, 0x7F)), "Ġ", "Ċ", "ab", "<|im_end|>", "Ġab"]
    metadata: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * len(tokens),
        "merges": ["a b", "Ġ ab", "c d", "a b"],
        "eos_token_id": 5,
        **changes,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def opened(path: Path) -> Tokenizer:
    with ModelFile.open(path) as model:
        return Tokenizer.from_model_file(model)


def test_incomplete_vocabulary(tmp_path: Path) -> None:
    """A merge whose result is no token is spelled out, a missing byte vanishes, as in llama.cpp."""
    ours = opened(write_vocabulary(tmp_path / "v.gguf"))
    assert [ours.token_text(token) for token in ours.encode("cd ab")] == ["c", "d", "Ġab"]
    assert ours.encode("é") == []
    assert ours.end_tokens == {5, ours.token_id("<|im_end|>")}
    assert ours.encode("a<|im_end|>", parse_special=True)[-1] == ours.token_id("<|im_end|>")
    assert len(ours.encode("<|im_end|>", parse_special=False)) == 10
    assert ours.bos == 11  # llama.cpp's default for a file that names none
    assert not ours.add_bos


def test_tokens_and_merges_that_are_no_utf8(tmp_path: Path) -> None:
    path = write_vocabulary(
        tmp_path / "v.gguf",
        merges=["a b", "? ?", "Ġ ab", "??? ?"],
        tokens=[*"abcdĠ", "ab", "?????"],
        token_type=None,
    )
    path.write_bytes(path.read_bytes().replace(b"?", b"\xff"))
    ours = opened(path)
    assert [ours.token_text(token) for token in ours.encode("ab c")] == ["ab", "Ġ", "c"]


def test_adds_bos_and_eos_as_the_file_says(tmp_path: Path) -> None:
    ours = opened(write_vocabulary(tmp_path / "v.gguf", add_bos_token=True, add_eos_token=True, bos_token_id=7))
    assert ours.encode("ab") == [7, ours.token_id("ab"), 5]
    assert ours.encode("ab", add_special=False) == [ours.token_id("ab")]
    assert ours.encode("") == [7, 5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "no-such-words"}, ("tokenizer.ggml.pre", "no-such-words", "qwen2")),
        ({"model": "bert"}, ("tokenizer.ggml.model", "bert")),
        ({"tokens": None}, ("tokenizer.ggml.tokens", "missing")),
        ({"merges": None}, ("tokenizer.ggml.merges", "missing")),
        ({"merges": ["a b", "ab"]}, ("tokenizer.ggml.merges", "'ab'", "rank 1")),
        ({"tokens": ["a", "b", "a"]}, ("tokenizer.ggml.tokens", "'a'", "twice", "0 and 2")),
        ({"token_type": [1, 1]}, ("tokenizer.ggml.token_type", "2 numbers")),
    ],
)
def test_refuses_what_it_cannot_do(tmp_path: Path, changes: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelFileError) as caught:
        opened(write_vocabulary(tmp_path / "v.gguf", **changes))
    for word in ("v.gguf", *words):
        assert word in str(caught.value)


def test_digest_tells_vocabularies_apart(tmp_path: Path) -> None:
    first = opened(write_vocabulary(tmp_path / "a.gguf"))
    same = opened(write_vocabulary(tmp_path / "b.gguf"))
    other = opened(write_vocabulary(tmp_path / "c.gguf", merges=["a b", "c d", "Ġ ab"]))
    assert first.digest == same.digest != other.digest


def test_unknown_token_is_an_error() -> None:
    for token in (-1, 151936):
        with pytest.raises(RequestError, match=str(token)):
            tokenizer("qwen2").piece(token)
