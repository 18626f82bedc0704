"""Peak memory of a load: `python tests/load_peak.py FILE [copy|mmap]` starts a pool and says what it took at most.

Counted are anonymous memory and shared segments of this process and its workers (`memory_use.process_bytes`), beyond
what this process had before; the page cache is the kernel's to take back.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
from memory_use import process_bytes

from bloomery.runtime.architectures import build_program
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.host_weights import copied_tensors
from bloomery.runtime.model_file import ModelFile

MEBIBYTE = 1 << 20
PROCESS_BYTES = 200 * MEBIBYTE


def peak_of_load(path: Path, processes: int, **options: Any) -> tuple[int, int]:
    """(peak in bytes while a pool starts, bytes of the weights)."""
    program = build_program(ModelFile.open(path))
    me, done, peak = os.getpid(), threading.Event(), [0]
    before = process_bytes([me])

    def watch() -> None:
        while not done.wait(0.02):
            pids = [me, *(child.pid for child in psutil.Process().children(recursive=True))]
            try:
                peak[0] = max(peak[0], process_bytes(pids) - before)
            except (OSError, psutil.Error):
                continue  # one of them has just ended

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        HostPool.start(str(path), program, context=64, slots=1, processes=processes, prompt_block=32, **options).close()
    finally:
        done.set()
        watcher.join()
    return peak[0], sum(tensor.nbytes for tensor in copied_tensors(program))


def main() -> None:
    path, place = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "copy"
    peak, weights = peak_of_load(path, 2, host_weights=place)
    print(f"{place}: weights {weights / MEBIBYTE:.0f} MiB, peak {peak / MEBIBYTE:.0f} MiB, 2 workers")


if __name__ == "__main__":
    main()
