"""The gates of `dflash` are seen to fail: each fault below is planted in the draft's program or in the reference, one
at a time, and the figures must notice it.

Planted: a causal block, a window one shorter, committed rows turned one position late, no gain of the fused features,
the taps in another order, no SwiGLU limit, another mix, masks of another token, no chain, a chain of the row's own
token, no sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deepseek_data import draft_program, figures41
from numpy.typing import NDArray

from bloomery.runtime import reference
from bloomery.runtime.dequantised_weights import DequantisedWeights
from bloomery.runtime.executor import StepRows
from bloomery.runtime.ops_deepseek4 import HyperCollapse, WindowAttention
from bloomery.runtime.ops_drafts import TokenChain
from bloomery.runtime.program import Op, Program, RmsNorm, Rope, RoutedExperts
from bloomery.runtime.reference import ReferenceExecutor

FIGURES = figures41("tiny-deepseek41-draft")
IDS = figures41("tiny-deepseek41-a")["ids"].astype(np.int32)
BAND, LEAST = 1e-5, 100  # float64 on features that are stored as float32; a fault must be seen by so many times that
PLACE, BLOCK, MASK = 8, 5, 5  # of a position whose logits are stored
WEIGHTS = DequantisedWeights(draft_program(), np.float64, 1 << 30)


def drafted(program: Program, features: NDArray[Any] = FIGURES["features"], mask: int = MASK) -> NDArray[Any]:
    """The logits of one draft after a commit of everything before it."""
    position = int(FIGURES["logits_positions"][PLACE])
    executor = ReferenceExecutor(program, context=64, dtype=np.float64, cache_type="f64")
    executor._weights = WEIGHTS
    count = position + 1 + BLOCK
    tokens = np.full(count, mask, np.int32)
    tokens[position + 1] = IDS[position + 1]
    inputs = np.zeros((count, features.shape[1]))
    inputs[: position + 1] = features[: position + 1]
    index = np.arange(count, dtype=np.int32)
    executor.step(StepRows(tokens, np.zeros(count, np.int32), index, index[position + 1 :], {"features": inputs}))
    return executor._buffers["logits.out"]


def error(found: NDArray[Any]) -> float:
    return float(np.abs(found - FIGURES["logits"][PLACE]).max())


def edited(change: Callable[[Any], Op | None]) -> Program:
    ops = [change(op) for op in draft_program().ops]
    return replace(draft_program(), ops=tuple(op for op in ops if op is not None))


def on(kind: type[Any], change: Callable[[Any], Op | None], name: str = "") -> Program:
    return edited(lambda op: change(op) if isinstance(op, kind) and name in op.name else op)


def swapped_taps() -> NDArray[Any]:
    first, second, third = np.split(FIGURES["features"], 3, axis=1)
    return np.concatenate([second, first, third], axis=1)


FAULTS: dict[str, Callable[[], NDArray[Any]]] = {
    "causal block": lambda: drafted(on(WindowAttention, lambda op: replace(op, block=False, span=op.span + 1))),
    "shorter window": lambda: drafted(on(WindowAttention, lambda op: replace(op, span=op.span - 1))),
    "committed rows late": lambda: drafted(on(Rope, lambda op: replace(op, behind=-1), "rope_commit")),
    "no gain of features": lambda: drafted(on(RmsNorm, lambda op: None, "enc.output_norm")),
    "taps in another order": lambda: drafted(draft_program(), swapped_taps()),
    "no limit": lambda: drafted(on(RoutedExperts, lambda op: replace(op, limit=0.0))),
    "another mix": lambda: drafted(
        on(HyperCollapse, lambda op: replace(op, pre=replace(op.pre, buffer="pre_ffn.out")), "ffn_collapse")
    ),
    "another mask": lambda: drafted(draft_program(), mask=6),
}


def test_without_a_fault() -> None:
    assert error(drafted(draft_program())) < BAND


@pytest.mark.parametrize("fault", FAULTS)
def test_programs_with_a_fault(fault: str) -> None:
    assert error(FAULTS[fault]()) > LEAST * BAND


def no_chain(executor: ReferenceExecutor, op: TokenChain, rows: StepRows) -> None:
    executor._buffers.write(op.logits, executor._buffers.flat(op.base))


def own_tokens(executor: ReferenceExecutor, op: TokenChain, rows: StepRows) -> None:
    """Every row's logits know the row's own token (a mask) and not the one before."""
    base = executor._buffers.flat(op.base)
    previous = executor._weights.embedding(op.embedding, rows.tokens[rows.out_rows])
    executor._buffers.write(op.logits, base + previous @ executor._weights[op.weight].T)


@pytest.mark.parametrize("chain", [no_chain, own_tokens])
def test_other_chains(chain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: ReferenceExecutor, op: TokenChain, rows: StepRows) -> None:
        for view in (op.logits, op.previous, op.out):
            executor_buffer = self._buffers[view.buffer]
            executor_buffer[...] = 0
        chain(self, op, rows)

    monkeypatch.setattr(ReferenceExecutor, "_chain", run)
    assert error(drafted(draft_program())) > LEAST * BAND


def test_attention_without_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = reference.sink_attention
    monkeypatch.setattr(
        reference, "sink_attention", lambda q, keys, sinks, scale: plain(q, keys, np.full_like(sinks, -1e9), scale)
    )
    assert error(drafted(draft_program())) > LEAST * BAND
