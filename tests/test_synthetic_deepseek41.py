"""The synthetic `deepseek41` file with every role and n-gram tables of holes: it loads, runs, and the tables stay out
of memory.

The small variant has narrow layers and tables of 40 MB and always runs. With BLOOMERY_TEST_FULL_SIZE=1 the same test
takes the file that `bloomery-bench --synthetic deepseek41` makes: true widths, 24 experts a layer, two tables of 42 GB
(apparent), 4.8 GB on the disk in $BLOOMERY_CACHE, and minutes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import left_behind
from memory_use import process_bytes, resident_bytes
from numpy.typing import NDArray
from running import rows_of

from bloomery.runtime.architectures import build_program
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.engram_hash import histories
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.placement import MemoryRoom, make_plan
from bloomery.runtime.program import Program
from bloomery.runtime.synthetic_deepseek41 import DEEPSEEK_V41_FLASH, SMALL_LAYERS, SparseShapes, deepseek41_draft
from bloomery.runtime.synthetic_file import synthetic_file, write_draft
from bloomery.runtime.synthetic_rows import write_rows
from bloomery.runtime.worker_messages import EngramOptions

FULL_SIZE = "BLOOMERY_TEST_FULL_SIZE"
GIBIBYTE = 1 << 30
BLOCK, CACHE_MIB = 128, 64
SMALL = deepseek41_draft(
    replace(DEEPSEEK_V41_FLASH, layers=SMALL_LAYERS, width=256, vocabulary=600, heads=4, head_width=64, experts=8,
            used=2, expert_hidden=256, rotated=16),
    "Q3_K_M",
    SparseShapes(q_rank=256, groups=2, group_rank=256, window=16, index_heads=4, index_width=64, index_keep=8,
                 bucket_rows=16_000),
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """`memory`: what the whole engine may take. `prompt` and `generated` tokens are run."""

    path: Path
    memory: int
    context: int
    prompt: int
    generated: int


@pytest.fixture(scope="module", params=["small", "full"])
def size(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Size:
    if request.param == "full":
        if os.environ.get(FULL_SIZE) != "1":
            pytest.skip(f"takes 4.8 GB of disk and minutes: set {FULL_SIZE}=1")
        return Size(synthetic_file("deepseek41"), 16 * GIBIBYTE, 4096, 192, 16)
    path = tmp_path_factory.mktemp("holes") / "small.gguf"
    write_draft(SMALL, path)
    return Size(path, GIBIBYTE, 256, 90, 6)


@pytest.mark.timeout(1200)
def test_loads_runs_and_leaves_tables_on_the_disk(size: Size) -> None:
    before, earlier_tests = left_behind(), process_bytes([os.getpid()])
    path = size.path
    with ModelFile.open(path) as model:
        program = build_program(model)
    tables = [program.weights[table.weight] for table in engram_tables(program)]
    assert len(tables) == 2 and program.engram is not None
    hollow = sum(table.nbytes for table in tables)
    weights = sum(tensor.nbytes for tensor in program.weights.values()) - hollow
    config = DaemonConfig(
        str(path), context=size.context, slots=1, processes=2, prompt_block=BLOCK, engram_cache=CACHE_MIB
    )
    plan = make_plan(config, program, MemoryRoom(size.memory, size.memory))
    assert plan.total("mapped") == weights and plan.total("disk") == hollow
    tokens = np.random.default_rng(3).integers(0, program.vocabulary, size.prompt + size.generated).astype(np.int32)
    assert path.stat().st_size > hollow
    pool = opened(size, program)
    try:
        empty = run(pool, tokens, size)
        rows = write_rows(path, [tokens])
        assert path.stat().st_blocks * 512 < weights + rows * 3 * 4096 + (16 << 20), "the tables are still holes"
    finally:
        pool.close()
    pool = opened(size, program)
    try:
        filled = run(pool, tokens, size)
        pool.step(rows_of(tokens[-1:], start=len(tokens) - 1))  # meanwhile the process tidies up
        cached = resident_bytes(path)
        of_tables = sum(resident_bytes(path, table.offset, table.nbytes) for table in tables)
        for table in engram_tables(program):
            ids = program.engram.row_ids(table.site, histories(tokens, program.engram.longest)[-1:])
            stored = program.weights[table.weight].rows[ids[0]]
            brought = pool._arena.memory(f"engram_rows:{table.site}").reshape(-1, table.row_bytes)[: len(stored)]
            np.testing.assert_array_equal(brought, stored)
            assert stored.any(axis=1).all(), "every row is random bytes"
        assert np.isfinite(empty).all() and np.isfinite(filled).all()
        assert np.abs(filled - empty).max() > 1e-3, "rows of the tables say something"
        facts = pool.statistics()
        processes = process_bytes([os.getpid(), *facts["pids"], facts["engram"]["pid"]]) - earlier_tests
        print(
            f"apparent {path.stat().st_size / 1e9:.1f} GB, on disk {path.stat().st_blocks * 512 / 1e9:.2f}, {rows} rows"
            f" written; processes {processes / 1e9:.2f} GB, page cache {cached / 1e9:.2f} GB, of tables"
            f" {of_tables / 1e6:.1f} MB; step {1e3 * facts['step_seconds_last']:.1f} ms"
        )
        assert processes + cached < size.memory
        assert of_tables < 3 * rows * 4096, "nothing but rows that were looked up"
    finally:
        pool.close()
    assert left_behind() <= before


def opened(size: Size, program: Program) -> HostPool:
    return HostPool.start(
        str(size.path), program, context=size.context, slots=1, processes=2, prompt_block=BLOCK,
        engram=EngramOptions(CACHE_MIB << 20),
    )  # fmt: skip


def run(pool: HostPool, tokens: NDArray[np.int32], size: Size) -> NDArray[np.float32]:
    """Logits of the prompt's last token and of each that follows, one a step."""
    logits = []
    for first in range(0, size.prompt, BLOCK):
        piece = tokens[first : min(first + BLOCK, size.prompt)]
        step = pool.step(rows_of(piece, start=first, out="last"))
    logits.append(step.logits.copy())
    for place in range(size.prompt, size.prompt + size.generated):
        logits.append(pool.step(rows_of(tokens[place : place + 1], start=place)).logits.copy())
    return np.concatenate(logits)
