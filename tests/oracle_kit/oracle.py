# ruff: noqa  (part of the oracle kit, kept as it came so that it makes the same bytes)
"""Thin wrapper around llama.cpp for use as a reference ("oracle").

Needs `llama-cpp-python` (only its ctypes layer and its shared library are used)
and numpy.  Everything here calls the C API directly so that each position's raw
logits can be read, files can be quantised and speed can be timed.
"""

import ctypes
import time

import numpy as np

# llama_ftype values of llama.h
FTYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K_S": 11,
    "Q3_K_M": 12,
    "Q3_K_L": 13,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "Q2_K_S": 21,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "BF16": 32,
    "MXFP4_MOE": 38,
}
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}

_lib = None


def lib(verbose=False):
    """The llama_cpp ctypes module, with the backend initialised once."""
    global _lib
    if _lib is None:
        import llama_cpp.llama_cpp as c

        if not verbose:

            @c.llama_log_callback
            def quiet(level, text, user):
                # 4 = error; 5 = continuation
                if level == 4:
                    print("llama.cpp: " + text.decode("utf-8", "replace"), end="")

            lib.quiet = quiet  # keep it alive
            c.llama_log_set(quiet, ctypes.c_void_p(0))
        c.llama_backend_init()
        _lib = c
    return _lib


def version():
    import llama_cpp

    c = lib()
    return "llama-cpp-python %s; %s" % (llama_cpp.__version__, c.llama_print_system_info().decode())


class Model:
    def __init__(
        self, path, n_ctx=512, threads=2, kv="f32", flash=False, n_batch=512, vocab_only=False, repack=False, mmap=True
    ):
        c = lib()
        self.c = c
        mp = c.llama_model_default_params()
        mp.vocab_only = vocab_only
        names = [f[0] for f in mp._fields_]
        if "use_mmap" in names:
            mp.use_mmap = mmap
        elif "load_mode" in names and not mmap:
            mp.load_mode = 0
        if "use_extra_bufts" in names:
            # False: plain kernels.  True: weights repacked at load, and AMX where it
            # was compiled in (that path crashes when built by gcc 12.2: see README.md)
            mp.use_extra_bufts = repack
        self.model = c.llama_model_load_from_file(str(path).encode(), mp)
        if not self.model:
            raise RuntimeError("llama.cpp cannot load %s" % path)
        self.vocab = c.llama_model_get_vocab(self.model)
        self.n_vocab = c.llama_vocab_n_tokens(self.vocab)
        self.ctx = None
        if vocab_only:
            return
        cp = c.llama_context_default_params()
        cp.n_ctx = n_ctx
        cp.n_batch = n_batch
        cp.n_ubatch = n_batch
        cp.n_threads = threads
        cp.n_threads_batch = threads
        cp.type_k = KV_TYPES[kv]
        cp.type_v = KV_TYPES[kv]
        cp.flash_attn_type = 1 if flash else 0
        cp.offload_kqv = False
        self.n_batch = n_batch
        self.ctx = c.llama_init_from_model(self.model, cp)
        if not self.ctx:
            raise RuntimeError("llama.cpp cannot make a context for %s" % path)

    def close(self):
        if self.ctx:
            self.c.llama_free(self.ctx)
            self.ctx = None
        if self.model:
            self.c.llama_model_free(self.model)
            self.model = None

    __del__ = close

    # -- evaluation -------------------------------------------------------
    def reset(self):
        self.c.llama_memory_clear(self.c.llama_get_memory(self.ctx), True)

    def eval(self, tokens, pos0=0, all_logits=True):
        """Run tokens at positions pos0...; float32 logits, one row a position
        (or the last position's only)."""
        c = self.c
        out = []
        for start in range(0, len(tokens), self.n_batch):
            part = tokens[start : start + self.n_batch]
            b = c.llama_batch_init(len(part), 0, 1)
            b.n_tokens = len(part)
            last = start + len(part) == len(tokens)
            for i, t in enumerate(part):
                b.token[i] = int(t)
                b.pos[i] = pos0 + start + i
                b.n_seq_id[i] = 1
                b.seq_id[i][0] = 0
                b.logits[i] = 1 if all_logits or (last and i == len(part) - 1) else 0
            rc = c.llama_decode(self.ctx, b)
            if rc != 0:
                raise RuntimeError("llama_decode: %d" % rc)
            n = len(part) if all_logits else int(last)
            if n:
                p = c.llama_get_logits(self.ctx)
                a = np.ctypeslib.as_array(p, shape=(n * self.n_vocab,))
                out.append(a.reshape(n, self.n_vocab).copy())
            c.llama_batch_free(b)
        return np.concatenate(out) if out else np.zeros((0, self.n_vocab), np.float32)

    def logits(self, tokens):
        self.reset()
        return self.eval(tokens)

    def greedy(self, tokens, n=32):
        """n greedy tokens after `tokens` (argmax; lowest id on ties), and the
        logits that each was picked from."""
        self.reset()
        row = self.eval(tokens, all_logits=False)[-1]
        pos, got, rows = len(tokens), [], []
        for _ in range(n):
            rows.append(row)
            t = int(row.argmax())
            got.append(t)
            row = self.eval([t], pos0=pos, all_logits=False)[-1]
            pos += 1
        return got, np.stack(rows)

    # -- vocabulary -------------------------------------------------------
    def tokenize(self, text, add_special=False, parse_special=False):
        raw = text.encode() if isinstance(text, str) else text
        cap = len(raw) + 16
        buf = (self.c.llama_token * cap)()
        n = self.c.llama_tokenize(self.vocab, raw, len(raw), buf, cap, add_special, parse_special)
        if n < 0:
            raise RuntimeError("llama_tokenize: %d" % n)
        return list(buf[:n])

    def piece(self, token, special=True):
        buf = ctypes.create_string_buffer(512)
        n = self.c.llama_token_to_piece(self.vocab, token, buf, 512, 0, special)
        return buf.raw[:n]

    def detokenize(self, tokens, special=True):
        return b"".join(self.piece(t, special) for t in tokens)

    # -- timing -----------------------------------------------------------
    def bench(self, n_prompt=512, n_gen=64, depth=0, reps=3, seed=1):
        """(prompt tokens/s, decode tokens/s), the best of `reps`."""
        rng = np.random.default_rng(seed)
        toks = rng.integers(0, self.n_vocab, n_prompt + depth + n_gen).tolist()
        pp = tg = 0.0
        for r in range(reps + 1):  # the first round only warms up
            self.reset()
            if n_prompt:
                t = time.perf_counter()
                self.eval(toks[:n_prompt], all_logits=False)
                if r:
                    pp = max(pp, n_prompt / (time.perf_counter() - t))
            if n_gen:
                self.reset()
                if depth:
                    self.eval(toks[:depth], all_logits=False)
                t = time.perf_counter()
                for i in range(n_gen):
                    self.eval([toks[depth + i]], pos0=depth + i, all_logits=False)
                if r:
                    tg = max(tg, n_gen / (time.perf_counter() - t))
        return pp, tg


