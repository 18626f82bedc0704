"""Owns the reading of hyper-parameters that `deepseek4` and `deepseek41` share, and the checks of single keys.

Knows metadata and the types of vectors; which layer has which role, and ops, are the architectures' business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.architectures.hyper_parameters import Trunk, positive, read_trunk, refuse
from bloomery.runtime.architectures.rotary import MOST_DIMENSIONS, yarn_kept_share
from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile, Tensor

MOST_COPIES = 16


@dataclass(frozen=True)
class HyperConnections:
    """`copies` residual copies of a row; `rounds` and `epsilon` of their mixing (op HyperMix)."""

    copies: int
    rounds: int
    epsilon: float

    @property
    def mixes(self) -> int:
        return self.copies * (2 + self.copies)


@dataclass(frozen=True)
class SparseAttention:
    """`heads` query heads of `width` over one latent of the same width, whose last `rotated` elements turn; queries
    through a latent of q_rank; output in `groups` groups of group_rank. `window` positions are seen whole.

    plain, compressed: frequencies of layers of ratio 0 and of all others.
    """

    heads: int
    width: int
    rotated: int
    q_rank: int
    groups: int
    group_rank: int
    window: int
    plain: tuple[float, ...]
    compressed: tuple[float, ...]

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.width)


@dataclass(frozen=True)
class Indexer:
    """`heads` index queries of `width`; `keep` rows stay for attention."""

    heads: int
    width: int
    keep: int

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.width * self.heads)


@dataclass(frozen=True)
class SparseMixture:
    """`used` of `count` experts of hidden width `width`, shared ones of `shared_width` together. limits and
    shared_limits bound the SwiGLU of each layer (0: unbounded)."""

    count: int
    used: int
    width: int
    shared_width: int
    normalise: bool
    scale: float
    limits: tuple[float, ...]
    shared_limits: tuple[float, ...]


@dataclass(frozen=True)
class Deepseek4Hyper:
    """ratios: positions that a compressed row stands for, of each layer; 0 for layers with a window only. A draft has
    windows only: its indexer is NO_INDEXER."""

    trunk: Trunk
    connections: HyperConnections
    attention: SparseAttention
    indexer: Indexer
    mixture: SparseMixture
    ratios: tuple[int, ...]
    hash_layers: int


def read_hyper(model: ModelFile) -> Deepseek4Hyper:
    """Everything but roles, engrams and candidates. ModelFileError names the key, what was found and expected."""
    trunk = read_trunk(model)
    if trunk.epsilon <= 0.0:
        raise refuse(model, "attention.layer_norm_rms_epsilon", trunk.epsilon, "a small positive number")
    check_vectors(model)
    indexer = Indexer(
        heads=positive(model, "attention.indexer.head_count"),
        width=positive(model, "attention.indexer.key_length"),
        keep=positive(model, "attention.indexer.top_k"),
    )
    hash_layers = model.hyper("hash_layer_count", int, 0)
    if not 0 <= hash_layers <= trunk.layers:
        raise refuse(model, "hash_layer_count", hash_layers, f"0 to block_count, {trunk.layers}")
    return Deepseek4Hyper(
        trunk=trunk,
        connections=_read_connections(model),
        attention=_read_attention(model, indexer),
        indexer=indexer,
        mixture=_read_mixture(model, trunk.layers),
        ratios=_read_ratios(model, trunk.layers),
        hash_layers=hash_layers,
    )


NO_INDEXER = Indexer(heads=0, width=0, keep=0)


def read_draft_hyper(model: ModelFile, target: Trunk) -> Deepseek4Hyper:
    """Of a draft (architecture `dflash`) for a target with this trunk: windows only, plain rope, no hash layers. What
    the file does not state is the target's."""
    layers = positive(model, "block_count")
    width = positive(model, "embedding_length")
    if width != target.width:
        raise refuse(model, "embedding_length", width, f"the target's, {target.width}")
    epsilon = model.hyper("attention.layer_norm_rms_epsilon", float)
    if not 0.0 < epsilon < 1.0:
        raise refuse(model, "attention.layer_norm_rms_epsilon", epsilon, "a small positive number")
    stated = model.metadata.get(f"{model.architecture}.attention.compress_ratios")
    if stated is not None and (not isinstance(stated, np.ndarray) or stated.size < layers or stated.any()):
        raise refuse(model, "attention.compress_ratios", stated, f"{layers} zeros: a draft has windows only")
    if hash_layers := model.hyper("hash_layer_count", int, 0):
        raise refuse(model, "hash_layer_count", hash_layers, "0")
    if (kind := model.hyper("rope.scaling.type", str, "none")) != "none":
        raise refuse(model, "rope.scaling.type", kind, "none: a draft has plain rope")
    check_vectors(model, ("conf_proj.weight",))
    return Deepseek4Hyper(
        trunk=replace(target, width=width, layers=layers, epsilon=epsilon),
        connections=_read_connections(model),
        attention=_read_attention(model, NO_INDEXER),
        indexer=NO_INDEXER,
        mixture=_read_mixture(model, layers),
        ratios=(0,) * layers,
        hash_layers=0,
    )


