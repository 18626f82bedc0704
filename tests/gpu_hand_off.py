"""Times decode steps of plan a on the card that is present, with experts on the card, on the host and on both.

    python tests/gpu_hand_off.py FILE.gguf | --synthetic TEMPLATE --layers N --mix MIX [--own-weights] [--only NAMES]

One expert of each layer on the host shows what a hand-off itself costs: the host seldom has anything to do; with
--rows 8 it often has, and the card has other work meanwhile. Each placement takes turns with the whole model on the
card, and then again with a clock in every hand-off: the exchange is from the card's flag to its sight of every rank's,
the wait what of it the card had nothing else to do in, and what is left of the card's time beside the whole model's is
what hand-offs cost the card itself. With --idle-host the ranks answer at once and compute nothing, so that the card
always has other work while a hand-off is on its way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from running import rows_of

from bloomery.runtime.architectures import build_program
from bloomery.runtime.bandwidth_probe import ReadCeiling
from bloomery.runtime.card_pool import CardPool
from bloomery.runtime.card_probe import probe_cards
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.leg_times import BEGUN, SEEN, SENT, StepLegs, leg_figures
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program
from bloomery.runtime.step_prediction import Bandwidth, Prediction, predict
from bloomery.runtime.synthetic_file import synthetic_file

WAKING = 5


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


def run_steps(pool: CardPool, tokens: NDArray[np.int64], depth: int, rows: int) -> list[float]:
    """Seconds of each step of so many rows after a prompt of `depth` tokens, as its caller sees them."""
    seconds = []
    for at in range(depth, len(tokens) - rows + 1, rows):
        begun = time.perf_counter()
        pool.step(rows_of(tokens[at : at + rows], start=at))
        seconds.append(time.perf_counter() - begun)
    return seconds


def in_turns(
    pools: Sequence[CardPool], tokens: NDArray[np.int64], depth: int, rows: int, each: int, rounds: int
) -> NDArray[np.float64]:
    """(3, pools, rounds): medians and means of a step's seconds, `each` tokens a round, whose first wake all up; and,
    where legs are timed, medians of the card's own."""
    found = np.zeros((3, len(pools), rounds))
    for number in range(rounds):
        first, last = depth + number * each, depth + (number + 1) * each
        for which, pool in enumerate(pools):
            if not number:
                pool.step(rows_of(tokens[:depth], out="last"))
            pool.step_legs()
            seconds = run_steps(pool, tokens[:last], first, rows)[WAKING:]
            found[:2, which, number] = np.median(seconds), np.mean(seconds)
            if legs := pool.step_legs()[WAKING:]:
                found[2, which, number] = 1e-9 * np.median([step.card_ns - waited(step) for step in legs])
    return found


def waited(step: StepLegs) -> int:
    """Nanoseconds in which the card had nothing to do but to wait for the host."""
    return int(np.maximum(step.hand_offs[:, SEEN] - step.hand_offs[:, BEGUN], 0).sum()) if len(step.hand_offs) else 0


def with_quartiles(values: NDArray[np.float64]) -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def host_seconds(pool: CardPool, hand_offs: int, idle: bool) -> NDArray[np.float64]:
    """Seconds that a rank has worked for each hand-off since the pool began, its barriers included."""
    if idle:
        return np.zeros(hand_offs)
    found = [kernel + barrier for name, (kernel, barrier) in pool.op_seconds().items() if name.endswith("experts")]
    assert len(found) == hand_offs
    return np.array(found)


