"""Sizes and places inside scratch memory on which kernels and lowering agree. Knows no Numba.

A row of quantised activations is three planes (values, scales `d`, sums), each starting at a multiple of 64 bytes.
"""

from __future__ import annotations

from typing import Final

PANEL_VECTORS: Final = 2  # vectors of weight rows that are decoded and multiplied together
SUPER_TILE_BYTES: Final = 11520  # one 256-element block of 32 weight rows, decoded (a multiple of 64)
SMALL_TILE_BYTES: Final = 1280  # one 32-element block of 32 weight rows, decoded
TILE_TOKENS: Final = 16  # rows of activations that a tile register holds
TILE_CHUNK: Final = 512  # rows of activations that meet a panel of weights decoded for tile registers
PACKED_BYTES: Final = 1 << 21  # what they may take, packed
PACKED_LEAST: Final = 64  # rows that are packed however long they are
PACKED_BLOCK: Final = {"Q8_K": 16 * (256 + 4 + 64), "Q8_0": 16 * (32 + 4 + 4)}  # bytes of a block of TILE_TOKENS rows
TILE_WEIGHTS: Final = 18688  # bytes of decoded weights between two uses of tile registers
TILE_SUMS: Final = 12288  # bytes of integer sums between tile registers and their float steps
BUFFER_BYTES: Final = 1024  # a rank's buffer while silu(gate) * up is quantised
ATTENTION_HEADS: Final = 4  # queries that share keys and are taken together
ATTENTION_KEYS: Final = 32  # keys that are transposed together for many queries
ATTENTION_VALUES: Final = 64  # positions whose values are prepared together
ATTENTION_COLUMNS: Final = 64  # of values that are prepared together
ATTENTION_QUERIES: Final = 64  # queries that share the preparation, if their scores fit ATTENTION_SCORES
ATTENTION_SCORES: Final = 1 << 22  # bytes
ROUTER_WORDS: Final = 5  # 32-bit words a rank needs for each expert while choosing
OWN_ROWS: Final = 8  # rows of a hand-off up to which a rank may quantise the input for itself
OWN_ELEMENTS: Final = 400  # for each rank: elements of a row that a rank quantises while so many meet at a barrier
EXPERTS_HEAD: Final = 17  # words before the number of jobs in the arguments of experts_<type>
EXPERTS_JOB: Final = 7  # words of a job
MOST_CLAIMS: Final = 255  # pieces of a rank's share
CLAIM_BYTES: Final = 128  # from one rank's claim word to the next one's
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


def tile_area(kind: str, blocks: int) -> int:
    """Bytes that a rank needs to multiply rows of `blocks` blocks of `kind` with tile registers: decoded weights,
    integer sums, results of a panel, packed activations, in this order. Grows with `blocks`."""
    group = blocks * PACKED_BLOCK[kind]
    packed = min(TILE_CHUNK // TILE_TOKENS * group, max(PACKED_BYTES, PACKED_LEAST // TILE_TOKENS * group))
    return TILE_WEIGHTS + TILE_SUMS + TILE_CHUNK * 4 * 16 * PANEL_VECTORS + packed


def score_row(context: int) -> int:
    """Bytes of the scores of one query over `context` positions, with room for a whole ATTENTION_KEYS at the end."""
    return aligned(4 * (context + ATTENTION_KEYS + 8))


def attention_queries(context: int, group: int) -> int:
    """Queries, a multiple of the `group` heads that share keys, whose attention is taken together."""
    fitting = min(ATTENTION_QUERIES, ATTENTION_SCORES // score_row(context))
    return max(fitting // group, 1) * group


def attention_area(context: int, group: int, key_width: int, value_width: int) -> int:
    """Bytes of scratch that a rank needs for attention: see `attention_blocks`, `attention`."""
    queries = attention_queries(context, group) + ATTENTION_HEADS
    prepared = 4 * (ATTENTION_KEYS * key_width + ATTENTION_VALUES * value_width)
    return aligned(queries * (4 * (key_width + value_width) + score_row(context)) + prepared)
