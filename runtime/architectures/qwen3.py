"""Architecture `qwen3`: the dense Qwen3 models (Yang et al., arXiv:2505.09388). Grouped-query attention whose queries
and keys are normed head by head before the rotation of halves; the head width is free of width / heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bloomery.runtime.architectures.builder import ProgramBuilder
from bloomery.runtime.architectures.hyper_parameters import HeadShape, Trunk, positive, read_heads, read_trunk
from bloomery.runtime.architectures.layers import attend, feed_forward, project_qkv
from bloomery.runtime.architectures.rotary import Rotary, read_rotary
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program, Rope, View


@dataclass(frozen=True)
class Qwen3Hyper:
    trunk: Trunk
    heads: HeadShape
    rotary: Rotary


def read_hyper(model: ModelFile) -> Qwen3Hyper:
    trunk = read_trunk(model)
    heads = read_heads(model, trunk.width)
    return Qwen3Hyper(trunk, heads, read_rotary(model, heads.width))


def build(model: ModelFile) -> Program:
    ffn_width = positive(model, "feed_forward_length")
    return build_trunk(model, read_hyper(model), lambda b, normed: feed_forward(b, normed, ffn_width))


def build_trunk(model: ModelFile, h: Qwen3Hyper, second_half: Callable[[ProgramBuilder, View], View]) -> Program:
    """The program of a Qwen3 model; `second_half` emits each layer's feed-forward for the normed residual stream."""
    b = ProgramBuilder(model, h.trunk.epsilon)
    hidden = b.embed(h.trunk.width, h.trunk.vocabulary)
    for layer in range(h.trunk.layers):
        b.layer(layer)
        normed = b.norm("attn_norm", hidden, b.buffer("normed", h.trunk.width))
        q, k, v = project_qkv(b, normed, h.heads)
        b.norm("attn_q_norm", q, q)
        b.norm("attn_k_norm", k, k)
        b.emit(Rope(b.op_name("rope_q"), q, q, h.rotary.frequencies, h.rotary.magnitude, "halves"))
        b.emit(Rope(b.op_name("rope_k"), k, k, h.rotary.frequencies, h.rotary.magnitude, "halves"))
        attended = attend(b, q, k, v, h.heads, 1.0 / math.sqrt(h.heads.width))
        projected = b.buffer("projected", h.trunk.width)
        b.matmul(attended, ("attn_output", projected))
        b.add_to(hidden, "attn_residual", projected)
        if layer == h.trunk.layers - 1:
            hidden = b.select_rows(hidden)
        normed = b.norm("ffn_norm", hidden, b.buffer("normed", h.trunk.width))
        b.add_to(hidden, "ffn_residual", second_half(b, normed))
    b.head(hidden, h.trunk.vocabulary)
    return b.finish(vocabulary=h.trunk.vocabulary, context_length=h.trunk.context_length, layers=h.trunk.layers)
