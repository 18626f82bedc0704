# ruff: noqa  (part of the oracle kit, kept as it came so that it makes the same bytes)
"""Write tiny seeded random-weight GGUF files for mixture-of-experts models.

    python make_tiny.py OUTDIR [--models a,b] [--quants F32,Q4_K_M,...]

F32 files need only `gguf` and `numpy`; quantised ones also need the oracle
(`llama-cpp-python`), whose quantiser makes them.

Every weight matrix picks its rows from a small pool of random rows (one pool for
each row length), so the files compress about tenfold while each matrix, expert and
layer still differs.  Pool values are bfloat16 numbers, so F32, F16 and BF16 files
hold exactly the same weights.  Each block adds only a part (gain `branch`) to the
residual stream, so that rounding differences do not blow up from layer to layer.
"""

import argparse
import os

import numpy as np
from gguf import GGUFWriter

N_VOCAB = 512
POOL = 512

TEXT = """The quick brown fox jumps over the lazy dog while the other animals watch.
There is nothing either good or bad, but thinking makes it so. When in the course of
human events, it becomes necessary for one people to dissolve the bands which have
connected them with another. for i in range(10): print(i, values[i]) # loop
def function(self, name, value): return self.name + value
The model reads the tokens, and then the experts are selected by the router. It was
the best of times, it was the worst of times, it was the age of wisdom, it was the age
of foolishness, it was the season of light, it was the season of darkness. All happy
families are alike; every unhappy family is unhappy in its own way. Call me again some
years from now, never mind how long precisely, having little or no money in my purse,
and nothing particular to interest me on shore. import numpy as np; return np.zeros(3)"""


# ---------------------------------------------------------------- tokenizer
def byte_alphabet():
    """The printable stand-in for each byte that byte-level BPE vocabularies use."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for b in range(256):
        if b in plain:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


def train_bpe(n_merges):
    import re

    alpha = byte_alphabet()
    words = {}
    for w in re.findall(r" ?\w+| ?[^\w\s]+|\s+", TEXT):
        key = tuple(alpha[b] for b in w.encode())
        words[key] = words.get(key, 0) + 1
    merges = []
    while len(merges) < n_merges:
        pairs = {}
        for w, n in words.items():
            for p in zip(w, w[1:]):
                pairs[p] = pairs.get(p, 0) + n
        if not pairs:
            break
        best = max(pairs.items(), key=lambda kv: (kv[1], kv[0]))[0]
        merges.append(best)
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
    return merges


def add_tokenizer_sized(w, pre, n_vocab):
    """The same tokenizer, filled up with unused tokens to n_vocab."""
    global N_VOCAB
    keep, N_VOCAB = N_VOCAB, n_vocab
    try:
        add_tokenizer(w, pre, 252)
    finally:
        N_VOCAB = keep


def add_tokenizer(w, pre, n_merges=None):
    bar, low = "\uff5c", "\u2581"
    if pre.startswith("deepseek"):
        special = [
            "<%sbegin%sof%ssentence%s>" % (bar, low, low, bar),
            "<%send%sof%ssentence%s>" % (bar, low, low, bar),
            "<%sUser%s>" % (bar, bar),
            "<%sAssistant%s>" % (bar, bar),
        ]
    else:
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    alpha = byte_alphabet()
    merges = train_bpe(n_merges or N_VOCAB - 256 - len(special))
    toks = [alpha[b] for b in range(256)]
    seen = set(toks)
    keep = []
    for a, b in merges:
        keep.append("%s %s" % (a, b))
        if a + b not in seen:
            seen.add(a + b)
            toks.append(a + b)
    types = [1] * len(toks)
    while len(toks) < N_VOCAB - len(special):  # two merges may make one token
        toks.append("[UNUSED%d]" % len(toks))
        types.append(5)
    first = len(toks)
    toks += special
    types += [3] * len(special)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(toks)
    w.add_token_types(types)
    w.add_token_merges(keep)
    if pre.startswith("deepseek"):
        w.add_bos_token_id(first)
        w.add_eos_token_id(first + 1)
        w.add_pad_token_id(first + 1)
        w.add_add_bos_token(True)
    else:
        w.add_bos_token_id(first)
        w.add_eos_token_id(first + 2)
        w.add_pad_token_id(first)
        w.add_add_bos_token(False)


# ------------------------------------------------------------------ weights
def bf16(x):
    """Round to bfloat16, kept as float32; what float16 can't hold goes to 0."""
    x = np.asarray(x, np.float32)
    u = x.view(np.uint32)
    u = (u + 0x7FFF + ((u >> 16) & 1)) & np.uint32(0xFFFF0000)
    y = u.view(np.float32).copy()
    y[np.abs(y) < 2.0**-12] = 0
    return y


