"""The kernels of deepseek4 and deepseek41 op by op: fed what the reference's op was fed, they make what it made.

The reference runs the tiny models in float32; before each of its ops every buffer and state that the op reads is copied
into the host's memory, the op's stages run with 1 and with 3 ranks, and the results are compared: whole numbers (engram
rows, expert ids, row lists, kept blocks) equal, floats to rounding, and all of it for any number of ranks the same.

Planted once and seen to fail: a Sinkhorn round less; the mixing matrix transposed; the sink left out of the sum; a
window one position short; a pooled group without its bias, or with the halves of an overlap exchanged; keys turned by
the row's own position; a group written by its first position; scores without relu; a list that takes no tied row below
4; the last block not kept; ties of the router to the lower id; histories that forget where a sequence starts or skip
tokens; a gate's share that replaces its stream; a SwiGLU without its limit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepseek_data import RecordingExecutor, executor_of, figures41, program_of, tiny4, tiny41
from in_process import InProcessExecutor, run_kernel, step_words
from numpy.typing import NDArray
from running import joined, rows_of

from bloomery.runtime.executor import StepRows
from bloomery.runtime.ops_deepseek4 import (
    EngramGate,
    EngramRows,
    GroupPool,
    GroupWrite,
    HyperCollapse,
    HyperMix,
    HyperPost,
    IndexRows,
    SoftplusRouter,
    TableRows,
    TokenWrite,
    UnitNorm,
    WindowAttention,
)
from bloomery.runtime.program import CacheWrite, Op, Rope, SwiGlu, op_states, op_views
from bloomery.runtime.reference import ReferenceExecutor
from bloomery.runtime.reference_deepseek4 import best_blocks, best_rows, only_blocks, softplus_route

KINDS = (
    UnitNorm, HyperMix, HyperCollapse, HyperPost, TokenWrite, EngramRows, TableRows, EngramGate, GroupPool, GroupWrite,
    IndexRows, WindowAttention, SoftplusRouter, Rope, CacheWrite, SwiGlu,
)  # fmt: skip
CLOSE = 3e-6  # of the greatest magnitude of a result: float32 sums of up to 1024 products, in another order
GARBAGE = -7.0


class Comparing(ReferenceExecutor):
    """A reference executor that runs every op of KINDS on the host's kernels, too, from the same inputs."""

    def __init__(self, host: InProcessExecutor) -> None:
        super().__init__(
            host.program, context=host.context, slots=host.slots, max_rows=host.max_rows, cache_type="f32",
            spare=max(host.max_rows, 16),
        )  # fmt: skip
        self.host = host
        self.seen: Counter[type[Op]] = Counter()

    def _execute(self, op: Op, rows: StepRows) -> None:
        if not isinstance(op, KINDS):
            super()._execute(op, rows)
            return
        before = {name: self._states[name].copy() for name in op_states(op)}
        touched = {view.buffer for view, _ in op_views(op)}
        inputs = {name: self._buffers[name].copy() for name in touched & self._buffers.keys()}
        super()._execute(op, rows)
        self.seen[type(op)] += 1
        results = [self._on_host(op, rows, inputs, before, ranks) for ranks in (1, 3)]
        for key, made in results[0].items():
            for other in results[1:]:
                np.testing.assert_array_equal(made, other[key], f"{op.name}: {key} depends on the ranks")
            expected = self._states[key[6:]] if key.startswith("state:") else self._of(op, key)
            if made.dtype == np.int32:
                np.testing.assert_array_equal(made, expected, f"{op.name}: {key}")
            else:
                bound = CLOSE * max(1e-30, float(np.abs(expected).max()))
                np.testing.assert_allclose(made, expected, rtol=0, atol=bound, err_msg=f"{op.name}: {key}")

    def _of(self, op: Op, key: str) -> NDArray[Any]:
        views = [view for view, writes in op_views(op) if writes]
        return self.read(views[int(key)])

    def _on_host(
        self, op: Op, rows: StepRows, inputs: dict[str, NDArray[Any]], states: dict[str, NDArray[Any]], ranks: int
    ) -> dict[str, NDArray[Any]]:
        host = self.host
        for view, _ in op_views(op):
            array, given = host.buffers[view.buffer], inputs.get(view.buffer)
            array[...] = GARBAGE
            if given is not None:
                array[: len(given), : given.shape[1]] = given
        for name, state in states.items():
            host.states[name][...] = state
        words = step_words(rows)
        for stage in host.stages:
            if stage.label == op.name or stage.kernel == "rope_table":
                run_kernel(stage.kernel, stage.arguments, words, ranks)
        views = [view for view, writes in op_views(op) if writes]
        count = len(rows.tokens)
        found: dict[str, NDArray[Any]] = {}
        for number, view in enumerate(views):
            of_view = count if host.program.buffers[view.buffer].rows == "step" else len(rows.out_rows)
            found[str(number)] = host.read(view, of_view).copy()
        found |= {f"state:{name}": host.states[name].copy() for name in op_states(op)}
        return found


