"""Prometheus text: the daemon's counters under llama-server's names, and more under our own.

Owns names, help texts and the windows of the two rates. It does not know where the numbers are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Rates:
    """Rates since the last time that they were asked for: (tokens, seconds) at that time."""

    prompt: tuple[float, float] = (0.0, 0.0)
    predicted: tuple[float, float] = (0.0, 0.0)


def metrics_text(values: dict[str, Any], longest: int, rates: Rates) -> str:
    """`values` is what the control socket's `metrics` returns; `longest` the longest sequence seen."""
    prompt = float(values.get("prompt_tokens", 0)), float(values.get("prompt_seconds", 0))
    predicted = float(values.get("generated_tokens", 0)), float(values.get("generate_seconds", 0))
    prompt_rate, rates.prompt = _rate(prompt, rates.prompt), prompt
    predicted_rate, rates.predicted = _rate(predicted, rates.predicted), predicted
    steps = values.get("steps", 0)
    resident = values.get("resident_bytes", 0) >> 20 << 20
    counters = (
        ("prompt_tokens_total", "Prompt tokens processed, without those taken from the cache.", prompt[0]),
        ("prompt_tokens_cached_total", "Prompt tokens taken from the cache.", values.get("cached_tokens", 0)),
        ("prompt_seconds_total", "Seconds spent on steps with prompt tokens.", prompt[1]),
        ("tokens_predicted_total", "Tokens generated.", predicted[0]),
        ("tokens_predicted_seconds_total", "Seconds spent on steps that only generate.", predicted[1]),
        ("n_decode_total", "Steps run.", steps),
        ("n_tokens_max", "Longest sequence so far, prompt and answer.", max(longest, values.get("longest", 0))),
        ("spec_decode_num_draft_tokens_total", "Tokens drafted.", values.get("draft_tokens", 0)),
        (
            "spec_decode_num_accepted_tokens_total",
            "Drafted tokens that were accepted.",
            values.get("draft_accepted", 0),
        ),
        ("spec_decode_num_drafts_total", "Steps that checked a draft.", values.get("draft_steps", 0)),
    )
    gauges = (
        ("prompt_tokens_seconds", "Prompt tokens a second since the last scrape.", prompt_rate),
        ("predicted_tokens_seconds", "Generated tokens a second since the last scrape.", predicted_rate),
        ("requests_processing", "Requests in a slot.", values.get("running", 0)),
        ("requests_deferred", "Requests that wait for a slot.", values.get("queue_depth", 0)),
        ("n_busy_slots_per_decode", "Sequences in a step, on average.", values.get("sequences", 0) / max(1, steps)),
    )
    ours: tuple[tuple[str, str, float], ...] = (
        ("cache_tokens_used", "Positions in use in the caches.", values.get("cache_tokens_used", 0)),
        ("cache_tokens_total", "Positions of the caches.", values.get("cache_tokens_total", 0)),
        ("slots", "Slots.", values.get("slots", 0)),
        ("aborted_steps_total", "Steps cut short.", values.get("aborted_steps", 0)),
        ("worker_recoveries_total", "Times that lost workers were replaced.", values.get("recoveries", 0)),
        ("daemon_resident_bytes", "Resident memory of the coordinator, whole MiB.", resident),
    )
    snapshots = values.get("snapshots", {})
    ours += (
        ("snapshots", "States of conversations without a slot, kept in memory.", snapshots.get("snapshots", 0)),
        ("snapshot_bytes", "Memory that they take.", snapshots.get("bytes", 0)),
        ("snapshot_limit_bytes", "Memory that they may take.", snapshots.get("limit_bytes", 0)),
        ("snapshot_hits_total", "Requests that went on from one.", snapshots.get("hits", 0)),
        ("snapshot_tokens_total", "Prompt tokens brought back from them.", snapshots.get("restored_tokens", 0)),
        ("snapshots_stored_total", "Conversations whose states were kept.", snapshots.get("stored", 0)),
        ("snapshots_dropped_total", "Snapshots dropped to make room.", snapshots.get("dropped", 0)),
        ("snapshots_refused_total", "Conversations for which there was no room.", snapshots.get("refused", 0)),
    )
    lines: list[str] = []
    for kind, entries in (("counter", counters), ("gauge", gauges)):
        for name, help_text, value in entries:
            _add(lines, f"llamacpp:{name}", kind, help_text, value)
    for name, help_text, value in ours:
        _add(lines, f"bloomery_{name}", "counter" if name.endswith("_total") else "gauge", help_text, value)
    places = values.get("draft_accepted_at", ())
    if places:
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f"# HELP {name} Accepted tokens by their place in the draft.", f"# TYPE {name} counter"]
        lines += [f'{name}{{position="{place}"}} {count}' for place, count in enumerate(places)]
    outcomes = values.get("requests", {})
    lines += ["# HELP bloomery_requests_total Requests by how they ended.", "# TYPE bloomery_requests_total counter"]
    lines += [f'bloomery_requests_total{{outcome="{name}"}} {count}' for name, count in sorted(outcomes.items())]
    return "\n".join(lines) + "\n"


def _rate(now: tuple[float, float], before: tuple[float, float]) -> float:
    tokens, seconds = now[0] - before[0], now[1] - before[1]
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0


def _add(lines: list[str], name: str, kind: str, help_text: str, value: float) -> None:
    lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {value:.10g}"]
