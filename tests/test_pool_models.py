"""The pool with real kernels: bits that depend on nothing, blocks that are cut anywhere, a kill in mid-generation."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle_data import quantised_file
from pool_kit import left_behind, worker_children

from bloomery.runtime.architectures import build_program
from bloomery.runtime.cache_types import CacheType
from bloomery.runtime.errors import WorkerLost
from bloomery.runtime.executor import StepRows
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile

SLOTS, CONTEXT = 3, 544
PROMPT = 530
SHORT = 150  # crosses what attention takes together: 32 keys, 64 queries, 64 positions of values


@contextmanager
def open_pool(path: Path, processes: int, block: int, cache_type: CacheType = "f32") -> Iterator[HostPool]:
    with ModelFile.open(path) as model:
        pool = HostPool.start(
            str(path),
            build_program(model),
            context=CONTEXT,
            slots=SLOTS,
            processes=processes,
            prompt_block=block,
            cache_type=cache_type,
        )
        try:
            yield pool
        finally:
            pool.close()


def evaluate(
    pool: HostPool, tokens: NDArray[np.int32], slot: int, start: int, blocks: Sequence[int] | int
) -> NDArray[np.float32]:
    """Logits after every token, (tokens, vocabulary), in steps of the given sizes, in turns."""
    sizes = [blocks] if isinstance(blocks, int) else blocks
    logits, done, turn = [], 0, 0
    while done < len(tokens):
        count = min(sizes[turn % len(sizes)], len(tokens) - done, pool.max_out_rows)
        rows = StepRows(
            tokens[done : done + count],
            np.full(count, slot, np.int32),
            np.arange(start + done, start + done + count, dtype=np.int32),
            np.arange(count, dtype=np.int32),
        )
        result = pool.step(rows)
        logits.append(result.logits.copy())
        np.testing.assert_array_equal(result.greedy, logits[-1].argmax(axis=1))
        done, turn = done + count, turn + 1
    return np.concatenate(logits)


def vocabulary_of(path: Path) -> int:
    with ModelFile.open(path) as model:
        return build_program(model).vocabulary


@pytest.mark.parametrize(
    ("name", "cache_type"), [("qwen3moe-Q4_K_M", "f32"), ("deepseek2-lite-Q4_K_M", "f16"), ("qwen3moe-IQ4_XS", "f16")]
)
def test_logits_depend_on_neither_processes_nor_blocks(name: str, cache_type: Literal["f32", "f16"]) -> None:
    path = quantised_file(name)
    tokens = np.random.default_rng(70).integers(0, vocabulary_of(path), PROMPT).astype(np.int32)
    with open_pool(path, 1, 512, cache_type) as pool:
        base = evaluate(pool, tokens, 0, 0, 512)
        assert np.isfinite(base).all() and base.std() > 0.1
        for slot, count, blocks in ((1, SHORT, [1]), (2, SHORT, [7]), (0, PROMPT, [64]), (1, PROMPT, [5, 1, 130, 2])):
            # one slot after another, over what earlier rounds left in them
            np.testing.assert_array_equal(evaluate(pool, tokens[:count], slot, 0, blocks), base[:count])
        np.testing.assert_array_equal(evaluate(pool, tokens[-SHORT:], 0, PROMPT - SHORT, [1]), base[-SHORT:])
    for processes in (2, 3):
        with open_pool(path, processes, 512, cache_type) as pool:
            for count, sizes in ((PROMPT, [512]), (PROMPT, [64]), (SHORT, [7, 1])):
                np.testing.assert_array_equal(evaluate(pool, tokens[:count], 2, 0, sizes), base[:count])


def test_rows_of_several_slots_in_one_step_equal_each_alone() -> None:
    path = quantised_file("qwen3moe-Q4_K_M")
    rng = np.random.default_rng(71)
    texts = [rng.integers(0, vocabulary_of(path), 40).astype(np.int32) for _ in range(SLOTS)]
    with open_pool(path, 2, 64) as pool:
        alone = [evaluate(pool, text, 0, 0, 64) for text in texts]
        at = [0] * SLOTS
        while min(at) < 40:
            counts = [min(int(rng.integers(0, 9)), 40 - done) for done in at]
            if not sum(counts):
                continue
            tokens = np.concatenate([text[a : a + n] for text, a, n in zip(texts, at, counts)])
            slots = np.repeat(np.arange(SLOTS, dtype=np.int32), counts)
            positions = np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in zip(at, counts)])
            result = pool.step(StepRows(tokens, slots, positions, np.arange(len(tokens), dtype=np.int32)))
            expected = np.concatenate([logits[a : a + n] for logits, a, n in zip(alone, at, counts)])
            np.testing.assert_array_equal(result.logits, expected)
            at = [done + count for done, count in zip(at, counts)]


def test_a_copied_prefix_equals_a_recomputed_one() -> None:
    path = quantised_file("deepseek2-lite-Q4_K_M")
    tokens = np.random.default_rng(72).integers(0, vocabulary_of(path), 60).astype(np.int32)
    with open_pool(path, 2, 64, "f16") as pool:
        base = evaluate(pool, tokens, 0, 0, 64)
        pool.copy_prefix(0, 2, 41)
        np.testing.assert_array_equal(evaluate(pool, tokens[41:], 2, 41, 3), base[41:])


def test_a_worker_killed_in_generation_costs_one_step() -> None:
    path = quantised_file("qwen3moe-Q4_K_M")
    tokens = np.random.default_rng(73).integers(0, vocabulary_of(path), 300).astype(np.int32)
    with open_pool(path, 2, 64) as pool:
        base = evaluate(pool, tokens, 0, 0, 64)
        for victim in (0, 1):
            done = _decode_until_lost(pool, tokens, victim)
            begun = time.monotonic()
            pool.recover()
            assert time.monotonic() - begun < 10
            np.testing.assert_array_equal(evaluate(pool, tokens[done:], 1, done, 7), base[done:])
        assert pool.statistics()["restarts"] == 2
    assert not left_behind() and not worker_children()


def _decode_until_lost(pool: HostPool, tokens: NDArray[np.int32], victim: int) -> int:
    """Decodes in slot 1, over and over, until a kill at an arbitrary moment is felt. Returns how many rows it kept."""
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(pool.statistics()["pids"][victim], signal.SIGKILL)

    threading.Timer(0.1, kill).start()
    done = 0
    with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
        while True:
            for done in range(len(tokens)):
                evaluate(pool, tokens[done : done + 1], 1, done, 1)
    assert time.monotonic() - killed[0] < 1.0
    return done
