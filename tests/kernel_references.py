"""NumPy references of the host kernels' arithmetic, written from the formulas and orders that the kernels' pages state.

Owns nothing of the kernels: weights are taken apart by the gguf package (with their float scales set to 1 and 0), and
quantisation follows ggml's C.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf_bytes import random_blocks
from numpy.typing import NDArray

from bloomery.runtime.quant_types import QuantType

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Places of d and of dmin or m in a block; blocks without minima have one place.
SCALES_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_XS": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
}
SUPER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS")
PARTS_OF_D = {"IQ2_XXS": 8, "IQ2_XS": 8, "IQ2_S": 8, "IQ3_XXS": 4}  # their integers are an eighth or a quarter of d
FLOATS = ("F32", "F16", "BF16")


def random_weights(generator: np.random.Generator, name: str, rows: int, width: int) -> Bytes:
    """(rows, bytes of a row)."""
    blocks = np.frombuffer(random_blocks(generator, name, (width, rows)), np.uint8)
    return blocks.reshape(rows, -1).copy()


def fma(x: Any, y: Any, z: Any) -> Floats:
    """x*y + z rounded to f32 once: the product of two f32 is exact in the 64 bits of an extended float."""
    return np.asarray(np.longdouble(x) * np.longdouble(y) + np.longdouble(z), np.float32)


def quantise_q8_k(x: Floats) -> tuple[NDArray[np.int8], Floats, NDArray[np.int32]]:
    """(values, d of each block of 256, sums of each 16): ggml's quantize_row_q8_K_ref."""
    blocks = x.reshape(-1, 256)
    first = np.abs(blocks).argmax(1)
    extreme = blocks[np.arange(len(blocks)), first]
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.float32(-127) / extreme
        values = np.minimum(np.rint(inverse[:, None] * blocks), 127)
        d = np.float32(1) / inverse
    values[extreme == 0], d[extreme == 0] = 0, 0
    return values.astype(np.int8).ravel(), d, values.reshape(-1, 16).sum(1).astype(np.int32)


def quantise_q8_0(x: Floats) -> tuple[NDArray[np.int8], Floats, NDArray[np.int32], Floats]:
    """(values, d as f16 keeps it, sums, s as f16 keeps it), for blocks of 32: ggml's x86 quantize_row_q8_0, q8_1."""
    blocks = x.reshape(-1, 32)
    largest = np.abs(blocks).max(1)
    scale = largest / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest != 0, np.float32(127) / largest, np.float32(0)).astype(np.float32)
    values = np.rint(blocks * inverse[:, None])
    sums = values.sum(1).astype(np.int32)
    half = scale.astype(np.float16).astype(np.float32)
    weighted = (scale * sums.astype(np.float32)).astype(np.float16).astype(np.float32)
    return values.astype(np.int8).ravel(), half, sums, weighted


def to_bf16(x: Floats) -> NDArray[np.uint16]:
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def integer_parts(name: str, weights: Bytes) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, Floats, Floats]:
    """(scale * (value - offset), minimum or None, d, dmin or m) of (rows, bytes): integers for every element, floats
    for every block."""
    kind = QuantType.named(name)
    blocks = weights.reshape(-1, kind.block_bytes)
    places = SCALES_AT.get(name, ())

    def with_scales(*values: float) -> NDArray[np.int64]:
        altered = blocks.copy()
        for at, value in zip(places, values):
            altered[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        elements = gguf.quants.dequantize(altered, gguf.GGMLQuantizationType[name])
        return np.rint(elements).astype(np.int64).reshape(len(weights), -1)

    rows = len(weights)
    if name == "MXFP4":  # d is a byte that stands for 2^(e - 128)
        altered = blocks.copy()
        altered[:, 0] = 128
        elements = gguf.quants.dequantize(altered, gguf.GGMLQuantizationType.MXFP4)
        d = np.ldexp(np.float32(1), blocks[:, 0].astype(np.int32) - 128).reshape(rows, -1)
        return np.rint(elements).astype(np.int64).reshape(rows, -1), None, d, d
    floats = [blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)[:, 0] for at in places]
    if divisor := PARTS_OF_D.get(name):
        shares = (floats[0] / np.float32(divisor)).reshape(rows, -1)
        return with_scales(float(divisor)), None, shares, shares
    parts = with_scales(1.0, 0.0)
    minima = -with_scales(0.0, 1.0) if len(places) == 2 and name in SUPER else None
    return parts, minima, floats[0].reshape(rows, -1), floats[-1].reshape(rows, -1)


def quantised_product(name: str, weights: Bytes, x: Floats) -> Floats:
    """(rows of x, rows of weights) in the canonical order of block_dots; x (R, K) f32."""
    parts, minima, d, least = integer_parts(name, weights)
    out = np.zeros((len(x), len(weights)), np.float32)
    for r, row in enumerate(x):
        if name in SUPER:
            values, dx, _ = quantise_q8_k(row)
            weighted = np.zeros(0, np.float32)
        else:
            values, dx, _, weighted = quantise_q8_0(row)
        block = 256 if name in SUPER else 32
        sums = (parts * values).reshape(len(weights), -1, block).sum(2)
        lows = None if minima is None else (minima * values).reshape(len(weights), -1, block).sum(2)
        total = np.zeros(len(weights), np.float32)
        for b in range(sums.shape[1]):
            total = fma(d[:, b] * dx[b], sums[:, b].astype(np.float32), total)
            if lows is not None:
                total = fma(-(least[:, b] * dx[b]), lows[:, b].astype(np.float32), total)
            elif len(SCALES_AT.get(name, ())) == 2:
                total = fma(least[:, b], weighted[b], total)
        out[r] = total
    return out


def float_weights(name: str, weights: Bytes) -> Floats:
    if name == "F32":
        return weights.view(np.float32)
    if name == "F16":
        return weights.view(np.float16).astype(np.float32)
    return (weights.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def float_dot(w: Floats, x: Floats) -> Floats:
    """Dots over the last axis in the canonical order of float_dots; w (..., K), x (K) or (..., K)."""
    lanes = np.zeros((*w.shape[:-1], 16), np.float32)
    for k in range(w.shape[-1]):
        lanes[..., k % 16] = fma(w[..., k], x[..., k], lanes[..., k % 16])
    t = lanes[..., :8] + lanes[..., 8:]
    pairs = t[..., 0::2] + t[..., 1::2]
    return np.asarray((pairs[..., 0] + pairs[..., 1]) + (pairs[..., 2] + pairs[..., 3]))


def product(name: str, weights: Bytes, x: Floats) -> Floats:
    """(rows of x, rows of weights) for any type."""
    if name not in FLOATS:
        return quantised_product(name, weights, x)
    if name == "F16":
        x = x.astype(np.float16).astype(np.float32)
    elif name == "BF16":
        x = (to_bf16(x).astype(np.uint32) << 16).view(np.float32)
    w = float_weights(name, weights)
    return np.stack([float_dot(w, row) for row in x])
