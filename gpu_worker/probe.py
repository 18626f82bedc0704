"""`python -m bloomery.gpu_worker.probe`: one JSON line with the cards of this machine, their memory and their speed.

Owns what is asked of a card before a model is placed. It ends before anything is loaded: a context costs memory.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any, Final

import numpy as np

from bloomery.gpu_worker.compile_cache import find_compiler
from bloomery.gpu_worker.driver import Card, load_pycuda
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.memory_terms import CARD_CONTEXT_BYTES

_COPY_BYTES: Final = 256 << 20
_COPIES: Final = 8


def describe(number: int) -> dict[str, Any]:
    """One card, as `CardRoom` has it."""
    card = Card(number)
    try:
        with card.current("probing"):
            free, total = card.cuda.mem_get_info()
            much = free > 4 * _COPY_BYTES
            read, link = copy_rate(card) if much else 0.0, 0.0
            if much:
                with contextlib.suppress(card.cuda.Error):  # memory of the host that may not be pinned: not measured
                    link = link_rate(card)
    finally:
        card.close()
    return {
        "number": number,
        "name": card.name,
        "architecture": card.architecture,
        "total": total,
        "free": min(total, free + CARD_CONTEXT_BYTES),
        "read": read,
        "link": link,
    }


def copy_rate(card: Card) -> float:
    """Bytes a second that a copy inside the card reads and writes: what reading alone comes close to."""
    cuda = card.cuda
    memory = cuda.mem_alloc(2 * _COPY_BYTES)
    try:
        seconds = []
        for _ in range(_COPIES):
            begin, end = cuda.Event(), cuda.Event()
            begin.record(card.stream)
            cuda.memcpy_dtod_async(int(memory) + _COPY_BYTES, int(memory), _COPY_BYTES, card.stream)
            end.record(card.stream)
            end.synchronize()
            seconds.append(end.time_since(begin) / 1e3)
        return float(2 * _COPY_BYTES / min(seconds))
    finally:
        memory.free()


def link_rate(card: Card) -> float:
    """Bytes a second that come from pinned memory of the host."""
    cuda = card.cuda
    source = cuda.pagelocked_zeros(_COPY_BYTES, np.uint8)
    memory = cuda.mem_alloc(_COPY_BYTES)
    try:
        seconds = []
        for _ in range(_COPIES):
            begin, end = cuda.Event(), cuda.Event()
            begin.record(card.stream)
            cuda.memcpy_htod_async(memory, source, card.stream)
            end.record(card.stream)
            end.synchronize()
            seconds.append(end.time_since(begin) / 1e3)
        return float(_COPY_BYTES / min(seconds))
    finally:
        memory.free()


def main() -> int:
    try:
        cuda = load_pycuda()
        find_compiler()
        answer: dict[str, Any] = {"cards": [describe(number) for number in range(cuda.Device.count())]}
    except BloomeryError as error:
        answer = {"error": error.message, "hint": error.hint}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
