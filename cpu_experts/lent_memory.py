"""Memory that a rank fills and others of this machine may read: shared, in huge pages although nobody set them up.

Owns how it is taken and mapped. Where shared memory gets no huge pages by itself (`shmem_enabled` never), the kernel
collapses what is there already (MADV_COLLAPSE, Linux 6.1): one page of each two MiB is touched, then the whole is asked
for. Where the kernel knows no such thing there is no such memory, and a rank keeps its rows for itself.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Final

from bloomery.runtime.host_weights import HUGE_PAGE, POPULATE_WRITE, libc, map_shared, reserve

_COLLAPSE: Final = 25


class LentMemory:
    """Of `nbytes`, at `address` in this process. It stays mapped as long as the process lives."""

    def __init__(self, descriptor: int, nbytes: int, writable: bool) -> None:
        """Maps the file of a descriptor. OSError, also for one that is too short."""
        self._descriptor, self.nbytes = descriptor, nbytes
        if os.fstat(descriptor).st_size < nbytes:
            raise OSError(errno.EINVAL, "it is too short")
        room = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        self.address = -(-reserve(room + HUGE_PAGE) // HUGE_PAGE) * HUGE_PAGE
        map_shared(self.address, room, descriptor, 0, writable)

    @classmethod
    def take(cls, nbytes: int) -> LentMemory | None:
        """New memory, of which all pages are there; None where there is none of this kind. OSError where it runs out
        meanwhile."""
        descriptor = -1
        try:
            descriptor = os.memfd_create("bloomery-rows", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, -(-nbytes // HUGE_PAGE) * HUGE_PAGE)
            memory = cls(descriptor, nbytes, True)
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            return None
        for at in range(0, nbytes, HUGE_PAGE):
            memory._populate(at, mmap.PAGESIZE)
            if libc.madvise(memory.address + at, HUGE_PAGE, _COLLAPSE) == 0:
                continue
            if ctypes.get_errno() == errno.EINVAL and at == 0:
                memory._release()
                return None
            memory._populate(at, HUGE_PAGE)  # this kernel can, but finds no room: small pages then
        return memory

    @classmethod
    def borrow(cls, path: str, nbytes: int) -> LentMemory:
        """What another process has taken, to read; `path` is where a descriptor of it is found. OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(descriptor, nbytes, False)
        finally:
            os.close(descriptor)

    @property
    def path(self) -> str:
        """Of what this process has taken: where others of its user find it, as long as it lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def _populate(self, at: int, nbytes: int) -> None:
        if libc.madvise(self.address + at, nbytes, POPULATE_WRITE) and ctypes.get_errno() != 22:  # before Linux 5.14
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _release(self) -> None:
        libc.munmap(self.address, -(-self.nbytes // HUGE_PAGE) * HUGE_PAGE)
        os.close(self._descriptor)