def host_of(path: Path, **arguments: int) -> InProcessExecutor:
    return InProcessExecutor(program_of(path), context=256, max_rows=160, max_out_rows=160, ranks=3, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["deepseek41", "deepseek4"])
def test_every_op_from_the_references_inputs(name: str) -> None:
    """A prompt, then rows of two slots mixed: one decodes, one goes on with a block, after rows were taken back."""
    path = tiny41("a") if name == "deepseek41" else tiny4()
    tokens = figures41("tiny-deepseek41-a")["ids"] if name == "deepseek41" else figures41("deepseek4-F32")["tokens"]
    executor = Comparing(host_of(path, slots=2))
    first = 40 if name == "deepseek41" else 130
    executor.step(rows_of(tokens[:first], out="last"))
    executor.step(joined(rows_of(tokens[:17], slot=1, out="none"), rows_of(tokens[first : first + 1], start=first)))
    executor.step(joined(rows_of(tokens[3:4], slot=1, start=16), rows_of(tokens[20:26], start=first - 1, out="none")))
    absent = {UnitNorm} if name == "deepseek41" else {TokenWrite, EngramRows, TableRows, EngramGate}
    assert set(executor.seen) == set(KINDS) - absent


@pytest.mark.parametrize("variant", ["a", "b", "dense"])
def test_choices_from_the_oracles_inputs(variant: str) -> None:
    """In float64 the reference makes the oracle's numbers; rounded once to float32 they are what the host is fed. Its
    experts, lists, candidates and engram rows are the stored ones wherever the stored gap exceeds that rounding."""
    stored = figures41(f"tiny-deepseek41-{variant}")
    path = tiny41(variant)  # type: ignore[arg-type]
    host = InProcessExecutor(program_of(path), context=256, max_rows=192, max_out_rows=192, ranks=2)
    rows = rows_of(stored["ids"])
    words = step_words(rows)
    checked: Counter[str] = Counter()

    def compare(op: Op) -> None:
        for view, writes in op_views(op):
            if not writes and view.buffer in exact._buffers:
                array = exact._buffers[view.buffer]
                host.buffers[view.buffer][: len(array), : array.shape[1]] = array
        for name in op_states(op):
            host.states[name][...] = 0
            count = min(host.states[name].shape[1], exact._states[name].shape[1])
            host.states[name][:, :count] = exact._states[name][:, :count]
        for stage in host.stages:
            if stage.label == op.name:
                run_kernel(stage.kernel, stage.arguments, words, 2)

    class Watching(RecordingExecutor):
        def _execute(self, op: Op, rows: StepRows) -> None:
            super()._execute(op, rows)
            layer = int(op.name.split(".")[1]) if op.name.startswith("blk.") else -1
            if isinstance(op, SoftplusRouter) and len(self.read(op.ids)) == len(rows.tokens):
                compare(op)
                clear = stored["router_gap"][layer] > 1e-6
                found = host.read(op.ids, len(rows.tokens))[:, 0]
                np.testing.assert_array_equal(found[clear], stored["router_ids"][layer][clear])
                checked["experts"] += int(clear.sum())
            elif isinstance(op, IndexRows):
                compare(op)
                found = host.read(op.out, len(rows.tokens))[:, 0]
                clear = stored.get(f"list_gap{layer}", np.full(len(found), np.inf)) > 1e-6
                if f"list{layer}" in stored:
                    np.testing.assert_array_equal(found[clear], stored[f"list{layer}"][clear])
                np.testing.assert_array_equal(found[clear], self.read(op.out)[clear, 0])
                checked["lists"] += int(clear.sum())
            elif isinstance(op, EngramRows):
                compare(op)
                found = host.read(op.ids, len(rows.tokens))[:, 0]
                np.testing.assert_array_equal(found, stored["engram_rows"][:, op.site])
                checked["engram rows"] += found.size

    exact = executor_of(path, kind=Watching)
    exact.step(rows)
    print(variant, checked)
    assert checked["experts"] > 0.99 * 8 * len(rows.tokens) and checked["lists"] > 0.99 * 4 * len(rows.tokens)


