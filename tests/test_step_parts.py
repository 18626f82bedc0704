"""How steps are cut: every row once and in order, blocks where neighbours are many, groups no larger than asked."""

from __future__ import annotations

import numpy as np
import pytest
from running import joined, rows_of

from bloomery.runtime.step_parts import step_parts


def cut(*parts: tuple[int, int], least: int = 33) -> list[tuple[int, int, bool]]:
    """`parts` are (slot, rows) of a step."""
    rows = joined(*(rows_of(np.zeros(count), slot=slot) for slot, count in parts))
    return list(step_parts(rows.slots, rows.positions, 8, least))


def test_known_steps() -> None:
    assert cut((0, 5)) == [(0, 5, False)]
    assert cut((0, 20)) == [(0, 8, False), (8, 16, False), (16, 20, False)]
    assert cut((0, 1), (1, 1), (2, 40), (3, 1)) == [(0, 2, False), (2, 42, True), (42, 43, False)]
    assert cut((0, 33), (1, 33)) == [(0, 33, True), (33, 66, True)]
    assert cut((0, 10), (1, 10)) == [(0, 8, False), (8, 16, False), (16, 20, False)], "groups mix slots"


@pytest.mark.parametrize("seed", range(5))
def test_all_rows_once(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    parts = [(slot, int(rng.choice([1, 3, 32, 33, 70]))) for slot in range(6)]
    found = cut(*parts)
    assert [row for first, last, _ in found for row in range(first, last)] == list(range(sum(n for _, n in parts)))
    assert all(last - first <= 8 for first, last, block in found if not block)
    assert sum(block for _, _, block in found) == sum(n >= 33 for _, n in parts)