class Weights:
    def __init__(self, seed):
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.pools = {}
        self.out = {}

    def pool(self, width, kind=0):
        if (width, kind) not in self.pools:
            r = np.random.default_rng([self.seed, width, kind])
            self.pools[width, kind] = bf16(r.standard_normal((POOL, width)) / np.sqrt(width))
        return self.pools[width, kind]

    def mat(self, name, width, *rows, kind=0, distinct=False, gain=1.0):
        """A tensor whose GGUF shape is [width, rows[-1], ...]; numpy order outside in."""
        n = int(np.prod(rows))
        idx = self.rng.permutation(POOL)[:n] if distinct else self.rng.integers(0, POOL, n)
        a = self.pool(width, kind)[idx].reshape(*rows, width)
        self.out[name] = a if gain == 1 else bf16(a * gain)

    def vec(self, name, n, mean=1.0, dev=0.1):
        self.out[name] = bf16(mean + dev * self.rng.standard_normal(n))


# ------------------------------------------------------------------- models
def common(w, arch, s):
    w.add_name(s["name"])
    w.add_context_length(s.get("n_ctx", 4096))
    w.add_embedding_length(s["n_embd"])
    w.add_block_count(s["n_layer"])
    w.add_feed_forward_length(s["n_ff"])
    w.add_head_count(s["n_head"])
    w.add_head_count_kv(s["n_kv"])
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(s["theta"])
    w.add_vocab_size(N_VOCAB)
    w.add_file_type(0)


def head_and_tail(t, e):
    # its own rows for the output, or each token's own embedding would pick the top-1
    t.mat("token_embd.weight", e, N_VOCAB, distinct=True, gain=np.sqrt(e))
    t.vec("output_norm.weight", e, mean=3.0)
    t.mat("output.weight", e, N_VOCAB, kind=1, distinct=True)


def experts(t, b, e, ff, n, shared=0, router=3.0, branch=0.5):
    # distinct rows: two experts with the same score would make top-k arbitrary
    t.mat(b + "ffn_gate_inp.weight", e, n, distinct=True, gain=router)
    t.mat(b + "ffn_gate_exps.weight", e, n, ff)
    t.mat(b + "ffn_up_exps.weight", e, n, ff)
    t.mat(b + "ffn_down_exps.weight", ff, n, e, gain=branch)
    if shared:
        t.mat(b + "ffn_gate_shexp.weight", e, shared)
        t.mat(b + "ffn_up_shexp.weight", e, shared)
        t.mat(b + "ffn_down_shexp.weight", shared, e, gain=branch)


def dense_ffn(t, b, e, ff, branch=0.5):
    t.mat(b + "ffn_gate.weight", e, ff)
    t.mat(b + "ffn_up.weight", e, ff)
    t.mat(b + "ffn_down.weight", ff, e, gain=branch)


def qwen3(w, t, s):
    common(w, w.arch, s)
    e, hd = s["n_embd"], s["head_dim"]
    w.add_key_length(hd)
    w.add_value_length(hd)
    moe = "n_exp" in s
    if moe:
        w.add_expert_count(s["n_exp"])
        w.add_expert_used_count(s["n_used"])
        w.add_expert_feed_forward_length(s["ff_exp"])
    add_tokenizer(w, "qwen2")
    head_and_tail(t, e)
    for i in range(s["n_layer"]):
        b = "blk.%d." % i
        t.vec(b + "attn_norm.weight", e)
        t.mat(b + "attn_q.weight", e, s["n_head"] * hd)
        t.mat(b + "attn_k.weight", e, s["n_kv"] * hd)
        t.mat(b + "attn_v.weight", e, s["n_kv"] * hd)
        t.mat(b + "attn_output.weight", s["n_head"] * hd, e, gain=0.5)
        t.vec(b + "attn_q_norm.weight", hd, mean=1.5)
        t.vec(b + "attn_k_norm.weight", hd, mean=1.5)
        t.vec(b + "ffn_norm.weight", e)
        if moe:
            experts(t, b, e, s["ff_exp"], s["n_exp"])
        else:
            dense_ffn(t, b, e, s["n_ff"])


