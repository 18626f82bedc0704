"""Several rows of one sequence in a step are as many single steps, bit for bit: in skewed order on the reference, side
by side on the host executor. Rows that are taken back have never been.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepseek_data import executor_of, figures41, program_of, tiny4, tiny41
from in_process import InProcessExecutor
from numpy.typing import NDArray
from oracle_data import TINY, f32_file
from running import rows_of

from bloomery.runtime.architectures import build_program
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program, op_states
from bloomery.runtime.skewed import SkewedReference, skewed_order, stages_of
from bloomery.runtime.states import GroupState, pieces

TOKENS: NDArray[np.int32] = figures41("tiny-deepseek41-a")["ids"][:60].astype(np.int32)
OTHERS = np.random.default_rng(7).integers(0, 512, 60).astype(np.int32)
WRITERS = ("CacheWrite", "TokenWrite", "GroupWrite", "GroupPool")
FILES = {"deepseek41": tiny41("a", "f32"), "deepseek4": tiny4()}


def written(op: Any) -> set[str]:
    return {op.state} if type(op).__name__ in WRITERS else set()


def illegal(stages: list[tuple[Any, ...]], order: list[tuple[int, int]]) -> list[str]:
    """Ops that read a state before an earlier row has written it, or after its own row should have."""
    writing = {state: stage for stage, ops in enumerate(stages) for op in ops for state in written(op)}
    done: set[tuple[int, int]] = set()
    found = []
    for stage, row in order:
        for op in stages[stage]:
            for state in set(op_states(op)):
                before = [(writing[state], earlier) for earlier in range(row)]
                if not done.issuperset(before) or writing[state] > stage:
                    found.append(f"{op.name} of row {row}")
        assert stage == 0 or (stage - 1, row) in done
        done.add((stage, row))
    assert len(done) == len(order)
    return found


@pytest.mark.parametrize("name", [*FILES, *TINY])
def test_the_order_is_legal(name: str) -> None:
    """Of every architecture; and would not be if a row went one stage ahead of the row before it."""
    program = program_of(FILES[name]) if name in FILES else build_program(ModelFile.open(f32_file(name)))
    stages = stages_of(program)
    assert [op for stage in stages for op in stage] == list(program.ops)
    for rows in range(2, 9):
        order = list(skewed_order(len(stages), rows))
        assert not illegal(stages, order)
    if len(stages) > 2:
        ahead = [(stage, 1 - row) for stage, row in skewed_order(len(stages), 2)]
        assert illegal(stages, ahead)


def run_singly(executor: Any, tokens: NDArray[np.int32], start: int) -> NDArray[Any]:
    return executor.logits(tokens, start=start, block=1)


def same_states(one: Any, other: Any, positions: int) -> None:
    first, second = one.snapshot(0, positions), other.snapshot(0, positions)
    for name, rows in first.rows.items():
        np.testing.assert_array_equal(rows, second.rows[name], name)


class _Skewed(SkewedReference):
    logits = executor_of(tiny41("a")).__class__.logits


@pytest.mark.parametrize("name", FILES)
def test_skewed_rows_are_single_steps(name: str) -> None:
    """float32. The window of 8 wraps, groups end and lists drop rows inside the passes; both parities. Fails if a row
    runs its stages ahead of the row before it."""
    path = FILES[name]
    straight = executor_of(path, wide=False, context=64, max_rows=48)
    expected = straight.logits(TOKENS[:48])[7:]
    skewed: Any = _Skewed(program_of(path), context=64, max_rows=16)
    skewed._weights = straight._weights
    single: Any = executor_of(path, wide=False, context=64, max_rows=16)
    for executor in (skewed, single):
        executor.logits(TOKENS[:7], block=1)
    at = 7
    for rows in (2, 3, 2, 8, 5):
        found = skewed.logits(TOKENS[at : at + rows], start=at)
        single_found = run_singly(single, TOKENS[at : at + rows], at)
        np.testing.assert_array_equal(found, single_found)
        np.testing.assert_allclose(found, expected[at - 7 : at - 7 + rows], rtol=0, atol=1e-3)
        at += rows
        same_states(skewed, single, at)
        # a pass of which only the first row stays, then another second row
        skewed.logits(OTHERS[at : at + 2], start=at)
        run_singly(single, OTHERS[at : at + 1], at)
        found = skewed.logits(TOKENS[at + 1 : at + 2], start=at + 1)
        np.testing.assert_array_equal(found, run_singly(single, TOKENS[at + 1 : at + 2], at + 1))
        same_states(skewed, single, at + 2)


# -- side by side, on the host ----------------------------------------------------------------------------------------
def live_rows(program: Program, states: dict[str, NDArray[Any]], positions: int) -> dict[str, NDArray[Any]]:
    """What a sequence of so many positions needs to go on."""
    found = {}
    for state in program.states.values():
        rows = states[state.name][0]
        found[state.name] = np.concatenate([rows[:0], *(rows[p] for p in pieces(state.live(positions), len(rows)))])
    return found


class _Host:
    """The in-process executor, with what each position left."""

    def __init__(self, path: Path, context: int) -> None:
        self.program = program_of(path)
        self.executor = InProcessExecutor(self.program, context=context, max_rows=16, cache_type="f16")

    def run(self, tokens: NDArray[np.int32], start: int) -> NDArray[np.float32]:
        return self.executor.step(rows_of(tokens, start=start))[0]

    def keep(self) -> dict[str, NDArray[Any]]:
        return {name: rows.copy() for name, rows in self.executor.states.items()}

    def back(self, kept: dict[str, NDArray[Any]]) -> None:
        for name, rows in kept.items():
            self.executor.states[name][...] = rows

    def live(self, positions: int) -> dict[str, NDArray[Any]]:
        return live_rows(self.program, self.executor.states, positions)


def same(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> None:
    for name, rows in one.items():
        np.testing.assert_array_equal(rows, other[name], name)


@pytest.mark.parametrize("name", FILES)
def test_rows_side_by_side_are_single_steps(name: str) -> None:
    """2 to 8 rows from every position on: the first positions, the window's wraps, odd and even ends of groups, the
    first lists that drop rows (positions 4 and 9), the first masks that cut (6). Logits and every state have the bits
    of single steps; with the n last rows taken back, n up to 8, they have those of steps that never ran them."""
    host = _Host(FILES[name], 64)
    alone, kept, live = [], [host.keep()], [host.live(0)]
    for position in range(34):
        alone.append(host.run(TOKENS[position : position + 1], position)[0])
        kept.append(host.keep())
        live.append(host.live(position + 1))
    for start in range(26):
        rows = 2 + start % 7
        host.back(kept[start])
        found = host.run(TOKENS[start : start + rows], start)
        np.testing.assert_array_equal(found, alone[start : start + rows])
        same(host.live(start + rows), live[start + rows])
    for start in range(1, 26):
        rows = 1 + start % 8
        host.back(kept[start])
        host.run(OTHERS[:rows], start)  # are taken back
        same(host.live(start), live[start])
        np.testing.assert_array_equal(host.run(TOKENS[start : start + 2], start), alone[start : start + 2])
        same(host.live(start + 2), live[start + 2])
    groups = [state for state in host.program.states.values() if isinstance(state, GroupState)]
    assert groups and any(len(state.live(26)) > 4 for state in groups)
