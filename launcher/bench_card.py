"""What a benchmark says of steps on a card: what each leg took, what hand-offs cost, and what no overlap could beat.

Owns those figures and their names. Measuring is `bench_engine`'s, conclusions from times are `leg_times`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from bloomery.launcher.bench_engine import EngineRun
from bloomery.launcher.bench_trial import Trial
from bloomery.runtime.leg_times import StepLegs, leg_figures
from bloomery.runtime.placement import Plan
from bloomery.runtime.program import Program
from bloomery.runtime.step_prediction import Bandwidth, predict
from bloomery.runtime.step_work import EXPERTS, Work

MILLI: Final = 1e3
MICRO: Final = 1e6
GIGA: Final = 1e9
CARD_FIGURES: Final = (
    "step_ms",
    "card_leg_ms",
    "host_leg_ms",
    "card_wait_ms",
    "host_wait_ms",
    "hand_offs",
    "hand_offs_made",
    "hand_off_us_p50",
    "hand_off_us_p99",
    "hand_off_wait_us_p50",
    "hand_off_wait_us_p99",
    "overlap_bound_ms",
    "of_overlap_bound",
    "predicted_ms",
    "predicted_bound_ms",
    "card_bytes_per_step",
    "card_gbps",
    "copy_gbps",
    "copy_share",
    "streamed_bytes_per_block",
    "link_gbps",
    "link_peak_gbps",
    "link_share",
    "experts_from",
)
"""Null without a card; those of the host and of hand-offs also where every expert lies on the card."""


def plan_facts(plan: Plan | None, card_memory: int, step_ahead: int) -> dict[str, Any]:
    """The conditions that the plan adds to every row. `step_ahead` is what was asked for."""
    if plan is None or plan.card is None or plan.tiers is None:
        return {"plan": "cpu", "plan_note": plan.note if plan else "", "card": None, "expert_share_on_card": None}
    return {
        "plan": plan.name,
        "plan_note": "",
        "card": plan.card.name,
        "card_memory": card_memory or None,
        "expert_share_on_card": plan.tiers.share,
        "prompt_block": plan.prompt_block,
        "executor": "card",
        "step_ahead": step_ahead,
    }


def card_figures(
    trial: Trial,
    runs: Sequence[EngineRun],
    work: Mapping[str, Work],
    program: Program,
    plan: Plan | None,
    host_read: float,
    cache_bytes: float,
) -> dict[str, Any]:
    """The figures of one trial. `work` is that of all its steps, `host_read` what the host's cores read together, in
    bytes a second (0: not measured). Steps of which the card told nothing are left out."""
    found: dict[str, Any] = dict.fromkeys(CARD_FIGURES)
    if plan is None or plan.card is None or plan.tiers is None:
        return found
    steps = runs[0].steps
    found["step_ms"] = MILLI * statistics.median(run.step_seconds / run.steps for run in runs)
    found["card_bytes_per_step"] = on_card = round(card_bytes(work, plan) / steps)
    told = [step for run in runs if run.card for step in run.card.legs]
    legs = [step for step in told if not step.link_bytes]
    if streamed := [step for step in told if step.link_bytes]:
        found |= _link_figures(streamed, plan)
        found["experts_from"] = next(run.card.experts_from for run in runs if run.card)
    if legs and not streamed:
        found |= _leg_figures(runs, legs)
        found["card_gbps"] = on_card / (found["card_leg_ms"] / MILLI) / GIGA
        if plan.card.read:
            found["copy_gbps"] = plan.card.read / GIGA
            found["copy_share"] = found["card_gbps"] / found["copy_gbps"]
        found["of_overlap_bound"] = found["step_ms"] / found["overlap_bound_ms"]
    if trial.kind == "tg":
        speed, middle = Bandwidth(host_read, plan.card.read), trial.depth + trial.count // 2
        expected = predict(program, plan.tiers, speed, position=middle, cache_bytes=round(cache_bytes))
        if expected is not None:
            found["predicted_ms"] = MILLI * expected.seconds
            found["predicted_bound_ms"] = MILLI * expected.bound_seconds
    return found


def card_bytes(work: Mapping[str, Work], plan: Plan) -> float:
    """What the card reads: everything but the experts on the host, as if the router chose evenly."""
    assert plan.tiers is not None
    experts = work[EXPERTS].read if EXPERTS in work else 0.0
    total = sum(layer.nbytes * layer.experts for layer in plan.tiers.layers)
    share = plan.tiers.card_bytes / total if total else 1.0
    return sum(kind.read for kind in work.values()) - experts * (1.0 - share)


def _link_figures(streamed: Sequence[StepLegs], plan: Plan) -> dict[str, Any]:
    """Of blocks of a prompt to which experts came."""
    assert plan.card is not None
    nbytes, seconds = sum(step.link_bytes for step in streamed), sum(step.link_ns for step in streamed) / 1e9
    found: dict[str, Any] = {
        "card_leg_ms": MILLI * statistics.mean(step.card_ns for step in streamed) / 1e9,
        "streamed_bytes_per_block": round(nbytes / len(streamed)),
        "link_gbps": nbytes / max(seconds, 1e-9) / GIGA,
    }
    if plan.card.link:
        found["link_peak_gbps"] = plan.card.link / GIGA
        found["link_share"] = found["link_gbps"] / found["link_peak_gbps"]
    return found


def _leg_figures(runs: Sequence[EngineRun], legs: Sequence[Any]) -> dict[str, Any]:
    counted = [run.card for run in runs if run.card]
    steps = sum(run.steps for run in runs)
    host = [sum(each) / steps for each in zip(*(card.host_seconds for card in counted), strict=True)]
    figures = leg_figures(legs, host)
    found = {"card_leg_ms": MILLI * figures.card, "overlap_bound_ms": MILLI * figures.bound, "hand_offs": len(host)}
    if host:
        found |= {
            "hand_offs_made": len(figures.waits) / len(legs),
            "host_leg_ms": MILLI * figures.host,
            "card_wait_ms": MILLI * figures.wait,
            "host_wait_ms": MILLI * sum(card.host_wait_seconds for card in counted) / steps,
        }
    if len(figures.waits):
        middle, far = np.quantile(figures.round_trips, (0.5, 0.99))
        idle, long = np.quantile(figures.waits, (0.5, 0.99))
        found |= {
            "hand_off_us_p50": MICRO * float(middle),
            "hand_off_us_p99": MICRO * float(far),
            "hand_off_wait_us_p50": MICRO * float(idle),
            "hand_off_wait_us_p99": MICRO * float(long),
        }
    return found