def legs_of(
    pool: CardPool,
    tokens: NDArray[np.int64],
    depth: int,
    rows: int,
    expected: Prediction,
    layers: Sequence[int],
    idle: bool,
) -> str:
    pool.step(rows_of(tokens[:depth], out="last"))
    pool.step_legs()
    before = host_seconds(pool, len(layers), idle)
    steps = len(run_steps(pool, tokens, depth, rows))
    legs = pool.step_legs()
    if not layers:
        return f"card {1e-6 * float(np.mean([step.card_ns for step in legs])):.3f} ms"
    host = (host_seconds(pool, len(layers), idle) - before) / steps
    found = leg_figures(legs, host.tolist())
    trip, far = 1e6 * np.quantile(found.round_trips, (0.5, 0.99))
    wait, long = 1e6 * np.quantile(found.waits, (0.5, 0.99))
    made = np.array([np.count_nonzero(step.hand_offs[:, SENT]) for step in legs])
    own = np.array([step.card_ns - waited(step) for step in legs])
    each, none = np.polyfit(made, own, 1) if made.min() < made.max() else (0.0, float(own.mean()))
    rate = f" ({expected.host_bytes / max(found.host, 1e-9) / 1e9:.1f} GB/s)" if rows == 1 else ""
    return (
        f"card {1e3 * found.card:.3f} ms, wait {1e3 * found.wait:.3f}, host {1e3 * found.host:.3f}{rate};"
        f" exchange {trip:.1f} us p50, {far:.1f} p99;"
        f" wait {wait:.1f} us p50, {long:.1f} p99; bound of these legs {1e3 * found.bound:.3f} ms;"
        f" {made.mean():.2f} hand-offs made a step; card alone {1e-6 * none:.3f} ms, {1e-3 * each:.1f} us for each made"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--synthetic", default="qwen3-30b-a3b", help="whose shapes, without a file")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--mix", default="Q4_K_M")
    parser.add_argument("--experts", type=int, default=0, help="experts a layer (default: as bloomery-bench)")
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 3))
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=1, help="tokens in a step, 1 to 8 (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="in which the steps are run (default 5)")
    parser.add_argument("--own-weights", action="store_true", help="ranks copy their rows, as with --host-weights copy")
    parser.add_argument("--idle-host", action="store_true", help="ranks answer at once: the cost of hand-offs alone")
    parser.add_argument("--only", help="names of placements, with commas between")
    arguments = parser.parse_args()
    file = arguments.file or synthetic_file(arguments.synthetic, arguments.layers, arguments.mix, arguments.experts)
    program = build_program(ModelFile.open(file))
    with ReadCeiling(arguments.processes) as ceiling:
        host = ceiling.measure().bytes_per_second
    speed = Bandwidth(host, probe_cards()[0].read)
    print(
        f"{file.name}: host reads {speed.host / 1e9:.1f} GB/s with {arguments.processes} processes, card"
        f" {speed.card / 1e9:.0f} GB/s"
    )
    rows, rounds = arguments.rows, arguments.rounds
    each = arguments.steps * rows // rounds
    tokens = np.random.default_rng(1).integers(1, 1000, arguments.depth + rounds * each)
    wanted = arguments.only.split(",") if arguments.only else None

    def started(tiers: ExpertTiers, timed: bool) -> CardPool:
        begun = time.perf_counter()
        sizes = {"context": max(1024, len(tokens)), "slots": 2, "prompt_block": 64, "processes": arguments.processes}
        sizes |= {"own_weights": arguments.own_weights}
        if arguments.idle_host:
            sizes |= {"host_workload": "idle_experts:load"}
        some = tiers if tiers.host_layers else None
        pool = CardPool.start(str(file), program, tiers=some, time_legs=timed, **sizes)
        print(f"{'':16} started in {time.perf_counter() - begun:.1f} s", flush=True)
        return pool

    everything, *others = [item for item in placements(program).items() if not wanted or item[0] in wanted]
    with contextlib.closing(started(everything[1], False)) as whole:
        for name, tiers in others:
            with contextlib.closing(started(tiers, False)) as pool:
                found = in_turns((whole, pool), tokens, arguments.depth, rows, each, rounds)
            layers = len(tiers.host_layers) or 1
            more, mean, _ = map(with_quartiles, 1e6 / layers * (found[:, 1] - found[:, 0]))
            median = 1e3 * np.median(found[0], axis=1)
            expected = predict(program, tiers, speed, position=arguments.depth, cache_bytes=2)
            assert expected is not None
            seen = f", predicted {1e3 * expected.seconds:.3f}, bound {1e3 * expected.bound_seconds:.3f}"
            print(
                f"{name:16} {median[1]:7.3f} ms a step{seen if rows == 1 else ''}; {everything[0]} {median[0]:.3f};"
                f" {more} us a layer more by medians, {mean} by means",
                flush=True,
            )
    with contextlib.closing(started(everything[1], True)) as whole:
        for name, tiers in (everything, *others):
            expected = predict(program, tiers, speed, position=arguments.depth, cache_bytes=2)
            assert expected is not None
            with (
                contextlib.closing(started(tiers, True)) if tiers.host_layers else contextlib.nullcontext(whole) as pool
            ):
                own = ""
                if layers := len(tiers.host_layers):
                    found = in_turns((whole, pool), tokens, arguments.depth, rows, each, rounds)[2]
                    own = (
                        f"; the card's own time {with_quartiles(1e6 / layers * (found[1] - found[0]))} us a layer more"
                    )
                hosts, idle = tiers.host_layers, arguments.idle_host
                legs = legs_of(pool, tokens, arguments.depth, rows, expected, hosts, idle)
                print(f"{name:16} {legs}{own}", flush=True)


if __name__ == "__main__":
    main()
