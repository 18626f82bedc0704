"""Random blocks of any quant type whose values have a wanted spread: weights for measuring, not for answers.

Every code and sub-scale is random; only the float scales are chosen, so that the values are finite and have mean 0 and
the wanted standard deviation. Which scales do that is measured: a value is linear in its block's float scales, so a
sample of dequantised blocks says it for every type. Knows neither tensors nor files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.quant_types import Bytes, QuantType

SAMPLE_BLOCKS: Final = 2048
SAMPLE_SEED: Final = 41
JITTER: Final = 0.1  # each block's scale differs from the wanted one by up to so much
_UNIT: Final = 127  # of an e8m0 exponent


@dataclass(frozen=True)
class Scales:
    """Float scales that give mean 0 and deviation 1. `offsets`: where a block keeps them (float16), first the factor of
    the codes, then, where there is one, that of the minimum. `exponent`: where a power of two stands instead, or -1."""

    offsets: tuple[int, ...]
    values: tuple[float, ...]
    exponent: int = -1


def random_values(generator: np.random.Generator, count: int, mean: float, deviation: float) -> npt.NDArray[np.float32]:
    """float32 (count,), normally distributed."""
    values = generator.standard_normal(count, dtype=np.float32)
    return values * np.float32(deviation) + np.float32(mean)


def random_blocks(generator: np.random.Generator, quant_type: QuantType, elements: int, deviation: float) -> Bytes:
    """uint8 (nbytes,) of `elements` elements, mean 0 and standard deviation about `deviation`.

    Raises BloomeryError for a type whose scales lie neither in float16 nor in one exponent."""
    if quant_type.name in ("F32", "F16", "BF16"):
        return _floats(random_values(generator, elements, 0.0, deviation), quant_type.name)
    scales = unit_scales(quant_type)
    blocks = _codes(generator, quant_type, quant_type.row_bytes(elements) // quant_type.block_bytes)
    if scales.exponent >= 0:
        blocks[:, scales.exponent] = _UNIT + round(math.log2(deviation * scales.values[0]))
    spread = generator.uniform(1.0 - JITTER, 1.0 + JITTER, len(blocks))
    for offset, value in zip(scales.offsets, scales.values):
        _put(blocks, offset, spread * (deviation * value))
    return blocks.reshape(-1)


@cache
def unit_scales(quant_type: QuantType) -> Scales:
    """What a type's float scales must be, from a sample of its blocks."""
    sample = _codes(np.random.default_rng(SAMPLE_SEED), quant_type, SAMPLE_BLOCKS)
    offsets, exponent = quant_type.float16_scales, quant_type.exponent_scale
    if exponent >= 0 and not offsets:
        sample[:, exponent] = _UNIT
        return Scales((), (1.0 / _values(quant_type, sample).std(),), exponent)
    if exponent >= 0 or len(offsets) not in (1, 2):
        raise BloomeryError(f"random blocks of quant type {quant_type.name} cannot be made", "choose another type")
    ratio = 0.0
    if len(offsets) == 2:
        factor, minimum = (_with_scales(quant_type, sample, offsets, pair).mean() for pair in ((1.0, 0.0), (0.0, 1.0)))
        ratio = -factor / minimum
    unscaled = _with_scales(quant_type, sample, offsets, (1.0, ratio)).std()
    return Scales(offsets, (1.0 / unscaled, ratio / unscaled)[: len(offsets)])


def _codes(generator: np.random.Generator, quant_type: QuantType, count: int) -> Bytes:
    return np.frombuffer(generator.bytes(count * quant_type.block_bytes), np.uint8).reshape(count, -1).copy()


def _with_scales(
    quant_type: QuantType, blocks: Bytes, offsets: tuple[int, ...], values: tuple[float, ...]
) -> npt.NDArray[Any]:
    for offset, value in zip(offsets, values):
        _put(blocks, offset, np.full(len(blocks), value))
    return _values(quant_type, blocks)


def _values(quant_type: QuantType, blocks: Bytes) -> npt.NDArray[Any]:
    return quant_type.dequantise(blocks.reshape(-1), np.float64)


def _put(blocks: Bytes, offset: int, values: npt.NDArray[np.float64]) -> None:
    blocks[:, offset : offset + 2] = values.astype("<f2")[:, None].view(np.uint8)


def _floats(values: npt.NDArray[np.float32], name: str) -> Bytes:
    if name == "BF16":
        return np.ascontiguousarray(values.view("<u2")[1::2]).view(np.uint8)
    return values.astype({"F32": "<f4", "F16": "<f2"}[name]).view(np.uint8)
