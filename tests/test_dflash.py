"""The block draft `dflash` against the published program's figures in float64, on the reference and the host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from activation_rounding import RoundingExecutor
from deepseek_data import draft_program, executor_of, figures41, tapped_program, tiny41
from in_process import InProcessExecutor
from numpy.typing import NDArray

from bloomery.runtime.dequantised_weights import DequantisedWeights
from bloomery.runtime.executor import StepRows
from bloomery.runtime.reference import ReferenceExecutor

FIGURES = figures41("tiny-deepseek41-draft")
IDS: NDArray[np.int32] = figures41("tiny-deepseek41-a")["ids"].astype(np.int32)
PROMPT, BLOCK, MASK = 5, 5, 5
STORED = 1e-6  # float64 against stored float32
STORED_CONFIDENCE = 2.0**-22  # likewise: half a unit in the last place of numbers from 4 to 8, as the greatest are
ALONE, ALONE_CONFIDENCE = 5e-5, 2e-5
"""The band that comes with the figures (data/oracle/deepseek41/README.md) for logits and confidences in float32.
Here it holds for the draft by itself, on the features that are stored."""
FLOAT32 = 1e-5
"""Relative rms of a row, where the target's features are float32 sums too: what a model's float32 sums in another order
cost, as for other architectures. The features' own error, which `ALONE` does not know, enters the draft and makes up
half of what is seen (logits 6e-5, 3e-5 without; std 4.6)."""


def draft_rows(
    first: int, features: NDArray[Any], token: int = 0, block: int = BLOCK, slot: int = 0, before: Any = 0
) -> StepRows:
    """Commits positions first... (with the tokens `before`) and, if `block`, drafts behind them after `token`."""
    committed = len(features)
    count = committed + block
    tokens = np.full(count, MASK, np.int32)
    tokens[:committed] = before
    tokens[committed : committed + 1] = token
    inputs = np.zeros((count, features.shape[1]), features.dtype)
    inputs[:committed] = features
    index = np.arange(count, dtype=np.int32)
    slots = np.full(count, slot, np.int32)
    return StepRows(tokens, slots, index + np.int32(first), index[committed:], {"features": inputs})


@cache
def target_features(wide: bool = True) -> NDArray[Any]:
    """What the target leaves for the draft, in the reference's own precision."""
    executor = executor_of(tiny41("a"), program=tapped_program(), wide=wide, context=64)
    n = len(FIGURES["features"])
    index = np.arange(n, dtype=np.int32)
    step = executor.step(StepRows(IDS[:n], np.zeros(n, np.int32), index, index[-1:]))
    features = executor._buffers["features"]
    np.testing.assert_array_equal(step.reports["features"], features.astype(np.float32))
    return features


@cache
def weights(wide: bool) -> DequantisedWeights:
    return DequantisedWeights(draft_program(), np.float64 if wide else np.float32, 1 << 30)


def draft_executor(wide: bool = True) -> ReferenceExecutor:
    arguments: Any = {"dtype": np.float64, "cache_type": "f64"} if wide else {}
    executor = ReferenceExecutor(draft_program(), context=64, **arguments)
    executor._weights = weights(wide)
    return executor


def test_the_target_reports_what_the_draft_reads() -> None:
    assert np.abs(target_features() - FIGURES["features"]).max() < STORED


def drafted(
    wide: bool = True, block: int = BLOCK, count: int = 34, features: NDArray[Any] | None = None
) -> Iterator[tuple[int, ReferenceExecutor]]:
    """A reference executor after each of the last `count` drafts of the figures, and which one it was."""
    executor, features = draft_executor(wide), target_features(wide) if features is None else features
    first = len(FIGURES["positions"]) - count
    executor.step(draft_rows(0, features[: PROMPT + first], block=0))
    for number, position in list(enumerate(FIGURES["positions"]))[first:]:
        executor.step(draft_rows(int(position), features[position : position + 1], int(IDS[position + 1]), block))
        yield number, executor


