"""How fast a file can be read from its disk, with the page cache emptied of it first.

Owns the dropping of cached pages (posix_fadvise DONTNEED) and the measuring of what stayed cached all the same. Does
not know what the file is for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bloomery.runtime.errors import BloomeryError

PIECE_BYTES: Final = 4 << 20
THREADS: Final = 4  # requests in flight: one alone does not reach an NVMe disk's rate
GREATEST_BYTES: Final = 4 << 30
LONGEST_SECONDS: Final = 4.0
MADE_BYTES: Final = 256 << 20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DiskRate:
    """`cached_share` of the part that was read was still in the page cache when reading began: 0 is an honest disk
    rate, anything near 1 is memory."""

    path: str
    nbytes: int
    seconds: float
    cached_share: float

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds


def disk_read_rate(path: Path, progress: Progress = lambda stage, done, total: None) -> DiskRate:
    """Reads the beginning of `path`, up to 4 GiB or 4 s, in pieces of 4 MiB with four requests in flight."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise BloomeryError(f"{path}: cannot be read: {error.strerror}", "name a readable file") from None
    try:
        size = min(os.fstat(descriptor).st_size, GREATEST_BYTES)
        if not size:
            raise BloomeryError(f"{path}: is empty, expected a file with something to read", "name a greater file")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        cached = cached_share(descriptor, size)
        done, seconds = _read(descriptor, size, progress)
    finally:
        os.close(descriptor)
    return DiskRate(str(path), done, seconds, cached)


def _read(descriptor: int, size: int, progress: Progress) -> tuple[int, float]:
    offsets = iter(range(0, size, PIECE_BYTES))
    start = time.perf_counter()
    totals = [0] * THREADS

    def work(thread: int) -> None:
        piece = bytearray(PIECE_BYTES)
        while time.perf_counter() < start + LONGEST_SECONDS and (offset := next(offsets, None)) is not None:
            totals[thread] += os.preadv(descriptor, [piece], offset)
            progress("reading from disk", sum(totals), size)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(work, thread) for thread in range(THREADS)]:
            future.result()
    return sum(totals), time.perf_counter() - start


def cached_share(descriptor: int, size: int) -> float:
    """Which part of the first `size` bytes of an open file is in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-size // mmap.PAGESIZE)
    resident = np.zeros(pages, dtype=np.uint8)
    with mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as memory:
        view = np.frombuffer(memory, dtype=np.uint8)
        address = view.__array_interface__["data"][0]
        status = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(resident.ctypes.data))
        del view
    if status:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return float((resident & 1).mean())


@contextmanager
def made_file(folder: Path, progress: Progress = lambda stage, done, total: None) -> Iterator[Path]:
    """A file of random bytes on the disk of `folder`, written through to the disk; removed afterwards."""
    statistics = os.statvfs(folder)
    size = min(MADE_BYTES, statistics.f_bavail * statistics.f_frsize // 4) // PIECE_BYTES * PIECE_BYTES
    if not size:
        raise BloomeryError(f"{folder}: has no room for a file to measure with", "name a file with --disk-file")
    generator = np.random.default_rng()
    with tempfile.NamedTemporaryFile(dir=folder, prefix="bloomery-probe-") as file:
        for written in range(0, size, PIECE_BYTES):
            file.write(generator.bytes(PIECE_BYTES))
            progress("writing a file to read", written + PIECE_BYTES, size)
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)
