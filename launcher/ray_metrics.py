"""The metrics of many replicas as one Prometheus text: summed up, or each under its own label.

Owns what their counters mean together, also those of replicas that are gone. Knows neither Ray nor HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SILENT_SECONDS = 15.0
"""After so long without a word a replica counts as gone."""
GREATEST = frozenset({"llamacpp:n_tokens_max"})
"""Counters of which the greatest counts."""
MEANS = frozenset({"llamacpp:n_busy_slots_per_decode"})
"""Gauges that are averages."""

Sample = tuple[str, str]
"""Name and labels as they are written: `name`, `{outcome="stop"}` or ""."""


@dataclass
class Report:
    """What a replica last said. `kinds` are the types of its metrics, `heads` their HELP and TYPE lines."""

    heard: float
    heads: dict[str, list[str]]
    kinds: dict[str, str]
    samples: dict[Sample, float]


class Figures:
    """Reports of replicas by name. Counters of those that are gone stay in the sums, so that these never fall."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._reports: dict[str, Report] = {}
        self._gone = Report(0.0, {}, {}, {})

    def report(self, replica: str, text: str) -> None:
        """`text` is the /metrics of a replica, all of it."""
        self._reports[replica] = read(text, self._now())

    def summed(self) -> str:
        """One sample for each of the replicas' metrics: counters of all there ever were, gauges of those there are."""
        live = self._live()
        sums: dict[Sample, list[float]] = {}
        for report in (self._gone, *live.values()):
            for sample, value in report.samples.items():
                sums.setdefault(sample, []).append(value)
        every = [self._gone, *live.values()]
        return _written(every, {sample: _together(sample[0], values) for sample, values in sums.items()}, len(live))

    def labelled(self) -> str:
        """The samples of each replica that is there, with a label `replica` before its own."""
        live = self._live()
        samples = {
            (name, f'{{replica="{replica}"{"," + labels[1:-1] if labels else ""}}}'): value
            for replica, report in sorted(live.items())
            for (name, labels), value in report.samples.items()
        }
        return _written(list(live.values()), samples, len(live))

    def _live(self) -> dict[str, Report]:
        for replica, report in list(self._reports.items()):
            if self._now() - report.heard > SILENT_SECONDS:
                self._bury(self._reports.pop(replica))
        return self._reports

    def _bury(self, report: Report) -> None:
        gone = self._gone
        gone.heads |= report.heads
        gone.kinds |= report.kinds
        for sample, value in report.samples.items():
            if report.kinds.get(sample[0]) == "counter":
                gone.samples[sample] = _together(sample[0], [gone.samples.get(sample, 0.0), value])


def read(text: str, heard: float) -> Report:
    """A Prometheus text taken apart."""
    report = Report(heard, {}, {}, {})
    for line in text.splitlines():
        if line.startswith("# "):
            _, kind, name, rest = line.split(" ", 3)
            report.heads.setdefault(name, []).append(line)
            if kind == "TYPE":
                report.kinds[name] = rest
        elif line:
            name_and_labels, value = line.rsplit(" ", 1)
            name, brace, labels = name_and_labels.partition("{")
            report.samples[name, brace + labels] = float(value)
    return report


def _together(name: str, values: list[float]) -> float:
    if name in GREATEST:
        return max(values)
    return sum(values) / len(values) if name in MEANS else sum(values)


def _written(reports: Iterable[Report], samples: dict[Sample, float], replicas: int) -> str:
    heads: dict[str, list[str]] = {}
    for report in reports:
        heads |= report.heads
    lines = [
        "# HELP bloomery_replicas Replicas that have reported lately.",
        "# TYPE bloomery_replicas gauge",
        f"bloomery_replicas {replicas}",
    ]
    for name, head in heads.items():
        found = [(labels, value) for (other, labels), value in samples.items() if other == name]
        if found:
            lines += head + [f"{name}{labels} {value:.10g}" for labels, value in found]
    return "\n".join(lines) + "\n"
