"""Owns the parts of a layer that several architectures have in common: the grouped-query projection, the SwiGLU
feed-forward, the routed mixture. Each adds its ops to a ProgramBuilder and returns the view of its result.
"""

from __future__ import annotations

from typing import Literal

from bloomery.runtime.architectures.builder import ProgramBuilder, heads
from bloomery.runtime.architectures.hyper_parameters import HeadShape, Mixture
from bloomery.runtime.program import Attention, CacheWrite, MatMul, RoutedExperts, Router, SwiGlu, View


def project_qkv(b: ProgramBuilder, x: View, shape: HeadShape) -> tuple[View, View, View]:
    """Queries, keys and values of x as heads. The file has attn_q, attn_k and attn_v, or one attn_qkv of their rows."""
    q_width, kv_width = shape.count * shape.width, shape.kv_count * shape.width
    whole = b.buffer("qkv", q_width + 2 * kv_width)
    q = View(whole.buffer, 0, q_width)
    k = View(whole.buffer, q_width, kv_width)
    v = View(whole.buffer, q_width + kv_width, kv_width)
    if b.model.has(f"{b.prefix}attn_qkv.weight"):
        b.matmul(x, ("attn_qkv", whole))
    else:
        b.matmul(x, ("attn_q", q), ("attn_k", k), ("attn_v", v))
    return (
        heads(q, shape.count, shape.width),
        heads(k, shape.kv_count, shape.width),
        heads(v, shape.kv_count, shape.width),
    )


def attend(b: ProgramBuilder, q: View, k: View, v: View, shape: HeadShape, scale: float) -> View:
    """Stores keys and values, then attends to all positions of the row's slot so far; (R, count * width)."""
    keys = b.state("keys", shape.width, shape.kv_count)
    values = b.state("values", shape.width, shape.kv_count)
    b.emit(CacheWrite(b.op_name("write_keys"), k, keys))
    b.emit(CacheWrite(b.op_name("write_values"), v, values))
    mixed = b.buffer("attended", shape.count * shape.width)
    out = heads(mixed, shape.count, shape.width)
    b.emit(Attention(b.op_name("attention"), q, out, keys, values, shape.kv_count, shape.width, shape.width, scale))
    return mixed


def feed_forward(b: ProgramBuilder, x: View, width: int, kind: Literal["", "_shexp"] = "", limit: float = 0.0) -> View:
    """down(silu(gate(x)) * up(x)) of hidden width `width`: the layer's own, or ("_shexp") its shared experts. `limit`
    as in op SwiGlu."""
    gate, up = b.buffer(f"gate{kind}", width), b.buffer(f"up{kind}", width)
    out = b.buffer(f"ffn{kind}", x.width)
    b.matmul(x, (f"ffn_gate{kind}", gate), (f"ffn_up{kind}", up))
    b.emit(SwiGlu(b.op_name(f"swiglu{kind}"), gate, up, gate, limit))
    b.matmul(gate, (f"ffn_down{kind}", out))
    return out


def routed_experts(b: ProgramBuilder, x: View, mixture: Mixture, *, bias: bool = False) -> View:
    """The weighted sum of the experts that the router chooses for each row. With `bias` the router's selection bias
    exp_probs_b is used where the file has it."""
    logits = b.buffer("router_logits", mixture.count)
    ids, mix = b.buffer("expert_ids", mixture.used, "i32"), b.buffer("expert_mix", mixture.used)
    gate_inp = b.weight("ffn_gate_inp", (x.width, mixture.count))
    b.emit(MatMul(b.op_name("ffn_gate_inp"), x, (logits,), (gate_inp,), (None,)))
    selection_bias = b.optional_weight("exp_probs_b", (mixture.count,), "bias") if bias else None
    b.emit(
        Router(
            b.op_name("router"),
            logits,
            ids,
            mix,
            selection_bias,
            mixture.gating,
            mixture.normalise,
            mixture.scale,
            mixture.groups,
            mixture.groups_used,
        )
    )
    out = b.buffer("ffn", x.width)
    into, back = (x.width, mixture.width, mixture.count), (mixture.width, x.width, mixture.count)
    b.emit(
        RoutedExperts(
            b.op_name("routed_experts"),
            x,
            ids,
            mix,
            out,
            b.weight("ffn_gate_exps", into),
            b.weight("ffn_up_exps", into),
            b.weight("ffn_down_exps", back),
        )
    )
    return out
