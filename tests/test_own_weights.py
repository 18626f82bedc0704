"""Weights in the workers' own memory: the same bits, every row where its rank looks for it, right after a death."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load_peak import PROCESS_BYTES, peak_of_load
from oracle_data import quantised_file, trained_file
from pool_kit import left_behind, worker_children
from test_host_weights import program_of, segments, start
from test_pool_models import evaluate, vocabulary_of

from bloomery.cpu_experts import own_weights
from bloomery.cpu_experts.arena_context import SizingContext
from bloomery.cpu_experts.lent_memory import LentMemory
from bloomery.cpu_experts.lowering import lower
from bloomery.cpu_experts.own_weights import GAP, OwnWeights, Piece, batches_of
from bloomery.runtime.arena import ArenaShape
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.errors import ModelFileError, PlanError, WorkerLost
from bloomery.runtime.executor import StepRows
from bloomery.runtime.expert_tiers import ExpertTiers, kept_experts
from bloomery.runtime.host_weights import HUGE_PAGE, copied_bytes, private_pays
from bloomery.runtime.placement import MemoryRoom, make_plan
from bloomery.runtime.program import Program
from bloomery.runtime.split_program import host_part

NAME = "qwen3moe-Q4_K_M"


def wanted(
    program: Program,
    rank: int,
    ranks: int,
    kept: Mapping[str, tuple[int, ...]] | None = None,
    lends: bool = False,
) -> OwnWeights:
    """What lowering wants for a rank, not loaded."""
    own = OwnWeights(program, rank, ranks, kept, lends)
    lower(program, SizingContext(program, ArenaShape(64, 1, 8, 8, ranks, "f16"), own))
    return own


@pytest.mark.parametrize("name", [NAME, "deepseek2-lite-Q4_K_M", "deepseek2-v3-Q4_K_M", "llama-Q4_K_M"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_has_its_rows_and_all_ranks_together_each_row_once(name: str, ranks: int) -> None:
    program = program_of(quantised_file(name))
    rows: dict[str, list[int]] = {}
    for rank in range(ranks):
        own = wanted(program, rank, ranks)
        own.load(lambda done, total: None)
        for (tensor_name, *sharing), part in own._parts.items():
            address, stride = own.factor(tensor_name, *sharing)
            data = part.tensor.rows.reshape(part.matrices, -1, part.row_bytes)
            assert stride == (part.last - part.first) * part.row_bytes
            for matrix in range(part.matrices):
                at = address + matrix * stride + part.first * part.row_bytes - own._address
                found = np.frombuffer(own._memory, np.uint8, stride, at + own._address - _start(own))
                np.testing.assert_array_equal(found, data[matrix, part.first : part.last].reshape(-1))
            rows.setdefault(tensor_name, []).append(part.matrices * (part.last - part.first))
    assert rows and all(sum(counts) == len(program.weights[tensor].rows) for tensor, counts in rows.items())


@pytest.mark.parametrize("ranks", [1, 3])
def test_of_experts_only_those_on_the_host_are_copied(ranks: int) -> None:
    program = program_of(quantised_file(NAME))
    layers = ExpertTiers.everything(program).layers
    tiers = ExpertTiers(layers, {layer.gate: tuple(range(i, layer.experts, 2)) for i, layer in enumerate(layers)})
    kept, host = kept_experts(program, tiers), host_part(program, tiers.host_layers)
    assert kept[layers[0].gate] == tuple(range(1, layers[0].experts, 2))
    copied = 0
    for rank in range(ranks):
        own = wanted(host, rank, ranks, kept)
        own.load(lambda done, total: None)
        for (name, *sharing), part in own._parts.items():
            address, stride = own.factor(name, *sharing)
            data = part.tensor.rows.reshape(part.matrices, -1, part.row_bytes)
            assert own.kept(name) == kept[name] == part.kept
            for number, expert in enumerate(part.kept):
                at = address + number * stride + part.first * part.row_bytes - _start(own)
                found = np.frombuffer(own._memory, np.uint8, stride, at)
                np.testing.assert_array_equal(found, data[expert, part.first : part.last].reshape(-1))
            copied += part.nbytes
    assert copied == tiers.host_bytes


def _start(own: OwnWeights) -> int:
    assert own._memory is not None
    return own_weights._address_of(own._memory)


def test_shares_are_those_of_the_kernels() -> None:
    from bloomery.cpu_experts.kernels.work import share_start

    for total in (1, 7, 768, 2051):
        for ranks in (1, 2, 3, 13):
            found = [own_weights.share_start(total, rank, ranks) for rank in range(ranks + 1)]
            assert found == [share_start(total, rank, ranks) for rank in range(ranks + 1)] and found[-1] == total


def test_reads_join_neighbours_and_nothing_else() -> None:
    path, other = Path("a"), Path("b")
    size = own_weights.PIECE
    pieces = [
        Piece(path, 0, 100, 0), Piece(path, 100 + GAP, 100, 100), Piece(path, 201 + 2 * GAP, 50, 200),
        Piece(path, 10 << 20, size, 300), Piece(path, (10 << 20) + size, 7, 400), Piece(other, 0, 5, 500),
    ]  # fmt: skip
    found = list(batches_of(iter(pieces[::-1])))
    assert found == [pieces[:2], pieces[2:3], pieces[3:4], pieces[4:5], pieces[5:]]


@pytest.mark.parametrize("name", [NAME, "deepseek2-lite-Q4_K_M"])
def test_own_memory_gives_the_bits_of_mapped_weights_and_leaves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where ranks lend each other their rows."""
    path = quantised_file(name)
    tokens = np.random.default_rng(95).integers(0, vocabulary_of(path), 40).astype(np.int32)
    mapped = start(path, 1)
    try:
        base = evaluate(mapped, tokens, 0, 0, 32)
    finally:
        mapped.close()
    seen: list[tuple[Any, ...]] = []
    for processes, lend in ((1, 0), (3, 0), (2, 1), (4, 1)):
        monkeypatch.setenv("BLOOMERY_LEND", str(lend))
        seen.clear()
        pool = start(path, processes, host_weights="private", progress=lambda *facts: seen.append(facts))
        try:
            assert segments() == []
            np.testing.assert_array_equal(evaluate(pool, tokens, 1, 0, [5, 1, 30]), base)
            np.testing.assert_array_equal(evaluate(pool, tokens, 0, 0, 1), base)
            done = [facts[1:] for facts in seen if facts[0] == "weights"]
            assert done[-1][0] == done[-1][1] > 0
            facts = pool.statistics()["weights"]
            assert sum(facts["bytes"].values()) >= processes * (done[-1][1] - (1 << 16))
            assert facts["sees"] == lend * (processes - 1) or not lends_here()
        finally:
            pool.close()
    assert not left_behind() and not worker_children()


