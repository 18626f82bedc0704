"""Quant types: the GGUF block formats, their sizes, where their scales lie, and their reference dequantisation.

Owns the mapping from a ggml type id or name to block geometry. Does not know files, tensors or kernels.
Sizes and the dequantisation itself come from the `gguf` package; the places of the float scales inside a block are
written down here, since sampling them for non-finite values needs no dequantisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class QuantType:
    """One block format: `block_elements` consecutive elements of a row are stored in `block_bytes` bytes."""

    name: str
    type_id: int
    block_elements: int
    block_bytes: int

    @staticmethod
    def named(name: str) -> QuantType:
        """The quant type of a ggml name such as "Q4_K" (any case); KeyError if there is none."""
        return _BY_NAME[name.upper()]

    @staticmethod
    def by_id(type_id: int) -> QuantType:
        """The quant type of a ggml type id as stored in files; KeyError if there is none."""
        return _BY_ID[type_id]

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of `elements` elements; ValueError unless they fill whole blocks."""
        blocks, rest = divmod(elements, self.block_elements)
        if rest:
            raise ValueError(f"a row of {elements} elements does not fill {self.name} blocks of {self.block_elements}")
        return blocks * self.block_bytes

    @property
    def bits_per_element(self) -> float:
        return 8 * self.block_bytes / self.block_elements

    @property
    def dequantisable(self) -> bool:
        """Whether `dequantise` knows this type (types that only occur as activations, such as Q8_K, are not)."""
        return self.name in _PLAIN or gguf.GGMLQuantizationType(self.type_id) in gguf.quants._type_traits

    def dequantise(self, blocks: Bytes, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """Elements of the uint8 array `blocks` (..., nbytes) as (..., elements) of `dtype`, computed in float32.

        Raises ValueError for a type that is not `dequantisable`.
        """
        if not self.dequantisable:
            raise ValueError(f"quant type {self.name} has no reference dequantisation")
        if (plain := _PLAIN.get(self.name)) is not None:
            return np.ascontiguousarray(blocks).view(plain).astype(dtype)
        values = gguf.quants.dequantize(np.ascontiguousarray(blocks), gguf.GGMLQuantizationType(self.type_id))
        return np.asarray(values, dtype=dtype)

    @property
    def float16_scales(self) -> tuple[int, ...]:
        """Where a block keeps its float16 scales: byte offsets, the factor of the codes before that of the minimum."""
        return tuple(offset for check, offset, _ in _SCALES.get(self.name, ()) if check is _f16)

    @property
    def exponent_scale(self) -> int:
        """Where a block keeps a power of two as its scale (e8m0): a byte offset, or -1."""
        return next((offset for check, offset, _ in _SCALES.get(self.name, ()) if check is _e8m0), -1)

    def non_finite(self, blocks: Bytes) -> Flags:
        """For uint8 `blocks` (n, block_bytes): which of the n hold a NaN or infinite float scale (or element)."""
        found = np.zeros(blocks.shape[0], dtype=np.bool_)
        for check, offset, width in _SCALES.get(self.name, ()):
            found |= check(blocks[:, offset : offset + width])
        return found


def removed_type(type_id: int) -> str:
    """What a type id that ggml has given up stood for, or an empty string."""
    return _REMOVED.get(type_id, "")


def _not_finite(bits: npt.NDArray[Any], exponent: int) -> Flags:
    return np.asarray((bits & bits.dtype.type(exponent)) == exponent)


def _f16(field: Bytes) -> Flags:
    return _not_finite(np.ascontiguousarray(field).view("<u2")[:, 0], 0x7C00)


def _bf16(field: Bytes) -> Flags:
    return _not_finite(np.ascontiguousarray(field).view("<u2")[:, 0], 0x7F80)


def _f32(field: Bytes) -> Flags:
    return _not_finite(np.ascontiguousarray(field).view("<u4")[:, 0], 0x7F800000)


def _f64(field: Bytes) -> Flags:
    return _not_finite(np.ascontiguousarray(field).view("<u8")[:, 0], 0x7FF0000000000000)


def _e8m0(field: Bytes) -> Flags:
    """MXFP4's power-of-two scale: 255 is its only NaN."""
    return np.asarray(field[:, 0] == 0xFF)


def _ue4m3(field: Bytes) -> Flags:
    """NVFP4's unsigned 8-bit float scales: 127 is the NaN (the sign bit is not used)."""
    return np.asarray(((field & 0x7F) == 0x7F).any(axis=1))


def _iq1_m(field: Bytes) -> Flags:
    """IQ1_M's f16 scale is spread over the top four bits of its four 16-bit scale words, lowest nibble first."""
    words = np.ascontiguousarray(field).view("<u2")
    bits = (words[:, 0] >> 12) | ((words[:, 1] >> 8) & 0x00F0) | ((words[:, 2] >> 4) & 0x0F00) | (words[:, 3] & 0xF000)
    return _not_finite(bits, 0x7C00)


_Scale = tuple[Callable[[Bytes], Flags], int, int]

# Per type: check, byte offset in the block, bytes. After the block structs of ggml-common.h.
_SCALES: Final[dict[str, tuple[_Scale, ...]]] = {
    "F32": ((_f32, 0, 4),),
    "F16": ((_f16, 0, 2),),
    "BF16": ((_bf16, 0, 2),),
    "F64": ((_f64, 0, 8),),
    "Q1_0": ((_f16, 0, 2),),
    "Q4_0": ((_f16, 0, 2),),
    "Q4_1": ((_f16, 0, 2), (_f16, 2, 2)),
    "Q5_0": ((_f16, 0, 2),),
    "Q5_1": ((_f16, 0, 2), (_f16, 2, 2)),
    "Q8_0": ((_f16, 0, 2),),
    "Q8_1": ((_f16, 0, 2), (_f16, 2, 2)),
    "Q2_K": ((_f16, 80, 2), (_f16, 82, 2)),
    "Q3_K": ((_f16, 108, 2),),
    "Q4_K": ((_f16, 0, 2), (_f16, 2, 2)),
    "Q5_K": ((_f16, 0, 2), (_f16, 2, 2)),
    "Q6_K": ((_f16, 208, 2),),
    "Q8_K": ((_f32, 0, 4),),
    "IQ1_S": ((_f16, 0, 2),),
    "IQ1_M": ((_iq1_m, 48, 8),),
    "IQ2_XXS": ((_f16, 0, 2),),
    "IQ2_XS": ((_f16, 0, 2),),
    "IQ2_S": ((_f16, 0, 2),),
    "IQ3_XXS": ((_f16, 0, 2),),
    "IQ3_S": ((_f16, 0, 2),),
    "IQ4_NL": ((_f16, 0, 2),),
    "IQ4_XS": ((_f16, 0, 2),),
    "TQ1_0": ((_f16, 52, 2),),
    "TQ2_0": ((_f16, 64, 2),),
    "MXFP4": ((_e8m0, 0, 1),),
    "NVFP4": ((_ue4m3, 0, 4),),
}

_PLAIN: Final[dict[str, str]] = {
    "F32": "<f4",
    "F16": "<f2",
    "F64": "<f8",
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}

_REMOVED: Final[dict[int, str]] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

_BY_ID: Final[dict[int, QuantType]] = {
    int(ggml_type): QuantType(ggml_type.name, int(ggml_type), elements, nbytes)
    for ggml_type, (elements, nbytes) in gguf.GGML_QUANT_SIZES.items()
}
_BY_NAME: Final[dict[str, QuantType]] = {quant_type.name: quant_type for quant_type in _BY_ID.values()}
