"""Measures between logits, against distributions whose figures can be had by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bloomery.runtime.divergence import (
    divergence,
    fork_before,
    kl_divergence,
    log_softmax,
    relative_rms,
    same_top,
    token_losses,
)


def test_two_coins() -> None:
    """KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 ln(3/2) + 1/4 ln(1/2); shifts of a row do not count."""
    loaded, fair = np.log([[0.75, 0.25]]), np.array([[100.0, 100.0]])
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl_divergence(loaded + 7, fair)[0] == pytest.approx(expected, rel=1e-12)
    assert kl_divergence(fair, loaded)[0] != pytest.approx(expected, rel=1e-2)
    assert token_losses(np.repeat(loaded - 3, 2, axis=0), [0, 1]) == pytest.approx([-math.log(0.75), math.log(4)])
    np.testing.assert_allclose(np.exp(log_softmax(np.array([1e4, 1e4, -1e4]))), [0.5, 0.5, 0.0])


def test_a_small_difference_is_half_its_variance() -> None:
    rng = np.random.default_rng(5)
    base = rng.standard_normal((1, 4000))
    shift = 1e-3 * rng.standard_normal((1, 4000))
    p = np.exp(log_softmax(base))
    variance = (p * shift**2).sum() - (p * shift).sum() ** 2
    assert kl_divergence(base, base + shift)[0] == pytest.approx(variance / 2, rel=1e-2)


def test_relative_rms_is_of_the_centred_row() -> None:
    base = np.array([[10.0, 12.0], [-1.0, 1.0]])
    assert relative_rms(base, base + np.array([[0.5, -0.5], [0.0, 0.0]])).tolist() == [0.5, 0.0]
    assert relative_rms(base, base + 1).tolist() == [1.0, 1.0]


def test_summary() -> None:
    base = np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0], [0.0, 5.0, 0.0]], np.float32)
    other = base.copy()
    other[1] = [0.0, 1.0, 2.0]
    result = divergence(base, other)
    assert result.positions == 3 and result.kl_median == pytest.approx(0) and result.kl_max > 0.5
    assert result.kl_mean == pytest.approx(result.kl_max / 3)
    assert result.same_top == pytest.approx(2 / 3)
    assert same_top(base, other).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="expected"):
        divergence(base, other[:2])


def test_a_fork_counts_only_before_the_first_small_margin() -> None:
    margins = [1.0, 0.4, 0.01, 1.0]
    assert fork_before([1, 2, 3, 4], [1, 2, 3, 4], margins, 0.05) is None
    assert fork_before([1, 9, 3, 4], [1, 2, 3, 4], margins, 0.05) == 1
    assert fork_before([1, 2, 9, 9], [1, 2, 3, 4], margins, 0.05) is None
    assert fork_before([1, 2, 9, 9], [1, 2, 3, 4], margins, 0.001) == 2
