"""Weights copied to shared memory: the same bits as mapped ones, on any topology, and nothing left however it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load_peak import PROCESS_BYTES, peak_of_load
from memory_use import resident_bytes
from oracle_data import quantised_file, trained_file
from pool_kit import left_behind, worker_children
from test_pool_models import evaluate, vocabulary_of

from bloomery.runtime import host_weights, weight_loading
from bloomery.runtime.architectures import build_program
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.errors import ModelFileError, PlanError
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.host_weights import PAGE, HostWeights, WeightLayout, copied_tensors, copy_pays
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.placement import MemoryRoom, make_plan
from bloomery.runtime.program import Program
from bloomery.runtime.topology import CacheDomain, Core, NumaNode, Topology

NAME = "qwen3moe-Q4_K_M"


def two_nodes() -> Topology:
    """Four cores on two nodes."""
    cores = tuple(Core((cpu,), cpu // 2, cpu // 2, cpu // 2, "") for cpu in range(4))
    nodes = (NumaNode(0, (0, 1), 1 << 34), NumaNode(1, (2, 3), 1 << 34))
    return Topology(cores, nodes, tuple(CacheDomain(node.cpus, 3, 1 << 25) for node in nodes), (), ())


def program_of(path: Path) -> Program:
    return build_program(ModelFile.open(path))


def start(path: Path, processes: int, **options: Any) -> HostPool:
    return HostPool.start(
        str(path), program_of(path), context=64, slots=2, processes=processes, prompt_block=32, **options
    )


def segments() -> list[str]:
    """Segments that this process still has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if "bloomery-weights" in name]


@contextlib.contextmanager
def loaded(program: Program, nodes: list[int]) -> Iterator[HostWeights]:
    weights = HostWeights.create(WeightLayout(copied_tensors(program), nodes))
    try:
        weight_loading.fill_weights(weights, lambda *facts: None)
        yield weights
    finally:
        weights.close()


