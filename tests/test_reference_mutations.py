"""The oracle gates are seen to fail: each fault below is planted in a program, in the reference or in the reading of
hyper-parameters, one at a time, and the gate named beside it must notice (relative rms above the F32 band).

Planted. In the program: softmax scale without mscale squared, wrong group of a query head, no q/k norm, another
epsilon, another norm's weight, sigmoid for softmax, no normalisation, no expert scale, no selection bias, no groups, no
shared experts, absorbed query without its plain part, keys without the shared rotated part, no YaRN magnitude, pairs as
halves and the reverse. In the reference: angles one position off, attention that sees the next position, the last rank
left out, SwiGLU without its gate's value, groups ranked by their best instead of their two best, bias left in the
mixing weights, the next expert's scores, no lower bound of the mixing sum. In reading: wrong ends of YaRN's ramp, log
multiplier ten times or missing, YaRN's softmax scale for linear scaling, another router for files without the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle_data import f32_file, figures
from running import evaluate
from test_reference_oracle import F32_BAND, write_variant

from bloomery.runtime import reference, reference_ops
from bloomery.runtime.architectures import build_program, deepseek2, rotary
from bloomery.runtime.divergence import divergence
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Attention, HeadMatMul, Op, Program, RmsNorm, Router
from bloomery.runtime.reference import ReferenceExecutor

Edit = Callable[[Op], Op | None]


def loss(program: Program, tokens: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return divergence(expected, evaluate(ReferenceExecutor(program, context=64), tokens)).relative_rms_max


def program_and_figures(gate: str, folder: Path) -> tuple[Program, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A gate is the name of a tiny model or of a variant."""
    if gate in ("llama", "qwen3", "qwen3moe", "deepseek2-lite", "deepseek2-v3", "deepseek2-lite-kvb"):
        stored = figures(f"{gate}-F32")
        return build_program(ModelFile.open(f32_file(gate))), stored["tokens"], stored["logits"]
    write_variant(gate, folder / "variant.gguf")
    stored = figures("variants")
    return build_program(ModelFile.open(folder / "variant.gguf")), stored["tokens"], stored[gate]


def on(kind: type[Any], change: Callable[[Any], Op | None]) -> Edit:
    """Changes (or with None drops) every op of a kind."""
    return lambda op: change(op) if isinstance(op, kind) else op


ROUTE = reference_ops.route


def _biased_mix(logits: Any, used: int, **given: Any) -> Any:
    ids, _ = ROUTE(logits, used, **given)
    mix = np.take_along_axis(reference_ops.sigmoid(logits) + given["bias"], ids, axis=1)
    return ids, mix / mix.sum(axis=1, keepdims=True) * logits.dtype.type(given["scale"])


def _best_of_group(logits: Any, used: int, **given: Any) -> Any:
    """Groups ranked by their single best selection."""
    selection = reference_ops.sigmoid(logits) + given["bias"]
    groups = selection.reshape(len(selection), given["groups"], -1)
    stay = reference_ops.descending(groups.max(-1))[:, : given["groups_used"]]
    kept = np.zeros(groups.shape[:2], bool)
    np.put_along_axis(kept, stay, True, axis=1)
    barred = np.where(np.repeat(kept, groups.shape[2], axis=1), 0, -100.0).astype(logits.dtype)
    rows = [
        ROUTE(logits[r : r + 1], used, **(given | {"groups": 1, "bias": given["bias"] + barred[r]}))
        for r in range(len(logits))
    ]
    return np.concatenate([ids for ids, _ in rows]), np.concatenate([mix for _, mix in rows])


OP_FAULTS: dict[str, tuple[str, Edit]] = {
    "softmax scale without mscale": ("deepseek2-v3", on(Attention, lambda op: replace(op, scale=1 / math.sqrt(96)))),
    "wrong group of a query head": (
        "qwen3",
        lambda op: replace(op, q=replace(op.q, start=64)) if isinstance(op, Attention) else op,
    ),
    "no q/k norm": ("qwen3", on(RmsNorm, lambda op: None if "_norm" in op.name and op.x.count > 1 else op)),
    "epsilon": ("llama-epsilon", on(RmsNorm, lambda op: replace(op, epsilon=1e-5))),
    "another norm's weight": ("llama", on(RmsNorm, lambda op: replace(op, weight="blk.0.attn_norm.weight"))),
    "sigmoid for softmax": ("qwen3moe", on(Router, lambda op: replace(op, gating="sigmoid"))),
    "no normalisation": ("qwen3moe", on(Router, lambda op: replace(op, normalise=False))),
    "no expert scale": ("deepseek2-v3", on(Router, lambda op: replace(op, scale=1.0))),
    "no bias": ("deepseek2-v3", on(Router, lambda op: replace(op, bias=None))),
    "no groups": ("deepseek2-v3", on(Router, lambda op: replace(op, groups=1, groups_used=1))),
    "no shared experts": ("deepseek2-lite", lambda op: None if op.name.endswith("add_shexp") else op),
    "no plain query": ("deepseek2-lite", lambda op: None if isinstance(op, HeadMatMul) and "k_b" in op.name else op),
    "no shared key part": ("deepseek2-lite-kvb", lambda op: None if op.name.endswith("keys_rotated") else op),
    "no magnitude": ("qwen3-yarn", lambda op: replace(op, magnitude=1.0) if hasattr(op, "magnitude") else op),
    "neighbours as halves": ("llama", lambda op: replace(op, pairs="halves") if hasattr(op, "pairs") else op),
    "halves as neighbours": ("qwen3", lambda op: replace(op, pairs="neighbours") if hasattr(op, "pairs") else op),
}


