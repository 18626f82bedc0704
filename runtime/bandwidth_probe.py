"""How fast this machine's memory and disk can be read: the figures from which step times are predicted.

Owns what is measured and in which order: read bandwidth for growing numbers of pinned processes, then node by node,
the latency of a dependent load, and the disk. Does not know what the figures are used for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bloomery.runtime.cpu_limits import affinity_mask
from bloomery.runtime.disk_probe import DiskRate, Progress, disk_read_rate, made_file
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.probe_process import START_SECONDS, Reader
from bloomery.runtime.topology import Topology, default_processes

READ_SECONDS: Final = 0.25
REPEATS: Final = 3  # the best counts: whatever else the machine does only takes away
HEAD_START: Final = 0.02  # between telling the readers and their common start
WINDOW_SECONDS: Final = 0.01  # short, so that among other programs some windows are undisturbed
WINDOW_HEAD_START: Final = 0.005
WINDOWS: Final = 16
UNDISTURBED: Final = 0.97  # share of their CPUs that readers then had
LEAST_BUFFER: Final = 64 << 20
CACHE_MULTIPLE: Final = 4  # a buffer is at least this many times the last-level cache
FAR_MULTIPLE: Final = 16  # and if that is no more than FAR_BYTES this many: of 4 times, Zen 5 reads 8 % from the cache
FAR_BYTES: Final = 1 << 30
MEMORY_SHARE: Final = 0.25  # of what is available, for all buffers together
ALL_COUNTS: Final = 16  # up to here every number of processes is measured


@dataclass(frozen=True)
class ReadRate:
    """What `processes` readers, one on each of `cpus`, read together in bytes a second.

    `cpu_share` is the part of the time that they had their CPUs: below 1 others ran there and the figure is too low."""

    processes: int
    cpus: tuple[int, ...]
    bytes_per_second: float
    cpu_share: float


@dataclass(frozen=True)
class NodeRate:
    """A NUMA node read by all its cores at once, and the latency that one of them sees."""

    node: int
    processes: int
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class BandwidthReport:
    """All buffers lie in the memory of the node of the process that reads them.

    `beyond_cache` is false where memory was too scarce for buffers of twice the last-level cache: figures of few
    processes may then be the cache's."""

    reads: tuple[ReadRate, ...]
    nodes: tuple[NodeRate, ...]
    disk: DiskRate | None
    buffer_bytes: int
    cache_bytes: int
    seconds: float

    @property
    def beyond_cache(self) -> bool:
        return self.buffer_bytes >= 2 * self.cache_bytes

    @property
    def least_cpu_share(self) -> float:
        return min(rate.cpu_share for rate in self.reads)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        disk = self.disk and {**asdict(self.disk), "bytes_per_second": self.disk.bytes_per_second}
        return {**asdict(self), "disk": disk, "beyond_cache": self.beyond_cache}


