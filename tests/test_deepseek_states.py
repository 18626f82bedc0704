"""States of `deepseek41` and `deepseek4` on the reference: blocks, several slots, rows taken back, snapshots.

40 positions of the tiny model pass every border: the window of 8 wraps, groups of 2 end at odd positions, lists of 4
and the candidate mask drop rows. Of deepseek4, 140 positions fill a group of 128.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from deepseek_data import RecordingExecutor, executor_of, figures41, tiny4, tiny41
from running import joined, rows_of

from bloomery.runtime.executor import StateSnapshot
from bloomery.runtime.slot_reach import SlotReach
from bloomery.runtime.states import CacheState, GroupState, RingState, pieces

TOKENS = figures41("tiny-deepseek41-a")["ids"][:40]
OTHERS = np.random.default_rng(7).integers(0, 512, 40).astype(np.int32)
EXACT = 1e-12  # of logits up to 16, in float64


def same_bits(one: StateSnapshot, other: StateSnapshot) -> None:
    assert one.positions == other.positions and one.rows.keys() == other.rows.keys()
    for name, rows in one.rows.items():
        np.testing.assert_array_equal(rows, other.rows[name], name)


@pytest.fixture(scope="module")
def whole() -> np.ndarray:
    return executor_of(tiny41("a")).logits(TOKENS)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 16])
def test_blocks_do_not_matter(whole: np.ndarray, block: int) -> None:
    executor = executor_of(tiny41("a"))
    assert np.abs(executor.logits(TOKENS, block=block) - whole).max() < EXACT


def test_blocks_do_not_matter_to_wide_windows_and_groups() -> None:
    """Window 128 of variant b, groups of 128 and overlapping ones of 4 of deepseek4: cut inside and at their ends."""
    for path, cuts in ((tiny41("b"), (50, 127, 128, 129, 140)), (tiny4(), (3, 4, 31, 33, 127, 128, 140))):
        tokens = np.random.default_rng(5).integers(0, 512, 140).astype(np.int32)
        executor = executor_of(path, slots=2)
        expected, start = executor.logits(tokens), 0
        for cut in cuts:
            found = executor.logits(tokens[start:cut], slot=1, start=start)
            assert np.abs(found - expected[start:cut]).max() < EXACT, (path.name, cut)
            start = cut


@pytest.mark.parametrize("path", [tiny41("a"), tiny4()], ids=["deepseek41", "deepseek4"])
def test_rows_of_several_slots_in_one_step(path: Path) -> None:
    alone = executor_of(path)
    first, second = alone.logits(TOKENS), alone.logits(OTHERS)
    executor = executor_of(path, slots=3)
    executor.step(rows_of(TOKENS[:21], slot=2, out="none"))
    step = executor.step(
        joined(
            rows_of(OTHERS, slot=1, out="last"),
            rows_of(TOKENS[21:22], slot=2, start=21),
            rows_of(TOKENS[:5], slot=0),
        )
    )
    expected = np.concatenate([second[-1:], first[21:22], first[:5]])
    np.testing.assert_allclose(step.logits, expected, rtol=0, atol=2e-6)  # StepResult is float32


def run_singly(executor: RecordingExecutor, tokens: np.ndarray, start: int, slot: int = 0) -> np.ndarray:
    return executor.logits(tokens, start=start, slot=slot, block=1)


@pytest.mark.parametrize("path", [tiny41("a"), tiny4()], ids=["deepseek41", "deepseek4"])
@pytest.mark.parametrize("kept", [17, 18])
def test_rows_taken_back_leave_nothing(path: Path, kept: int) -> None:
    """n rows with other tokens are run and withdrawn; what follows, and every state, has the bits as if they never ran.
    float32, so that every step is the same computation."""
    straight = executor_of(path, wide=False, max_rows=16, context=64)
    straight.logits(TOKENS[:16])
    run_singly(straight, TOKENS[16:kept], 16)
    before = straight.snapshot(0, kept)
    expected = run_singly(straight, TOKENS[kept : kept + 6], kept)
    after = straight.snapshot(0, kept + 6)
    for n in range(1, 9):
        executor = executor_of(path, wide=False, max_rows=16, context=64)
        executor.logits(TOKENS[:16])
        run_singly(executor, TOKENS[16:kept], 16)
        if n % 2:
            executor.logits(OTHERS[:n], start=kept)
        else:
            run_singly(executor, OTHERS[:n], kept)
        same_bits(executor.snapshot(0, kept), before)
        np.testing.assert_array_equal(run_singly(executor, TOKENS[kept : kept + 6], kept), expected)
        same_bits(executor.snapshot(0, kept + 6), after)


@pytest.mark.parametrize("path", [tiny41("a"), tiny4()], ids=["deepseek41", "deepseek4"])
def test_snapshots_go_on_anywhere(path: Path) -> None:
    """In another slot, in another executor with other ring sizes, after other sequences were there; float32."""
    executor = executor_of(path, wide=False, slots=2)
    executor.logits(TOKENS[:23])
    taken = executor.snapshot(0, 23)
    assert 0 < taken.nbytes < sum(rows[0].nbytes for rows in executor._states.values())
    expected = run_singly(executor, TOKENS[23:30], 23)
    other = executor_of(path, wide=False, context=48, max_rows=25, spare=31, slots=3)
    other.logits(OTHERS[:25], slot=2)
    for target, slot in ((executor, 1), (executor, 0), (other, 2)):
        target.restore(slot, taken)
        same_bits(target.snapshot(slot, 23), taken)
        np.testing.assert_array_equal(run_singly(target, TOKENS[23:30], 23, slot), expected)
    executor.copy_prefix(0, 1, 27)
    np.testing.assert_array_equal(run_singly(executor, TOKENS[27:30], 27, slot=1), expected[4:])


def test_a_slot_goes_on_only_where_its_past_is() -> None:
    executor = executor_of(tiny41("a"), wide=False, max_rows=8, context=64, slots=2)
    for start in range(0, 40, 8):
        executor.logits(TOKENS[start : start + 8], start=start)
    assert executor.continuable(0) == range(31, 41) and executor.continuable(1) == range(1)
    for position in (30, 41):
        with pytest.raises(ValueError, match=rf"slot 0 cannot go on at position {position}.* 0 and 31 to 40"):
            executor.logits(TOKENS[:1], start=position)
        with pytest.raises(ValueError, match="cannot go on"):
            executor.copy_prefix(0, 1, position)
    with pytest.raises(ValueError, match="slot 1 cannot go on at position 3"):
        executor.logits(TOKENS[:1], slot=1, start=3)
    executor.logits(TOKENS[31:33], start=31)
    assert executor.continuable(0) == range(31, 34)
    executor.logits(TOKENS[:4])  # a new sequence
    assert executor.continuable(0) == range(5)


def test_without_rings_a_slot_goes_on_anywhere() -> None:
    reach = SlotReach([CacheState("keys", 4)], slots=1, context=8, spare=0)
    reach.begin(rows_of(TOKENS[:8]))
    for position in range(9):
        reach.require(0, position)
    with pytest.raises(ValueError, match="slot 0 cannot go on at position 9"):
        reach.require(0, 9)


def test_rewritten_slots_forget_what_was_there(whole: np.ndarray) -> None:
    executor = executor_of(tiny41("a"))
    executor.logits(OTHERS)
    assert np.abs(executor.logits(TOKENS) - whole).max() < EXACT


def test_kinds_of_state() -> None:
    cache, ring, group = CacheState("c", 4), RingState("r", 4, 8, "f32"), GroupState("g", 4, 3)
    assert [state.rows(100, 5) for state in (cache, ring, group)] == [100, 13, 34]
    assert ring.rows(10, 5) == 10
    assert [state.kind for state in (cache, ring, group)] == ["cache", "f32", "cache"]
    assert [state.live(20) for state in (cache, ring, group)] == [range(20), range(13, 20), range(6)]
    assert [state.live(3) for state in (cache, ring, group)] == [range(3), range(3), range(1)]
    for rows in (5, 8, 13):
        for first in range(30):
            for count in range(rows + 1):
                found = [i for piece in pieces(range(first, first + count), rows) for i in range(rows)[piece]]
                assert found == [i % rows for i in range(first, first + count)]
                assert len(pieces(range(first, first + count), rows)) <= 2


def test_every_state_of_a_position_is_declared() -> None:
    """Of the tiny model: 9 windows, rows and keys of 3 sources,
    slots of 2 pooled ones, tokens."""
    states = executor_of(tiny41("a")).program.states
    kinds = sorted(name.split(".")[-1] for name in states)
    assert kinds == sorted(
        ["window"] * 9 + ["compressed", "index_keys"] * 3 + ["attn_compressor_slots"] * 2 + ["tokens"]
    )
