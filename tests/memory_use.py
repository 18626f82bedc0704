"""What a running pool keeps in memory: pages of processes and of /dev/shm, and pages of a file in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
_CHUNK = 1 << 30


def resident_bytes(path: Path, offset: int = 0, nbytes: int = 0) -> int:
    """Bytes of a part of a file (default: all) that are in the page cache, whoever brought them (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    end = offset + nbytes if nbytes else path.stat().st_size
    pages = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        view = np.frombuffer(memory, np.uint8)
        first = offset // PAGE * PAGE
        for start in range(first, end, _CHUNK):
            size = min(_CHUNK, end - start)
            flags = np.zeros(-(-size // PAGE), np.uint8)
            if libc.mincore(view.ctypes.data + start, size, flags.ctypes.data):
                raise OSError(ctypes.get_errno(), "mincore")
            pages += int((flags & 1).sum())
        del view
    return pages * PAGE


def process_bytes(pids: Iterable[int]) -> int:
    """Anonymous memory and shared segments of some processes, shared pages counted once (proportional sizes)."""
    total = 0
    for pid in pids:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        sizes = dict(re.findall(r"^(\w+): +(\d+) kB", rollup, re.MULTILINE))
        total += 1024 * (int(sizes["Pss_Anon"]) + int(sizes["Pss_Shmem"]))
    return total
