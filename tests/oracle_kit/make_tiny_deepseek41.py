# ruff: noqa  (part of the oracle kit, kept as it came so that it makes the same bytes)
# fmt: off
"""Write tiny seeded random-weight GGUF files of architecture `deepseek41`.

    python make_tiny_deepseek41.py OUTDIR [--variant a|dense|b|draft] [--only mix|f32]

needs `numpy` and `gguf`.  Two files are written for a variant:

  tiny-deepseek41-VARIANT-mix.gguf   types laid out as in the public Q3_K_M upload: Q3_K, with
                                     Q5_K (layers 0, 1) / Q4_K (others) for the down projections
                                     of the experts, Q6_K head, BF16 routers, F32 vectors
  tiny-deepseek41-VARIANT-f32.gguf   the same model, every tensor F32: exactly the dequantised
                                     values of the first file, so both must give the same logits

Variants: `a` small heads, window 8, lists of 4 rows (selection and the candidate mask work from
position 9 on); `dense` the same tensors with a list length and a candidate pool that keep every
row; `b` the released widths of heads, rotated tail, window and index keys (512, 64, 128, 128);
`draft` a block draft (architecture `dflash`) for the model `a`, its types as in the published one:
Q8_0, MXFP4, BF16 and F32.

The quantised blocks are made directly from random integers (no quantiser involved).
Every matrix takes its rows from a pool of 512 random rows (one pool per type and row length) in
a random order, which lets the files compress well; no row occurs twice among 512 neighbours.
"""
import argparse
import os
import re

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V
from gguf import GGUFWriter
from gguf.quants import dequantize

SEED = 41003
NAME = "tiny-deepseek41"

# ------------------------------------------------------------------ configuration
N_LAYER = 9
E, H = 256, 4                       # stream width, hyper-connection copies
HEADS, D, R = 4, 256, 32            # heads, head width, rotated tail
QRANK, GROUPS, ORANK = 256, 2, 128
WINDOW = 8
RATIOS = [0, 0, 2, 2, 2, 1, 1, 1, 1] + [0, 0, 0]    # trailing zeros: as for a draft
KV_SOURCES = {2, 4, 5}
PUBLISHERS = {2, 4, 5, 7}
IHEADS, IWIDTH, TOPK = 8, 64, 4
CAND_SOURCE, CAND_BLOCK, CAND_KEEP = 5, 2, 3
N_EXPERT, N_USED, F = 8, 2, 256
LIMIT_EXP = [10, 10, 10, 0.5, 10, 10, 10, 0.75, 10]
LIMIT_SHEXP = [10, 10, 10, 10, 10, 10, 0.5, 10, 10]
RMS_EPS, HC_EPS, SINKHORN = 1e-20, 1e-6, 20
ROPE_BASE, COMPRESS_BASE = 10000.0, 160000.0
YARN = dict(factor=4.0, original=64, fast=32.0, slow=1.0)
ENGRAM_LAYERS, EHEADS, EWIDTH, NGRAM = [1, 4], 2, 256, 4
PRIMES = [67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113]
PAD_ID, N_COMPRESSED = 7, 300
N_VOCAB = 512

DRAFT = dict(blocks=3, block_size=5, targets=[6, 7, 8], mask=5, rank=256, experts=4, used=2)

VARIANTS = {
    "a": {},
    "draft": dict(SEED=41017),
    "dense": dict(TOPK=512, CAND_SOURCE=5, CAND_BLOCK=8, CAND_KEEP=2048),
    "b": dict(D=512, R=64, WINDOW=128, IWIDTH=128, TOPK=16, CAND_BLOCK=8, CAND_KEEP=4, SEED=41009,
              YARN=dict(factor=16.0, original=128, fast=32.0, slow=1.0)),
}

TEXT = """The stream is carried as four copies, and every layer reads a mix of them. A window
of recent tokens is always visible; older tokens are pooled into rows, two by two, and only the
best rows are kept. for i in range(10): print(i, values[i]) # a loop over the values
def route(self, scores, bias): return top(scores + bias, 2)
It was a bright day in the village, and the clocks on the church were striking one, two, three.
The table of n-grams is large, but one token reads only a few of its rows. 1234567890 times 42."""