def llama(w, t, s):
    common(w, w.arch, s)
    e = s["n_embd"]
    hd = e // s["n_head"]
    w.add_rope_dimension_count(hd)
    add_tokenizer(w, "llama-bpe")
    head_and_tail(t, e)
    for i in range(s["n_layer"]):
        b = "blk.%d." % i
        t.vec(b + "attn_norm.weight", e)
        t.mat(b + "attn_q.weight", e, e)
        t.mat(b + "attn_k.weight", e, s["n_kv"] * hd)
        t.mat(b + "attn_v.weight", e, s["n_kv"] * hd)
        t.mat(b + "attn_output.weight", e, e, gain=0.5)
        t.vec(b + "ffn_norm.weight", e)
        dense_ffn(t, b, e, s["n_ff"])


def deepseek2(w, t, s):
    e, h = s["n_embd"], s["n_head"]
    nope, rope, v, kvl = s["nope"], s["rope"], s["v"], s["kv_lora"]
    mla, br = s.get("mla", True), s.get("branch", 0.5)
    common(w, w.arch, dict(s, n_kv=1 if mla else h))
    if s.get("q_lora"):
        w.add_q_lora_rank(s["q_lora"])
    w.add_kv_lora_rank(kvl)
    if mla:
        w.add_key_length(kvl + rope)
        w.add_value_length(kvl)
        w.add_key_length_mla(nope + rope)
        w.add_value_length_mla(v)
    else:
        w.add_key_length(nope + rope)
        w.add_value_length(v)
    w.add_rope_dimension_count(rope)
    w.add_leading_dense_block_count(s["n_dense"])
    w.add_expert_count(s["n_exp"])
    w.add_expert_used_count(s["n_used"])
    w.add_expert_feed_forward_length(s["ff_exp"])
    w.add_expert_shared_count(s["n_shared"])
    w.add_expert_weights_scale(s["scale"])
    w.add_expert_weights_norm(s["norm"])
    w.add_expert_gating_func(type("E", (), {"value": s["gating"]}))
    if s.get("groups"):
        w.add_expert_group_count(s["groups"][0])
        w.add_expert_group_used_count(s["groups"][1])
    w.add_string(w.arch + ".rope.scaling.type", "yarn")
    w.add_float32(w.arch + ".rope.scaling.factor", 40.0)
    w.add_uint32(w.arch + ".rope.scaling.original_context_length", s["n_ctx_orig"])
    # the converter writes 0.1 * mscale_all_dim under this key
    w.add_float32(w.arch + ".rope.scaling.yarn_log_multiplier", 0.1 * s["mscale_all"])
    add_tokenizer(w, s["pre"])
    head_and_tail(t, e)
    for i in range(s["n_layer"]):
        b = "blk.%d." % i
        t.vec(b + "attn_norm.weight", e)
        if s.get("q_lora"):
            t.mat(b + "attn_q_a.weight", e, s["q_lora"])
            t.vec(b + "attn_q_a_norm.weight", s["q_lora"])
            t.mat(b + "attn_q_b.weight", s["q_lora"], h * (nope + rope))
        else:
            t.mat(b + "attn_q.weight", e, h * (nope + rope))
        t.mat(b + "attn_kv_a_mqa.weight", e, kvl + rope)
        t.vec(b + "attn_kv_a_norm.weight", kvl)
        # the two halves of kv_b; the first is kept transposed, head by head, for MLA
        t.mat(b + "attn_k_b.weight", nope, h, kvl)
        t.mat(b + "attn_v_b.weight", kvl, h, v)
        if not mla:
            k = t.out.pop(b + "attn_k_b.weight").transpose(0, 2, 1)  # h, nope, kvl
            vv = t.out.pop(b + "attn_v_b.weight")  # h, v, kvl
            t.out[b + "attn_kv_b.weight"] = np.ascontiguousarray(
                np.concatenate([k, vv], 1).reshape(h * (nope + v), kvl)
            )
        t.mat(b + "attn_output.weight", h * v, e, gain=br)
        t.vec(b + "ffn_norm.weight", e)
        if i < s["n_dense"]:
            dense_ffn(t, b, e, s["n_ff"], branch=br)
        else:
            experts(t, b, e, s["ff_exp"], s["n_exp"], s["n_shared"] * s["ff_exp"], branch=br)
            if s.get("bias"):
                t.vec(b + "exp_probs_b.bias", s["n_exp"], mean=0, dev=0.1)