def off_by(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Greatest relative rms of a row."""
    return float(np.sqrt(((found - expected) ** 2).mean(axis=1) / (expected**2).mean(axis=1)).max())


def confidence_off(found: NDArray[Any], number: int) -> float:
    """Greatest error of a draft's confidences in units of |conf_proj| * rms of h: if the inputs of a dot are off by a
    relative rms of e, independently, the dot is off by e such units."""
    unit = np.linalg.norm(weights(True)["conf_proj.weight"]) * np.sqrt((FIGURES["h"][number] ** 2).mean())
    return float(np.abs(found - FIGURES["confidence"][number]).max() / unit)


def check(number: int, logits: NDArray[Any], confidence: NDArray[Any], h: NDArray[Any], alone: bool) -> None:
    """A draft in float32; `alone`: on the stored features."""
    place = np.flatnonzero(FIGURES["logits_positions"] == FIGURES["positions"][number])
    expected = FIGURES["logits"][place[0]] if len(place) else None
    if alone:
        assert np.abs(confidence - FIGURES["confidence"][number]).max() < ALONE_CONFIDENCE
        assert expected is None or np.abs(logits - expected).max() < ALONE
    assert confidence_off(confidence, number) < FLOAT32
    assert off_by(h, FIGURES["h"][number]) < FLOAT32
    assert expected is None or off_by(logits, expected) < FLOAT32


def values(executor: ReferenceExecutor) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Logits, confidences, h."""
    buffers = executor._buffers
    return buffers["logits.out"], buffers["confidence.out"][:, 0], buffers["confidence_input.out"][:, :256]


def test_drafts_of_the_reference() -> None:
    """Target and draft in float64: the published program's proposals and numbers, but for how they are stored."""
    logits_at = FIGURES["logits_positions"].tolist()
    for number, executor in drafted():
        position = int(FIGURES["positions"][number])
        np.testing.assert_array_equal(executor._buffers["argmax.out"][:, 0], FIGURES["proposals"][number])
        logits, confidence, h = values(executor)
        assert np.abs(confidence - FIGURES["confidence"][number]).max() < STORED_CONFIDENCE
        assert np.abs(h - FIGURES["h"][number]).max() < STORED
        if position in logits_at:
            assert np.abs(logits - FIGURES["logits"][logits_at.index(position)]).max() < STORED


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with its target"])
def test_drafts_of_the_reference_in_float32(alone: bool) -> None:
    for number, executor in drafted(wide=False, features=FIGURES["features"] if alone else None):
        np.testing.assert_array_equal(executor._buffers["argmax.out"][:, 0], FIGURES["proposals"][number])
        check(number, *values(executor), alone)


def test_a_narrower_draft_is_another() -> None:
    """The rows of a block see each other: the first rows of a shorter block are not those of a longer one."""
    for number, executor in drafted(block=3, count=3):
        assert np.abs(executor._buffers["confidence_input.out"][:, :256] - FIGURES["h"][number][:3]).max() > 1e-3


def test_committed_in_blocks_or_one_by_one() -> None:
    """And a draft that was made in between leaves nothing: the same logits to float64 sums."""
    *_, (_, one) = drafted(count=10)
    features, last = target_features(), int(FIGURES["positions"][-1])
    whole = draft_executor()
    whole.step(draft_rows(0, features[: last + 1], int(IDS[last + 1])))
    assert np.abs(whole._buffers["logits.out"] - one._buffers["logits.out"]).max() < 1e-12


@pytest.mark.parametrize(("ranks", "alone"), [(1, True), (3, False)], ids=["alone", "with its target"])
def test_drafts_of_the_host(ranks: int, alone: bool) -> None:
    """F32 weights (so that nothing is rounded but sums): every proposal, and numbers in the bands of float32."""
    features = FIGURES["features"] if alone else target_features(wide=False)
    host = InProcessExecutor(draft_program("f32"), context=64, max_rows=16, ranks=ranks)
    host.step(draft_rows(0, features[:PROMPT], block=0))
    for number, position in enumerate(FIGURES["positions"]):
        rows = draft_rows(int(position), features[position : position + 1], int(IDS[position + 1]))
        logits, chosen = host.step(rows)
        np.testing.assert_array_equal(chosen, FIGURES["proposals"][number])
        h, confidence = host.buffers["confidence_input.out"][:BLOCK, :256], host.buffers["confidence.out"][:BLOCK, 0]
        check(number, logits, confidence, h, alone)


def test_a_quantised_draft_of_the_host() -> None:
    """Q8_0 projections and MXFP4 experts, as published. The host lies no farther from exact products than a reference
    that rounds activations as ggml does, within a factor for chance, is much nearer to that one, and is that one where
    no value crossed a rounding boundary."""
    program, features = draft_program(), FIGURES["features"]
    host = InProcessExecutor(program, context=64, max_rows=16, ranks=2)
    rounding = RoundingExecutor(program, context=64)
    rounding._weights = weights(False)
    figures = [("host", "rounding"), ("host", "exact"), ("rounding", "exact")]
    apart: dict[tuple[str, str], list[float]] = {pair: [] for pair in figures}
    first = 0
    for number, position in enumerate(FIGURES["positions"][:16]):
        rows = draft_rows(first, features[first : position + 1], int(IDS[position + 1]))
        first = int(position) + 1
        host.step(rows)
        rounding.step(rows)
        found = {
            "host": host.buffers["confidence_input.out"][:BLOCK, :256],
            "rounding": values(rounding)[2],
            "exact": FIGURES["h"][number],
        }
        for one, other in figures:
            apart[one, other].append(off_by(found[one], found[other]))
    from_rounding, from_exact, between = (np.array(apart[pair]) for pair in figures)
    print(np.median(from_rounding), from_rounding.min(), np.median(from_exact), np.median(between))
    assert np.median(from_exact) < 1.25 * np.median(between)
    assert np.median(from_rounding) < 0.25 * np.median(between)
    assert from_rounding.min() < FLOAT32
