"""Sleeping on a word of shared memory: the Linux futex call, without the GIL. Knows nothing of what the word means."""

from __future__ import annotations

import ctypes
import errno
import os

_WAIT = 0
_WAKE = 1
_SYS_FUTEX = 202  # x86-64


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
)


class FutexWaiter:
    """Waits on one 32-bit word, shared between processes, for at most a fixed time."""

    def __init__(self, address: int, seconds: float) -> None:
        self._address = address
        self._timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._timeout_address = ctypes.addressof(self._timeout)

    def wait(self, value: int) -> None:
        """Returns at once if the word is not `value`, else when woken, after the time, or for a signal: the caller
        looks at the word again in any case."""
        if _syscall(_SYS_FUTEX, self._address, _WAIT, value & 0xFFFFFFFF, self._timeout_address, None, 0) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(number, f"futex wait: {os.strerror(number)}")


def futex_wake(address: int) -> None:
    """Wakes who waits on the word."""
    _syscall(_SYS_FUTEX, address, _WAKE, 1, None, None, 0)
