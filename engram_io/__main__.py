"""`python -m bloomery.engram_io START`: the engram I/O process of a pool, started by the coordinator's HostPool.

START is an EngramStart in JSON. Not for people: `bloomery-launch` starts what is needed.
"""

from __future__ import annotations

import os
import sys

from bloomery.runtime.worker_messages import EngramStart


def main() -> int:
    if len(sys.argv) != 2:
        print("this program is started by bloomery-launch -> run bloomery-launch --help", file=sys.stderr)
        return 2
    from bloomery.engram_io.worker import run

    return run(EngramStart.from_json(sys.argv[1]))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
