"""The normative meaning of every op, in NumPy. Owns the mathematics; knows no buffers, files, slots' bookkeeping or
devices.

Legend: R rows, H heads, W elements of a head, E experts, A experts used. All arrays of one call have one float dtype
(float32 or float64) and results have it too; weights come dequantised with the shape of the tensor reversed, so a
matrix is (outputs, inputs). Executors may sum in another order; they must agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int32]

# The least sum by which mixing weights are divided: the smallest normal float16, as llama.cpp's build_moe_ffn has it.
LEAST_MIX_SUM = 2.0**-14


def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """x (..., W) / sqrt(mean over W of x^2 + epsilon) * weight (W). Zhang and Sennrich, arXiv:1910.07467."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + x.dtype.type(epsilon)) * weight)


def matmul(x: Floats, weight: Floats, bias: Floats | None) -> Floats:
    """x (R, n) times weight (m, n), transposed, plus bias (m): (R, m)."""
    product = x @ weight.T
    return product if bias is None else product + bias


def head_matmul(x: Floats, weight: Floats) -> Floats:
    """out[r, h] = weight[h] @ x[r, h] for x (R, H, n), weight (H, m, n): (R, H, m)."""
    return np.asarray(np.matmul(x.transpose(1, 0, 2), weight.transpose(0, 2, 1)).transpose(1, 0, 2))


def rope(
    x: Floats,
    positions: Ints,
    frequencies: Sequence[float],
    magnitude: float,
    pairs: Literal["neighbours", "halves"],
) -> Floats:
    """Rotates pair i of each head of x (R, H, W) by the angle positions[r] * frequencies[i] (radians).

    A pair is (x[2i], x[2i+1]) for "neighbours" and (x[i], x[i+n]) for "halves", n = len(frequencies); elements from 2n
    on are copied. (a, b) becomes magnitude * (a cos - b sin, a sin + b cos). Angles are computed in float64 whatever
    the dtype of x: at great positions a float32 angle is wrong in the third digit. Su et al., arXiv:2104.09864.
    """
    n = len(frequencies)
    angles = positions[:, None].astype(np.float64) * np.asarray(frequencies, dtype=np.float64)
    cos = (np.cos(angles) * magnitude).astype(x.dtype)[:, None, :]
    sin = (np.sin(angles) * magnitude).astype(x.dtype)[:, None, :]
    out = x.copy()
    if pairs == "neighbours":
        first, second = slice(0, 2 * n, 2), slice(1, 2 * n, 2)
    else:
        first, second = slice(0, n), slice(n, 2 * n)
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def attention(q: Floats, keys: Floats, values: Floats, positions: Ints, scale: float) -> Floats:
    """Causal attention of rows of one slot: q (R, H, K), keys (P, G, K), values (P, G, V): (R, H, V).

    Row r sees cache positions 0..positions[r]; query head h uses group h // (H // G). Scores scale * q.key become
    weights by a softmax over the positions seen.
    """
    rows, count, width = q.shape
    groups = keys.shape[1]
    grouped = q.reshape(rows, groups, count // groups, width)
    scores = np.einsum("rgjk,pgk->rgjp", grouped, keys, optimize=True) * q.dtype.type(scale)
    hidden = np.arange(keys.shape[0])[None, :] > positions[:, None]
    scores = np.where(hidden[:, None, None, :], q.dtype.type(-np.inf), scores)
    mixed = np.einsum("rgjp,pgv->rgjv", softmax(scores), values, optimize=True)
    return np.asarray(mixed.reshape(rows, count, values.shape[2]))


def softmax(x: Floats) -> Floats:
    """exp(x) / sum of exp(x) over the last axis, shifted by the greatest element."""
    shifted = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return np.asarray(shifted / np.sum(shifted, axis=-1, keepdims=True))


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)); exact 0 where exp(-x) overflows."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def swiglu(gate: Floats, up: Floats, limit: float = 0.0) -> Floats:
    """silu(gate) * up = gate * sigmoid(gate) * up. Shazeer, arXiv:2002.05202.

    A limit > 0 first bounds gate from above and up on both sides (gpt-oss, arXiv:2508.10925; DeepSeek-V4)."""
    if limit > 0:
        gate, up = np.minimum(gate, gate.dtype.type(limit)), np.clip(up, -up.dtype.type(limit), up.dtype.type(limit))
    return np.asarray(gate * sigmoid(gate) * up)


def route(
    logits: Floats,
    used: int,
    *,
    bias: Floats | None,
    gating: Literal["softmax", "sigmoid"],
    normalise: bool,
    scale: float,
    groups: int,
    groups_used: int,
) -> tuple[Ints, Floats]:
    """The experts of each row of logits (R, E) and their mixing weights, (R, used) each; see op Router.

    Order of choice: descending selection (score + bias), ties to the lower id; groups likewise by the sum of their two
    best selections. Weights come from scores without bias. DeepSeek-V3, arXiv:2412.19437, section 2.1.2; llama.cpp
    build_moe_ffn.
    """
    scores = softmax(logits) if gating == "softmax" else sigmoid(logits)
    selection = scores if bias is None else scores + bias
    if groups > 1:
        by_group = selection.reshape(len(selection), groups, selection.shape[1] // groups)
        best_two = np.sort(by_group, axis=-1)[..., -2:].sum(axis=-1)
        stay = descending(best_two)[:, :groups_used]
        masked = np.full_like(by_group, -np.inf)
        np.put_along_axis(masked, stay[..., None], np.take_along_axis(by_group, stay[..., None], axis=1), axis=1)
        selection = masked.reshape(selection.shape)
    ids = descending(selection)[:, :used]
    mix = np.take_along_axis(scores, ids, axis=1)
    if normalise:
        mix = mix / np.maximum(mix.sum(axis=1, keepdims=True), mix.dtype.type(LEAST_MIX_SUM))
    return ids.astype(np.int32), np.asarray(mix * mix.dtype.type(scale))


def descending(x: Floats) -> NDArray[np.intp]:
    """Indices that sort the last axis from the greatest down, ties to the lower index."""
    return np.argsort(-x, axis=-1, kind="stable")


def routed_experts(
    x: Floats,
    ids: Ints,
    mix: Floats,
    expert: Callable[[int], tuple[Floats, Floats, Floats]],
    limit: float = 0.0,
) -> Floats:
    """out[r] = sum over a in rank order of mix[r, a] * down (silu(gate x[r]) * (up x[r])) with the matrices of expert
    ids[r, a]; `expert` gives (gate, up, down) of an id and is asked only for ids that occur. `limit` as in `swiglu`.
    A negative id ends a row's list."""
    parts = np.zeros((*ids.shape, x.shape[1]), dtype=x.dtype)
    ids = np.where(np.minimum.accumulate(ids, axis=1) < 0, -1, ids)
    for chosen in np.unique(ids[ids >= 0]):
        gate, up, down = expert(int(chosen))
        rows, ranks = np.nonzero(ids == chosen)
        taken = x[rows]
        parts[rows, ranks] = swiglu(taken @ gate.T, taken @ up.T, limit) @ down.T
    out = np.zeros_like(x)
    for rank in range(ids.shape[1]):
        out += np.where(ids[:, rank] < 0, 0, mix[:, rank])[:, None] * parts[:, rank]
    return out


def argmax(x: Floats) -> Ints:
    """Index of the greatest element of the last axis, ties to the lower index."""
    return np.asarray(np.argmax(x, axis=-1), dtype=np.int32)