@pytest.mark.parametrize("fault", OP_FAULTS)
def test_faults_in_the_program(fault: str, tmp_path: Path) -> None:
    gate, edit = OP_FAULTS[fault]
    program, tokens, expected = program_and_figures(gate, tmp_path)
    edited = tuple(op for op in (edit(op) for op in program.ops) if op is not None)
    assert edited != program.ops, "the fault was not planted"
    # a program without an op may read what is not written: the reference then meets zeros, as after `replace` it may
    faulty = object.__new__(Program)
    faulty.__dict__.update(program.__dict__ | {"ops": edited})
    executor = ReferenceExecutor(faulty, context=64)
    for name, buffer in program.buffers.items():
        rows = len(tokens)
        executor._buffers[name] = np.zeros((rows, buffer.width), np.float32 if buffer.dtype == "f32" else np.int32)
    assert divergence(expected, evaluate(executor, tokens)).relative_rms_max > F32_BAND


REFERENCE_FAULTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "angle one position off": (
        "llama",
        "rope",
        lambda x, positions, *rest: reference_ops.rope(x, positions * (positions > 3) + 1, *rest),
    ),
    "sees the next position": (
        "qwen3",
        "attention",
        lambda q, keys, values, positions, scale: reference_ops.attention(q, keys, values, positions + 1, scale),
    ),
    "last rank left out": (
        "qwen3moe",
        "routed_experts",
        lambda x, ids, mix, *rest: reference_ops.routed_experts(x, ids[:, :-1], mix[:, :-1], *rest),
    ),
    "gate without silu": ("llama", "swiglu", lambda gate, up, limit: reference_ops.sigmoid(gate) * up),
    "best of a group": ("deepseek2-v3", "route", _best_of_group),
    "bias in the mix": ("deepseek2-v3", "route", _biased_mix),
    "scores of the next expert": (
        "qwen3moe",
        "route",
        lambda logits, used, **g: ROUTE(np.roll(logits, 1, 1), used, **g),
    ),
}


@pytest.mark.parametrize("fault", REFERENCE_FAULTS)
def test_faults_in_the_reference(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, function, faulty = REFERENCE_FAULTS[fault]
    program, tokens, expected = program_and_figures(gate, tmp_path)
    assert loss(program, tokens, expected) < F32_BAND
    monkeypatch.setattr(reference, function, faulty)
    assert loss(program, tokens, expected) > F32_BAND


def test_no_lower_bound_of_the_mixing_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the variant made for it has scores small enough; the trained-like sets would not notice."""
    program, tokens, expected = program_and_figures("deepseek2-least-sum", tmp_path)
    assert loss(program, tokens, expected) < F32_BAND
    monkeypatch.setattr(reference_ops, "LEAST_MIX_SUM", 0.0)
    assert loss(program, tokens, expected) > 100 * F32_BAND


HYPER_FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "wrong ramp": ("deepseek2-v3", rotary, "BETA_FAST", 16.0),
    "wrong end of the ramp": ("llama-yarn", rotary, "BETA_SLOW", 8.0),
    "log multiplier ten times": ("deepseek2-yarn-half", deepseek2, "_log_multiplier", lambda model: 0.05),
    "no log multiplier": ("deepseek2-lite", deepseek2, "_log_multiplier", lambda model: 0.0),
    "yarn for linear": (
        "deepseek2-linear",
        deepseek2,
        "softmax_scale",
        lambda rope, log: (rope.magnitude * (1 + 0.1 * log * math.log(rope.factor))) ** 2,
    ),
    "gating of files without the key": ("deepseek2-plain-router", deepseek2, "_unstated_gating", lambda trunk: 2),
}


@pytest.mark.parametrize("fault", HYPER_FAULTS)
def test_faults_in_reading_hyper_parameters(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, module, name, value = HYPER_FAULTS[fault]
    monkeypatch.setattr(module, name, value)
    assert loss(*program_and_figures(gate, tmp_path)) > F32_BAND
