"""bloomery-trace: its counts are the router's choices, its hit rates the engram I/O process's, its files read back.

Planted once and seen to fail: choices of the layer before; BOS counted; a cache that forgets at every token.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import left_behind, program
from deepseek_data import program_of, tiny4, tiny41
from in_process import InProcessExecutor, run_kernel, step_words
from oracle_data import quantised_file
from running import rows_of

from bloomery.launcher import trace
from bloomery.launcher.demo_model import demo_model_path
from bloomery.launcher.trace_recorder import Counts, RouterTrace, TraceModel, cache_rates
from bloomery.runtime.architectures import build_program
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.hot_list import HotList, check_hot_list, read_hot_list, routed_layers
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.ops_deepseek4 import SoftplusRouter
from bloomery.runtime.program import Program, Router
from bloomery.runtime.router_choices import keep_choices
from bloomery.runtime.worker_messages import EngramOptions

SMALL_CACHE = 6_000
TOKENS = np.random.default_rng(5).integers(0, 300, 41)


def quiet(stage: str, done: int, total: int) -> None:
    """Progress that nobody reads."""


def watched_counts(model: Program, sequences: list[list[int]], skip: int) -> Counts:
    """The same kernels in this process, stopped after each router to look at what it picked for the whole sequence;
    the first `skip` tokens of a sequence do not count."""
    counts = {layer: np.zeros(experts, np.int64) for layer, experts in routed_layers(model).items()}
    routers = {op.name: op for op in model.ops if isinstance(op, Router | SoftplusRouter)}
    executor = InProcessExecutor(model, max_rows=32, max_out_rows=32, cache_type="f16")
    for sequence in sequences:
        rows = rows_of(sequence)
        words = step_words(rows)
        for place, stage in enumerate(executor.stages):
            run_kernel(stage.kernel, stage.arguments, words)
            last = place + 1 == len(executor.stages) or executor.stages[place + 1].label != stage.label
            if last and stage.label in routers:
                picked = executor.read(routers[stage.label].ids, len(sequence))[skip:]
                layer = int(stage.label.split(".")[1])
                counts[layer] += np.bincount(picked.reshape(-1), minlength=len(counts[layer]))
    return counts


@pytest.mark.timeout(400)  # kernels may have to be compiled
@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2", "deepseek4", "deepseek41"])
def test_counts_are_the_routers_choices(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sequences of 16 tokens in blocks of 5; of `deepseek4` the first layers look their experts up by token."""
    path = {
        "qwen3moe": lambda: quantised_file("qwen3moe-Q4_K_M"),
        "deepseek2": lambda: quantised_file("deepseek2-lite-Q4_K_M"),
        "deepseek4": tiny4,
        "deepseek41": lambda: tiny41("a"),
    }[name]()
    tokens = TOKENS.tolist()
    with TraceModel(str(path)) as model:
        lead = [] if model.bos is None else [model.bos]
        fresh = 16 - len(lead)
        sequences = [lead + tokens[first : first + fresh] for first in range(0, len(tokens), fresh)]
        expected = watched_counts(model.program, sequences, len(lead))
        done: list[int] = []
        with RouterTrace(model, threads=1, context=16, prompt_block=5, progress=quiet) as recorder:
            found = recorder.record(tokens, done.append)
        trace.show(HotList.of_counts("m", model.program.layers, found, []), {"text": tokens}, {"text": found}, {})
        assert "layer" in capsys.readouterr().out
        used = next(op.ids.elements for op in model.program.ops if isinstance(op, Router | SoftplusRouter))
        assert done == sorted(done) and done[-1] == len(tokens)
        assert found.keys() == expected.keys() == routed_layers(model.program).keys()
        for layer, row in found.items():
            assert row.sum() == len(tokens) * used
            np.testing.assert_array_equal(row, expected[layer], f"layer {layer}")
        if name == "deepseek4":
            assert any(isinstance(op, SoftplusRouter) and op.table for op in model.program.ops), "hash layers traced"


