"""Sums across the lanes of 64-byte registers, those of four weight rows together, so that they share their shuffles.

Integers only, whose sums are exact in any order. Knows no quant type.
"""

from __future__ import annotations

from collections.abc import Sequence

from bloomery.cpu_experts.simd import Emitter, Value


def row_by_row(s: Emitter, rows: Sequence[Value]) -> Value:
    """i32x16: in 16 bytes for each of four i32x16 four partial sums of its lanes."""
    halves = []
    for first, second in (rows[:2], rows[2:]):
        low = s.shuffle(first, second, [*range(8), *range(16, 24)])
        halves.append(s.add(low, s.shuffle(first, second, [*range(8, 16), *range(24, 32)])))
    even = [lane for start in (0, 8, 16, 24) for lane in range(start, start + 4)]
    low, high = halves
    return s.add(s.shuffle(low, high, even), s.shuffle(low, high, [lane + 4 for lane in even]))


def sums_of_fours(s: Emitter, value: Value) -> Value:
    """i32x4 of the sums of the four lanes in each 16 bytes of i32x16."""
    for distance in (1, 2):
        value = s.add(value, s.lanes(value, [lane ^ distance for lane in range(16)]))
    return s.lanes(value, [0, 4, 8, 12])


def sums_of_both(s: Emitter, x: Value, y: Value) -> tuple[Value, Value]:
    """`sums_of_fours` of x and of y."""
    both = _pairs(s, x, y)
    both = s.add(both, s.lanes(both, [lane ^ 1 for lane in range(16)]))
    return s.lanes(both, [0, 4, 8, 12]), s.lanes(both, [2, 6, 10, 14])


def sums_by_block(s: Emitter, rows: Sequence[Value]) -> Value:
    """i32x16: in each 16 bytes the sums of the four lanes that four i32x16 have there, one after the other."""
    return _pairs(s, _pairs(s, rows[0], rows[1]), _pairs(s, rows[2], rows[3]))


def _pairs(s: Emitter, x: Value, y: Value) -> Value:
    """In each 16 bytes two sums of neighbours of x, then two of y."""
    even = [at for part in range(0, 16, 4) for at in (part, part + 2, part + 16, part + 18)]
    return s.add(s.shuffle(x, y, even), s.shuffle(x, y, [lane + 1 for lane in even]))
