"""The control groups above this process, versions 1 and 2, as mounted (also inside containers).

Owns finding their folders. Does not know what the files in them mean (`cpu_limits`, `memory_limits`). Every path is
taken below `root`, so that recorded machines can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Every group with this controller that this process is in, innermost first: its folder and version (1 or 2)."""
    groups: dict[int, str] = {}
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            groups[2] = path
        elif controller in controllers.split(","):
            groups[1] = path
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        version = {"cgroup2": 2, "cgroup": 1}.get(kind[0], 0)
        if version in groups and (version == 2 or controller in kind[2].split(",")):
            for folder in _upwards(root, fields[4], fields[3], groups[version]):
                yield folder, version


def text_of(path: Path) -> str:
    """The text of a small file of the kernel, without blanks around it; empty if it cannot be read."""
    try:
        return path.read_text().strip("\0 \n")
    except (OSError, UnicodeDecodeError):
        return ""


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