def deepseek4(w, t, s):
    e, h, hd, ql = s["n_embd"], s["n_head"], s["head_dim"], s["q_lora"]
    hc, og, ol = s["hc"], s["o_groups"], s["o_lora"]
    ih, ihd = s["idx_heads"], s["idx_dim"]
    a = w.arch
    common(w, a, dict(s, n_kv=1))
    w.add_key_length(hd)
    w.add_value_length(hd)
    w.add_rope_dimension_count(s["rope"])
    w.add_q_lora_rank(ql)
    w.add_sliding_window(s["window"])
    w.add_expert_count(s["n_exp"])
    w.add_expert_used_count(s["n_used"])
    w.add_expert_feed_forward_length(s["ff_exp"])
    w.add_expert_shared_count(s["n_shared"])
    w.add_expert_weights_scale(s["scale"])
    w.add_expert_weights_norm(True)
    w.add_expert_gating_func(type("E", (), {"value": 4}))  # sqrt(softplus)
    n = s["n_layer"]
    w.add_array(a + ".swiglu_clamp_exp", [s["clamp"]] * n)
    w.add_array(a + ".swiglu_clamp_shexp", [s["clamp"]] * n)
    w.add_uint32(a + ".attention.indexer.head_count", ih)
    w.add_uint32(a + ".attention.indexer.key_length", ihd)
    w.add_uint32(a + ".attention.indexer.top_k", s["top_k"])
    w.add_uint32(a + ".attention.output_group_count", og)
    w.add_uint32(a + ".attention.output_lora_rank", ol)
    w.add_array(a + ".attention.compress_ratios", s["ratios"])
    w.add_float32(a + ".attention.compress_rope_freq_base", s["theta_c"])
    w.add_uint32(a + ".hyper_connection.count", hc)
    w.add_uint32(a + ".hyper_connection.sinkhorn_iterations", 20)
    w.add_float32(a + ".hyper_connection.epsilon", 1e-6)
    w.add_uint32(a + ".hash_layer_count", s["n_hash"])
    w.add_uint32(a + ".embedding_length_out", e * hc)
    w.add_string(a + ".rope.scaling.type", "yarn")
    w.add_float32(a + ".rope.scaling.factor", 16.0)
    w.add_uint32(a + ".rope.scaling.original_context_length", s["n_ctx_orig"])
    w.add_float32(a + ".rope.scaling.yarn_beta_fast", 32.0)
    w.add_float32(a + ".rope.scaling.yarn_beta_slow", 1.0)
    add_tokenizer(w, s["pre"])
    head_and_tail(t, e)
    hcd, mix = hc * e, (2 + hc) * hc
    t.mat("output_hc_fn.weight", hcd, hc)
    t.vec("output_hc_base.weight", hc, mean=0, dev=0.5)
    t.vec("output_hc_scale.weight", 1, mean=0.7, dev=0.05)
    for i in range(n):
        b = "blk.%d." % i
        t.vec(b + "attn_norm.weight", e)
        t.vec(b + "attn_sinks.weight", h, mean=0, dev=1)
        t.mat(b + "attn_q_a.weight", e, ql)
        t.vec(b + "attn_q_a_norm.weight", ql)
        t.mat(b + "attn_q_b.weight", ql, h * hd)
        t.mat(b + "attn_kv.weight", e, hd)
        t.vec(b + "attn_kv_a_norm.weight", hd, mean=1.5)
        t.mat(b + "attn_output_a.weight", h * hd // og, og * ol)
        t.mat(b + "attn_output_b.weight", og * ol, e, gain=0.5)
        for part in ("attn", "ffn"):
            t.mat(b + "hc_%s_fn.weight" % part, hcd, mix)
            t.vec(b + "hc_%s_base.weight" % part, mix, mean=0, dev=0.5)
            t.vec(b + "hc_%s_scale.weight" % part, 3, mean=0.7, dev=0.05)
        r = s["ratios"][i]
        if r:
            coff = 2 if r == 4 else 1
            t.mat(b + "attn_compressor_kv.weight", e, coff * hd)
            t.mat(b + "attn_compressor_gate.weight", e, coff * hd)
            t.mat(b + "attn_compressor_ape.weight", coff * hd, r, gain=8.0)
            t.vec(b + "attn_compressor_norm.weight", hd, mean=1.5)
        if r == 4:
            t.mat(b + "indexer.proj.weight", e, ih)
            t.mat(b + "indexer.attn_q_b.weight", ql, ih * ihd)
            t.mat(b + "indexer_compressor_kv.weight", e, 2 * ihd)
            t.mat(b + "indexer_compressor_gate.weight", e, 2 * ihd)
            t.mat(b + "indexer_compressor_ape.weight", 2 * ihd, r, gain=8.0)
            t.vec(b + "indexer_compressor_norm.weight", ihd)
        t.vec(b + "ffn_norm.weight", e)
        experts(t, b, e, s["ff_exp"], s["n_exp"], s["n_shared"] * s["ff_exp"])
        if i < s["n_hash"]:
            ids = np.argsort(t.rng.random((N_VOCAB, s["n_exp"])), 1)[:, : s["n_used"]]
            t.out[b + "ffn_gate_tid2eid.weight"] = np.ascontiguousarray(ids.astype(np.int32))
        else:
            t.vec(b + "exp_probs_b.bias", s["n_exp"], mean=0, dev=0.1)


LITE = dict(
    arch="deepseek2",
    build=deepseek2,
    n_embd=256,
    n_layer=27,
    n_head=2,
    theta=10000.0,
    nope=32,
    rope=16,
    v=64,
    kv_lora=256,
    n_ff=416,
    ff_exp=32,
    n_exp=12,
    n_used=3,
    n_shared=2,
    n_dense=1,
    scale=1.0,
    norm=False,
    gating=1,
    n_ctx=163840,
    n_ctx_orig=4096,
    mscale_all=0.707,
    branch=0.25,
    pre="deepseek-llm",
)

# Not 8 experts in any of them: llama.cpp's mixes have rules for just that number.
MODELS = {
    # head_dim * n_head != n_embd, as in Qwen3-30B-A3B
    "qwen3moe": dict(
        arch="qwen3moe",
        build=qwen3,
        n_embd=256,
        n_layer=4,
        n_head=8,
        n_kv=2,
        head_dim=64,
        theta=1e6,
        n_ff=512,
        ff_exp=256,
        n_exp=16,
        n_used=4,
    ),
    "qwen3": dict(arch="qwen3", build=qwen3, n_embd=256, n_layer=3, n_head=8, n_kv=2, head_dim=64, theta=1e6, n_ff=768),
    "llama": dict(arch="llama", build=llama, n_embd=256, n_layer=3, n_head=8, n_kv=2, theta=500000.0, n_ff=768),
    # V2-Lite: no q_lora.  llama.cpp takes a deepseek2 file for "lite" by its layer
    # count (26 or 27) alone, so a tiny one must have that many layers too.
    "deepseek2-lite": LITE,
    # the same weights as older files have them: kv_b whole, no MLA keys
    "deepseek2-lite-kvb": dict(LITE, mla=False),
    # V3: q_lora, sigmoid scores, selection bias, normalised weights, expert groups
    "deepseek2-v3": dict(
        arch="deepseek2",
        build=deepseek2,
        n_embd=256,
        n_layer=4,
        n_head=4,
        theta=10000.0,
        nope=64,
        rope=32,
        v=64,
        kv_lora=256,
        q_lora=256,
        n_ff=512,
        ff_exp=256,
        n_exp=16,
        n_used=4,
        n_shared=1,
        n_dense=1,
        scale=2.5,
        norm=True,
        gating=2,
        bias=True,
        groups=(4, 2),
        n_ctx=163840,
        n_ctx_orig=4096,
        mscale_all=1.0,
        pre="deepseek-v3",
    ),
    "deepseek4": dict(
        arch="deepseek4",
        build=deepseek4,
        n_embd=256,
        n_layer=6,
        n_head=4,
        head_dim=128,
        theta=10000.0,
        theta_c=160000.0,
        rope=32,
        q_lora=256,
        n_ff=256,
        ff_exp=256,
        n_exp=12,
        n_used=3,
        n_shared=1,
        scale=1.5,
        clamp=10.0,
        hc=4,
        o_groups=2,
        o_lora=128,
        idx_heads=16,
        idx_dim=64,
        top_k=8,
        window=32,
        ratios=[0, 0, 4, 128, 4, 128],
        n_hash=2,
        n_ctx=1048576,
        n_ctx_orig=65536,
        pre="deepseek-v3",
    ),
}


def write_f32(name, path, seed=20):
    s = dict(MODELS[name], name="tiny " + name)
    w = GGUFWriter(str(path), s["arch"])
    t = Weights(seed)
    s["build"](w, t, s)
    for k, a in t.out.items():
        w.add_tensor(k, a)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("out")
    ap.add_argument("--models", default=",".join(MODELS))
    ap.add_argument("--quants", default="F32,Q8_0,Q6_K,Q4_K_M,Q3_K_M,Q2_K,IQ4_XS")
    ap.add_argument("--threads", type=int, default=2)
    args = ap.parse_args()
    os.makedirs(args.out, exist_ok=True)
    for name in args.models.split(","):
        base = os.path.join(args.out, name + "-F32.gguf")
        write_f32(name, base)
        print(base, os.path.getsize(base))
        for q in args.quants.split(","):
            if q == "F32":
                continue
            import oracle

            path = os.path.join(args.out, "%s-%s.gguf" % (name, q))
            oracle.quantize(base, path, q, threads=args.threads)
            print(path, os.path.getsize(path))


if __name__ == "__main__":
    main()