# ------------------------------------------------------------------ tokenizer
def byte_table():
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    out, n = {}, 0
    for b in range(256):
        out[b] = chr(b) if b in keep else chr(256 + n)
        n += b not in keep
    return out


def tokenizer():
    """Three special tokens, 256 bytes, then merges; a plain byte-level BPE."""
    table = byte_table()
    words = {}
    for w in re.findall(r" ?[A-Za-z]+| ?[^\sA-Za-z]|\s+", TEXT):
        key = tuple(table[b] for b in w.encode())
        words[key] = words.get(key, 0) + 1
    tokens = ["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
              "<\uff5c\u2581pad\u2581\uff5c>"]
    tokens += [table[b] for b in range(256)]
    merges = []
    while len(tokens) < N_VOCAB - 4:
        pairs = {}
        for w, n in words.items():
            for p in zip(w, w[1:]):
                pairs[p] = pairs.get(p, 0) + n
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(" ".join(best))
        if best[0] + best[1] not in tokens:
            tokens.append(best[0] + best[1])
        new = {}
        for w, n in words.items():
            out, i = [], 0
            while i < len(w):
                if i + 1 < len(w) and (w[i], w[i + 1]) == best:
                    out.append(w[i] + w[i + 1])
                    i += 2
                else:
                    out.append(w[i])
                    i += 1
            new[tuple(out)] = new.get(tuple(out), 0) + n
        words = new
    specials = ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>"]
    while len(tokens) < N_VOCAB - len(specials):
        tokens.append(f"[unused{len(tokens)}]")
    tokens += specials
    types = [3] * 3 + [1] * (N_VOCAB - 7) + [4] * 4
    types = [5 if t.startswith("[unused") else ty for t, ty in zip(tokens, types)]
    return tokens, types, merges


# ------------------------------------------------------------------ random blocks
def f16bytes(x):
    return np.frombuffer(np.asarray(x, np.float16).tobytes(), np.uint8)


class Blocks:
    """Pools of random quantised rows, by type and row length."""
    ROWS = 512
    SIZE = {T.Q3_K: 110, T.Q4_K: 144, T.Q5_K: 176, T.Q6_K: 210}        # blocks of 256

    def __init__(self, rng):
        self.rng, self.pools = rng, {}

    def block_bytes(self, qt, n):
        b = self.rng.integers(0, 256, (n, self.SIZE[qt]), dtype=np.uint8)
        # the f16 scales are written when rows are taken (they depend on the matrix)
        if qt == T.Q6_K:
            b[:, 192:208] = self.rng.integers(-64, 64, (n, 16)).astype(np.int8).view(np.uint8)
        return b

    def set_scale(self, qt, b, d):
        """b: (..., block) bytes, d: (...) float; returns a copy carrying the f16 scales."""
        b = b.copy()
        d16 = d.astype(np.float16)
        if qt in (T.Q3_K, T.Q6_K):
            b[..., -2:] = d16.view(np.uint8).reshape(d.shape + (2,))
        else:
            dmin = (d * (7.5 if qt == T.Q4_K else 15.5)).astype(np.float16)
            b[..., 0:2] = d16.view(np.uint8).reshape(d.shape + (2,))
            b[..., 2:4] = dmin.view(np.uint8).reshape(d.shape + (2,))
        return b

    def pool(self, qt, k):
        if (qt, k) not in self.pools:
            nb = k // 256
            b = self.block_bytes(qt, self.ROWS * nb).reshape(self.ROWS, nb, -1)
            unit = self.set_scale(qt, b, np.full((self.ROWS, nb), 2.0 ** -8))
            v = dequantize(unit.reshape(self.ROWS, -1), qt)
            rel = self.rng.choice(np.array([0.75, 1.0, 1.25]), (self.ROWS, nb))
            if qt in (T.Q3_K, T.Q6_K):
                rel *= self.rng.choice(np.array([-1.0, 1.0]), (self.ROWS, nb))
            self.pools[qt, k] = (b, rel, float(np.std(v)) * 256)
        return self.pools[qt, k]

    def take(self, qt, n, k, std, split=1):
        """n rows of length k; rows are distinct inside each of n // split chunks if possible."""
        b, rel, unit = self.pool(qt, k)
        idx = []
        left = n
        while left > 0:
            idx.append(self.rng.permutation(self.ROWS)[:min(left, self.ROWS)])
            left -= len(idx[-1])
        idx = np.concatenate(idx)
        return self.set_scale(qt, b[idx], rel[idx] * (std / unit)).reshape(n, -1)


