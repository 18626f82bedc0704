"""The gates of `deepseek41` and `deepseek4` are seen to fail: each fault below is planted in a program, in the
reference, in the engram hash or in the states, one at a time, and the figures must notice it.

Planted in V4.1's program: a sublayer's own mix for the lagged one, no lag at the end, no engram, rows or ids of the
other site, index keys or rows of another source, no rows, all rows, no list of its own, index key of the turned row, no
mask, blocks of another size, window one shorter, one longer, no turning back, pooled row turned at its last position,
no stretching, stretched windows, another scale of attention, no limit of routed or shared experts, no selection bias,
no scale, no normalisation, no shared expert, another epsilon, no mixing epsilon. In V4's: query heads not normed, no
bias by place (rows, index keys), no groups of 128, all rows for the indexer's, no table of experts, a lagged mix,
another final mix. In the reference: mixing transposed, 3 rounds, no factor 2, gate without its root, output groups
swapped, no sinks, relu after the weights, no relu, the newest rows, newest block not kept, bias in the mix, softplus
without its root, plain mean of a group, limit after silu, halves of overlapping groups swapped, own group only, an
empty group before the first that counts. In the hash: pad through the token map, oldest first, one position late, 32
bits. In the states: rings without room for a step, snapshots one row short (rings, groups).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deepseek_data import executor_of, figures41, program_of, tiny4, tiny41

from bloomery.runtime import engram_hash, reference, reference_deepseek4
from bloomery.runtime.ops_deepseek4 import (
    EngramGate,
    EngramRows,
    GroupPool,
    HyperCollapse,
    HyperMix,
    IndexRows,
    SoftplusRouter,
    TableRows,
    UnitNorm,
    WindowAttention,
)
from bloomery.runtime.program import Add, Op, Program, RmsNorm, Rope, RoutedExperts, SwiGlu
from bloomery.runtime.reference_ops import head_matmul, swiglu
from bloomery.runtime.states import GroupState, RingState

Edit = Callable[[Op], Op | None]

BAND_41 = 1e-6  # float64 against stored float32
BAND_4 = 2e-5  # llama.cpp in float32
TOKENS_41, TOKENS_4 = 24, 140
LEAST = 10  # a fault must be seen by at least so many times the band


def error(version: str, program: Program | None = None) -> float:
    """Greatest error of logits."""
    if version == "4.1":
        path, stored, count, tokens = tiny41("a"), figures41("tiny-deepseek41-a"), TOKENS_41, "ids"
    else:
        path, stored, count, tokens = tiny4(), figures41("deepseek4-F32"), TOKENS_4, "tokens"
    executor = executor_of(path, program=program)
    for name, buffer in executor.program.buffers.items():  # a program without an op may read what is not written
        executor._buffers[name] = np.zeros((count, buffer.width), np.float64 if buffer.dtype == "f32" else np.int32)
    found = executor.logits(stored[tokens][:count])
    with np.errstate(invalid="ignore"):
        worst = np.abs(found - stored["logits"][:count]).max()
    return float(np.nan_to_num(worst, nan=np.inf))


def band(version: str) -> float:
    return BAND_41 if version == "4.1" else BAND_4


def on(kind: type[Any], change: Callable[[Any], Op | None], layer: int | None = None) -> Edit:
    """Changes (or with None drops) every op of a kind, or that of one layer."""
    prefix = "" if layer is None else f"blk.{layer}."
    return lambda op: change(op) if isinstance(op, kind) and op.name.startswith(prefix) else op


def other_layer(field: str, there: int) -> Callable[[Any], Op]:
    """The state that `field` names, of another layer."""

    def change(op: Any) -> Op:
        name = getattr(op, field)
        return replace(op, **{field: f"blk.{there}." + name.split(".", 2)[2]})  # type: ignore[no-any-return]

    return change


def frequencies(of: int) -> tuple[float, ...]:
    ops = program_of(tiny41("a")).ops
    return next(op.frequencies for op in ops if isinstance(op, Rope) and op.name == f"blk.{of}.rope_q")


def turned_alike(op: Rope, of: int) -> Rope:
    sign = -1.0 if op.name.endswith("rope_back") else 1.0
    return replace(op, frequencies=tuple(sign * f for f in frequencies(of)))


def own_mix(op: HyperCollapse) -> HyperCollapse:
    here = {"attn_collapse": "pre_attn", "ffn_collapse": "pre_ffn"}.get(op.name.split(".")[-1])
    return replace(op, pre=replace(op.pre, buffer=here)) if here and ".out" not in op.pre.buffer else op


PROGRAM_FAULTS: dict[str, tuple[str, Edit]] = {
    "own mix": ("4.1", on(HyperCollapse, own_mix)),
    "no lag at the end": (
        "4.1",
        lambda op: replace(op, pre=replace(op.pre, buffer="pre_attn.out")) if op.name == "output_collapse" else op,  # type: ignore[call-arg]
    ),
    "no engram": ("4.1", on(EngramGate, lambda op: None)),
    "no engram at layer 4": ("4.1", on(EngramGate, lambda op: None, 4)),
    "rows of the other site": ("4.1", on(EngramRows, lambda op: replace(op, site=0))),
    "the other site's ids": (
        "4.1", on(TableRows, lambda op: replace(op, ids=replace(op.ids, buffer="engram_ids.1")))
    ),
    "keys of another source": ("4.1", on(IndexRows, other_layer("keys", 4), 7)),
    "rows of another source": ("4.1", on(WindowAttention, other_layer("groups", 2), 4)),
    "no rows": ("4.1", on(WindowAttention, lambda op: replace(op, groups=None, chosen=None), 8)),
    "all rows": ("4.1", on(WindowAttention, lambda op: replace(op, chosen=None), 3)),
    "no list of its own": ("4.1", on(IndexRows, lambda op: None, 7)),
    "no mask": ("4.1", on(IndexRows, lambda op: replace(op, within=None))),
    "blocks of another size": ("4.1", on(IndexRows, lambda op: replace(op, block=op.block and 3))),
    "window one shorter": ("4.1", on(WindowAttention, lambda op: replace(op, span=op.span - 1))),
    "window one longer": ("4.1", on(WindowAttention, lambda op: replace(op, span=op.span + 1))),
    "not turned back": ("4.1", lambda op: None if op.name.endswith("rope_back") else op),
    "turned at the last position": ("4.1", on(Rope, lambda op: replace(op, behind=0))),
    "no stretching": ("4.1", lambda op: turned_alike(op, 0) if isinstance(op, Rope) else op),
    "stretched windows": (
        "4.1", lambda op: turned_alike(op, 2) if isinstance(op, Rope) and op.name[4] in "01" else op
    ),
    "another scale": ("4.1", on(WindowAttention, lambda op: replace(op, scale=op.scale * 1.01))),
    "no limit": ("4.1", on(RoutedExperts, lambda op: replace(op, limit=0.0), 3)),
    "no limit of the shared expert": ("4.1", on(SwiGlu, lambda op: replace(op, limit=0.0))),
    "no bias": ("4.1", on(SoftplusRouter, lambda op: replace(op, bias=None))),
    "no scale": ("4.1", on(SoftplusRouter, lambda op: replace(op, scale=1.0))),
    "not normalised": ("4.1", on(SoftplusRouter, lambda op: replace(op, normalise=False))),
    "no shared expert": ("4.1", on(Add, lambda op: None)),
    "another epsilon": ("4.1", on(RmsNorm, lambda op: replace(op, epsilon=1e-5))),
    "no mixing epsilon": ("4.1", on(HyperMix, lambda op: replace(op, hyper_epsilon=1e-9))),
    "query heads not normed": ("4", on(UnitNorm, lambda op: None)),
    "no bias by place": ("4", on(GroupPool, lambda op: replace(op, bias=None))),
    "no bias by place for index keys": (
        "4", lambda op: replace(op, bias=None) if op.name.endswith("indexer_compressor_pool") else op  # type: ignore[call-arg]
    ),
    "no groups of 128": (
        "4", on(WindowAttention, lambda op: replace(op, groups=None) if op.ratio == 128 else op)
    ),
    "all rows for the indexer's": ("4", on(WindowAttention, lambda op: replace(op, chosen=None))),
    "no table of experts": ("4", on(SoftplusRouter, lambda op: replace(op, table=None))),
    "lagged mix": (
        "4",
        lambda op: replace(op, pre=replace(op.pre, buffer="pre_attn")) if op.name.endswith("4.ffn_collapse") else op,  # type: ignore[call-arg]
    ),
    "another final mix": (
        "4", lambda op: replace(op, base="blk.5.attn_sinks.weight") if op.name == "output_hc_mix" else op  # type: ignore[call-arg]
    ),
}  # fmt: skip


def test_without_a_fault() -> None:
    assert error("4.1") < BAND_41
    assert error("4") < BAND_4


@pytest.mark.parametrize("fault", PROGRAM_FAULTS)
def test_faults_in_the_program(fault: str) -> None:
    version, edit = PROGRAM_FAULTS[fault]
    program = program_of(tiny41("a") if version == "4.1" else tiny4())
    edited = tuple(op for op in (edit(op) for op in program.ops) if op is not None)
    assert edited != program.ops, "the fault was not planted"
    faulty = object.__new__(Program)  # past the checks of a program, which some faults would not pass
    faulty.__dict__.update(program.__dict__ | {"ops": edited})
    assert error(version, faulty) > LEAST * band(version)


def test_index_key_of_the_turned_row() -> None:
    """The key's product moves behind the turning of the row."""
    program = program_of(tiny41("a"))
    ops = list(program.ops)
    for layer in (2, 4, 5):
        names = [op.name for op in ops]
        turning = ops.pop(names.index(f"blk.{layer}.rope_compressed"))
        ops.insert(names.index(f"blk.{layer}.indexer.attn_k"), turning)
    assert error("4.1", replace(program, ops=tuple(ops))) > LEAST * BAND_41