def _read_connections(model: ModelFile) -> HyperConnections:
    copies = positive(model, "hyper_connection.count")
    epsilon = model.hyper("hyper_connection.epsilon", float)
    if copies > MOST_COPIES:
        raise refuse(model, "hyper_connection.count", copies, f"at most {MOST_COPIES}")
    if not 0.0 < epsilon < 1.0:
        raise refuse(model, "hyper_connection.epsilon", epsilon, "a small positive number")
    return HyperConnections(copies, positive(model, "hyper_connection.sinkhorn_iterations"), epsilon)


def _read_attention(model: ModelFile, indexer: Indexer) -> SparseAttention:
    heads, width = positive(model, "attention.head_count"), positive(model, "attention.key_length")
    groups = positive(model, "attention.output_group_count")
    rotated = positive(model, "rope.dimension_count")
    for name, expected in (("attention.value_length", width), ("attention.head_count_kv", 1)):
        if positive(model, name) != expected:
            raise refuse(model, name, positive(model, name), f"{expected}: one latent is key and value of all heads")
    if heads % groups:
        raise refuse(model, "attention.output_group_count", groups, f"a divisor of attention.head_count, {heads}")
    indexed = indexer is not NO_INDEXER
    most = min(width, indexer.width if indexed else width, MOST_DIMENSIONS)
    if rotated % 2 or rotated > most:
        widths = "attention.key_length and attention.indexer.key_length" if indexed else "attention.key_length"
        expected_text = f"an even number up to {widths}, {most}"
        raise refuse(model, "rope.dimension_count", rotated, expected_text)
    base = _rope_base(model, "rope.freq_base")
    plain = tuple(float(f) for f in base ** (-2.0 * np.arange(rotated // 2) / rotated))
    return SparseAttention(
        heads=heads,
        width=width,
        rotated=rotated,
        q_rank=positive(model, "attention.q_lora_rank"),
        groups=groups,
        group_rank=positive(model, "attention.output_lora_rank"),
        window=positive(model, "attention.sliding_window"),
        plain=plain,
        compressed=_compressed_frequencies(model, rotated) if indexed else plain,
    )


def _compressed_frequencies(model: ModelFile, rotated: int) -> tuple[float, ...]:
    """YaRN with the file's own ends of the ramp and no growth of the magnitude (Peng et al., arXiv:2309.00071)."""
    kind = model.hyper("rope.scaling.type", str)
    if kind != "yarn":
        raise refuse(model, "rope.scaling.type", kind, "yarn")
    factor = model.hyper("rope.scaling.factor", float)
    if factor <= 0.0:
        raise refuse(model, "rope.scaling.factor", factor, "a positive number")
    fast, slow = (model.hyper(f"rope.scaling.yarn_beta_{end}", float) for end in ("fast", "slow"))
    if not fast > slow > 0.0:
        raise refuse(model, "rope.scaling.yarn_beta_fast", fast, f"more than rope.scaling.yarn_beta_slow, {slow}")
    base = _rope_base(model, "attention.compress_rope_freq_base")
    original = positive(model, "rope.scaling.original_context_length")
    return yarn_frequencies(rotated, base, original, factor, fast, slow)


def yarn_frequencies(
    rotated: int, base: float, original: int, factor: float, fast: float, slow: float
) -> tuple[float, ...]:
    """Radians a position of each pair, for a context stretched by `factor` from `original` positions."""
    own = base ** (-2.0 * np.arange(rotated // 2) / rotated)
    keep = yarn_kept_share(rotated, base, original, fast, slow)
    return tuple(float(f) for f in own / factor * (1.0 - keep) + own * keep)


def _rope_base(model: ModelFile, name: str) -> float:
    base = model.hyper(name, float)
    if base <= 1.0:
        raise refuse(model, name, base, "a number above 1")
    return base


def _read_mixture(model: ModelFile, layers: int) -> SparseMixture:
    count, used = positive(model, "expert_count"), positive(model, "expert_used_count")
    width, scale = positive(model, "expert_feed_forward_length"), model.hyper("expert_weights_scale", float)
    gating = model.hyper("expert_gating_func", int)
    if used > count:
        raise refuse(model, "expert_used_count", used, f"at most expert_count, {count}")
    if gating != 4:
        raise refuse(model, "expert_gating_func", gating, "4 (sqrt-softplus)")
    return SparseMixture(
        count=count,
        used=used,
        width=width,
        shared_width=width * positive(model, "expert_shared_count"),
        normalise=model.hyper("expert_weights_norm", bool),
        scale=scale,
        limits=_limits(model, "swiglu_clamp_exp", layers),
        shared_limits=_limits(model, "swiglu_clamp_shexp", layers),
    )


def _limits(model: ModelFile, name: str, layers: int) -> tuple[float, ...]:
    """One number for all layers or one for each; 0 where there is no bound."""
    value = model.metadata.get(f"{model.architecture}.{name}")
    if isinstance(value, np.ndarray):
        numbers = [float(entry) for entry in value]
        if len(numbers) != layers:
            raise refuse(model, name, f"an array of {len(numbers)} numbers", f"one number or {layers}, one a layer")
        if not np.isfinite(numbers).all():
            raise refuse(model, name, numbers, "finite numbers")
    else:
        numbers = [model.hyper(name, float)] * layers
    return tuple(max(number, 0.0) for number in numbers)


def _read_ratios(model: ModelFile, layers: int) -> tuple[int, ...]:
    """Entries behind the model's layers belong to a draft and are left."""
    stated: NDArray[Any] = model.hyper("attention.compress_ratios", np.ndarray)
    if stated.dtype.kind not in "iu" or stated.size < layers:
        found = f"an array of {stated.size} {stated.dtype.name}"
        raise refuse(model, "attention.compress_ratios", found, f"at least {layers} whole numbers")
    ratios = tuple(int(entry) for entry in stated[:layers])
    kinds = {ratio for ratio in ratios if ratio}
    if min(ratios) < 0 or not 1 <= len(kinds) <= 2:
        raise refuse(model, "attention.compress_ratios", ratios, "one or two different positive numbers, else 0")
    return ratios


def check_vectors(model: ModelFile, besides: tuple[str, ...] = ()) -> None:
    """One-dimensional tensors are F32 (that they are finite was checked when the file was opened). `besides` names
    matrices of one row."""
    for tensor in model.tensors.values():
        vector = sum(length > 1 for length in tensor.shape[1:]) == 0 and tensor.name not in besides
        if vector and tensor.quant_type.name != "F32":
            raise _wrong_type(tensor, "F32")


def check_same_type(tensors: list[Tensor]) -> None:
    """Engram tables are of one type, so that one reader serves all."""
    for tensor in tensors[1:]:
        if tensor.quant_type != tensors[0].quant_type:
            raise _wrong_type(tensor, f"{tensors[0].quant_type.name}, as {tensors[0].name}")


def check_expert_table(tensor: Tensor, experts: int) -> None:
    """The experts that stand for each token (I32): known ones, and different ones for one token."""
    if tensor.quant_type.name != "I32":
        raise _wrong_type(tensor, "I32")
    ids = tensor.dequantise(np.int32)
    for fault, where in (
        (f"an expert outside 0 to {experts - 1}", ((ids < 0) | (ids >= experts)).any(axis=1)),
        ("the same expert twice", (np.diff(np.sort(ids, axis=1), axis=1) == 0).any(axis=1)),
    ):
        if where.any():
            token = int(where.argmax())
            raise ModelFileError(
                f"{tensor.path}: tensor {tensor.name} has {fault} for token {token}: {ids[token].tolist()}",
                "the file is damaged or was written by a faulty converter",
            )


def _wrong_type(tensor: Tensor, expected: str) -> ModelFileError:
    return ModelFileError(
        f"{tensor.path}: tensor {tensor.name} has type {tensor.quant_type.name}, expected {expected}",
        "convert the model again",
    )
