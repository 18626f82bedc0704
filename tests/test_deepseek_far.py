"""Steps far into a text on the host executor, against the float64 reference: past 8000 positions and where the released
model's candidate mask begins to cut (16384 rows in 2048 blocks of 8), in the stretched part of the rope.

What the text before has left is the same for both, so that the step itself is what is compared (a choice between two
rows that are equal but for rounding would else make any two runs of a long text differ). By default it is drawn at
random; with BLOOMERY_LONG_TESTS=1 the host really computes a text of 8200 tokens, and the reference joins it for eight
rows at several places.

Planted once and seen to fail: positions cut to 13 bits in the rope table; a mask of a block less.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from deepseek_data import RecordingExecutor, executor_of, program_of, tiny4, tiny41
from in_process import InProcessExecutor
from running import rows_of

from bloomery.runtime.divergence import divergence
from bloomery.runtime.ops_deepseek4 import IndexRows
from bloomery.runtime.program import View

F32_BAND = 1e-5  # relative rms at each position, as near the start of a text
ROWS, BLOCK, LENGTH = 8, 64, 8200
PLACES = (120, 509, 1021, 4090, 8187)  # of odd and even ends of groups; windows wrap inside the rows
FILES = {"a": lambda: tiny41("a", "f32"), "dense": lambda: tiny41("dense", "f32"), "deepseek4": tiny4}


def host_of(name: str, context: int, max_rows: int = 16) -> InProcessExecutor:
    return InProcessExecutor(program_of(FILES[name]()), context=context, max_rows=max_rows, ranks=1)


def draw(host: InProcessExecutor) -> None:
    """Rows as normed latents, keys and pooled values are: of unit size."""
    generator = np.random.default_rng(8)
    for name, state in host.program.states.items():
        rows = host.states[name]
        if state.kind == "i32":
            rows[...] = generator.integers(0, host.program.vocabulary, rows.shape)
        else:
            rows[...] = generator.standard_normal(rows.shape, dtype=np.float32)


def compared(name: str, host: InProcessExecutor, start: int, tokens: Any) -> RecordingExecutor:
    """Steps both from `start` on with what the host has left there; returns the reference after its step."""
    wide = executor_of(FILES[name](), context=host.context, max_rows=ROWS, spare=max(16, host.max_rows))
    for state, rows in host.states.items():
        wide._states[state][...] = rows
    wide._slot_states.reach.restored(0, start)
    found, _ = host.step(rows_of(tokens, start=start))
    result = divergence(wide.logits(tokens, start=start), found)
    print(name, start, result)
    assert result.relative_rms_max < F32_BAND
    left: dict[View, Any] = {}
    for op in wide.program.ops:
        if isinstance(op, IndexRows):
            left |= zip([op.out, op.kept] if op.kept else [op.out], wide.made[op.name], strict=True)
            # every list that can be full is, and none looks at the start only
            chosen = wide.made[op.name][0][:, 0]
            assert (chosen[:, -1] >= 0).all() == (start // op.ratio >= op.out.width)
            assert chosen.max() > start // op.ratio // 2
    for view, made in left.items():  # layers share the buffers: the last list, and the blocks of the one source
        np.testing.assert_array_equal(host.read(view, ROWS), made)
    return wide


@pytest.mark.parametrize(("name", "start"), [("a", 8190), ("deepseek4", 8186), ("dense", 16380)])
def test_far_into_a_text(name: str, start: int) -> None:
    host = host_of(name, start + ROWS)
    draw(host)
    wide = compared(name, host, start, np.random.default_rng(start).integers(0, 512, ROWS).astype(np.int32))
    if name == "dense":  # 2048 blocks are all until 16384 rows are visible, then one falls out
        blocks = (wide.made["blk.5.index_rows"][1][:, 0] >= 0).sum(axis=1)
        np.testing.assert_array_equal(blocks, np.full(ROWS, 2048))
        newest = (start + np.arange(ROWS)) // 8
        assert newest[0] == 2047 and newest[-1] == 2048


@pytest.mark.skipif(not os.environ.get("BLOOMERY_LONG_TESTS"), reason="BLOOMERY_LONG_TESTS=1 computes 8200 tokens")
@pytest.mark.parametrize("name", ["a", "deepseek4"])
@pytest.mark.timeout(900)
def test_a_long_text(name: str) -> None:
    tokens = np.random.default_rng(2).integers(0, 512, LENGTH).astype(np.int32)
    host, at = host_of(name, LENGTH, BLOCK), 0
    for place in (*PLACES, LENGTH):
        while at < place:
            rows = tokens[at : min(at + BLOCK, place)]
            host.step(rows_of(rows, start=at, out="none"))
            at += len(rows)
        if at < LENGTH:
            compared(name, host, at, tokens[at : at + ROWS])
            at += ROWS