@pytest.mark.parametrize("lend", (0, 1))
def test_a_dead_workers_successor_has_its_rows_and_the_others_keep_theirs(
    lend: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOOMERY_LEND", str(lend))
    caplog.set_level(logging.INFO)
    path = quantised_file(NAME)
    tokens = np.random.default_rng(96).integers(0, vocabulary_of(path), 20).astype(np.int32)
    pool = start(path, 2, host_weights="private")
    try:
        base = evaluate(pool, tokens, 0, 0, 7)
        lending = pool.statistics()["weights"]["sees"]
        for dead in (1, 0, 1)[: 1 + 2 * lend]:
            before = pool.statistics()["pids"]
            os.kill(before[dead], signal.SIGKILL)
            with pytest.raises(WorkerLost):
                while True:  # the death is noticed in this step or the next
                    pool.step(StepRows(*(np.zeros(1, np.int32) for _ in range(4))))
            pool.recover()
            after = pool.statistics()["pids"]
            assert after[1 - dead] == before[1 - dead] and after[dead] != before[dead]
            np.testing.assert_array_equal(evaluate(pool, tokens, 0, 0, 7), base)
            np.testing.assert_array_equal(evaluate(pool, tokens, 0, 0, 1), base)
    finally:
        pool.close()
    said = [record.getMessage() for record in caplog.records]
    assert sum("weights lie in the memory of 2 workers" in line for line in said) == 1
    deaths = 1 + 2 * lend
    assert sum("reads again its part of the weights" in line for line in said) == deaths * (1 - lending)
    assert sum("takes over its part of the weights" in line for line in said) == deaths * lending
    assert lending == lend or not lends_here()


def lends_here() -> bool:
    return LentMemory.take(HUGE_PAGE) is not None


def test_ranks_that_lend_find_each_others_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that cannot be mapped they know that; where shared memory gets no huge pages nobody lends."""
    program = program_of(quantised_file(NAME))
    every = [wanted(program, rank, 3, lends=True) for rank in range(3)]
    for own in every:
        own.load(lambda done, total: None)
    if not lends_here():
        pytest.skip("shared memory gets no huge pages here")
    every[1].borrow([every[0].path, every[1].path, "/proc/self/fd/none"])
    for name, *sharing in every[1]._parts:
        lent = every[1].lent(name, *sharing)
        assert lent[1] == every[1].factor(name, *sharing) and lent[2] == (0, 0)
        part = every[0]._parts[name, *sharing]
        data = part.tensor.rows.reshape(part.matrices, -1, part.row_bytes)[:, part.first : part.last]
        for matrix in range(part.matrices):
            address = lent[0][0] + matrix * lent[0][1] + part.first * part.row_bytes
            found = np.frombuffer((ctypes.c_uint8 * lent[0][1]).from_address(address), np.uint8)
            np.testing.assert_array_equal(found, data[matrix].reshape(-1))
    monkeypatch.setattr("bloomery.cpu_experts.lent_memory._COLLAPSE", 9999)
    alone = wanted(program, 0, 3, lends=True)
    alone.load(lambda done, total: None)
    assert alone.path == "" and alone.huge_share() >= 0
    name, *sharing = next(iter(alone._parts))
    assert [bool(address) for address, _ in alone.lent(name, *sharing)] == [True, False, False]


@pytest.mark.skipif(
    not private_pays(1 << 30), reason="no huge pages for private memory here, or some for shared memory"
)
def test_rows_lie_in_huge_pages_where_the_machine_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(trained_file("tiny-qwen3moe-Q4_K_M"))
    shares = []
    for advice in (None, 15):  # MADV_NOHUGEPAGE
        if advice is not None:
            monkeypatch.setattr(own_weights.mmap, "MADV_HUGEPAGE", advice)
        own = wanted(program, 0, 1)
        own.load(lambda done, total: None)
        shares.append(own.huge_share())
    assert shares[0] > 0.9 and shares[1] < 0.1, shares


def test_failures_are_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(quantised_file(NAME).read_bytes())
    own = wanted(program_of(path), 0, 2)
    own._rows[0].nbytes = 1 << 60
    with pytest.raises(PlanError, match="memory ran out"):
        own.load(lambda done, total: None)
    own = wanted(program_of(path), 0, 2)
    os.truncate(path, path.stat().st_size - (1 << 20))
    with pytest.raises(ModelFileError, match="has become shorter"):
        own.load(lambda done, total: None)


def test_plans_name_what_stays_in_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = quantised_file(NAME)
    program = program_of(path)
    config = DaemonConfig(str(path), plan="cpu", context=256, processes=1, host_weights="copy")
    room = MemoryRoom(1 << 36, 1 << 36)
    plans = {}
    for own in (False, True):
        monkeypatch.setattr("bloomery.runtime.placement.private_pays", lambda nbytes, own=own: own)
        plans[own] = make_plan(config, program, room)
        assert plans[own].host_weights == "copy"
    table = program.weights["token_embd.weight"].nbytes
    assert plans[False].term("looked-up weights") == 0 and plans[True].term("looked-up weights") == table
    weights = [plan.term("dense weights") + plan.term("host experts") for plan in plans.values()]
    assert weights[0] == copied_bytes(program)
    tied = not any(name == "output.weight" for name in program.weights)
    assert weights[1] == weights[0] - (0 if tied else table)
    assert plans[True].total("mapped") == table
    for text, expected in (
        ("[always] madvise never", True),
        ("always [madvise] never", True),
        ("always madvise [never]", False),
    ):
        folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "enabled").write_text(text)
        (folder / "shmem_enabled").write_text("always [never]")
        assert private_pays(1 << 31, tmp_path) == expected
        (folder / "shmem_enabled").write_text("[always] never")
        assert not private_pays(1 << 31, tmp_path)


def test_a_load_takes_the_weights_once() -> None:
    """At most 5 % more than the weights, and 200 MB a process."""
    anonymous, copied, weights = peak_of_load(trained_file("tiny-qwen3moe-Q4_K_M"), 2, host_weights="private")
    assert copied == 0
    assert 0.9 * weights <= anonymous <= 1.05 * weights + 3 * PROCESS_BYTES
