"""State kinds: what a layer keeps of a sequence between steps, as rows that are addressed by (slot, logical row).

Owns which rows exist, where a position's row lies and which rows a sequence of n positions needs to go on. Knows no
memory: an executor allocates `rows(context, spare)` rows a slot and puts logical row i into row i % rows. So every
state is copied, stored and brought back as at most two pieces of contiguous rows, whatever its kind.

Taking back rows: a ring has room for `spare` more positions than a row ever looks back. After `high` positions a
sequence can go on at any position from high - spare - 1 on without a copy, since nothing that such a position reads has
been overwritten; `spare` must be at least the greatest number of rows of a step less one, for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from bloomery.runtime.cache_types import stored_dtype, stored_width

Element: TypeAlias = Literal["cache", "f32", "i32"]


@dataclass(frozen=True)
class CacheState:
    """One row of `width` elements for every position, in the cache type (`cache_types`).

    A row is `heads` equal parts side by side, which an executor may keep apart, each part's rows together: whoever
    works on one head then reads without gaps. What is copied, stored and brought back are whole rows all the same."""

    name: str
    width: int
    heads: int = field(default=1, kw_only=True)

    @property
    def kind(self) -> Element:
        """The elements: of the executor's cache type, always f32, or i32."""
        return "cache"

    def rows(self, context: int, spare: int) -> int:
        """Rows of a slot that holds `context` positions and may be taken back by `spare` + 1."""
        return context

    def live(self, positions: int) -> range:
        """The logical rows that a sequence of so many positions needs to go on."""
        return range(positions)

    def reaching(self, first: int, positions: int) -> range:
        """The logical rows that it needs to go on at any position from `first` to `positions`."""
        return range(self.live(first).start, self.live(positions).stop)


@dataclass(frozen=True)
class RingState(CacheState):
    """One row for each of the last positions: a row at position p reads positions p - span + 1 to p and no others."""

    span: int
    element: Element = "cache"

    @property
    def kind(self) -> Element:
        return self.element

    def rows(self, context: int, spare: int) -> int:
        return min(context, self.span + spare)

    def live(self, positions: int) -> range:
        return range(max(0, positions - self.span + 1), positions)


@dataclass(frozen=True)
class GroupState(CacheState):
    """One row for every whole group of `ratio` positions: group g is written by position g*ratio + ratio - 1, and the
    row at position p sees the groups 0 to (p + 1) // ratio - 1."""

    ratio: int

    def rows(self, context: int, spare: int) -> int:
        return -(-context // self.ratio)

    def live(self, positions: int) -> range:
        return range(positions // self.ratio)


def element_type(state: CacheState, cache_type: str) -> np.dtype[Any]:
    """What the state's elements are stored as where the caches are of this type."""
    return stored_dtype(_kind(state, cache_type))


def row_width(state: CacheState, cache_type: str) -> int:
    """How many of them a row takes."""
    return stored_width(_kind(state, cache_type), state.width)


def _kind(state: CacheState, cache_type: str) -> str:
    return cache_type if state.kind == "cache" else state.kind


def pieces(logical: range, rows: int) -> list[slice]:
    """Where logical rows lie in a slot of `rows` rows: one piece, or two where they go round."""
    assert len(logical) <= rows
    if not logical:
        return []
    first, count = logical.start % rows, len(logical)
    if first + count <= rows:
        return [slice(first, first + count)]
    return [slice(first, rows), slice(0, first + count - rows)]
