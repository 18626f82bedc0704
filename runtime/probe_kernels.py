"""The two loops that a memory probe runs: reading a buffer as fast as one core can, and chasing a chain through it.

Compiled by Numba on first use and cached on disk. Knows nothing of processes, pinning or clocks.
"""

from __future__ import annotations

import mmap
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

LINE_BYTES = 64
LINE_WORDS = LINE_BYTES // 8


@numba.njit(numba.uint64(numba.uint64[::1]), nogil=True, cache=True)
def read_all(words: npt.NDArray[np.uint64]) -> Any:
    """The sum of an even number of words, so that every byte is read.

    LLVM turns each reduction into several wide sums; two far-apart streams read 6 % faster than one.
    """
    half = words.size // 2
    low, high = np.uint64(0), np.uint64(0)
    for index in range(half):
        low += words[index]
        high += words[half + index]
    return low + high


@numba.njit(numba.uint64(numba.uint64[::1], numba.uint64, numba.int64), nogil=True, cache=True)
def chase(words: npt.NDArray[np.uint64], start: int, steps: int) -> Any:
    """The word at which `steps` dependent loads end: each word read is the index of the next."""
    place = np.uint64(start)
    for _ in range(steps):
        place = words[place]
    return place


def fresh_buffer(nbytes: int) -> npt.NDArray[np.uint64]:
    """Zeroed words in the memory of the NUMA node of the calling process, in huge pages where the kernel has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    words: npt.NDArray[np.uint64] = np.frombuffer(memory, dtype=np.uint64)
    words[:] = 1  # the first touch decides the node
    return words


def link_lines(words: npt.NDArray[np.uint64], seed: int) -> None:
    """Turns the buffer into one random cycle through all of its cache lines."""
    order = np.random.default_rng(seed).permutation(words.size // LINE_WORDS).astype(np.uint64) * np.uint64(LINE_WORDS)
    words[order] = np.roll(order, -1)
