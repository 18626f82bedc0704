"""Owns the reading of hyper-parameters that architectures share, with llama.cpp's defaults and plausibility checks.

Knows metadata keys and their meaning; knows no tensors beyond the vocabulary's and no ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile


@dataclass(frozen=True)
class Trunk:
    """What every transformer file states: widths and counts (elements, layers, entries, positions), and the norms'
    epsilon."""

    width: int
    layers: int
    vocabulary: int
    context_length: int
    epsilon: float


@dataclass(frozen=True)
class HeadShape:
    """Grouped-query attention: `count` query heads and `kv_count` key/value heads of `width` elements."""

    count: int
    kv_count: int
    width: int


@dataclass(frozen=True)
class Mixture:
    """Routed experts of one layer: `used` of `count` experts of hidden width `width`; the rest as op Router has it."""

    count: int
    used: int
    width: int
    gating: Literal["softmax", "sigmoid"]
    normalise: bool
    scale: float
    groups: int
    groups_used: int


def read_trunk(model: ModelFile) -> Trunk:
    """Layers do not count those for multi-token prediction (nextn) that some files carry after the model's own."""
    stated = positive(model, "block_count")
    prediction = model.hyper("nextn_predict_layers", int, 0)
    if not 0 <= prediction < stated:
        raise refuse(model, "nextn_predict_layers", prediction, f"less than block_count, {stated}")
    epsilon = model.hyper("attention.layer_norm_rms_epsilon", float)
    if not 0.0 <= epsilon < 1.0:
        raise refuse(model, "attention.layer_norm_rms_epsilon", epsilon, "a small positive number")
    return Trunk(
        width=positive(model, "embedding_length"),
        layers=stated - prediction,
        vocabulary=vocabulary_size(model),
        context_length=positive(model, "context_length"),
        epsilon=epsilon,
    )


def read_heads(model: ModelFile, width: int) -> HeadShape:
    """Query heads, key/value heads (default: as many) and their width (default: width / heads)."""
    count = positive(model, "attention.head_count")
    kv_count = positive(model, "attention.head_count_kv", count)
    if count % kv_count:
        raise refuse(model, "attention.head_count_kv", kv_count, f"a divisor of attention.head_count, {count}")
    head = positive(model, "attention.key_length", width // count)
    value = positive(model, "attention.value_length", width // count)
    if value != head:
        raise refuse(model, "attention.value_length", value, f"attention.key_length, {head}")
    rotated = model.hyper("rope.dimension_count", int, head)
    if rotated != head:
        raise refuse(model, "rope.dimension_count", rotated, f"attention.key_length, {head}")
    return HeadShape(count, kv_count, head)


def read_mixture(model: ModelFile, width: int, *, gating: int, normalise: bool, scale: float) -> Mixture:
    """The routed experts, of hidden width `width`. `gating` is llama.cpp's number: 1 softmax, 2 sigmoid."""
    count, used = positive(model, "expert_count"), positive(model, "expert_used_count")
    groups = model.hyper("expert_group_count", int, 0)
    groups_used = model.hyper("expert_group_used_count", int, 0)
    if used > count:
        raise refuse(model, "expert_used_count", used, f"at most expert_count, {count}")
    if gating not in (1, 2):
        raise refuse(model, "expert_gating_func", gating, "1 (softmax) or 2 (sigmoid)")
    if groups <= 1:
        groups, groups_used = 1, 1
    elif count % groups or count == groups:
        raise refuse(model, "expert_group_count", groups, f"a divisor of expert_count, {count}, and less than it")
    elif not (0 < groups_used < groups and used <= groups_used * (count // groups)):
        raise refuse(model, "expert_group_used_count", groups_used, f"less than {groups}, with room for {used} experts")
    return Mixture(count, used, width, "softmax" if gating == 1 else "sigmoid", normalise, scale, groups, groups_used)


def positive(model: ModelFile, name: str, default: int | None = None) -> int:
    """A hyper-parameter that counts something; some files give it as an array with one entry a layer, all equal."""
    key = f"{model.architecture}.{name}"
    value = model.metadata.get(key)
    if isinstance(value, np.ndarray):
        distinct = sorted({int(entry) for entry in value})
        if len(distinct) != 1:
            raise ModelFileError(
                f"{model.path}: key {key} differs from layer to layer ({distinct[:8]}); expected one number for all",
                "such models are not supported",
            )
        number = distinct[0]
    elif default is None:
        number = model.hyper(name, int)
    else:
        number = model.hyper(name, int, default)
    if number <= 0:
        raise refuse(model, name, number, "a positive number")
    return number


def vocabulary_size(model: ModelFile) -> int:
    """Entries of the vocabulary: of the token list if the file has one, else rows of token_embd."""
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        return len(tokens)
    return model.tensor("token_embd.weight", (None, None)).shape[1]


def refuse(model: ModelFile, name: str, found: object, expected: str) -> ModelFileError:
    """The error for a hyper-parameter that is implausible or asks for a variant that is not implemented."""
    return ModelFileError(
        f"{model.path}: key {model.architecture}.{name} is {found!r}, expected {expected}",
        "the file is damaged or an unsupported variant of its architecture",
    )