def probe_bandwidth(
    *,
    processes: int = 0,
    disk: bool = True,
    disk_file: Path | None = None,
    folder: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> BandwidthReport:
    """Measures up to `processes` readers (0: one for each core that this process may use).

    The disk is read through `disk_file`, or through a file made for it in `folder` (default: the current one).
    """
    begin = time.monotonic()
    if disk_file is not None and not disk_file.is_file():
        raise BloomeryError(f"{disk_file}: is not a file", "name a file for the disk's rate, or leave the option out")
    folder = folder or Path.cwd()
    if disk and disk_file is None and not os.access(folder, os.W_OK):
        message = f"{folder}: no file can be made here to measure the disk with"
        raise BloomeryError(message, "name an existing one with --disk-file, or leave the disk out with --no-disk")
    topology = Topology.read().within(affinity_mask())
    count = min(processes or default_processes(), len(topology.cores))
    cpus = topology.pin_order()[:count]
    cache = max(domain.nbytes for domain in topology.l3_domains)
    nbytes = buffer_bytes(cache, count, available_memory())
    with ExitStack() as stack:
        readers = _started([stack.enter_context(Reader(cpu, nbytes)) for cpu in cpus], progress)
        reads = _read_rates(readers, progress)
        nodes = _node_rates(readers, topology, progress)
    rate = None
    if disk:
        with ExitStack() as stack:
            path = disk_file or stack.enter_context(made_file(folder, progress))
            rate = disk_read_rate(path, progress)
    return BandwidthReport(reads, nodes, rate, nbytes, cache, time.monotonic() - begin)


class ReadCeiling:
    """Readers that stay, so that the read bandwidth can be measured again and again between other measurements."""

    def __init__(self, processes: int, progress: Progress = lambda stage, done, total: None) -> None:
        topology = Topology.read().within(affinity_mask())
        self.cpus = tuple(topology.pin_order()[:processes])
        nbytes = buffer_bytes(max(domain.nbytes for domain in topology.l3_domains), len(self.cpus), available_memory())
        self._stack = ExitStack()
        try:
            self._readers = [self._stack.enter_context(Reader(cpu, nbytes)) for cpu in self.cpus]
            _started(self._readers, progress)
        except BaseException:
            self._stack.close()
            raise

    def measure(self, windows: int = WINDOWS) -> ReadRate:
        """One measurement: the median of those of many short windows in which the readers had their CPUs, or, where
        there was none, the window with the greatest share of them. The readers sleep before and afterwards."""
        found = [_once(self._readers, WINDOW_SECONDS, WINDOW_HEAD_START) for _ in range(windows)]
        undisturbed = sorted(window for window in found if window[1] >= UNDISTURBED)
        rate = undisturbed[len(undisturbed) // 2] if undisturbed else max(found, key=lambda window: window[1])
        return ReadRate(len(self.cpus), self.cpus, *rate)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def buffer_bytes(cache: int, readers: int, available: int) -> int:
    """Bytes of one reader's buffer: well beyond its cache, unless all of them would take too much memory."""
    wanted = max(LEAST_BUFFER, CACHE_MULTIPLE * cache, min(FAR_MULTIPLE * cache, FAR_BYTES))
    allowed = int(available * MEMORY_SHARE) // readers
    if allowed < 1 << 20:
        raise BloomeryError(
            f"{available >> 20} MiB of memory are available, too little for the buffers of {readers} probe processes",
            "close other programs or probe with fewer processes (--processes)",
        )
    return min(wanted, allowed) >> 20 << 20


def process_counts(most: int) -> list[int]:
    """The numbers of processes to measure: all of them up to 16, then 24, 32, 48, 64, ... and the most."""
    counts = list(range(1, min(most, ALL_COUNTS) + 1))
    step = ALL_COUNTS
    while step < most:
        counts += [count for count in (step * 3 // 2, step * 2) if count < most]
        step *= 2
    return counts if counts[-1] == most else [*counts, most]


def _started(readers: list[Reader], progress: Progress) -> list[Reader]:
    deadline = time.monotonic() + START_SECONDS
    for index, reader in enumerate(readers):
        reader.answer(max(1.0, deadline - time.monotonic()))
        progress("starting probe processes", index + 1, len(readers))
    return readers


def _read_rates(readers: Sequence[Reader], progress: Progress) -> tuple[ReadRate, ...]:
    rates: list[ReadRate] = []
    counts = process_counts(len(readers))
    for done, count in enumerate(counts):
        chosen = readers[:count]
        rates.append(ReadRate(count, tuple(reader.cpu for reader in chosen), *_together(chosen)))
        progress("reading memory", done + 1, len(counts))
    return tuple(rates)


def _node_rates(readers: Sequence[Reader], topology: Topology, progress: Progress) -> tuple[NodeRate, ...]:
    by_node: dict[int, list[Reader]] = {}
    for reader in readers:
        by_node.setdefault(topology.node_of(reader.cpu), []).append(reader)
    rates: list[NodeRate] = []
    for node, members in sorted(by_node.items()):
        speed, _ = _together(members)
        members[0].ask(("latency",))
        rates.append(NodeRate(node, len(members), speed, float(members[0].answer(START_SECONDS))))
        progress("reading node by node", len(rates), len(by_node))
    return tuple(rates)


def _together(readers: Sequence[Reader]) -> tuple[float, float]:
    """Bytes a second of all these readers at once and their share of their CPUs; the best of a few times."""
    return max(_once(readers, READ_SECONDS, HEAD_START) for _ in range(REPEATS))


def _once(readers: Sequence[Reader], seconds: float, head_start: float) -> tuple[float, float]:
    """They start at the same instant, `head_start` seconds from now."""
    begin = time.monotonic() + head_start
    for reader in readers:
        reader.ask(("read", begin, seconds))
    answers = [reader.answer(START_SECONDS) for reader in readers]
    speed = sum(nbytes / elapsed for nbytes, elapsed, _ in answers)
    share = sum(cpu for _, _, cpu in answers) / sum(elapsed for _, elapsed, _ in answers)
    return speed, min(1.0, share)
