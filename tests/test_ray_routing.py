"""Requests return to the replica that has seen the longest beginning of their conversation."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from bloomery.launcher.ray_routing import MAX_KEYS, Memory, beginnings

SYSTEM = {"role": "system", "content": "be brief"}
NAMES = ["a", "b", "c"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", ["messages", "input"])
def test_a_later_turn_has_the_keys_of_the_turns_before_it(name: str) -> None:
    first = beginnings({name: [SYSTEM, user("one")]})
    second = beginnings({name: [SYSTEM, user("one"), assistant("two"), user("three")], "temperature": 0.5})
    assert len(first) == 1 and len(second) == 3 and second[:1] == first


def test_a_system_message_alone_is_no_beginning() -> None:
    one, two = (beginnings({"messages": [SYSTEM, user(text)]}) for text in ("one", "two"))
    assert not set(one) & set(two)


def test_what_the_template_shows_before_the_messages_counts() -> None:
    plain = {"messages": [user("one")]}
    others = [plain, plain | {"system": "s"}, plain | {"tools": [{"name": "f"}]}, plain | {"system": "t"}]
    assert len({beginnings(body) for body in others}) == len(others)


@pytest.mark.parametrize("text", ["x" * 63 + "y" * 500, list(range(500))])
def test_a_prompt_that_grows_keeps_its_keys(text: Any) -> None:
    short, long = beginnings({"prompt": text[:200]}), beginnings({"prompt": text})
    assert len(short) >= 3 and long[: len(short)] == short
    assert beginnings({"prompt": [text]}) == long, "one prompt in a list is that prompt"


@pytest.mark.parametrize(
    "body", [None, 5, [], {}, {"messages": []}, {"messages": 7}, {"prompt": ""}, {"prompt": None}, {"prompt": {}}]
)
def test_bodies_that_say_nothing_have_no_keys(body: Any) -> None:
    assert beginnings(body) == ()


def test_odd_bodies_have_keys_and_their_number_is_bounded() -> None:
    assert beginnings({"messages": [None, 3, {"role": []}, {"content": {"a": [1]}}]})
    assert beginnings({"messages": [assistant("no user")]})
    assert len(beginnings({"prompt": "x" * (1 << 20)})) == MAX_KEYS


def test_the_longest_beginning_wins_and_a_gone_replica_is_passed_over() -> None:
    memory = Memory()
    memory.record(("k1",), "a")
    memory.record(("k1", "k2", "k3"), "b")
    memory.record(("k1",), "c")
    assert memory.find(("k1", "k2", "k9"), NAMES) == "b"
    assert memory.find(("k1", "k2", "k9"), ["a", "c"]) == "c"
    assert memory.find(("k9",), NAMES) is None
    assert memory.order(("k1", "k2"), NAMES)[0] == "b"


def test_without_memory_everyone_agrees_and_only_a_gone_replica_s_conversations_move() -> None:
    dice = random.Random(3)
    keys = [(f"{dice.random()}",) for _ in range(600)]
    before = {key: Memory().order(key, NAMES) for key in keys}
    assert before == {key: Memory().order(key, reversed(NAMES)) for key in keys}
    shares = Counter(order[0] for order in before.values())
    assert all(150 < shares[name] < 250 for name in NAMES), shares
    for key, order in before.items():
        assert Memory().order(key, ["a", "b"]) == [name for name in order if name != "c"]


def test_memory_is_bounded_and_forgets_what_was_not_used() -> None:
    memory = Memory(limit=3)
    memory.record(("k1", "k2", "k3"), "a")
    memory.record(("k1",), "b")
    memory.record(("k4",), "c")
    assert [memory.find((key,), NAMES) for key in ("k1", "k2", "k3", "k4")] == ["b", None, "a", "c"]
