"""`python -m bloomery.gpu_worker START`: the card's worker process, started by the coordinator's CardPool.

START is a CardStart in JSON. Not for people: `bloomery-launch --plan a` starts what is needed.
"""

from __future__ import annotations

import os
import sys

from bloomery.runtime.worker_messages import CardStart


def main() -> int:
    if len(sys.argv) != 2:
        print("this program is started by bloomery-launch -> run bloomery-launch --help", file=sys.stderr)
        return 2
    from bloomery.gpu_worker.worker import run

    return run(CardStart.from_json(sys.argv[1]))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # the driver takes the context apart faster than Python would
