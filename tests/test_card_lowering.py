"""Programs become launches without a card: every kernel exists, scratch fits, and what is missing is named."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from card_stand import Bench, NoCard, tensor
from deepseek_data import tiny4, tiny41
from emulated_card import source_of
from oracle_data import QUANTISED, TINY, f32_file, quantised_file

from bloomery.gpu_worker import compile_cache
from bloomery.gpu_worker.launches import MAX_ROWS, AheadAddresses, Launch
from bloomery.gpu_worker.lowering import lower
from bloomery.gpu_worker.products import WEIGHT_TYPES
from bloomery.gpu_worker.prompt_lowering import lower_all, lower_prompt
from bloomery.gpu_worker.step_ahead import ahead_launches
from bloomery.runtime.architectures import build_program
from bloomery.runtime.errors import PlanError
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.leg_times import HAND_OFF_BYTES, leg_bytes, offset
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.ops_deepseek4 import TableRows
from bloomery.runtime.program import MatMul, Program, RmsNorm, RoutedExperts, Router
from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.split_program import card_part, without_hand_offs

STEP = ("Jobs", 20), ("Input", 6), ("Cache", 3), ("HeadJobs", 36), ("Ring", 5), ("Groups", 7), ("Choice", 7)
STEP += ("Scored", 10), ("Fresh", 13), ("Normed", 10), ("Residual", 4), ("Sending", 17), ("Receiving", 12)
STEP += ("Landing", 17), ("Added", 4), ("Opened", 3), ("SoftplusChoice", 11), ("Spread", 9), ("Ending", 6)
STEP += ("Mixing", 17), ("Collapse", 5)
"""Parameters that are structs of words, and of how many."""


def program_of(path: Path) -> Program:
    return build_program(ModelFile.open(path))


def parameter_words(file: str, function: str) -> int:
    """How many 8-byte words a kernel takes, counted in its source; macros are looked into."""
    source = source_of(file)
    name = re.sub(r"_(1|2|4|8)$", "_##NR", function) if file == "matmul" else function
    name = re.sub(r"^attend_(f32|f16)(_odd)?$", "attend_##NAME", name)
    name = re.sub(r"^attend_window_.*", "attend_window_##NAME", name)
    name = re.sub(r"^attend_(cores|fresh)_\d+$", r"attend_\1_##WIDTH", name)
    name = re.sub(r"^(window_cores|attend_rows|score_cores)_\d+$", r"\1_##WIDTH", name)
    name = re.sub(r"^flash_\d+_\d+$", "flash_##KEY##_##VALUE", name)
    found = re.search(rf'extern "C" __global__ void[^;{{]*?\b{re.escape(name)}\(([^)]*)\)', source)
    assert found, f"{file}.cu has no kernel {function}"
    sizes = dict(STEP)
    return sum(sizes.get(parameter.split()[0], 1) for parameter in found[1].split(","))


def check(launches: list[Launch]) -> None:
    for launch in launches:
        x, y, z = launch.grid
        assert 0 < x < 2**31 and 0 < y < 65536 and 0 < z < 65536, launch
        assert launch.threads % 32 == 0 and 0 < launch.threads <= 1024
        assert len(launch.words) == parameter_words(launch.kernel.file, launch.kernel.function), launch.kernel


@pytest.mark.parametrize("name", TINY)
def test_f32_programs(name: str) -> None:
    program = program_of(f32_file(name))
    context = NoCard(program)
    full = lower(program, context, MAX_ROWS, MAX_ROWS)
    check(full)
    for rows in range(1, MAX_ROWS):
        check(lower(program, context, rows, 1))
    assert {name for launch in full for name in launch.label.split(" & ")} <= {op.name for op in program.ops}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_programs(name: str) -> None:
    program = program_of(quantised_file(name))
    context = NoCard(program)
    launches = lower(program, context, MAX_ROWS, MAX_ROWS)
    check(launches)
    kinds = {launch.kernel.quant_type for launch in launches} - {""}
    assert kinds and kinds <= set(WEIGHT_TYPES)
    without = lower(program, context, MAX_ROWS, 0)
    assert len(without) < len(launches), "rows that nobody wants logits of cost a head"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M"])
def test_hand_offs_join_the_experts_beside_them(name: str, rows: int) -> None:
    """A layer whose experts nothing follows, or one that comes with them, has as many launches as without hand-offs;
    where work of the card follows, one more, which takes the sum behind it."""
    program = program_of(quantised_file(name))
    layers = (0, 2)
    card = card_part(program, layers)
    whole, launches = (lower(each, NoCard(each), rows, rows) for each in (program, card))
    check(launches)
    apart = [launch for launch in launches if launch.kernel.file == "hand_off"]
    joined = name.startswith("qwen3moe") or rows == 1
    expected = [] if joined else [f"blk.{1 + layer}" for layer in layers]  # the first is dense
    assert [launch.kernel.function for launch in apart] == ["receive"] * len(expected)
    assert [launch.label.split(".routed")[0] for launch in apart] == expected
    assert len(launches) == len(whole) + len(expected)
    assert all("add_shexp" in launch.label for launch in apart)


@pytest.mark.parametrize("times", [0, 4096])
def test_hand_offs_with_and_without_times(times: int) -> None:
    """Times have a place only where somebody asks, each hand-off one of its own."""
    program = program_of(quantised_file("deepseek2-v3-Q3_K_M"))
    layers = (0, 2)
    card = card_part(program, layers)
    context = NoCard(card)
    context.hand_off = replace(NoCard.hand_off, times=times)
    launches = lower(card, context, 3, 3)
    places = [launch.words[-18] for launch in launches if launch.kernel.function == "open_experts"]
    places += [launch.words[-5] for launch in launches if launch.kernel.function == "receive"]
    places = [place for place in places if place]
    assert places == [times + offset(layer) for layer in layers] * 2 if times else not places
    assert max(places, default=0) + HAND_OFF_BYTES <= times + leg_bytes(1 + max(layers))


def test_steps_ahead_end_with_the_record_of_the_next() -> None:
    program = program_of(quantised_file("llama-Q4_K_M"))
    context = NoCard(program)
    *step, last = ahead_launches(program, context, 3, None)
    check([*step, last])
    assert step == lower(program, context, 3, 3) and str(last.kernel) == "choices.next_record"
    assert last.words[2:] == (3, context.step.tokens, context.step.positions, context.step.laps, 0, 0)
    assert last.kernel in {launch.kernel for launch in lower_all(program, context, 64, 64)}


def test_steps_ahead_wait_for_the_rows_of_their_tokens() -> None:
    """Before each op that takes some, for as many bytes as the step has rows, and tell the host their own tokens."""
    program = program_of(tiny41("a"))
    context = NoCard(program)
    tables = [op for op in program.ops if isinstance(op, TableRows)]
    ahead = AheadAddresses(10, 20, 30, {op.table: 1000 * (1 + i) for i, op in enumerate(tables)}, 1320)
    *step, last = ahead_launches(program, context, 3, ahead)
    check([*step, last])
    waits = [i for i, launch in enumerate(step) if str(launch.kernel) == "engram.await_rows"]
    assert [launch for launch in step if str(launch.kernel) != "engram.await_rows"] == lower(program, context, 3, 3)
    for at, op in zip(waits, tables, strict=True):
        moved = (ahead.rows[op.table], context.brought(op.table), 4 * math.ceil(3 * 1320 / 16))
        assert step[at].words == (20, context.step.laps, *moved) and step[at + 1].label == op.name
    assert last.words[-2:] == (30, 10)


@pytest.mark.parametrize("name", ("qwen3moe-Q4_K_M", "deepseek2-lite-Q4_K_M", "llama-Q4_K_M", "deepseek2-v3-Q3_K_M"))
def test_prompt_blocks(name: str) -> None:
    program = program_of(quantised_file(name))
    context = NoCard(program)
    for rows, wanted in ((300, 300), (300, 1), (33, 0)):
        launches = lower_prompt(program, context, rows, wanted)
        check(launches)
        labels = list(dict.fromkeys(name for launch in launches for name in launch.label.split(" & ")))
        assert labels == [op.name for op in program.ops if op.name in labels]
        if wanted == rows:
            assert len(labels) == len(program.ops)
    kernels = {launch.kernel.file for launch in launches}
    assert "many_rows" in kernels and "prompts" in kernels


@pytest.mark.parametrize("path", (lambda: tiny41("a"), lambda: tiny4("MXFP4_MOE")), ids=("deepseek41", "deepseek4"))
def test_deepseek_programs(path: Callable[[], Path]) -> None:
    program = program_of(path())
    for cache_type in ("f32", "f16"):
        context = NoCard(program, cache_type=cache_type)
        for rows in (1, MAX_ROWS):
            check(lower(program, context, rows, 1))
        check(lower_prompt(program, context, 300, 300))


@pytest.mark.parametrize("on_host", (False, True))
@pytest.mark.parametrize("name", ("qwen3moe-Q4_K_M", "deepseek2-lite-Q4_K_M"))
def test_every_kernel_is_loaded_beforehand(name: str, on_host: bool) -> None:
    """Whatever the number of rows and of wanted rows (matmul_N are loaded for every N), with and without a host."""
    whole = program_of(quantised_file(name))
    program = card_part(whole, (0, 2, len(ExpertTiers.everything(whole).layers) - 1)) if on_host else whole
    context = NoCard(program)

    def kernels(launches: list[Launch]) -> set[tuple[str, str, str]]:
        names = [launch.kernel for launch in launches]
        return {(each.file, re.sub(r"matmul_\d", "matmul_", each.function), each.quant_type) for each in names}

    known = kernels(lower_all(program, context, 300, 300))
    for rows in range(1, MAX_ROWS + 1):
        for wanted in {0, 1, rows}:
            assert kernels(lower(program, context, rows, wanted)) <= known, (rows, wanted)
    for rows, wanted in ((300, 1), (300, 5), (33, 0), (40, 40), (40, 1)):
        assert kernels(lower_prompt(without_hand_offs(program), context, rows, wanted)) <= known, (rows, wanted)


def test_every_launched_op_is_waited_for_in_order() -> None:
    """Each op that computes something has a launch, in the program's order."""
    program = program_of(f32_file("qwen3moe"))
    launches = lower(program, NoCard(program), 1, 1)
    labels = list(dict.fromkeys(name for launch in launches for name in launch.label.split(" & ")))
    assert labels == list(dict.fromkeys(op.name for op in program.ops))
    assert any(" & " in launch.label for launch in launches), "neighbours are put together"


