"""Copies of weights in shared memory: one segment a NUMA node, huge pages where there are, seen as one range of bytes.

Owns the layout (`WeightLayout`: what lies where, which node's memory holds it) and the mapping (`HostWeights`). How the
bytes get there is `weight_loading`'s; what the rows mean, the kernels'.

The range holds the pages of the files in which the program's tensors lie, so that a page of it is a page of a file.
Each page belongs to the node whose ranks compute the rows in it: consecutive ranks share the rows of a matrix evenly
(`cpu_experts/kernels/work.py`), and ranks are spread over nodes. Every process maps the segments of all nodes into one
range, page for page, so that kernels need not know: a row at a border may be remote, never missing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from bloomery.runtime.control_groups import text_of
from bloomery.runtime.cpu_limits import affinity_mask
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.errors import PlanError
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Program, RoutedExperts
from bloomery.runtime.topology import Topology

HostWeightsPlace: TypeAlias = Literal["copy", "shared", "private", "mmap"]
"""Weights copied to shared memory, to memory of the workers that compute with them, or to whichever of these has huge
pages ("copy"); or in the page cache of the mapped file."""
PAGE: Final = 4096
HUGE_PAGE: Final = 2 << 20
LEAST_COPY: Final = 1 << 30
LEAST_LENDERS: Final = 4
"""Ranks from which on they lend each other their rows: with few, balance gains little, and taking the memory takes
longer."""
MOST_RUNS: Final = 16384
"""Mappings that a process spends on weights; the kernel allows 65530 altogether."""

_POPULATE_READ: Final = 22
POPULATE_WRITE: Final = 23
_MBIND: Final = 237  # x86-64
_PREFERRED: Final = 1
_MAP_FIXED: Final = 0x10
_NO_ACCESS: Final = 0
libc: Final = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.syscall.argtypes = [ctypes.c_long] + [ctypes.c_void_p] * 6


@dataclass(frozen=True)
class Extent:
    """Whole pages of a file, `nbytes` from `offset` on, at `place`; tensors end after `data` bytes of them."""

    path: Path
    offset: int
    place: int
    nbytes: int
    data: int


@dataclass(frozen=True)
class Run:
    """Consecutive pages of the range that lie in one node's segment, from byte `within` of it on."""

    place: int
    nbytes: int
    node: int
    within: int


