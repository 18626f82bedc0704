"""Rounds of a benchmark and the rows that come of them: ours, the peer's and the read ceiling take turns.

Owns the order of measuring and every figure of a row. Does not know how rows look.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bloomery.launcher.bench_card import card_figures
from bloomery.launcher.bench_engine import BenchEngine, EngineRun
from bloomery.launcher.bench_llama import LlamaBench
from bloomery.launcher.bench_parts import WHOLE, Variant, part_rows
from bloomery.launcher.bench_peer import LlamaPeer, PeerRun
from bloomery.launcher.bench_trial import TokenSource, Trial, paired_ratios, summary
from bloomery.runtime.bandwidth_probe import ReadCeiling, ReadRate
from bloomery.runtime.placement import Plan
from bloomery.runtime.program import Program
from bloomery.runtime.shallow_steps import may_be_shallow, shallow_program, shallow_reach
from bloomery.runtime.step_work import EXPERTS, Work, step_work
from bloomery.runtime.worker_group import Progress

GIGA: Final = 1e9
NO_STAGE: Final = "no stage"
PAUSE_SECONDS: Final = 0.02  # between sides: until the other's workers have stopped spinning
PEER_FIGURES: Final = (
    "against",
    "against_tokens_per_s",
    "against_spread",
    "against_samples",
    "ratio",
    "ratio_spread",
    "against_cpu_tokens_per_s",
    "cpu_ratio",
    "cpu_ratio_spread",
)
"""Null without a peer; those of CPU time also with several threads."""
CACHE_BYTES: Final = {"f16": 2.0, "f32": 4.0, "q8_0": 34 / 32}


@dataclass
class Rounds:
    """The measurements of one trial, one entry a round; the peers' by their names."""

    ours: list[EngineRun] = field(default_factory=list)
    theirs: dict[str, list[PeerRun]] = field(default_factory=dict)
    ceilings: list[ReadRate] = field(default_factory=list)
    variants: Sequence[Variant] = ()


def run_trial(
    trial: Trial,
    repeats: int,
    engine: BenchEngine,
    peers: Sequence[LlamaPeer],
    ceiling: ReadCeiling | None,
    source: TokenSource,
    progress: Progress,
    variants: Sequence[Variant] = (),
) -> Rounds:
    """`repeats` rounds after one that only warms up. In each, ours runs first and the peers get the same tokens: the
    prompt, or the tokens that ours has generated. Smaller files (`bench_parts`) follow in the same round."""
    rounds = Rounds(variants=variants)
    prefix = source.prefix(trial.depth)
    for peer in peers:
        peer.fill(prefix)
    for number in range(repeats + 1):
        engine.fill(prefix)  # in every round: not all states can be taken back by as much as a trial adds
        fresh = source.fresh(trial.count if trial.kind == "pp" else 1)
        time.sleep(PAUSE_SECONDS)
        ours = engine.run(trial, prefix, fresh)
        theirs = {}
        for peer in peers:
            time.sleep(PAUSE_SECONDS)
            theirs[peer.name] = peer.run(trial, fresh if trial.kind == "pp" else fresh + ours.tokens[:-1])
        for variant in variants:
            run_variant(variant, trial, fresh, keep=number > 0)
        rate = _ceiling_of(ceiling)
        if number:
            rounds.ours.append(ours)
            rounds.ceilings += rate
            for name, run in theirs.items():
                rounds.theirs.setdefault(name, []).append(run)
        progress(f"{trial.name} at depth {trial.depth}", number + 1, repeats + 1)
    return rounds


def run_variant(variant: Variant, trial: Trial, fresh: tuple[int, ...], keep: bool) -> None:
    """One round of a smaller file, on both sides. Its cache is empty before."""
    time.sleep(PAUSE_SECONDS)
    ours = variant.engine.run(trial, (), fresh)
    if keep:
        variant.ours.append(ours.seconds)
    if variant.peer:
        time.sleep(PAUSE_SECONDS)
        theirs = variant.peer.run(trial, fresh + ours.tokens[:-1])
        if keep:
            variant.theirs.append(theirs.seconds)


