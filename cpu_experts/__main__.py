"""`python -m bloomery.cpu_experts START`: one CPU-expert worker process, started by the coordinator's HostPool.

START is a WorkerStart in JSON. Not for people: `bloomery-launch` starts what is needed.
"""

from __future__ import annotations

import os
import sys

from bloomery.runtime.worker_messages import WorkerStart


def main() -> int:
    if len(sys.argv) != 2:
        print("this program is started by bloomery-launch -> run bloomery-launch --help", file=sys.stderr)
        return 2
    from bloomery.cpu_experts.compile_cache import use_numba_cache

    use_numba_cache()  # before the modules whose functions it keeps
    from bloomery.cpu_experts.worker import run

    return run(WorkerStart.from_json(sys.argv[1]))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # taking Numba and the mappings apart would cost a third of a second and change nothing
