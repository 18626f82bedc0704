"""Steps of tiny models on the card, of every kind once: to be run under compute-sanitizer, which makes each very slow.

    compute-sanitizer --tool memcheck python tests/gpu_tiny_steps.py [--emulated] [NAME ...]

Prompt blocks, groups of eight, single rows, steps ahead, hand-offs with experts on the host and blocks to which these
come, all or some; results are compared
between them where they have to be equal. With --emulated everything runs on the host emulator instead (very slow, too).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from deepseek_data import tiny41
from oracle_data import quantised_file
from pool_kit import worker_environment
from running import evaluate, rows_of
from test_hand_off import tiers_of

from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.gpu_worker.prompt_lowering import LEAST_ROWS
from bloomery.runtime.architectures import build_program
from bloomery.runtime.card_pool import CARD_WORKLOAD, CardPool
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.model_file import ModelFile

NAMES = ("qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M", "llama-Q4_K_M", "deepseek41")
TOKENS = list(np.random.default_rng(5).integers(1, 60, LEAST_ROWS + 7))


def on_the_card(path: Path) -> None:
    """One process, whole on the card."""
    executor = CardExecutor(build_program(ModelFile.open(path)), context=64, slots=2, prompt_block=64)
    try:
        executor.step(rows_of(TOKENS, out="last"))
        rows = rows_of(TOKENS[:1], start=len(TOKENS))
        ahead = executor.step(replace(rows, ahead=2)).logits.copy()
        assert (executor.step(rows).logits[0] == ahead[0]).all(), "a step and the first of several differ"
        groups = evaluate(executor, TOKENS[:9], block=9, slot=1)
        assert (evaluate(executor, TOKENS[:2], block=1, slot=1) == groups[:2]).all(), "a row and a group differ"
        assert np.isfinite(groups).all() and np.isfinite(ahead).all()
    finally:
        executor.close()


def far(path: Path) -> None:
    """Attention over several splits, for which a card of one multiprocessor has too few blocks."""
    executor = CardExecutor(
        build_program(ModelFile.open(path)), context=256, slots=1, prompt_block=64, cache_type="f16"
    )
    executor.memory.multiprocessors = 1
    tokens = np.resize(TOKENS, 200)
    try:
        evaluate(executor, tokens[:-3])
        groups = evaluate(executor, tokens[-3:], start=len(tokens) - 3, block=3)
        one = executor.step(rows_of(tokens[-1:], start=len(tokens) - 1)).logits
        assert (one[0] == groups[-1]).all(), "a row and a group differ"
    finally:
        executor.close()


def with_a_host(path: Path, workload: str) -> None:
    """A third of the experts on the card, the others in two workers."""
    program = build_program(ModelFile.open(path))
    tiers, half = tiers_of(program, 0.3), tiers_of(program, 0.5)
    there = {gate: tuple(sorted({*ids, *half.on_card[gate]})) for gate, ids in tiers.on_card.items()}
    stream_tiers = (LEAST_ROWS, ExpertTiers(tiers.layers, there).text()), (len(TOKENS), "")
    sizes = {"context": 64, "slots": 2, "prompt_block": 64, "processes": 2, "stream_rows": LEAST_ROWS}
    pool = CardPool.start(
        str(path), program, tiers=tiers, stream_tiers=stream_tiers, time_legs=True, workload=workload, **sizes
    )
    try:
        groups = evaluate(pool, TOKENS[:9], block=9)
        assert (evaluate(pool, TOKENS[:2], block=1, slot=1) == groups[:2]).all(), "a row and a group differ"
        assert len(pool.step_legs()) == 4 and np.isfinite(groups).all()
        for rows in (len(TOKENS), len(TOKENS) - 1):
            block = rows_of(TOKENS[:rows], out="last")
            assert (pool.step(block).logits.copy() == pool.step(block).logits).all(), "a block does not repeat"
        legs = pool.step_legs()
        assert len(legs) == 4 and all(step.link_bytes and step.link_ns for step in legs)
        row = rows_of(TOKENS[:1], slot=1)
        ahead = pool.step(replace(row, ahead=3)).logits.copy()
        assert (pool.step(row).logits[0] == ahead[0]).all(), "a step and the first of several differ"
    finally:
        pool.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--emulated", action="store_true")
    arguments = parser.parse_args()
    os.environ |= worker_environment()
    workload = CARD_WORKLOAD
    if arguments.emulated:
        import emulated_driver

        emulated_driver.stand_in(setattr)
        workload = "emulated_driver:load"
    for name in arguments.names:
        begun = time.monotonic()
        path = tiny41("a") if name == "deepseek41" else quantised_file(name)
        on_the_card(path)
        if name.startswith("llama"):
            far(path)
        else:
            with_a_host(path, workload)
        print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
