# ruff: noqa  (part of the oracle kit, kept as it came so that it makes the same bytes)
"""Rebuild data/: the tiny models (xz-packed GGUFs) and the oracle's answers for them.

python build_data.py WORKDIR [--models qwen3moe,llama]     # needs the oracle
"""

import argparse
import lzma
import os

import numpy as np

import dump_logits
import make_tiny
import oracle

ALL = ["F32", "Q8_0", "Q6_K", "Q4_K_M", "Q3_K_M", "Q2_K", "IQ4_XS"]
PLAN = {
    "qwen3moe": ALL,
    "deepseek2-lite": ALL,
    "deepseek2-v3": ["F32", "Q8_0", "Q4_K_M", "Q3_K_M"],
    "deepseek4": ["F32", "Q8_0", "Q4_K_M", "Q3_K_M", "MXFP4_MOE"],
    "deepseek2-lite-kvb": ["F32", "Q4_K_M"],
    "qwen3": ["F32", "Q4_K_M"],
    "llama": ["F32", "Q4_K_M"],
}
# GGUFs kept in data/; the others' answers are there, and make_tiny.py makes the files
SHIP = {
    "qwen3moe": ["Q6_K", "Q4_K_M", "Q3_K_M"],
    "deepseek2-lite": ["Q4_K_M"],
    "deepseek2-v3": ["Q4_K_M"],
    "deepseek4": ["Q4_K_M", "MXFP4_MOE"],
    "llama": ["Q4_K_M"],
}
# past a 128-token block's end, several of 4, and a full sliding window
LENGTH = {"deepseek4": 140}


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("work")
    ap.add_argument("--models", default=",".join(PLAN))
    args = ap.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    data, work = os.path.join(here, "data"), args.work
    os.makedirs(data, exist_ok=True)
    os.makedirs(work, exist_ok=True)
    for name in args.models.split(","):
        base = os.path.join(work, name + "-F32.gguf")
        make_tiny.write_f32(name, base)
        tokens = np.random.default_rng(5).integers(0, 500, LENGTH.get(name, 32)).tolist()
        for q in PLAN[name]:
            path = os.path.join(work, "%s-%s.gguf" % (name, q))
            if q != "F32":
                oracle.quantize(base, path, q)
            npz = os.path.join(data, "%s-%s.npz" % (name, q))
            dump_logits.dump(path, npz, tokens)
            sizes = "npz %8d" % os.path.getsize(npz)
            if q in SHIP.get(name, ()):
                with open(path, "rb") as f:
                    packed = lzma.compress(f.read(), preset=6)
                with open(os.path.join(data, "%s-%s.gguf.xz" % (name, q)), "wb") as f:
                    f.write(packed)
                sizes += "  gguf.xz %8d" % len(packed)
            print("%-28s %s" % (name + "-" + q, sizes), flush=True)


if __name__ == "__main__":
    main()
