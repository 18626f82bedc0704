"""The ops that `deepseek4` and `deepseek41` add, against the sentences that define them written out as loops in
float64, against figures of the publisher's functions, and the engram hash against worked row ids of the full model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from bloomery.runtime import reference_deepseek4 as ops
from bloomery.runtime import reference_ops
from bloomery.runtime.architectures.deepseek4_hyper import yarn_frequencies
from bloomery.runtime.engram_hash import NO_TOKEN, EngramHash, EngramSite, histories

SEED = 20260412
Array = NDArray[np.float64]


@pytest.fixture
def rng() -> np.random.Generator:
    print("seed", SEED)
    return np.random.default_rng(SEED)


def close(found: NDArray[np.floating], expected: object, atol: float = 1e-13) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=atol)


# -- figures that come out of the publisher's functions with the same digits -------------------------------------------
def test_hyper_mix_vector() -> None:
    i = np.arange(24)
    logits, base = 0.1 * ((7 * i) % 11) - 0.5, 0.05 * ((3 * i) % 5) - 0.1
    streams = np.ones((1, 4, 8))  # of mean square 1: logits are taken as they are
    scale = np.array([0.5, 1.0, 2.0])
    pre, post, mixing = ops.hyper_mix(streams, logits[None], base, scale, epsilon=1e-20, hyper_epsilon=1e-6, rounds=20)
    digits = {"rtol": 0, "atol": 6e-8}
    np.testing.assert_allclose(pre[0], [0.4133834, 0.5374308, 0.4625712, 0.5866186], **digits)
    np.testing.assert_allclose(post[0], [1.0499584, 0.8026247, 1.2212785, 0.9750052], **digits)
    expected = [
        [0.1864301, 0.4123038, 0.2328686, 0.1683965],
        [0.2616573, 0.0823311, 0.4196639, 0.2363467],
        [0.1748645, 0.3867255, 0.2804592, 0.1579497],
        [0.3770471, 0.1186386, 0.0670072, 0.4373060],
    ]
    np.testing.assert_allclose(mixing[0], expected, **digits)
    assert abs(mixing.sum() - 3.999996) < 5e-7


def test_yarn_frequencies() -> None:
    found = yarn_frequencies(64, 160000.0, 65536, 16.0, 32.0, 1.0)
    expected = {
        0: 1.0, 1: 0.687656022, 15: 0.00363553858, 16: 0.002265625, 20: 0.000296977778, 24: 1.953125e-5,
        25: 5.37231267e-6, 31: 5.68052904e-7,
    }  # fmt: skip
    for pair, frequency in expected.items():
        assert math.isclose(found[pair], frequency, rel_tol=2e-9), pair


def test_router_scores_and_engram_gates() -> None:
    logits = np.array([-3.0, 0.0, 1.0, 5.0, 25.0])
    np.testing.assert_allclose(
        ops.softplus_scores(logits), [0.220425388, 0.832554611, 1.145976303, 2.237569071, 5.0], rtol=0, atol=5e-10
    )
    # one copy of two elements: unit vectors (1, 1), d = (a + b) / sqrt(2)
    for d, gate in ((-4.0, 0.119202922), (-1e-8, 0.499750000), (0.0, 0.5), (0.25, 0.622459331), (9.0, 0.952574127)):
        weight = np.full((1, 2), d / math.sqrt(2))
        found = ops.engram_gate(np.ones((1, 1, 2)), np.ones((1, 1, 2)), weight, np.ones((1, 2)), 1e-20)
        np.testing.assert_allclose(found, [[gate]], rtol=0, atol=6e-10)


# -- by hand -----------------------------------------------------------------------------------------------------------
def test_hyper_connections(rng: np.random.Generator) -> None:
    streams, y = rng.standard_normal((3, 4, 5)), rng.standard_normal((3, 5))
    pre, post, mixing = rng.random((3, 4)), rng.random((3, 4)), rng.random((3, 4, 4))
    for r in range(3):
        close(ops.hyper_collapse(streams, pre)[r], sum(pre[r, j] * streams[r, j] for j in range(4)))
        for i in range(4):
            kept = sum(mixing[r, j, i] * streams[r, j] for j in range(4))
            close(ops.hyper_post(y, streams, post, mixing)[r, i], post[r, i] * y[r] + kept)
    logits, base, scale = rng.standard_normal((3, 4)), rng.standard_normal(4), np.array([0.7])
    alone, *rest = ops.hyper_mix(streams, logits, base, scale, epsilon=1e-3, hyper_epsilon=1e-6, rounds=20)
    for r in range(3):
        mean = sum(float(v) ** 2 for v in streams[r].ravel()) / 20
        m = logits[r] / math.sqrt(mean + 1e-3)
        close(alone[r], [1 / (1 + math.exp(-(v * 0.7 + b))) + 1e-6 for v, b in zip(m, base, strict=True)])
    assert all(part.size == 0 for part in rest)


def test_unit_norm_of_nothing_is_nothing(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 4))
    close(ops.unit_norm(x, 1e-3), x / np.sqrt((x**2).mean(-1) + 1e-3)[..., None])
    for dtype in (np.float32, np.float64):
        assert (ops.unit_norm(np.zeros((1, 4), dtype), 1e-20) == 0).all()


def test_limits_bind_before_silu() -> None:
    gate, up = np.array([-9.0, 0.4, 3.0, 30.0]), np.array([0.3, -7.0, 7.0, -0.5])
    expected = [
        min(g, 0.5) / (1 + math.exp(-min(g, 0.5))) * max(-0.5, min(u, 0.5)) for g, u in zip(gate, up, strict=True)
    ]
    close(reference_ops.swiglu(gate, up, 0.5), expected)
    close(reference_ops.swiglu(gate, up, 0.0), reference_ops.swiglu(gate, up))


def test_pooling(rng: np.random.Generator) -> None:
    values, scores = rng.standard_normal((2, 3, 4))
    for c in range(4):
        weights = [math.exp(s) for s in scores[:, c]]
        mean = sum(w * v for w, v in zip(weights, values[:, c], strict=True)) / sum(weights)
        close(ops.pool_group(values, scores)[c], mean)
    close(ops.pool_group(values, scores + 1000), ops.pool_group(values, scores), 1e-9)


def test_overlapping_groups(rng: np.random.Generator) -> None:
    """First halves of the group before, second halves of the own; the first group has nothing before it."""
    values, scores = rng.standard_normal((2, 8, 6))
    mixed, weights = ops.overlapping(values, scores, 4)
    np.testing.assert_array_equal(mixed, np.concatenate([values[:4, :3], values[4:, 3:]]))
    np.testing.assert_array_equal(weights, np.concatenate([scores[:4, :3], scores[4:, 3:]]))
    alone, _ = ops.overlapping(values[:4], scores[:4], 4)
    np.testing.assert_array_equal(alone, values[:4, 3:])


def test_index_scores_and_selection(rng: np.random.Generator) -> None:
    q, keys, weights = rng.standard_normal((3, 5)), rng.standard_normal((20, 5)), rng.standard_normal(3)
    scores = ops.index_scores(q, keys, weights, 0.25)
    for i in range(20):
        close(scores[i], sum(weights[h] * 0.25 * max(0.0, float(q[h] @ keys[i])) for h in range(3)))
    best = sorted(sorted(range(20), key=lambda i: (-scores[i], i))[:6])
    assert ops.best_rows(scores, 6).tolist() == best
    assert ops.best_rows(scores, 99).tolist() == list(range(20))


def test_ties_stay_with_lower_rows_and_blocks() -> None:
    scores = np.array([1.0, 2.0, 2.0, 0.0, 2.0, -np.inf, 2.0])
    assert ops.best_rows(scores, 3).tolist() == [1, 2, 4]
    assert ops.best_rows(scores, 7).tolist() == [0, 1, 2, 3, 4, 6]
    # blocks of 2: best 2, 2, 2, and the newest, which stays whatever its score
    assert ops.best_blocks(np.array([1.0, 2, 2, 0, 2, 0, -5]), 2, 2).tolist() == [0, 3]
    assert ops.best_blocks(np.array([1.0, 2, 3, 0, 2, 0, -5]), 2, 3).tolist() == [0, 1, 3]
    assert ops.best_blocks(np.array([1.0, 2, 3]), 2, 9).tolist() == [0, 1]
    masked = ops.only_blocks(np.arange(7.0), np.array([0, 3, -1]), 2)
    assert masked.tolist() == [0, 1, -np.inf, -np.inf, -np.inf, -np.inf, 6]


def test_attention_with_sinks(rng: np.random.Generator) -> None:
    q, keys, sinks = rng.standard_normal((2, 4)), rng.standard_normal((5, 4)), np.array([0.3, 40.0])
    found = ops.sink_attention(q, keys, sinks, 0.5)
    for h in range(2):
        weights = [math.exp(0.5 * float(q[h] @ key)) for key in keys]
        mixed = sum(w * key for w, key in zip(weights, keys, strict=True))
        close(found[h], mixed / (sum(weights) + math.exp(sinks[h])))


def test_softplus_router(rng: np.random.Generator) -> None:
    logits, bias = 4 * rng.standard_normal((30, 7)), 0.5 * rng.standard_normal(7)
    ids, mix = ops.softplus_route(logits, 3, bias=bias, table=None, normalise=True, scale=1.5)
    for r in range(30):
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits[r]]
        chosen = sorted(range(7), key=lambda e: (-(scores[e] + bias[e]), -e))[:3]
        assert ids[r].tolist() == chosen
        close(mix[r], [1.5 * scores[e] / sum(scores[e] for e in chosen) for e in chosen])
    tied, _ = ops.softplus_route(np.array([[1.0, 3, 3, 1, 3]]), 4, bias=None, table=None, normalise=True, scale=1.0)
    assert tied.tolist() == [[4, 2, 1, 3]], "ties go to the higher id"
    table = np.array([[5, 0]] * 30, np.int32)
    looked_up, weights = ops.softplus_route(logits, 2, bias=None, table=table, normalise=False, scale=2.0)
    assert (looked_up == table).all()
    close(weights[:, 0], 2 * ops.softplus_scores(logits[:, 5]))
    nothing = np.full((1, 3), -2000.0, np.float32)
    assert np.isfinite(ops.softplus_route(nothing, 2, bias=None, table=None, normalise=True, scale=1.0)[1]).all()


# -- engram row ids ----------------------------------------------------------------------------------------------------
MULTIPLIERS = (
    (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (67716810739261, 51510806800915, 30921347202721, 82619226485591),
)
ROWS = (384006168, 384016682)
WORKED = {
    (2, 2, 2, 2): (
        "4299726 29253038 43157972 58397134 65256332 88876378 100686433 112312540 129401291 144510675 170979806 "
        "184903880 199719089 215127204 230239700 250883315 264341430 275127613 298781502 318608685 331826823 351654054 "
        "365224186 370096053",
        "6788701 28249242 44401659 55169969 76554643 88007614 104465141 120694389 131862336 159654072 173141644 "
        "180723153 199258128 209374005 226234010 253188427 261869729 284532797 296826308 304380858 321414036 350742427 "
        "363928019 381853422",
    ),
    (100, 2, 2, 2): (
        "4052413 23667694 42906971 52829082 75741025 88719377 111210122 112422857 138893193 154754281 160059424 "
        "191821447 207733256 223702343 239672137 250328800 270913409 282584305 299653391 308191258 324551334 349093302 "
        "360573537 378065828",
        "12021899 20784535 37706961 54326366 70637610 83563719 102518839 112022409 129899157 150805120 161683417 "
        "187500518 205864025 218060649 227759873 252338043 258127387 282088587 288292330 306955190 332733788 348791174 "
        "365686218 370160343",
    ),
    (99091, 98765, 12345, 3): (
        "9706437 21082010 39626240 53039383 79358992 80185402 98108732 119084963 140207477 156744915 164821174 "
        "187217221 203807936 216981903 228840810 240753211 267096925 276003150 295579701 316587785 326452156 351037586 "
        "353917492 380886772",
        "15002556 25942013 37914220 52468559 68117794 94369648 104939294 117753157 142259790 148334248 162631908 "
        "176652440 195906446 218795081 237418618 252425950 271844959 279241079 295987045 306489530 323668294 349506920 "
        "365823945 368444475",
    ),
}


def next_primes(start: int, count: int) -> list[int]:
    sieve = np.ones(20000, bool)
    for p in range(2, 4100):
        sieve[-start % p :: p] = False
    return [int(start + i) for i in np.flatnonzero(sieve)[:count]]


@pytest.fixture(scope="module")
def published() -> EngramHash:
    """The constants of the published model, made by its rules; a token map that is the identity."""
    primes = next_primes(16_000_000, 48)
    assert primes[:3] == [16000057, 16000079, 16000081] and primes[-1] == 16000889
    sites = []
    for number, layer in enumerate((1, 14)):
        own = primes[24 * number : 24 * number + 24]
        drawn = np.random.default_rng(10007 * layer).integers(0, (2**63 - 1) // 99092 // 2, 4)
        assert tuple(2 * int(x) + 1 for x in drawn) == MULTIPLIERS[number]
        offsets = tuple(np.cumsum([0, *own[:-1]]).tolist())
        sites.append(EngramSite(layer, MULTIPLIERS[number], tuple(own), offsets))
        assert sites[-1].rows == ROWS[number]
    return EngramHash(tuple(sites), 8, 4, 256, 2, np.arange(99092, dtype=np.uint32))


def test_worked_row_ids(published: EngramHash) -> None:
    for context, rows in WORKED.items():
        for site in range(2):
            found = published.rows_of_contexts(site, np.array([context], np.uint64))[0]
            assert found.tolist() == [int(row) for row in rows[site].split()]


def test_contexts_before_the_start_and_behind_images() -> None:
    """Places without a token, and all older ones, are the pad, a compressed id; the map applies to tokens only."""
    token_map = np.array([7, 5, 6, 4, 3], np.uint32)
    engram = EngramHash((EngramSite(0, (3, 5, 7), (11, 13), (0, 11)),), 1, 3, 8, 2, token_map)
    np.testing.assert_array_equal(histories([4, 1, 0, 3], 3), [[4, -1, -1], [1, 4, -1], [0, 1, 4], [3, 0, 1]])
    contexts = engram.contexts(histories([4, 1, 0, 3], 3))
    assert contexts.tolist() == [[3, 2, 2], [5, 3, 2], [7, 5, 3], [4, 7, 5]]
    assert engram.contexts([[1, NO_TOKEN, 4], [NO_TOKEN, 1, 1]]).tolist() == [[5, 2, 2], [2, 2, 2]]
    expected = [[(c[0] * 3 ^ c[1] * 5) % 11, (c[0] * 3 ^ c[1] * 5 ^ c[2] * 7) % 13 + 11] for c in contexts.tolist()]
    assert engram.row_ids(0, histories([4, 1, 0, 3], 3)).tolist() == expected


def test_products_need_all_of_64_bits(rng: np.random.Generator) -> None:
    """Against Python's integers, with constants as great as the loader allows."""
    multipliers = tuple(int(x) | 1 for x in rng.integers(2**45, 2**46, 4))
    primes = (2**31 - 1, 2_000_003, 3_000_017)
    site = EngramSite(0, multipliers, primes, (0, 5, 9))
    token_map = rng.integers(0, 2**17, 500).astype(np.uint32)
    engram = EngramHash((site,), 1, 4, 8, 1, token_map)
    tokens = rng.integers(0, 500, 60)
    found = engram.row_ids(0, histories(tokens, 4)).astype(np.int64)
    for p in range(60):
        c = [int(token_map[tokens[p - s]]) if p >= s else 1 for s in range(4)]
        acc = c[0] * multipliers[0]
        for n in range(1, 4):
            acc ^= c[n] * multipliers[n]
            assert (acc % primes[n - 1] + site.offsets[n - 1] - int(found[p, n - 1])) % 2**32 == 0
