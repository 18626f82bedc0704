"""A cache of table rows in a bounded number of bytes, looked up for many rows at once.

Owns which rows are kept and the counting of hits. Knows neither files nor what a row means. Set-associative: a row may
lie in one of `WAYS` places of its set; the one that was used longest ago gives way.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WAYS = 8
_KEY_BYTES = 16  # a key and a time
TABLE_SHIFT = 40
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: neighbours go to far sets


def cache_room(table_bytes: int, limit: int) -> int:
    """Bytes of a cache for tables of so many bytes: `limit`, or what is certain to hold all their rows."""
    return min(limit, 2 * table_bytes + (1 << 16))


class RowCache:
    """Rows of `row_bytes` bytes, named by (table, row). Less than one set of room means that nothing is kept."""

    def __init__(self, row_bytes: int, limit: int) -> None:
        """`limit`: the greatest number of bytes, keys included."""
        sets = max(0, limit) // (WAYS * (row_bytes + _KEY_BYTES))
        self.keys = np.full((sets, WAYS), -1, np.int64)
        self.used = np.zeros((sets, WAYS), np.int64)
        self.rows = np.empty((sets * WAYS, row_bytes), np.uint8)
        self.clock = 0
        self.hits = self.misses = 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.used.nbytes + self.rows.nbytes

    @property
    def held(self) -> int:
        """Rows in the cache."""
        return int((self.keys >= 0).sum())

    def take(self, table: int, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Copies the rows that are here into their places of `out` (n, row_bytes); returns the indices of the others.
        `ids` (n) are distinct."""
        if not len(self.keys):
            self.misses += len(ids)
            return np.arange(len(ids))
        keys = ids + (table << TABLE_SHIFT)
        sets = self._sets(keys)
        same = self.keys[sets] == keys[:, None]
        found = same.any(axis=1)
        hits = found.nonzero()[0]
        self.hits += len(hits)
        self.misses += len(ids) - len(hits)
        if not len(hits):
            return np.arange(len(ids))
        places = sets[hits] * WAYS + same[hits].argmax(axis=1)
        out[hits] = self.rows[places]
        self.clock += 1
        self.used.reshape(-1)[places] = self.clock
        return np.flatnonzero(~found)

    def put(self, table: int, ids: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Keeps rows (n, row_bytes) that `take` did not find. Of more than one for the same set one is kept."""
        if not len(self.keys) or not len(ids):
            return
        keys = ids + (table << TABLE_SHIFT)
        sets, first = np.unique(self._sets(keys), return_index=True)
        places = sets * WAYS + self.used[sets].argmin(axis=1)
        self.clock += 1
        self.keys.reshape(-1)[places] = keys[first]
        self.used.reshape(-1)[places] = self.clock
        self.rows[places] = rows[first]

    def _sets(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        upper = keys.astype(np.uint64) * SPREAD >> np.uint64(32)
        return (upper * np.uint64(len(self.keys)) >> np.uint64(32)).astype(np.int64)
