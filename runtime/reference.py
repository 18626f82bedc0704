"""The reference executor: runs a program op by op in NumPy, in float32 or float64, on dequantised weights.

What each op means is in `reference_ops` and `reference_deepseek4`; how its views lie in memory, in `reference_buffers`;
what states are, in `states` and `slot_states`; what a step is, in `executor`. It is exact and slow, meant for tests,
for quant types without a kernel and for reading.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bloomery.runtime.cache_support import check_cache_type
from bloomery.runtime.cache_types import (
    CacheType,
    dequantise_rows,
    quantise_rows,
    stored_dtype,
    stored_width,
)
from bloomery.runtime.dequantised_weights import DequantisedWeights
from bloomery.runtime.engram_hash import NO_TOKEN
from bloomery.runtime.errors import StepAborted
from bloomery.runtime.executor import MOST_AHEAD, StateSnapshot, StepResult, StepRows, check_rows
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
from bloomery.runtime.ops_drafts import StreamMean, TokenChain
from bloomery.runtime.program import (
    Add,
    Argmax,
    Attention,
    CacheWrite,
    CopyHeads,
    EmbedRows,
    HeadMatMul,
    MatMul,
    Op,
    Program,
    RmsNorm,
    Rope,
    RoutedExperts,
    Router,
    SelectRows,
    SwiGlu,
    View,
)
from bloomery.runtime.reference_buffers import ReferenceBuffers
from bloomery.runtime.reference_deepseek4 import (
    best_blocks,
    best_rows,
    engram_gate,
    hyper_collapse,
    hyper_mix,
    hyper_post,
    index_scores,
    only_blocks,
    overlapping,
    pool_group,
    sink_attention,
    softplus_route,
    stream_mean,
    unit_norm,
)
from bloomery.runtime.reference_ops import (
    Floats,
    argmax,
    attention,
    head_matmul,
    matmul,
    rms_norm,
    rope,
    route,
    routed_experts,
    swiglu,
)
from bloomery.runtime.shallow_steps import shallow_part
from bloomery.runtime.slot_states import SlotStates
from bloomery.runtime.steps_ahead import single_steps

MAX_LOGITS_BYTES = 64 << 20


class ReferenceExecutor:
    """A StepExecutor in NumPy. `dtype` is that of activations and dequantised weights, `cache_type` that of cached
    rows. Results for a row depend on the other rows of the step only by rounding."""

    def __init__(
        self,
        program: Program,
        *,
        context: int,
        slots: int = 1,
        max_rows: int = 512,
        cache_type: CacheType | Literal["f64"] = "f32",
        dtype: DTypeLike = np.float32,
        weight_bytes: int = 2 << 30,
        spare: int | None = None,
    ) -> None:
        """`spare` (default: max_rows) is how far rings reach back beyond what a row reads; see `states`."""
        spare = max_rows if spare is None else spare
        assert context > 0 and slots > 0 and max_rows > 0 and spare >= max_rows - 1
        if cache_type != "f64":
            check_cache_type(program, cache_type)
        self.program = program
        self.dtype = np.dtype(dtype)
        self._context, self._slots, self._max_rows, self._spare = context, slots, max_rows, spare
        most = MAX_LOGITS_BYTES // (4 * program.vocabulary)
        self._max_out_rows = min(max_rows, max(slots, most, 1))
        self._weights = DequantisedWeights(program, self.dtype, weight_bytes)
        # what is not cached stays in the executor's own precision
        cached = np.dtype(np.float64) if cache_type == "f64" else stored_dtype(cache_type)
        dtypes = {"cache": cached, "f32": self.dtype, "i32": np.dtype(np.int32)}
        self._blocks = cache_type == "q8_0"
        self._states: dict[str, NDArray[Any]] = {
            state.name: np.zeros((slots, state.rows(context, spare), self._stored(state.width)), dtypes[state.kind])
            for state in program.states.values()
        }
        self._shallow = shallow_part(program)
        sizes = {"slots": slots, "context": context, "spare": spare}
        self._slot_states = SlotStates(program.states, self._states, **sizes, shallow_reach=self.shallow_reach)
        self._buffers = ReferenceBuffers(program, self.dtype)
        self._lock = threading.Lock()
        self._running = self._aborted = False
        self._steps = self._rows = 0
        self._seconds = 0.0

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def max_out_rows(self) -> int:
        return self._max_out_rows

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def context(self) -> int:
        return self._context

    # -- StepExecutor -------------------------------------------------------------------------------------------------
    def step(self, rows: StepRows) -> StepResult:
        if rows.ahead:
            self._check(rows)
            return single_steps(self.step, rows)
        started = time.perf_counter()
        if not self._running:
            self.announce()
        try:
            self._check(rows)
            self._slot_states.reach.begin(rows)
            for name in self.program.inputs:
                self._buffers[name] = np.array(rows.inputs[name], self.dtype)
            shallow = rows.shallow and self._shallow
            for op in self.program.ops[: shallow.ops] if shallow else self.program.ops:
                if self._aborted:
                    raise StepAborted(f"aborted before op {op.name}")
                self._execute(op, rows)
        finally:
            with self._lock:
                self._running = False
        seconds = time.perf_counter() - started
        self._steps, self._rows, self._seconds = self._steps + 1, self._rows + len(rows.tokens), self._seconds + seconds
        view = self.program.hidden
        for name in (self.program.logits, self.program.argmax, *([view.buffer] if view else [])) if shallow else ():
            self._buffers[name] = np.zeros((0, self.program.buffers[name].width), self.dtype)
        logits = self._buffers[self.program.logits].astype(np.float32, copy=False)
        hidden = None if view is None else self._buffers[view.buffer][:, view.start : view.end]
        rows_made_of = None if hidden is None else hidden.astype(np.float32, copy=False)
        reports = {name: self._buffers[name].astype(np.float32, copy=False) for name in self.program.reports}
        return StepResult(logits, self._buffers[self.program.argmax][:, 0], seconds, rows_made_of, reports)

    @property
    def shallow_reach(self) -> int:
        return self._shallow.reach if self._shallow else 0

    def most_ahead(self, rows: int) -> int:
        return max(0, min(MOST_AHEAD, self._spare, self.max_out_rows // rows - 1))

    def announce(self) -> None:
        with self._lock:
            self._running, self._aborted = True, False

    def abort(self) -> None:
        with self._lock:
            self._aborted = self._running

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        self._slot_states.copy_prefix(source, target, positions)

    def continuable(self, slot: int) -> range:
        """The positions at which a step of this slot may begin, besides 0."""
        return self._slot_states.reach.continuable(slot)

    def snapshot(self, slot: int, positions: int, reach: int = 0) -> StateSnapshot:
        """What the slot's first `positions` positions leave behind; ValueError where rings have lost part of it."""
        return self._slot_states.snapshot(slot, positions, reach)

    def snapshot_bytes(self, positions: int, reach: int = 0) -> int:
        return self._slot_states.snapshot_bytes(positions, reach)

    def restore(self, slot: int, snapshot: StateSnapshot, positions: int | None = None) -> None:
        """Makes the slot as it was at the snapshot, bit for bit."""
        self._slot_states.restore(slot, snapshot, positions)

    def recover(self) -> None:
        """Nothing to do: the reference runs in the caller's process and loses no workers."""

    def statistics(self) -> dict[str, Any]:
        return {"executor": "reference", "steps": self._steps, "rows": self._rows, "seconds": self._seconds}

    def close(self) -> None:
        self._buffers.clear()
        self._states.clear()

    # -- one op -------------------------------------------------------------------------------------------------------
    def read(self, view: View) -> NDArray[Any]:
        """(rows, view.count, view.width): the view's elements after the last op that ran; for op-by-op comparisons."""
        return self._buffers.read(view)

    def _execute(self, op: Op, rows: StepRows) -> None:
        self._buffers.allocate(op, rows)
        buffers, weights = self._buffers, self._weights
        read, flat, write = buffers.read, buffers.flat, buffers.write
        match op:
            case EmbedRows():
                write(op.out, weights.embedding(op.weight, rows.tokens))
            case RmsNorm():
                write(op.out, rms_norm(read(op.x), weights[op.weight], op.epsilon))
            case MatMul():
                x = flat(op.x)
                for out, weight, bias in zip(op.outs, op.weights, op.biases, strict=True):
                    write(out, matmul(x, weights[weight], weights[bias] if bias else None))
            case HeadMatMul():
                write(op.out, head_matmul(read(op.x), weights[op.weight]))
            case Rope():
                positions = self._places(op.x, rows)[1] - np.int32(op.behind)
                write(op.out, rope(read(op.x), positions, op.frequencies, op.magnitude, op.pairs))
            case CopyHeads():
                x = read(op.x)
                write(op.out, np.broadcast_to(x, (len(x), op.out.count, op.out.width)))
            case CacheWrite():
                slots, positions = self._places(op.x, rows)
                at = self._slot_states.rows(op.state, positions)
                values = quantise_rows(flat(op.x)) if self._blocks else flat(op.x)
                first = self._stored(op.start)
                self._states[op.state][slots, at, first : first + values.shape[1]] = values
            case Attention():
                write(op.out, self._attend(op, rows))
            case Router():
                bias_values = weights[op.bias] if op.bias else None
                ids, mix = route(
                    flat(op.logits),
                    op.ids.width,
                    bias=bias_values,
                    gating=op.gating,
                    normalise=op.normalise,
                    scale=op.scale,
                    groups=op.groups,
                    groups_used=op.groups_used,
                )
                write(op.ids, ids)
                write(op.mix, mix)
            case RoutedExperts():
                gate, up, down = op.gate, op.up, op.down

                def matrices(e: int) -> tuple[Floats, Floats, Floats]:
                    return weights.expert(gate, e), weights.expert(up, e), weights.expert(down, e)

                write(op.out, routed_experts(flat(op.x), flat(op.ids), flat(op.mix), matrices, op.limit))
            case SwiGlu():
                write(op.out, swiglu(read(op.gate), read(op.up), op.limit))
            case Add():
                write(op.out, read(op.x) + read(op.y))
            case SelectRows():
                write(op.out, read(op.x)[rows.out_rows])
            case Argmax():
                write(op.out, argmax(flat(op.x)))
            case _:
                self._execute_deepseek4(op, rows)

    def _execute_deepseek4(self, op: Op, rows: StepRows) -> None:
        """The ops that `deepseek4` and `deepseek41` add."""
        buffers, weights = self._buffers, self._weights
        read, flat, write = buffers.read, buffers.flat, buffers.write
        match op:
            case UnitNorm():
                write(op.out, unit_norm(read(op.x), op.epsilon))
            case HyperMix():
                pre, post, mixing = hyper_mix(
                    read(op.streams),
                    flat(op.logits),
                    weights[op.base],
                    weights[op.scale],
                    epsilon=op.epsilon,
                    hyper_epsilon=op.hyper_epsilon,
                    rounds=op.rounds,
                )
                write(op.pre, pre)
                if op.post and op.mixing:
                    write(op.post, post)
                    write(op.mixing, mixing)
            case HyperCollapse():
                write(op.out, hyper_collapse(read(op.streams), flat(op.pre)))
            case HyperPost():
                streams, mixing = read(op.streams), flat(op.mixing)
                square = mixing.reshape(-1, op.streams.count, op.streams.count)
                write(op.out, hyper_post(flat(op.y), streams, flat(op.post), square))
            case TokenWrite():
                self._states[op.state][rows.slots, self._slot_states.rows(op.state, rows.positions), 0] = rows.tokens
            case EngramRows():
                assert self.program.engram is not None
                write(op.ids, self.program.engram.row_ids(op.site, self._histories(op.tokens, rows)))
            case TableRows():
                ids = flat(op.ids)
                write(op.out, weights.embedding(op.table, ids.ravel()).reshape(len(ids), -1))
            case EngramGate():
                streams = read(op.streams)
                key_weight, query_weight = weights[op.key_weight], weights[op.query_weight]
                gate = engram_gate(streams, read(op.keys), key_weight, query_weight, op.epsilon)
                write(op.gate, gate)
                write(op.out, streams + gate[:, :, None] * read(op.value))
            case GroupPool():
                write(op.out, self._pool(op, rows))
            case GroupWrite():
                whole = (rows.positions + 1) % op.ratio == 0
                at = rows.positions[whole] // op.ratio
                self._states[op.state][rows.slots[whole], at] = flat(op.x)[whole]
            case IndexRows():
                self._index(op, rows)
            case WindowAttention():
                write(op.out, self._attend_window(op, rows))
            case SoftplusRouter():
                tokens = (
                    rows.tokens if self.program.buffers[op.logits.buffer].rows == "step" else rows.tokens[rows.out_rows]
                )
                ids, mix = softplus_route(
                    flat(op.logits),
                    op.ids.width,
                    bias=weights[op.bias] if op.bias else None,
                    table=self.program.weights[op.table].dequantise_rows(tokens, np.int32) if op.table else None,
                    normalise=op.normalise,
                    scale=op.scale,
                )
                write(op.ids, ids)
                write(op.mix, mix)
            case StreamMean():
                write(op.out, stream_mean(read(op.streams)))
            case TokenChain():
                self._chain(op, rows)
            case _:
                raise NotImplementedError(f"op {op.name}: the reference does not know {type(op).__name__}")

    def _places(self, view: View, rows: StepRows) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(slots, positions) of the rows of a view's buffer."""
        if self.program.buffers[view.buffer].rows == "step":
            return rows.slots, rows.positions
        return rows.slots[rows.out_rows], rows.positions[rows.out_rows]

    def _chain(self, op: TokenChain, rows: StepRows) -> None:
        """The rows of all blocks, one after the other."""
        slots, tokens, weight = rows.slots[rows.out_rows], rows.tokens[rows.out_rows], self._weights[op.weight]
        base, chosen = self._buffers.flat(op.base), np.empty((len(slots), 1), np.int32)
        logits, previous = np.empty_like(base), np.empty((len(slots), op.previous.width), self.dtype)
        for o in range(len(slots)):
            first = o == 0 or slots[o] != slots[o - 1]
            before = tokens[o : o + 1] if first else chosen[o - 1]
            previous[o] = self._weights.embedding(op.embedding, before)[0]
            logits[o] = base[o] + weight @ previous[o]
            chosen[o] = argmax(logits[o : o + 1])
        for view, value in ((op.logits, logits), (op.previous, previous), (op.out, chosen)):
            self._buffers.write(view, value)

    def _logical(self, state: str, slot: int, first: int, end: int) -> NDArray[Any]:
        """Rows first..end-1 of a slot's state."""
        rows: NDArray[Any] = self._states[state][slot, self._slot_states.rows(state, np.arange(first, end))]
        return rows

    def _histories(self, state: str, rows: StepRows) -> NDArray[np.int64]:
        """(R, longest): each row's token and those before it, newest first, NO_TOKEN before the sequence's start."""
        assert self.program.engram is not None
        positions = rows.positions[:, None] - np.arange(self.program.engram.longest)
        at = self._slot_states.rows(state, np.maximum(positions, 0))
        return np.where(positions < 0, NO_TOKEN, self._states[state][rows.slots[:, None], at, 0])

    def _pool(self, op: GroupPool, rows: StepRows) -> Floats:
        values, scores = self._buffers.flat(op.values), self._buffers.flat(op.scores)
        if op.bias:
            scores = scores + self._weights[op.bias][rows.positions % op.ratio]
        at = self._slot_states.rows(op.state, rows.positions)
        self._states[op.state][rows.slots, at] = np.concatenate([values, scores], axis=1)
        out = np.zeros((len(values), op.out.width), self.dtype)
        for r, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
            if (position + 1) % op.ratio:
                continue
            first = position + 1 - op.ratio * (2 if op.overlap else 1)
            kept = self._logical(op.state, slot, max(first, 0), position + 1)
            group = kept[:, : op.values.width], kept[:, op.values.width :]
            out[r] = pool_group(*(overlapping(*group, op.ratio) if op.overlap else group))
        return out

    def _index(self, op: IndexRows, rows: StepRows) -> None:
        q, weights = self._buffers.read(op.q), self._buffers.flat(op.weights)
        within = self._buffers.flat(op.within) if op.within else None
        chosen = np.full((len(q), op.out.width), -1, np.int32)
        kept = np.full((len(q), op.kept.width if op.kept else 0), -1, np.int32)
        ends = {int(slot): (rows.positions[rows.slots == slot].max() + 1) // op.ratio for slot in np.unique(rows.slots)}
        keys = {slot: self._states[op.keys][slot, :end].astype(self.dtype) for slot, end in ends.items()}
        for r, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
            visible = (position + 1) // op.ratio
            if not visible:
                continue
            scores = index_scores(q[r], keys[int(slot)][:visible], weights[r], op.scale)
            if op.kept:
                blocks = best_blocks(scores, op.block, op.kept.width)
                kept[r, : len(blocks)] = blocks
            if within is not None:
                scores = only_blocks(scores, within[r], op.block)
            best = best_rows(scores, op.out.width)
            chosen[r, : len(best)] = best
        self._buffers.write(op.out, chosen)
        if op.kept:
            self._buffers.write(op.kept, kept)

    def _attend_window(self, op: WindowAttention, rows: StepRows) -> Floats:
        q, sinks = self._buffers.read(op.q), self._weights[op.sinks]
        chosen = self._buffers.flat(op.chosen) if op.chosen else None
        out = np.empty_like(q)
        slots, positions = self._places(op.q, rows)
        for r, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            first, last = position - op.span + 1, position
            if op.block:
                mine = positions[slots == slot]
                first, last = mine[0] - op.span, mine[-1]
            keys = self._logical(op.window, slot, max(0, first), last + 1)
            if op.groups:
                visible = (position + 1) // op.ratio
                numbers = np.arange(visible) if chosen is None else chosen[r][chosen[r] >= 0]
                keys = np.concatenate([keys, self._states[op.groups][slot, numbers]])
            out[r] = sink_attention(q[r], keys.astype(self.dtype), sinks, op.scale)
        return out

    def _attend(self, op: Attention, rows: StepRows) -> Floats:
        q = self._buffers.read(op.q)
        out = np.empty((len(q), op.out.count, op.out.width), self.dtype)
        for slot in np.unique(rows.slots):
            mine = rows.slots == slot
            positions = rows.positions[mine]
            seen = int(positions.max()) + 1
            keys = self._cached(op.keys, slot, seen, op.kv_heads * op.key_width)
            values = self._cached(op.values, slot, seen, op.kv_heads * op.value_width)
            out[mine] = attention(
                q[mine],
                keys.reshape(seen, op.kv_heads, op.key_width),
                values.reshape(seen, op.kv_heads, op.value_width),
                positions,
                op.scale,
            )
        return out

    def _stored(self, width: int) -> int:
        """How many array elements keep `width` cached ones: q8_0 states, of which all kinds are "cache", hold bytes."""
        return stored_width("q8_0", width) if self._blocks else width

    def _cached(self, state: str, slot: int, rows: int, width: int) -> Floats:
        """The first `width` elements of a slot's first rows."""
        stored = self._states[state][slot, :rows, : self._stored(width)]
        return dequantise_rows(stored, self.dtype) if self._blocks else stored.astype(self.dtype)

    def _check(self, rows: StepRows) -> None:
        """Refuses rows outside the caches or the vocabulary (a defect of the caller): ValueError."""
        check_rows(rows, self, self.program.vocabulary)
