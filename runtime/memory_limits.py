"""How much memory this process may still take: what the machine has available, cut to its control groups' limits.

Does not know who takes it nor for what.
"""

from __future__ import annotations

import re
from pathlib import Path

from bloomery.runtime.control_groups import group_folders, text_of

_LIMIT_AND_USAGE = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
_IDLE_PAGES = {2: "inactive_file", 1: "total_inactive_file"}


def available_memory(root: Path = Path("/")) -> int:
    """Bytes: MemAvailable of the machine, or what the tightest control group leaves, if that is less.

    Of a group's usage, file pages that nobody has touched for long are not counted: the kernel gives them back.
    """
    match = re.search(r"MemAvailable:\s*(\d+) kB", text_of(root / "proc/meminfo"))
    rooms = [int(match[1]) * 1024 if match else 0]
    for folder, version in group_folders(root, "memory"):
        limit, usage = (text_of(folder / name) for name in _LIMIT_AND_USAGE[version])
        if limit.isdigit() and usage.isdigit():  # "max" is no limit; version 1 says so with a number near 2^63
            idle = re.search(rf"^{_IDLE_PAGES[version]} (\d+)", text_of(folder / "memory.stat"), re.MULTILINE)
            rooms.append(max(0, int(limit) - int(usage) + (int(idle[1]) if idle else 0)))
    return min(rooms)
