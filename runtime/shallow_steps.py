"""Steps of a prompt whose rows are read by few: what of them has to be computed.

Owns the rule. Rows behind which a prompt goes on for long are read through the states only. Behind the last op that
writes a state which all later rows may see, states are windows: each reaches `span - 1` positions back, and the ops
that fill it read the window before it, so that what is computed of a row there is of no use for rows further on than
the sum of these. DeepSeek-V4.1 has half of its layers there. What executors do with it is theirs, who asks for such
steps is the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from bloomery.runtime.ops_deepseek4 import GroupPool, GroupWrite, TokenWrite
from bloomery.runtime.program import CacheWrite, Op, Program, RoutedExperts
from bloomery.runtime.states import RingState

BACK: Final = 64
"""So many positions before a prompt's end another one can still go on, however little of the prompt was computed."""


@dataclass(frozen=True)
class ShallowPart:
    """A shallow step (`StepRows.shallow`) runs the first `ops` of the program. Wanted rows must be at least `reach`
    positions behind the last row of the slot of which no more was computed."""

    ops: int
    reach: int


def shallow_part(program: Program) -> ShallowPart | None:
    """None where it would save nothing: no experts of all rows come behind, or more than the states is asked for."""
    seen = [i for i, op in enumerate(program.ops) if any(not _window(program, name) for name in written_states(op))]
    if not seen or program.reports or program.inputs:
        return None
    first = seen[-1] + 1
    behind = program.ops[first:]
    windows = [program.states[name] for op in behind for name in written_states(op)]
    if not any(isinstance(op, RoutedExperts) and program.buffers[op.out.buffer].rows == "step" for op in behind):
        return None
    return ShallowPart(first, sum(state.span - 1 for state in windows if isinstance(state, RingState)))


def shallow_reach(program: Program) -> int:
    """InShallow's, of an executor that leaves out what it can."""
    part = shallow_part(program)
    return part.reach if part else 0


def may_be_shallow(left: int, reach: int) -> bool:
    """Of rows behind which so many of a prompt are left, and of an executor whose `shallow_reach` is that (0: none)."""
    return reach > 0 and reach + BACK < left


def shallow_program(program: Program) -> Program:
    """The program of a shallow step. It leaves logits unwritten, so nobody may want rows of it."""
    part = shallow_part(program)
    assert part is not None
    return replace(program, ops=program.ops[: part.ops])


def written_states(op: Op) -> tuple[str, ...]:
    return (op.state,) if isinstance(op, CacheWrite | TokenWrite | GroupPool | GroupWrite) else ()


def _window(program: Program, state: str) -> bool:
    return isinstance(program.states[state], RingState)
