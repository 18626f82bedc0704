"""Architecture `deepseek2`: DeepSeek V2, V2-Lite and V3 (arXiv:2405.04434, arXiv:2412.19437). Latent attention (MLA),
leading dense layers, then routed experts with shared ones beside them. Knows no device.

Attention: each position keeps one latent vector c (attn_kv_a_mqa, normed) and one rotated key part that all heads
share. Two forms of file, the same function:

* attn_k_b and attn_v_b apart: a head's key is [k_b^T c, rotated], so instead of building keys the query is taken
  through k_b ("absorbed"), attention runs over the latents as if there were one key/value head, and v_b turns each
  head's mixed latent into its value.
* attn_kv_b undivided (older files): every head's keys and values are built and cached whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bloomery.runtime.architectures.builder import ProgramBuilder, heads
from bloomery.runtime.architectures.hyper_parameters import (
    Mixture,
    Trunk,
    positive,
    read_mixture,
    read_trunk,
    refuse,
)
from bloomery.runtime.architectures.layers import feed_forward, routed_experts
from bloomery.runtime.architectures.rotary import Rotary, read_rotary
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Add, Attention, CacheWrite, CopyHeads, HeadMatMul, Program, Rope, View


@dataclass(frozen=True)
class LatentAttention:
    """q_rank: width of the query's latent, 0 if queries are projected at once (V2-Lite). kv_rank: width of c.
    plain, rotated, value: elements of each head's unrotated and rotated key parts and of its value.
    scale: factor of query-key products. absorbed: the file has attn_k_b and attn_v_b."""

    heads: int
    q_rank: int
    kv_rank: int
    plain: int
    rotated: int
    value: int
    rotary: Rotary
    scale: float
    absorbed: bool

    @property
    def key(self) -> int:
        return self.plain + self.rotated


@dataclass(frozen=True)
class Deepseek2Hyper:
    """dense_layers: so many leading layers have a plain feed-forward of hidden width dense_width.
    shared_width: hidden width of all shared experts together."""

    trunk: Trunk
    attention: LatentAttention
    dense_layers: int
    dense_width: int
    mixture: Mixture
    shared_width: int


def read_hyper(model: ModelFile) -> Deepseek2Hyper:
    trunk = read_trunk(model)
    dense_layers = model.hyper("leading_dense_block_count", int, 0)
    if not 0 <= dense_layers <= trunk.layers:
        raise refuse(model, "leading_dense_block_count", dense_layers, f"0 to block_count, {trunk.layers}")
    if model.hyper("attention.temperature_scale", float, 0.0) != 0.0:
        raise refuse(model, "attention.temperature_scale", model.hyper("attention.temperature_scale", float), "0")
    expert_width = positive(model, "expert_feed_forward_length")
    mixture = read_mixture(
        model,
        expert_width,
        gating=model.hyper("expert_gating_func", int, 0) or _unstated_gating(trunk),
        normalise=model.hyper("expert_weights_norm", bool, False),
        scale=model.hyper("expert_weights_scale", float, 0.0) or 1.0,
    )
    return Deepseek2Hyper(
        trunk=trunk,
        attention=read_attention(model, trunk),
        dense_layers=dense_layers,
        dense_width=positive(model, "feed_forward_length") if dense_layers else 0,
        mixture=mixture,
        shared_width=expert_width * positive(model, "expert_shared_count"),
    )


def _unstated_gating(trunk: Trunk) -> int:
    """The router of files without expert_gating_func: softmax (1), but sigmoid (2) for GLM 4.7 Flash, which llama.cpp
    tells by its size."""
    return 2 if trunk.layers in (47, 48) and trunk.vocabulary == 154880 else 1


def read_attention(model: ModelFile, trunk: Trunk) -> LatentAttention:
    count = positive(model, "attention.head_count")
    absorbed = all(f"{model.architecture}.attention.{key}_length_mla" in model.metadata for key in ("key", "value"))
    suffix = "_mla" if absorbed else ""
    key = positive(model, f"attention.key_length{suffix}", None if absorbed else trunk.width // count)
    value = positive(model, f"attention.value_length{suffix}", None if absorbed else trunk.width // count)
    rotated = positive(model, "rope.dimension_count")
    if rotated >= key:
        raise refuse(model, "rope.dimension_count", rotated, f"less than attention.key_length{suffix}, {key}")
    # llama.cpp tells the V2-Lite form by the number of layers; the tensor says the same and more
    lite = model.has("blk.0.attn_q.weight")
    multiplier = _log_multiplier(model)
    rotary = read_rotary(model, rotated, yarn_grows=multiplier == 0.0)
    return LatentAttention(
        heads=count,
        q_rank=0 if lite else positive(model, "attention.q_lora_rank"),
        kv_rank=positive(model, "attention.kv_lora_rank"),
        plain=key - rotated,
        rotated=rotated,
        value=value,
        rotary=rotary,
        scale=softmax_scale(rotary, multiplier) / math.sqrt(key),
        absorbed=absorbed,
    )


def _log_multiplier(model: ModelFile) -> float:
    """How much attention is sharpened with the logarithm of the context's stretching (the models' mscale_all_dim).
    Converters store a tenth of it, as float32."""
    stored = model.hyper("rope.scaling.yarn_log_multiplier", float, 0.0)
    if abs(stored) > 10.0:
        raise refuse(model, "rope.scaling.yarn_log_multiplier", stored, "a tenth of a small number")
    return float(np.float32(stored) / np.float32(0.1))


def softmax_scale(rotary: Rotary, log_multiplier: float) -> float:
    """(m (1 + 0.1 log_multiplier ln factor))^2, by which query-key products grow with the stretching of the context.

    m is the rotation's own magnitude; llama.cpp computes it so that without YaRN a 1 + 0.1 ln factor stays in it.
    """
    stretch = math.log(rotary.factor)
    magnitude = rotary.magnitude if rotary.kind == "yarn" else rotary.magnitude * (1.0 + 0.1 * stretch)
    return (magnitude * (1.0 + 0.1 * log_multiplier * stretch)) ** 2


def build(model: ModelFile) -> Program:
    h = read_hyper(model)
    b = ProgramBuilder(model, h.trunk.epsilon)
    hidden = b.embed(h.trunk.width, h.trunk.vocabulary)
    for layer in range(h.trunk.layers):
        b.layer(layer)
        normed = b.norm("attn_norm", hidden, b.buffer("normed", h.trunk.width))
        q, latent = project(b, normed, h.attention)
        attended = (attend_latents if h.attention.absorbed else attend_whole)(b, q, latent, h.attention)
        projected = b.buffer("projected", h.trunk.width)
        b.matmul(attended, ("attn_output", projected))
        b.add_to(hidden, "attn_residual", projected)
        if layer == h.trunk.layers - 1:
            hidden = b.select_rows(hidden)
        normed = b.norm("ffn_norm", hidden, b.buffer("normed", h.trunk.width))
        if layer < h.dense_layers:
            ffn = feed_forward(b, normed, h.dense_width)
        else:
            ffn = routed_experts(b, normed, h.mixture, bias=True)
            b.emit(Add(b.op_name("add_shexp"), ffn, feed_forward(b, normed, h.shared_width, "_shexp"), ffn))
        b.add_to(hidden, "ffn_residual", ffn)
    b.head(hidden, h.trunk.vocabulary)
    return b.finish(
        vocabulary=h.trunk.vocabulary,
        context_length=h.trunk.context_length,
        layers=h.trunk.layers,
        read_elsewhere=_prediction_layers(model, h.trunk.layers),
    )


def project(b: ProgramBuilder, x: View, a: LatentAttention) -> tuple[View, View]:
    """Each head's query [plain, not yet rotated], and the position's latent [c, rotated key part]."""
    q, kv_a = b.buffer("q", a.heads * a.key), b.buffer("kv_a", a.kv_rank + a.rotated)
    if a.q_rank:
        q_a = b.buffer("q_a", a.q_rank)
        b.matmul(x, ("attn_q_a", q_a), ("attn_kv_a_mqa", kv_a))
        b.matmul(b.norm("attn_q_a_norm", q_a, b.buffer("q_a_normed", a.q_rank)), ("attn_q_b", q))
    else:
        b.matmul(x, ("attn_q", q), ("attn_kv_a_mqa", kv_a))
    latent = heads(kv_a, 1, a.kv_rank)
    b.norm("attn_kv_a_norm", latent, latent)
    rotate(b, "rope_k", heads(kv_a, 1, a.rotated, start=a.kv_rank), None, a)
    return q, kv_a


def rotate(b: ProgramBuilder, role: str, part: View, out: View | None, a: LatentAttention) -> None:
    """Rotates the heads of `part` into `out`, or in place."""
    rope = a.rotary
    b.emit(Rope(b.op_name(role), part, out or part, rope.frequencies, rope.magnitude, "neighbours"))


def attend_latents(b: ProgramBuilder, q: View, latent: View, a: LatentAttention) -> View:
    """Attention over the latents with absorbed queries [k_b q_plain, q_rotated]; (R, heads * value)."""
    width = a.kv_rank + a.rotated
    query = b.buffer("query", a.heads * width)
    k_b = b.weight("attn_k_b", (a.plain, a.kv_rank, a.heads))
    v_b = b.weight("attn_v_b", (a.kv_rank, a.value, a.heads))
    plain, absorbed = heads(q, a.heads, a.plain, stride=a.key), heads(query, a.heads, a.kv_rank, stride=width)
    b.emit(HeadMatMul(b.op_name("attn_k_b"), plain, absorbed, k_b))
    rotated = heads(q, a.heads, a.rotated, start=a.plain, stride=a.key)
    rotate(b, "rope_q", rotated, heads(query, a.heads, a.rotated, start=a.kv_rank, stride=width), a)
    latents = b.state("latents", width)
    b.emit(CacheWrite(b.op_name("write_latents"), latent, latents))
    mixed = heads(b.buffer("mixed_latents", a.heads * a.kv_rank), a.heads, a.kv_rank)
    queries = heads(query, a.heads, width)
    b.emit(Attention(b.op_name("attention"), queries, mixed, latents, latents, 1, width, a.kv_rank, a.scale))
    attended = b.buffer("attended", a.heads * a.value)
    b.emit(HeadMatMul(b.op_name("attn_v_b"), mixed, heads(attended, a.heads, a.value), v_b))
    return attended


def attend_whole(b: ProgramBuilder, q: View, latent: View, a: LatentAttention) -> View:
    """Attention over whole keys [plain, rotated] and values of every head; (R, heads * value)."""
    rotate(b, "rope_q", heads(q, a.heads, a.rotated, start=a.plain, stride=a.key), None, a)
    both = a.plain + a.value
    kv, built = b.buffer("kv", a.heads * both), b.buffer("keys", a.heads * a.key)
    b.matmul(heads(latent, 1, a.kv_rank), ("attn_kv_b", kv))
    plain = heads(built, a.heads, a.plain, stride=a.key)
    rotated = heads(built, a.heads, a.rotated, start=a.plain, stride=a.key)
    b.emit(CopyHeads(b.op_name("keys_plain"), heads(kv, a.heads, a.plain, stride=both), plain))
    b.emit(CopyHeads(b.op_name("keys_rotated"), heads(latent, 1, a.rotated, start=a.kv_rank), rotated))
    keys, values = b.state("keys", a.key, a.heads), b.state("values", a.value, a.heads)
    b.emit(CacheWrite(b.op_name("write_keys"), built, keys))
    built_values = heads(kv, a.heads, a.value, start=a.plain, stride=both)
    b.emit(CacheWrite(b.op_name("write_values"), built_values, values))
    attended = b.buffer("attended", a.heads * a.value)
    queries, out = heads(q, a.heads, a.key), heads(attended, a.heads, a.value)
    b.emit(Attention(b.op_name("attention"), queries, out, keys, values, a.heads, a.key, a.value, a.scale))
    return attended


def _prediction_layers(model: ModelFile, layers: int) -> list[str]:
    """Tensors of layers for multi-token prediction after the model's own; a program for plain decoding leaves them."""
    stated = positive(model, "block_count")
    prefixes = tuple(f"blk.{layer}." for layer in range(layers, stated))
    return [name for name in model.tensors if prefixes and name.startswith(prefixes)]
