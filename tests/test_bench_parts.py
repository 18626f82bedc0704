"""Head, experts and the rest of a token, told apart by differences between files: the sums over made-up times."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.launcher import bench_report
from bloomery.launcher.bench import build_parser, check
from bloomery.launcher.bench_parts import (
    FEWER_EXPERTS,
    FEWER_LAYERS,
    REST,
    WHOLE,
    Shape,
    Variant,
    part_rows,
    part_seconds,
    smaller_shapes,
)
from bloomery.launcher.bench_trial import Trial
from bloomery.launcher.command_line import UsageError
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.step_work import EXPERTS, HEAD
from bloomery.runtime.synthetic_templates import synthetic_draft

# Bytes of three files. Layers differ in their types, so that two of five are not two fifths.
BYTES: dict[str, Mapping[str, float]] = {
    WHOLE: {HEAD: 100.0, EXPERTS: 80.0, "attention weights": 50.0, "router": 5.0},
    FEWER_EXPERTS: {HEAD: 100.0, EXPERTS: 40.0, "attention weights": 50.0, "router": 5.0},
    FEWER_LAYERS: {HEAD: 100.0, EXPERTS: 36.0, "attention weights": 24.0, "router": 2.0},
}


def seconds_of(name: str, rate: float, head: float, fixed: float) -> float:
    """With layers that are read at one rate, the head at another, and something that takes the same always."""
    layers = sum(BYTES[name].values()) - BYTES[name][HEAD]
    return layers / rate + BYTES[name][HEAD] / head + fixed


def test_parts_come_back_out_of_the_times_of_whole_files() -> None:
    found = part_seconds({name: seconds_of(name, 10.0, 20.0, 0.5) for name in BYTES}, BYTES)
    assert found == pytest.approx({HEAD: 5.5, EXPERTS: 8.0, REST: 5.5})


def test_a_dense_model_has_head_and_layers() -> None:
    dense = {name: {kind: n for kind, n in kinds.items() if kind != EXPERTS} for name, kinds in BYTES.items()}
    seconds = {WHOLE: 5.0 + 5.5, FEWER_LAYERS: 5.0 + 2.6}
    assert part_seconds(seconds, dense) == pytest.approx({HEAD: 5.0, REST: 5.5})


def test_rows_have_both_sides_and_ratios_of_the_same_round() -> None:
    trial = Trial("tg", 2, 0)
    engine: Any = SimpleNamespace()
    variants = [Variant(name, engine, None) for name in (FEWER_EXPERTS, FEWER_LAYERS)]
    ours, theirs = [], []
    for rate in (10.0, 8.0, 5.0):  # of three rounds; the other side takes twice as long in each
        ours.append(seconds_of(WHOLE, rate, 20.0, 0.0))
        theirs.append(2 * ours[-1])
        for variant in variants:
            variant.ours.append(seconds_of(variant.name, rate, 20.0, 0.0))
            variant.theirs.append(2 * variant.ours[-1])
    rows = part_rows(trial, ours, theirs, variants, BYTES.__getitem__, ceiling=10.0)
    assert rows[EXPERTS]["bytes"] == 40.0 and rows[EXPERTS]["seconds"] == pytest.approx(5.0)
    assert rows[EXPERTS]["ceiling_share"] == pytest.approx(0.8) and rows[HEAD]["ceiling_share"] == pytest.approx(2.0)
    for row in rows.values():
        assert row["ratio"] == pytest.approx(2.0) and row["ratio_spread"] == pytest.approx(0.0)
        assert row["against_seconds"] == pytest.approx(2 * row["seconds"])
    headings, body = bench_report._part_table({"parts": rows})
    assert headings[0] == "part" and "ratio" in headings and [cells[0] for cells in body] == [HEAD, EXPERTS, REST]
    alone = part_rows(trial, ours, [], variants, BYTES.__getitem__, ceiling=10.0)
    assert "ratio" not in alone[HEAD] and "ratio" not in bench_report._part_table({"parts": alone})[0]


def test_the_smaller_files_differ_in_one_thing() -> None:
    assert smaller_shapes("qwen3-30b-a3b", 5) == {FEWER_EXPERTS: Shape(5, 4), FEWER_LAYERS: Shape(2, 8)}
    assert smaller_shapes("deepseek-v2-lite", 0) == {FEWER_EXPERTS: Shape(27, 3), FEWER_LAYERS: Shape(26, 6)}
    assert set(smaller_shapes("llama-1b", 0)) == {FEWER_LAYERS}
    with pytest.raises(BloomeryError, match="no file with fewer"):
        smaller_shapes("qwen3-30b-a3b", 1)
    whole, fewer = (synthetic_draft("qwen3-30b-a3b", 2, used=used) for used in (0, 4))
    assert whole.tensors == fewer.tensors
    differing = {key for key in whole.keys if whole.keys[key] != fewer.keys[key]}
    assert differing == {"qwen3moe.expert_used_count"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parts"], "compares synthetic files"),
        (["--parts", "--synthetic", "llama-1b"], "generation at depth 0"),
        (["--parts", "--synthetic", "llama-1b", "-p", "0", "-d", "0,64"], "generation at depth 0"),
        (
            ["--parts", "--synthetic", "llama-1b", "-p", "0", "--against", "llama.cpp", "--repack", "on,off"],
            "three files",
        ),
    ],
)
def test_parts_are_refused_where_they_say_nothing(options: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(build_parser().parse_args(options))
    check(build_parser().parse_args(["--parts", "--synthetic", "llama-1b", "-p", "0"]))