def test_types_without_a_kernel_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(quantised_file("qwen3moe-Q4_K_M"))
    monkeypatch.setattr("bloomery.gpu_worker.products.WEIGHT_TYPES", ("F32", "Q4_K"))
    with pytest.raises(PlanError, match=r"tensor blk\.\d\..* has type Q\d"):
        lower(program, NoCard(program), 1, 1)


def test_what_is_missing_is_said() -> None:
    """In a process that cannot import pycuda the message says so and what to do; nothing else breaks."""
    code = (
        "import sys; sys.modules['pycuda'] = None\n"
        "import bloomery.gpu_worker.card_executor as c\n"
        "from bloomery.gpu_worker.driver import load_pycuda\n"
        "try: load_pycuda()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("PlanError") and "PyCUDA" in done.stdout and "bloomery[cuda]" in done.stdout


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BLOOMERY_NVCC", "/no/such/nvcc")
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path))
    compile_cache.find_compiler.cache_clear()
    compile_cache._compiler_version.cache_clear()
    try:
        with pytest.raises(PlanError, match="/no/such/nvcc"):
            compile_cache.cubin("elementwise", "", "sm_80")
    finally:
        compile_cache.find_compiler.cache_clear()
        compile_cache._compiler_version.cache_clear()


def test_compiling_and_finding_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A binary is found by its sources; other sources, another type or card make another; errors name the file."""
    try:
        compile_cache.find_compiler()
    except PlanError as error:
        pytest.skip(error.message)
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "cache"))
    first = compile_cache.cubin("elementwise", "", "sm_80")
    stamp = first.stat().st_mtime_ns
    assert compile_cache.cubin("elementwise", "", "sm_80") == first and first.stat().st_mtime_ns == stamp
    assert list(first.parent.iterdir()) == [first], "nothing is left aside"
    copy = tmp_path / "kernels"
    copy.mkdir()
    for path in compile_cache.KERNELS.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(compile_cache, "KERNELS", copy)
    (copy / "elementwise.cu").write_text("int x = ;\n")
    with pytest.raises(PlanError, match=r"elementwise\.cu do not compile for sm_80: .*error"):
        compile_cache.cubin("elementwise", "", "sm_80")


@pytest.mark.parametrize("room", [94 << 10, 222 << 10])
@pytest.mark.parametrize("used, hidden", [(8, 1536), (16, 2048), (16, 4096)])
@pytest.mark.parametrize("width", [2048, 4096, 7168])
@pytest.mark.parametrize("kind", ["Q3_K", "Q5_K", "Q6_K"])
def test_launches_fit_the_shared_memory_of_a_block(kind: str, width: int, used: int, hidden: int, room: int) -> None:
    """Where experts or a product with its norm would not fit together, they are launched one after the other."""
    bench, experts = Bench(), 16
    x = bench.input("x", np.zeros((64, width), np.float32))
    normed, logits = bench.buffer("normed", width), bench.buffer("scores", experts)
    ids, mix, out = bench.buffer("ids", used, "i32"), bench.buffer("mix", used), bench.buffer("out", width)
    y, again = bench.buffer("y", 512), bench.buffer("again", width)

    def weight(name: str, quant_type: str, *shape: int) -> None:
        nbytes = QuantType.named(quant_type).row_bytes(shape[0]) * math.prod(shape[1:])
        bench.weights[name] = tensor(name, shape, quant_type, np.zeros(nbytes, np.uint8))

    for name, *shape in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        weight(name, kind, *shape, experts)
    weight("w", kind, width, 512)
    weight("router", "F32", width, experts)
    weight("norm", "F32", width)
    program = bench.program(
        RmsNorm("norm x", x, normed, "norm", 1e-6),
        MatMul("scores", normed, (logits,), ("router",), (None,)),
        Router("route", logits, ids, mix, None, "softmax", True, 1.0, 1, 1),
        RoutedExperts("experts", normed, ids, mix, out, "gate", "up", "down"),
        RmsNorm("norm out", out, again, "norm", 1e-6),
        MatMul("product", again, (y,), ("w",), (None,)),
    )
    for rows in (1, MAX_ROWS):
        context = NoCard(program)
        context.block_shared = room
        launches = lower(program, context, rows, 1)
        check(launches)
        assert max(launch.shared for launch in launches) <= room
        together = {launch.kernel.function for launch in launches} & {"close_experts", "normed_matmul"}
        if used == 8 and kind != "Q5_K" and room > 200 << 10:
            assert together == {"close_experts", *(["normed_matmul"] if rows == 1 else [])}
