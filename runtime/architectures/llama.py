"""Architecture `llama`: Llama 1 to 3 and kin (Touvron et al., arXiv:2302.13971), dense or with routed experts in
Mixtral's way (Jiang et al., arXiv:2401.04088). Rotary pairs are neighbours. Knows no device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bloomery.runtime.architectures.builder import ProgramBuilder
from bloomery.runtime.architectures.hyper_parameters import (
    HeadShape,
    Mixture,
    Trunk,
    positive,
    read_heads,
    read_mixture,
    read_trunk,
)
from bloomery.runtime.architectures.layers import (
    attend,
    feed_forward,
    project_qkv,
    routed_experts,
)
from bloomery.runtime.architectures.rotary import Rotary, read_rotary
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program, Rope


@dataclass(frozen=True)
class LlamaHyper:
    """ffn_width: hidden width of the feed-forward, or of each expert where there is a `mixture`."""

    trunk: Trunk
    heads: HeadShape
    rotary: Rotary
    ffn_width: int
    mixture: Mixture | None


def read_hyper(model: ModelFile) -> LlamaHyper:
    trunk = read_trunk(model)
    heads = read_heads(model, trunk.width)
    ffn_width = positive(model, "feed_forward_length")
    mixture = None
    if model.hyper("expert_count", int, 0) > 0:
        mixture = read_mixture(model, ffn_width, gating=1, normalise=True, scale=1.0)
    return LlamaHyper(trunk, heads, read_rotary(model, heads.width), ffn_width, mixture)


def build(model: ModelFile) -> Program:
    h = read_hyper(model)
    b = ProgramBuilder(model, h.trunk.epsilon)
    hidden = b.embed(h.trunk.width, h.trunk.vocabulary)
    for layer in range(h.trunk.layers):
        b.layer(layer)
        normed = b.norm("attn_norm", hidden, b.buffer("normed", h.trunk.width))
        q, k, v = project_qkv(b, normed, h.heads)
        b.emit(Rope(b.op_name("rope_q"), q, q, h.rotary.frequencies, h.rotary.magnitude, "neighbours"))
        b.emit(Rope(b.op_name("rope_k"), k, k, h.rotary.frequencies, h.rotary.magnitude, "neighbours"))
        attended = attend(b, q, k, v, h.heads, 1.0 / math.sqrt(h.heads.width))
        projected = b.buffer("projected", h.trunk.width)
        b.matmul(attended, ("attn_output", projected))
        b.add_to(hidden, "attn_residual", projected)
        if layer == h.trunk.layers - 1:
            hidden = b.select_rows(hidden)
        normed = b.norm("ffn_norm", hidden, b.buffer("normed", h.trunk.width))
        ffn = routed_experts(b, normed, h.mixture) if h.mixture else feed_forward(b, normed, h.ffn_width)
        b.add_to(hidden, "ffn_residual", ffn)
    b.head(hidden, h.trunk.vocabulary)
    return b.finish(
        vocabulary=h.trunk.vocabulary,
        context_length=h.trunk.context_length,
        layers=h.trunk.layers,
        read_elsewhere=("rope_freqs.weight",),
    )
