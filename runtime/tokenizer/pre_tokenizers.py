"""Pre-tokenizers: how a byte-pair vocabulary's text is cut into words before any merge.

Owns the named patterns and their matching. Knows nothing of tokens and merges.

A pre-tokenizer is a list of patterns applied one after the other, each inside every piece that the ones before left;
a match and the gap between two matches are pieces of their own. The measure is what llama.cpp does, which differs from
a regular-expression library in places: white space outside ASCII counts as a vertical tab, categories are those of one
Unicode version, an end of piece is an end of text for look-aheads. Therefore a text is first mapped to one byte per
code point (ASCII stays itself, the others become a byte that stands for the sets they belong to), and the patterns
run over these bytes: fast, linear, and independent of the Unicode tables of a library.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.tokenizer.unicode_categories import CODE_POINTS, WHITESPACE, categories

VERTICAL_TAB = 0x0B
BORDER = b"\xff"  # between two pieces

# Sets that a pattern may name as \p{...} inside brackets, besides the categories L N P M S; code points in hexadecimal.
_SETS = {
    # The cased letters as the first DeepSeek vocabularies list them.
    "cased": "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943",
    "marks": "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002",
    "uncased": "800-9FA5 AC00-D7FF",
    "kana_and_han": "4E00-9FA5 3040-30FF",
}

_ENGLISH_ENDINGS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LINES_AND_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK_V3 = (
    r"[\p{N}]{1,3}",
    r"[\p{kana_and_han}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _LINES_AND_SPACE,
)


def _words_and_digits(digits: str, letters: str = r"\p{L}") -> tuple[str, ...]:
    return (
        _ENGLISH_ENDINGS
        + rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|"
        + _LINES_AND_SPACE,
    )


@dataclass(frozen=True)
class PreTokenizer:
    """One family of `tokenizer.ggml.pre` names. `whole_words`: a word that is a token is taken without merging.
    `add_bos`: whether a text begins with BOS when the file does not say."""

    patterns: tuple[str, ...]
    names: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


FAMILIES = (
    PreTokenizer(
        (r"[\p{P}$+<=>^~|]+", _GPT2, r"[\p{N}]+", "[0-9][0-9][0-9]"),
        ("default",),
    ),
    PreTokenizer(
        (_GPT2,),
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum", "gigachat", "a.x-4.0"),
    ),
    PreTokenizer(
        (r"[\p{N}]", _GPT2),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    PreTokenizer(
        _words_and_digits(r"[\p{N}]{1,3}"),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        whole_words=True,
        add_bos=True,
    ),
    PreTokenizer(_words_and_digits(r"[\p{N}]{1,3}"), ("dbrx", "smaug-bpe")),
    PreTokenizer(
        _words_and_digits(r"[\p{N}]"),
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo", "f2llmv2"),
    ),
    PreTokenizer(_words_and_digits(r"[\p{N}]", r"\p{L}\p{M}"), ("qwen35",)),
    PreTokenizer(
        (r"[\r\n]", r"\s?[\p{cased}]+", r"\s?[\p{marks}]+", r"\s+\Z", r"[\p{uncased}]+", r"[\p{N}]+"),
        ("deepseek-llm",),
    ),
    PreTokenizer(
        (r"[\r\n]", r"\s?[\p{L}]+", r"\s?[\p{P}]+", r"[\p{uncased}]+", r"[\p{N}]"),
        ("deepseek-coder",),
    ),
    PreTokenizer(_DEEPSEEK_V3, ("deepseek-v3", "joyai-llm", "hunyuan-dense", "hy_v4")),
)

PRE_TOKENIZERS = {name: family for family in FAMILIES for name in family.names}


class Splitter:
    """Cuts a text into the words of one pre-tokenizer."""

    def __init__(self, family: PreTokenizer) -> None:
        classes, members = _classes(tuple(sorted(set(re.findall(r"\\p\{(\w+)\}", "".join(family.patterns))))))
        self._class_of_code_point = classes
        self._patterns = [_compiled(pattern, members) for pattern in family.patterns]

    def words(self, text: str) -> list[str]:
        """The words in order; joined they are the text. Takes time linear in its length. `text` has no surrogates."""
        if text.isascii():
            data = text.encode("ascii")
        else:
            code_points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
            data = self._class_of_code_point[code_points].tobytes()
        data = BORDER + data + BORDER
        for pattern in self._patterns:
            data = BORDER.join(pattern.split(data))  # gap, match, gap, ...: the pattern is a group
        ends = list(accumulate(len(piece) for piece in data.split(BORDER) if piece))
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _compiled(pattern: str, members: dict[str, str]) -> re.Pattern[bytes]:
    """`pattern` over classes, with the borders of pieces as ends of text: no set contains a border."""
    assert not re.search(r"\\S(?!\))|\((?!\?)|\.", pattern)  # what the following does not translate
    pattern = pattern.replace("[^", r"[^\xff").replace(r"(?!\S)", r"(?![^\s\xff])").replace(r"\Z", r"(?=\xff)")
    pattern = re.sub(r"\\p\{(\w+)\}", lambda name: members[name[1]], pattern)
    return re.compile(f"({pattern})".encode("latin-1"))


@functools.cache
def _classes(names: tuple[str, ...]) -> tuple[NDArray[np.uint8], dict[str, str]]:
    """The byte of every code point, (0x110000,) uint8, and for each set the bytes in it, as the inside of brackets."""
    table = categories()
    signature = np.zeros(CODE_POINTS, dtype=np.uint8)  # bit i: member of set names[i]
    for bit, name in enumerate(names):
        if len(name) == 1:
            signature[table == ord(name)] |= 1 << bit
        else:
            for span in _SETS[name].split():
                first, _, last = span.partition("-")
                signature[int(first, 16) : int(last or first, 16) + 1] |= 1 << bit
    signatures, classes = np.unique(signature[0x80:], return_inverse=True)
    assert len(signatures) < 0x80  # BORDER is none of them
    class_of = np.concatenate([np.arange(0x80), 0x80 + classes]).astype(np.uint8)
    class_of[[code_point for code_point in WHITESPACE if code_point >= 0x80]] = VERTICAL_TAB
    members = {}
    for bit, name in enumerate(names):
        ascii_members = [byte for byte in range(0x80) if signature[byte] >> bit & 1]
        others = [0x80 + index for index, value in enumerate(signatures) if value >> bit & 1]
        members[name] = "".join(f"\\x{byte:02x}" for byte in ascii_members + others)
    return class_of, members
