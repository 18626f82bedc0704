"""Files that a daemon leaves outside its own memory: names, places, and sweeping up after a killed one.

Owns the naming rule, the runtime directory and the decision whether an owner is still alive. Knows nothing of what the
files hold (`arena.py`, sockets).

Every name starts with its owner, `bloomery-<pid>-<start time>`; the start time (clock ticks since boot, field 22 of
/proc/<pid>/stat) tells a process from a later one that got the same pid. Owners in other pid namespaces look dead from
here although they share /dev/shm, so a segment is swept only if nobody holds its `flock` either, and a socket only if
nobody answers on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from bloomery.runtime.errors import BloomeryError

SHARED_MEMORY = Path("/dev/shm")
SOCKET_PATH_LIMIT = 107
"""Bytes of sun_path on Linux, less the final zero."""

_EXIT_SECONDS = 0.3
"""A killed process keeps its locks until the last of its threads is gone, a few milliseconds."""

_OWNED = re.compile(r"bloomery-(\d+)-(\d+)-.+")


def process_state(pid: int) -> str:
    """The letter of /proc/<pid>/stat: R, S, D, T (stopped), Z ...; "" if there is no such process."""
    fields = _process_fields(pid)
    return fields[0] if fields else ""


def process_start_time(pid: int) -> int | None:
    """Clock ticks since boot at which a process started; None if there is none or only its zombie is left."""
    fields = _process_fields(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def _process_fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third on, the state; none if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the command before it may contain blanks and parentheses


def owner_name(pid: int | None = None) -> str:
    """The prefix of every name that a process (default: this one) owns."""
    pid = os.getpid() if pid is None else pid
    return f"bloomery-{pid}-{process_start_time(pid)}"


def owner_is_alive(name: str) -> bool:
    """Whether the process that a name belongs to still runs (as seen from this pid namespace)."""
    match = _OWNED.fullmatch(name)
    return match is not None and process_start_time(int(match[1])) == int(match[2])


@cache
def runtime_directory() -> Path:
    """The directory for this user's sockets, mode 0700: $XDG_RUNTIME_DIR/bloomery, else /tmp/bloomery-<uid>."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK):
        directory = Path(base, "bloomery")
    else:
        directory = Path(f"/tmp/bloomery-{os.getuid()}")
    return _private_directory(directory)


def _private_directory(directory: Path) -> Path:
    hint = "set XDG_RUNTIME_DIR to a directory that only you can write"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise BloomeryError(f"runtime directory {directory} is not a directory of user {os.getuid()}", hint)
        if stat.S_IMODE(found.st_mode) != 0o700:
            directory.chmod(0o700)
    except OSError as error:
        raise BloomeryError(f"cannot use the runtime directory {directory}: {error.strerror}", hint) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise BloomeryError(f"runtime directory {directory} is not writable", hint)
    return directory


def socket_path(name: str) -> Path:
    """Path of a socket of this process in the runtime directory; the name becomes `<owner>-<name>`."""
    path = runtime_directory() / f"{owner_name()}-{name}"
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise BloomeryError(
            f"socket path {path} has {len(os.fsencode(path))} bytes, the system allows {SOCKET_PATH_LIMIT}",
            "set XDG_RUNTIME_DIR to a shorter path",
        )
    return path


def unlink_owned(owner: str) -> None:
    """Removes every file of one owner. The last to leave calls it, so files that are gone already are no error."""
    for path in _owned_paths():
        if path.name.startswith(f"{owner}-"):
            with contextlib.suppress(OSError):
                path.unlink()


def sweep() -> list[str]:
    """Removes what dead owners left in shared memory and in the runtime directory; returns the names removed."""
    swept = []
    deadline = time.monotonic() + _EXIT_SECONDS
    for path in _owned_paths():
        if owner_is_alive(path.name):
            continue
        while (in_use := _in_use(path)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if in_use:
            continue
        with contextlib.suppress(OSError):  # another user's, or another process swept it first
            path.unlink()
            swept.append(path.name)
    return swept


def _owned_paths() -> Iterator[Path]:
    for directory in (SHARED_MEMORY, runtime_directory()):
        with contextlib.suppress(OSError):
            yield from [path for path in directory.iterdir() if _OWNED.fullmatch(path.name)]


def _in_use(path: Path) -> bool:
    """Whether some process, in whatever pid namespace, holds the file's lock or answers on the socket."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISSOCK(mode):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(0.2)
                probe.connect(os.fspath(path))
            return True
        if not stat.S_ISREG(mode):
            return True  # not ours to judge
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
