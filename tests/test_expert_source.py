"""Ways of experts' bytes to the card, over the emulated driver: nothing is overwritten before it was copied, whatever
is done late."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import emulated_driver
import numpy as np
import pytest
from emulated_driver import Cuda, EmulatedCard, Queue
from numpy.typing import NDArray

from bloomery.gpu_worker import expert_source
from bloomery.gpu_worker.expert_source import HostCopy, LockedSource, PinnedSource, page_ranges
from bloomery.gpu_worker.expert_source import expert_source as source_for

PIECE = 1024


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_driver.stand_in(monkeypatch.setattr)
    monkeypatch.setattr(expert_source, "_PIECE", PIECE)
    monkeypatch.setattr(expert_source, "_LOCK_PIECE", 8192)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[NDArray[np.uint8]]:
    """A mapped file of random bytes."""
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(1).bytes(100_000))
    with path.open("rb") as opened:
        yield np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def layers_of(file: NDArray[np.uint8], to: NDArray[np.uint8]) -> list[list[HostCopy]]:
    """Three layers of odd pieces of the file, each of which goes to its own place."""
    cuts = [0, 10, 5000, 5001, 30_000, 30_700, 44_000, 71_111, 99_999]
    copies = [HostCopy(to.ctypes.data + a, file[a:b]) for a, b in pairwise(cuts)]
    return [copies[:3], copies[3:4], copies[4:]]


@pytest.mark.parametrize("turns", ("copies", "launches"))
@pytest.mark.parametrize("way", ("locked", "pinned"))
def test_all_bytes_arrive(way: str, turns: str, file: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "turns", turns)
    monkeypatch.setenv("BLOOMERY_CARD_LOCK", "1" if way == "locked" else "0")
    card: Any = EmulatedCard()
    to = np.zeros(len(file), np.uint8)
    layers = layers_of(file, to)
    source = source_for(card, [copy for layer in layers for copy in layer], lambda *told: None)
    assert isinstance(source, LockedSource if way == "locked" else PinnedSource) and source.ahead == (way == "locked")
    stream = Cuda.Stream()
    for _ in range(2):
        to[:] = 0
        source.begin(layers)
        for _ in layers:
            source.issue(stream)
        stream.synchronize()
        source.end()
        assert (to[:99_999] == file[:99_999]).all() and to[99_999] == 0
    source.begin(layers)
    source.issue(stream)
    stream.synchronize()
    source.end()  # given up after a layer
    to[:] = 0
    source.begin(layers[1:])
    source.issue(stream)
    stream.synchronize()
    assert (to[5001:30_000] == file[5001:30_000]).all() and not to[:5001].any() and not to[30_000:].any()
    source.end()
    source.close()
    assert not emulated_driver.EmulatedLock.locked


def test_what_cannot_be_locked_goes_through_buffers(file: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_LOCK", "refuse")
    card: Any = EmulatedCard()
    source = source_for(card, [HostCopy(0, file)], lambda *told: None)
    assert isinstance(source, PinnedSource) and "cannot be locked" in source.what
    source.close()


def test_ranges_are_whole_pages_and_never_overlap(file: NDArray[np.uint8]) -> None:
    start = file.ctypes.data
    copies = [
        HostCopy(0, file[a:b]) for a, b in ((4097, 4100), (9000, 20_000), (0, 10), (4100, 8193), (60_000, 61_440))
    ]
    assert page_ranges(copies) == [(start, 20_480), (start + 57_344, 4096)]
    assert page_ranges([]) == []
