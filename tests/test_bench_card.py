"""bloomery-bench with a card and with a build of llama.cpp: the whole way, with the NumPy reference in the card's place
and a program that prints llama-bench's JSON in the peer's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool_kit import left_behind, worker_environment

from bloomery.launcher import bench, bench_engine
from bloomery.launcher.bench import build_parser, check
from bloomery.launcher.bench_llama import LlamaBench, LlamaBenchOptions, parse
from bloomery.launcher.bench_trial import Trial
from bloomery.launcher.command_line import UsageError
from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime import placement
from bloomery.runtime.architectures import build_program
from bloomery.runtime.card_probe import CardRoom
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.leg_times import BEGUN, SEEN, SENT, LegWords, StepLegs, leg_bytes, leg_figures
from bloomery.runtime.memory_terms import card_plan_terms
from bloomery.runtime.model_file import ModelFile

TINY = demo_model_path("tiny-qwen3moe")
CARD = CardRoom(0, "a card of paper", "sm_90", 8 << 30, 8 << 30, 1e12)
STAND_IN = Path(__file__).with_name("stand_in_llama_bench.py")
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a llama-bench, which notes its calls in calls.jsonl."""
    program = tmp_path / "llama-bench"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("LLAMA_BENCH_LOG", str(tmp_path / "calls.jsonl"))
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The bench in this process, with a card that is played; its rows."""
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bench_engine, "CARD_WORKLOAD", "stand_in_card:load")
    monkeypatch.setattr(placement, "probe_cards", lambda: (CARD,))
    monkeypatch.setattr(placement, "may_have_card", lambda: True)

    def rows(*arguments: str) -> list[dict[str, Any]]:
        status = bench.main(["-m", str(TINY), "-r", "2", "-o", "json", *arguments])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        assert not left_behind()
        found: list[dict[str, Any]] = json.loads(captured.out)
        return found

    return rows


def half_of_the_experts() -> str:
    """--card-memory for a card that holds half of the demo model's experts."""
    with ModelFile.open(TINY) as model:
        program = build_program(model)
    config = DaemonConfig(str(TINY), plan="a", context=30, slots=1, cache_ram=0)
    half = ExpertTiers.chosen(program, ExpertTiers.everything(program).card_bytes // 2, None)
    terms = card_plan_terms(config, program, 2, 30, half, False)
    return str(sum(term.nbytes for term in terms if term.place == "card"))


def test_rows_of_a_card_with_experts_on_the_host(run: Run) -> None:
    rows = run("--plan", "a", "--card-memory", half_of_the_experts(), "-t", "2", "-p", "16", "-n", "6", "-d", "4")
    assert [(row["test"], row["depth"], row["threads"]) for row in rows] == [("pp16", 4, 2), ("tg6", 4, 2)]
    for row in rows:
        assert (row["plan"], row["card"], row["executor"]) == ("a", "a card of paper", "card")
        assert 0.3 < row["expert_share_on_card"] < 0.7
        # legs and waits of a step are parts of it, and each round trip is a leg and a wait
        assert 0 < row["hand_offs_made"] <= row["hand_offs"]
        assert row["host_leg_ms"] > 0 and row["card_wait_ms"] > 0 and row["host_wait_ms"] > 0
        assert row["card_leg_ms"] + row["card_wait_ms"] <= row["step_ms"] * 1.2
        assert row["hand_off_wait_us_p50"] <= row["hand_off_us_p50"] <= row["hand_off_us_p99"]
        assert row["hand_offs_made"] * row["hand_off_us_p50"] < 2e3 * row["step_ms"]
        assert row["overlap_bound_ms"] > 0 and row["of_overlap_bound"] == pytest.approx(
            row["step_ms"] / row["overlap_bound_ms"]
        )
        assert 0 < row["card_bytes_per_step"] < row["bytes_per_step"]
        assert row["card_gbps"] == pytest.approx(row["card_bytes_per_step"] / row["card_leg_ms"] / 1e6)
        assert (row["copy_gbps"], row["copy_share"]) == (1000.0, pytest.approx(row["card_gbps"] / 1000))
        assert row["ceiling_gbps"] > 0 and row["ceiling_share"] is None and row["kinds"] == {}
    assert rows[0]["steps"] == 2 and rows[1]["steps"] == 6, "16 rows are two groups of eight"
    assert rows[0]["predicted_ms"] is None and rows[1]["predicted_ms"] > rows[1]["predicted_bound_ms"] > 0


def test_a_row_of_a_prompt_whose_experts_come_from_the_host(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over emulated kernels: one block of 64 rows and a group of two."""
    card = replace(CARD, link=50e9)
    with ModelFile.open(TINY) as model:
        program = build_program(model)
    config = DaemonConfig(str(TINY), plan="a", context=68, slots=1, prompt_block=64, cache_ram=0)
    none = ExpertTiers.chosen(program, 0, None)
    terms = card_plan_terms(config, program, 0, 68, none, True)
    least = sum(term.nbytes for term in terms if term.place == "card")
    monkeypatch.setattr(placement, "probe_cards", lambda: (card,))
    monkeypatch.setattr(bench_engine, "CARD_WORKLOAD", "emulated_driver:load")
    sizes = ("-t", "2", "-p", "66", "-n", "0", "--prompt-block", "64", "-r", "1")  # steps of the emulator are slow
    (row,) = run("--plan", "a", "--card-memory", str(least), *sizes)
    assert row["expert_share_on_card"] == 0 and row["steps"] == 2 and row["prompt_block"] == 64
    *others, last = none.layers  # nobody wants a row of the last one's result
    assert row["streamed_bytes_per_block"] == sum(layer.nbytes * layer.experts for layer in others)
    assert row["hand_offs"] is None and last.gate.startswith("blk.3.")
    assert row["card_leg_ms"] > 0 and row["link_gbps"] > 0 and row["link_peak_gbps"] == 50
    assert row["link_share"] == pytest.approx(row["link_gbps"] / 50)
    assert row["experts_from"].startswith("out of ")


def test_rows_of_a_card_with_everything_on_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run("--plan", "auto", "-p", "0", "-n", "4")
    assert (row["plan"], row["threads"], row["expert_share_on_card"]) == ("a", 0, 1.0)
    assert row["host_leg_ms"] is None and row["hand_offs"] == 0 and row["hand_off_us_p50"] is None
    assert row["card_leg_ms"] == pytest.approx(row["overlap_bound_ms"])
    assert row["card_bytes_per_step"] == row["bytes_per_step"] and row["ceiling_gbps"] is None
    assert bench.main(["-m", str(TINY), "--plan", "a", "-r", "1", "-p", "0", "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "plan a on a card of paper, 100.0 % of the experts on it" in shown and "card leg" in shown


def test_a_build_of_llama_cpp_takes_turns(run: Run, peer: Path) -> None:
    arguments = ("--plan", "a", "-p", "8", "-n", "4", "-d", "0,6", "--against", "llama.cpp", "--peer-path", str(peer))
    rows = run(*arguments, "--peer-cpu-moe", "2", "--micro-batch", "4096")
    assert [(row["test"], row["depth"]) for row in rows] == [("pp8", 0), ("tg4", 0), ("pp8", 6), ("tg4", 6)]
    for row in rows:
        assert row["against"] == "llama.cpp 9999 (abc1234)" and row["against_system"] == "a card of paper CUDA"
        assert row["against_tokens_per_s"] == pytest.approx(1000, rel=1e-4) and row["against_spread"] < 1e-3
        ratios = [ours / theirs for ours, theirs in zip(row["samples"], row["against_samples"], strict=True)]
        assert row["ratio"] == pytest.approx(np.median(ratios)) and row["cpu_ratio"] is None
    calls = [json.loads(line) for line in (peer / "calls.jsonl").read_text().splitlines()]
    assert calls[0] == ["--help"] and len(calls) == 1 + 3, "one call a round, the first of which warms up"
    wanted = f"-m {TINY} -ngl 99 -fa 1 -r 1 -ctk f16 -ctv f16 -b 4096 -ub 4096 -ncmoe 2 -p 8 -n 4 -d 0,6 -o json"
    assert all(call == wanted.split() for call in calls[1:])


def test_a_build_on_the_host_needs_no_card(run: Run, peer: Path) -> None:
    (row,) = run("-p", "0", "-n", "3", "-t", "1", "--against", "llama.cpp", "--peer-path", str(peer))
    assert (row["plan"], row["card"], row["step_ms"]) == ("cpu", None, None)
    assert row["ratio"] > 0 and row["cpu_ratio"] is None and row["against_cpu_tokens_per_s"] is None
    last = json.loads((peer / "calls.jsonl").read_text().splitlines()[-1])
    assert last[last.index("-ngl") + 1] == "0" and last[last.index("-t") + 1] == "1"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("fail", "failed with status 1: main: error: failed to load model"),
        ("junk", "prints no JSON array of tests"),
        ("old", "told nothing of tg4 at depth 6"),
    ],
)
def test_a_peer_that_fails_is_told(peer: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, words: str) -> None:
    monkeypatch.setenv("LLAMA_BENCH", wrong)
    build = LlamaBench(LlamaBenchOptions(peer, True, 0, 4, "f16", 2048, 512), str(TINY))
    with pytest.raises(BloomeryError, match=words) as caught:
        build.run([Trial("tg", 4, 6)])
    assert caught.value.hint


def test_a_missing_peer_and_a_missing_card_are_named(
    peer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = LlamaBenchOptions(peer / "nowhere", True, 0, 0, "f16", 2048, 512)
    with pytest.raises(BloomeryError, match=r"nowhere/llama-bench: No such file"):
        LlamaBench(options, str(TINY))
    (peer / "llama-bench").write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(BloomeryError, match="does not answer as llama-bench does"):
        LlamaBench(LlamaBenchOptions(peer, True, 0, 0, "f16", 2048, 512), str(TINY))
    if not placement.may_have_card():
        assert bench.main(["-m", str(TINY), "--plan", "a", "-p", "0", "-n", "1"]) == 1
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1 and "--plan cpu" in errors


def test_another_versions_fields_are_missed() -> None:
    assert parse('noise\n[\n  {"build_number": 1, "build_commit": "c", "n_prompt": 0, "n_gen": 1, "n_depth": 0,'
                 ' "samples_ns": [ 5 ]}\n]\n', "p")[0]["samples_ns"] == [5]  # fmt: skip
    with pytest.raises(BloomeryError, match="prints no n_depth, samples_ns"):
        parse('[\n{"build_number": 1, "build_commit": "c", "n_prompt": 0, "n_gen": 1}]', "p")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--card-memory", "1GiB"), "--card-memory"),
        (("--peer-path", "x"), "--peer-path"),
        (("--against", "llama.cpp", "--peer-path", "x", "--repack", "on"), "--repack"),
        (("--against", "llama.cpp", "--peer-cpu-moe", "3"), "--peer-path"),
        (("--against", "llama.cpp", "--plan", "a"), "wheels"),
    ],
)
def test_options_of_cards_and_builds_that_cannot_be_meant(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(build_parser().parse_args(arguments))
    assert words in str(caught.value) + caught.value.hint


def test_figures_of_legs_are_what_the_times_say() -> None:
    """Three hand-offs: the host is the longer leg of the first, the card of the second, and of the third, where the
    host had answered before the card was done; in a fourth it had no part."""

    def step(late: int) -> StepLegs:
        times = np.array([[100, 110, 140 + late], [200, 250, 251], [300, 340, 320], [0, 0, 0]], np.int64) * 1000
        return StepLegs(400_000 + 1000 * late, times)

    found = leg_figures([step(0), step(10)], [35e-6, 20e-6, 15e-6, 0])
    assert found.wait == pytest.approx(36e-6) and found.card == pytest.approx(405e-6 - 36e-6)
    assert found.host == pytest.approx(70e-6)
    # outside of hand-offs 405 - (45 + 51 + 40); the host's 35 (the card's 10), the card's 50 (20), the card's 40 (15)
    assert found.bound == pytest.approx((405 - 136 + 35 + 50 + 40) * 1e-6)
    np.testing.assert_allclose(sorted(1e6 * found.round_trips), [20, 20, 40, 50, 51, 51])
    np.testing.assert_allclose(sorted(1e6 * found.waits), [0, 0, 1, 1, 30, 40])


def test_words_of_another_step_say_nothing() -> None:
    words = LegWords(np.zeros(leg_bytes(4), np.uint8), (1, 3))
    words.note_hand_off(3, SEEN, 9)
    words.note_hand_off(1, SENT, 4)
    words.note_hand_off(1, BEGUN, 5)
    words.note(7, 1234)
    legs = words.read(7)
    assert legs is not None and legs.card_ns == 1234 and legs.hand_offs.tolist() == [[4, 5, 0], [0, 0, 9]]
    assert words.read(8) is None
