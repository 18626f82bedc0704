"""How much of the machine this process may use: its affinity mask and the CPU quota of its control groups.

Knows cgroup versions 1 and 2 and their mounts. Does not know cores or caches (`topology`). Every path is taken below
`root`, so that recorded machines can be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path


def affinity_mask() -> frozenset[int]:
    """Logical CPUs on which this process may run; cpusets of control groups are already taken into account."""
    return frozenset(os.sched_getaffinity(0))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time a second that the control groups grant, the least of all levels; None: no limit."""
    quotas = [quota for folder, read in _groups(root) if (quota := read(folder)) is not None]
    return min(quotas, default=None)


_Reader = Callable[[Path], float | None]


def _quota_v2(folder: Path) -> float | None:
    """cpu.max holds "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    fields = _text(folder / "cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return _ratio(fields[0], fields[1])


def _quota_v1(folder: Path) -> float | None:
    """cpu.cfs_quota_us is -1 without a limit."""
    return _ratio(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    try:
        values = int(quota), int(period)
    except ValueError:
        return None
    return values[0] / values[1] if values[0] > 0 and values[1] > 0 else None


def _groups(root: Path) -> Iterator[tuple[Path, _Reader]]:
    """Every control group folder with a CPU quota above this process, innermost first, with its reader."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "" or "cpu" in controllers.split(","):
            paths[controllers == ""] = path
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        unified = kind[0] == "cgroup2"
        if unified in paths and (unified or (kind[0] == "cgroup" and "cpu" in kind[2].split(","))):
            reader = _quota_v2 if unified else _quota_v1
            for folder in _upwards(root, fields[4], fields[3], paths[unified]):
                yield folder, reader


def _upwards(root: Path, mount: str, mounted: str, group: str) -> Iterator[Path]:
    """Folders of a process in `group` when the group `mounted` is what is seen at `mount` (in a container, not "/")."""
    inside = "/" + group.removeprefix(mounted.rstrip("/")).lstrip("/") if group.startswith(mounted) else "/"
    while True:
        folder = root / (mount + inside).strip("/")
        if folder.is_dir():
            yield folder
        if inside == "/":
            return
        inside = inside.rpartition("/")[0] or "/"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip("\0 \n")
    except (OSError, UnicodeDecodeError):
        return ""