def test_nothing_but_the_ids_moves() -> None:
    with ModelFile.open(demo_model_path("tiny-qwen3moe")) as model:
        before = build_program(model)
        after = keep_choices(before)
    assert [op.name for op in after.ops] == [op.name for op in before.ops]
    changed = [old.name for old, new in zip(before.ops, after.ops, strict=True) if old != new]
    assert changed == [f"blk.{layer}.{op}" for layer in range(4) for op in ("router", "routed_experts")]


@pytest.mark.timeout(400)
def test_hit_rates_are_those_of_the_engram_process() -> None:
    """One token a step through the pool; the process counts for itself."""
    model, tokens = program_of(tiny41("a")), np.tile(TOKENS[:12], 3)
    pool = HostPool.start(
        str(tiny41("a")), model, context=64, slots=1, processes=1, prompt_block=4, engram=EngramOptions(SMALL_CACHE)
    )
    try:
        for place, token in enumerate(tokens):
            pool.step(rows_of([token], start=place, out="none"))
        counted = pool.statistics()["engram"]
    finally:
        pool.close()
    found = cache_rates(model, tokens.tolist(), [0, SMALL_CACHE, 1 << 20], lambda done, total: None)
    assert found.lookups == counted["rows"]
    assert found.rates[SMALL_CACHE] * found.lookups == pytest.approx(counted["rows_cached"])
    none, some, most = found.rates.values()
    assert none == 0 < some < most <= found.ceiling


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(program("trace", *arguments), input=text, capture_output=True, text=True, timeout=280)


def test_files_of_a_trace(tmp_path: Path) -> None:
    before = left_behind()
    text = tmp_path / "words.txt"
    text.write_text("The history of the world is a history of words. " * 12)
    hot, plot = tmp_path / "demo.hot", tmp_path / "usage.svg"
    ended = run(
        "--demo",
        "tiny-qwen3moe",
        "-f",
        str(text),
        "-f",
        "-",
        "--tokens",
        "100",
        "-o",
        str(hot),
        "--plot",
        str(plot),
        "--json",
        text="a b c",
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    made = read_hot_list(hot)
    with ModelFile.open(demo_model_path("tiny-qwen3moe")) as model:
        check_hot_list(made, build_program(model))
    assert [entry["text"] for entry in found["texts"]] == ["words", "standard input"]
    assert found["texts"][0]["tokens"] == 100
    for layer, ids in made.ranks.items():
        together = sum(np.array(entry["counts"][str(layer)]) for entry in found["texts"])
        assert found["ranks"][str(layer)] == list(ids)
        assert together[list(ids)].tolist() == list(made.counts[layer])
        assert together.sum() == 4 * sum(entry["tokens"] for entry in found["texts"])
    assert plot.read_text().startswith("<?xml")
    assert left_behind() <= before


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "no text"),
        (["-f", "nowhere.txt"], "nowhere.txt"),
        (["--demo", "tiny-qwen3moe", "-f", "README.md", "--cache-plot", "x.png"], "has no n-gram tables"),
        (["-f", "README.md", "--plot", "x.bmp"], "unknown kind of picture"),
        (["-f", "README.md", "-o", "no/folder/x.hot"], "its folder does not exist"),
        (["-f", "README.md", "-f", "README.md", "-f", "README.md"], "is named twice"),
        (["-f", "README.md", "--ctx", "1"], "leaves no room"),
        (["-f", "/dev/null"], "has no tokens"),
    ],
)
def test_errors_before_anything_runs(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parent.parent)
    assert trace.main(arguments) != 0
    [line] = capsys.readouterr().err.strip().splitlines()
    assert what in line and " -> " in line


def test_a_dense_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.main(["-m", str(quantised_file("llama-Q4_K_M")), "-f", "-"]) == 1
    assert "has no routed experts" in capsys.readouterr().err
