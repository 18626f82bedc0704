"""Peak memory of a load: `python tests/load_peak.py FILE [shared|private|mmap]` starts a pool and says what it took.

Counted are anonymous memory of this process and its workers, beyond what this process had before, and the memory that
the copies' segments have taken. (Proportional sizes of shared pages would count those twice that a worker maps while
the others are asked: 700 MB too many of 2.3 GB.) The page cache is the kernel's to take back; the pool's arena is no
part of a load.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from bloomery.runtime.architectures import build_program
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.host_weights import copied_tensors
from bloomery.runtime.model_file import ModelFile

MEBIBYTE = 1 << 20
PROCESS_BYTES = 200 * MEBIBYTE


def anonymous_bytes(pids: Iterable[int]) -> int:
    found = [
        re.search(r"^Pss_Anon: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE) for pid in pids
    ]
    return 1024 * sum(int(size[1]) for size in found if size)


def segment_bytes() -> int:
    """Memory taken by the segments of weights that this process has open."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "bloomery-weights" in os.readlink(f"/proc/self/fd/{number}"):
                total += os.fstat(int(number)).st_blocks * 512
    return total


def peak_of_load(path: Path, processes: int, **options: Any) -> tuple[int, int, int]:
    """(peak of anonymous bytes, peak of bytes in segments, both while a pool starts; bytes of the weights)."""
    program = build_program(ModelFile.open(path))
    me, done, peaks = os.getpid(), threading.Event(), [0, 0]
    before = anonymous_bytes([me])

    def watch() -> None:
        while not done.wait(0.02):
            pids = [me, *(child.pid for child in psutil.Process().children(recursive=True))]
            try:
                peaks[:] = max(peaks[0], anonymous_bytes(pids) - before), max(peaks[1], segment_bytes())
            except (OSError, psutil.Error):
                continue  # one of them has just ended

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        HostPool.start(str(path), program, context=64, slots=1, processes=processes, prompt_block=32, **options).close()
    finally:
        done.set()
        watcher.join()
    return peaks[0], peaks[1], sum(tensor.nbytes for tensor in copied_tensors(program))


def main() -> None:
    path, place = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "shared"
    anonymous, segments, weights = (nbytes / MEBIBYTE for nbytes in peak_of_load(path, 2, host_weights=place))
    print(f"{place}, 2 workers: weights {weights:.0f} MiB, segments {segments:.0f}, anonymous {anonymous:.0f}")


if __name__ == "__main__":
    main()
