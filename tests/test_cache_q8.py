"""Caches of q8_0: kernels bit for bit as over the same numbers in f32, executors, slots, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from deepseek_data import tiny41
from in_process import InProcessExecutor, run_kernel
from kernel_references import quantise_q8_0
from numpy.typing import NDArray
from oracle_data import figures, host_band, quantised_file, trained_file
from running import rows_of
from test_kernels_ops import attention_scratch, bits, cache_words, place, same_for_all_ranks, step_of
from test_pool_models import evaluate, open_pool, vocabulary_of

from bloomery.runtime.architectures import build_program
from bloomery.runtime.arena import aligned
from bloomery.runtime.cache_types import dequantise_rows, quantise_rows
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.divergence import divergence
from bloomery.runtime.errors import PlanError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.placement import MemoryRoom, make_plan
from bloomery.runtime.reference import ReferenceExecutor
from bloomery.runtime.slot_files import load_slot, save_slot


def test_rows_are_rounded_as_ggml_does_on_x86() -> None:
    x = np.random.default_rng(90).standard_normal((7, 96), dtype=np.float32)
    x[1, :32], x[2, 5], x[3, 3] = 0, 1e4, -1e-30
    x[4, 32:64] = np.linspace(-2.5, 2.5, 32)  # ties: to even
    values, scale, _, _ = quantise_q8_0(x.ravel())
    stored = quantise_rows(x)
    assert stored.shape == (7, 3 * 34)
    np.testing.assert_array_equal(dequantise_rows(stored), (values.reshape(-1, 32) * scale[:, None]).reshape(7, 96))


def test_cache_write() -> None:
    x = np.random.default_rng(91).standard_normal((5, 200), dtype=np.float32)
    x[2, :40] = 0
    cache = np.zeros((2, 6, 200), np.int8)
    step, _alive = step_of(5, slots=[0, 1, 1, 0, 1], positions=[5, 0, 1, 2, 2])
    words = [*place(x, 3)[:2], 2, 64, 4 * 96, cache.ctypes.data + 34, *cache.strides[:2], 6, 2 * 34, 1, 0]
    cache_made = same_for_all_ranks("cache_write_q8_0", words, step, cache)
    expected = np.full_like(cache, -77)
    for row, (slot, position) in enumerate(zip([0, 1, 1, 0, 1], [5, 0, 1, 2, 2])):
        expected[slot, position, 34 : 5 * 34] = quantise_rows(np.concatenate([x[row, 3:67], x[row, 99:163]])).view(
            np.int8
        )
    np.testing.assert_array_equal(cache_made, expected)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(
    "shape", [(8, 2, 128, 128), (4, 1, 576, 512), (6, 2, 192, 128), (2, 2, 96, 32), (3, 3, 32, 96), (16, 2, 64, 64)]
)
def test_attention_equals_that_over_the_same_numbers_in_f32(shape: tuple[int, int, int, int], rows: int) -> None:
    heads, groups, key_width, value_width = shape
    generator = np.random.default_rng(92)
    context, first = 130, 80
    shared = key_width == 576  # latent rows: the values are the keys' first elements
    stored = [quantise_rows(generator.standard_normal((2, context, groups * key_width), dtype=np.float32))]
    stored += [stored[0] if shared else quantise_rows(generator.standard_normal((2, context, groups * value_width)))]
    plain = [dequantise_rows(cache) for cache in stored]
    slots, positions = np.zeros(rows, int), np.arange(first, first + rows)
    slots[20:31], positions[20:31] = 1, np.arange(len(slots[20:31]))
    q = generator.standard_normal((rows, heads * key_width), dtype=np.float32)
    out = np.empty((rows, heads * value_width), np.float32)
    step, _alive = step_of(rows, slots=slots.tolist(), positions=positions.tolist())
    areas = attention_scratch(context, heads // groups, key_width, value_width)
    results = []
    for kind, caches in (("q8_0", stored), ("f32", plain)):
        words = cache_words(*caches, heads=groups)
        places = (*place(q, 0, key_width), *place(out, 0, value_width))
        arguments = [heads, heads // groups, key_width, value_width, bits(0.1), *places, *words, *areas.words]
        results.append(same_for_all_ranks(f"attention_{kind}", arguments, step, out))
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(results[0], results[1])
    alone, _alive2 = step_of(1, slots=[int(slots[-1])], positions=[int(positions[-1])])
    arguments = [
        heads,
        heads // groups,
        key_width,
        value_width,
        bits(0.1),
        q[-1:].ctypes.data,
        *place(q, 0, key_width)[1:],
    ]
    words = cache_words(*stored, heads=groups)
    run_kernel("attention_q8_0", [*arguments, *place(out, 0, value_width), *words, *areas.words], alone)
    np.testing.assert_array_equal(out[0], results[0][-1])


def tokens_for(path: Path, count: int) -> NDArray[np.int32]:
    return np.random.default_rng(93).integers(0, vocabulary_of(path), count).astype(np.int32)


def test_pool_bits_slots_and_snapshots(tmp_path: Path) -> None:
    path = trained_file("tiny-qwen3moe-Q4_K_M")
    tokens = tokens_for(path, 150)
    with open_pool(path, 1, 128, "q8_0") as pool:
        base = evaluate(pool, tokens, 0, 0, 128)
        np.testing.assert_array_equal(evaluate(pool, tokens, 1, 0, [1]), base)
        np.testing.assert_array_equal(evaluate(pool, tokens[90:], 0, 90, [7, 1]), base[90:])  # taken back
        pool.copy_prefix(0, 2, 41)
        np.testing.assert_array_equal(evaluate(pool, tokens[41:], 2, 41, 30), base[41:])
        snapshot = pool.snapshot(0, 100)
        assert sum(rows.nbytes for rows in snapshot.rows.values()) == pool.snapshot_bytes(100)
        save_slot(tmp_path / "slot", tokens[:100], snapshot, {"plan": "x"})
    with open_pool(path, 2, 128, "q8_0") as pool:
        np.testing.assert_array_equal(evaluate(pool, tokens, 1, 0, [64, 3]), base)
        _, restored, _ = load_slot(tmp_path / "slot", {"plan": "x"}, 150)
        pool.restore(0, restored)
        np.testing.assert_array_equal(evaluate(pool, tokens[100:], 0, 100, 50), base[100:])
    with open_pool(path, 1, 128, "f16") as pool, pytest.raises(ValueError, match="does not fit state"):
        pool.restore(0, restored)


def test_plan_counts_blocks_and_refuses_what_has_none() -> None:
    path, room = trained_file("tiny-qwen3moe-Q4_K_M"), MemoryRoom(1 << 36, 1 << 36)
    with ModelFile.open(path) as model:
        program = build_program(model)
    halves = make_plan(DaemonConfig(str(path), context=4096), program, room)
    blocks = make_plan(DaemonConfig(str(path), context=4096, cache_type="q8_0"), program, room)
    widths = [state.width for state in program.states.values()]
    rows = 4096 * 4  # of 64 bytes a piece
    assert halves.term("KV cache") - rows * sum(aligned(2 * width, 64) for width in widths) < 1 << 14
    assert blocks.term("KV cache") - rows * sum(aligned(width // 32 * 34, 64) for width in widths) < 1 << 14
    assert blocks.term("KV cache") < halves.term("KV cache")
    assert halves.digest != blocks.digest
    for name, reason in (("deepseek2-lite", "blocks of 32 elements.*272"), ("deepseek2-lite-kvb", "blocks.*48")):
        with ModelFile.open(quantised_file(f"{name}-Q4_K_M")) as model, pytest.raises(PlanError, match=reason):
            make_plan(DaemonConfig(str(path), cache_type="q8_0"), build_program(model), room)
    with ModelFile.open(tiny41("a")) as model, pytest.raises(PlanError, match="not available for deepseek41"):
        make_plan(DaemonConfig(str(path), cache_type="q8_0"), build_program(model), room)


@pytest.mark.parametrize("name", ["llama-Q4_K_M", "qwen3-Q4_K_M", "qwen3moe-Q4_K_M", "deepseek2-v3-Q4_K_M"])
def test_against_llama_cpp_with_the_same_cache(name: str) -> None:
    """Its figures are of flash attention, without which it has no such values. It rounds queries to q8_0, too; the band
    is that of the other files."""
    stored = figures("cache-q8_0")[name]
    path = quantised_file(name)
    program = build_program(ModelFile.open(path))
    tokens = rows_of(figures(name)["tokens"])
    host = InProcessExecutor(program, context=128, max_rows=128, max_out_rows=128, cache_type="q8_0")
    found, median_mean = divergence(stored, host.step(tokens)[0]), host_band(name)
    print(name, found, median_mean)
    assert found.kl_median <= median_mean[0] and found.kl_mean <= median_mean[1]


def test_reference_executor_rounds_alike() -> None:
    path = quantised_file("qwen3moe-Q4_K_M")
    tokens = rows_of(figures("qwen3moe-Q4_K_M")["tokens"])
    program = build_program(ModelFile.open(path))
    host = InProcessExecutor(program, context=64, max_rows=64, max_out_rows=64, cache_type="q8_0")
    reference = ReferenceExecutor(program, context=64, max_rows=64, cache_type="q8_0")
    logits = reference.step(tokens).logits
    found = divergence(logits, host.step(tokens)[0])
    median, mean = host_band("qwen3moe-Q4_K_M")
    assert found.kl_median <= median and found.kl_mean <= mean
    again = ReferenceExecutor(program, context=64, max_rows=64, cache_type="q8_0")
    again.restore(0, reference.snapshot(0, 20))
    rest = rows_of(tokens.tokens[20:], start=20)
    # NumPy's products sum in another order for other numbers of rows, by CPU: now and then a key rounds the other way
    off = np.abs(again.step(rest).logits - logits[20:])
    assert off.max() < 0.02 and off.mean() < 1e-3
    forgotten = ReferenceExecutor(program, context=64, max_rows=64, cache_type="q8_0")
    assert np.abs(forgotten.step(rest).logits - logits[20:]).mean() > 0.1