r4 = reference_deepseek4


def _post(streams: Any, logits: Any, base: Any, scale: Any, **rest: Any) -> Any:
    pre, post, mixing = r4.hyper_mix(streams, logits, base, scale, **rest)
    return pre, post / 2, mixing


def _biased_mix(logits: Any, used: int, **given: Any) -> Any:
    ids, _ = r4.softplus_route(logits, used, **given)
    mix = np.take_along_axis(r4.softplus_scores(logits) + given["bias"], ids, axis=1)
    return ids, mix / mix.sum(axis=1, keepdims=True) * given["scale"]


def _rootless(logits: Any, used: int, **given: Any) -> Any:
    return r4.softplus_route(np.log(np.expm1(np.logaddexp(0, logits) ** 2)), used, **given)


def _linear_gate(streams: Any, keys: Any, key_weight: Any, query_weight: Any, epsilon: float) -> Any:
    d = (r4.unit_norm(keys, epsilon) * key_weight * r4.unit_norm(streams, epsilon) * query_weight).sum(-1)
    return 1 / (1 + np.exp(-d / np.sqrt(streams.shape[-1])))


def _late_limit(gate: Any, up: Any, limit: float = 0.0) -> Any:
    if not limit:
        return swiglu(gate, up)
    return np.minimum(swiglu(gate, np.ones_like(up)), limit) * np.clip(up, -limit, limit)


