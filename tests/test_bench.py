"""bloomery-bench: what it counts and sums up, the files it makes, and whole runs with and without llama.cpp."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import left_behind, program

from bloomery.cpu_experts.isa import active_isa
from bloomery.launcher import bench_report
from bloomery.launcher.bench import build_parser, check
from bloomery.launcher.bench_engine import EngineRun
from bloomery.launcher.bench_peer import LlamaPeer, PeerOptions, PeerRun
from bloomery.launcher.bench_rows import NO_STAGE, Rounds, comparison, kind_rows, trial_steps, trial_work
from bloomery.launcher.bench_trial import TokenSource, Trial, paired_ratios, summary, trials_of
from bloomery.launcher.command_line import UsageError
from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime.architectures import build_program
from bloomery.runtime.bandwidth_probe import ReadCeiling
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.step_work import Work, expected_experts, op_kind, step_work

TINY = demo_model_path("tiny-qwen3moe")
SECONDS = 280.0
FIELDS = {  # every row, with the type of what was measured
    "test": str,
    "depth": int,
    "threads": int,
    "tokens_per_s": float,
    "spread": float,
    "against_tokens_per_s": float,
    "ratio": float,
    "ratio_spread": float,
    "read_gbps": float,
    "ceiling_gbps": float,
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    before = left_behind()
    result = subprocess.run(program("bench", *arguments), capture_output=True, text=True, timeout=SECONDS)
    assert left_behind() <= before
    return result


def tiny_program() -> Any:
    return build_program(ModelFile.open(TINY))


def test_summary_is_median_and_interquartile_range_over_median() -> None:
    found = summary([1.0, 9.0, 2.0, 4.0, 3.0])  # quartiles 2, 3, 4
    assert found.median == 3.0
    assert found.spread == pytest.approx(2.0 / 3.0)
    assert summary([5.0]).spread == 0.0
    assert summary([2.0, 4.0]).spread == pytest.approx(1.0 / 3.0)  # quartiles 2.5 and 3.5


def test_ratios_are_of_the_same_round() -> None:
    assert list(paired_ratios([2.0, 9.0], [1.0, 3.0])) == [2.0, 3.0]
    with pytest.raises(ValueError):
        list(paired_ratios([1.0], [1.0, 2.0]))


def test_trials_go_from_shallow_to_deep_and_zero_means_none() -> None:
    names = [(trial.name, trial.depth) for trial in trials_of([512, 0], [64], [4096, 0])]
    assert names == [("pp512", 0), ("tg64", 0), ("pp512", 4096), ("tg64", 4096)]
    assert trials_of([0], [0], [0]) == []


def test_tokens_of_a_shallow_depth_begin_those_of_a_deep_one() -> None:
    source = TokenSource(1000, 50)
    assert source.prefix(50)[:20] == source.prefix(20)
    assert source.fresh(8) != source.fresh(8)
    assert max(source.fresh(5000)) < 1000


def test_a_prompt_is_taken_in_blocks_and_generation_row_by_row() -> None:
    assert list(trial_steps(Trial("pp", 70, 10), 32)) == [(32, 41), (32, 73), (6, 79)]
    assert list(trial_steps(Trial("tg", 3, 10), 32)) == [(1, 10), (1, 11), (1, 12)]


def hand_count(model: ModelFile, rows: int, position: int) -> dict[str, float]:
    """Bytes of one step of the demo model (qwen3moe), from the file's tensors and keys alone."""
    used, experts = model.hyper("expert_used_count", int), model.hyper("expert_count", int)
    layers = model.hyper("block_count", int)
    kv_width = model.hyper("attention.head_count_kv", int) * model.hyper("attention.key_length", int)
    sizes = {name: tensor.nbytes for name, tensor in model.tensors.items()}
    found = {"head": float(sizes["output.weight"] if "output.weight" in sizes else sizes["token_embd.weight"])}
    found["embedding"] = rows * sizes["token_embd.weight"] / model.tensors["token_embd.weight"].shape[1]
    found["norms"] = float(sum(size for name, size in sizes.items() if "norm" in name))
    found["attention weights"] = float(
        sum(size for name, size in sizes.items() if ".attn_" in name and "norm" not in name)
    )
    found["router"] = float(sum(size for name, size in sizes.items() if "gate_inp" in name))
    found["attention"] = layers * (position + 1) * 2 * kv_width * 2.0
    found["experts"] = 0.0
    for layer in range(layers):
        # the last layer computes its mixture for the one row whose logits are wanted
        of_layer = 1 if layer == layers - 1 else rows
        distinct = used if of_layer == 1 else experts * (1 - (1 - used / experts) ** of_layer)
        one = sum(sizes[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")) / experts
        found["experts"] += distinct * one
    return found


@pytest.mark.parametrize(("rows", "position"), [(1, 0), (1, 99), (16, 115)])
def test_bytes_read_agree_with_a_count_by_hand(rows: int, position: int) -> None:
    with ModelFile.open(TINY) as model:
        counted = {kind: work.read for kind, work in step_work(build_program(model), rows, position, 2).items()}
        assert counted == pytest.approx(hand_count(model, rows, position))


def test_expected_experts_is_what_random_choice_gives() -> None:
    seed = 5
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    draws = [
        len({int(e) for _ in range(6) for e in generator.choice(32, 4, replace=False)}) for _ in range(400)
    ]  # 6 rows that choose 4 of 32 each
    assert expected_experts(32, 4, 6) == pytest.approx(np.mean(draws), rel=0.02)
    assert expected_experts(32, 4, 1) == 4.0


def test_operations_of_attention_count_the_pairs_that_see_each_other() -> None:
    model = tiny_program()
    one, many = (step_work(model, rows, 9, 2)["attention"].operations for rows in (1, 4))
    assert many / one == pytest.approx((7 + 8 + 9 + 10) / 10)
    prompt = step_work(model, 8, 7, 2)
    rows = [step_work(model, 1, position, 2) for position in range(8)]
    assert prompt["attention"].operations == pytest.approx(sum(row["attention"].operations for row in rows))
    assert prompt["attention weights"].operations == pytest.approx(8 * rows[0]["attention weights"].operations)


def test_work_of_a_trial_is_the_sum_of_its_steps() -> None:
    model = tiny_program()
    total = trial_work(model, Trial("tg", 5, 20), 512, 2)["attention"]
    steps = [step_work(model, 1, position, 2)["attention"] for position in range(20, 25)]
    assert total == sum(steps, Work())


def engine_run(seconds: float, cpu_seconds: float) -> EngineRun:
    return EngineRun(seconds, 1, seconds, cpu_seconds, (), {})


def test_the_fastest_peer_is_compared_with() -> None:
    rounds = Rounds(
        ours=[engine_run(1.0, 0.5), engine_run(2.0, 0.5), engine_run(4.0, 0.5)],
        theirs={
            "slow": [PeerRun(9.0, 9.0)] * 3,
            "fast": [PeerRun(2.0, 1.0), PeerRun(2.0, 1.5), PeerRun(2.0, 2.0)],
        },
    )
    found = comparison(Trial("tg", 10, 0), 1, rounds)
    assert (found["against"], found["against_tokens_per_s"], found["against_spread"]) == ("fast", 5.0, 0.0)
    assert found["ratio"] == 1.0  # 2, 1 and 0.5
    assert found["ratio_spread"] == pytest.approx(0.75)
    assert (found["cpu_ratio"], found["against_cpu_tokens_per_s"]) == (3.0, pytest.approx(10 / 1.5))
    assert [peer["against"] for peer in found["peers"]] == ["slow", "fast"]
    # waiting for each other is CPU time, too
    found = comparison(Trial("tg", 10, 0), 2, rounds)
    assert (found["against"], found["cpu_ratio"]) == ("fast", None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", "3"), "--layers"),
        (("--mix", "Q8_0"), "--mix"),
        (("--repack", "off"), "--repack"),
        (("--micro-batch", "64"), "--micro-batch"),
        (("--synthetic", "llama-1b", "-m", "x.gguf"), "both name a model"),
        (("--synthetic", "deepseek-v2-lite", "--layers", "5", "--against", "llama.cpp"), "26 or 27 layers"),
        (("--synthetic", "deepseek41", "--against", "llama.cpp"), "does not know deepseek41"),
        (("--experts", "8"), "--experts"),
        (("-t", "9999"), "9999"),
        (("-t", "0"), "no thread"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        check(build_parser().parse_args(arguments))
    assert caught.value.hint


def test_a_file_that_cannot_be_made_is_refused_by_name() -> None:
    result = bench("--synthetic", "deepseek41", "--layers", "2")
    assert result.returncode == 1
    assert "deepseek41 with 2 layers" in result.stderr and "->" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def rows() -> Iterator[list[dict[str, Any]]]:
    """A whole run on the demo model, without a peer."""
    result = bench("--demo", "tiny-qwen3moe", "-p", "24", "-n", "6", "-d", "0,40", "-r", "3", "-t", "1", "-o", "json")
    assert result.returncode == 0, result.stderr
    yield json.loads(result.stdout)


def test_rows_carry_what_was_measured(rows: list[dict[str, Any]]) -> None:
    assert [(row["test"], row["depth"]) for row in rows] == [("pp24", 0), ("tg6", 0), ("pp24", 40), ("tg6", 40)]
    for row in rows:
        for name, kind in FIELDS.items():
            expected = type(None) if name.startswith(("against", "ratio")) else kind
            assert isinstance(row[name], expected), name
        assert row["threads"] == 1
        assert len(row["samples"]) == 3
        assert row["tokens_per_s"] == sorted(row["samples"])[1]
        assert row["read_gbps"] > 0 and row["ceiling_gbps"] > 0
        assert row["isa"] == active_isa() and row["arithmetic_gops"] > 10, "one core does more, whatever its age"
        assert (row["arithmetic_share"] is None) == row["test"].startswith("tg")
        assert row["cpu_tokens_per_s"] > 0 and 0 < row["quiet_share"] <= 1


def test_figures_of_a_row_fit_together(rows: list[dict[str, Any]]) -> None:
    program = tiny_program()
    kinds = {op_kind(program, op) for op in program.ops}
    assert {"experts", "head", "attention", "attention weights"} < kinds
    for row in rows:
        trial = Trial(row["test"][:2], int(row["test"][2:]), row["depth"])
        nbytes = row["bytes_per_step"] * row["steps"]
        seconds = trial.count / row["tokens_per_s"]
        assert row["read_gbps"] == pytest.approx(nbytes / seconds / 1e9, rel=1e-3)
        assert row["bytes_per_step"] == pytest.approx(
            row["dense_bytes"] + row["expert_bytes"] + row["cache_bytes"], abs=3
        )
        assert row["steps"] == (1 if trial.kind == "pp" else trial.count)
        assert row["bound_tokens_per_s"] == pytest.approx(row["tokens_per_s"] / row["ceiling_share"], rel=1e-6)
        assert sum(figures["share"] for figures in row["kinds"].values()) == pytest.approx(1.0)
        assert set(row["kinds"]) == kinds | {NO_STAGE}
        assert sum(figures["seconds"] for figures in row["kinds"].values()) * row["steps"] < 1.5 * seconds
        assert 0 < row["kinds"]["experts"]["barrier_seconds"] < row["kinds"]["experts"]["seconds"]


def test_what_no_stage_takes_is_no_kinds() -> None:
    """Times are what the workers' clocks say, medians of the runs, not shares of the whole step."""
    parts = [(0.08, 0.04), (0.10, 0.02), (0.30, 0.30)]
    runs = [EngineRun(1.0, 2, 0.4, 0.0, (), {"head": part}) for part in parts]
    found = kind_rows(runs, {}, 0.4, 2, 1e9)
    assert list(found) == ["head", NO_STAGE]
    assert found["head"]["seconds"] == pytest.approx(0.05 + 0.02) and found["head"]["barrier_seconds"] == 0.02
    assert found[NO_STAGE]["seconds"] == pytest.approx(0.2 - 0.07) and found["head"]["share"] == pytest.approx(0.35)


def test_a_deep_generation_reads_the_cache_of_its_depth(rows: list[dict[str, Any]]) -> None:
    shallow, deep = rows[1], rows[3]
    assert deep["dense_bytes"] == shallow["dense_bytes"]
    # six steps: positions 0 to 5 against 40 to 45
    assert deep["cache_bytes"] / shallow["cache_bytes"] == pytest.approx((6 * 40 + 21) / 21, rel=1e-3)


def test_other_outputs_have_a_line_for_every_row(
    rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = list(csv.DictReader(bench_report.as_csv(rows).splitlines()))
    assert [line["test"] for line in lines] == ["pp24", "tg6", "pp24", "tg6"]
    for line, row in zip(lines, rows, strict=True):
        assert float(line["tokens_per_s"]) == row["tokens_per_s"] and line["ratio"] == ""
        assert float(line["experts_seconds"]) == row["kinds"]["experts"]["seconds"]
    bench_report.print_tables(rows)
    for text, start in ((bench_report.as_markdown(rows), "| {} | {} | 1 |"), (capsys.readouterr().out, " {} {} ")):
        for row in rows:
            wanted = start.format(row["test"], row["depth"]).split()
            assert sum(line.split()[: len(wanted)] == wanted for line in text.splitlines()) == 1, text


def test_a_prefix_is_there_in_every_round() -> None:
    """Also of a model whose states cannot be taken back by as much as a long prompt adds."""
    result = bench("--demo", "tiny", "-p", "1500", "-n", "0", "-d", "6", "-r", "1", "-o", "json")
    assert result.returncode == 0, result.stderr
    assert [(row["test"], row["depth"]) for row in json.loads(result.stdout)] == [("pp1500", 6)]


def test_the_ceiling_can_be_measured_again_and_again() -> None:
    with ReadCeiling(1) as ceiling:
        rates = [ceiling.measure(4) for _ in range(3)]
    for rate in rates:
        assert rate.processes == 1 and 0 < rate.cpu_share <= 1
        assert 1e8 < rate.bytes_per_second < 1e12


@pytest.fixture(scope="module")
def llama_cpp() -> None:
    if find_spec("xllamacpp") is None and find_spec("llama_cpp") is None:
        pytest.skip("no llama.cpp wheel is installed (pip install 'bloomery[oracle]')")


@pytest.mark.usefixtures("llama_cpp")
def test_a_comparison_alternates_and_prints_its_ratio() -> None:
    result = bench(
        *("--demo", "tiny-qwen3moe", "-p", "8", "-n", "2", "-d", "4", "-r", "3", "-t", "1"),
        *("--json", "--against", "llama.cpp", "--repack", "on,off"),
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    for row in found:
        for name, kind in FIELDS.items():
            assert isinstance(row[name], kind), name
        ratios = sorted(a / b for a, b in zip(row["samples"], row["against_samples"], strict=True))
        assert row["ratio"] == pytest.approx(ratios[1])
        assert "llama" in row["against"] and row["against_system"]
        assert sorted(peer["against"].rpartition(" ")[2] for peer in row["peers"]) == ["off", "on"]
        best = max(row["peers"], key=lambda peer: peer["against_cpu_tokens_per_s"])
        assert {name: row[name] for name in best} == best
        assert row["cpu_ratio"] > 0 and row["against_cpu_tokens_per_s"] > 0


@pytest.mark.usefixtures("llama_cpp")
def test_llama_cpp_keeps_the_prefix_and_forgets_the_rest() -> None:
    options = PeerOptions(sys.executable, "auto", False)
    with LlamaPeer(options, TINY, threads=1, context=256, micro_batch=64) as peer:
        source = TokenSource(100, 60)
        for depth in (0, 20, 60):
            peer.fill(source.prefix(depth))
            for _ in range(4):  # without forgetting, the context of 256 would be full soon
                assert peer.run(Trial("pp", 60, depth), source.fresh(60)).seconds > 0
                assert peer.run(Trial("tg", 60, depth), source.fresh(60)).seconds > 0
        with pytest.raises(BloomeryError, match="llama_decode"):
            peer.run(Trial("pp", 250, 60), source.fresh(250))


def test_an_interpreter_without_llama_cpp_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(BloomeryError, match=r"bare/bin/python has no llama\.cpp") as caught:
        LlamaPeer(PeerOptions(python, "auto", True), TINY, threads=1, context=64, micro_batch=64)
    assert "--peer-python" in caught.value.hint
    with pytest.raises(BloomeryError, match="No such file"):
        LlamaPeer(
            replace(PeerOptions(python, "auto", True), python="/nowhere"), "", threads=1, context=64, micro_batch=64
        )
