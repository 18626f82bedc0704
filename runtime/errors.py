"""Errors a person reads: one line that says what is wrong and where, and a next step."""

from __future__ import annotations

import errno
from typing import Final

_SYSTEM_HINTS: Final = {
    errno.EMFILE: "allow more open files for this process: ulimit -n 1024",
    errno.ENFILE: "the whole system has too many open files: end programs, or raise fs.file-max",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your disk quota",
    errno.EFBIG: "lift the limit on file sizes: ulimit -f unlimited",
    errno.EROFS: "make that file system writable, or name another place",
    errno.ENOMEM: "free memory, or lift the limit on it: ulimit -v unlimited",
    errno.EAGAIN: "allow more processes for this user: ulimit -u unlimited",
}


def system_hint(error: BaseException) -> str | None:
    """The next step for something that the system refused; None for errors that are defects of ours."""
    return _SYSTEM_HINTS.get(error.errno or 0) if isinstance(error, OSError) else None


class BloomeryError(Exception):
    """Base of every error that is somebody's input or situation rather than a defect of ours.

    `message` names the file, tensor, key or term at fault, what was found and what was expected; `hint` says what to
    do next. Programs print `str(error)` on standard error as one line and exit with `exit_status`.
    """

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = " ".join(self.message.split())
        return f"{text} -> {self.hint}" if self.hint else text


class ModelFileError(BloomeryError):
    """A model file that cannot be used: damaged, incomplete or of an unknown kind."""


class PlanError(BloomeryError):
    """A plan that does not exist or does not fit; names the term and the shortfall."""


class RequestError(BloomeryError):
    """A request that cannot be served. `code` is a row of the protocol's error table; `details` are its numbers."""

    def __init__(self, code: str, message: str, hint: str = "", **details: int | float | str) -> None:
        super().__init__(message, hint)
        self.code = code
        self.details = details


class WorkerLost(BloomeryError):
    """A worker process died, hung or reported a failure; the running step has no result."""


class StepAborted(Exception):
    """The running step was cut short on request (`StepExecutor.abort`); its rows were not completed."""
