"""Pools that run the ring workload, and what a test needs to look at them from outside."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ring_workload
from numpy.typing import NDArray

from bloomery.runtime.executor import StepResult, StepRows
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.runtime_files import SHARED_MEMORY, owner_name, runtime_directory

SLOTS, CONTEXT, BLOCK = 4, 256, 64
TESTS = Path(__file__).parent


def worker_environment() -> dict[str, str]:
    """Variables with which a worker finds ring_workload."""
    return {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def start_pool(
    processes: int, *, stages: int = 20, delays: Sequence[int] = (0,), refuse: str = "", **options: Any
) -> HostPool:
    settings = json.dumps({"stages": stages, "delays": delays, "refuse": refuse})
    return HostPool.start(
        settings,
        ring_workload.program(),
        context=CONTEXT,
        slots=SLOTS,
        processes=processes,
        prompt_block=BLOCK,
        cache_type="f32",
        workload="ring_workload:load",
        **options,
    )


def make_rows(rng: np.random.Generator, count: int, *, slot: int = 0, start: int = 0, first: int = -1) -> StepRows:
    """Rows of one slot with random harmless tokens; about half of them are wanted. `first` replaces the first token."""
    tokens = rng.integers(0, ring_workload.STUCK, count).astype(np.int32)
    if first >= 0:
        tokens[0] = first
    wanted = np.flatnonzero(rng.random(count) < 0.5).astype(np.int32)
    positions = np.arange(start, start + count, dtype=np.int32)
    return StepRows(tokens, np.full(count, slot, np.int32), positions, wanted)


def words(result: StepResult) -> NDArray[np.int64]:
    """The int64 words that the ring workload leaves in the logits."""
    return np.ascontiguousarray(result.logits[:, : 2 * ring_workload.WIDTH]).view(np.int64)


def check_step(pool: HostPool, rows: StepRows, stages: int) -> None:
    result = pool.step(rows)
    np.testing.assert_array_equal(words(result), ring_workload.expected(rows, stages))
    np.testing.assert_array_equal(result.greedy, rows.tokens[rows.out_rows])


def left_behind(owner: str | None = None) -> list[str]:
    """Names in shared memory and the runtime directory that belong to an owner (default: this process)."""
    prefix = f"{owner or owner_name()}-"
    places = (SHARED_MEMORY, runtime_directory())
    return sorted(path.name for place in places for path in place.iterdir() if path.name.startswith(prefix))


def worker_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "bloomery.cpu_experts" in " ".join(_command(child))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def wait_until(condition: Any, seconds: float) -> bool:
    """Whether the condition became true within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
