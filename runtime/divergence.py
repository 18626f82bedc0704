"""How far two sets of logits lie apart, and how well logits predict tokens. Owns the measures; knows no models, files
or executors.

Logits are (n, V), row i about one position; all sums are in float64. Divergences are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def log_softmax(logits: ArrayLike) -> NDArray[np.float64]:
    """Natural logarithms of the softmax over the last axis."""
    x = np.asarray(logits, dtype=np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def token_losses(logits: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
    """(n): the negative log likelihood, in nats, of tokens[i] under row i of logits (n, V)."""
    chosen = np.asarray(tokens, dtype=np.int64)
    return -np.take_along_axis(log_softmax(logits), chosen[:, None], axis=1)[:, 0]


def kl_divergence(base: ArrayLike, other: ArrayLike) -> NDArray[np.float64]:
    """(n): KL(base || other) of each row's distributions, in nats; base is the one that is right."""
    p, q = log_softmax(base), log_softmax(other)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=-1))


def same_top(base: ArrayLike, other: ArrayLike) -> NDArray[np.bool_]:
    """(n): whether both rows have their greatest logit at the same token."""
    return np.asarray(np.argmax(base, axis=-1) == np.argmax(other, axis=-1))


def relative_rms(base: ArrayLike, other: ArrayLike) -> NDArray[np.float64]:
    """(n): rms of the rows' difference over the rms of base's row about its mean; a common shift counts."""
    a, b = np.asarray(base, dtype=np.float64), np.asarray(other, dtype=np.float64)
    spread = np.square(a - a.mean(axis=-1, keepdims=True)).mean(axis=-1)
    return np.asarray(np.sqrt(np.square(a - b).mean(axis=-1) / spread))


@dataclass(frozen=True)
class Divergence:
    """Summary over positions: KL divergence in nats, relative rms of logits, share of equal top tokens."""

    positions: int
    kl_mean: float
    kl_median: float
    kl_max: float
    relative_rms_median: float
    relative_rms_max: float
    same_top: float


def divergence(base: ArrayLike, other: ArrayLike) -> Divergence:
    """Compares logits (n, V) with those that are right, row by row. ValueError if the shapes differ."""
    a, b = np.asarray(base), np.asarray(other)
    if a.shape != b.shape or a.ndim != 2 or not len(a):
        raise ValueError(f"logits of shape {b.shape}, expected {a.shape} with at least one row")
    kl, rms = kl_divergence(a, b), relative_rms(a, b)
    return Divergence(
        positions=len(a),
        kl_mean=float(kl.mean()),
        kl_median=float(np.median(kl)),
        kl_max=float(kl.max()),
        relative_rms_median=float(np.median(rms)),
        relative_rms_max=float(rms.max()),
        same_top=float(same_top(a, b).mean()),
    )


def fork_before(found: Sequence[int], expected: Sequence[int], margins: Sequence[Any], least: float) -> int | None:
    """The first step at which two greedy continuations differ although the expected one's margin (top logit over the
    second) was never below `least` up to there; None if they agree that far. From the first smaller margin on, two
    right implementations may legitimately fork."""
    for step, (token, wanted, margin) in enumerate(zip(found, expected, margins, strict=False)):
        if margin < least:
            return None
        if token != wanted:
            return step
    return None
