"""Which replica a request returns to: the one that has seen the longest beginning of its conversation.

Owns the keys of a conversation's beginnings and the memory of who answered them. Knows neither Ray nor HTTP.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

TEXT_PART = 64
"""Characters of a text prompt (16 tokens of a list of ids) that make one part."""
TOKEN_PART = 16
MAX_KEYS = 512
MAX_KNOWN = 1 << 18
_HEADS = ("system", "instructions", "tools", "input_prefix", "input_extra")


def beginnings(body: Any) -> tuple[str, ...]:
    """Keys of the beginnings of what a request's body says, shortest first; () if it says nothing.

    The shortest one ends with the first message of the user, so that a system message which all conversations share
    does not lead them to one replica. A later turn of a conversation has the keys of the turns before it, and more.
    """
    parts = _parts(body) if isinstance(body, dict) else []
    digest = hashlib.blake2b(digest_size=16)
    keys: list[str] = []
    for part in islice(parts, MAX_KEYS):
        digest.update(json.dumps(part, sort_keys=True).encode() + b"\n")
        keys.append(digest.hexdigest())
    return tuple(keys)


def _parts(body: dict[str, Any]) -> list[Any]:
    messages = body.get("messages") or body.get("input")
    if isinstance(messages, list) and any(isinstance(message, dict) for message in messages):
        said = [message for message in messages if message]
        users = (i for i, message in enumerate(said) if isinstance(message, dict) and message.get("role") == "user")
        first = next(users, 0) + 1
        head = {name: body[name] for name in _HEADS if name in body}
        return [[head, *said[:first]], *said[first:]]
    text = body.get("prompt") or messages or body.get("input_prefix") or body.get("content")
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], (str, list)):
        text = text[0]  # one prompt in a list
    if not isinstance(text, (str, list)) or not text:
        return []
    size = TEXT_PART if isinstance(text, str) else TOKEN_PART
    whole = len(text) // size * size or len(text)  # what grows at its end keeps its whole parts
    return [text[start : start + size] for start in range(0, whole, size)]


class Memory:
    """Who answered what, for as many beginnings as fit; the longest unused ones are forgotten first."""

    def __init__(self, limit: int = MAX_KNOWN) -> None:
        self._limit = limit
        self._known: OrderedDict[str, str] = OrderedDict()

    def record(self, keys: Iterable[str], replica: str) -> None:
        for key in keys:
            self._known[key] = replica
            self._known.move_to_end(key)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def find(self, keys: Sequence[str], replicas: Iterable[str]) -> str | None:
        """The replica that answered the longest of these beginnings, of those that are still there."""
        there = set(replicas)
        for key in reversed(keys):
            if (replica := self._known.get(key)) in there:
                return replica
        return None

    def order(self, keys: Sequence[str], replicas: Iterable[str]) -> list[str]:
        """All replicas, the best first: who knows the conversation, then by rendezvous hashing of its shortest
        beginning, which needs no memory: everyone who asks gets the same order, and when a replica goes, only its
        own conversations move."""
        there = sorted(set(replicas))
        if not keys:
            return there
        ranked = sorted(there, key=lambda name: hashlib.blake2b(f"{keys[0]} {name}".encode()).digest())
        if (known := self.find(keys, there)) is not None:
            ranked.remove(known)
            ranked.insert(0, known)
        return ranked
