"""Architecture `deepseek4`: DeepSeek-V4-Flash. Residual copies joined by hyper-connections; attention over a window of
positions and over compressed rows, which an indexer chooses where they are many; experts by token id in the first
layers. Knows no device.

Every layer keeps and reads its own rows. A compressor that projects to twice the width of a row makes rows from two
groups of positions, overlapping; only such layers have an indexer, with a compressor of its own for its keys.
"""

from __future__ import annotations

from bloomery.runtime.architectures.builder import ProgramBuilder, heads
from bloomery.runtime.architectures.deepseek4_hyper import Deepseek4Hyper, read_hyper
from bloomery.runtime.architectures.deepseek4_layers import (
    Compressor,
    Product,
    attend,
    choose_rows,
    collapse,
    flat,
    indexer_products,
    keep_rows,
    mix,
    mixture,
    spread,
    start_streams,
    turn,
    write_window,
)
from bloomery.runtime.architectures.hyper_parameters import refuse
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.ops_deepseek4 import HyperMix, UnitNorm
from bloomery.runtime.program import Program
from bloomery.runtime.views import View


def build(model: ModelFile) -> Program:
    h = read_hyper(model)
    _check_keys(model)
    b = ProgramBuilder(model, h.trunk.epsilon)
    streams = start_streams(b, h)
    for layer in range(h.trunk.layers):
        b.layer(layer)
        how = mix(b, h.connections, "attn", streams)
        x = b.norm("attn_norm", collapse(b, "attn", streams, how.pre), b.buffer("normed", h.trunk.width))
        spread(b, "attn", attention(b, h, layer, x), streams, how)
        if layer == h.trunk.layers - 1:
            streams = heads(b.select_rows(flat(streams)), streams.count, streams.width)
        how = mix(b, h.connections, "ffn", streams)
        x = b.norm("ffn_norm", collapse(b, "ffn", streams, how.pre), b.buffer("normed", h.trunk.width))
        spread(b, "ffn", mixture(b, h, layer, x), streams, how)
    b.prefix = ""
    model.tensor("output.weight", (h.trunk.width, h.trunk.vocabulary))
    b.head(final_collapse(b, h, streams), h.trunk.vocabulary)
    return b.finish(
        vocabulary=h.trunk.vocabulary,
        context_length=h.trunk.context_length,
        layers=h.trunk.layers,
        read_elsewhere=[name for name in model.tensors if name.endswith(".exp_probs_b_vl.bias")],
    )


def _check_keys(model: ModelFile) -> None:
    """Keys of `deepseek41` only: a file that has them would be computed wrongly here."""
    for key in model.metadata:
        name = key.removeprefix("deepseek4.")
        if name.startswith(("engram.", "attention.candidate_")):
            raise refuse(model, name, model.metadata[key], "no such key: it belongs to deepseek41")


def attention(b: ProgramBuilder, h: Deepseek4Hyper, layer: int, x: View) -> View:
    a, ratio = h.attention, h.ratios[layer]
    frequencies = a.compressed if ratio else a.plain
    compressor = _compressor(b, "attn_compressor", a.width, ratio) if ratio else None
    indexed = bool(ratio) and b.model.has(f"{b.prefix}indexer.attn_q_b.weight")
    index_compressor = _compressor(b, "indexer_compressor", h.indexer.width, ratio) if indexed else None
    of_query, of_x = indexer_products(b, h) if indexed else (None, None)

    q_a, latent = b.buffer("q_a", a.q_rank), b.buffer("latent", a.width)
    products: list[Product] = [("attn_q_a", q_a), ("attn_kv", latent)]
    for each in (compressor, index_compressor):
        products += each.products(b) if each else ()
    b.matmul(x, *products, *([of_x] if of_x else []))
    q = b.buffer("q", a.heads * a.width)
    normed = b.norm("attn_q_a_norm", q_a, b.buffer("q_a_normed", a.q_rank))
    b.matmul(normed, ("attn_q_b", q), *([of_query] if of_query else []))
    queries = heads(q, a.heads, a.width)
    b.emit(UnitNorm(b.op_name("q_norm"), queries, queries, b.epsilon))
    b.norm("attn_kv_a_norm", latent, latent)
    turn(b, "rope_q", queries, frequencies)
    turn(b, "rope_latent", latent, frequencies)
    window = write_window(b, latent, a)
    groups = keep_rows(b, "compressed", compressor.rows(b), frequencies, ratio) if compressor else None
    chosen = None
    if index_compressor:
        keys = keep_rows(b, "index_keys", index_compressor.rows(b), frequencies, ratio)
        chosen = choose_rows(b, h, keys, ratio)
    return attend(b, a, queries, window, frequencies, groups=groups, chosen=chosen, ratio=ratio or 1)


def _compressor(b: ProgramBuilder, stem: str, width: int, ratio: int) -> Compressor:
    """Whether rows overlap is told by what the compressor projects to."""
    projected = b.model.tensor(f"{b.prefix}{stem}_kv.weight", (None, None)).shape[1]
    return Compressor(stem, width, ratio, overlap=projected == 2 * width, pooled=True, biased=True)


def final_collapse(b: ProgramBuilder, h: Deepseek4Hyper, streams: View) -> View:
    """The copies as one vector, weighted by a mix of the model's own."""
    c = h.connections
    logits, pre = b.buffer("output_logits", c.copies), b.buffer("pre_output", c.copies)
    b.matmul(flat(streams), ("output_hc_fn", logits))
    base, scale = b.weight("output_hc_base", (c.copies,)), b.weight("output_hc_scale", (1,))
    numbers = (base, scale, b.epsilon, c.epsilon, c.rounds)
    b.emit(HyperMix("output_hc_mix", streams, logits, pre, None, None, *numbers))
    return collapse(b, "output", streams, pre)
