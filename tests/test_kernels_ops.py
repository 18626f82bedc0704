"""The kernels that are no matrix products, against NumPy; their results for 1, 2 and 3 ranks bit for bit."""

from __future__ import annotations

import struct
from typing import Any, Literal

import numpy as np
import pytest
from in_process import aligned_bytes, run_kernel
from kernel_references import Floats, float_dot, fma
from numpy.typing import NDArray

from bloomery.cpu_experts.kernels.layouts import ROUTER_WORDS, aligned, attention_area, attention_queries, score_row
from bloomery.runtime.reference_ops import rms_norm, rope, route, swiglu

RANKS = (1, 2, 3)


def bits(value: float) -> int:
    word: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return word


def place(array: NDArray[Any], start: int = 0, stride: int = 0) -> tuple[int, int, int]:
    """Address, row stride and head stride of heads that start at element `start`."""
    return array.ctypes.data + 4 * start, array.strides[0], 4 * stride


def step_of(rows: int, slots: Any = (), positions: Any = (), out_rows: Any = ()) -> tuple[NDArray[np.int64], list[Any]]:
    arrays = [np.array(values, np.int32) for values in ((), slots, positions, out_rows)]
    return np.array([rows, len(out_rows), *(array.ctypes.data for array in arrays)], np.int64), arrays


def same_for_all_ranks(kernel: str, words: list[int], step: NDArray[np.int64], out: NDArray[Any]) -> NDArray[Any]:
    """Runs the kernel with 1, 2 and 3 ranks into garbage and returns what it wrote."""
    results = []
    for ranks in RANKS:
        out[...] = -77
        run_kernel(kernel, words, step, ranks)
        results.append(out.copy())
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    return results[0]


@pytest.mark.parametrize("width", [1, 7, 8, 61, 256])
def test_add_and_swiglu(width: int) -> None:
    generator = np.random.default_rng(30)
    x, y = (generator.standard_normal((5, width), dtype=np.float32) * 4 for _ in range(2))
    x[0, 0] = -200.0  # e^200 overflows: silu is -0
    out, (step, _) = np.empty_like(x), step_of(5)
    words = [0, 1, 1, width, *place(x), *place(y), *place(out)]
    np.testing.assert_array_equal(same_for_all_ranks("add", words, step, out), x + y)
    for limit in (float("inf"), 1.5):
        made = same_for_all_ranks("swiglu", [*words, bits(limit)], step, out)
        exact = swiglu(x.astype(np.float64), y.astype(np.float64), 0.0 if limit == float("inf") else limit)
        np.testing.assert_allclose(made, exact, rtol=4e-7, atol=1e-38)  # exp 1 ulp, sum, quotient, product: 4 roundings
        x[1, 0] = y[2, 0] = np.nan  # stays one, whatever the limit
        made = same_for_all_ranks("swiglu", [*words, bits(limit)], step, out)
        assert np.isnan(made[1:3, 0]).all() and np.isnan(made).sum() == 2
        x[1, 0] = y[2, 0] = 1.0


def test_elementwise_heads_with_gaps() -> None:
    x = np.random.default_rng(31).standard_normal((3, 40), dtype=np.float32)
    out, (step, _) = np.empty_like(x), step_of(3)
    words = [0, 1, 3, 5, *place(x, 1, 9), *place(x, 2, 9), *place(out, 3, 9)]
    made = same_for_all_ranks("add", words, step, out)
    for head in range(3):
        expected = x[:, 1 + 9 * head :][:, :5] + x[:, 2 + 9 * head :][:, :5]
        np.testing.assert_array_equal(made[:, 3 + 9 * head :][:, :5], expected)
    assert np.count_nonzero(made == -77) == made.size - 3 * 3 * 5


def test_copies() -> None:
    x = np.random.default_rng(32).standard_normal((4, 30), dtype=np.float32)
    step, _alive = step_of(4, out_rows=[0, 3])
    out = np.empty((4, 30), np.float32)
    made = same_for_all_ranks("copy_heads", [0, 3, 4, *place(x, 2, 0), *place(out, 1, 9)], step, out)
    for head in range(3):
        np.testing.assert_array_equal(made[:, 1 + 9 * head :][:, :4], x[:, 2:6])
    assert np.count_nonzero(made == -77) == made.size - 4 * 3 * 4
    chosen = np.empty((2, 30), np.float32)
    words = [x.ctypes.data, x.strides[0], chosen.ctypes.data, chosen.strides[0], 30]
    np.testing.assert_array_equal(same_for_all_ranks("select_rows", words, step, chosen), x[[0, 3]])


