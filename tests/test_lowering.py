"""Lowered programs: whole models against llama.cpp's logits, bits that depend on nothing, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from in_process import InProcessExecutor
from numpy.typing import NDArray
from oracle_data import QUANTISED, TINY, f32_file, figures, host_band, quantised_file

from bloomery.cpu_experts.kernels import kernel_names
from bloomery.cpu_experts.lowering import lower, required_kernels
from bloomery.runtime.architectures import build_program
from bloomery.runtime.divergence import kl_divergence
from bloomery.runtime.errors import PlanError
from bloomery.runtime.executor import StepRows
from bloomery.runtime.model_file import ModelFile, Tensor
from bloomery.runtime.program import Buffer, CacheState, CacheWrite, EmbedRows, MatMul, Program, View
from bloomery.runtime.quant_types import QuantType


def rows_of(tokens: NDArray[np.int32], start: int = 0, slot: int = 0) -> StepRows:
    count = len(tokens)
    return StepRows(
        np.ascontiguousarray(tokens, np.int32),
        np.full(count, slot, np.int32),
        np.arange(start, start + count, dtype=np.int32),
        np.arange(count, dtype=np.int32),
    )


def evaluate(
    executor: InProcessExecutor, tokens: NDArray[np.int32], sizes: Iterator[int], slot: int = 0
) -> NDArray[np.float32]:
    logits, done = [], 0
    while done < len(tokens):
        part = tokens[done : done + next(sizes)]
        made, greedy = executor.step(rows_of(part, done, slot))
        np.testing.assert_array_equal(greedy, made.argmax(1))
        logits.append(made)
        done += len(part)
    return np.concatenate(logits)


def forever(*sizes: int) -> Iterator[int]:
    while True:
        yield from sizes


@pytest.mark.parametrize("name", TINY)
def test_f32_models_equal_llama_cpp(name: str) -> None:
    expected = figures(f"{name}-F32")
    with ModelFile.open(f32_file(name)) as model:
        executor = InProcessExecutor(build_program(model), max_rows=64, max_out_rows=64)
        made, _ = executor.step(rows_of(expected["tokens"]))
    error = float(np.sqrt(np.mean((made - expected["logits"]) ** 2) / np.mean(expected["logits"] ** 2)))
    print(f"{name}: relative rms {error:.2e}")
    assert error < 1e-5


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_models_against_llama_cpp(name: str) -> None:
    expected = figures(name)
    with ModelFile.open(quantised_file(name)) as model:
        executor = InProcessExecutor(build_program(model), max_rows=64, max_out_rows=64)
        made, _ = executor.step(rows_of(expected["tokens"]))
    divergence = kl_divergence(expected["logits"], made)
    median, mean = host_band(name)
    print(f"{name}: median {np.median(divergence):.2e} of {median:.2e}, mean {divergence.mean():.2e} of {mean:.2e}")
    assert np.median(divergence) <= median and divergence.mean() <= mean


@pytest.mark.parametrize(
    ("name", "cache_type"),
    [("qwen3moe-Q4_K_M", "f32"), ("deepseek2-v3-Q3_K_M", "f16"), ("qwen3moe-IQ4_XS", "f16"), ("llama-Q4_K_M", "f16")],
)
def test_bits_depend_on_neither_ranks_nor_steps(name: str, cache_type: str) -> None:
    with ModelFile.open(quantised_file(name)) as model:
        program = build_program(model)
        tokens = np.random.default_rng(80).integers(0, program.vocabulary, 40).astype(np.int32)

        def executor(ranks: int) -> InProcessExecutor:
            return InProcessExecutor(program, slots=2, max_rows=40, max_out_rows=40, ranks=ranks, cache_type=cache_type)

        whole = evaluate(executor(1), tokens, forever(40))
        np.testing.assert_array_equal(evaluate(executor(3), tokens, forever(1)), whole)
        np.testing.assert_array_equal(evaluate(executor(2), tokens, forever(1, 7, 2, 13), slot=1), whole)
        assert np.isfinite(whole).all() and whole.std() > 0


def test_rows_without_logits_change_nothing() -> None:
    with ModelFile.open(quantised_file("qwen3moe-Q4_K_M")) as model:
        program = build_program(model)
        tokens = np.arange(20, 36, dtype=np.int32)
        executor = InProcessExecutor(program, max_out_rows=16)
        whole, _ = executor.step(rows_of(tokens))
        some = replace(rows_of(tokens), out_rows=np.array([3, 15], np.int32))
        logits, greedy = executor.step(some)
        np.testing.assert_array_equal(logits, whole[[3, 15]])
        np.testing.assert_array_equal(greedy, whole[[3, 15]].argmax(1))
        none, _ = executor.step(replace(some, out_rows=np.zeros(0, np.int32)))
        assert len(none) == 0


def test_required_kernels_are_those_of_the_stages() -> None:
    with ModelFile.open(quantised_file("qwen3moe-Q4_K_M")) as model:
        program = build_program(model)
        stages = lower(program, InProcessExecutor(program, cache_type="f16"))
        wanted = required_kernels(program, "f16")
        assert set(wanted) == {stage.kernel for stage in stages} and len(set(wanted)) == len(wanted)
        assert set(wanted) <= set(kernel_names())
        assert {stage.label for stage in stages} == {op.name for op in program.ops}


def one_product(kind: str, width: int) -> Program:
    """embed -> product with a weight of type `kind` whose rows have `width` elements."""

    def tensor(name: str, kind: str, shape: tuple[int, ...], nbytes: int) -> Tensor:
        return Tensor(name, shape, QuantType.named(kind), np.zeros(nbytes, np.uint8), Path("some.gguf"), 0)

    return Program(
        architecture="test",
        buffers=MappingProxyType(
            {
                "x": Buffer("x", width),
                "logits": Buffer("logits", 4),
            }
        ),
        states={},
        weights={
            "embed": tensor("embed", "F32", (width, 4), 16 * width),
            "w": tensor("w", kind, (width, 4), 4096),
        },
        ops=(
            EmbedRows("embedding", View("x", 0, width), "embed"),
            MatMul("product", View("x", 0, width), (View("logits", 0, 4),), ("w",), (None,)),
        ),
        vocabulary=4,
        context_length=8,
        layers=0,
    )


@pytest.mark.parametrize("kind", ["IQ1_S", "TQ1_0", "NVFP4", "F64", "I32"])
def test_types_without_a_kernel_are_refused_by_name(kind: str) -> None:
    with pytest.raises(PlanError, match=rf"some\.gguf: tensor w of op product has type {kind}.*Q4_K"):
        required_kernels(one_product(kind, 256), "f32")


def test_ops_without_a_kernel_are_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Unheard:
        name: str
        x: View

    program = one_product("Q8_0", 256)
    program = replace(program, ops=(*program.ops, Unheard("new", View("x", 0, 256))))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"op new \(Unheard\) has no host kernel"):
        required_kernels(program, "f32")


def test_ops_that_see_other_heads_than_a_state_has_are_refused() -> None:
    program = one_product("Q8_0", 256)
    write = CacheWrite("write_keys", View("x", 0, 64, 4, 64), "keys")
    program = replace(program, states={"keys": CacheState("keys", 256, heads=4)}, ops=(*program.ops, write))
    assert required_kernels(program, "f16")[-1] == "cache_write_f16"
    whole = replace(write, x=View("x", 0, 256))
    assert required_kernels(replace(program, ops=(*program.ops, whole)), "f16")[-1] == "cache_write_f16"
    for x in (View("x", 0, 64, 2, 64), View("x", 0, 128, 2, 128), View("x", 0, 64)):
        wrong = replace(program, ops=(*program.ops, replace(write, x=x)))
        with pytest.raises(PlanError, match="op write_keys: state keys has 4 heads of 64 elements"):
            required_kernels(wrong, "f16")


def test_rows_that_do_not_fill_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"some\.gguf: tensor w of type Q4_K has rows of 128 elements.*multiple of 256"):
        required_kernels(one_product("Q4_K", 128), "f32")
    assert required_kernels(one_product("Q8_0", 128), "f32") == ["embed_F32", "quantise_Q8_0", "matmul_Q8_0"]
