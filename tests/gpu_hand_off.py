"""Times decode steps of plan a on the card that is present, with experts on the card, on the host and on both.

    python tests/gpu_hand_off.py FILE.gguf | --synthetic-layers N [--processes N] [--depth N] [--steps N]

One expert of each layer on the host shows what a hand-off itself costs: the host seldom has anything to do.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
from running import rows_of

from bloomery.runtime.architectures import build_program
from bloomery.runtime.bandwidth_probe import ReadCeiling
from bloomery.runtime.card_pool import CardPool
from bloomery.runtime.card_probe import probe_cards
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program
from bloomery.runtime.step_prediction import Bandwidth, predict
from bloomery.runtime.synthetic_file import synthetic_file


def placements(program: Program) -> dict[str, ExpertTiers]:
    everything = ExpertTiers.everything(program)
    each = everything.layers[0].experts

    def first(count: int) -> ExpertTiers:
        ids = tuple(range(count))
        return ExpertTiers(everything.layers, dict.fromkeys(everything.on_card, ids))

    return {
        "all on the card": everything,
        "one on the host": first(each - 1),
        "half": first(each // 2),
        "none": first(0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--synthetic-layers", type=int, default=8, help="of Qwen3-30B-A3B's shapes, without a file")
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 3))
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    file = arguments.file or synthetic_file("qwen3-30b-a3b", arguments.synthetic_layers, "Q4_K_M")
    program = build_program(ModelFile.open(file))
    with ReadCeiling(arguments.processes) as ceiling:
        host = ceiling.measure().bytes_per_second
    speed = Bandwidth(host, probe_cards()[0].read)
    print(
        f"host reads {speed.host / 1e9:.1f} GB/s with {arguments.processes} processes, card {speed.card / 1e9:.0f} GB/s"
    )
    tokens = np.random.default_rng(1).integers(1, 1000, arguments.depth + arguments.steps)
    whole = 0.0
    for name, tiers in placements(program).items():
        begun = time.perf_counter()
        sizes = {"context": 1024, "slots": 1, "prompt_block": 64, "processes": arguments.processes}
        pool = CardPool.start(str(file), program, tiers=tiers if tiers.host_layers else None, **sizes)
        try:
            started = time.perf_counter() - begun
            pool.step(rows_of(tokens[: arguments.depth], out="last"))
            seconds = []
            for i in range(arguments.steps):
                at = arguments.depth + i
                begun = time.perf_counter()
                pool.step(rows_of(tokens[at : at + 1], start=at))
                seconds.append(time.perf_counter() - begun)
        finally:
            pool.close()
        median = float(np.median(seconds))
        expected = predict(program, tiers, speed, position=arguments.depth, cache_bytes=2)
        assert expected is not None
        whole = whole or median
        layers = len(tiers.host_layers) or 1
        print(
            f"{name:16} {1e3 * median:7.3f} ms a step (p90 {1e3 * np.quantile(seconds, 0.9):.3f}), predicted"
            f" {1e3 * expected.seconds:.3f}, bound {1e3 * expected.bound_seconds:.3f};"
            f" {1e6 * (median - whole) / layers:6.1f} us a layer more than whole; started in {started:.1f} s"
        )


if __name__ == "__main__":
    main()