def test_lists_and_blocks_with_ties() -> None:
    """Scores full of exact ties and zeros of both signs, and a row of NaN: the kernels' choice is the reference's."""
    generator = np.random.default_rng(41)
    program = program_of(tiny41("a"))
    exact = [replace(op, scale=0.25) if isinstance(op, IndexRows) else op for op in program.ops]  # no sum is rounded
    program = replace(program, ops=tuple(exact))
    op = next(op for op in program.ops if isinstance(op, IndexRows) and op.kept)
    later = next(op for op in program.ops if isinstance(op, IndexRows) and op.within)
    host = InProcessExecutor(program, context=256, max_rows=160, ranks=3)
    heads, width = op.q.count, op.q.width
    for rows_in_step in (6, 150):  # shared scores, and a rank's own
        rows = rows_of(np.zeros(rows_in_step, np.int32), start=150 - rows_in_step)
        words = step_words(rows)
        keys = generator.integers(-1, 2, (150, 1)) * np.ones(width)
        host.states[op.keys][0, :150] = keys
        q = generator.integers(-1, 2, (rows_in_step, heads, 1)) * np.ones(width)
        weights = generator.integers(-2, 3, (rows_in_step, heads)).astype(np.float32)
        weights[0, 0] = np.nan
        host.buffers[op.q.buffer][:rows_in_step, : heads * width] = q.reshape(rows_in_step, -1)
        host.buffers[op.weights.buffer][:rows_in_step, :heads] = weights
        for each in (op, later):
            for stage in host.stages:
                if stage.label == each.name:
                    run_kernel(stage.kernel, stage.arguments, words, 3)
            for r in range(rows_in_step):
                visible = int(rows.positions[r]) + 1
                products = np.maximum(q[r] @ keys[:visible].T, 0)
                scores = (weights[r] * np.float32(op.scale)).astype(np.float64) @ products
                scores = np.where(np.isnan(scores), -np.inf, scores.astype(np.float32))
                assert len(np.unique(scores)) < visible or visible < 8
                assert op.kept is not None
                blocks = best_blocks(scores, op.block, op.kept.width)
                if each is op and np.isfinite(scores).all():
                    found = host.read(op.kept, rows_in_step)[r, 0]
                    np.testing.assert_array_equal(found[found >= 0], blocks)
                elif each is later:
                    scores = only_blocks(scores, blocks, op.block)
                found = host.read(each.out, rows_in_step)[r, 0]
                np.testing.assert_array_equal(found[found >= 0], best_rows(scores, each.out.width), f"row {r}")


def test_router_ties_go_to_the_higher_id() -> None:
    """And a NaN loses against every number."""
    program = program_of(tiny41("a"))
    op = next(op for op in program.ops if isinstance(op, SoftplusRouter))
    assert op.bias is not None
    bias = program.weights[op.bias]
    zeros = {op.bias: replace(bias, data=np.zeros(bias.nbytes, np.uint8))}
    host = InProcessExecutor(replace(program, weights={**program.weights, **zeros}), ranks=2)
    logits = np.array([[0.5] * 8, [1, 2, 2, 1, 2, 0, 0, 0], [np.nan, -1, np.nan, -1, -2, -3, -4, -5]], np.float32)
    host.buffers[op.logits.buffer][:3, :8] = logits
    words = step_words(rows_of([0, 1, 2]))
    for stage in host.stages:
        if stage.label == op.name:
            run_kernel(stage.kernel, stage.arguments, words, 2)
    np.testing.assert_array_equal(host.read(op.ids, 3)[:, 0], [[7, 6], [4, 2], [3, 1]])
    ids, mix = softplus_route(logits[:2], 2, bias=None, table=None, normalise=op.normalise, scale=op.scale)
    np.testing.assert_array_equal(host.read(op.ids, 3)[:2, 0], ids)
    np.testing.assert_allclose(host.read(op.mix, 3)[:2, 0], mix, rtol=3e-7)
