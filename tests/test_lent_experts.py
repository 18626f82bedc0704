"""Experts of a single row by ranks that help each other: claims, and the same bits whoever computes a piece."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from in_process import aligned_bytes, run_kernel
from test_kernels_products import Quantised, activations, random_weights, step_of, tiles_area, width_for

from bloomery.cpu_experts.compile_cache import compile_kernel
from bloomery.cpu_experts.kernels import FLOAT_TYPES, WEIGHT_TYPES
from bloomery.cpu_experts.kernels.claims import claim
from bloomery.cpu_experts.kernels.layouts import CLAIM_BYTES, EXPERTS_HEAD, MOST_CLAIMS
from bloomery.cpu_experts.lowering import activation_kind
from bloomery.cpu_experts.stage import STEP_LAP, STEP_NUMBER, STEP_WORDS
from bloomery.runtime.quant_types import QuantType

pytestmark = pytest.mark.timeout(300)


def test_a_claim_is_good_for_one_lap_of_one_step() -> None:
    word = aligned_bytes(64, 0xFF).view(np.int64)
    for tag in (1, 2, 1 << 40):
        assert [claim(word.ctypes.data, tag, 3) for _ in range(5)] == [0, 1, 2, -1, -1]
    assert [claim(word.ctypes.data, 7, MOST_CLAIMS) for _ in range(MOST_CLAIMS + 2)] == [*range(MOST_CLAIMS), -1, -1]


def test_each_piece_is_claimed_once() -> None:
    word, found = aligned_bytes(64).view(np.int64), []
    claim(word.ctypes.data, 1, 1)  # compiled before threads race for it

    def take() -> None:
        while (piece := claim(word.ctypes.data, 9, 200)) >= 0:
            found.append(piece)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(200))


class Stage:
    """A stage of `jobs` weights with one row of x, or one for each item, whose ranks see each other's rows."""

    def __init__(self, name: str, jobs: int, used: int, ranks: int) -> None:
        compile_kernel(f"experts_{name}")  # by one thread
        generator = np.random.default_rng(41)
        width, outputs, experts = width_for(name), 35, 9
        self.name, self.used, self.ranks = name, used, ranks
        weights = [random_weights(generator, name, outputs * experts, width) for _ in range(jobs)]
        x = activations(generator, used if jobs == 1 else 1, width)
        made = Quantised(activation_kind(name), x)
        blocks = width // QuantType.named(name).block_elements
        ids = generator.permutation(experts)[:used].astype(np.int32)
        area, tiles = 4 * (experts + 1 + 2 * used) + 60 & ~63, tiles_area(name, blocks)
        scratch = aligned_bytes(ranks * tiles, 0xFF), aligned_bytes(ranks * area, 0xFF)
        self.claims = aligned_bytes(ranks * CLAIM_BYTES, 0xFF)
        self.outs = np.full((jobs, used, outputs), np.nan, np.float32)
        places = [(weight.ctypes.data, outputs * weight.strides[0]) for weight in weights]
        some = [jobs]
        for weight, place, out in zip(weights, places, self.outs):
            some += [*place, weight.strides[0], blocks, outputs, out.ctypes.data, out.strides[0]]
        head = (0, made.memory.ctypes.data, made.stride, made.d_plane, made.sums_plane, scratch[0].ctypes.data, tiles)
        head += (scratch[1].ctypes.data, area, ids.ctypes.data, 4 * used, used, experts, int(jobs == 1), 0, 0)
        self.alone = [*head, 0, *some]
        self.lent = [*head, EXPERTS_HEAD + len(some), *some, self.claims.ctypes.data]
        self.lent += [word for place in places for _ in range(ranks) for word in place]
        self.keep = weights, made, ids, scratch

    def run(self, arguments: list[int], number: int, lap: int, ranks: list[int]) -> np.ndarray:
        """What is written by some ranks, in threads beside each other."""
        self.outs[:] = np.nan
        step = np.concatenate([step_of(1), np.zeros(STEP_WORDS, np.int64)])
        step[STEP_NUMBER], step[STEP_LAP] = number, lap
        work = [
            threading.Thread(target=run_kernel, args=(f"experts_{self.name}", arguments, step, self.ranks, [rank]))
            for rank in ranks
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join(120)
        return self.outs.copy()


@pytest.mark.parametrize("name", [name for name in WEIGHT_TYPES if name not in FLOAT_TYPES])
def test_whoever_computes_a_piece_the_bits_are_the_same(name: str) -> None:
    for jobs, used, ranks in ((2, 8, 3), (2, 3, 30), (1, 8, 3), (1, 5, 2), (1, 1, 2)):
        stage = Stage(name, jobs, used, ranks)
        expected = stage.run(stage.alone, 1, 0, list(range(ranks)))
        assert np.isfinite(expected).all()
        for number in range(2, 12):
            found = stage.run(stage.lent, number, number % 2, list(range(ranks)))
            np.testing.assert_array_equal(found, expected, err_msg=f"{jobs} jobs, {used} experts, {ranks} ranks")


@pytest.mark.parametrize("jobs", (1, 2))
def test_one_rank_does_what_the_others_do_not_begin(jobs: int) -> None:
    """But for those whose rows it cannot see; and nothing is done twice in a lap."""
    stage = Stage("Q4_K", jobs, 8, 3)
    expected = stage.run(stage.alone, 1, 0, [0, 1, 2])
    np.testing.assert_array_equal(stage.run(stage.lent, 2, 0, [1]), expected)
    assert np.isnan(stage.run(stage.lent, 2, 0, [0, 2])).all()
    np.testing.assert_array_equal(stage.run(stage.lent, 2, 1, [2]), expected)
    hidden = list(stage.lent)
    hidden[EXPERTS_HEAD + 1 + 7 * jobs + 1] = 0  # rank 0, first job
    found = stage.run(hidden, 3, 0, [1])
    np.testing.assert_array_equal(found[..., 12:], expected[..., 12:])
    assert np.isnan(found[..., :12]).all()
