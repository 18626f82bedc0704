"""What a step has to read and to compute: bytes of weights and of caches, and operations, op by op, from the program.

Owns the accounting and the names of the kinds of op that people see. Activations, which stay in a core's own cache, are
not counted as read. Knows no executor and measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from bloomery.runtime.model_file import Tensor
from bloomery.runtime.ops_deepseek4 import IndexRows, SoftplusRouter, TableRows, WindowAttention
from bloomery.runtime.ops_drafts import TokenChain
from bloomery.runtime.program import (
    Argmax,
    Attention,
    CacheWrite,
    EmbedRows,
    HeadMatMul,
    MatMul,
    Op,
    Program,
    RmsNorm,
    Rope,
    RoutedExperts,
    Router,
    op_views,
    op_weights,
)
from bloomery.runtime.tensor_roles import role_of

Kind: TypeAlias = str

EXPERTS: Final[Kind] = "experts"
HEAD: Final[Kind] = "head"
ATTENTION: Final[Kind] = "attention"
_KINDS: Final[Mapping[type[Op], Kind]] = {
    RoutedExperts: EXPERTS,
    Attention: ATTENTION,
    WindowAttention: ATTENTION,
    IndexRows: "index",
    TableRows: "tables",
    Router: "router",
    SoftplusRouter: "router",
    EmbedRows: "embedding",
    RmsNorm: "norms",
    Rope: "rope",
    CacheWrite: "cache write",
    Argmax: "argmax",
    TokenChain: HEAD,
}


@dataclass(frozen=True)
class Work:
    """Bytes of weights and of caches, and operations (two a multiply-add) of products and attention. Floats, since they
    are expectations where experts are chosen at random."""

    weights: float = 0.0
    cache: float = 0.0
    operations: float = 0.0

    @property
    def read(self) -> float:
        return self.weights + self.cache

    def __add__(self, other: Work) -> Work:
        return Work(self.weights + other.weights, self.cache + other.cache, self.operations + other.operations)


def op_kind(program: Program, op: Op) -> Kind:
    """What people call it: products by the role of their weights ("attention weights", "shared experts", "head"), other
    ops by what they do."""
    if isinstance(op, MatMul):
        if any(out.buffer == program.logits for out in op.outs):
            return HEAD
        role = role_of(op.weights[0])
        return f"{role} weights" if role == "attention" else role
    if isinstance(op, HeadMatMul):
        return "attention weights"
    return _KINDS.get(type(op), "elementwise")


def step_work(program: Program, rows: int, position: int, cache_bytes: float) -> dict[Kind, Work]:
    """One step of `rows` consecutive rows of one slot, the last at `position`, that wants the last row's logits;
    `cache_bytes` an element of the caches. Each weight and each cache row counts as read once a step.

    A step of one row uses exactly `used` experts a layer; of several rows the expected number of distinct ones is
    counted, as if each row chose evenly: E (1 - (1 - used/E)^rows).
    """
    found: dict[Kind, Work] = {}
    for op in program.ops:
        kind = op_kind(program, op)
        view = next((view for view, _ in op_views(op)), None)  # an op without views treats every row
        of_op = rows if view is None or program.buffers[view.buffer].rows == "step" else 1
        found[kind] = found.get(kind, Work()) + _op_work(program, op, of_op, position, cache_bytes)
    return {kind: work for kind, work in found.items() if work != Work()}


def _op_work(program: Program, op: Op, rows: int, position: int, cache_bytes: float) -> Work:
    tensors = [program.weights[name] for name in op_weights(op)]
    nbytes, elements = float(sum(tensor.nbytes for tensor in tensors)), sum(map(_elements, tensors))
    if isinstance(op, TableRows):
        return Work(rows * op.ids.elements * tensors[0].quant_type.row_bytes(tensors[0].shape[0]))
    if isinstance(op, SoftplusRouter) and op.table is not None:
        nbytes -= program.weights[op.table].nbytes * (1 - 1 / program.vocabulary)
    if isinstance(op, EmbedRows):
        return Work(rows * tensors[0].quant_type.row_bytes(tensors[0].shape[0]))
    if isinstance(op, RoutedExperts):
        experts, used = tensors[0].shape[2], op.ids.elements
        distinct = expected_experts(experts, used, rows)
        return Work(nbytes * distinct / experts, 0.0, 2.0 * rows * elements * used / experts)
    if isinstance(op, Attention):
        # keys and values are one state where the values are part of the keys' rows (MLA)
        width = sum(program.states[name].width for name in {op.keys, op.values})
        pairs = rows * (position + 1) - rows * (rows - 1) // 2  # of a row and a position that it sees
        operations = 2.0 * pairs * op.q.count * (op.key_width + op.value_width)
        return Work(0.0, (position + 1) * width * cache_bytes, operations)
    if isinstance(op, WindowAttention):
        return Work(nbytes) + _window_work(program, op, rows, position, cache_bytes)
    if isinstance(op, IndexRows):
        visible = (position + 1) // op.ratio
        operations = 2.0 * rows * visible * op.q.elements  # of the last row; earlier ones see a few less
        return Work(0.0, visible * program.states[op.keys].width * cache_bytes, operations)
    if isinstance(op, TokenChain):
        table, weight = (program.weights[name] for name in (op.embedding, op.weight))
        rows_read = rows * table.quant_type.row_bytes(table.shape[0])
        return Work(rows_read + op.block * weight.nbytes, 0.0, 2.0 * op.block * rows * _elements(weight))
    if isinstance(op, MatMul | HeadMatMul):
        return Work(nbytes, 0.0, 2.0 * rows * elements)
    return Work(nbytes)


def _window_work(program: Program, op: WindowAttention, rows: int, position: int, cache_bytes: float) -> Work:
    """Every row as the last one: the window, and the group rows that were chosen or, without a choice, all."""
    seen = min(position + 1, op.span)
    if op.groups is not None:
        visible = (position + 1) // op.ratio
        seen += min(visible, op.chosen.elements) if op.chosen else visible
    width = program.states[op.window].width
    return Work(0.0, seen * width * cache_bytes, 4.0 * rows * seen * op.q.elements)


def _elements(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


def expected_experts(experts: int, used: int, rows: int) -> float:
    """Distinct experts of one layer that so many rows use; exact for one row."""
    return float(used) if rows == 1 else experts * (1.0 - (1.0 - used / experts) ** rows)
