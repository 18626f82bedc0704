"""Weights read from files into memory: by several threads, with progress, past the page cache.

Owns how files are read: chunks that are whole in the page cache (mincore) are taken from there, all others by O_DIRECT,
or where a file system has none, through the cache with their pages dropped afterwards, so that a load does not take
memory twice. Trying the cache first (RWF_NOWAIT) would not do: that starts read-ahead of what is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION as FIRST_ERROR
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import numpy as np

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.host_weights import (
    HUGE_PAGE,
    PAGE,
    Extent,
    HostWeights,
    copied_tensors,
    lock_mapped,
)
from bloomery.runtime.program import Program

CHUNK: Final = 8 << 20
"""Bytes that a thread reads at once: several huge pages."""
READERS: Final = 4
DIRECT: Final = os.O_DIRECT
HUGE_SETTINGS: Final = "/sys/kernel/mm/transparent_hugepage"
ENOUGH_HUGE: Final = 0.9
SMALL_PAGE_COST: Final = 30
"""Percent, of kernels with one stream (docs/performance.md)."""

Progress = Callable[[str, int, int], None]

log = logging.getLogger(__name__)

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def fill_weights(weights: HostWeights, progress: Progress) -> None:
    """`load_weights`, and says once what was not to be had."""
    load_weights(weights, progress)
    weights.huge = weights.huge_share()
    _say_if_small(weights.huge, weights.layout.nbytes, f"as root: echo advise > {HUGE_SETTINGS}/shmem_enabled")


def own_facts(readies: Mapping[int, Mapping[str, Any]], nodes: Sequence[int]) -> dict[str, Any]:
    """Of weights in the workers' own memory, as their ready messages tell: the same facts as `HostWeights.facts`; none
    where no worker has any. Says once what this means, and what was not to be had."""
    own = {rank: ready for rank, ready in readies.items() if "weights" in ready}
    if not own:
        return {}
    nbytes = dict.fromkeys(map(str, sorted(set(nodes))), 0)
    for rank, ready in own.items():
        nbytes[str(nodes[rank])] += ready["weights"]
    total = sum(nbytes.values())
    sees = min(ready["sees"] for ready in own.values())
    huge = sum(ready["huge"] * ready["weights"] for ready in own.values()) / max(1, total)
    log.info(
        "weights lie in the memory of %d workers, %d MiB, %.0f %% of them in huge pages; %s",
        len(own),
        total >> 20,
        100 * huge,
        "workers help each other with theirs" if sees else "a worker's successor reads its part of the file again",
    )
    _say_if_small(huge, total, "free memory in one piece, or as root: echo 1 > /proc/sys/vm/compact_memory")
    if reason := next((ready["unlocked"] for ready in own.values() if ready["unlocked"]), ""):
        _say_unlocked(reason)
    return {"place": "private", "bytes": nbytes, "huge": huge, "sees": sees}


def _say_if_small(huge: float, nbytes: int, remedy: str) -> None:
    if huge < ENOUGH_HUGE and nbytes >= 64 * HUGE_PAGE:
        log.warning(
            "%.0f %% of the copied weights lie in 4 KiB pages, which costs decoding up to %d %%; %s",
            100 * (1 - huge),
            SMALL_PAGE_COST,
            remedy,
        )


def lock_weights(program: Program, weights: HostWeights | None) -> None:
    """Keeps weights from being swapped or dropped, copy or mapped file. Says once if that is not allowed."""
    if reason := weights.lock() if weights else lock_mapped(copied_tensors(program)):
        _say_unlocked(reason)


def _say_unlocked(reason: str) -> None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    log.warning(
        "weights are not locked in memory (%s; ulimit -l is %d KiB): the kernel may drop or swap them, and steps then"
        " wait for the disk",
        reason,
        limit // 1024,
    )


def load_weights(weights: HostWeights, progress: Progress, readers: int = READERS) -> None:
    """Fills the range. ModelFileError for a file that cannot be read or has become shorter, PlanError where memory runs
    out; in both cases the caller closes the segments. `progress("weights", bytes, all bytes)`."""
    total = weights.layout.nbytes
    done, stop, lock = [0], threading.Event(), threading.Lock()

    def read(file: WeightFile, extent: Extent, at: int) -> None:
        if stop.is_set():
            return
        nbytes = min(CHUNK, extent.nbytes - at)
        weights.populate(extent.place + at, nbytes)
        file.read(extent.offset + at, weights.memory(extent.place + at, nbytes), min(nbytes, extent.data - at))
        with lock:
            done[0] += nbytes

    with contextlib.ExitStack() as files, ThreadPoolExecutor(readers, "bloomery-weights") as pool:
        opened = {
            path: files.enter_context(WeightFile(path)) for path in {extent.path for extent in weights.layout.extents}
        }
        waiting = {
            pool.submit(read, opened[extent.path], extent, at)
            for extent in weights.layout.extents
            for at in range(0, extent.nbytes, CHUNK)
        }
        try:
            while waiting:
                progress("weights", done[0], total)
                finished, waiting = wait(waiting, timeout=0.1, return_when=FIRST_ERROR)
                for future in finished:
                    future.result()
        finally:
            stop.set()
    progress("weights", total, total)


class WeightFile:
    """A file that is read past the page cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._error(error) from error
        self._pages = np.empty(0, np.uint8)
        with contextlib.suppress(OSError, ValueError):  # no mapping, as of an empty file: then nothing counts as cached
            self._pages = np.frombuffer(mmap.mmap(self._cached, 0, prot=mmap.PROT_READ), np.uint8)
        try:
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | DIRECT) if DIRECT else -1
        except OSError:
            self._direct = -1

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._cached, self._direct):
            if descriptor >= 0:
                os.close(descriptor)

    def read(self, offset: int, out: memoryview, wanted: int) -> None:
        """Bytes from `offset`, a whole page, on: `wanted` at least, whole pages where the file has them."""
        done = 0
        for count in self._counts(offset, out, wanted):
            done += count
            if count == 0:
                break
        if done < wanted:
            raise ModelFileError(
                f"{self.path}: {wanted - done} bytes are missing from byte {offset + done} on; the file has become"
                " shorter since it was opened",
                "do not change a model file while it is loaded; copy or download it again",
            )

    def _counts(self, offset: int, out: memoryview, wanted: int) -> Iterator[int]:
        done = self._from_cache(offset, out[:wanted])
        yield from [done] if done else []
        while done < wanted:
            try:
                count = self._from_disk(offset + done, out[done:], wanted - done)
            except OSError as error:
                raise self._error(error) from error
            done += count
            yield count

    def _from_cache(self, offset: int, out: memoryview) -> int:
        """Whole pages that were there without reading; 0 unless all were."""
        if not self._resident(offset, len(out)):
            return 0
        try:
            count = os.preadv(self._cached, [out], offset, os.RWF_NOWAIT)
        except OSError:  # not there, or a file system that cannot tell
            return 0
        return count if count == len(out) else count // PAGE * PAGE

    def _resident(self, offset: int, nbytes: int) -> bool:
        """Whether the page cache has all of this. Of another user's file that this one may not write the kernel says
        always yes."""
        if offset + nbytes > len(self._pages):
            return False
        flags = np.zeros(-(-nbytes // PAGE), np.uint8)
        status = _libc.mincore(self._pages.ctypes.data + offset, nbytes, flags.ctypes.data)
        return status == 0 and bool((flags & 1).all())

    def _from_disk(self, offset: int, out: memoryview, wanted: int) -> int:
        if self._direct >= 0:
            try:
                count = os.preadv(self._direct, [out], offset)
                return min(count, wanted) if count >= wanted else count // PAGE * PAGE
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = -1  # the file system has other alignments
        count = os.preadv(self._cached, [out[:wanted]], offset)
        os.posix_fadvise(self._cached, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def _error(self, error: OSError) -> ModelFileError:
        return ModelFileError(f"{self.path}: cannot be read: {error.strerror}", "check the disk and the permissions")
