"""Tokens back to text: piece by piece, whole characters only, every byte accounted for."""

from __future__ import annotations

import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import cases, path_of

from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer import Detokenizer, Tokenizer

NAMES = ("llama-spm", "qwen2", "tiny-deepseek2")


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    with ModelFile.open(path_of(name)) as model:
        return Tokenizer.from_model_file(model)


def streamed(ours: Tokenizer, tokens: list[int], special: bool, continuation: bool) -> list[str]:
    detokenizer = Detokenizer(ours, special, continuation=continuation)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_the_beginning_of_a_surrogate_is_held_back() -> None:
    ours = tokenizer("llama-spm")  # token 3 is byte 0
    assert streamed(ours, [3 + 0xED, 3 + 0xA0], False, True) == ["", "", "\ufffd\ufffd"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stream_equals_decode(name: str, data: st.DataObject) -> None:
    ours = tokenizer(name)
    # Ids of single bytes come early in every vocabulary: half of the tokens are such, so characters fall apart.
    token = st.one_of(st.integers(0, 260), st.integers(0, ours.vocabulary - 1))
    tokens = data.draw(st.lists(token, max_size=30))
    special, continuation = data.draw(st.booleans()), data.draw(st.booleans())
    parts = streamed(ours, tokens, special, continuation)
    raw = ours.decode_bytes(tokens, special=special, continuation=continuation)
    assert "".join(parts) == ours.decode(tokens, special=special, continuation=continuation)
    assert "".join(parts) == raw.decode("utf-8", "replace")
    for count in range(len(parts)):  # nothing is held back that is whole, nothing leaves that is not
        so_far = ours.decode_bytes(tokens[:count], special=special, continuation=continuation)
        shown = "".join(parts[:count])
        whole = so_far.decode("utf-8", "replace")
        rest = whole.removeprefix(shown)
        # what is held back is one character's beginning; that of a surrogate is two errors to who sees the end
        assert whole == shown + rest and rest in ("", "\ufffd", "\ufffd\ufffd")
        assert rest != "\ufffd\ufffd" or re.search(rb"\xed[\xa0-\xbf]$", so_far)


@pytest.mark.parametrize("name", NAMES)
def test_characters_are_never_broken(name: str) -> None:
    ours = tokenizer(name)
    for text, _, parse_special in cases(name, 300):
        tokens = ours.encode(text, add_special=False, parse_special=parse_special)
        parts = streamed(ours, tokens, special=True, continuation=True)
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts), repr(text)
        assert parts[-1] == ""


def test_a_stream_of_emoji_bytes() -> None:
    ours = tokenizer("llama-spm")
    tokens = [ours.token_id(f"<0x{byte:02X}>") for byte in "é😀".encode()]
    assert None not in tokens
    assert streamed(ours, [token for token in tokens if token is not None], False, True) == [
        "",
        "é",
        "",
        "",
        "",
        "😀",
        "",
    ]


def test_invalid_bytes_show_as_soon_as_they_are_certain() -> None:
    ours = tokenizer("llama-spm")

    def byte(value: int) -> int:
        token = ours.token_id(f"<0x{value:02X}>")
        assert token is not None
        return token

    letter = ours.token_id("a")
    assert letter is not None
    assert streamed(ours, [byte(0xFF), letter], False, True) == ["\ufffd", "a", ""]
    assert streamed(ours, [byte(0xE2), byte(0x82), letter], False, True) == ["", "", "\ufffda", ""]
    assert streamed(ours, [byte(0xE2), byte(0x82)], False, True) == ["", "", "\ufffd"]
    assert streamed(ours, [byte(0x80), byte(0x80)], False, True) == ["\ufffd", "\ufffd", ""]


def test_the_space_before_a_text_and_before_its_continuation() -> None:
    ours = tokenizer("llama-spm")
    tokens = ours.encode("Hello world", add_special=False)
    assert ours.decode(tokens) == "Hello world"
    assert ours.decode(tokens, continuation=True) == " Hello world"
    assert "".join(streamed(ours, tokens, False, False)) == "Hello world"
    half = len(tokens) // 2
    assert ours.decode(tokens[:half]) + "".join(streamed(ours, tokens[half:], False, True)) == "Hello world"


def test_control_tokens_show_only_on_request() -> None:
    ours = tokenizer("qwen2")
    tokens = ours.encode("a<|im_end|>b", parse_special=True)
    assert len(tokens) == 3
    assert ours.decode(tokens) == "ab"
    assert ours.decode(tokens, special=True) == "a<|im_end|>b"
    assert ours.piece(tokens[1], special=False) == b""
