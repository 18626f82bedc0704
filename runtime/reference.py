"""The reference executor: runs a program op by op in NumPy, in float32 or float64, on dequantised weights.

Owns the reference's buffers, caches and weight cache. What each op means is in `reference_ops` (and importable from
here); what a step is, in `executor`. It is exact and slow, meant for tests, for quant types without a kernel and for
reading.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bloomery.runtime.errors import StepAborted
from bloomery.runtime.executor import StepResult, StepRows
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

CACHE_TYPES: dict[str, type[np.floating[Any]]] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
MAX_LOGITS_BYTES = 64 << 20


class DequantisedWeights:
    """Weights of a program as float arrays, dequantised when first used; the least recently used go when more than
    `limit` bytes are held. Matrices of an expert tensor are separate entries."""

    def __init__(self, program: Program, dtype: DTypeLike, limit: int) -> None:
        self._tensors = program.weights
        self._dtype = np.dtype(dtype)
        self._limit = limit
        self._held: OrderedDict[tuple[str, int], Floats] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, name: str) -> Floats:
        """The whole tensor, shape reversed."""
        return self._get(name, -1)

    def expert(self, name: str, index: int) -> Floats:
        """Matrix `index` of a three-dimensional tensor: (outputs, inputs)."""
        return self._get(name, index)

    def embedding(self, name: str, rows: NDArray[np.int32]) -> Floats:
        """Rows of a matrix, dequantised anew each time."""
        return self._tensors[name].dequantise_rows(rows, self._dtype)

    def _get(self, name: str, index: int) -> Floats:
        key = (name, index)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        tensor = self._tensors[name] if index < 0 else self._tensors[name].expert(index)
        array = tensor.dequantise(self._dtype)
        self._held[key] = array
        self._bytes += array.nbytes
        while self._bytes > self._limit and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._bytes -= dropped.nbytes
        return array


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
        cache_type: Literal["f16", "f32", "f64"] = "f32",
        dtype: DTypeLike = np.float32,
        weight_bytes: int = 2 << 30,
    ) -> None:
        assert context > 0 and slots > 0 and max_rows > 0
        self.program = program
        self.dtype = np.dtype(dtype)
        self._context, self._slots, self._max_rows = context, slots, max_rows
        most = MAX_LOGITS_BYTES // (4 * program.vocabulary)
        self._max_out_rows = min(max_rows, max(slots, most, 1))
        self._weights = DequantisedWeights(program, self.dtype, weight_bytes)
        self._states = {
            state.name: np.zeros((slots, context, state.width), CACHE_TYPES[cache_type])
            for state in program.states.values()
        }
        self._buffers: dict[str, NDArray[Any]] = {}
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
        self._check(rows)
        started = time.perf_counter()
        with self._lock:
            self._running, self._aborted = True, False
        try:
            for op in self.program.ops:
                if self._aborted:
                    raise StepAborted(f"aborted before op {op.name}")
                self._execute(op, rows)
        finally:
            with self._lock:
                self._running = False
        seconds = time.perf_counter() - started
        self._steps, self._rows, self._seconds = self._steps + 1, self._rows + len(rows.tokens), self._seconds + seconds
        logits = self._buffers[self.program.logits].astype(np.float32, copy=False)
        return StepResult(logits, self._buffers[self.program.argmax][:, 0], seconds)

    def abort(self) -> None:
        with self._lock:
            self._aborted = self._running

    def copy_prefix(self, source: int, target: int, positions: int) -> None:
        for state in self._states.values():
            state[target, :positions] = state[source, :positions]

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
        buffer = self._buffers[view.buffer]
        if view.contiguous:
            return buffer[:, view.start : view.end].reshape(len(buffer), view.count, view.width)
        starts = view.start + view.stride * np.arange(view.count)
        return buffer[:, starts[:, None] + np.arange(view.width)]

    def _flat(self, view: View) -> NDArray[Any]:
        return self.read(view).reshape(-1, view.elements)

    def _write(self, view: View, value: NDArray[Any]) -> None:
        buffer = self._buffers[view.buffer]
        heads = value.reshape(len(buffer), view.count, view.width)
        if view.contiguous:
            buffer[:, view.start : view.end] = heads.reshape(len(buffer), view.elements)
        else:
            for head in range(view.count):
                start = view.start + head * view.stride
                buffer[:, start : start + view.width] = heads[:, head]

    def _execute(self, op: Op, rows: StepRows) -> None:
        self._allocate(op, rows)
        read, flat, write, weights = self.read, self._flat, self._write, self._weights
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
                write(op.out, rope(read(op.x), rows.positions, op.frequencies, op.magnitude, op.pairs))
            case CopyHeads():
                x = read(op.x)
                write(op.out, np.broadcast_to(x, (len(x), op.out.count, op.out.width)))
            case CacheWrite():
                self._states[op.state][rows.slots, rows.positions, op.start : op.start + op.x.elements] = flat(op.x)
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

                write(op.out, routed_experts(flat(op.x), flat(op.ids), flat(op.mix), matrices))
            case SwiGlu():
                write(op.out, swiglu(read(op.gate), read(op.up)))
            case Add():
                write(op.out, read(op.x) + read(op.y))
            case SelectRows():
                write(op.out, read(op.x)[rows.out_rows])
            case Argmax():
                write(op.out, argmax(flat(op.x)))

    def _attend(self, op: Attention, rows: StepRows) -> Floats:
        q = self.read(op.q)
        out = np.empty((len(q), op.out.count, op.out.width), self.dtype)
        for slot in np.unique(rows.slots):
            mine = rows.slots == slot
            positions = rows.positions[mine]
            seen = int(positions.max()) + 1
            keys = self._states[op.keys][slot, :seen, : op.kv_heads * op.key_width]
            values = self._states[op.values][slot, :seen, : op.kv_heads * op.value_width]
            out[mine] = attention(
                q[mine],
                keys.astype(self.dtype).reshape(seen, op.kv_heads, op.key_width),
                values.astype(self.dtype).reshape(seen, op.kv_heads, op.value_width),
                positions,
                op.scale,
            )
        return out

    def _allocate(self, op: Op, rows: StepRows) -> None:
        """Sizes the buffers that the op writes to this step's rows; keeps what parts of them were written before."""
        for field in ("out", "outs", "ids", "mix"):
            value = getattr(op, field, ())
            for view in value if isinstance(value, tuple) else (value,):
                buffer = self.program.buffers[view.buffer]
                count = len(rows.tokens) if buffer.rows == "step" else len(rows.out_rows)
                if view.buffer not in self._buffers or len(self._buffers[view.buffer]) != count:
                    dtype = self.dtype if buffer.dtype == "f32" else np.dtype(np.int32)
                    self._buffers[view.buffer] = np.zeros((count, buffer.width), dtype)

    def _check(self, rows: StepRows) -> None:
        """Refuses rows outside the caches or the vocabulary (a defect of the caller): ValueError."""
        limits = (
            ("rows", len(rows.tokens), self._max_rows + 1),
            ("rows with logits", len(rows.out_rows), self._max_out_rows + 1),
            ("token", rows.tokens, self.program.vocabulary),
            ("slot", rows.slots, self._slots),
            ("position", rows.positions, self._context),
            ("row with logits", rows.out_rows, len(rows.tokens)),
        )
        for what, value, limit in limits:
            if np.size(value) and (np.min(value) < 0 or np.max(value) >= limit):
                raise ValueError(f"{what} {np.min(value)} to {np.max(value)}, expected 0 to {limit - 1}")
