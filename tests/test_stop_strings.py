"""Stop strings against a splitter that looks at the whole text again after each character.

Planted once and seen to fail: a border table of zeros; the match forgotten between pieces; text after a stop string let
through; the shorter of two stop strings that end together; more held back than the longest possible beginning.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bloomery.runtime.stop_strings import StopStrings


def naive(text: str, stops: list[str]) -> tuple[str, str]:
    """What passes and which stop string ended it ("" if none)."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, ""


TEXT = st.text(alphabet="abé🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=6), max_size=4)


@settings(max_examples=600, deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8))
@example("aab", ["ab"], [1, 2])
@example("aaab", ["aab"], [1, 2, 3])
@example("ab", ["b", "ab"], [])
@example("abab", ["ababb"], [1, 2, 3])
def test_any_cut_gives_what_the_whole_text_gives(text: str, stops: list[str], cuts: list[int]) -> None:
    splitter = StopStrings(tuple(stops))
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    passed = ""
    expected, found = naive(text, stops)
    for begin, end in pairwise(bounds):
        passed += splitter.push(text[begin:end])
        assert expected.startswith(passed), "a part of a stop string leaked"
        so_far, stopped = naive(text[:end], stops)
        if not stopped:
            possible = {length for stop in stops for length in range(len(stop)) if so_far.endswith(stop[:length])}
            assert len(so_far) - len(passed) == max(possible, default=0), "exactly the possible beginning is held back"
    rest = splitter.finish()
    assert (passed + rest, splitter.found) == (expected, found)
    assert not (found and rest)


def test_nothing_is_held_back_without_stop_strings() -> None:
    splitter = StopStrings(())
    assert splitter.push("abc") == "abc" and splitter.finish() == "" and splitter.found == ""


def test_nothing_passes_after_a_stop_string() -> None:
    splitter = StopStrings(("##",))
    assert [splitter.push(piece) for piece in ("a#", "#b", "c")] == ["a", "", ""]
    assert splitter.found == "##" and splitter.finish() == ""


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(AssertionError):
        StopStrings(("a", ""))


def test_a_long_text_takes_linear_time() -> None:
    splitter = StopStrings(("a" * 1000 + "b",))
    passed = sum(len(splitter.push("a" * 10)) for _ in range(10000))
    assert passed == 100000 - 1000 and splitter.finish() == "a" * 1000