@pytest.mark.parametrize("width", [5, 64, 200])
def test_rms_norm(width: int) -> None:
    generator = np.random.default_rng(33)
    x = generator.standard_normal((5, 3 * width), dtype=np.float32) * 10
    weight = generator.standard_normal(width, dtype=np.float32)
    out, (step, _) = np.empty_like(x), step_of(5)
    words = [0, 3, width, *place(x, 0, width), *place(out, 0, width), weight.ctypes.data, bits(1e-6)]
    made = same_for_all_ranks("rms_norm", words, step, out)
    exact = rms_norm(x.astype(np.float64).reshape(5, 3, width), weight.astype(np.float64), 1e-6)
    np.testing.assert_allclose(made.reshape(5, 3, width), exact, rtol=4e-7)  # mean, root, quotient, two products


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("count", [3, 8, 20])
def test_rope(pairs: Literal["halves", "neighbours"], count: int) -> None:
    generator = np.random.default_rng(34)
    width, heads = 2 * count + 6, 3
    x = generator.standard_normal((4, heads * width), dtype=np.float32)
    positions = np.array([0, 1, 4097, 130000], np.int32)
    frequencies = tuple(float(np.float32(10000.0 ** (-i / count))) for i in range(count))
    stride = aligned(8 * count)
    table, out = aligned_bytes(4 * stride).view(np.float32), np.empty_like(x)
    step, _alive = step_of(4, positions=positions)
    table_words = [table.ctypes.data, stride, count, bits(1.25), 0, 0, *map(bits, frequencies)]
    same_for_all_ranks("rope_table", table_words, step, table)
    words = [table.ctypes.data, stride, count, heads, width]
    exact = rope(x.astype(np.float64).reshape(4, heads, width), positions, frequencies, 1.25, pairs)
    made = same_for_all_ranks(f"rope_{pairs}", [*words, *place(x, 0, width), *place(out, 0, width), 0], step, out)
    np.testing.assert_allclose(made.reshape(exact.shape), exact, rtol=0, atol=1e-6)
    run_kernel(f"rope_{pairs}", [*words, *place(x, 0, width), *place(x, 0, width), 0], step, 2)  # in place
    np.testing.assert_array_equal(x, made)


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
def test_cache_write(cache_type: str) -> None:
    x = np.random.default_rng(35).standard_normal((5, 40), dtype=np.float32)
    x[0, 3] = 1 + 2**-11  # a tie in f16: to even
    kind = np.float32 if cache_type == "f32" else np.float16
    cache = np.zeros((2, 6, 31), kind)
    step, _alive = step_of(5, slots=[0, 1, 1, 0, 1], positions=[5, 0, 1, 2, 2])
    element = cache.itemsize
    target = [cache.ctypes.data + 4 * element, *cache.strides[:2], 6, 11 * element]
    words = [*place(x, 3)[:2], 2, 11, 4 * 17, *target, 1, 0]
    made = same_for_all_ranks(f"cache_write_{cache_type}", words, step, cache)
    expected = np.full_like(cache, -77)
    for row, (slot, position) in enumerate(zip([0, 1, 1, 0, 1], [5, 0, 1, 2, 2])):
        expected[slot, position, 4:26] = np.concatenate([x[row, 3:14], x[row, 20:31]])
    np.testing.assert_array_equal(made, expected)


# (query heads, kv heads, key width, value width, values are the keys' state)
SHAPES = [
    (4, 2, 32, 32, False),
    (6, 1, 88, 72, True),
    (3, 3, 19, 5, False),
    (2, 1, 128, 128, False),
    (16, 2, 64, 128, False),  # heads are taken four at a time
    (4, 1, 96, 64, True),  # by three ranks one at a time, by fewer four at a time
]