def test_every_page_has_one_owner_and_rows_lie_with_their_ranks() -> None:
    program = program_of(quantised_file(NAME))
    tensors = copied_tensors(program)
    layout = WeightLayout(tensors, [0, 1, 0, 1])
    assert [run.place for run in layout.runs] == [0, *np.cumsum([run.nbytes for run in layout.runs])[:-1]]
    assert sum(layout.segments.values()) == layout.nbytes
    assert layout.nbytes <= sum(tensor.nbytes for tensor in tensors) * 1.05 + 2 * PAGE
    for node in (0, 1):
        mine = [run for run in layout.runs if run.node == node]
        assert [run.within for run in mine] == [0, *np.cumsum([run.nbytes for run in mine])[:-1]]
    owners = np.concatenate([np.full(run.nbytes // PAGE, run.node) for run in layout.runs])
    tensor = max(tensors, key=lambda tensor: tensor.nbytes)
    rows, matrices = tensor.shape[1], (*tensor.shape, 1)[2]
    row = tensor.nbytes // (rows * matrices)
    right = total = 0
    for matrix in range(matrices):
        for rank in range(4):
            first = layout.places[tensor.name] + (matrix * rows + rank * rows // 4) * row
            pages = owners[first // PAGE : (first + rows // 4 * row) // PAGE]
            right, total = right + int((pages == rank % 2).sum()), total + len(pages)
    assert right >= 0.9 * total - matrices * 4
    assert len(WeightLayout(tensors, [0, 0]).runs) == 1


def test_too_many_borders_make_coarser_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = copied_tensors(program_of(quantised_file(NAME)))
    fine = WeightLayout(tensors, [0, 1])
    monkeypatch.setattr(host_weights, "MOST_RUNS", len(fine.runs) // 3)
    coarse = WeightLayout(tensors, [0, 1])
    assert len(coarse.runs) <= len(fine.runs) // 3 and coarse.nbytes == fine.nbytes


def test_copies_give_the_bits_of_mapped_weights_and_leave_nothing() -> None:
    path = quantised_file(NAME)
    tokens = np.random.default_rng(95).integers(0, vocabulary_of(path), 40).astype(np.int32)
    with_mmap = start(path, 1)
    try:
        base = evaluate(with_mmap, tokens, 0, 0, 32)
        assert segments() == []
    finally:
        with_mmap.close()
    seen: list[tuple[str, int, int]] = []
    for processes, topology in ((2, None), (3, two_nodes())):
        seen.clear()
        options: dict[str, Any] = {"progress": lambda *facts: seen.append(facts), "mlock": True, "topology": topology}
        pool = start(path, processes, host_weights="shared", **options)
        try:
            assert len(segments()) == (2 if topology else 1)
            np.testing.assert_array_equal(evaluate(pool, tokens, 1, 0, [5, 1, 30]), base)
            done = [facts[1:] for facts in seen if facts[0] == "weights"]
            assert done[-1][0] == done[-1][1] == sum(pool.statistics()["weights"]["bytes"].values())
        finally:
            pool.close()
        assert not left_behind() and not worker_children()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - (1 << 20))


def full(self: HostWeights, place: int, nbytes: int) -> None:
    if place > 1 << 20:
        raise PlanError("memory ran out", "")


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [(cut, ModelFileError, "has become shorter"), (None, PlanError, "ran out")],
)
def test_failures_in_the_middle_are_clear_and_leave_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Path], None] | None,
    error: type[Exception],
    words: str,
    direct: bool,
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(quantised_file(NAME).read_bytes())
    program = program_of(path)
    monkeypatch.setattr(weight_loading, "CHUNK", 1 << 20)
    if fault:
        fault(path)
    else:
        monkeypatch.setattr(HostWeights, "populate", full)
    if not direct:
        monkeypatch.setattr(weight_loading, "DIRECT", 0)
    with pytest.raises(error, match=words), loaded(program, [0]):
        pass
    assert segments() == []


def test_every_way_of_reading_gives_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(quantised_file(NAME).read_bytes())
    program = program_of(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    monkeypatch.setattr(weight_loading, "CHUNK", 1 << 18)
    ways: list[Callable[[], None]] = [
        lambda: None,
        lambda: monkeypatch.setattr(weight_loading.WeightFile, "_from_cache", lambda *_: 0),
        lambda: monkeypatch.setattr(weight_loading, "DIRECT", 0),
    ]
    for way in ways:
        way()
        with loaded(program, [0, 1]) as weights:
            for name, tensor in program.weights.items():
                found = np.frombuffer(weights.memory(weights.layout.places[name], tensor.nbytes), np.uint8)
                np.testing.assert_array_equal(found, tensor.data)
    assert segments() == []


@pytest.mark.parametrize("direct", [True, False])
def test_a_load_leaves_the_page_cache_alone(direct: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(trained_file("tiny-qwen3moe-Q4_K_M").read_bytes())
    layout = WeightLayout(copied_tensors(program_of(path)), [0])  # and the file is no longer mapped
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = resident_bytes(path)
    if before > path.stat().st_size // 2:
        pytest.skip("the file system keeps files in memory")
    if not direct:
        monkeypatch.setattr(weight_loading, "DIRECT", 0)
    weights = HostWeights.create(layout)
    try:
        weight_loading.load_weights(weights, lambda *facts: None)
        assert resident_bytes(path) <= before + path.stat().st_size // 5
    finally:
        weights.close()


def test_no_room_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path = quantised_file(NAME)
    program = program_of(path)
    weights = sum(tensor.nbytes for tensor in program.weights.values())
    config = DaemonConfig(str(path), plan="cpu", context=256, processes=1, host_weights="copy")
    plan = make_plan(config, program, MemoryRoom(1 << 36, 1 << 36))
    assert plan.host_weights == "copy" and plan.total("mapped") == plan.term("looked-up weights")
    with pytest.raises(PlanError, match="does not fit"):
        make_plan(config, program, MemoryRoom(weights, 1 << 36))
    layout = WeightLayout(copied_tensors(program), [0])
    monkeypatch.setattr(layout, "nbytes", 1 << 50)
    with pytest.raises(PlanError, match="copy of the weights takes"):
        HostWeights.create(layout)


def test_auto_copies_where_that_gives_huge_pages_or_near_memory(tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    (folder / "hugepages-2048kB").mkdir(parents=True)
    large = 1 << 31
    for own, common, expected in (
        ("[inherit] never", "[never]", False),
        ("[inherit] never", "[advise]", True),
        ("inherit [never]", "[always]", False),
        ("[always] inherit", "[never]", True),
    ):
        (folder / "hugepages-2048kB/shmem_enabled").write_text(own)
        (folder / "shmem_enabled").write_text(f"within_size {common} force")
        assert copy_pays(large, 1, tmp_path, [0]) == expected
        assert not copy_pays(1 << 20, 1, tmp_path, [0])
    (folder / "hugepages-2048kB/shmem_enabled").write_text("[never]")
    reserved = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    reserved.mkdir(parents=True)
    for pages, expected in (("1023", False), ("1024", True), ("0", False)):
        (reserved / "free_hugepages").write_text(f"{pages}\n")
        assert copy_pays(large, 1, tmp_path, [0]) == expected
    for number in (0, 1):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{number}\n")
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-1\n")
    assert copy_pays(large, 2, tmp_path, [0, 1]) and not copy_pays(large, 1, tmp_path, [0, 1])


def test_a_load_takes_the_weights_once() -> None:
    """At most 5 % more than the weights, and 200 MB a process."""
    anonymous, copied, weights = peak_of_load(trained_file("tiny-qwen3moe-Q4_K_M"), 2, host_weights="shared")
    assert weights <= copied <= 1.05 * weights
    assert anonymous <= 3 * PROCESS_BYTES