def bf16(x):
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    u = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    return u.astype(np.uint16)


class SmallBlocks:
    """The same for the types with blocks of 32."""
    ROWS = 256

    def __init__(self, rng):
        self.rng, self.pools = rng, {}

    def take(self, qt, n, k, std):
        size = 34 if qt == T.Q8_0 else 17
        if (qt, k) not in self.pools:
            b = self.rng.integers(0, 256, (self.ROWS, k // 32, size), dtype=np.uint8)
            self.pools[qt, k] = b, self.rng.integers(-1, 2, (self.ROWS, k // 32))
        b, rel = self.pools[qt, k]
        idx = np.concatenate([self.rng.permutation(self.ROWS) for _ in range(-(-n // self.ROWS))])[:n]
        b, rel = b[idx].copy(), rel[idx]
        if qt == T.Q8_0:
            d = (1 + rel / 4) * (std / 74)
            b[..., :2] = d.astype(np.float16).view(np.uint8).reshape(n, k // 32, 2)
        else:                       # codes have a root mean square of 5.9; byte e stands for 2^(e - 128)
            b[..., 0] = 128 + round(np.log2(std / 5.9)) + rel
        return b.reshape(n, -1)


# ------------------------------------------------------------------ tensors
def make_draft():
    """The same, for the draft."""
    rng = np.random.default_rng(SEED)
    blocks = SmallBlocks(rng)
    out = []

    def q(name, n, k, std=None, experts=0, kind=T.Q8_0):
        data = blocks.take(kind, n * max(1, experts), k, std or k ** -0.5)
        out.append((name, kind, data, (experts, n, k) if experts else (n, k)))

    def vec(name, x):
        out.append((name, T.F32, np.asarray(x, np.float32), np.shape(x)))

    def half(name, n, k, std):
        out.append((name, T.BF16, bf16(rng.standard_normal((n, k)) * std), (n, k)))

    def gain(name, n):
        vec(name, 1 + 0.1 * rng.standard_normal(n))

    d = DRAFT
    q("fc.weight", E, len(d["targets"]) * E)
    gain("enc.output_norm.weight", E)
    half("markov_w1.weight", N_VOCAB, d["rank"], 1.0)
    half("markov_w2.weight", N_VOCAB, d["rank"], 2 * d["rank"] ** -0.5)
    half("conf_proj.weight", 1, E + d["rank"], (E + d["rank"]) ** -0.5)
    gain("output_norm.weight", E)
    for i in range(d["blocks"]):
        p = f"blk.{i}."
        gain(p + "attn_norm.weight", E)
        q(p + "attn_q_a.weight", QRANK, E)
        gain(p + "attn_q_a_norm.weight", QRANK)
        q(p + "attn_q_b.weight", HEADS * D, QRANK, 1.5 * QRANK ** -0.5)
        q(p + "attn_kv.weight", D, E)
        gain(p + "attn_kv_a_norm.weight", D)
        vec(p + "attn_sinks.weight", rng.standard_normal(HEADS))
        q(p + "attn_output_a.weight", GROUPS * ORANK, HEADS // GROUPS * D)
        q(p + "attn_output_b.weight", E, GROUPS * ORANK, 2 * (GROUPS * ORANK) ** -0.5)
        for s in ("attn", "ffn"):
            vec(p + f"hc_{s}_fn.weight", rng.standard_normal(((2 + H) * H, H * E)) * (H * E) ** -0.5)
            vec(p + f"hc_{s}_base.weight", rng.standard_normal((2 + H) * H))
            vec(p + f"hc_{s}_scale.weight", [1.0, 1.1, 0.9])
        gain(p + "ffn_norm.weight", E)
        half(p + "ffn_gate_inp.weight", d["experts"], E, 1.5 * E ** -0.5)
        vec(p + "exp_probs_b.bias", rng.uniform(-0.3, 0.3, d["experts"]))
        for k in ("gate", "up", "down"):
            q(p + f"ffn_{k}_exps.weight", F, E, None, d["experts"], T.MXFP4)
            q(p + f"ffn_{k}_shexp.weight", F, E)
    return out


def make_tensors():
    """Yield (name, kind, data, shape): kind is a block type, BF16 or F32; shape is the NumPy shape."""
    rng = np.random.default_rng(SEED)
    blocks = Blocks(rng)
    out = []

    def q(name, qt, n, k, std=None, experts=0):
        rows = n * max(1, experts)
        data = blocks.take(qt, rows, k, std if std is not None else k ** -0.5)
        out.append((name, qt, data, (experts, n, k) if experts else (n, k)))

    def vec(name, x):
        out.append((name, T.F32, np.asarray(x, np.float32), np.shape(x)))

    def gain(name, n):
        vec(name, 1 + 0.1 * rng.standard_normal(n))

    q("token_embd.weight", T.Q3_K, N_VOCAB, E, 1.0)
    gain("output_norm.weight", E)
    q("output.weight", T.Q6_K, N_VOCAB, E, 0.25)
    for i in range(N_LAYER):
        p = f"blk.{i}."
        gain(p + "attn_norm.weight", E)
        q(p + "attn_q_a.weight", T.Q3_K, QRANK, E)
        gain(p + "attn_q_a_norm.weight", QRANK)
        q(p + "attn_q_b.weight", T.Q3_K, HEADS * D, QRANK, 1.5 * QRANK ** -0.5)
        q(p + "attn_kv.weight", T.Q3_K, D, E)
        gain(p + "attn_kv_a_norm.weight", D)
        vec(p + "attn_sinks.weight", rng.standard_normal(HEADS))
        q(p + "attn_output_a.weight", T.Q3_K, GROUPS * ORANK, HEADS // GROUPS * D)
        q(p + "attn_output_b.weight", T.Q3_K, E, GROUPS * ORANK, 2 * (GROUPS * ORANK) ** -0.5)
        for s in ("attn", "ffn"):
            q(p + f"hc_{s}_fn.weight", T.Q3_K, (2 + H) * H, H * E)
            vec(p + f"hc_{s}_base.weight", rng.standard_normal((2 + H) * H))
            vec(p + f"hc_{s}_scale.weight", [0.1, 0.02, 0.15] if i == 2 else [1.0, 1.1, 0.9])
        if i in KV_SOURCES:
            q(p + "attn_compressor_kv.weight", T.Q3_K, D, E)
            if RATIOS[i] > 1:
                q(p + "attn_compressor_gate.weight", T.Q3_K, D, E, 2 * E ** -0.5)
            gain(p + "attn_compressor_norm.weight", D)
            q(p + "indexer.attn_k.weight", T.Q3_K, IWIDTH, D)
            gain(p + "indexer.k_norm.weight", IWIDTH)
        if i in PUBLISHERS:
            q(p + "indexer.attn_q_b.weight", T.Q3_K, IHEADS * IWIDTH, QRANK)
            q(p + "indexer.proj.weight", T.Q3_K, IHEADS, E)
        if i in ENGRAM_LAYERS:
            s = ENGRAM_LAYERS.index(i)
            nb = (NGRAM - 1) * EHEADS
            rows = sum(PRIMES[s * nb:(s + 1) * nb])
            q(p + "engram_embd.weight", T.Q3_K, rows, EWIDTH, 1.0)
            q(p + "engram_wkv.weight", T.Q3_K, (H + 1) * E, nb * EWIDTH)
            q(p + "engram_k.weight", T.Q3_K, H, E, 1.0)
            q(p + "engram_q.weight", T.Q3_K, H, E, 1.0)
        gain(p + "ffn_norm.weight", E)
        out.append((p + "ffn_gate_inp.weight", T.BF16,
                    bf16(rng.standard_normal((N_EXPERT, E)) * E ** -0.5 * 1.5), (N_EXPERT, E)))
        vec(p + "exp_probs_b.bias", rng.uniform(-0.3, 0.3, N_EXPERT))
        vec(p + "exp_probs_b_vl.bias", rng.uniform(-0.3, 0.3, N_EXPERT))    # unread for text
        down = T.Q5_K if i < 2 else T.Q4_K
        q(p + "ffn_gate_exps.weight", T.Q3_K, F, E, 1.5 * E ** -0.5, experts=N_EXPERT)
        q(p + "ffn_up_exps.weight", T.Q3_K, F, E, None, experts=N_EXPERT)
        q(p + "ffn_down_exps.weight", down, E, F, None, experts=N_EXPERT)
        q(p + "ffn_gate_shexp.weight", T.Q3_K, F, E, 1.5 * E ** -0.5)
        q(p + "ffn_up_shexp.weight", T.Q3_K, F, E)
        q(p + "ffn_down_shexp.weight", down, E, F)
    return out


def engram_constants():
    rng = np.random.default_rng(SEED + 1)
    mult = [int(x) * 2 + 1 for x in rng.integers(1 << 50, 1 << 53, len(ENGRAM_LAYERS) * NGRAM)]
    nb = (NGRAM - 1) * EHEADS
    offsets = []
    for s in range(len(ENGRAM_LAYERS)):
        acc = 0
        for b in range(nb):
            offsets.append(acc)
            acc += PRIMES[s * nb + b]
    token_map = np.concatenate([np.arange(N_COMPRESSED), rng.integers(0, N_COMPRESSED, N_VOCAB - N_COMPRESSED)])
    head = rng.permutation(N_COMPRESSED)
    token_map = head[token_map]
    if token_map[PAD_ID] == PAD_ID:
        token_map[[PAD_ID, PAD_ID + 1]] = token_map[[PAD_ID + 1, PAD_ID]]
    return mult, offsets, [int(x) for x in token_map]


def write(path, tensors, f32, draft=False):
    arch = "dflash" if draft else "deepseek41"
    w = GGUFWriter(path, arch)
    a = arch + "."

    def u32(k, v):
        w.add_uint32(a + k, v)

    def arr(k, v, sub):
        w.add_key_value(a + k, v, V.ARRAY, sub_type=sub)

    n_layer = DRAFT["blocks"] if draft else N_LAYER
    w.add_string("general.name", NAME)
    u32("context_length", 4096)
    u32("embedding_length", E)
    u32("block_count", n_layer)
    u32("attention.head_count", HEADS)
    u32("attention.head_count_kv", 1)
    if draft:
        u32("block_size", DRAFT["block_size"])
        arr("target_layers", DRAFT["targets"], V.UINT32)
    else:
        w.add_string(a + "rope.scaling.type", "yarn")
        w.add_float32(a + "rope.scaling.factor", YARN["factor"])
        u32("rope.scaling.original_context_length", YARN["original"])
        w.add_float32(a + "rope.scaling.yarn_beta_fast", YARN["fast"])
        w.add_float32(a + "rope.scaling.yarn_beta_slow", YARN["slow"])
    w.add_float32(a + "rope.freq_base", ROPE_BASE)
    w.add_float32(a + "attention.layer_norm_rms_epsilon", RMS_EPS)
    u32("expert_count", DRAFT["experts"] if draft else N_EXPERT)
    u32("expert_used_count", DRAFT["used"] if draft else N_USED)
    u32("expert_gating_func", 4)
    u32("attention.key_length", D)
    u32("attention.value_length", D)
    u32("rope.dimension_count", R)
    u32("attention.q_lora_rank", QRANK)
    u32("attention.sliding_window", WINDOW)
    u32("expert_feed_forward_length", F)
    u32("expert_shared_count", 1)
    w.add_float32(a + "expert_weights_scale", 1.5)
    w.add_bool(a + "expert_weights_norm", True)
    if not draft:
        u32("attention.indexer.head_count", IHEADS)
        u32("attention.indexer.key_length", IWIDTH)
        u32("attention.indexer.top_k", TOPK)
        u32("attention.candidate_source_layer_id", CAND_SOURCE)
        u32("attention.candidate_block_size", CAND_BLOCK)
        u32("attention.candidate_topk_blocks", CAND_KEEP)
    u32("attention.output_group_count", GROUPS)
    u32("attention.output_lora_rank", ORANK)
    if not draft:
        w.add_float32(a + "attention.compress_rope_freq_base", COMPRESS_BASE)
    arr("attention.compress_ratios", [0] * n_layer if draft else RATIOS, V.INT32)
    u32("hyper_connection.count", H)
    u32("hyper_connection.sinkhorn_iterations", SINKHORN)
    w.add_float32(a + "hyper_connection.epsilon", HC_EPS)
    arr("swiglu_clamp_exp", [0.75] * n_layer if draft else [float(x) for x in LIMIT_EXP], V.FLOAT32)
    arr("swiglu_clamp_shexp", [10.0] * n_layer if draft else [float(x) for x in LIMIT_SHEXP], V.FLOAT32)
    u32("hash_layer_count", 0)
    if not draft:
        mult, offsets, token_map = engram_constants()
        arr("engram.layer_ids", ENGRAM_LAYERS, V.UINT32)
        u32("engram.head_count", EHEADS)
        u32("engram.key_length", EWIDTH)
        u32("engram.max_ngram_size", NGRAM)
        arr("engram.multipliers", mult, V.UINT64)
        arr("engram.primes", PRIMES, V.UINT64)
        arr("engram.offsets", offsets, V.UINT64)
        arr("engram.token_map", token_map, V.UINT32)
        u32("engram.pad_id", PAD_ID)

    tokens, types, merges = tokenizer()
    w.add_string("tokenizer.ggml.model", "gpt2")
    w.add_string("tokenizer.ggml.pre", "deepseek-v3")
    w.add_array("tokenizer.ggml.tokens", tokens)
    w.add_array("tokenizer.ggml.token_type", types)
    w.add_array("tokenizer.ggml.merges", merges)
    w.add_uint32("tokenizer.ggml.bos_token_id", 0)
    w.add_uint32("tokenizer.ggml.eos_token_id", 1)
    w.add_uint32("tokenizer.ggml.padding_token_id", 2)
    w.add_bool("tokenizer.ggml.add_bos_token", False)
    if draft:
        w.add_uint32("tokenizer.ggml.mask_token_id", DRAFT["mask"])

    for name, kind, data, shape in tensors:
        if kind == T.F32:
            w.add_tensor(name, data)
        elif f32:
            if kind == T.BF16:
                v = (data.astype(np.uint32) << 16).view(np.float32)
            else:
                v = dequantize(data, kind).astype(np.float32)
            w.add_tensor(name, v.reshape(shape))
        elif kind == T.BF16:
            w.add_tensor(name, data.view(np.uint8).reshape(shape[:-1] + (-1,)), raw_dtype=T.BF16)
        else:
            w.add_tensor(name, data.reshape(shape[:-1] + (-1,)), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("outdir")
    ap.add_argument("--variant", choices=sorted(VARIANTS), default="a")
    ap.add_argument("--only", choices=["mix", "f32"])
    args = ap.parse_args()
    globals().update(VARIANTS[args.variant])
    os.makedirs(args.outdir, exist_ok=True)
    draft = args.variant == "draft"
    tensors = make_draft() if draft else make_tensors()
    for kind in ("mix", "f32"):
        if args.only in (None, kind):
            path = os.path.join(args.outdir, f"{NAME}-{args.variant}-{kind}.gguf")
            write(path, tensors, kind == "f32", draft)
            print(path, os.path.getsize(path))


if __name__ == "__main__":
    main()