def cache_words(*caches: NDArray[Any], heads: int = 1) -> list[int]:
    """The arguments for caches (slots, rows, width) whose rows are so many heads side by side."""
    return [word for cache in caches for word in (cache.ctypes.data, *cache.strides[:2], cache.strides[1] // heads)]


class Scratch:
    """Scratch of three ranks, full of garbage, and the arguments that describe it."""

    def __init__(self, area: int, *rest: int) -> None:
        self.memory = aligned_bytes(3 * area, 0xFF)
        self.words = (self.memory.ctypes.data, rest[0], area, *rest[1:])


def attention_scratch(context: int, group: int, key_width: int, value_width: int) -> Scratch:
    area = attention_area(context, group, key_width, value_width)
    return Scratch(area, score_row(context), attention_queries(context, group))


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
@pytest.mark.parametrize(
    "shape", [(8, 2, 128, 128), (16, 2, 64, 64), (6, 2, 192, 128), (2, 2, 96, 64), (2, 1, 272, 256)]
)
def test_attention_of_many_rows_equals_each_row_alone(shape: tuple[int, int, int, int], cache_type: str) -> None:
    """More rows than are taken together, of two slots in turn, at positions that end inside of blocks of keys."""
    heads, groups, key_width, value_width = shape
    generator = np.random.default_rng(39)
    rows, context, first = 75, 200, 60
    kind = np.float32 if cache_type == "f32" else np.float16
    keys = generator.standard_normal((2, context, groups * key_width)).astype(kind)
    values = generator.standard_normal((2, context, groups * value_width)).astype(kind)
    slots, positions = np.zeros(rows, int), np.arange(first, first + rows)
    slots[20:41], positions[20:41] = 1, np.arange(21)
    for slot in range(2):  # what no row may look at
        keys[slot, positions[slots == slot].max() + 1 :] = np.nan
        values[slot, positions[slots == slot].max() + 1 :] = np.nan
    q = generator.standard_normal((rows, heads * key_width), dtype=np.float32)
    out = np.empty((rows, heads * value_width), np.float32)
    places = (*place(q, 0, key_width), *place(out, 0, value_width))
    caches = cache_words(keys, values, heads=groups)
    areas = attention_scratch(context, heads // groups, key_width, value_width)
    words = [heads, heads // groups, key_width, value_width, bits(0.1), *places, *caches, *areas.words]
    step, _alive = step_of(rows, slots=slots.tolist(), positions=positions.tolist())
    made = same_for_all_ranks(f"attention_{cache_type}", words, step, out)
    for row in range(rows):
        alone, _alive2 = step_of(1, slots=[int(slots[row])], positions=[int(positions[row])])
        words[5], words[8] = q[row:].ctypes.data, out[row:].ctypes.data
        run_kernel(f"attention_{cache_type}", words, alone)
        np.testing.assert_array_equal(out[row], made[row])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache_type", ["f32", "f16"])
def test_attention(shape: tuple[int, int, int, int, bool], cache_type: str) -> None:
    heads, groups, key_width, value_width, shared = shape
    generator = np.random.default_rng(36)
    context, scale = 50, 0.3
    kind = np.float32 if cache_type == "f32" else np.float16
    keys = generator.standard_normal((2, context, groups * key_width)).astype(kind)
    values = keys if shared else generator.standard_normal((2, context, groups * value_width)).astype(kind)
    slots, positions = [1, 1, 0, 0, 1], [0, 48, 7, 8, 16]
    for slot, last in ((0, 8), (1, 48)):  # what no row may look at
        keys[slot, last + 1 :] = np.nan
        values[slot, last + 1 :] = np.nan
    q = generator.standard_normal((5, heads * key_width), dtype=np.float32)
    out = np.empty((5, heads * value_width), np.float32)
    areas = attention_scratch(context, heads // groups, key_width, value_width)
    step, _alive = step_of(5, slots=slots, positions=positions)
    places = (*place(q, 0, key_width), *place(out, 0, value_width))
    caches = cache_words(keys, values, heads=groups)
    words = [heads, heads // groups, key_width, value_width, bits(scale), *places, *caches, *areas.words]
    made = same_for_all_ranks(f"attention_{cache_type}", words, step, out).reshape(5, heads, value_width)
    for row, (slot, position) in enumerate(zip(slots, positions)):
        for head in range(heads):
            group = head // (heads // groups)
            k = keys[slot, : position + 1, group * key_width :][:, :key_width].astype(np.float64)
            v = values[slot, : position + 1, group * value_width :][:, :value_width].astype(np.float64)
            weights = np.exp((k @ q[row, head * key_width :][:key_width].astype(kind).astype(np.float64)) * scale)
            weights /= weights.sum()
            rounding = 2.0**-11 * (weights @ np.abs(v)) if cache_type == "f16" else 0.0  # of each weight to f16
            assert np.all(np.abs(made[row, head] - weights @ v) <= 4e-6 + rounding)
    alone, _alive2 = step_of(1, slots=slots[1:2], positions=positions[1:2])  # a row of a block equals the row alone
    words[5], words[8] = q[1:].ctypes.data, out[1:].ctypes.data
    run_kernel(f"attention_{cache_type}", words, alone)
    np.testing.assert_array_equal(out[1].reshape(heads, value_width), made[1])


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("shape", [(16, 2, 64, 128), (6, 2, 192, 128), (3, 3, 19, 5), (8, 2, 128, 64)])
def test_attention_does_not_depend_on_where_heads_lie(shape: tuple[int, int, int, int], rows: int) -> None:
    """Heads whose rows lie together, written so by cache_write, give the bits of heads side by side in a row."""
    heads, groups, *widths = shape
    generator = np.random.default_rng(40)
    context, first = 70, 20
    positions = np.arange(first, first + rows)
    areas = attention_scratch(context, heads // groups, *widths)
    step, _alive = step_of(rows, slots=[1] * rows, positions=positions.tolist())
    filling, _alive2 = step_of(first + rows, slots=[1] * (first + rows), positions=list(range(first + rows)))
    sources = [generator.standard_normal((first + rows, groups * width), dtype=np.float32) for width in widths]
    q = generator.standard_normal((rows, heads * widths[0]), dtype=np.float32)
    out = np.empty((rows, heads * widths[1]), np.float32)
    places = (*place(q, 0, widths[0]), *place(out, 0, widths[1]))
    results = []
    for axes in ((0, 1, 2, 3), (0, 2, 1, 3)):  # how (slots, rows, heads, width) lies in memory
        words: list[int] = []
        alive = []
        for x, width in zip(sources, widths):
            sizes = (2, context, groups, width)
            memory = np.full([sizes[axis] for axis in axes], np.nan, np.float16)
            cache = memory.transpose(axes)
            alive.append(memory)
            strides = cache.strides
            source = [*place(x)[:2], groups, width, 4 * width]
            target = [cache.ctypes.data, *strides[:2], context, strides[2]]
            run_kernel("cache_write_f16", [*source, *target, 1, 0], filling, 2)
            words += [cache.ctypes.data, *strides[:3]]
        head = [heads, heads // groups, *widths, bits(0.1)]
        results.append(same_for_all_ranks("attention_f16", [*head, *places, *words, *areas.words], step, out))
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(results[0], results[1])


def test_attention_of_one_position_is_its_value_and_of_two_the_stated_order() -> None:
    generator = np.random.default_rng(37)
    keys, values = (generator.standard_normal((1, 2, 40), dtype=np.float32) for _ in range(2))
    q, out = generator.standard_normal((2, 40), dtype=np.float32), np.empty((2, 40), np.float32)
    scores = aligned_bytes(64, 0xFF)
    step, _alive = step_of(2, slots=[0, 0], positions=[0, 1])
    caches = cache_words(keys, values)
    run_kernel(
        "attention_f32",
        [1, 1, 40, 40, bits(1.0), *place(q, 0, 40), *place(out, 0, 40), *caches, scores.ctypes.data, 64, 64],
        step,
    )
    np.testing.assert_array_equal(out[0], values[0, 0])
    dots = float_dot(keys[0], q[1])
    first, second = np.exp((dots - dots.max()).astype(np.float64)).astype(np.float32)
    total = first + second
    expected = fma(values[0, 1], second / total, fma(values[0, 0], first / total, np.float32(0)))
    np.testing.assert_allclose(out[1], expected, rtol=3e-7, atol=1e-7)


def run_router(
    logits: Floats, used: int, gating: str, bias: Floats | None, normalise: bool, scale: float, groups: int, kept: int
) -> tuple[NDArray[np.int32], Floats]:
    rows, experts = logits.shape
    ids, mix = np.empty((rows, used), np.int32), np.empty((rows, used), np.float32)
    area = aligned(4 * ROUTER_WORDS * experts)
    scratch = aligned_bytes(3 * area, 0xFF)
    step, _alive = step_of(rows)
    views = [word for array in (logits, ids, mix) for word in (array.ctypes.data, array.strides[0])]
    rule = [0 if bias is None else bias.ctypes.data, int(normalise), bits(scale), groups, kept]
    words = [0, experts, used, *views, *rule, scratch.ctypes.data, area]
    same_for_all_ranks(f"router_{gating}", words, step, mix)
    return same_for_all_ranks(f"router_{gating}", words, step, ids), mix


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "groups", "kept"), [(9, 1, 1), (64, 1, 1), (32, 4, 2), (12, 6, 3)])
def test_router(gating: Literal["softmax", "sigmoid"], experts: int, groups: int, kept: int) -> None:
    generator = np.random.default_rng(38)
    logits = generator.standard_normal((7, experts), dtype=np.float32) * 2
    bias = generator.standard_normal(experts, dtype=np.float32) if gating == "sigmoid" else None
    for normalise, scale in ((True, 2.5), (False, 1.0)):
        ids, mix = run_router(logits, 4, gating, bias, normalise, scale, groups, kept)
        wide = None if bias is None else bias.astype(np.float64)
        expected_ids, expected_mix = route(
            logits.astype(np.float64), 4, bias=wide, gating=gating, normalise=normalise, scale=scale, groups=groups,
            groups_used=kept,
        )  # fmt: skip
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(mix, expected_mix, rtol=1e-6)


def test_router_ties_go_to_the_lower_id_and_nan_loses() -> None:
    logits = np.zeros((4, 10), np.float32)
    logits[1, [8, 3]] = 1
    logits[3, 4] = 5
    ids, _ = run_router(logits, 3, "softmax", None, True, 1.0, 1, 1)
    np.testing.assert_array_equal(ids, [[0, 1, 2], [3, 8, 0], [0, 1, 2], [4, 0, 1]])
    logits[:, 1] = np.nan
    ids, _ = run_router(logits, 3, "sigmoid", None, True, 1.0, 1, 1)
    np.testing.assert_array_equal(ids, [[0, 2, 3], [3, 8, 0], [0, 2, 3], [4, 0, 2]])
    ids, mix = run_router(np.full((1, 10), -200, np.float32), 3, "sigmoid", None, True, 1.0, 1, 1)
    np.testing.assert_array_equal(ids, [[0, 1, 2]])
    assert not np.isnan(mix).any()
    for all_nan in ("softmax", "sigmoid"):  # still distinct, valid ids
        ids, _ = run_router(np.full((2, 10), np.nan, np.float32), 3, all_nan, None, True, 1.0, 5, 2)
        assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 10 for row in ids.tolist())


def test_experts_sum_adds_in_rank_order() -> None:
    generator = np.random.default_rng(39)
    items = generator.standard_normal((15, 301), dtype=np.float32)
    mix = generator.random((5, 3), dtype=np.float32)
    ids = np.array([[4, 0, 2], [1, 2, -1], [7, -1, 3], [-1, 0, 0], [0, 0, 0]], np.int32)
    used = [3, 2, 1, 0, 3]  # a negative id ends a row's list
    out, (step, _) = np.empty((5, 301), np.float32), step_of(5)
    words = [items.ctypes.data, items.strides[0], mix.ctypes.data, 12, 3, out.ctypes.data, out.strides[0], 301, 0]
    words += [ids.ctypes.data, 12]
    parts = items.reshape(5, 3, 301) * mix[:, :, None]
    expected = np.zeros((5, 301), np.float32)
    for row, count in enumerate(used):
        items[3 * row + count : 3 * row + 3] = np.nan
        for place in range(count):
            expected[row] += parts[row, place]
    np.testing.assert_array_equal(same_for_all_ranks("experts_sum", words, step, out), expected)


@pytest.mark.parametrize("width", [1, 7, 8, 1000, 50001])
def test_argmax(width: int) -> None:
    generator = np.random.default_rng(40)
    x = generator.integers(-50, 50, (6, width)).astype(np.float32)  # many ties
    x[1] = -np.inf
    x[2] = -1e30
    out, (step, _) = np.empty((6, 1), np.int32), step_of(6)
    words = [0, x.ctypes.data, x.strides[0], out.ctypes.data, 4, width]
    np.testing.assert_array_equal(same_for_all_ranks("argmax", words, step, out)[:, 0], x.argmax(1))
    if width > 8:
        x[:, 5] = np.nan
        made = same_for_all_ranks("argmax", words, step, out)[:, 0]
        np.testing.assert_array_equal(made, np.where(np.isnan(x), -np.inf, x).argmax(1))
