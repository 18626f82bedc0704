"""Topology of recorded machines and of this one, affinity masks, cgroup quotas, and the order of pinning."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import psutil
import pytest

from bloomery.runtime.cpu_limits import affinity_mask, cpu_quota, session_groups
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.topology import CacheDomain, Gpu, Topology, default_processes, parse_cpu_list, parse_cpu_mask

DATA = Path(__file__).with_name("data") / "topology"


def recorded(name: str, folder: Path) -> Path:
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        # the first releases of Python 3.11 know no filters
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_both_forms_of_cpu_sets() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11) and parse_cpu_list("") == ()
    assert parse_cpu_mask("00000001,0000ffff") == (*range(16), 32)
    assert parse_cpu_mask("0x00fff000") == tuple(range(12, 24)) and parse_cpu_mask("") == ()


def test_offline_cpus_are_left_out_and_siblings_grouped(tmp_path: Path) -> None:
    topology = Topology.read(recorded("16em64t-4s2c2t-offlines", tmp_path))
    assert topology.offline == (2, 5, 13, 14) and topology.packages == (0, 1, 2, 3)
    assert [core.cpus for core in topology.cores] == [(0, 8), (1, 9), (3, 11), (4, 12), (6,), (7, 15), (10,)]
    assert [core.package for core in topology.cores] == [0, 1, 3, 0, 2, 3, 2]
    assert {domain.cpus for domain in topology.l3_domains} == {(0, 4, 8, 12), (1, 9), (3, 7, 11, 15), (6, 10)}
    assert all(domain.nbytes == 4 << 20 and domain.level == 3 for domain in topology.l3_domains)
    assert topology.pin_order()[:4] == (0, 1, 3, 6), "the first four processes are not on four caches"
    assert sorted(topology.pin_order()) == [0, 1, 3, 4, 6, 7, 10]


def test_nodes_with_gaps_in_their_numbers(tmp_path: Path) -> None:
    root = recorded("48amd64-4d2n6c-sparse", tmp_path)
    topology = Topology.read(root)
    assert [node.number for node in topology.nodes] == [0, 1, 2, 33, 34, 45, 72, 73]
    assert [len(node.cpus) for node in topology.nodes] == [6] * 8 and len(topology.cores) == 48
    assert topology.nodes[3].memory == 16777216 * 1024 and topology.node_of(18) == 33
    order = topology.pin_order()
    for first in range(0, 48, 8):
        assert {topology.node_of(cpu) for cpu in order[first : first + 8]} == {0, 1, 2, 33, 34, 45, 72, 73}
    assert default_processes(root, range(0, 48, 6)) == 8


def test_the_first_node_and_cpu_may_be_offline(tmp_path: Path) -> None:
    topology = Topology.read(recorded("offline-cpu0-node0", tmp_path))
    assert topology.online == tuple(range(4, 21)) and topology.offline == (0, 1, 2, 3, 21, 22, 23)
    assert len(topology.cores) == 17 and topology.packages == (0, 1)
    assert [(node.number, node.cpus) for node in topology.nodes] == [(1, tuple(range(5, 21, 2)))]
    assert [domain.cpus for domain in topology.l3_domains] == [tuple(range(4, 21, 2)), tuple(range(5, 21, 2))]
    assert {core.node for core in topology.cores} == {1}


def test_memory_only_nodes_and_four_threads_a_core(tmp_path: Path) -> None:
    topology = Topology.read(recorded("nvidiagpunumanodes", tmp_path))
    assert topology.packages == (0, 8) and [core.cpus[0] for core in topology.cores] == [0, 4, 8, 12, 88, 92, 96, 100]
    assert all(len(core.cpus) == 4 for core in topology.cores)
    assert [node.number for node in topology.nodes if not node.cpus] == [250, 251, 252, 253, 254, 255]
    assert topology.pin_order() == (0, 88, 8, 96, 4, 92, 12, 100)


def test_slow_cores_are_told_apart_and_pinned_last(tmp_path: Path) -> None:
    topology = Topology.read(recorded("fakeheterocpunuma", tmp_path))
    kinds = {core.cpus[0]: core.kind for core in topology.cores}
    assert kinds == {cpu: "efficiency" if cpu < 12 else "performance" for cpu in range(0, 24, 2)}
    assert set(topology.pin_order()[:6]) == set(range(12, 24, 2))


def test_x86_hybrid_machine_is_read_from_its_monitoring_units(tmp_path: Path) -> None:
    """The files that a desktop with two SMT performance cores and four efficiency cores has; names from the kernel's
    documentation of hybrid perf, since no recorded machine has them."""
    files = {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"}
    files["sys/devices/system/cpu/online"] = "0-7"
    for cpu in range(8):
        siblings = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if cpu < 4 else str(cpu)
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings
    topology = Topology.read(put(tmp_path, files))
    assert [(core.cpus, core.kind) for core in topology.cores] == [
        ((0, 1), "performance"),
        ((2, 3), "performance"),
        *(((cpu,), "efficiency") for cpu in range(4, 8)),
    ]
    assert topology.pin_order() == (0, 2, 4, 5, 6, 7)


def test_machine_of_which_sysfs_tells_almost_nothing(tmp_path: Path) -> None:
    topology = Topology.read(recorded("2ps3-2t", tmp_path))
    assert [core.cpus for core in topology.cores] == [(0, 1)] and topology.packages == (0,)
    assert [(node.number, node.cpus) for node in topology.nodes] == [(0, (0, 1))]
    assert topology.l3_domains == (CacheDomain((0, 1), 0, 0),)
    empty = Topology.read(tmp_path / "nothing")
    assert [core.cpus for core in empty.cores] == [(0,)] and default_processes(tmp_path / "nothing", {0}) == 1


def test_interleaved_cpu_numbers(tmp_path: Path) -> None:
    topology = Topology.read(recorded("40intel64-2g2n4c+pci", tmp_path))
    assert topology.nodes[1].cpus == tuple(range(1, 40, 4)) and topology.pin_order()[:5] == (0, 1, 2, 3, 4)
    assert [core.package for core in topology.cores[:4]] == [0, 1, 2, 3] and topology.gpus == ()


def test_gpus_without_affinity_count_as_node_0(tmp_path: Path) -> None:
    root = recorded("40intel64-2g2n4c+pci", tmp_path)
    for address, vendor, kind, node in (
        ("0000:01:00.0", "0x10de", "0x030200", "-1"),
        ("0000:41:00.0", "0x10de", "0x030000", "2"),
        ("0000:42:00.0", "0x10de", "0x040300", "2"),  # its sound function
        ("0000:43:00.0", "0x10de", "0x030200", "9"),  # a node that is not online
    ):
        put(root / "sys/bus/pci/devices" / address, {"vendor": vendor, "class": kind, "numa_node": node})
    assert Topology.read(root).gpus == (Gpu("0000:01:00.0", 0), Gpu("0000:41:00.0", 2), Gpu("0000:43:00.0", 0))


def test_session_groups(tmp_path: Path) -> None:
    setting = tmp_path / "sched_autogroup_enabled"
    assert not session_groups(setting)  # a kernel without them
    for text, there in (("0\n", False), ("1\n", True)):
        setting.write_text(text)
        assert session_groups(setting) == there


def test_affinity_mask_limits_cores_and_siblings(tmp_path: Path) -> None:
    root = recorded("nvidiagpunumanodes", tmp_path)
    part = Topology.read(root).within({2, 3, 89, 100})
    assert [core.cpus for core in part.cores] == [(2, 3), (89,), (100,)] and part.pin_order() == (2, 89, 100)
    assert default_processes(root, {2, 3, 89, 100}) == 3 and default_processes(root, range(104)) == 8


V2_MOUNT = "30 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "31 24 0:28 {0} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "quota", "processes"),
    [
        ({}, None, 8),
        ({"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2_MOUNT}, None, 8),
        ({"sys/fs/cgroup/a/b/cpu.max": "250000 100000", "sys/fs/cgroup/a/cpu.max": "max 100000"}, 2.5, 2),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5, 1),
        ({"sys/fs/cgroup/a/b/cpu.max": "900000 100000", "sys/fs/cgroup/a/cpu.max": "1600000 100000"}, 9.0, 8),
    ],
)
def test_quota_of_cgroup_version_2(tmp_path: Path, files: dict[str, str], quota: float | None, processes: int) -> None:
    root = recorded("nvidiagpunumanodes", tmp_path)
    put(root, {"proc/self/cgroup": "0::/a/b", "proc/self/mountinfo": V2_MOUNT, **files})
    assert cpu_quota(root) == quota and default_processes(root, range(104)) == processes


@pytest.mark.parametrize(
    ("group", "mounted", "folder", "quota"),
    [
        ("/job/7", "/", "job/7", "300000"),
        ("/job/7", "/", "job", "300000"),
        ("/docker/c0ffee", "/docker/c0ffee", "", "300000"),  # a container sees its own group as the root of the mount
        ("/job/7", "/other", "", "300000"),
        ("/job/7", "/", "job/7", "-1"),
    ],
)
def test_quota_of_cgroup_version_1(tmp_path: Path, group: str, mounted: str, folder: str, quota: str) -> None:
    where = f"sys/fs/cgroup/cpu,cpuacct/{folder}".rstrip("/")
    cgroup = f"4:memory:/elsewhere\n3:cpu,cpuacct:{group}\n0::/"
    files = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": V1_MOUNT.format(mounted)}
    root = put(tmp_path, files | {f"{where}/cpu.cfs_quota_us": quota, f"{where}/cpu.cfs_period_us": "100000"})
    assert cpu_quota(root) == (None if quota == "-1" else 3.0)


def test_this_machine_agrees_with_psutil() -> None:
    topology = Topology.read()
    assert set(affinity_mask()) == set(os.sched_getaffinity(0)) <= set(topology.online)
    assert len(topology.cores) == (psutil.cpu_count(logical=False) or len(topology.cores))
    assert len(topology.online) == psutil.cpu_count()
    assert 1 <= default_processes() <= len(affinity_mask())
    assert json.loads(json.dumps(topology.as_dict()))["cores"][0]["cpus"] == list(topology.cores[0].cpus)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000 << 20),
        ({"sys/fs/cgroup/job/memory.max": "max", "sys/fs/cgroup/job/memory.current": "77"}, 1000 << 20),
        ({"sys/fs/cgroup/job/memory.max": str(900 << 20), "sys/fs/cgroup/job/memory.current": str(1 << 20)}, 899 << 20),
        ({"sys/fs/cgroup/job/memory.max": "5", "sys/fs/cgroup/job/memory.current": "77"}, 0),
        ({"cg/mem/job/memory.limit_in_bytes": str(2**63 - 4096), "cg/mem/job/memory.usage_in_bytes": "7"}, 1000 << 20),
        ({"cg/mem/job/memory.limit_in_bytes": "4000", "cg/mem/job/memory.usage_in_bytes": "1000"}, 3000),
        (
            {
                "cg/mem/job/memory.limit_in_bytes": "4000",
                "cg/mem/job/memory.usage_in_bytes": "4000",
                "cg/mem/job/memory.stat": "inactive_file 11\ntotal_cache 3000\ntotal_inactive_file 2500",
            },
            2500,
        ),
    ],
)
def test_memory_that_control_groups_leave(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    mounts = f"{V2_MOUNT}\n32 24 0:29 / /cg/mem rw shared:9 - cgroup cgroup rw,memory"
    base = {"proc/meminfo": "MemTotal: 4096000 kB\nMemAvailable:    1024000 kB"}
    base |= {"proc/self/cgroup": "7:memory:/job\n0::/job", "proc/self/mountinfo": mounts}
    assert available_memory(put(tmp_path, base | files)) == expected
