"""The ops that `deepseek4` and `deepseek41` add: hyper-connections, engrams, pooled rows, the indexer, attention over a
window and chosen rows, the softplus router.

Owns their fields and meaning in words, in the terms of `program.py`; their mathematics is `reference_deepseek4.py`.
C is the number of residual copies ("streams") of a row; a state kept per group of positions is a `states.GroupState`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.runtime.views import View


@dataclass(frozen=True)
class UnitNorm:
    """Each head of x separately: x / sqrt(mean(x^2) + epsilon), without a weight."""

    name: str
    x: View
    out: View
    epsilon: float


@dataclass(frozen=True)
class HyperMix:
    """What a sublayer does with the C residual copies of a row, from `logits` = fn @ (the copies one after the other).

    r = 1/sqrt(mean over all copies of streams^2 + epsilon); m = r * logits. pre (C) = sigmoid(m[:C] * scale[0] +
    base[:C]) + hyper_epsilon, post (C) = 2 sigmoid(m[C:2C] * scale[1] + base[C:2C]), mixing (C*C, source-major) =
    `rounds` Sinkhorn rounds of m[2C:] * scale[2] + base[2C:]. Without post and mixing logits has C elements only.
    """

    name: str
    streams: View
    logits: View
    pre: View
    post: View | None
    mixing: View | None
    base: str
    scale: str
    epsilon: float
    hyper_epsilon: float
    rounds: int


@dataclass(frozen=True)
class HyperCollapse:
    """out = sum over the copies j of pre[j] * streams[j]."""

    name: str
    streams: View
    pre: View
    out: View


@dataclass(frozen=True)
class HyperPost:
    """out[i] = post[i] * y + sum over j of mixing[j, i] * streams[j], for each copy i; out may be streams."""

    name: str
    y: View
    streams: View
    post: View
    mixing: View
    out: View


@dataclass(frozen=True)
class TokenWrite:
    """state[slot[r], position[r]] (i32, one element) = token[r]: the history that n-grams are made of."""

    name: str
    state: str


@dataclass(frozen=True)
class EngramRows:
    """ids[r] = table rows of the n-grams that end at row r, from its token and those before it in `tokens`.

    Site number `site` of the program's `engram` (`engram_hash.EngramHash`) has the constants. Depends on tokens alone,
    so it and the fetch may run far ahead of the layer.
    """

    name: str
    ids: View
    tokens: str
    site: int


@dataclass(frozen=True)
class TableRows:
    """out[r] = the rows ids[r] of the matrix `table`, dequantised, one after the other."""

    name: str
    ids: View
    out: View
    table: str


@dataclass(frozen=True)
class EngramGate:
    """out[j] = streams[j] + gate[j] * value, where gate[j] grows with the likeness of copy j and key j.

    d = (unit(keys[j]) * key_weight[j]) . (unit(streams[j]) * query_weight[j]) / sqrt(width), unit being UnitNorm with
    epsilon; gate[j] = sigmoid(sign(d) * sqrt(max(|d|, 1e-6))). key_weight, query_weight ne = (width, copies).
    """

    name: str
    streams: View
    keys: View
    value: View
    gate: View
    out: View
    key_weight: str
    query_weight: str
    epsilon: float


@dataclass(frozen=True)
class GroupPool:
    """Pools whole groups of `ratio` positions to one row: out[r] for rows whose position p completes a group ((p + 1)
    divisible by ratio), zero for others.

    Every row first puts [values, scores + bias[p % ratio]] into `state` (f32, 2*values.width elements). A group's row
    is, element by element, the mean of its positions' values weighted by exp(scores). With `overlap` a row of values
    has two halves: the first counts for the next group, the second for its own, so that a pooled row of half the width
    is made from 2*ratio positions; group 0 has none before it. bias ne = (values.width, ratio).
    """

    name: str
    values: View
    scores: View
    out: View
    state: str
    ratio: int
    overlap: bool
    bias: str | None


@dataclass(frozen=True)
class GroupWrite:
    """state[slot[r], p // ratio] = x[r], rounded to the cache type, for rows whose position p completes a group."""

    name: str
    x: View
    state: str
    ratio: int


@dataclass(frozen=True)
class IndexRows:
    """The group rows that a row of the step may attend to: out (i32) = their numbers, ascending, the rest -1.

    n = (position + 1) // ratio rows are visible. score[i] = sum over heads h of weights[h] * scale * max(0, q[h] .
    keys[i]); the out.width visible rows with the greatest scores are chosen (all if n is not more), ties to the lower
    row. Two-level choice: with `kept` the op also leaves there (i32, ascending, the rest -1) the numbers of the
    kept.width best blocks of `block` rows, by the greatest score inside, the block of row n - 1 in any case, ties to
    the lower block. With `within` (another op's kept) only rows of those blocks are candidates.
    """

    name: str
    q: View
    weights: View
    out: View
    keys: str
    ratio: int
    scale: float
    block: int = 0
    kept: View | None = None
    within: View | None = None


@dataclass(frozen=True)
class WindowAttention:
    """Attention over the last `span` positions of the row's slot and over group rows; a key is its own value.

    Keys of row r at position p: window[slot, max(0, p - span + 1) .. p]; and, if the layer has `groups`, the group rows
    in `chosen` (up to the first -1), or without `chosen` all (p + 1) // ratio visible ones. The head's sink joins the
    softmax as one more logit without a value: out[h] = sum over keys of e(scale * q[h] . key) * key / (sum of e +
    e(sinks[h])). With `block` the rows of a slot among the O rows, at positions a to z, see each other: all have the
    keys window[slot, max(0, a - span) .. z].
    """

    name: str
    q: View
    out: View
    window: str
    span: int
    groups: str | None
    chosen: View | None
    ratio: int
    sinks: str
    scale: float
    block: bool = False


@dataclass(frozen=True)
class SoftplusRouter:
    """Chooses ids.width of E experts with scores sqrt(softplus(logits)).

    Chosen in descending order of score + bias, ties to the higher id; or, with a `table` (I32, ne = (used, V)), the
    experts that stand there for the row's token. mix = scores of the chosen, divided by their sum + 1e-20 if
    `normalise`, times `scale`.
    """

    name: str
    logits: View
    ids: View
    mix: View
    bias: str | None
    table: str | None
    normalise: bool
    scale: float
