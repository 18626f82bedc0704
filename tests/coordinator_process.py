"""A coordinator to be killed: starts a pool, prints one JSON line about it, then idles or runs steps without end.

python coordinator_process.py PROCESSES idle|steps|stuck
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import ring_workload
from pool_kit import make_rows, start_pool

from bloomery.runtime.runtime_files import owner_name


def main() -> None:
    processes, mode = int(sys.argv[1]), sys.argv[2]
    pool = start_pool(processes, stages=300, delays=[30_000])
    print(json.dumps({"owner": owner_name(), "pids": pool.statistics()["pids"]}), flush=True)
    first = ring_workload.STUCK if mode == "stuck" else -1
    while mode != "idle":
        pool.step(make_rows(np.random.default_rng(1), 1, first=first))
    time.sleep(600)


if __name__ == "__main__":
    main()
