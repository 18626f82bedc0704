"""Each op's reference against the sentence that defines it, written out as plain loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from bloomery.runtime import reference_ops as ops

SEED = 20240611
Array = NDArray[np.float64]


@pytest.fixture
def rng() -> np.random.Generator:
    print("seed", SEED)
    return np.random.default_rng(SEED)


def close(found: NDArray[np.floating], expected: NDArray[np.floating]) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_rms_norm(rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((3, 2, 8)), rng.standard_normal(8)
    expected = np.empty_like(x)
    for r in range(3):
        for h in range(2):
            mean = sum(float(v) ** 2 for v in x[r, h]) / 8
            expected[r, h] = [v / math.sqrt(mean + 1e-3) * w for v, w in zip(x[r, h], weight, strict=True)]
    close(ops.rms_norm(x, weight, 1e-3), expected)


def test_matmul_and_head_matmul(rng: np.random.Generator) -> None:
    x, weight, bias = rng.standard_normal((3, 5)), rng.standard_normal((4, 5)), rng.standard_normal(4)
    by_hand = np.array([[sum(weight[m] * x[r]) + bias[m] for m in range(4)] for r in range(3)])
    close(ops.matmul(x, weight, bias), by_hand)
    close(ops.matmul(x, weight, None), by_hand - bias)
    heads, matrices = rng.standard_normal((3, 2, 5)), rng.standard_normal((2, 4, 5))
    expected = np.array([[matrices[h] @ heads[r, h] for h in range(2)] for r in range(3)])
    close(ops.head_matmul(heads, matrices), expected)


@pytest.mark.parametrize("pairs", ["neighbours", "halves"])
def test_rope_turns_pairs_as_complex_numbers(rng: np.random.Generator, pairs: str) -> None:
    x, positions = rng.standard_normal((3, 2, 8)), np.array([0, 5, 1000], np.int32)
    frequencies, magnitude = (1.0, 0.25, 0.01), 1.5
    out = ops.rope(x, positions, frequencies, magnitude, pairs)  # type: ignore[arg-type]
    for i, frequency in enumerate(frequencies):
        first, second = (2 * i, 2 * i + 1) if pairs == "neighbours" else (i, i + 3)
        turned = (x[..., first] + 1j * x[..., second]) * magnitude * np.exp(1j * positions * frequency)[:, None]
        close(out[..., first], turned.real)
        close(out[..., second], turned.imag)
    np.testing.assert_array_equal(out[..., 6:], x[..., 6:])


def test_rope_angles_do_not_suffer_from_float32(rng: np.random.Generator) -> None:
    x, positions = rng.standard_normal((1, 1, 64)), np.array([163839], np.int32)
    frequencies = tuple(10000.0 ** (-i / 32) for i in range(32))
    narrow = ops.rope(x.astype(np.float32), positions, frequencies, 1.0, "halves")
    wide = ops.rope(x.astype(np.float32).astype(np.float64), positions, frequencies, 1.0, "halves")
    np.testing.assert_allclose(narrow, wide, atol=5e-7)


def test_attention(rng: np.random.Generator) -> None:
    """4 query heads, 2 key/value heads; rows at positions 2 and 4 of 6 cached: what lies after is never seen."""
    q, keys, values = rng.standard_normal((2, 4, 3)), rng.standard_normal((6, 2, 3)), rng.standard_normal((6, 2, 5))
    keys[5], values[5] = 1e6, np.nan
    positions = np.array([2, 4], np.int32)
    found = ops.attention(q, keys[:5], values[:5], positions, 0.3)
    for r, position in enumerate(positions):
        for h in range(4):
            scores = [math.exp(0.3 * float(q[r, h] @ keys[p, h // 2])) for p in range(position + 1)]
            mixed = sum(s * values[p, h // 2] for p, s in enumerate(scores)) / sum(scores)
            close(found[r, h], np.asarray(mixed))


def test_softmax_and_sigmoid_at_extremes() -> None:
    close(ops.softmax(np.array([[1000.0, 1000.0, -1000.0]])), np.array([[0.5, 0.5, 0.0]]))
    close(ops.sigmoid(np.array([-2000.0, 0.0, 2000.0])), np.array([0.0, 0.5, 1.0]))
    close(
        ops.swiglu(np.array([-2000.0, 0.0, 3.0]), np.array([2.0, 2.0, 2.0])), np.array([0, 0, 6 / (1 + math.exp(-3))])
    )


def route_by_hand(
    logits: Array, used: int, bias: Array, gating: str, normalise: bool, scale: float, groups: int, stay: int
) -> tuple[list[int], list[float]]:
    """One row, with sorted() and sums."""
    if gating == "softmax":
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    selection = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    worth = [sum(sorted(selection[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-worth[g], g))[:stay]
    allowed = [e for e in range(len(scores)) if e // size in kept] if groups > 1 else list(range(len(scores)))
    chosen = sorted(allowed, key=lambda e: (-selection[e], e))[:used]
    total = max(sum(scores[e] for e in chosen), 2**-14) if normalise else 1.0
    return chosen, [scores[e] / total * scale for e in chosen]


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("groups", "stay"), [(1, 1), (4, 2), (4, 3), (12, 5)])
def test_route(rng: np.random.Generator, gating: str, normalise: bool, groups: int, stay: int) -> None:
    logits, bias = 3 * rng.standard_normal((50, 12)), rng.standard_normal(12)
    logits[10:20] -= 40  # scores that nearly vanish
    ids, mix = ops.route(
        logits,
        3,
        bias=bias,
        gating=gating,  # type: ignore[arg-type]
        normalise=normalise,
        scale=2.5,
        groups=groups,
        groups_used=stay,
    )
    assert ids.dtype == np.int32 and ids.shape == mix.shape == (50, 3)
    for r in range(50):
        chosen, weights = route_by_hand(logits[r], 3, bias, gating, normalise, 2.5, groups, stay)
        assert ids[r].tolist() == chosen
        close(mix[r], np.array(weights))


def test_ties_go_to_the_lower_expert_group_and_token() -> None:
    flat = np.zeros((1, 8))
    arguments = {"bias": None, "gating": "softmax", "normalise": True, "scale": 1.0}
    assert ops.route(flat, 3, groups=1, groups_used=1, **arguments)[0].tolist() == [[0, 1, 2]]  # type: ignore[arg-type]
    grouped = np.array([[0, 0, 0, 0, 1, 1, 1, 1.0]])
    ids, _ = ops.route(grouped, 3, groups=4, groups_used=2, **arguments)  # type: ignore[arg-type]
    assert ids.tolist() == [[4, 5, 6]]
    assert ops.argmax(np.array([[1.0, 7.0, 7.0], [2.0, 2.0, 0.0]])).tolist() == [1, 0]


def test_routed_experts_asks_only_for_chosen_experts(rng: np.random.Generator) -> None:
    x, matrices = rng.standard_normal((4, 6)), rng.standard_normal((8, 3, 6, 6))
    ids = np.array([[1, 5], [5, 1], [1, 7], [7, 5]], np.int32)
    mix = rng.random((4, 2))
    asked: list[int] = []

    def expert(e: int) -> tuple[Array, Array, Array]:
        asked.append(e)
        return matrices[e, 0], matrices[e, 1], matrices[e, 2]

    found = ops.routed_experts(x, ids, mix, expert)
    assert sorted(asked) == [1, 5, 7]
    for r in range(4):
        expected = np.zeros(6)
        for rank, e in enumerate(ids[r]):
            gate, up, down = matrices[e]
            hidden = np.array([g / (1 + math.exp(-g)) * u for g, u in zip(gate @ x[r], up @ x[r], strict=True)])
            expected += mix[r, rank] * (down @ hidden)
        close(found[r], expected)