class WeightLayout:
    """Where tensors lie. `nodes` is the NUMA node of each rank, in the order of ranks."""

    def __init__(self, tensors: Iterable[Tensor], nodes: Sequence[int]) -> None:
        self.extents: list[Extent] = []
        self.places: dict[str, int] = {}
        ordered = sorted(tensors, key=lambda tensor: (str(tensor.path), tensor.offset))
        for tensor in ordered:
            first = tensor.offset // PAGE * PAGE
            end = -(-(tensor.offset + tensor.nbytes) // PAGE) * PAGE
            data = tensor.offset + tensor.nbytes
            last = self.extents[-1] if self.extents else None
            if last and last.path == tensor.path and first <= last.offset + last.nbytes:
                reach = max(end, last.offset + last.nbytes) - last.offset
                self.extents[-1] = Extent(last.path, last.offset, last.place, reach, max(last.data, data - last.offset))
            else:
                place = last.place + last.nbytes if last else 0
                self.extents.append(Extent(tensor.path, first, place, end - first, data - first))
            extent = self.extents[-1]
            self.places[tensor.name] = extent.place + tensor.offset - extent.offset
        self.nbytes = self.extents[-1].place + self.extents[-1].nbytes if self.extents else 0
        self.runs = self._runs(ordered, nodes)
        self.segments: dict[int, int] = dict.fromkeys(sorted(set(nodes)), 0)
        for run in self.runs:
            self.segments[run.node] += run.nbytes

    def _runs(self, tensors: Sequence[Tensor], nodes: Sequence[int]) -> list[Run]:
        page, limit = PAGE, self.nbytes
        if len(set(nodes)) == 1:
            return [Run(0, limit, nodes[0], 0)] if limit else []
        while True:  # coarser pages where there are too many borders
            found = self._runs_of(tensors, nodes, page)
            if len(found) <= MOST_RUNS:
                return found
            page *= 2

    def _runs_of(self, tensors: Sequence[Tensor], nodes: Sequence[int], page: int) -> list[Run]:
        borders: list[tuple[int, int]] = [(0, nodes[0])]  # from this place on, this node
        ranks = len(nodes)
        for tensor in sorted(tensors, key=lambda tensor: self.places[tensor.name]):
            rows, matrices = (tensor.shape[1], (*tensor.shape, 1)[2]) if len(tensor.shape) > 1 else (1, 1)
            matrix = tensor.nbytes // matrices
            for number in range(matrices):
                at = self.places[tensor.name] + number * matrix
                for rank, node in enumerate(nodes):
                    share = rank * (rows // ranks) + min(rank, rows % ranks)
                    border = (at + share * (matrix // rows)) // page * page
                    if borders[-1][0] == border:
                        borders.pop()
                    if not borders or borders[-1][1] != node:
                        borders.append((border, node))
        runs, within = [], dict.fromkeys(nodes, 0)
        for (place, node), following in zip(borders, [*borders[1:], (self.nbytes, 0)]):
            nbytes = following[0] - place
            runs.append(Run(place, nbytes, node, within[node]))
            within[node] += nbytes
        return runs


class HostWeights:
    """The mapped range. Make one with `create` (coordinator) or `attach` (worker). Segments have no names in a folder:
    workers open the coordinator's descriptors through /proc, and what nobody has mapped any more is gone."""

    def __init__(
        self, layout: WeightLayout, descriptors: dict[int, int], writable: bool, hugetlb: bool = False
    ) -> None:
        """Maps the files of these descriptors (by node), which become this object's."""
        self.layout, self._descriptors, self.hugetlb = layout, descriptors, hugetlb
        self.huge = 0.0
        """The part that lay in huge pages after loading."""
        self._reserved = layout.nbytes + 2 * HUGE_PAGE
        self._start = 0
        try:
            self._start = reserve(self._reserved)
            self.address = -(-self._start // HUGE_PAGE) * HUGE_PAGE
            for run in layout.runs:
                self._map(run, writable)
        except OSError as error:
            self.close()
            raise _unshared(error) from error

    @classmethod
    def create(cls, layout: WeightLayout) -> HostWeights:
        """New, empty segments, of reserved huge pages if there are enough and one node. PlanError without memory."""
        pages = -(-layout.nbytes // HUGE_PAGE)
        hugetlb = len(layout.runs) == 1 and _reserved_huge_pages() >= pages
        if not hugetlb:
            check_room(layout.nbytes)
        descriptors: dict[int, int] = {}
        try:
            for node, nbytes in layout.segments.items():
                flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB if hugetlb else 0)
                descriptors[node] = os.memfd_create(f"bloomery-weights{node}", flags)
                os.ftruncate(descriptors[node], pages * HUGE_PAGE if hugetlb else nbytes)
        except OSError as error:
            for descriptor in descriptors.values():
                os.close(descriptor)
            raise _unshared(error) from error
        return cls(layout, descriptors, True, hugetlb)

    @classmethod
    def attach(cls, layout: WeightLayout, files: Sequence[str]) -> HostWeights:
        """What the coordinator has filled, with all its pages mapped; `files` are its `files`."""
        descriptors: dict[int, int] = {}
        try:
            for node, path in zip(layout.segments, files, strict=True):
                descriptors[node] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            for descriptor in descriptors.values():
                os.close(descriptor)
            raise _unshared(error) from error
        hugetlb = any(os.fstatvfs(descriptor).f_bsize == HUGE_PAGE for descriptor in descriptors.values())
        weights = cls(layout, descriptors, False, hugetlb)
        for run in layout.runs:
            weights.advise(run.place, run.nbytes, _POPULATE_READ)
        return weights

    @property
    def files(self) -> tuple[str, ...]:
        """Where other processes of this user find the segments, in the order of nodes."""
        return tuple(f"/proc/{os.getpid()}/fd/{self._descriptors[node]}" for node in self.layout.segments)

    def _map(self, run: Run, writable: bool) -> None:
        at, descriptor = self.address + run.place, self._descriptors[run.node]
        nbytes = -(-run.nbytes // HUGE_PAGE) * HUGE_PAGE if self.hugetlb else run.nbytes
        map_shared(at, nbytes, descriptor, run.within, writable)
        self.advise(run.place, run.nbytes, mmap.MADV_HUGEPAGE)
        if writable and len(self.layout.segments) > 1:  # no matter if it fails: then the first to touch decides
            mask = (ctypes.c_ulong * 16)()
            mask[run.node // 64] = 1 << run.node % 64
            libc.syscall(_MBIND, at, run.nbytes, _PREFERRED, ctypes.addressof(mask), 1024, 0)

    def advise(self, place: int, nbytes: int, advice: int) -> bool:
        """madvise of a part of the range; whether the kernel took it."""
        return bool(libc.madvise(self.address + place, nbytes, advice) == 0)

    def populate(self, place: int, nbytes: int) -> None:
        """Takes memory for a part of the range, within pages. PlanError if there is none."""
        if not self.advise(place, nbytes, POPULATE_WRITE) and ctypes.get_errno() not in (
            0,
            22,
        ):  # 22: before Linux 5.14
            raise PlanError(
                "memory ran out while weights were copied to it",
                "use --host-weights mmap, or free memory",
            )

    def memory(self, place: int, nbytes: int) -> memoryview:
        """Bytes of the range; they must not be used after `close`."""
        return memoryview((ctypes.c_ubyte * nbytes).from_address(self.address + place)).cast("B")

    def lock(self) -> str:
        """Keeps all pages in memory; why that is not possible, or ""."""
        reasons = (lock_memory(self.address + run.place, run.nbytes) for run in self.layout.runs)
        return next((reason for reason in reasons if reason), "")

    def address_of(self, tensor: str) -> int | None:
        """Of the tensor's first byte in this process; None for one that was not copied."""
        place = self.layout.places.get(tensor)
        return None if place is None else self.address + place

    def huge_share(self) -> float:
        """The part of the range that this process sees through huge pages, as /proc/self/smaps tells."""
        end = self.address + self._reserved
        return huge_bytes(self.address, end, "ShmemPmdMapped", "Shared_Hugetlb") / max(1, self.layout.nbytes)

    def facts(self) -> dict[str, Any]:
        """For status and logs: bytes in each node's segment, and the part seen through huge pages."""
        return {
            "place": "shared",
            "bytes": {str(node): nbytes for node, nbytes in self.layout.segments.items()},
            "huge": self.huge,
        }

    def close(self) -> None:
        """Unmaps and closes. The memory is free as soon as nobody has it mapped, however they end."""
        if self._start:
            libc.munmap(self._start, self._reserved)
            self._start = 0
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def reserve(nbytes: int) -> int:
    """Address of a range of this process's addresses in which nothing is mapped yet. OSError if there is no room."""
    found: int | None = libc.mmap(None, nbytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "no room for their addresses (ulimit -v)")
    return found


def map_shared(at: int, nbytes: int, descriptor: int, offset: int, writable: bool) -> None:
    """Maps a part of a file at an address of a range that was reserved. OSError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if libc.mmap(at, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset) != at:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _unshared(error: OSError) -> PlanError:
    return PlanError(f"weights cannot be shared between processes: {error}", "use --host-weights mmap")


def _reserved_huge_pages(root: Path = Path("/")) -> int:
    text = text_of(root / "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").strip()
    return int(text) if text.isdigit() else 0


def huge_pages_for(nbytes: int, root: Path = Path("/")) -> bool:
    """Whether shared memory of this size may come in huge pages: reserved ones, or transparent ones for who asks."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    own = re.search(r"\[(\w+)\]", text_of(folder / "hugepages-2048kB/shmem_enabled"))
    common = re.search(r"\[(\w+)\]", text_of(folder / "shmem_enabled"))
    chosen = common if own is None or own[1] == "inherit" else own
    transparent = chosen is not None and chosen[1] not in ("never", "deny")
    return transparent or _reserved_huge_pages(root) * HUGE_PAGE >= nbytes


def lends(program: Program, ranks: int) -> bool:
    """Whether ranks with rows of their own lend them to each other, for routed experts; BLOOMERY_LEND=0 and 1 say so
    whatever their number is."""
    routed, told = any(isinstance(op, RoutedExperts) for op in program.ops), os.environ.get("BLOOMERY_LEND", "")
    return routed and (told == "1" if told in ("0", "1") else ranks >= LEAST_LENDERS)


def private_pays(nbytes: int, root: Path = Path("/")) -> bool:
    """Whether huge pages are to be had for memory of single processes, and not for shared memory of this size."""
    return _private_huge(root) and not huge_pages_for(nbytes, root)


def _private_huge(root: Path) -> bool:
    chosen = re.search(r"\[(\w+)\]", text_of(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return chosen is not None and chosen[1] != "never"


def own_copy_pays(nbytes: int, processes: int, root: Path = Path("/"), mask: Iterable[int] | None = None) -> bool:
    """As `copy_pays` where the only copies are those of single processes."""
    return nbytes >= LEAST_COPY and (_private_huge(root) or _several_nodes(processes, root, mask))


def copy_pays(nbytes: int, processes: int, root: Path = Path("/"), mask: Iterable[int] | None = None) -> bool:
    """Whether a copy gives what mapped files do not: huge pages, or memory near each of several nodes. Files below
    LEAST_COPY are ready sooner than any copy is made. (docs/performance.md has what was measured.)"""
    if nbytes < LEAST_COPY:
        return False
    return private_pays(nbytes, root) or _several_nodes(processes, root, mask) or huge_pages_for(nbytes, root)


def _several_nodes(processes: int, root: Path, mask: Iterable[int] | None) -> bool:
    machine = Topology.read(root).within(affinity_mask() if mask is None else mask)
    return len({machine.node_of(cpu) for cpu in machine.pin_order()[:processes]}) > 1


def copied_tensors(program: Program) -> list[Tensor]:
    """What a copy holds of a program's weights: all but n-gram tables, which are larger than memory."""
    tables = {table.weight for table in engram_tables(program)}
    return [tensor for name, tensor in program.weights.items() if name not in tables]


def copied_bytes(program: Program) -> int:
    """Bytes of `copied_tensors`."""
    return sum(tensor.nbytes for tensor in copied_tensors(program))


def check_room(nbytes: int) -> None:
    """PlanError if there is no memory for a copy of so many bytes."""
    free = available_memory()
    if nbytes > free:
        raise PlanError(
            f"a copy of the weights takes {nbytes} bytes, and {free} bytes of memory are free",
            "use --host-weights mmap",
        )


def lock_mapped(tensors: Iterable[Tensor]) -> str:
    """Keeps tensors of the mapped file in memory; why that is not possible, or ""."""
    for tensor in tensors:
        if reason := lock_memory(tensor.data.ctypes.data, tensor.nbytes):
            return reason
    return ""


def lock_memory(address: int, nbytes: int) -> str:
    """Keeps the pages of these bytes in memory; why that is not possible, or ""."""
    first = address // PAGE * PAGE
    return os.strerror(ctypes.get_errno()) if libc.mlock(first, address + nbytes - first) else ""


def huge_bytes(begin: int, end: int, *kinds: str) -> int:
    """Bytes in huge pages of the mappings that reach into a range of this process's addresses; `kinds` are what
    /proc/self/smaps calls them."""
    huge, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(head[1], 16) < end and int(head[2], 16) > begin
        elif inside and line.partition(":")[0] in kinds:
            huge += int(line.split()[1]) * 1024
    return huge
