"""DeepSeek-V4.1-Flash as a draft: its layer shapes, roles and quant types, with n-gram tables as holes in the file.

Knows which layer of the model has which tensors; how drafts become files is `synthetic_file.py`'s, and rows of the
tables are written by `synthetic_rows.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from bloomery.runtime.synthetic_model import Draft, Shapes, begin_draft, end_draft, feed_forward_tensors

LEAST_LAYERS: Final = 3
"""The first layer of compressed rows is the third."""
BUCKET_ROWS: Final = 16_000_000
"""Each head of an n-gram table has a prime number of rows, the next ones from here on."""
LONGEST, ENGRAM_HEADS, ENGRAM_WIDTH, PAD = 4, 8, 256, 2
COPIES: Final = 4
CANDIDATE_BLOCK, CANDIDATE_BLOCKS = 8, 2048


@dataclass(frozen=True)
class LayerRoles:
    """Which layers do what. `sources` make compressed rows and index keys: from the last on a row stands for one
    position, before for two. `publishers` choose the rows to attend to. `sites` have n-gram tables."""

    sources: tuple[int, ...]
    publishers: tuple[int, ...]
    sites: tuple[int, ...]

    def ratio(self, layer: int) -> int:
        return 0 if layer < self.sources[0] else 2 if layer < self.sources[-1] else 1


PUBLISHED_ROLES: Final = LayerRoles((2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36), (1, 14))
SMALL_LAYERS: Final = 8
SMALL_ROLES: Final = LayerRoles((2, 4, 6), (2, 4, 6, 7), (1, 4))
"""All roles of the published model in as few layers: two windows, two sources of ratio 2 with a layer each that reads
them, one of ratio 1 with two lists over its rows, two tables."""


def layer_roles(layers: int) -> LayerRoles:
    """SMALL_ROLES for SMALL_LAYERS layers, else the roles of the published model's first layers."""
    return SMALL_ROLES if layers == SMALL_LAYERS else PUBLISHED_ROLES


@dataclass(frozen=True)
class SparseShapes:
    """What `Shapes` does not have: the latent of queries, the output's groups and their rank, the window, the indexer's
    heads, width and rows kept, and the least number of rows of each of an n-gram table's heads."""

    q_rank: int = 1280
    groups: int = 8
    group_rank: int = 1024
    window: int = 128
    index_heads: int = 32
    index_width: int = 128
    index_keep: int = 512
    bucket_rows: int = BUCKET_ROWS


DEEPSEEK_V41_FLASH: Final = Shapes(
    layers=40, width=5120, vocabulary=129280, context=1 << 20, heads=64, kv_heads=1, head_width=512, experts=384,
    used=6, expert_hidden=2304, shared=1, rotated=64,
)  # fmt: skip


def deepseek41_draft(s: Shapes, mix: str, sparse: SparseShapes = SparseShapes()) -> Draft:
    assert s.layers >= LEAST_LAYERS, s.layers
    d, roles = begin_draft("deepseek41", s, mix, "deepseek-v3"), layer_roles(s.layers)
    del d.keys["deepseek41.feed_forward_length"]
    d.router = "BF16"
    d.hyper(
        attention__layer_norm_rms_epsilon=1e-20,
        attention__head_count_kv=1,
        attention__key_length=s.head_width,
        attention__value_length=s.head_width,
        attention__q_lora_rank=sparse.q_rank,
        attention__output_group_count=sparse.groups,
        attention__output_lora_rank=sparse.group_rank,
        attention__sliding_window=sparse.window,
        attention__compress_rope_freq_base=160000.0,
        attention__compress_ratios=[roles.ratio(layer) for layer in range(s.layers)],
        attention__indexer__head_count=sparse.index_heads,
        attention__indexer__key_length=sparse.index_width,
        attention__indexer__top_k=sparse.index_keep,
        rope__dimension_count=s.rotated,
        rope__freq_base=10000.0,
        rope__scaling__type="yarn",
        rope__scaling__factor=16.0,
        rope__scaling__original_context_length=65536,
        rope__scaling__yarn_beta_fast=32.0,
        rope__scaling__yarn_beta_slow=1.0,
        hyper_connection__count=COPIES,
        hyper_connection__sinkhorn_iterations=20,
        hyper_connection__epsilon=1e-6,
        expert_feed_forward_length=s.expert_hidden,
        expert_shared_count=s.shared,
        expert_weights_scale=1.5,
        expert_weights_norm=True,
        expert_gating_func=4,
        swiglu_clamp_exp=10.0,
        swiglu_clamp_shexp=10.0,
        hash_layer_count=0,
    )
    if roles.sources[-1] < s.layers:
        d.hyper(
            attention__candidate_source_layer_id=roles.sources[-1],
            attention__candidate_block_size=CANDIDATE_BLOCK,
            attention__candidate_topk_blocks=CANDIDATE_BLOCKS,
        )
    sites = [layer for layer in roles.sites if layer < s.layers]
    primes = _engram_keys(d, s, sparse, sites)
    for layer in range(s.layers):
        d.layer(layer)
        if layer in sites:
            mine = primes[sites.index(layer)]
            d.matrix("engram_embd", ENGRAM_WIDTH, sum(mine), hollow=True)
            d.matrix("engram_wkv", ENGRAM_WIDTH * len(mine), (COPIES + 1) * s.width)
            d.matrix("engram_k", s.width, COPIES, deviation=1.0)
            d.matrix("engram_q", s.width, COPIES, deviation=1.0)
        _connections(d, s, "attn")
        _attention(d, s, sparse, roles, layer)
        _connections(d, s, "ffn")
        d.norm("ffn_norm", s.width)
        d.matrix("ffn_gate_inp", s.width, s.experts)
        d.vector("exp_probs_b.bias", s.experts, 0.0, 0.01)
        d.matrix("ffn_gate_exps", s.width, s.expert_hidden, s.experts)
        d.matrix("ffn_up_exps", s.width, s.expert_hidden, s.experts)
        d.matrix("ffn_down_exps", s.expert_hidden, s.width, s.experts)
        feed_forward_tensors(d, s.width, s.shared * s.expert_hidden, "_shexp")
    return end_draft(d, s)


