"""How much CPU this process may use: its affinity mask and the CPU quota of its control groups.

Does not know cores or caches (`topology`) nor where control groups are mounted (`control_groups`).
"""

from __future__ import annotations

import os
from pathlib import Path

from bloomery.runtime.control_groups import group_folders, text_of


def affinity_mask() -> frozenset[int]:
    """Logical CPUs on which this process may run; cpusets of control groups are already taken into account."""
    return frozenset(os.sched_getaffinity(0))


def session_groups(setting: Path = Path("/proc/sys/kernel/sched_autogroup_enabled")) -> bool:
    """Whether the kernel shares cores out between sessions first (autogroup, sched(7)), and among a session's tasks
    then. A task that yields then gives way within its own session only."""
    return text_of(setting).strip() == "1"


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time a second that the control groups grant, the least of all levels; None: no limit."""
    quotas = []
    for folder, version in group_folders(root, "cpu"):
        if version == 2:  # "QUOTA PERIOD" in microseconds, or "max PERIOD"
            quota, _, period = text_of(folder / "cpu.max").partition(" ")
        else:  # a quota of -1 is no limit
            quota, period = text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)
