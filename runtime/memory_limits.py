"""How much memory this process may still take: of the machine, of its control groups, and in /dev/shm.

Knows cgroup versions 1 and 2 at their usual mount. Does not know what the memory is for (`placement.py`). Every path is
taken below `root`, so that recorded machines can be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryRoom:
    """Bytes that are free: `memory` counts what the kernel can reclaim (page cache), `shared` is the room in /dev/shm.
    `limit` names what bounds `memory`."""

    memory: int
    shared: int
    limit: str = "memory of the machine"


def memory_room(root: Path = Path("/")) -> MemoryRoom:
    """What is free now."""
    room, limit = _machine(root), "memory of the machine"
    for folder, names in _groups(root):
        free = _group_room(folder, *names)
        if free is not None and free < room:
            room, limit = free, f"memory limit of the control group {folder}"
    shared = os.statvfs(root / "dev/shm")
    return MemoryRoom(room, shared.f_bavail * shared.f_frsize, limit)


def _machine(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 2**63 - 1


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of the control groups above this process, innermost first, with the names of limit, usage and of the
    reclaimable part of the usage."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.lstrip("/")
        yield from ((group, names) for group in (folder, *folder.parents) if group == top or top in group.parents)


def _group_room(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Bytes left below a group's limit; None without one."""
    try:
        room = int(_text(folder / limit)) - int(_text(folder / usage))
    except ValueError:
        return None
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == reclaimable:
            room += int(value)
    return max(0, room)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
