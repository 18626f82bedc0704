"""The SIMD vocabulary, word by word against NumPy, and the refusal of CPUs without its floor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import cfunc, types
from numpy.typing import NDArray

from bloomery.cpu_experts import isa
from bloomery.cpu_experts.simd import Emitter, Value, emits, f32x8, i8x16, i8x32, i16x8, i16x16, i32x8, vector

Word = Callable[[Emitter, Value, Value, Value], None]


def run(word: Word, *inputs: NDArray[Any], out: NDArray[Any], count: int = 0) -> None:
    """Compiles `word(emitter, address of inputs one after the other, address of out, count)` and calls it."""
    emitted = emits(types.void, types.int64, types.int64, types.int64)(word)

    def kernel(source: int, target: int, number: int) -> None:
        emitted(source, target, number)

    compiled = cfunc(types.void(types.int64, types.int64, types.int64))(kernel)
    memory = np.concatenate([np.ascontiguousarray(array).view(np.uint8).ravel() for array in inputs])
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(compiled.address)
    function(memory.ctypes.data, out.ctypes.data, count)


def generator() -> np.random.Generator:
    return np.random.default_rng(50)


def test_pair_products() -> None:
    unsigned = generator().integers(0, 128, 32).astype(np.uint8)
    signed = generator().integers(-127, 128, 32).astype(np.int8)
    out = np.empty(16, np.int16)
    run(
        lambda s, a, o, n: s.store(s.pair_products_u8(s.load(i8x32, a), s.load(i8x32, a, 32)), o),
        unsigned,
        signed,
        out=out,
    )
    np.testing.assert_array_equal(out, (unsigned.astype(int) * signed).reshape(-1, 2).sum(1))
    for kind, lanes in ((i16x16, 16), (i16x8, 8)):
        x, y = generator().integers(-32768, 32768, (2, lanes)).astype(np.int16)
        wide = np.empty(lanes // 2, np.int32)

        def products(s: Emitter, a: Value, o: Value, n: Value, kind: Any = kind, lanes: int = lanes) -> None:
            s.store(s.pair_products_i16(s.load(kind, a), s.load(kind, a, 2 * lanes)), o)

        run(products, x, y, out=wide)
        np.testing.assert_array_equal(wide, (x.astype(np.int64) * y).reshape(-1, 2).sum(1).astype(np.int32))


def test_bytes() -> None:
    x = generator().integers(0, 256, 32).astype(np.uint8)
    sign = generator().integers(-1, 2, 32).astype(np.int8)
    out = np.empty(32, np.uint8)
    run(lambda s, a, o, n: s.store(s.bytes_shr(s.load(i8x32, a), 3, 0x1D), o), x, out=out)
    np.testing.assert_array_equal(out, (x >> 3) & 0x1D)
    run(lambda s, a, o, n: s.store(s.bytes_shl(s.load(i8x32, a), 2, 0xAC), o), x, out=out)
    np.testing.assert_array_equal(out, (x << 2) & 0xAC)
    run(lambda s, a, o, n: s.store(s.with_sign(s.load(i8x32, a), s.load(i8x32, a, 32)), o), x, sign, out=out)
    np.testing.assert_array_equal(out.view(np.int8), (x.view(np.int8).astype(int) * sign).astype(np.int8))
    table, indices = generator().integers(0, 256, (2, 32)).astype(np.uint8)
    run(lambda s, a, o, n: s.store(s.table(s.load(i8x32, a), s.load(i8x32, a, 32)), o), table, indices, out=out)
    half = np.arange(32) // 16 * 16
    np.testing.assert_array_equal(out, np.where(indices & 128, 0, table[half + (indices & 15)]))


def test_sums_of_four() -> None:
    x = generator().integers(-(2**31), 2**31, (4, 8)).astype(np.int32)
    total = np.empty(4, np.int32)
    run(lambda s, a, o, n: s.store(s.sum4(*[s.load(i32x8, a, 32 * k) for k in range(4)]), o), x, out=total)
    np.testing.assert_array_equal(total, x.sum(1, dtype=np.int32))
    f = generator().standard_normal((4, 8), dtype=np.float32)
    sums, first = np.empty(4, np.float32), np.empty(1, np.float32)
    run(lambda s, a, o, n: s.store(s.float_sum4(*[s.load(f32x8, a, 32 * k) for k in range(4)]), o), f, out=sums)
    pairs = f[:, 0::2] + f[:, 1::2]
    np.testing.assert_array_equal(sums, (pairs[:, 0] + pairs[:, 1]) + (pairs[:, 2] + pairs[:, 3]))
    run(lambda s, a, o, n: s.store(s.float_sum(s.load(f32x8, a)), o), f, out=first)
    assert first[0] == sums[0]


def test_widths_shifts_and_lanes() -> None:
    x = generator().integers(-128, 128, 16).astype(np.int8)
    out = np.empty(16, np.int16)
    run(lambda s, a, o, n: s.store(s.sext(i16x16, s.lanes(s.load(i8x16, a), range(15, -1, -1))), o), x, out=out)
    np.testing.assert_array_equal(out, x[::-1])
    run(lambda s, a, o, n: s.store(s.zext(i16x16, s.load(i8x16, a)), o), x, out=out)
    np.testing.assert_array_equal(out, x.view(np.uint8))
    words, shifted = generator().integers(0, 2**31, 8).astype(np.int32), np.empty(8, np.int32)
    run(lambda s, a, o, n: s.store(s.lshr(s.load(i32x8, a), range(8)), o), words, out=shifted)
    np.testing.assert_array_equal(shifted, words >> np.arange(8))
    run(lambda s, a, o, n: s.store(s.concat(s.high(s.load(i32x8, a)), s.low(s.load(i32x8, a))), o), words, out=shifted)
    np.testing.assert_array_equal(shifted, np.roll(words, 4))


@pytest.mark.parametrize("count", [-3, 0, 1, 5, 8, 12])
def test_masked_memory(count: int) -> None:
    x = generator().standard_normal(8, dtype=np.float32)
    out = np.full(8, -77, np.float32)
    run(lambda s, a, o, n: s.store(s.load_first(f32x8, a, n), o), x, out=out, count=count)
    inside = np.arange(8) < count
    np.testing.assert_array_equal(out, np.where(inside, x, 0))
    out[:] = -77
    run(lambda s, a, o, n: s.store_first(f32x8, s.load(f32x8, a), o, n), x, out=out, count=count)
    np.testing.assert_array_equal(out, np.where(inside, x, -77))
    run(lambda s, a, o, n: s.store(s.first_or(s.load(f32x8, a), 2.5, n), o), x, out=out, count=count)
    np.testing.assert_array_equal(out, np.where(inside, x, 2.5))


def test_rounding_and_greater() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 1e6 + 0.5, -3.2, 3.7], np.float32)
    out = np.empty(8, np.int32)
    run(lambda s, a, o, n: s.store(s.round_to_i32(s.load(f32x8, a)), o), x, out=out)
    np.testing.assert_array_equal(out, np.rint(x))
    y = np.array([1, np.nan, 3, np.nan, 5, -0.0, 0.0, 8], np.float32)
    z = np.array([2, 2, np.nan, np.nan, 4, 0.0, -0.0, 8], np.float32)
    greater = np.empty(8, np.float32)
    run(lambda s, a, o, n: s.store(s.fmax(s.load(f32x8, a), s.load(f32x8, a, 32)), o), y, z, out=greater)
    np.testing.assert_array_equal(greater, np.where(y > z, y, z))


def test_exp_is_within_one_unit_in_the_last_place() -> None:
    def exp_all(s: Emitter, a: Value, o: Value, n: Value) -> None:
        s.store(s.exp(s.load(f32x8, a)), o)

    emitted = emits(types.void, types.int64, types.int64, types.int64)(exp_all)

    def kernel(source: int, target: int, count: int) -> None:
        for at in range(0, 4 * count, 32):
            emitted(source + at, target + at, 0)

    compiled = cfunc(types.void(types.int64, types.int64, types.int64))(kernel)
    everywhere = np.linspace(-87.3, 88.7, 8 * 250_000)
    x = np.concatenate([everywhere, generator().uniform(-1, 1, 8 * 50_000)]).astype(np.float32)
    out = np.empty_like(x)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(compiled.address)(x.ctypes.data, out.ctypes.data, len(x))
    exact = np.exp(x.astype(np.float64))
    error = np.abs(out - exact) / np.spacing(exact.astype(np.float32))
    print(f"greatest error {error.max():.3f} units at {x[error.argmax()]}")
    assert error.max() < 1.0
    edges = np.array([-np.inf, -1e30, -88, 0, 89, 1e30, np.inf, np.nan], np.float32)
    out = np.empty(8, np.float32)
    run(exp_all, edges, out=out)
    np.testing.assert_array_equal(out, np.array([0, 0, 0, 1, np.inf, np.inf, np.inf, np.nan], np.float32))


def test_exp_of_nothing_above_zero_is_the_same() -> None:
    x = np.concatenate([-np.geomspace(1e-30, 104, 8 * 2000), np.linspace(-87.4, 0, 8 * 2000)]).astype(np.float32)
    x[:8] = [-np.inf, -1e30, -87.33, np.nextafter(np.float32(-87.33), np.float32(0)), -0.0, 0, np.nan, -88.0]

    def both(s: Emitter, a: Value, o: Value, n: Value) -> None:
        def step(index: Value, _: list[Value]) -> list[Value]:
            at = s.mul(index, index.type(32))
            values = s.load(f32x8, s.add(a, at))
            s.store(s.exp(values), s.add(o, at))
            s.store(s.exp(values, at_most_zero=True), s.add(s.add(o, at), at.type(x.nbytes)))
            return []

        s.loop(n, [], step)

    out = np.empty((2, x.size), np.float32)
    run(both, x, out=out, count=x.size // 8)
    np.testing.assert_array_equal(out[1], out[0])
    assert (out[0] > 0).sum() > x.size // 2


@pytest.mark.skipif(isa.AVX512VNNI not in isa.available_isas(), reason="needs AVX-512-VNNI")
@pytest.mark.parametrize("lanes", [8, 16])
def test_vnni_products_do_not_saturate(lanes: int) -> None:
    kind, bytes_ = vector("i32", lanes), vector("i8", 4 * lanes)
    unsigned = generator().integers(0, 256, 4 * lanes).astype(np.uint8)
    signed = generator().integers(-128, 128, 4 * lanes).astype(np.int8)
    unsigned[:4], signed[:4] = 255, -128
    total = generator().integers(-(2**20), 2**20, lanes).astype(np.int32)
    out = np.empty(lanes, np.int32)

    def bytes_four(s: Emitter, a: Value, o: Value, n: Value) -> None:
        x, y = s.load(bytes_, a), s.load(bytes_, a, 4 * lanes)
        s.store(s.add_products_u8(s.load(kind, a, 8 * lanes), x, y), o)

    run(bytes_four, unsigned, signed, total, out=out)
    np.testing.assert_array_equal(out, total + (unsigned.astype(np.int32) * signed).reshape(-1, 4).sum(1))
    x, y = generator().integers(-32767, 32768, (2, 2 * lanes)).astype(np.int16)

    def words_two(s: Emitter, a: Value, o: Value, n: Value) -> None:
        s.store(s.add_products_i16(s.load(kind, a, 8 * lanes), s.load(kind, a), s.load(kind, a, 4 * lanes)), o)

    run(words_two, x, y, total, out=out)
    expected = total + (x.astype(np.int64) * y).reshape(-1, 2).sum(1)
    np.testing.assert_array_equal(out, expected.astype(np.int32))


@pytest.mark.skipif(isa.AVX512VNNI not in isa.available_isas(), reason="needs AVX-512")
def test_a_table_of_64_bytes_is_looked_up_in_each_16() -> None:
    table, indices = generator().integers(0, 256, (2, 64)).astype(np.uint8)
    out = np.empty(64, np.uint8)
    wide = vector("i8", 64)
    run(lambda s, a, o, n: s.store(s.table(s.load(wide, a), s.load(wide, a, 64)), o), table, indices, out=out)
    part = np.arange(64) // 16 * 16
    np.testing.assert_array_equal(out, np.where(indices & 128, 0, table[part + (indices & 15)]))


def test_what_comes_after_something_is_the_same() -> None:
    x, y = generator().integers(-1000, 1000, (2, 8)).astype(np.int32)
    out = np.empty(8, np.int32)

    def late(s: Emitter, a: Value, o: Value, n: Value) -> None:
        first = s.load(i32x8, a)
        s.store(s.add(s.after(first, s.load(i32x8, a, 32), first), first), o)

    run(late, x, y, out=out)
    np.testing.assert_array_equal(out, 2 * x)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_loop_carries_values(count: int) -> None:
    x = generator().integers(0, 1000, (6, 8)).astype(np.int32)

    def total(s: Emitter, a: Value, o: Value, n: Value) -> None:
        def body(index: Value, carried: list[Value]) -> list[Value]:
            at = s.add(a, s.mul(index, index.type(32)))
            return [s.add(carried[0], s.load(i32x8, at)), s.add(carried[1], index)]

        sums, numbers = s.loop(n, [s.zero(i32x8), n.type(0)], body)
        s.store(sums, o)
        s.store(numbers, o, 32)

    out = np.empty(10, np.int32)
    run(total, x, out=out, count=count)
    np.testing.assert_array_equal(out[:8], x[:count].sum(0))
    assert out[8] == sum(range(count))


def test_a_forced_isa_needs_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    features = dict.fromkeys(isa.NEEDS[isa.AVX512VNNI], True)
    monkeypatch.setenv("BLOOMERY_ISA", "avx512vnni")
    assert isa.refusal(features) is None
    reason = isa.refusal({**features, "avx512vnni": False})
    assert reason is not None and "BLOOMERY_ISA=avx512vnni" in reason and "AVX512VNNI" in reason
    monkeypatch.setenv("BLOOMERY_ISA", "avx3")
    reason = isa.refusal(features)
    assert reason is not None and "avx2, avx512vnni" in reason


def test_a_cpu_without_the_floor_is_refused_by_name() -> None:
    features = dict.fromkeys(isa.NEEDS[isa.AVX2], True)
    assert isa.refusal(features) is None
    assert isa.refusal() is None
    del features["f16c"]
    features["avx2"] = False
    reason = isa.refusal(features)
    assert reason is not None and "AVX2, F16C" in reason and "FMA" not in reason