def run_rounds(
    trials: Sequence[Trial],
    repeats: int,
    engine: BenchEngine,
    peer: LlamaBench,
    ceiling: ReadCeiling | None,
    source: TokenSource,
    progress: Progress,
) -> dict[Trial, Rounds]:
    """As `run_trial` for a peer that runs all trials at a time: in each round ours runs all of them, then the peer."""
    found = {trial: Rounds() for trial in trials}
    for number in range(repeats + 1):
        for trial in trials:
            prefix = source.prefix(trial.depth)
            engine.fill(prefix)
            time.sleep(PAUSE_SECONDS)
            ours = engine.run(trial, prefix, source.fresh(trial.count if trial.kind == "pp" else 1))
            rate = _ceiling_of(ceiling)
            if number:
                found[trial].ours.append(ours)
                found[trial].ceilings += rate
        theirs = peer.run(trials)
        for trial, run in theirs.items() if number else ():
            if trial in found:
                found[trial].theirs.setdefault(peer.name, []).append(run)
        progress("rounds", number + 1, repeats + 1)
    return found


def _ceiling_of(ceiling: ReadCeiling | None) -> list[ReadRate]:
    """The read ceiling measured once, after a pause; nothing where the host reads nothing that counts."""
    if ceiling is None:
        return []
    time.sleep(PAUSE_SECONDS)
    return [ceiling.measure()]


