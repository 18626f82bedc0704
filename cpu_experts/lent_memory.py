"""Memory that a rank fills and others of this machine may read: shared, in huge pages although nobody set them up.

Owns how it is taken and mapped. Where shared memory gets no huge pages by itself (`shmem_enabled` never), the kernel
collapses what is there already (MADV_COLLAPSE, Linux 6.1): one page of each two MiB is touched, then the whole is asked
for. Where even that fails there is no such memory, and a rank keeps its rows for itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

from bloomery.runtime.host_weights import HUGE_PAGE, libc

_POPULATE_WRITE: Final = 23
_COLLAPSE: Final = 25
_MAP_FIXED: Final = 0x10
_NO_ACCESS: Final = 0
_FAILED: Final = ctypes.c_void_p(-1).value


class LentMemory:
    """Of `nbytes`, at `address` in this process. It stays mapped as long as the process lives."""

    def __init__(self, descriptor: int, nbytes: int, writable: bool) -> None:
        """Maps the file of a descriptor, which becomes this object's. OSError."""
        self._descriptor, self.nbytes = descriptor, nbytes
        room = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        reserved = libc.mmap(None, room + HUGE_PAGE, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if reserved in (None, _FAILED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address: int = -(-reserved // HUGE_PAGE) * HUGE_PAGE
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if libc.mmap(self.address, room, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != self.address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    @classmethod
    def take(cls, nbytes: int) -> LentMemory | None:
        """New memory, of which all pages are there; None where it gets no huge pages. OSError where it runs out."""
        descriptor = os.memfd_create("bloomery-rows", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, -(-nbytes // HUGE_PAGE) * HUGE_PAGE)
            memory = cls(descriptor, nbytes, True)
        except OSError:
            os.close(descriptor)
            raise
        for at in range(0, nbytes, HUGE_PAGE):
            memory._populate(at, mmap.PAGESIZE)
            huge = libc.madvise(memory.address + at, HUGE_PAGE, _COLLAPSE) == 0
            if not huge and at == 0:
                memory._release()
                return None
            if not huge:  # this kernel can, but finds no room: small pages then
                memory._populate(at, HUGE_PAGE)
        return memory

    @classmethod
    def borrow(cls, path: str, nbytes: int) -> LentMemory:
        """What another process has taken, to read; `path` is its `path`. OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(descriptor, nbytes, False)
        except OSError:
            os.close(descriptor)
            raise

    @property
    def path(self) -> str:
        """Where other processes of this user find it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def _populate(self, at: int, nbytes: int) -> None:
        if libc.madvise(self.address + at, nbytes, _POPULATE_WRITE) and ctypes.get_errno() != 22:  # before Linux 5.14
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _release(self) -> None:
        libc.munmap(self.address, -(-self.nbytes // HUGE_PAGE) * HUGE_PAGE)
        os.close(self._descriptor)
