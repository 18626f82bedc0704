"""Lowering of the ops that `deepseek4` and `deepseek41` add.

Owns the arguments of their kernels and their scratch: `floats` (small weights as float32, one area an op), `mixing`,
`copies`, `router`, `keys` (addresses and scores), `index` (scores): one area a rank each.
"""

from __future__ import annotations

import math

from bloomery.cpu_experts.kernels.engram_wait import CLOCK_WORDS
from bloomery.cpu_experts.kernels.layouts import SHARED_INDEX_ROWS, aligned
from bloomery.cpu_experts.lowering_base import F32_BYTES, LoweringPass, bits_of
from bloomery.cpu_experts.stage import STEP_OUT_ROWS
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.errors import PlanError
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
from bloomery.runtime.program import Op


class Deepseek4Lowering(LoweringPass):
    """The part of a lowering pass that knows these ops."""

    def _lower_deepseek4(self, op: Op) -> None:
        match op:
            case UnitNorm():
                head = (self._rows(op.x), op.x.count, op.x.width)
                self.emit("unit_norm", *head, *self._heads(op.x), *self._heads(op.out), bits_of(op.epsilon))
            case HyperMix():
                self._hyper_mix(op)
            case HyperCollapse():
                self._contiguous(op.pre, op.out)
                head = (self._rows(op.out), op.streams.count, op.streams.width)
                places = (*self._heads(op.streams), *self.context.view(op.pre), *self.context.view(op.out))
                self.emit("hyper_collapse", *head, *places)
            case HyperPost():
                self._hyper_post(op)
            case TokenWrite():
                state = self.context.state(op.state)
                self.emit("token_write", state.address, state.slot_stride, state.row_stride, state.rows)
            case EngramRows():
                self._engram_rows(op)
            case TableRows():
                self._table_rows(op)
            case EngramGate():
                self._engram_gate(op)
            case GroupPool():
                self._group_pool(op)
            case GroupWrite():
                self._write_state(op.x, op.state, 0, op.ratio)
            case IndexRows():
                self._index_rows(op)
            case WindowAttention():
                self._window_attention(op)
            case SoftplusRouter():
                self._softplus_router(op)
            case _:
                raise PlanError(
                    f"{self.program.architecture}: op {op.name} ({type(op).__name__}) has no host kernel yet",
                    "run it with --executor reference",
                )

    def _rank_area(self, name: str, nbytes: int) -> tuple[int, int]:
        """(address, bytes of an area) of scratch with an area for each rank."""
        area = aligned(nbytes)
        return self.context.scratch(name, area * self.context.ranks), area

    def _as_floats(self, name: str, place: int = 0) -> int:
        """Address of a small weight as float32: where it is, or where a stage brings it in every step."""
        address, tensor = self.context.weight(name)
        if tensor.quant_type.name == "F32":
            return address
        rows = math.prod(tensor.shape[1:])
        row_bytes, blocks = self._blocks(tensor, tensor.shape[0], *(*tensor.shape[1:], 1, 1)[:2])
        made = self.context.scratch(f"floats:{place}", rows * tensor.shape[0] * F32_BYTES)
        self.emit(
            f"table_rows_{tensor.quant_type.name}", -1, rows, 0, 0, address, row_bytes, blocks, tensor.shape[0], made, 0
        )
        return made

    # ---- hyper-connections
    def _hyper_mix(self, op: HyperMix) -> None:
        self._contiguous(op.streams, op.logits, op.pre)
        copies = op.pre.elements
        words: tuple[int, ...] = ()
        for view in (op.streams, op.logits, op.pre, op.post, op.mixing):
            words += self.context.view(view) if view else (0, 0)
        weights = (self.context.weight(op.base)[0], self.context.weight(op.scale)[0])
        numbers = (bits_of(op.epsilon), bits_of(op.hyper_epsilon), op.rounds)
        area = self._rank_area("mixing", 8 * copies * copies)
        self.emit("hyper_mix", self._rows(op.pre), copies, op.streams.elements, *words, *weights, *numbers, *area)

    def _hyper_post(self, op: HyperPost) -> None:
        self._contiguous(op.y, op.post, op.mixing)
        copies, width = op.streams.count, op.streams.width
        self.emit(
            "hyper_post", self._rows(op.out), copies, width, *self.context.view(op.y), *self._heads(op.streams),
            *self.context.view(op.post), *self.context.view(op.mixing), *self._heads(op.out),
            *self._rank_area("copies", 32 * copies),
        )  # fmt: skip

    # ---- engrams
    def _engram_rows(self, op: EngramRows) -> None:
        if self.context.brought(op.site):
            return  # the process that brings the rows makes their ids
        engram = self.program.engram
        assert engram is not None and engram.token_map.flags.c_contiguous
        state, site = self.context.state(op.tokens), engram.sites[op.site]
        tokens = (state.address, state.slot_stride, state.row_stride, state.rows)
        facts = (engram.token_map.ctypes.data, engram.pad, engram.longest, engram.heads)
        constants = (*site.multipliers, *site.primes, *site.offsets)
        self.emit("engram_rows", *self.context.view(op.ids), *tokens, *facts, *constants)

    def _table_rows(self, op: TableRows) -> None:
        self._contiguous(op.ids, op.out)
        address, tensor = self.context.weight(op.table)
        width = op.out.elements // op.ids.elements
        row_bytes, blocks = self._blocks(tensor, width, tensor.shape[1])
        ids = self.context.view(op.ids)
        site = next((table.site for table in engram_tables(self.program) if table.weight == op.table), None)
        if site is not None and (brought := self.context.brought(site)):
            self.emit("engram_wait", brought.flag, brought.control, *([0] * CLOCK_WORDS))
            address, ids = brought.rows, (brought.places, 4 * op.ids.elements)
        places = (*ids, address, row_bytes, blocks, width, *self.context.view(op.out))
        self.emit(f"table_rows_{tensor.quant_type.name}", self._rows(op.out), op.ids.elements, *places)

    def _engram_gate(self, op: EngramGate) -> None:
        self._contiguous(op.value, op.gate)
        weights = (self._as_floats(op.key_weight, 0), self._as_floats(op.query_weight, 1))
        self.emit(
            "engram_gate", self._rows(op.out), op.streams.count, op.streams.width, *self._heads(op.streams),
            *self._heads(op.keys), *self.context.view(op.value), *self.context.view(op.gate), *self._heads(op.out),
            *weights, bits_of(op.epsilon),
        )  # fmt: skip

    # ---- compressed rows
    def _group_pool(self, op: GroupPool) -> None:
        self._contiguous(op.values, op.scores, op.out)
        state, width = self.context.state(op.state), op.values.elements
        bias = self._as_floats(op.bias) if op.bias else 0
        places = (state.address, state.slot_stride, state.row_stride, state.rows)
        made = (*self.context.view(op.values), *self.context.view(op.scores))
        self.emit("pool_write", *made, width, bias, op.ratio, *places)
        head = (op.out.elements, width, op.ratio, int(op.overlap))
        self.emit("pool_rows", *self.context.view(op.out), *head, *places)

    def _index_rows(self, op: IndexRows) -> None:
        self._contiguous(op.weights, op.out, *(view for view in (op.kept, op.within) if view))
        state, cache_type = self.context.state(op.keys), self._cache_type(op.keys)
        rows = self.context.context // op.ratio
        blocks_at = aligned((rows + 8) * F32_BYTES)
        area = blocks_at + (aligned((-(-rows // op.block) + 8) * F32_BYTES) if op.block else 0)
        scratch = self.context.scratch("index", area * max(self.context.ranks, SHARED_INDEX_ROWS))
        of_query = (op.q.count, op.q.width, bits_of(op.scale), *self._heads(op.q), *self.context.view(op.weights))
        head = (*of_query, state.address, state.slot_stride, state.row_stride, op.ratio, scratch, area)
        choice: tuple[int, ...] = (*self.context.view(op.out), op.out.elements)
        for view in (op.kept, op.within):
            choice += (*self.context.view(view), view.elements) if view else (0, 0, 0)
        for kernel in ("index_scores", "index_rows"):
            self.emit(f"{kernel}_{cache_type}", *head, *choice, op.block, blocks_at)

    # ---- attention
    def _window_attention(self, op: WindowAttention) -> None:
        window, cache_type = self.context.state(op.window), self._cache_type(op.window)
        seen = min(op.span + (self.context.max_out_rows if op.block else 0), self.context.context)
        groups: tuple[int, ...] = (0, 0, 0)
        if op.groups:
            of_groups = self.context.state(op.groups)
            groups = (of_groups.address, of_groups.slot_stride, of_groups.row_stride)
            seen += op.chosen.elements if op.chosen else self.context.context // op.ratio
        chosen = (*self.context.view(op.chosen), op.chosen.elements) if op.groups and op.chosen else (0, 0, 0)
        keys = aligned(8 * seen) // 8
        area = self._rank_area("keys", 8 * keys + F32_BYTES * (seen + 8))
        self.emit(
            f"window_attention_{cache_type}", op.q.count, op.q.width, bits_of(op.scale), *self._heads(op.q),
            *self._heads(op.out), window.address, window.slot_stride, window.row_stride, window.rows, op.span, *groups,
            *chosen, op.ratio, self.context.weight(op.sinks)[0], *area, keys, self._rows(op.q), int(op.block),
        )  # fmt: skip

    # ---- router
    def _softplus_router(self, op: SoftplusRouter) -> None:
        self._contiguous(op.logits, op.ids, op.mix)
        experts, rows = op.logits.elements, self._rows(op.logits)
        views = (word for view in (op.logits, op.ids, op.mix) for word in self.context.view(view))
        bias, table = (self.context.weight(name)[0] if name else 0 for name in (op.bias, op.table))
        rule = (bias, table, int(op.normalise), bits_of(op.scale), int(rows == STEP_OUT_ROWS))
        area = self._rank_area("router", 2 * F32_BYTES * experts)
        self.emit("router_softplus", rows, experts, op.ids.elements, *views, *rule, *area)