def _swapped_halves(values: Any, scores: Any, ratio: int) -> Any:
    half = values.shape[1] // 2
    return r4.overlapping(np.roll(values, half, axis=1), np.roll(scores, half, axis=1), ratio)


def _own_group_only(values: Any, scores: Any, ratio: int) -> Any:
    return r4.overlapping(values[-ratio:], scores[-ratio:], ratio)


def _nothing_counts(values: Any, scores: Any, ratio: int) -> Any:
    """The first group pools with `ratio` empty positions of score 0 before it."""
    if len(values) == ratio:
        values, scores = (np.concatenate([np.zeros_like(x), x]) for x in (values, scores))
    return r4.overlapping(values, scores, ratio)


REFERENCE_FAULTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "mixing transposed": (
        "4.1", "hyper_post", lambda y, s, post, mixing: r4.hyper_post(y, s, post, mixing.transpose(0, 2, 1))
    ),
    "3 rounds": ("4.1", "hyper_mix", lambda *a, **k: r4.hyper_mix(*a, **(k | {"rounds": 3}))),
    "no factor 2": ("4.1", "hyper_mix", _post),
    "gate without its root": ("4.1", "engram_gate", _linear_gate),
    "output groups swapped": ("4.1", "head_matmul", lambda x, weight: head_matmul(x[:, ::-1], weight)),
    "no sinks": ("4.1", "sink_attention", lambda q, keys, sinks, scale: r4.sink_attention(q, keys, sinks - 99, scale)),
    "relu after the weights": (
        "4.1", "index_scores",
        lambda q, keys, weights, scale: np.maximum(weights[:, None] * (q @ keys.T), 0).sum(0) * scale,
    ),
    "no relu": ("4.1", "index_scores", lambda q, keys, weights, scale: weights @ (q @ keys.T) * scale),
    "the newest rows": ("4.1", "best_rows", lambda scores, keep: np.arange(max(0, len(scores) - keep), len(scores))),
    "newest block not kept": (
        "4.1", "best_blocks",
        lambda scores, block, keep: r4.best_blocks(np.append(scores, -np.inf), block, keep + 1)[:keep],
    ),
    "bias in the mix": ("4.1", "softplus_route", _biased_mix),
    "softplus without its root": ("4.1", "softplus_route", _rootless),
    "plain mean of a group": ("4.1", "pool_group", lambda values, scores: values.mean(axis=0)),
    "limit after silu": ("4.1", "swiglu", _late_limit),
    "halves swapped": ("4", "overlapping", _swapped_halves),
    "own group only": ("4", "overlapping", _own_group_only),
    "nothing before the first group counts": ("4", "overlapping", _nothing_counts),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFERENCE_FAULTS)
