"""Stay, stream or host for prompt blocks: the rule against all subsets of small layers, and on machines made up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from paper_model import PaperQwen3

from bloomery.runtime.architectures import build_program
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.prompt_choices import (
    NEVER,
    PARTS,
    Expert,
    Rates,
    choose,
    least_streamed_rows,
    parts_for_the_host,
    poisson_quantiles,
    stream_threshold,
)

EXPERT = Expert(2_700_000, 2 * 3 * 2048 * 768)  # of Qwen3-30B-A3B in Q4_K_M
MACHINE = Rates(106e9, 3e12, 50e9, 4e12, 400e12)  # cores, link and card as an H200 machine might have them
LAYER = {"experts": 128, "on_host": 64, "used": 8}


def seconds_of(streamed: set[int], rows: list[int], rates: Rates, busy: float) -> float:
    """The layer's time if exactly these experts are streamed, written down anew."""
    host = link = 0.0
    for index, count in enumerate(rows):
        if count and index in streamed:
            link += EXPERT.nbytes / rates.link
            busy += max(EXPERT.nbytes / rates.card_read, count * EXPERT.operations / rates.card_operations)
        elif count:
            host += max(EXPERT.nbytes / rates.host_read, count * EXPERT.operations / rates.host_operations)
    first = EXPERT.nbytes / rates.link if link else 0.0
    return max(host, link + first, busy)


@pytest.mark.parametrize("seed", range(6))
def test_no_subset_is_faster_than_the_rule_where_counts_differ(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    rates = Rates(*(float(10 ** rng.uniform(low, low + 1)) for low in (10, 11.5, 10, 12, 14)))
    rows = [int(n) for n in rng.permutation(200)[:8]]
    found = choose(EXPERT, rows, rates, 1e-5)
    subsets = (set(some) for size in range(9) for some in itertools.combinations(range(8), size))
    best = min(seconds_of(some, rows, rates, 1e-5) for some in subsets)
    assert found.seconds == pytest.approx(best)
    streamed = {index for index, count in enumerate(rows) if count >= found.threshold}
    assert len(streamed) == found.streamed
    assert seconds_of(streamed, rows, rates, 1e-5) == pytest.approx(found.seconds)


def test_a_slow_link_streams_nothing_and_slow_cores_stream_all() -> None:
    slow_link = Rates(106e9, 3e12, 1e6, 4e12, 400e12)
    found = stream_threshold(EXPERT, slow_link, rows=2048, **LAYER)
    assert (found.threshold, found.streamed, found.link_seconds) == (NEVER, 0, 0.0)
    slow_cores = Rates(1e8, 1e9, 50e9, 4e12, 400e12)
    found = stream_threshold(EXPERT, slow_cores, rows=2048, **LAYER)
    assert found.streamed == 64 and found.host_seconds == pytest.approx(0, abs=1e-12)


def test_larger_blocks_stream_more() -> None:
    """What the host takes for an expert grows with its rows, what the link takes does not."""
    found = [stream_threshold(EXPERT, MACHINE, rows=rows, **LAYER) for rows in (8, 64, 512, 2048, 8192)]
    streamed = [choice.streamed for choice in found]
    assert streamed == sorted(streamed) and streamed[0] < streamed[-1]
    for rows, choice in zip((8, 64, 512, 2048, 8192), found, strict=True):
        whole = choose(EXPERT, poisson_quantiles(rows * 8 / 128, 64, rows), MACHINE, 0.0)
        assert choice.seconds >= whole.seconds
        alone = stream_threshold(EXPERT, Rates(106e9, 3e12, 1e-3, 4e12, 400e12), rows=rows, **LAYER)
        assert choice.seconds <= alone.seconds, "never slower than the host alone"


def test_the_rule_is_the_plans_and_the_rows_alone() -> None:
    first = stream_threshold(EXPERT, MACHINE, rows=512, **LAYER)
    assert all(stream_threshold(EXPERT, MACHINE, rows=512, **LAYER) == first for _ in range(3))


def test_quantiles_are_those_of_the_distribution() -> None:
    rng = np.random.default_rng(3)
    for mean in (0.5, 4.0, 32.0):
        drawn = np.sort(rng.poisson(mean, (4000, 64)), axis=1).mean(axis=0)
        found = poisson_quantiles(mean, 64, 1 << 20)
        assert np.abs(drawn - found).max() < 1.0 + 0.05 * mean and abs(np.mean(found) - mean) < 0.1
    assert poisson_quantiles(900.0, 4, 10) == (10, 10, 10, 10)
    large = poisson_quantiles(900.0, 64, 1 << 20)
    assert large == tuple(sorted(large)) and abs(np.mean(large) - 900) < 1


def test_blocks_leave_to_the_host_what_balances_both() -> None:
    """No other part is faster; nothing where cores or a hand-off are slow, all where the link is."""
    program = build_program(PaperQwen3())
    tiers = ExpertTiers.chosen(program, 0, None)

    def parts(rows: int, **changes: float) -> int:
        return parts_for_the_host(program, tiers, rows, replace(MACHINE, **changes))

    found = [parts(rows) for rows in (64, 128, 512, 4096)]
    assert found == sorted(found, reverse=True) and PARTS > found[0] >= PARTS // 2 and found[-1] == 0
    assert parts(96, host_read=1e9) == 0 and parts(96, link=1e8) == PARTS
    # balance: at 96 rows an expert has 6 of them; cores and link work as long as each other, within a part
    host, link = (EXPERT.nbytes / rate for rate in (MACHINE.host_read, MACHINE.link))
    assert parts(96) / PARTS == pytest.approx(link / (host + link), abs=1.0 / PARTS)


def test_the_least_rows_of_a_block_are_where_it_pays() -> None:
    program = build_program(PaperQwen3())
    tiers = ExpertTiers.chosen(program, 0, None)
    for link in (60e9, 25e9, 5e9, 1e9):
        rows = least_streamed_rows(tiers, link, 100e9, 8, 64)
        assert rows % 64 == 0 and (rows // 64).bit_count() == 1
        # a group of eight rows reads 52 of 128 experts of each layer
        groups = tiers.host_bytes * 51.6 / 128 / 100e9 / 8
        assert rows * groups >= 0.98 * tiers.host_bytes / link
        assert rows == 64 or rows / 2 * groups <= 1.02 * tiers.host_bytes / link