def quantize(src, dst, ftype, threads=2, pure=False, allow_requantize=False):
    c = lib()
    p = c.llama_model_quantize_default_params()
    p.nthread = threads
    p.ftype = FTYPES[ftype]
    p.pure = pure
    p.allow_requantize = allow_requantize
    rc = c.llama_model_quantize(str(src).encode(), str(dst).encode(), ctypes.byref(p))
    if rc != 0:
        raise RuntimeError("llama_model_quantize: %d" % rc)


def perplexity(logits, tokens):
    """exp of the mean next-token loss of `tokens` under `logits` (row i predicts i+1)."""
    x = logits[:-1].astype(np.float64)
    m = x.max(1, keepdims=True)
    lse = m[:, 0] + np.log(np.exp(x - m).sum(1))
    nll = lse - x[np.arange(len(x)), np.asarray(tokens[1:])]
    return float(np.exp(nll.mean()))


def compare(a, b):
    """How far logits b lie from a: a dict of plain numbers."""
    a = a.astype(np.float64)
    b = b.astype(np.float64)

    def logsm(x):
        x = x - x.max(1, keepdims=True)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    la, lb = logsm(a), logsm(b)
    kl = (np.exp(la) * (la - lb)).sum(1)
    err = np.abs(a - b)
    rel = np.sqrt(((a - b) ** 2).sum(1) / ((a - a.mean(1, keepdims=True)) ** 2).sum(1))
    return {
        "max_abs": float(err.max()),
        "mean_abs": float(err.mean()),
        "rel_rms_median": float(np.median(rel)),
        "rel_rms_max": float(rel.max()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1_agree": float((a.argmax(1) == b.argmax(1)).mean()),
    }
