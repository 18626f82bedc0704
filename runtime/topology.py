"""The machine as sysfs describes it: packages, NUMA nodes, last-level cache domains, cores, siblings, core kinds, GPUs.

Owns the reading of /sys (below an injectable root, so that recorded machines can be read) and the order in which
processes are pinned. Does not start or pin anything, and does not know what the processes do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias

from bloomery.runtime.control_groups import text_of
from bloomery.runtime.cpu_limits import affinity_mask, cpu_quota

CoreKind: TypeAlias = Literal["", "performance", "efficiency"]
"""Empty on machines whose cores are all of one kind."""

_CPU, _NODE = Path("sys/devices/system/cpu"), Path("sys/devices/system/node")
_EFFICIENCY_UNITS = ("cpu_atom", "cpu_lowpower")  # names of the performance-monitoring units of x86 hybrid machines
_SAME_KIND = 0.9  # capacities within 10 % of the greatest are the same kind: favoured cores only clock a little higher
_NVIDIA, _DISPLAY_CLASSES = "0x10de", ("0x0300", "0x0302")


@dataclass(frozen=True)
class Core:
    """A physical core: its online logical CPUs (more than one: SMT siblings) and where it sits.

    `l3` is an index into `Topology.l3_domains`."""

    cpus: tuple[int, ...]
    package: int
    node: int
    l3: int
    kind: CoreKind


@dataclass(frozen=True)
class CacheDomain:
    """Logical CPUs that share a last-level cache (level 3 where there is one); nbytes 0: sysfs does not tell."""

    cpus: tuple[int, ...]
    level: int
    nbytes: int


@dataclass(frozen=True)
class NumaNode:
    """A memory node; `cpus` is empty for memory-only nodes, `memory` is in bytes."""

    number: int
    cpus: tuple[int, ...]
    memory: int


@dataclass(frozen=True)
class Gpu:
    """A display-class PCI device of NVIDIA and the node it hangs on (sysfs's -1, no affinity, counts as node 0)."""

    address: str
    node: int


@dataclass(frozen=True)
class Topology:
    """What is online. Cores are ordered by their first logical CPU."""

    cores: tuple[Core, ...]
    nodes: tuple[NumaNode, ...]
    l3_domains: tuple[CacheDomain, ...]
    offline: tuple[int, ...]
    gpus: tuple[Gpu, ...]

    @classmethod
    def read(cls, root: Path = Path("/")) -> Topology:
        """The machine whose /sys lies below `root`. What sysfs does not tell is assumed to be uniform."""
        online, offline = _logical_cpus(root)
        nodes = _nodes(root, online)
        node_of = {cpu: node.number for node in reversed(nodes) for cpu in node.cpus}
        domains = _cache_domains(root, online, node_of)
        l3_of = {cpu: index for index, domain in enumerate(domains) for cpu in domain.cpus}
        kinds = _core_kinds(root, online)
        cores = tuple(
            Core(
                siblings,
                _package(root, siblings[0]),
                node_of.get(siblings[0], nodes[0].number),
                l3_of[siblings[0]],
                kinds.get(siblings[0], ""),
            )
            for siblings in _cores(root, online)
        )
        return cls(cores, nodes, domains, offline, _gpus(root, nodes))

    @property
    def online(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def packages(self) -> tuple[int, ...]:
        return tuple(sorted({core.package for core in self.cores}))

    def within(self, mask: Iterable[int]) -> Topology:
        """The part that a process of this affinity mask can run on: cores and CPUs outside are left out."""
        allowed = frozenset(mask)
        cores = tuple(
            Core(cpus, core.package, core.node, core.l3, core.kind)
            for core in self.cores
            if (cpus := tuple(cpu for cpu in core.cpus if cpu in allowed))
        )
        return Topology(cores, self.nodes, self.l3_domains, self.offline, self.gpus)

    def pin_order(self) -> tuple[int, ...]:
        """One logical CPU of each core, in the order in which processes are pinned.

        Any first n of them are spread over the NUMA nodes and within a node over its cache domains, so that few
        processes already reach all memory channels and caches; efficiency cores come last.
        """
        order: list[int] = []
        for kind in ("performance", "", "efficiency"):
            by_node: dict[int, dict[int, list[int]]] = {}
            for core in self.cores:
                if core.kind == kind:
                    by_node.setdefault(core.node, {}).setdefault(core.l3, []).append(core.cpus[0])
            order += _interleaved([_interleaved(list(domains.values())) for domains in by_node.values()])
        return tuple(order)

    def node_of(self, cpu: int) -> int:
        """The NUMA node of a logical CPU; KeyError for one that is not online."""
        for core in self.cores:
            if cpu in core.cpus:
                return core.node
        raise KeyError(cpu)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"packages": list(self.packages), **asdict(self)}


def default_processes(root: Path = Path("/"), mask: Iterable[int] | None = None) -> int:
    """One process for each physical core of the affinity mask (default: this process's), cut to the cgroup quota.

    A quota is rounded down: a process that is throttled in the middle of a step makes all the others wait.
    """
    cores = len(Topology.read(root).within(affinity_mask() if mask is None else mask).cores)
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """CPUs of sysfs's list form, such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def parse_cpu_mask(text: str) -> tuple[int, ...]:
    """CPUs of sysfs's mask form, such as "00000000,0000ffff" or "0x00fff000"."""
    bits = int(text.strip().removeprefix("0x").replace(",", "").replace("0x", "") or "0", 16)
    return tuple(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)


def _interleaved(queues: Sequence[Sequence[int]]) -> list[int]:
    return [cpu for turn in zip_longest(*queues) for cpu in turn if cpu is not None]


def _number(path: Path, default: int) -> int:
    text = text_of(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else default


def _cpus(folder: Path, list_name: str, mask_name: str) -> tuple[int, ...]:
    """A set of CPUs, of which older kernels only have the mask."""
    if text := text_of(folder / list_name):
        return parse_cpu_list(text)
    return parse_cpu_mask(text_of(folder / mask_name))


def _numbered(folder: Path, prefix: str) -> list[int]:
    names = (re.fullmatch(rf"{prefix}(\d+)", path.name) for path in folder.glob(f"{prefix}*"))
    return sorted(int(match[1]) for match in names if match)


def _logical_cpus(root: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Online and offline CPUs. Kernels without the `online` list have a file for each CPU that can be switched off."""
    present = _numbered(root / _CPU, "cpu") or [0]
    online = parse_cpu_list(text_of(root / _CPU / "online"))
    if not online:
        online = tuple(cpu for cpu in present if _number(root / _CPU / f"cpu{cpu}/online", 1))
    return online, tuple(cpu for cpu in present if cpu not in online)


def _cores(root: Path, online: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Groups of SMT siblings; a CPU of which sysfs tells nothing is a core of its own."""
    seen: set[int] = set()
    for cpu in online:
        if cpu not in seen:
            siblings = _cpus(root / _CPU / f"cpu{cpu}/topology", "thread_siblings_list", "thread_siblings")
            group = tuple(sorted({cpu, *siblings}.intersection(online) - seen))
            seen.update(group)
            yield group


def _package(root: Path, cpu: int) -> int:
    """The package of a CPU; machines that do not tell (-1) have one, numbered 0."""
    return max(0, _number(root / _CPU / f"cpu{cpu}/topology/physical_package_id", 0))


def _nodes(root: Path, online: Sequence[int]) -> tuple[NumaNode, ...]:
    """All NUMA nodes by number; each CPU in one of them only. A machine without nodes has one, with all CPUs."""
    nodes: list[NumaNode] = []
    free = set(online)
    for number in _numbered(root / _NODE, "node"):
        folder = root / _NODE / f"node{number}"
        cpus = tuple(cpu for cpu in _cpus(folder, "cpulist", "cpumap") if cpu in free)
        free.difference_update(cpus)
        total = re.search(r"MemTotal:\s*(\d+) kB", text_of(folder / "meminfo"))
        nodes.append(NumaNode(number, cpus, int(total[1]) * 1024 if total else 0))
    if not nodes:
        total = re.search(r"MemTotal:\s*(\d+) kB", text_of(root / "proc/meminfo"))
        return (NumaNode(0, tuple(online), int(total[1]) * 1024 if total else 0),)
    return tuple(nodes)


def _cache_domains(root: Path, online: Sequence[int], node_of: dict[int, int]) -> tuple[CacheDomain, ...]:
    """Groups of CPUs that share their greatest cache of level 3 or more; without such a cache, those of a node."""
    domains: list[CacheDomain] = []
    seen: set[int] = set()
    for cpu in online:
        if cpu in seen:
            continue
        level, folder = max(
            ((_number(index / "level", 0), index) for index in (root / _CPU / f"cpu{cpu}/cache").glob("index[0-9]*")),
            default=(0, root),
        )
        if level >= 3:
            sharing = _cpus(folder, "shared_cpu_list", "shared_cpu_map")
            size = _cache_bytes(text_of(folder / "size"))
        else:
            sharing, level, size = tuple(other for other in online if node_of.get(other) == node_of.get(cpu)), 0, 0
        group = tuple(sorted({cpu, *sharing}.intersection(online) - seen))
        seen.update(group)
        domains.append(CacheDomain(group, level, size))
    return tuple(domains)


def _cache_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else 0


def _core_kinds(root: Path, online: Sequence[int]) -> dict[int, CoreKind]:
    """Kinds of hybrid machines: from the monitoring units (x86), else from the capacities (ARM); empty if uniform."""
    slow = {cpu for unit in _EFFICIENCY_UNITS for cpu in parse_cpu_list(text_of(root / "sys/devices" / unit / "cpus"))}
    if not slow:
        capacities = {cpu: _number(root / _CPU / f"cpu{cpu}/cpu_capacity", 0) for cpu in online}
        slow = {cpu for cpu, capacity in capacities.items() if capacity < _SAME_KIND * max(capacities.values())}
    slow.intersection_update(online)
    if not slow or len(slow) == len(online):
        return {}
    return {cpu: "efficiency" if cpu in slow else "performance" for cpu in online}


def _gpus(root: Path, nodes: Sequence[NumaNode]) -> tuple[Gpu, ...]:
    found = []
    numbers = {node.number for node in nodes}
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if text_of(device / "vendor") == _NVIDIA and text_of(device / "class")[:6] in _DISPLAY_CLASSES:
            node = max(0, _number(device / "numa_node", -1))
            found.append(Gpu(device.name, node if node in numbers else nodes[0].number))
    return tuple(found)
