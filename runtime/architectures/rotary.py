"""Owns the reading of rotary position parameters: frequencies, context extension (linear, YaRN) and magnitudes.

Knows metadata and numbers only; which elements of which vectors are rotated is the architecture's business.
The formulas are llama.cpp's (llama-context.cpp, ggml rope_yarn), which follow Peng et al., "YaRN" (arXiv:2309.00071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.architectures.hyper_parameters import refuse
from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile

# Rotations over the original context above which a frequency is kept, and below which it is divided by the factor.
# llama.cpp reads other values from the file only for architectures that are not ours.
BETA_FAST = 32.0
BETA_SLOW = 1.0

MOST_DIMENSIONS = 1 << 16  # of a head; keeps a damaged key from asking for gigabytes


@dataclass(frozen=True)
class Rotary:
    """frequencies: radians a position, one for each rotated pair. magnitude: factor on cos and sin. factor: by how much
    the context was stretched (1 if it was not). kind: "none", "linear" or "yarn"."""

    frequencies: tuple[float, ...]
    magnitude: float
    factor: float
    kind: str


def read_rotary(model: ModelFile, dimensions: int, *, yarn_grows: bool = True) -> Rotary:
    """Rotary parameters for `dimensions` rotated elements of a head.

    Frequency i is base^(-2i/dimensions), divided by rope_freqs.weight[i] where the file has that tensor (Llama 3).
    Linear scaling divides all by the factor; YaRN divides the slow ones, keeps the fast ones and blends between.
    YaRN also multiplies cos and sin by 1 + 0.1 ln(factor), unless not `yarn_grows` (deepseek2, whose files say how much
    and which puts it into the softmax scale); rope.scaling.attn_factor multiplies them in any case.
    """
    base = model.hyper("rope.freq_base", float, 10000.0)
    kind = model.hyper("rope.scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise refuse(model, "rope.scaling.type", kind, "none, linear or yarn")
    if not 0 < dimensions <= MOST_DIMENSIONS or dimensions % 2:
        raise refuse(model, "rope.dimension_count", dimensions, f"an even number up to {MOST_DIMENSIONS}")
    stated = model.hyper("rope.scaling.factor", float, 0.0) or model.hyper("rope.scale_linear", float, 0.0)
    factor = 1.0 if kind == "none" or stated == 0.0 else stated
    if base <= 1.0:
        raise refuse(model, "rope.freq_base", base, "a number above 1")
    if factor <= 0.0:
        raise refuse(model, "rope.scaling.factor", factor, "a positive number")

    pairs = np.arange(dimensions // 2)
    plain = base ** (-2.0 * pairs / dimensions)
    if model.has("rope_freqs.weight"):
        plain = plain / _frequency_factors(model, dimensions // 2)
    stretched = plain / factor
    magnitude = model.hyper("rope.scaling.attn_factor", float, 1.0)
    if kind == "yarn":
        original = model.hyper("rope.scaling.original_context_length", int, 0) or model.hyper("context_length", int)
        if original <= 0:
            raise refuse(model, "rope.scaling.original_context_length", original, "a positive number")
        keep = yarn_kept_share(dimensions, base, original)
        frequencies = stretched * (1.0 - keep) + plain * keep
        if yarn_grows and factor > 1.0:
            magnitude *= 1.0 + 0.1 * math.log(factor)
    else:
        frequencies = stretched
    return Rotary(tuple(float(f) for f in frequencies), magnitude, factor, kind)


def yarn_kept_share(
    dimensions: int, base: float, original_context: int, fast: float | None = None, slow: float | None = None
) -> NDArray[np.float64]:
    """The share of each pair's own frequency that YaRN keeps: 1 for fast pairs, 0 for slow ones, a ramp between. `fast`
    and `slow` (default BETA_FAST, BETA_SLOW) are rotations over the original context."""

    def pair_with_rotations(rotations: float) -> float:
        return dimensions * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(pair_with_rotations(BETA_FAST if fast is None else fast)))
    high = min(dimensions - 1.0, math.ceil(pair_with_rotations(BETA_SLOW if slow is None else slow)))
    ramp = (np.arange(dimensions // 2) - low) / max(0.001, high - low)
    return np.asarray(1.0 - np.clip(ramp, 0.0, 1.0), dtype=np.float64)


def _frequency_factors(model: ModelFile, pairs: int) -> NDArray[np.float64]:
    factors = model.tensor("rope_freqs.weight", (pairs,)).dequantise(np.float64)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(
            f"{model.path}: tensor rope_freqs.weight has factors from {factors.min()} to {factors.max()}, "
            "expected positive numbers",
            "the file is damaged or was written by a faulty converter",
        )
    return np.asarray(factors, dtype=np.float64)