def _connections(d: Draft, s: Shapes, part: str) -> None:
    mixes = COPIES * (2 + COPIES)
    d.matrix(f"hc_{part}_fn", COPIES * s.width, mixes)
    d.vector(f"hc_{part}_base.weight", mixes, 0.0, 0.1)
    d.vector(f"hc_{part}_scale.weight", 3, 1.0, 0.05)


def _attention(d: Draft, s: Shapes, sparse: SparseShapes, roles: LayerRoles, layer: int) -> None:
    d.norm("attn_norm", s.width)
    d.matrix("attn_q_a", s.width, sparse.q_rank)
    d.norm("attn_q_a_norm", sparse.q_rank)
    d.matrix("attn_q_b", sparse.q_rank, s.heads * s.head_width)
    d.matrix("attn_kv", s.width, s.head_width)
    d.norm("attn_kv_a_norm", s.head_width)
    d.vector("attn_sinks.weight", s.heads, 0.0, 1.0)
    d.matrix("attn_output_a", s.heads * s.head_width // sparse.groups, sparse.groups * sparse.group_rank)
    d.matrix("attn_output_b", sparse.groups * sparse.group_rank, s.width)
    if layer in roles.sources:
        d.matrix("attn_compressor_kv", s.width, s.head_width)
        if roles.ratio(layer) > 1:
            d.matrix("attn_compressor_gate", s.width, s.head_width)
        d.norm("attn_compressor_norm", s.head_width)
        d.matrix("indexer.attn_k", s.head_width, sparse.index_width)
        d.norm("indexer.k_norm", sparse.index_width)
    if layer in roles.publishers:
        d.matrix("indexer.attn_q_b", sparse.q_rank, sparse.index_heads * sparse.index_width)
        d.matrix("indexer.proj", s.width, sparse.index_heads)


def _engram_keys(d: Draft, s: Shapes, sparse: SparseShapes, sites: Sequence[int]) -> list[list[int]]:
    """Adds the hash's constants; returns the primes of each site: the next unused ones, site after site."""
    buckets = (LONGEST - 1) * ENGRAM_HEADS
    found = _primes_from(sparse.bucket_rows, buckets * len(sites))
    primes = [found[first : first + buckets] for first in range(0, len(found), buckets)]
    compressed = s.vocabulary * 3 // 4
    d.hyper(
        engram__layer_ids=sites,
        engram__head_count=ENGRAM_HEADS,
        engram__key_length=ENGRAM_WIDTH,
        engram__max_ngram_size=LONGEST,
        engram__multipliers=tuple((2 * number + 1) * 0x9E3779B1 for number in range(len(sites) * LONGEST)),
        engram__primes=tuple(found),
        engram__offsets=tuple(offset for mine in primes for offset in (0, *accumulate(mine[:-1]))),
        engram__token_map=[token % compressed for token in range(s.vocabulary)],
        engram__pad_id=PAD,
    )
    return primes


def _primes_from(least: int, count: int) -> list[int]:
    """The first `count` primes that are not below `least`."""
    found: list[int] = []
    number = max(2, least)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found
