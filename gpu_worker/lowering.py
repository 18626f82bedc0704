"""Lowering: a program's ops become kernel launches for a given number of rows.

Owns the parameters and grids of every kernel, the scratch between the launches of an op, and which activations are
still there in the form that a product wants. It knows neither what kernels do inside nor PyCUDA.

Scratch names: `activations:FORM` (the input of a product), `hidden:FORM` (that of the experts' down products), `gate`,
`up`, `experts` (results of every item = row and place in its list of experts), `parts`, `extremes` (attention),
`best` (argmax), and one rope table for each set of frequencies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from bloomery.gpu_worker.attention_lowering import attend_and_round, lower_fresh
from bloomery.gpu_worker.beside import Lowered, put_beside
from bloomery.gpu_worker.chain_lowering import (
    NO_RESIDUAL,
    NO_SCORES,
    joined_always,
    joined_experts,
    lower_chain,
    open_and_close,
    separate_experts,
    spreads,
)
from bloomery.gpu_worker.chains import (
    Chained,
    FreshAttention,
    NormedChoice,
    NormedExperts,
    NormedProduct,
    Shared,
    Spreading,
    Summed,
    TurnedWindow,
    chained,
)
from bloomery.gpu_worker.early_collapse import collapsed_early
from bloomery.gpu_worker.fusions import MOST_JOBS, AddNorm, Attended, HeadRun, Routed, fused
from bloomery.gpu_worker.hand_off_lowering import lower_hand_off
from bloomery.gpu_worker.hyper_lowering import HyperRead, lower_hyper_read, read_together
from bloomery.gpu_worker.launches import MAX_ROWS, CardContext, KernelName, Launch, float_word
from bloomery.gpu_worker.lowering_deepseek4 import lower_deepseek4, lower_turned
from bloomery.gpu_worker.products import (
    FLOAT_TYPES,
    JOBS,
    SUPER_TYPES,
    UNIT_TYPES,
    USE_HOST,
    Activations,
    Job,
    activation_form,
    aligned,
    blocks,
    blocks_each,
    check_types,
    job_words,
    ring_bytes,
    rows_of_warp,
)
from bloomery.runtime.errors import PlanError
from bloomery.runtime.ops_hand_off import HandOffReceive, HandOffSend
from bloomery.runtime.program import (
    Add,
    Argmax,
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
    written_buffers,
)
from bloomery.runtime.quant_types import QuantType

_WARPS: Final = 4  # of a block of products.cuh
_HEAD_JOB_WORDS: Final = 12
_ARGMAX_PARTS: Final = 64


def lower(program: Program, context: CardContext, rows: int, out_rows: int) -> list[Launch]:
    """The launches of one step of so many rows. Raises PlanError naming tensor and type where there is no kernel."""
    assert 0 < rows <= MAX_ROWS and 0 <= out_rows <= MAX_ROWS
    check_types(program)
    return Lowering(program, context, rows, out_rows).launches()


class Lowering:
    """One pass over a program; `launches` is called once."""

    def __init__(self, program: Program, context: CardContext, rows: int, out_rows: int) -> None:
        self.program = program
        self.context = context
        self.rows, self.out_rows = rows, out_rows
        self.step = context.step
        self.out: list[Launch] = []
        self.tables: dict[tuple[object, ...], int] = {}
        self.formed: dict[str, tuple[View, Activations]] = {}  # what each form's scratch holds
        self.label = ""

    def launches(self) -> list[Launch]:
        lowered: list[Lowered] = []
        for part in self.parts():
            first = len(self.out)
            self.lower_each(part)
            lowered.append((part, range(first, len(self.out))))
        return put_beside(self.program, lowered, self.out)

    def parts(self) -> Iterable[Chained | HyperRead]:
        """The program's ops as they are launched together."""
        together = read_together(chained(fused(self.program), lambda shared: joined_always(self, shared)))
        return collapsed_early(self.program, together, lambda chain: spreads(self, chain))

    def lower_each(self, *parts: Chained | HyperRead) -> None:
        for op in parts:
            self.label = op.name
            match op:
                case AddNorm():
                    self._add_norm(op)
                case HeadRun():
                    self._head_run(op)
                case Routed():
                    self._routed(op)
                case Attended():
                    self._forget({op.attention.out.buffer})
                    self._attention(op)
                case FreshAttention():
                    lower_fresh(self, op)
                case TurnedWindow():
                    lower_turned(self, op)
                case Shared() | Summed() | Spreading() | NormedProduct() | NormedExperts() | NormedChoice():
                    lower_chain(self, op)
                case HyperRead():
                    lower_hyper_read(self, op)
                case _:
                    self._lower(op)
                    self.forget_written(op)

    def forget_written(self, *ops: Op | None) -> None:
        self._forget(written_buffers(op for op in ops if op is not None))

    def _forget(self, buffers: set[str]) -> None:
        """What these buffers held has changed: forms made of it are no longer its."""
        self.formed = {form: held for form, held in self.formed.items() if held[0].buffer not in buffers}

    def emit(
        self,
        file: str,
        function: str,
        grid: tuple[int, ...],
        threads: int,
        *words: int,
        kind: str = "",
        shared: int = 0,
    ) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        if x and y and z:
            name = KernelName(file, function, kind)
            self.out.append(Launch(name, (x, y, z), threads, words, self.label, shared))

    def _lower(self, op: Op) -> None:
        match op:
            case EmbedRows():
                self._embed(op)
            case RmsNorm():
                self._norm(op)
            case MatMul():
                self.lower_matmul(op)
            case HeadMatMul():
                self._head_matmul(op)
            case Rope():
                self._rope(op)
            case CopyHeads():
                x, x_row, x_head = self._heads(op.x)
                from_one = (x, x_row, 0 if op.x.count == 1 else x_head)
                self._each("copy_heads", op.out, *from_one, *self._heads(op.out), op.out.width, op.out.elements)
            case CacheWrite():
                self._cache_write(op)
            case Router():
                self._router(op)
            case RoutedExperts():
                self._routed_experts(op)
            case SwiGlu():
                three = (*self._heads(op.gate), *self._heads(op.up), *self._heads(op.out))
                self._each("swiglu", op.out, *three, op.out.width, op.out.elements, float_word(op.limit))
            case Add():
                three = (*self._heads(op.x), *self._heads(op.y), *self._heads(op.out))
                self._each("add", op.out, *three, op.out.width, op.out.elements)
            case SelectRows():
                places = (*self._heads(op.x), *self._heads(op.out))
                self._each("select_rows", op.out, self.step.out_rows, *places, op.x.width, op.x.elements)
            case Argmax():
                self._argmax(op)
            case HandOffSend() | HandOffReceive():
                lower_hand_off(self, op)
            case _:
                lower_deepseek4(self, op)

    # ---- what views and tensors mean to kernels
    def _count(self, view: View) -> int:
        return self.rows if self.program.buffers[view.buffer].rows == "step" else self.out_rows

    def _room(self, view: View) -> int:
        """Rows that the scratch of an op on this view has room for."""
        return max(self._count(view), MAX_ROWS)

    def _heads(self, view: View) -> tuple[int, int, int]:
        """Address, row stride, head stride in elements."""
        address, row_stride = self.context.view(view)
        return address, row_stride, view.stride if view.count > 1 else view.width

    def _row(self, view: View) -> tuple[int, int]:
        """Address and row stride of a view without gaps."""
        if not view.contiguous:
            raise PlanError(f"op {self.label}: its card kernel wants the heads of {view.buffer} without gaps")
        return self.context.view(view)

    def _each(self, function: str, out: View, *words: int) -> None:
        """A kernel that touches each element of `out` once."""
        self.emit("elementwise", function, (blocks(out.elements, 256), self._count(out)), 256, *words)

    def _weight(self, name: str, inputs: int, outputs: int, matrices: int = 1) -> tuple[int, str, int]:
        """(address, type, bytes of a row) of a weight, which must have this shape."""
        address, tensor = self.context.weight(name)
        expected, found = (inputs, outputs, matrices, 1), (*tensor.shape, 1, 1, 1)[:4]
        kind = tensor.quant_type
        if found != expected:
            raise PlanError(
                f"{tensor.path}: tensor {name} of op {self.label} has shape {tensor.shape}, expected {expected}"
            )
        if inputs % kind.block_elements:
            raise PlanError(
                f"{tensor.path}: tensor {name} of type {kind.name} has rows of {inputs} elements, expected a"
                f" multiple of {kind.block_elements}",
                "the file is damaged or was made by a faulty converter",
            )
        return address, kind.name, kind.row_bytes(inputs)

    def counters(self) -> int:
        """One for each row, of the blocks of a router's product that have ended; 0 before and after every launch."""
        return self.context.constant("routers that ended", np.zeros(MAX_ROWS, np.int32))

    # ---- ops
    def _embed(self, op: EmbedRows) -> None:
        outputs = self.program.weights[op.weight].shape[1]
        address, kind, row_bytes = self._weight(op.weight, op.out.elements, outputs)
        grid = (blocks(blocks(op.out.elements, 32), 64), self._count(op.out))
        words = (address, row_bytes, op.out.elements, self.step.tokens, *self._row(op.out))
        self.emit("matmul", "embed", grid, 64, *words, kind=kind)

    def _norm(self, op: RmsNorm) -> None:
        weight, _, _ = self._weight(op.weight, op.x.width, 1)
        words = (*self._heads(op.x), *self._heads(op.out), weight, op.x.width, float_word(op.epsilon))
        threads = min(512, 32 * blocks(op.x.width, 128))
        self.emit("norm_rope", "rms_norm", (op.x.count, self._count(op.x)), threads, *words)

    def _add_norm(self, op: AddNorm) -> None:
        """Sum, norm and, if products with such weights follow, the result as Q8_K."""
        norm, add = op.norm, op.add
        self._forget({norm.out.buffer, *([add.out.buffer] if add else [])})
        width, row = norm.x.width, self.context.view
        types = {self.program.weights[name].quant_type.name for name in op.readers}
        made = None
        if width % 256 == 0 and types & set(SUPER_TYPES):
            made = self._place("Q8_K", "activations:Q8_K", width, self._room(norm.x))
        sources = (*row(add.x), *row(add.y), *row(add.out)) if add else (*row(norm.x), 0, 0, 0, 0)
        weight, _, _ = self._weight(norm.weight, width, 1)
        result = (*row(norm.out), weight, width, float_word(norm.epsilon))
        target = (made.values, made.scales, made.stride) if made else (0, 0, 0)
        grid = (self._count(norm.x),)
        self.emit("norm_rope", "add_rms_norm", grid, 512, *sources, *result, *target, shared=4 * width)
        if made:
            self.formed["Q8_K"] = norm.out, made

    def _head_run(self, run: HeadRun) -> None:
        """Norms, rotations and cache writes of a few views, one block a head."""
        words: list[int] = []
        for job in run.jobs:
            weight = self._weight(job.norm.weight, job.view.width, 1)[0] if job.norm else 0
            epsilon = float_word(job.norm.epsilon if job.norm else 0.0)
            state = self._state_words(job.write) if job.write else (0, 0, 0, 0)
            words += [
                *self._heads(job.view),
                job.view.count,
                job.view.width,
                weight,
                epsilon,
                1 + job.rope.x.start - job.view.start if job.rope else 0,
                *state,
            ]
            self._forget({job.view.buffer})
        words += [0] * (MOST_JOBS * _HEAD_JOB_WORDS - len(words))
        turn = (0, 0, 0)
        if run.rope:
            turn = (self._rope_table(run.rope), len(run.rope.frequencies), int(run.rope.pairs == "halves"))
        step, rows = self.step, self._count(run.jobs[0].view)
        grid = (sum(job.view.count for job in run.jobs), rows)
        shared = 4 * max(job.view.width for job in run.jobs)
        name = f"prepare_heads_{self.context.cache_type}"
        self.emit("norm_rope", name, grid, 128, *words, *turn, step.slots, step.positions, shared=shared)

    def _form(self, form: str, x: View) -> Activations:
        """The input of a product in its form; F32 is read where it is, others are made unless they are still there."""
        if form == "F32" and x.contiguous:
            address, row_stride = self.context.view(x)
            return Activations(address, address, 4 * row_stride, 4)
        if form in self.formed and self.formed[form][0] == x:
            return self.formed[form][1]
        words = (*self._heads(x)[:1], 0, *self._heads(x)[1:], x.width, float_word(0.0))
        made = self._make_form(form, f"activations:{form}", words, x.elements, self._count(x), self._room(x))
        self.formed[form] = x, made
        return made

    def _make_form(
        self, form: str, scratch: str, words: tuple[int, ...], elements: int, rows: int, max_rows: int
    ) -> Activations:
        """`words` are the Input of activations.cu: x, up, row stride, head stride, width, limit."""
        made = self._place(form, scratch, elements, max_rows)
        if form in FLOAT_TYPES:
            kind = {"F32": 0, "F16": 1, "BF16": 2}[form]
            grid = (blocks(elements, 256), rows)
            self.emit("activations", "round_floats", grid, 256, *words, elements, made.values, made.stride // 4, kind)
            return made
        out = (elements, made.values, made.scales, made.stride)
        if form == "Q8_K":
            self.emit("activations", "quantise_Q8_K", (blocks(elements, 1024), rows), 128, *words, *out)
        else:
            weighted = int(form == "Q8_1")
            self.emit("activations", "quantise_Q8_0", (blocks(elements, 128), rows), 128, *words, *out, weighted)
        return made

    def _place(self, form: str, scratch: str, elements: int, max_rows: int) -> Activations:
        """Where rows of so many elements lie in a form."""
        value_bytes = 4 if form in FLOAT_TYPES else 1
        scales_at = aligned(value_bytes * elements)
        stride = scales_at if form in FLOAT_TYPES else scales_at + aligned(elements // 32 * 8)
        values = self.context.scratch(scratch, max_rows * stride)
        return Activations(values, values + scales_at, stride, value_bytes)

    def form_of(self, quant_type: str, x: View) -> Activations:
        """The input of a product in the form that weights of this type want."""
        return self._form(activation_form(quant_type), x)

    def lower_matmul(self, op: MatMul, residual: tuple[int, ...] = NO_RESIDUAL) -> None:
        by_type: dict[tuple[str, int], list[Job]] = {}
        for out, weight, bias in zip(op.outs, op.weights, op.biases, strict=True):
            address, kind, row_bytes = self._weight(weight, op.x.elements, out.elements)
            place, stride = self._row(out)
            job = Job(address, self._bias(bias, out.elements), place, out.elements, stride)
            by_type.setdefault((kind, row_bytes), []).append(job)
        for (kind, row_bytes), jobs in by_type.items():
            x = self._form(activation_form(kind), op.x)
            for first in range(0, len(jobs), JOBS):
                some = jobs[first : first + JOBS]
                self._multiply(kind, x, self._count(op.x), op.x.elements, row_bytes, some, residual=residual)

    def _bias(self, name: str | None, outputs: int) -> int:
        if name is None:
            return 0
        address, kind, _ = self._weight(name, outputs, 1)
        if kind != "F32":
            raise PlanError(f"bias {name} of op {self.label} has type {kind}, expected F32", USE_HOST)
        return address

    def _multiply(
        self,
        kind: str,
        x: Activations,
        rows: int,
        width: int,
        row_bytes: int,
        jobs: list[Job],
        heads: tuple[int, int, int, int] = (1, 0, 0, 0),
        residual: tuple[int, ...] = NO_RESIDUAL,
    ) -> None:
        """`heads`: how many, and the distance of two in values, scales (bytes) and outputs (floats)."""
        at_once = next(n for n in (1, 2, 4, 8) if n >= rows) if rows else 1
        sets = len(jobs) * heads[0]
        grid = (self._warp_blocks(kind, width, jobs, sets), sets if rows else 0)
        words = (x.values, x.scales, x.stride, rows, width, row_bytes, *heads, *residual)
        shared = width // 4 * 5 if at_once == 1 and kind in UNIT_TYPES else 0
        shared += self.rings(kind, width)
        self.emit("matmul", f"matmul_{at_once}", grid, 32 * _WARPS, *job_words(jobs), *words, kind=kind, shared=shared)

    def rings(self, kind: str, width: int) -> int:
        """Dynamic shared memory of a block for weights on their way; types without units have it in their kernels."""
        return _WARPS * ring_bytes(QuantType.named(kind), width) if kind in UNIT_TYPES else 0

    def _warp_blocks(self, kind: str, width: int, jobs: list[Job], sets: int) -> int:
        outputs = max(job.outputs for job in jobs)
        most = max(1, blocks(self.context.multiprocessors * blocks_each(kind), sets))
        return min(blocks(outputs, _WARPS * rows_of_warp(kind, width)), most)

    def _head_matmul(self, op: HeadMatMul) -> None:
        address, kind, row_bytes = self._weight(op.weight, op.x.width, op.out.width, op.x.count)
        x = self._form(activation_form(kind), op.x)
        out, out_row, out_head = self._heads(op.out)
        heads = (op.x.count, op.x.width * x.value_bytes, op.x.width // 32 * 8, out_head)
        job = Job(address, 0, out, op.out.width, out_row)
        self._multiply(kind, x, self._count(op.x), op.x.width, row_bytes, [job], heads)

    def _rope_table(self, op: Rope) -> int:
        """Address of cosines and sines for this step's rows; made when first asked for."""
        key = (op.frequencies, op.magnitude, op.behind)
        if key not in self.tables:
            pairs, name = len(op.frequencies), f"rope:{len(self.tables)}"
            self.tables[key] = self.context.scratch(name, self._room(op.x) * pairs * 8)
            frequencies = self.context.constant(name, np.asarray(op.frequencies, np.float64))
            made = (self.tables[key], pairs, frequencies, float_word(op.magnitude))
            grid = (blocks(pairs, 64), self._count(op.x))
            self.emit("norm_rope", "rope_table", grid, 64, *made, self.step.positions, op.behind)
        return self.tables[key]

    def _rope(self, op: Rope) -> None:
        turn = (self._rope_table(op), len(op.frequencies))
        places = (*self._heads(op.x), *self._heads(op.out))
        grid = (op.x.count, self._count(op.x))
        self.emit("norm_rope", "rope", grid, 64, *turn, *places, op.x.width, int(op.pairs == "halves"))

    def _state_words(self, op: CacheWrite) -> tuple[int, int, int, int]:
        """Where a cache write begins in row 0 of slot 0, the strides of slots and rows in elements, rows of a slot."""
        state = self.context.state(op.state)
        element = 4 if self.context.cache_type == "f32" else 2
        return state.address + op.start * element, state.slot_stride, state.row_stride, state.rows

    def _cache_write(self, op: CacheWrite) -> None:
        step = self.step
        words = (step.slots, step.positions, *self._heads(op.x), op.x.width, op.x.elements, *self._state_words(op))
        self._each(f"cache_write_{self.context.cache_type}", op.x, *words)

    def _attention(self, fused: Attended) -> None:
        attend_and_round(self, fused)

    def _router(self, op: Router) -> None:
        words = (*self._row(op.logits), *self._row(op.ids), *self._row(op.mix), *self._choice(op))
        shared = 4 * (2 * op.logits.elements + op.groups)
        self.emit("choices", "router", (self._count(op.logits),), 32, *words, shared=shared)

    def _choice(self, op: Router) -> tuple[int, ...]:
        experts, used = op.logits.elements, op.ids.elements
        bias = 0 if op.bias is None else self._weight(op.bias, experts, 1)[0]
        choice = (int(op.gating == "sigmoid"), int(op.normalise), float_word(op.scale), op.groups, op.groups_used)
        return bias, experts, used, *choice

    def _routed(self, op: Routed) -> None:
        """The router and its product in one launch, if the product is an f32 one of few rows."""
        product, router = op.product, op.router
        x, rows, width = product.x, self._count(product.x), product.x.elements
        experts = router.logits.elements
        weights, kind, row_bytes = self._weight(product.weights[0], width, experts)
        address, x_row = self._row(x)
        if kind != "F32" or product.biases[0] or rows > MAX_ROWS or (width | x_row) % 4 or address % 16:
            for part in (product, router):
                self.label = part.name
                self._lower(part)
                self.forget_written(part)
            return
        words = (weights, row_bytes, width, address, 4 * x_row, *self._row(router.logits), *self._row(router.ids))
        shared = 4 * (2 * experts + router.groups)
        grid = (blocks(experts, _WARPS), rows)
        more = (*self._row(router.mix), *self._choice(router), self.counters())
        self.emit("matmul", "route", grid, 32 * _WARPS, *words, *more, kind=kind, shared=shared)
        self.forget_written(product, router)

    def _routed_experts(self, op: RoutedExperts) -> None:
        if joined_experts(self, op):
            open_and_close(self, Shared(op), NO_SCORES, None)
        else:
            separate_experts(self, op)

    def _argmax(self, op: Argmax) -> None:
        x, x_row = self._row(op.x)
        rows = self._count(op.x)
        parts = min(_ARGMAX_PARTS, blocks(op.x.elements, 256))
        best = self.context.scratch("best", self._room(op.x) * _ARGMAX_PARTS * 8)
        self.emit("choices", "argmax_parts", (parts, rows), 256, x, x_row, op.x.elements, best)
        self.emit("choices", "argmax_whole", (rows,), 32, best, parts, *self._row(op.out))
