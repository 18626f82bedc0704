"""Metrics of several replicas as one text, without Ray.

Planted once and seen to fail: counters of a replica that is gone dropped from the sums; averages summed; labels of a
metric's own lost.
"""

from __future__ import annotations

import pytest

from bloomery.launcher.http.metrics import Rates, metrics_text
from bloomery.launcher.ray_metrics import SILENT_SECONDS, Figures, read

FIRST = {"prompt_tokens": 10, "steps": 4, "sequences": 4, "running": 1, "longest": 30, "requests": {"stop": 2}}
SECOND = {"prompt_tokens": 5, "steps": 2, "sequences": 6, "running": 2, "longest": 20, "requests": {"stop": 1, "x": 4}}


def text_of(values: dict[str, object]) -> str:
    return metrics_text(values, 0, Rates())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def samples(text: str) -> dict[str, float]:
    return {name + labels: value for (name, labels), value in read(text, 0).samples.items()}


def test_sums_means_and_greatest() -> None:
    figures = Figures(Clock())
    figures.report("a", text_of(FIRST))
    figures.report("b", text_of(SECOND))
    found = samples(figures.summed())
    assert found["llamacpp:prompt_tokens_total"] == 15 and found["llamacpp:requests_processing"] == 3
    assert found["llamacpp:n_tokens_max"] == 30 and found["llamacpp:n_busy_slots_per_decode"] == 2
    assert found['bloomery_requests_total{outcome="stop"}'] == 3 and found['bloomery_requests_total{outcome="x"}'] == 4
    assert found["bloomery_replicas"] == 2
    alone = Figures(Clock())
    alone.report("a", text_of(FIRST))
    assert samples(alone.summed()) == samples(text_of(FIRST)) | {"bloomery_replicas": 1}


def test_labels() -> None:
    figures = Figures(Clock())
    figures.report("b", text_of(SECOND))
    figures.report("a", text_of(FIRST))
    text = figures.labelled()
    found = samples(text)
    assert found['llamacpp:prompt_tokens_total{replica="a"}'] == 10
    assert found['bloomery_requests_total{replica="b",outcome="x"}'] == 4
    assert text.count("# TYPE llamacpp:prompt_tokens_total") == 1
    assert len(found) == len(samples(text_of(FIRST))) + len(samples(text_of(SECOND))) + 1


def test_sums_never_fall_when_a_replica_goes() -> None:
    clock = Clock()
    figures = Figures(clock)
    figures.report("a", text_of(FIRST))
    figures.report("b", text_of(SECOND))
    clock.now = SILENT_SECONDS + 1
    figures.report("b", text_of(SECOND | {"prompt_tokens": 7, "running": 0}))
    found = samples(figures.summed())
    assert found["llamacpp:prompt_tokens_total"] == 17 and found["bloomery_replicas"] == 1
    assert found["llamacpp:requests_processing"] == 0 and found["llamacpp:n_tokens_max"] == 30
    assert found["llamacpp:n_busy_slots_per_decode"] == 3, "of those that are there"
    assert 'replica="a"' not in figures.labelled()
    figures.report("a2", text_of(FIRST))
    assert samples(figures.summed())["llamacpp:prompt_tokens_total"] == 27


def test_nobody_there() -> None:
    assert samples(Figures().summed()) == samples(Figures().labelled()) == {"bloomery_replicas": 0}
    with pytest.raises(ValueError):
        read("no number here x", 0)
