"""Tiny F32 files for what the sets of `make_tiny.py` leave out, and (as a program) the oracle's logits for them.

    python variants.py DATA            # writes DATA/variants.npz; needs the oracle

Each variant is a tiny model with edits to its keys and tensors; seeds are fixed, so the bytes are the same each time.
`variants.npz` holds `tokens` and one array of logits for each variant (F32 cache, flash attention off).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import make_tiny
import numpy as np

Tensors = dict[str, np.ndarray[Any, Any]]
Edit = Callable[["Draft"], None]
TOKENS = np.random.default_rng(11).integers(0, 500, 16)


class Draft:
    """A model about to be written: its keys (with the architecture's prefix left out) and its tensors."""

    def __init__(self, base: str) -> None:
        spec = make_tiny.MODELS[base]
        self.architecture: str = spec["arch"]
        self.writer = gguf.GGUFWriter(None, self.architecture)
        weights = make_tiny.Weights(20)
        spec["build"](self.writer, weights, dict(spec, name=f"tiny {base}"))
        self.tensors: Tensors = weights.out
        self.rng = np.random.default_rng(21)

    def set(self, key: str, value: float | str | bool) -> None:
        self.drop(key)
        name = f"{self.architecture}.{key}"
        if isinstance(value, bool):
            self.writer.add_bool(name, value)
        elif isinstance(value, int):
            self.writer.add_uint32(name, value)
        elif isinstance(value, float):
            self.writer.add_float32(name, value)
        else:
            self.writer.add_string(name, value)

    def drop(self, key: str) -> None:
        self.writer.kv_data[0].pop(f"{self.architecture}.{key}", None)

    def matching(self, part: str) -> list[str]:
        return [name for name in self.tensors if part in name]

    def noise(self, *shape: int, scale: float = 0.3) -> np.ndarray[Any, Any]:
        return np.asarray(scale * self.rng.standard_normal(shape), np.float32)

    def write(self, path: Path) -> None:
        for name, values in self.tensors.items():
            self.writer.add_tensor(name, np.ascontiguousarray(values))
        self.writer.write_header_to_file(path)
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def tied(d: Draft) -> None:
    del d.tensors["output.weight"]


def llama3_factors(d: Draft) -> None:
    d.tensors["rope_freqs.weight"] = np.linspace(1, 8, 16, dtype=np.float32)


def scaling(kind: str, factor: float, original: int, **more: float) -> Edit:
    """Stretched context; `more` are further keys under rope.scaling."""

    def edit(d: Draft) -> None:
        d.drop("rope.scaling.yarn_log_multiplier")
        d.set("rope.scaling.type", kind)
        d.set("rope.scaling.factor", factor)
        d.set("rope.scaling.original_context_length", original)
        for key, value in more.items():
            d.set(f"rope.scaling.{key}", value)

    return edit


def great_epsilon(d: Draft) -> None:
    d.set("attention.layer_norm_rms_epsilon", 0.05)


def old_linear_key(d: Draft) -> None:
    d.set("rope.scale_linear", 2.0)


def biases(d: Draft) -> None:
    for role in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        for name in d.matching(f".{role}.weight"):
            d.tensors[name.replace("weight", "bias")] = d.noise(d.tensors[name].shape[0])


def fused_qkv(d: Draft) -> None:
    for name in d.matching(".attn_q.weight"):
        parts = [d.tensors.pop(name.replace("attn_q", role)) for role in ("attn_q", "attn_k", "attn_v")]
        d.tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)


def mixtral(d: Draft) -> None:
    d.set("expert_count", 6)
    d.set("expert_used_count", 2)
    for role in ("ffn_gate", "ffn_up", "ffn_down"):
        for name in d.matching(f".{role}.weight"):
            matrix = d.tensors.pop(name)
            rolled = [np.roll(matrix, 7 * e, axis=0) for e in range(6)]
            d.tensors[name.replace(role, f"{role}_exps")] = np.stack(rolled)
    for name in d.matching("ffn_gate_exps"):
        d.tensors[name.replace("ffn_gate_exps", "ffn_gate_inp")] = d.noise(6, 256, scale=0.2)