def test_faults_in_the_reference(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version, function, faulty = REFERENCE_FAULTS[fault]
    monkeypatch.setattr(reference, function, faulty)
    assert error(version) > LEAST * band(version)


def _contexts(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    genuine = engram_hash.EngramHash.contexts
    return lambda self, history: change(self, genuine(self, history))


HASH_FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "pad through the map": (
        "contexts", _contexts(lambda h, c: np.where(c == h.pad, np.uint64(h.token_map[h.pad]), c))
    ),
    "oldest first": ("contexts", _contexts(lambda h, c: c[:, ::-1])),
    "one position late": ("contexts", _contexts(lambda h, c: np.roll(c, 1, axis=1))),
    "32 bits": (
        "rows_of_contexts",
        lambda h, site, c, genuine=engram_hash.EngramHash.rows_of_contexts: genuine(
            replace(h, sites=tuple(replace(s, multipliers=tuple(m % 2**32 for m in s.multipliers)) for s in h.sites)),
            site, c,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", HASH_FAULTS)
def test_faults_in_the_hash(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, faulty = HASH_FAULTS[fault]
    monkeypatch.setattr(engram_hash.EngramHash, function, faulty)
    assert error("4.1") > LEAST * BAND_41


def after_restore() -> float:
    """Greatest error after a snapshot at an odd position went to a fresh executor."""
    stored = figures41("tiny-deepseek41-a")
    executor, other = (executor_of(tiny41("a")) for _ in range(2))
    executor.logits(stored["ids"][:15])
    other.restore(0, executor.snapshot(0, 15))
    found = other.logits(stored["ids"][15:TOKENS_41], start=15)
    return float(np.abs(found - stored["logits"][15:TOKENS_41]).max())


def test_faults_in_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    assert after_restore() < BAND_41
    with monkeypatch.context() as patch:
        patch.setattr(RingState, "rows", lambda self, context, spare: min(context, self.span))
        assert error("4.1") > LEAST * BAND_41
    ring, group = RingState.live, GroupState.live
    for kind, faulty in (
        (RingState, lambda self, positions: ring(self, positions)[:-1]),
        (RingState, lambda self, positions: ring(self, positions)[1:]),
        (GroupState, lambda self, positions: group(self, positions)[:-1]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "live", faulty)
            assert after_restore() > LEAST * BAND_41
