# ruff: noqa  (part of the oracle kit, kept as it came so that it makes the same bytes)
"""Run the oracle on a GGUF and write what it says as an .npz.

    python dump_logits.py MODEL.gguf OUT.npz --random 32 --seed 5
    python dump_logits.py MODEL.gguf OUT.npz --tokens 1,2,3
    python dump_logits.py MODEL.gguf OUT.npz --text "Once upon"

In the .npz: `tokens` (int32, n), `logits` (float32, n x n_vocab; row i follows
tokens[0..i]), `greedy` (int32, the greedy continuation), `greedy_margin` (float32, how
far the top logit stood above the second at each greedy step: where it is small, another
correct implementation may differ from there on), `info` (a JSON string).
"""

import argparse
import json

import numpy as np

import oracle


def dump(path, out, tokens, n_greedy=32, kv="f32", flash=False, threads=2, repack=False):
    m = oracle.Model(
        path, n_ctx=max(256, len(tokens) + n_greedy + 8), threads=threads, kv=kv, flash=flash, repack=repack
    )
    logits = m.logits(tokens)
    greedy, rows = m.greedy(tokens, n_greedy)
    top = np.sort(rows, 1)[:, -2:]
    info = {
        "oracle": oracle.version(),
        "kv": kv,
        "flash": flash,
        "perplexity_of_tokens": oracle.perplexity(logits, tokens),
    }
    np.savez_compressed(
        out,
        tokens=np.asarray(tokens, np.int32),
        logits=logits.astype(np.float32),
        greedy=np.asarray(greedy, np.int32),
        greedy_margin=(top[:, 1] - top[:, 0]).astype(np.float32),
        info=np.array(json.dumps(info)),
    )
    m.close()
    return logits, greedy


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("model")
    ap.add_argument("out")
    g = ap.add_mutually_exclusive_group(required=True)
    g.add_argument("--tokens", help="token ids, comma-separated")
    g.add_argument("--text")
    g.add_argument("--random", type=int, metavar="N")
    ap.add_argument("--seed", type=int, default=5)
    ap.add_argument("--greedy", type=int, default=32)
    ap.add_argument("--kv", default="f32", choices=sorted(oracle.KV_TYPES))
    ap.add_argument("--flash", action="store_true")
    ap.add_argument("--repack", action="store_true")
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    if a.tokens:
        tokens = [int(t) for t in a.tokens.split(",")]
    else:
        m = oracle.Model(a.model, vocab_only=True)
        if a.text is not None:
            tokens = m.tokenize(a.text, add_special=True)
        else:
            # ids below 500: clear of the tiny files' special tokens
            top = min(m.n_vocab, 500) if m.n_vocab <= 512 else m.n_vocab
            tokens = np.random.default_rng(a.seed).integers(0, top, a.random).tolist()
        m.close()
    logits, greedy = dump(a.model, a.out, tokens, a.greedy, a.kv, a.flash, a.threads, a.repack)
    print("tokens", len(tokens), "logits", logits.shape, "std %.3f" % logits.std())
    print("top-1 of the last position", int(logits[-1].argmax()), "greedy", greedy)


if __name__ == "__main__":
    main()
