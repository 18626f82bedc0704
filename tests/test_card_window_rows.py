"""Kernels on tensor cores that V4's attention and indexer have of their own, against float64, on the emulator: more
heads than a block takes, rings that wrap, lists of any length, scores so far apart that sums have to be scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from emulated_card import run
from numpy.typing import NDArray

from bloomery.gpu_worker.launches import KernelName, Launch, float_word
from bloomery.gpu_worker.lowering_deepseek4 import NO_ENDING

pytestmark = pytest.mark.timeout(120)
RING, SPAN, GROUPS, MOST = 80, 48, 200, 64


@dataclass
class Case:
    """Rows of one slot of two: `chosen` (R, MOST), ascending and then -1, or None; queries (R, heads, width)."""

    width: int
    heads: int
    positions: NDArray[np.int32]
    spread: float
    ratio: int = 4
    groups: bool = True
    lists: bool = True

    def __post_init__(self) -> None:
        rng, rows = np.random.default_rng(7), len(self.positions)
        self.slots = np.ones(rows, np.int32)
        self.q = (self.spread * rng.standard_normal((rows, self.heads, self.width))).astype(np.float32)
        self.window = rng.standard_normal((2, RING, self.width)).astype(np.float16)
        self.rows = rng.standard_normal((2, GROUPS, self.width)).astype(np.float16)
        self.sinks = rng.standard_normal(self.heads).astype(np.float32)
        self.scale = self.width**-0.5
        self.chosen: NDArray[np.int32] | None = None
        if self.lists:
            self.chosen = np.full((rows, MOST), -1, np.int32)
            for r, position in enumerate(self.positions):
                visible = (position + 1) // self.ratio
                some = np.sort(rng.permutation(visible)[: rng.integers(0, MOST + 1)])
                self.chosen[r, : len(some)] = some

    def wanted(self) -> NDArray[np.float64]:
        out = np.empty(self.q.shape)
        for r, position in enumerate(self.positions):
            keys = [self.window[1, np.arange(max(0, position + 1 - SPAN), position + 1) % RING]]
            if self.groups:
                some = np.arange((position + 1) // self.ratio) if self.chosen is None else self.chosen[r]
                keys.append(self.rows[1, some[some >= 0]])
            held = np.concatenate(keys).astype(np.float64)
            scores = np.concatenate([self.q[r] @ held.T * self.scale, self.sinks[:, None]], axis=1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[r] = weights[:, :-1] @ held / weights.sum(axis=1, keepdims=True)
        return out

    def _sources(self) -> tuple[int, ...]:
        """What kernels read: rows, queries, the window, groups."""
        _, heads, width = self.q.shape
        ring = (self.window.ctypes.data, RING * width, width, RING, SPAN)
        groups: tuple[int, ...] = (0,) * 7
        if self.groups:
            chosen = (0, 0, 0) if self.chosen is None else (self.chosen.ctypes.data, MOST, MOST)
            groups = (self.rows.ctypes.data, GROUPS * width, width, self.ratio, *chosen)
        words = (self.slots.ctypes.data, self.positions.ctypes.data, self.q.ctypes.data, heads * width, width, *ring)
        return (*words, *groups)

    def of_a_block(self) -> NDArray[np.float32]:
        rows, heads, width = self.q.shape
        out = np.full_like(self.q, np.nan)
        words = (
            *self._sources(),
            self.sinks.ctypes.data,
            heads,
            float_word(self.scale),
            out.ctypes.data,
            heads * width,
        )
        words += (width,)
        shared = (32 + 2 * 32) * width * 2 + 32 * 32 * 2 + 4 * 32 * 4
        run(
            Launch(
                KernelName("window_rows", f"attend_rows_{width}"), (-(-heads // 32), rows, 1), 256, words, "", shared
            )
        )
        return out

    def of_a_step(self) -> NDArray[np.float32]:
        rows, heads, width = self.q.shape
        out = np.full_like(self.q, np.nan)
        parts = np.full((rows, heads, 16, width), np.nan, np.float32)
        extremes = np.full((rows, heads, 16, 2), np.nan, np.float32)
        joined = (parts.ctypes.data, extremes.ctypes.data)
        words = (*self._sources(), heads, float_word(self.scale), *joined)
        shared = (2 * 16 + 32) * width * 2 + 16 * 32 * 12
        grid = (16, -(-heads // 16), rows)
        run(Launch(KernelName("window_cores", f"window_cores_{width}"), grid, 256, words, "", shared))
        words = (*joined, self.sinks.ctypes.data, heads, width, out.ctypes.data, heads * width, width, *NO_ENDING)
        run(Launch(KernelName("window", "join_window"), (heads, rows, 1), 256, words, ""))
        return out


POSITIONS = np.array([0, 5, 47, 48, 95, 300, 799], np.int32)
CASES = {
    "wide heads": Case(512, 4, POSITIONS, 1.0),
    "more heads than a block takes": Case(128, 40, POSITIONS, 1.0),
    "scores far apart": Case(128, 4, POSITIONS, 12.0),
    "a window alone": Case(128, 33, POSITIONS, 1.0, groups=False, lists=False),
    "every group": Case(256, 8, POSITIONS, 1.0, lists=False),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_of_rows(name: str) -> None:
    """A prompt block rounds queries and weights, a decode step does not."""
    case = CASES[name]
    wanted = case.wanted()
    worst, finest = (
        np.abs(found - wanted).max() / np.abs(wanted).max() for found in (case.of_a_block(), case.of_a_step())
    )
    print(name, worst, finest)
    assert finest < 5e-6
    # queries are rounded by one part in 2048, so scores of size 12 * 11 by 0.06
    assert worst < (0.01 if case.spread > 1 else 1e-3)


@pytest.mark.parametrize(("width", "heads"), [(64, 8), (128, 32), (64, 40)])
def test_scores(width: int, heads: int) -> None:
    """To the bits of f32, though products are of f16."""
    rng = np.random.default_rng(8)
    positions = np.array([0, 2, 3, 511, 516, 1063, 1064, 1199], np.int32)
    rows, ratio, most = len(positions), 4, 300
    slots = np.ones(rows, np.int32)
    q = rng.standard_normal((rows, heads, width)).astype(np.float32)
    weights = rng.standard_normal((rows, heads)).astype(np.float32)
    keys = rng.standard_normal((2, most, width)).astype(np.float16)
    for walkers in (1, 2, 5):
        scores = np.full((rows, most), np.nan, np.float32)
        places: tuple[Any, ...] = (slots, positions, q, heads * width, width, weights, heads, keys, most * width, width)
        words = tuple(place if isinstance(place, int) else place.ctypes.data for place in places)
        words += (heads, ratio, float_word(0.125), scores.ctypes.data, most)
        shared = (128 + 2 * (-(-heads // 16) * 16)) * width * 2
        run(Launch(KernelName("indexer_cores", f"score_cores_{width}"), (walkers, rows, 1), 256, words, "", shared))
        for r, position in enumerate(positions):
            visible = (position + 1) // ratio
            dots = np.maximum(q[r].astype(np.float64) @ keys[1, :visible].astype(np.float64).T, 0)
            wanted = 0.125 * (weights[r].astype(np.float64) @ dots)
            size = 0.125 * (np.abs(weights[r]).astype(np.float64) @ dots)
            assert (np.abs(scores[r, :visible] - wanted) <= 2e-6 * size + 1e-6).all()
            assert np.isnan(scores[r, visible:]).all()
