"""A llama-bench that computes nothing: it takes its options and prints its JSON, field by field as the real one does.

$LLAMA_BENCH is what goes wrong: `fail` ends with a message and a status, `junk` prints no JSON, `old` knows no depths.
$LLAMA_BENCH_LOG is a file that gets a line with the arguments of every call.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

FIELDS = [  # in the order in which it prints them
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type",
    "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll",
    "type_k", "type_v", "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn",
    "devices", "tensor_split", "tensor_buft_overrides", "load_mode", "lazy_mode", "embeddings",
    "no_op_offload", "no_host", "repack", "fit_target", "fit_min_ctx", "n_prompt", "n_gen", "n_depth",
    "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
]  # fmt: skip
USAGE = "usage: llama-bench [options]\n  -o, --output <csv|json|jsonl|md|sql>\n  -d, --n-depth <n>\n"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    if log := os.environ.get("LLAMA_BENCH_LOG"):
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(sys.argv[1:]) + "\n")
    if "--help" in sys.argv:
        print(USAGE)
        return 0
    parser = argparse.ArgumentParser()
    for option in ("-m", "-fa", "-ctk", "-ctv", "-o"):
        parser.add_argument(option, default="")
    for option, value in (("-ngl", 99), ("-r", 5), ("-b", 2048), ("-ub", 512), ("-ncmoe", 0), ("-t", 8)):
        parser.add_argument(option, type=int, default=value)
    for option, values in (("-p", [512]), ("-n", [128]), ("-d", [0])):
        parser.add_argument(option, type=numbers, default=values)
    given = parser.parse_args()
    wrong = os.environ.get("LLAMA_BENCH", "")
    if wrong == "fail":
        print("main: error: failed to load model", file=sys.stderr)
        return 1
    if wrong == "junk":
        print("| model | size |")
        return 0
    print("ggml_cuda_init: found 1 CUDA devices:")
    tests = [(n, 0, d) for d in given.d for n in given.p if n] + [(0, n, d) for d in given.d for n in given.n if n]
    shown = [test for test in tests if wrong != "old" or test[2] == 0]
    print("[")
    for place, (prompt, generated, depth) in enumerate(shown):
        count = prompt + generated
        samples = [count * 1_000_000 + place for _ in range(given.r)]
        values: dict[str, object] = dict.fromkeys(FIELDS, "") | {
            "build_commit": "abc1234",
            "build_number": 9999,
            "gpu_info": "a card of paper",
            "backends": "CUDA",
            "model_filename": given.m,
            "n_batch": given.b,
            "n_ubatch": given.ub,
            "n_threads": given.t,
            "cpu_strict": False,
            "poll": 50,
            "type_k": given.ctk,
            "type_v": given.ctv,
            "n_gpu_layers": given.ngl,
            "n_cpu_moe": given.ncmoe,
            "flash_attn": int(given.fa),
            "n_prompt": prompt,
            "n_gen": generated,
            "n_depth": depth,
            "avg_ns": samples[0],
            "stddev_ns": 0,
            "avg_ts": 1000.0,
            "stddev_ts": 0.0,
        }
        print("  {")
        for name in FIELDS:
            print(f'    "{name}": {json.dumps(values[name])},')
        print(f'    "samples_ns": [ {", ".join(map(str, samples))} ],')
        print(f'    "samples_ts": [ {", ".join(str(1e9 * count / ns) for ns in samples)} ]')
        print("  }" + ("," if place + 1 < len(shown) else ""))
    print("\n]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
