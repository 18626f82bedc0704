"""The normative meaning of the ops that `deepseek4` and `deepseek41` add, in NumPy. Owns the mathematics; knows no
buffers, files or devices. Conventions are `reference_ops`'.

Legend: R rows, C residual copies, D model width, H heads, W elements of a key, N group rows. Arrays of one call have
one float dtype and results have it too. What belongs to one row of a step (its visible keys) is a loop over rows in
the executor; functions here that say "one row" take and give one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.reference_ops import Floats, Ints, descending, sigmoid

LEAST_ENGRAM_PRODUCT = 1e-6
LEAST_SCORE_SUM = 1e-20


def unit_norm(x: Floats, epsilon: float) -> Floats:
    """x (..., W) / sqrt(mean over W of x^2 + epsilon)."""
    return np.asarray(x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + x.dtype.type(epsilon)))


# -- hyper-connections ------------------------------------------------------------------------------------------------
def hyper_mix(
    streams: Floats, logits: Floats, base: Floats, scale: Floats, *, epsilon: float, hyper_epsilon: float, rounds: int
) -> tuple[Floats, Floats, Floats]:
    """pre (R, C), post (R, C) and mixing (R, C source, C destination) from streams (R, C, D) and the product of the
    mix matrix with them, logits (R, 2C + C*C). Without the latter two parts, logits (R, C), those are empty.

    Zhu et al., "Hyper-Connections", arXiv:2409.19606; Xie et al., "mHC", arXiv:2512.24880 (the Sinkhorn rounds).
    """
    rows, copies, width = streams.shape
    flat = streams.reshape(rows, copies * width)
    m = logits / np.sqrt(np.mean(np.square(flat), axis=-1, keepdims=True) + logits.dtype.type(epsilon))
    small = logits.dtype.type(hyper_epsilon)
    pre = sigmoid(m[:, :copies] * scale[0] + base[:copies]) + small
    if logits.shape[1] == copies:
        return pre, pre[:, :0], np.empty((rows, 0, 0), logits.dtype)
    post = 2 * sigmoid(m[:, copies : 2 * copies] * scale[1] + base[copies : 2 * copies])
    square = (m[:, 2 * copies :] * scale[2] + base[2 * copies :]).reshape(rows, copies, copies)
    return pre, np.asarray(post), sinkhorn(square, hyper_epsilon, rounds)


def sinkhorn(square: Floats, epsilon: float, rounds: int) -> Floats:
    """Nearly doubly stochastic matrices from logits (R, C, C): softmax of each row plus epsilon, then columns divided
    by their sums + epsilon, then rounds - 1 times rows and columns. The last division is by columns."""
    small = square.dtype.type(epsilon)
    shifted = np.exp(square - square.max(axis=2, keepdims=True))
    mixing = shifted / shifted.sum(axis=2, keepdims=True) + small
    mixing = mixing / (mixing.sum(axis=1, keepdims=True) + small)
    for _ in range(rounds - 1):
        mixing = mixing / (mixing.sum(axis=2, keepdims=True) + small)
        mixing = mixing / (mixing.sum(axis=1, keepdims=True) + small)
    return np.asarray(mixing)


def hyper_collapse(streams: Floats, pre: Floats) -> Floats:
    """(R, D): sum over copies of pre (R, C) times streams (R, C, D)."""
    return np.asarray(np.einsum("rj,rjd->rd", pre, streams))


def hyper_post(y: Floats, streams: Floats, post: Floats, mixing: Floats) -> Floats:
    """Copy i (R, C, D) = post[i] * y + sum over j of mixing[j, i] * streams[j]."""
    return np.asarray(post[:, :, None] * y[:, None, :] + np.einsum("rji,rjd->rid", mixing, streams))


def stream_mean(streams: Floats) -> Floats:
    """(R, D): the copies of streams (R, C, D) added in order, times 1/C."""
    total = streams[:, 0]
    for copy in range(1, streams.shape[1]):
        total = total + streams[:, copy]
    return np.asarray(total * streams.dtype.type(1.0 / streams.shape[1]))


# -- engram -----------------------------------------------------------------------------------------------------------
def engram_gate(streams: Floats, keys: Floats, key_weight: Floats, query_weight: Floats, epsilon: float) -> Floats:
    """(R, C): how much of the value each copy takes, for streams and keys (R, C, D) and weights (C, D)."""
    key = unit_norm(keys, epsilon) * key_weight
    query = unit_norm(streams, epsilon) * query_weight
    d = np.sum(key * query, axis=-1) / np.sqrt(streams.dtype.type(streams.shape[-1]))
    grown = np.sign(d) * np.sqrt(np.maximum(np.abs(d), d.dtype.type(LEAST_ENGRAM_PRODUCT)))
    return sigmoid(grown)


# -- compressed rows --------------------------------------------------------------------------------------------------
def pool_group(values: Floats, scores: Floats) -> Floats:
    """One pooled row (W): element by element the mean of values (P, W) weighted by exp of scores (P, W)."""
    weights = np.exp(scores - scores.max(axis=0))
    return np.asarray((weights * values).sum(axis=0) / weights.sum(axis=0))


def overlapping(values: Floats, scores: Floats, ratio: int) -> tuple[Floats, Floats]:
    """What a group of `ratio` positions with overlap pools: the first halves of the `ratio` positions before it and the
    second halves of its own. values, scores (P, 2W) are those of both groups' positions, or only the group's own if it
    is the first; results (P, W)."""
    half = values.shape[1] // 2
    before = len(values) - ratio
    return (
        np.concatenate([values[:before, :half], values[before:, half:]]),
        np.concatenate([scores[:before, :half], scores[before:, half:]]),
    )


# -- lightning indexer ------------------------------------------------------------------------------------------------
def index_scores(q: Floats, keys: Floats, weights: Floats, scale: float) -> Floats:
    """(N): sum over heads of weights (H) * scale * relu(q (H, W) . keys (N, W)) for one row.

    DeepSeek-V3.2-Exp, section "Lightning indexer"; the weights may be negative, relu comes first.
    """
    return np.asarray((weights * weights.dtype.type(scale)) @ np.maximum(q @ keys.T, 0))


def best_rows(scores: Floats, keep: int) -> NDArray[np.intp]:
    """Numbers of the `keep` greatest of scores (N), ascending; ties to the lower number; -inf is never kept."""
    chosen = descending(scores)[:keep]
    return np.sort(chosen[np.isfinite(scores[chosen])])


def best_blocks(scores: Floats, block: int, keep: int) -> NDArray[np.intp]:
    """Numbers of the `keep` best blocks of `block` rows, ascending: by the greatest of their scores (N), the last
    block, which holds the newest row, in any case."""
    count = -(-len(scores) // block)
    padded = np.full(count * block, -np.inf)
    padded[: len(scores)] = scores
    best = padded.reshape(count, block).max(axis=1)
    best[-1] = np.inf
    return np.sort(descending(best)[:keep])


def only_blocks(scores: Floats, blocks: NDArray[Any], block: int) -> Floats:
    """Scores (N) with -inf for rows outside the blocks."""
    inside = np.isin(np.arange(len(scores)) // block, blocks)
    return np.where(inside, scores, scores.dtype.type(-np.inf))


# -- attention --------------------------------------------------------------------------------------------------------
def sink_attention(q: Floats, keys: Floats, sinks: Floats, scale: float) -> Floats:
    """One row's q (H, W) over keys (N, W), which are the values too: (H, W). sinks (H) are logits without a value."""
    scores = (q @ keys.T) * q.dtype.type(scale)
    greatest = np.maximum(scores.max(axis=1), sinks)[:, None]
    weights = np.exp(scores - greatest)
    total = weights.sum(axis=1, keepdims=True) + np.exp(sinks[:, None] - greatest)
    return np.asarray((weights @ keys) / total)


# -- router -----------------------------------------------------------------------------------------------------------
def softplus_scores(logits: Floats) -> Floats:
    """sqrt(ln(1 + e^x)); x itself stands for the logarithm above 20."""
    bounded = np.minimum(logits, 20)
    return np.asarray(np.sqrt(np.where(logits > 20, logits, np.log1p(np.exp(bounded)))))


def softplus_route(
    logits: Floats, used: int, *, bias: Floats | None, table: Ints | None, normalise: bool, scale: float
) -> tuple[Ints, Floats]:
    """The experts of each row of logits (R, E) and their mixing weights, (R, used) each; see op SoftplusRouter. `table`
    (R, used) gives the experts outright."""
    scores = softplus_scores(logits)
    if table is not None:
        ids = table.astype(np.int64)
    else:
        selection = scores if bias is None else scores + bias
        last = selection.shape[1] - 1
        ids = last - descending(selection[:, ::-1])[:, :used]
    mix = np.take_along_axis(scores, ids, axis=1)
    if normalise:
        mix = mix / (mix.sum(axis=1, keepdims=True) + mix.dtype.type(LEAST_SCORE_SUM))
    return ids.astype(np.int32), np.asarray(mix * mix.dtype.type(scale))
