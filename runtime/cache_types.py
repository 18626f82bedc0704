"""Types of the attention caches: how many bytes a row takes and how rows of q8_0 are rounded.

Owns the names. q8_0 keeps blocks of 32 elements as ggml does: an f16 scale d = greatest magnitude / 127, then 32 int8,
each x * (127 / greatest magnitude) rounded to nearest even (ggml's x86 quantize_row_q8_0, which fills llama.cpp's
caches). An array of such rows is uint8, the blocks one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

CacheType: TypeAlias = Literal["f32", "f16", "q8_0"]
CACHE_TYPES: Final[tuple[CacheType, ...]] = get_args(CacheType)

Q8_0_ELEMENTS: Final = 32
Q8_0_BYTES: Final = 34
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "q8_0": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
}


def stored_dtype(kind: str) -> np.dtype[Any]:
    """Type of what an array of rows of a cache type (or of i32) holds."""
    return _DTYPES[kind]


def stored_width(kind: str, width: int) -> int:
    """How many of them keep `width` elements."""
    return width // Q8_0_ELEMENTS * Q8_0_BYTES if kind == "q8_0" else width


def stored_bytes(kind: str, width: int) -> int:
    """Bytes of `width` elements, whole blocks."""
    return stored_width(kind, width) * _DTYPES[kind].itemsize


def quantise_rows(x: NDArray[Any]) -> NDArray[np.uint8]:
    """(..., width) floats as (..., stored width) blocks of q8_0."""
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, Q8_0_ELEMENTS)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(largest != 0, np.float32(127) / largest, np.float32(0))
        values = np.nan_to_num(np.rint(blocks * inverse)).astype(np.int8)
        scale = (largest / np.float32(127)).astype(np.float16)
    stored = np.concatenate([scale.view(np.uint8), values.view(np.uint8)], axis=-1)
    return stored.reshape(*x.shape[:-1], -1)


def dequantise_rows(stored: NDArray[np.uint8], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """The elements of such rows: d times value, exact in f32."""
    blocks = np.ascontiguousarray(stored).reshape(*stored.shape[:-1], -1, Q8_0_BYTES)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    values = scale * blocks[..., 2:].view(np.int8).astype(np.float32)
    return values.reshape(*stored.shape[:-1], -1).astype(dtype)