def shared_width(d: Draft) -> None:
    d.drop("expert_feed_forward_length")
    d.set("feed_forward_length", 1024)


def plain_router(d: Draft) -> None:
    """As V2 files before expert_gating_func: softmax scores, no bias, no groups, not normalised, no context scaling."""
    for key in ("expert_gating_func", "expert_group_count", "expert_group_used_count", "expert_weights_norm"):
        d.drop(key)
    for key in ("type", "factor", "original_context_length", "yarn_log_multiplier"):
        d.drop(f"rope.scaling.{key}")
    d.drop("expert_weights_scale")
    for name in d.matching("exp_probs_b"):
        del d.tensors[name]


def least_sum(d: Draft) -> None:
    """Four experts that the bias always chooses and whose scores nearly vanish together: the sum's lower bound acts."""
    for name in d.matching("exp_probs_b"):
        d.tensors[name] = np.where(np.arange(16) < 4, 5, 0).astype(np.float32)
        router = d.tensors[name.replace("exp_probs_b.bias", "ffn_gate_inp.weight")].copy()
        router[:4] = router[0] * np.array([5, 5.5, 6, 6.5], np.float32)[:, None]
        d.tensors[name.replace("exp_probs_b.bias", "ffn_gate_inp.weight")] = router


VARIANTS: dict[str, tuple[str, Edit]] = {
    "llama-tied": ("llama", tied),
    "llama-epsilon": ("llama", great_epsilon),
    "llama-factors": ("llama", llama3_factors),
    "llama-linear": ("llama", scaling("linear", 4.0, 64)),
    "llama-scale-linear": ("llama", old_linear_key),
    "llama-unscaled": ("llama", scaling("none", 4.0, 64)),
    "llama-yarn": ("llama", scaling("yarn", 4.0, 64)),
    "llama-biases": ("llama", biases),
    "llama-fused-qkv": ("llama", fused_qkv),
    "llama-experts": ("llama", mixtral),
    "qwen3-yarn": ("qwen3", scaling("yarn", 8.0, 64, attn_factor=1.25)),
    "qwen3-tied": ("qwen3", tied),
    "qwen3moe-shared-width": ("qwen3moe", shared_width),
    "deepseek2-yarn-unstated": ("deepseek2-v3", scaling("yarn", 40.0, 4096, attn_factor=0.8)),
    "deepseek2-yarn-half": ("deepseek2-v3", scaling("yarn", 40.0, 4096, yarn_log_multiplier=0.05)),
    "deepseek2-yarn-attn-factor": (
        "deepseek2-v3",
        scaling("yarn", 40.0, 4096, yarn_log_multiplier=0.1, attn_factor=0.9),
    ),
    "deepseek2-linear": ("deepseek2-v3", scaling("linear", 4.0, 4096, yarn_log_multiplier=0.1)),
    "deepseek2-plain-router": ("deepseek2-v3", plain_router),
    "deepseek2-least-sum": ("deepseek2-v3", least_sum),
}


def write_variant(name: str, path: Path) -> None:
    base, edit = VARIANTS[name]
    draft = Draft(base)
    edit(draft)
    draft.write(path)


def main() -> None:
    import oracle

    data = Path(sys.argv[1])
    arrays: dict[str, np.ndarray[Any, Any]] = {"tokens": TOKENS.astype(np.int32)}
    with tempfile.TemporaryDirectory() as work:
        for name in VARIANTS:
            path = Path(work) / f"{name}.gguf"
            write_variant(name, path)
            model = oracle.Model(path, kv="f32")
            arrays[name] = model.logits(TOKENS.tolist())
            model.close()
            path.unlink()
            print(name, float(arrays[name].std()), flush=True)
    np.savez_compressed(data / "variants.npz", **arrays)


if __name__ == "__main__":
    main()
