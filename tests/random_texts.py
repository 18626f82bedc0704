"""Random texts that are hard on a tokenizer: scripts, marks, emoji, controls, runs of blanks, digits, endings, special
tokens' texts, and pieces of all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_BLOCKS = (
    (0x21, 0x7E), (0xA0, 0xFF), (0x100, 0x24F), (0x250, 0x2FF), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F),
    (0x531, 0x58F), (0x591, 0x5F4), (0x600, 0x6FF), (0x700, 0x7BF), (0x800, 0x97F), (0x980, 0xDFF), (0xE01, 0xE5B),
    (0xE80, 0xFFF), (0x1000, 0x109F), (0x10A0, 0x11FF), (0x1200, 0x139F), (0x13A0, 0x167F), (0x1680, 0x18AF),
    (0x1AB0, 0x1AFF), (0x1C80, 0x1CFF), (0x1D00, 0x1DFF), (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x20FF),
    (0x2100, 0x218F), (0x2190, 0x23FF), (0x2400, 0x27BF), (0x27C0, 0x2BFF), (0x2C00, 0x2DFF), (0x2E00, 0x303F),
    (0x3040, 0x30FF), (0x3100, 0x33FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA63F), (0xA640, 0xABFF),
    (0xAC00, 0xD7FF), (0xE000, 0xE010), (0xF900, 0xFAFF), (0xFB00, 0xFDFF), (0xFE00, 0xFE6F), (0xFE70, 0xFEFF),
    (0xFF00, 0xFFFF), (0x10000, 0x1049F), (0x104A0, 0x10FFF), (0x11000, 0x11FFF), (0x16A00, 0x16FFF),
    (0x1D400, 0x1D7FF), (0x1E900, 0x1EEFF), (0x1F000, 0x1FAFF), (0x1FB00, 0x1FBFF), (0x20000, 0x20020),
    (0x2EBE0, 0x2EE70), (0x31340, 0x323C0),
    (0xE0001, 0xE007F), (0xE0100, 0xE01EF), (0x10FFF0, 0x10FFFF),
)  # fmt: skip
_BLANKS = " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2003\u2009\u200b\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
_WORDS = (
    "the", "The", "THE", "don", "I", "we", "you", "über", "naïve", "Straße", "слово", "λόγος", "שלום", "مرحبا", "नमस्ते",
    "สวัสดี", "你好", "世界", "こんにちは", "カタカナ", "안녕", "return", "self", "0x1F", "e.g", "http://a.b/c?d=e",
    "C++",    "snake_case", "CamelCase", "<b>", "</s>", "<s>", "<0x0A>", "▁", "Ġ", "\ufffd", "\u0301", "\0",
)  # fmt: skip
_ENDINGS = (
    "'s",
    "'S",
    "'t",
    "'T",
    "'re",
    "'RE",
    "'rE",
    "'ve",
    "'m",
    "'M",
    "'ll",
    "'LL",
    "'d",
    "'x",
    "''",
    "’s",
    "'ſ",
    "'K",
)
_EMOJI = ("😀", "👩‍👩‍👧", "🏳️‍🌈", "👍🏽", "🇩🇪", "☃️", "❤️", "1️⃣", "⌚")  # fmt: skip


def random_texts(count: int, seed: int, special: Sequence[str]) -> list[str]:
    """`count` texts, the same for the same arguments. `special`: texts of special tokens to mix in."""
    chance = random.Random(seed)

    def block() -> str:
        low, high = chance.choice(_BLOCKS)
        return "".join(chr(chance.randint(low, high)) for _ in range(chance.randint(1, 6)))

    def anything() -> str:
        point = chance.randrange(0x110000 - 0x800)
        return chr(point if point < 0xD800 else point + 0x800)

    def token() -> str:
        text = chance.choice(special) if special else "<s>"
        return text if chance.random() < 0.7 else text[: chance.randrange(len(text) + 1)]

    parts: tuple[tuple[int, Callable[[], str]], ...] = (
        (6, block),
        (1, anything),
        (5, lambda: "".join(chance.choice(_BLANKS) for _ in range(chance.randint(1, 4)))),
        (5, lambda: " " * chance.randint(1, 3)),
        (2, lambda: chance.choice(" \n\r\t") * chance.randint(1, 20)),
        (8, lambda: chance.choice(_WORDS)),
        (3, lambda: "".join(chance.choice("0123456789٣४௫½²Ⅷ①") for _ in range(chance.randint(1, 9)))),
        (3, lambda: chance.choice(_ENDINGS)),
        (2, lambda: chance.choice(_EMOJI)),
        (1, lambda: chr(chance.choice((*range(0x20), *range(0x7F, 0xA0))))),
        (3, lambda: "".join(chance.choice("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") for _ in range(chance.randint(1, 5)))),
        (2, lambda: chance.choice("aàAéz0.-=*#漢あ가") * chance.randint(2, 40)),
        (2, token),
    )
    weights = [weight for weight, _ in parts]
    makers = [maker for _, maker in parts]
    return [
        "".join(maker() for maker in chance.choices(makers, weights, k=chance.choice((1, 2, 3, 5, 8, 13, 21))))
        for _ in range(count)
    ]
