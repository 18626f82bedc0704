"""Sizes and places inside scratch memory on which kernels and lowering agree. Knows no Numba.

A row of quantised activations is three planes (values, scales `d`, sums), each starting at a multiple of 64 bytes.
"""

from __future__ import annotations

from typing import Final

PANEL_VECTORS: Final = 2  # vectors of weight rows that are decoded and multiplied together
SUPER_TILE_BYTES: Final = 11520  # one 256-element block of 32 weight rows, decoded (a multiple of 64)
SMALL_TILE_BYTES: Final = 1280  # one 32-element block of 32 weight rows, decoded
BUFFER_BYTES: Final = 1024  # a rank's buffer while silu(gate) * up is quantised
ATTENTION_HEADS: Final = 4  # queries that share keys and are taken together
ROUTER_WORDS: Final = 5  # 32-bit words a rank needs for each expert while choosing
SHARED_INDEX_ROWS: Final = 8  # rows of a step up to which the ranks share the index scores of each row

ACTIVATION_ELEMENTS: Final = {"Q8_K": 256, "Q8_0": 32, "F16": 1, "BF16": 1}  # elements of a block
PLANE_BYTES: Final = {"Q8_K": (256, 4, 32), "Q8_0": (32, 4, 8), "F16": (2, 0, 0), "BF16": (2, 0, 0)}  # of a block


def aligned(nbytes: int) -> int:
    """The next multiple of 64."""
    return (nbytes + 63) // 64 * 64


def planes(kind: str, elements: int) -> tuple[int, int, int]:
    """(offset of the d plane, offset of the sums plane, bytes of a row) for rows of `elements` activations."""
    values, d, sums = PLANE_BYTES[kind]
    blocks = elements // ACTIVATION_ELEMENTS[kind]
    d_at = aligned(blocks * values)
    sums_at = d_at + aligned(blocks * d)
    return d_at, sums_at, sums_at + aligned(blocks * sums)