def row_of(
    trial: Trial,
    threads: int,
    rounds: Rounds,
    program: Program,
    block: int,
    cache_type: str,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """The figures of one trial; see docs/performance.md for what each means. `plan` is one with a card, if any."""
    rates = [trial.count / run.seconds for run in rounds.ours]
    rate = summary(rates)
    seconds = statistics.median(run.seconds for run in rounds.ours)
    step_seconds = statistics.median(run.step_seconds for run in rounds.ours)
    steps = rounds.ours[0].steps
    work = trial_work(program, trial, block, CACHE_BYTES[cache_type], rounds.ours[0].shallow)
    nbytes = sum(kind.read for kind in work.values())
    cache_bytes = CACHE_BYTES[cache_type]
    found = [rate.bytes_per_second for rate in rounds.ceilings]
    ceiling, on_host = max(found, default=0.0), plan is None
    row: dict[str, Any] = {
        "test": trial.name,
        "depth": trial.depth,
        "threads": threads,
        "tokens_per_s": rate.median,
        "spread": rate.spread,
        "samples": rates,
        "cpu_tokens_per_s": statistics.median(_cpu_rates(trial, rounds.ours)) if threads == 1 and on_host else None,
        **comparison(trial, threads, rounds),
        **card_figures(trial, rounds.ours, work, program, plan, ceiling, cache_bytes),
    }
    return row | {
        "read_gbps": nbytes / seconds / GIGA,
        "ceiling_gbps": ceiling / GIGA if found else None,
        "ceiling_share": nbytes / seconds / ceiling if on_host else None,
        "ceiling_median_gbps": statistics.median(found) / GIGA if found else None,
        "quiet_share": _quiet_share(rounds.ours, threads) if on_host else None,
        "steps": steps,
        "bytes_per_step": round(nbytes / steps),
        "dense_bytes": round(sum(kind.weights for name, kind in work.items() if name != EXPERTS) / steps),
        "expert_bytes": round(work.get(EXPERTS, Work()).weights / steps),
        "cache_bytes": round(sum(kind.cache for kind in work.values()) / steps),
        "bound_tokens_per_s": trial.count * ceiling / nbytes if on_host else None,
        "coordinator_us": 1e6 * (seconds - step_seconds) / steps,
        "gops": sum(kind.operations for kind in work.values()) / seconds / GIGA,
        "kinds": kind_rows(rounds.ours, work, step_seconds, steps, ceiling) if on_host else {},
        "parts": parts_of(trial, rounds, program, block, cache_type, ceiling) if rounds.variants else None,
    }


def parts_of(
    trial: Trial, rounds: Rounds, program: Program, block: int, cache_type: str, ceiling: float
) -> dict[str, dict[str, Any]]:
    """`part_rows` of these rounds."""
    programs = {WHOLE: program, **{variant.name: variant.engine.program for variant in rounds.variants}}

    def bytes_of(name: str) -> dict[str, float]:
        work = trial_work(programs[name], trial, block, CACHE_BYTES[cache_type], rounds.ours[0].shallow)
        return {kind: needed.read for kind, needed in work.items()}

    ours = [run.seconds for run in rounds.ours]
    theirs = [run.seconds for runs in rounds.theirs.values() for run in runs]
    return part_rows(trial, ours, theirs, rounds.variants, bytes_of, ceiling)


def _quiet_share(runs: Sequence[EngineRun], threads: int) -> float:
    """The part of the time in which the workers had their CPUs."""
    return min(1.0, statistics.median(run.cpu_seconds / run.seconds for run in runs) / threads)


def comparison(trial: Trial, threads: int, rounds: Rounds) -> dict[str, Any]:
    """Figures of the fastest peer, and those of each. CPU time, which other programs disturb much less than time on the
    wall, is compared for one thread only: more spend some of it on waiting for each other."""
    rates = [trial.count / run.seconds for run in rounds.ours]
    peers: list[dict[str, Any]] = []
    for name, runs in rounds.theirs.items():
        their_rates = [trial.count / run.seconds for run in runs]
        theirs, ratio = summary(their_rates), summary(list(paired_ratios(rates, their_rates)))
        peer = {"against": name, "against_tokens_per_s": theirs.median, "against_spread": theirs.spread}
        peer |= {"against_samples": their_rates, "ratio": ratio.median, "ratio_spread": ratio.spread}
        if _by_cpu_time(threads, rounds):
            cpu = summary(list(paired_ratios(_cpu_rates(trial, rounds.ours), _cpu_rates(trial, runs))))
            peer |= {"against_cpu_tokens_per_s": statistics.median(_cpu_rates(trial, runs))}
            peer |= {"cpu_ratio": cpu.median, "cpu_ratio_spread": cpu.spread}
        peers.append(peer)
    measure = "against_cpu_tokens_per_s" if _by_cpu_time(threads, rounds) else "against_tokens_per_s"
    best = max(peers, key=lambda peer: peer[measure], default={})
    return dict.fromkeys(PEER_FIGURES) | best | {"peers": peers}


def _by_cpu_time(threads: int, rounds: Rounds) -> bool:
    on_card = any(run.card for run in rounds.ours)
    told = all(run.cpu_seconds is not None for runs in rounds.theirs.values() for run in runs)
    return threads == 1 and told and not on_card


def _cpu_rates(trial: Trial, runs: Sequence[EngineRun] | Sequence[PeerRun]) -> list[float]:
    return [trial.count / run.cpu_seconds for run in runs if run.cpu_seconds is not None]


def kind_rows(
    runs: Sequence[EngineRun], work: dict[str, Work], step_seconds: float, steps: int, ceiling: float
) -> dict[str, dict[str, float]]:
    """For each kind of op, longest first: its share of the steps' time, seconds a step (kernels, barriers included),
    the part of these at barriers, bytes a step, GB/s and their share of the ceiling, 10^9 operations a second; medians
    of the runs. Last comes what of a step is in no stage: waking the workers, their reports."""
    spent = {
        kind: [statistics.median(run.kinds[kind][part] / steps for run in runs) for part in (0, 1)]
        for kind in runs[0].kinds
    }
    rest = max(0.0, step_seconds / steps - sum(map(sum, spent.values())))
    total = max(sum(map(sum, spent.values())) + rest, 1e-12)
    found: dict[str, dict[str, float]] = {}
    ordered = sorted(spent.items(), key=lambda item: -sum(item[1]))
    for kind, (kernel, barrier) in [*ordered, (NO_STAGE, [rest, 0.0])]:
        seconds = kernel + barrier
        needed = work.get(kind, Work())
        nbytes = needed.read / steps
        speed = nbytes / seconds if seconds else 0.0
        found[kind] = {
            "share": seconds / total,
            "seconds": seconds,
            "barrier_seconds": barrier,
            "bytes": nbytes,
            "gbps": speed / GIGA,
            "ceiling_share": speed / ceiling,
            "gops": needed.operations / steps / seconds / GIGA if seconds else 0.0,
        }
    return found


def trial_work(
    program: Program, trial: Trial, block: int, cache_bytes: float, shallow: bool = False
) -> dict[str, Work]:
    """Bytes and operations of all steps of a trial together, by kind of op. `shallow`: the executor has shallow steps,
    which the engine then asks for."""
    found: dict[str, Work] = {}
    reach = shallow_reach(program) if shallow else 0
    part = shallow_program(program) if reach else program
    for rows, position in trial_steps(trial, block):
        left = trial.depth + trial.count - 1 - position if trial.kind == "pp" else 0
        ran = part if may_be_shallow(left, reach) else program
        for kind, needed in step_work(ran, rows, position, cache_bytes).items():
            found[kind] = found.get(kind, Work()) + needed
    return found


def trial_steps(trial: Trial, block: int) -> Iterator[tuple[int, int]]:
    """Rows and last position of each step: a prompt in blocks, or one row after the other."""
    size = block if trial.kind == "pp" else 1
    for first in range(0, trial.count, size):
        rows = min(size, trial.count - first)
        yield rows, trial.depth + first + rows - 1
