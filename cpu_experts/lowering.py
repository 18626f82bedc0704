"""Lowering: a program's ops become stages, kernels with addresses.

Owns the arguments of every kernel and the scratch between the stages of an op. It knows neither what kernels do inside
nor whose memory the addresses point to (`LoweringContext`).

Scratch names: `activations` (the input of a product, quantised), `tiles` (decoded weights, one area a rank), `gate`,
`up`, `experts` (results of every item = row and place in its list of experts), `hidden` (their activations, quantised),
`own` (the input again), `lists`, `router`, `scores`, `buffer` (one area a rank each), and one rope table for each set
of frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from bloomery.cpu_experts.kernels import FLOAT_TYPES, SUPER_TYPES, WEIGHT_TYPES
from bloomery.cpu_experts.kernels.layouts import (
    ACTIVATION_ELEMENTS,
    BUFFER_BYTES,
    CLAIM_BYTES,
    EXPERTS_HEAD,
    MOST_CLAIMS,
    OWN_ELEMENTS,
    OWN_ROWS,
    ROUTER_WORDS,
    SMALL_TILE_BYTES,
    SUPER_TILE_BYTES,
    aligned,
    attention_area,
    attention_queries,
    planes,
    score_row,
    tile_area,
)
from bloomery.cpu_experts.lowering_base import F32_BYTES, bits_of, limit_of
from bloomery.cpu_experts.lowering_deepseek4 import Deepseek4Lowering
from bloomery.cpu_experts.stage import BroughtRows, CacheAddress, HandOffPlace, LoweringContext, Stage
from bloomery.runtime.errors import PlanError
from bloomery.runtime.hand_off import HAND_OFF_BUFFERS
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.ops_deepseek4 import HyperMix, SoftplusRouter, WindowAttention
from bloomery.runtime.ops_drafts import StreamMean, TokenChain
from bloomery.runtime.ops_hand_off import HandOffAnswer, HandOffWait
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
    op_weights,
)

_ALIGN: Final = 64
_USE_REFERENCE: Final = "convert the file to a type with a kernel, or run it with --executor reference"


@dataclass(frozen=True)
class Activations:
    """Where the input of a product lies in the form that its weights want; strides and offsets in bytes. Where each
    rank has made it for itself, `own` is the distance from one rank's to the next one's."""

    address: int
    row_stride: int
    d_plane: int
    sums_plane: int
    block_elements: int
    own: int = 0


def activation_kind(quant_type: str) -> str:
    """Form of the activations that meet weights of this type: "F32", "F16", "BF16", "Q8_0" or "Q8_K"."""
    if quant_type in FLOAT_TYPES:
        return quant_type
    return "Q8_K" if quant_type in SUPER_TYPES else "Q8_0"


def lower(program: Program, context: LoweringContext) -> list[Stage]:
    """The stages of one step, in order. Raises PlanError naming tensor and type where there is no kernel."""
    for op in program.ops:
        for name in op_weights(op):
            _check_type(context.weight(name)[1], op, name)
    return _Lowering(program, context).stages()


def required_kernels(program: Program, cache_type: str) -> list[str]:
    """Names of the kernels that the program's stages call, in order of first use. PlanError as `lower`."""
    stages = lower(program, _NoMemory(program, cache_type))
    return list(dict.fromkeys(stage.kernel for stage in stages))


def _check_type(tensor: Tensor, op: Op, name: str) -> None:
    kind = tensor.quant_type.name
    expected: tuple[str, ...] = WEIGHT_TYPES
    if isinstance(op, SoftplusRouter) and name == op.table:
        expected = ("I32",)
    elif isinstance(op, RmsNorm | Router | SoftplusRouter | HyperMix | WindowAttention):
        expected = ("F32",)
    if kind not in expected:
        raise PlanError(
            f"{tensor.path}: tensor {tensor.name} of op {op.name} has type {kind}, for which the host executor has no"
            f" kernel (expected {', '.join(expected)})",
            _USE_REFERENCE,
        )


class _NoMemory:
    """A context without memory, for asking which kernels a program needs."""

    max_rows = max_out_rows = ranks = context = 1

    def __init__(self, program: Program, cache_type: str) -> None:
        self.cache_type = cache_type
        self._program = program

    def view(self, view: View) -> tuple[int, int]:
        return _ALIGN + F32_BYTES * view.start, F32_BYTES * self._program.buffers[view.buffer].width

    def weight(self, name: str) -> tuple[int, Tensor]:
        return _ALIGN, self._program.weights[name]

    def factor(self, name: str, before: int, total: int, matrices: int = 1) -> tuple[int, int]:
        return _ALIGN, _ALIGN

    def lent(self, name: str, before: int, total: int, matrices: int = 1) -> tuple[tuple[int, int], ...]:
        return ()

    def kept(self, name: str) -> tuple[int, ...] | None:
        return None

    def state(self, name: str) -> CacheAddress:
        return CacheAddress(_ALIGN, _ALIGN, _ALIGN, 1, _ALIGN)

    def brought(self, site: int) -> BroughtRows | None:
        return BroughtRows(_ALIGN, _ALIGN, _ALIGN, _ALIGN)

    def hand_off(self) -> HandOffPlace:
        return HandOffPlace(_ALIGN, _ALIGN, 0)

    def scratch(self, name: str, nbytes: int) -> int:
        return _ALIGN


class _Lowering(Deepseek4Lowering):
    """One pass over a program; `stages` is called once."""

    _waiting = 0  # number of the last stage that waits for the card

    def stages(self) -> list[Stage]:
        for op in self.program.ops:
            self.label = op.name
            self._lower(op)
        return self.out

    def _lower(self, op: Op) -> None:
        match op:
            case EmbedRows():
                self._embed(op)
            case RmsNorm():
                self._norm(op)
            case MatMul():
                self._matmul(op)
            case HeadMatMul():
                self._head_matmul(op)
            case Rope():
                self._rope(op)
            case CopyHeads():
                x, x_row = self.context.view(op.x)
                x_head = 0 if op.x.count == 1 else F32_BYTES * op.x.stride
                out = self._heads(op.out)
                self.emit("copy_heads", self._rows(op.out), op.out.count, op.out.width, x, x_row, x_head, *out)
            case CacheWrite():
                self._cache_write(op)
            case Attention():
                self._attention(op)
            case Router():
                self._router(op)
            case RoutedExperts():
                self._routed_experts(op)
            case SwiGlu():
                self._binary("swiglu", op.gate, op.up, op.out, limit_of(op.limit))
            case Add():
                self._binary("add", op.x, op.y, op.out)
            case SelectRows():
                self._contiguous(op.x, op.out)
                self.emit("select_rows", *self.context.view(op.x), *self.context.view(op.out), op.x.elements)
            case Argmax():
                self._contiguous(op.x)
                greedy = self.context.view(op.out)
                self.emit("argmax", self._rows(op.x), *self.context.view(op.x), *greedy, op.x.elements)
            case StreamMean():
                head = (self._rows(op.out), op.streams.count, op.streams.width)
                self.emit("stream_mean", *head, *self._heads(op.streams), *self.context.view(op.out))
            case TokenChain():
                self._token_chain(op)
            case HandOffWait():
                self._wait(op)
            case HandOffAnswer():
                self._answer(op)
            case _:
                self._lower_deepseek4(op)

    # ---- hand-offs
    def _wait(self, op: HandOffWait) -> None:
        """Its arguments are complete when it is known which stage answers."""
        _, ids, _ = op.outs
        place, clock = self.context.hand_off(), (0, 0)
        words = (place.words, place.control, op.index, place.deadline_ns, *clock)
        self._waiting = len(self.out)
        self.emit("hand_off_wait", *words, self._rows(ids), *self.context.view(ids), barrier=False)

    def _answer(self, op: HandOffAnswer) -> None:
        self._contiguous(op.x)
        place, wait = self.context.hand_off(), self.out[self._waiting]
        words = (*wait.arguments, *self.context.view(op.x), op.x.elements, len(self.out) - self._waiting - 1)
        self.out[self._waiting] = replace(wait, arguments=words)
        self.out[-1] = replace(self.out[-1], barrier=False)  # a rank answers for its own part
        self.emit("hand_off_answer", place.words, place.control, op.index, barrier=False)

    # ---- ops of most architectures
    def _tiles(self, quant_type: str, blocks: int) -> tuple[int, int]:
        """(address, bytes of a rank's area) for decoded weights."""
        if quant_type in FLOAT_TYPES:
            return 0, 0
        each = SUPER_TILE_BYTES if quant_type in SUPER_TYPES else SMALL_TILE_BYTES
        nbytes = aligned(max(blocks * each, tile_area(activation_kind(quant_type), blocks)))
        return self.context.scratch("tiles", nbytes * self.context.ranks), nbytes

    def _embed(self, op: EmbedRows) -> None:
        self._contiguous(op.out)
        address, tensor = self.context.weight(op.weight)
        row_bytes, blocks = self._blocks(tensor, op.out.elements, tensor.shape[1])
        self.emit(f"embed_{tensor.quant_type.name}", address, row_bytes, blocks, *self.context.view(op.out))

    def _norm(self, op: RmsNorm) -> None:
        weight, _ = self.context.weight(op.weight)
        head = (self._rows(op.x), op.x.count, op.x.width)
        self.emit("rms_norm", *head, *self._heads(op.x), *self._heads(op.out), weight, bits_of(op.epsilon))

    def _binary(self, kernel: str, x: View, y: View, out: View, *rest: int) -> None:
        views = [x, y, out]
        if all(view.contiguous for view in views):
            views = [View(view.buffer, view.start, view.elements) for view in views]
        heads, width = views[2].count, views[2].width
        places = (word for view in views for word in self._heads(view))
        self.emit(kernel, self._rows(out), 1, heads, width, *places, *rest)

    def _quantise(self, kind: str, x: View, own: bool = False) -> Activations:
        """A stage that brings x into the form `kind`; F32 is read where it is. `own`: every rank for itself, without a
        barrier."""
        address, row_stride, head_stride = self._heads(x)
        if kind == "F32":
            return Activations(address, row_stride, 0, 0, 1)
        block = ACTIVATION_ELEMENTS[kind]
        d_plane, sums_plane, out_stride = planes(kind, x.elements)
        nbytes = self._max_rows(x) * out_stride
        name, areas = ("own", self.context.ranks) if own else ("activations", 1)
        out = self.context.scratch(f"{name}:{kind}", areas * nbytes)
        heads, width = (1, x.elements) if x.contiguous else (x.count, x.width)
        self.emit(
            f"quantise_{kind}", self._rows(x), 1, heads, width // block, address, row_stride, head_stride, 0,
            out, out_stride, d_plane, sums_plane, 0, limit_of(0.0), nbytes * own, barrier=not own,
        )  # fmt: skip
        return Activations(out, out_stride, d_plane, sums_plane, block, nbytes * own)

    def _matmul(self, op: MatMul) -> None:
        self._contiguous(op.x)
        by_type: dict[str, list[tuple[View, str, str | None]]] = {}
        for out, weight, bias in zip(op.outs, op.weights, op.biases, strict=True):
            self._contiguous(out)
            by_type.setdefault(_kind(self.context.weight(weight)[1]), []).append((out, weight, bias))
        inputs: dict[str, Activations] = {}
        for quant_type, products in by_type.items():
            kind = activation_kind(quant_type)
            if kind not in inputs:
                inputs[kind] = self._quantise(kind, op.x)
            jobs: list[tuple[int, ...]] = []
            before = 0
            total = sum(out.elements for out, _, _ in products)
            for out, weight, bias in products:
                row_bytes, blocks = self._blocks(self.context.weight(weight)[1], op.x.elements, out.elements)
                address, _ = self.context.factor(weight, before, total)
                bias_address = 0 if bias is None else self._bias(bias)
                jobs.append((address, row_bytes, blocks, out.elements, 0, *self.context.view(out), bias_address))
                before += out.elements
            self._multiply(quant_type, inputs[kind], op.x, jobs)

    def _bias(self, name: str) -> int:
        address, tensor = self.context.weight(name)
        if tensor.quant_type.name != "F32":
            raise PlanError(f"{tensor.path}: bias {tensor.name} has type {tensor.quant_type.name}, expected F32")
        return address

    def _multiply(self, quant_type: str, x: Activations, view: View, jobs: list[tuple[int, ...]]) -> None:
        tiles = self._tiles(quant_type, max(job[2] for job in jobs))
        words = (word for job in jobs for word in job)
        head = (x.address, x.row_stride, x.d_plane, x.sums_plane)
        self.emit(f"matmul_{quant_type}", self._rows(view), *head, *tiles, len(jobs), *words)

    def _head_matmul(self, op: HeadMatMul) -> None:
        tensor = self.context.weight(op.weight)[1]
        row_bytes, blocks = self._blocks(tensor, op.x.width, op.out.width, op.x.count)
        address, _ = self.context.factor(op.weight, 0, op.x.count * op.out.width)
        kind = activation_kind(tensor.quant_type.name)
        x = self._quantise(kind, op.x)
        if kind == "F32":
            first_blocks = [head * op.x.stride for head in range(op.x.count)]
        else:
            first_blocks = [head * (op.x.width // x.block_elements) for head in range(op.x.count)]
        out, out_row, out_head = self._heads(op.out)
        matrix = row_bytes * op.out.width
        jobs: list[tuple[int, ...]] = [
            (address + head * matrix, row_bytes, blocks, op.out.width, first, out + head * out_head, out_row, 0)
            for head, first in enumerate(first_blocks)
        ]
        self._multiply(tensor.quant_type.name, x, op.x, jobs)

    def _rope(self, op: Rope) -> None:
        rows = self._rows(op.x)
        key = (op.frequencies, op.magnitude, op.behind, rows)
        pairs = len(op.frequencies)
        if key not in self.tables:
            stride = aligned(2 * pairs * F32_BYTES)
            table = self.context.scratch(f"rope:{len(self.tables)}", self._max_rows(op.x) * stride)
            self.tables[key] = table, stride
            frequencies = (bits_of(frequency) for frequency in op.frequencies)
            self.emit("rope_table", table, stride, pairs, bits_of(op.magnitude), op.behind, rows, *frequencies)
        places = (*self._heads(op.x), *self._heads(op.out))
        self.emit(f"rope_{op.pairs}", *self.tables[key], pairs, op.x.count, op.x.width, *places, rows)

    def _cache_write(self, op: CacheWrite) -> None:
        self._write_state(op.x, op.state, op.start, 1)

    def _attention(self, op: Attention) -> None:
        group, context = op.q.count // op.kv_heads, self.context.context
        area = attention_area(context, group, op.key_width, op.value_width)
        scores = self.context.scratch("scores", area * self.context.ranks)
        caches = (self.context.state(op.keys), self.context.state(op.values))
        of_keys = self._head_stride(op.keys, op.kv_heads, op.key_width)
        of_values = self._head_stride(op.values, op.kv_heads, op.value_width)
        places = (
            word
            for cache, head_stride in zip(caches, (of_keys, of_values), strict=True)
            for word in (cache.address, cache.slot_stride, cache.row_stride, head_stride)
        )
        widths = (op.q.count, group, op.key_width, op.value_width, bits_of(op.scale))
        kernel = f"attention_{self.context.cache_type}"
        scratch = (scores, score_row(context), area, attention_queries(context, group))
        self.emit(kernel, *widths, *self._heads(op.q), *self._heads(op.out), *places, *scratch)

    def _router(self, op: Router) -> None:
        self._contiguous(op.logits, op.ids, op.mix)
        experts = op.logits.elements
        area = aligned(ROUTER_WORDS * F32_BYTES * experts)
        scratch = self.context.scratch("router", area * self.context.ranks)
        bias = 0 if op.bias is None else self.context.weight(op.bias)[0]
        views = (word for view in (op.logits, op.ids, op.mix) for word in self.context.view(view))
        rule = (bias, int(op.normalise), bits_of(op.scale), op.groups, op.groups_used)
        head = (self._rows(op.logits), experts, op.ids.elements)
        self.emit(f"router_{op.gating}", *head, *views, *rule, scratch, area)

    def _routed_experts(self, op: RoutedExperts) -> None:
        self._contiguous(op.x, op.ids, op.mix, op.out)
        tensors = [self.context.weight(name)[1] for name in (op.gate, op.up, op.down)]
        _, hidden, experts = (*tensors[0].shape, 1)[:3]
        used, rows = op.ids.elements, self._rows(op.x)
        items = self._max_rows(op.x) * used
        width = aligned(hidden * F32_BYTES)
        gate, up = (self.context.scratch(name, items * width) for name in ("gate", "up"))
        jobs = [(op.gate, gate, width, hidden), (op.up, up, width, hidden)]
        own = self._for_itself(op.x)
        if tensors[0].quant_type == tensors[1].quant_type:
            x = self._quantise(activation_kind(_kind(tensors[0])), op.x, own)
            self._experts(op, op.x.elements, experts, jobs, x, 0)
        else:
            for tensor, job in zip(tensors, jobs):
                x = self._quantise(activation_kind(_kind(tensor)), op.x, own)
                self._experts(op, op.x.elements, experts, [job], x, 0)
        x = self._hidden(activation_kind(_kind(tensors[2])), rows, used, items, hidden, gate, up, width, op.limit)
        result = aligned(op.out.elements * F32_BYTES)
        parts = self.context.scratch("experts", items * result)
        self._experts(op, hidden, experts, [(op.down, parts, result, op.out.elements)], x, 1)
        if not self._lent(op.down, op.out.elements, experts, used):
            self.out[-1] = replace(self.out[-1], barrier=False)  # a rank sums what it has multiplied
        mix = self.context.view(op.mix)
        ids = self.context.view(op.ids)
        self.emit("experts_sum", parts, result, *mix, used, *self.context.view(op.out), op.out.elements, rows, *ids)

    def _for_itself(self, x: View) -> bool:
        """Whether each rank quantises the input of the experts for itself: that of a hand-off of few rows, if it is
        narrow enough that this takes less time than a barrier. (The hidden rows never are: there is silu in them.)"""
        few = x.buffer in HAND_OFF_BUFFERS and self._max_rows(x) <= OWN_ROWS
        return few and x.elements <= OWN_ELEMENTS * self.context.ranks

    def _experts(
        self,
        op: RoutedExperts,
        inputs: int,
        experts: int,
        jobs: list[tuple[str, int, int, int]],
        x: Activations,
        x_of_each_item: int,
    ) -> None:
        """Products of every item with the matrices of its expert; a job is (tensor, out, out stride, outputs)."""
        kept = self.context.kept(jobs[0][0])
        here = experts if kept is None else len(kept)
        words: list[int] = []
        for name, out, stride, outputs in jobs:
            assert self.context.kept(name) == kept, name
            row_bytes, blocks = self._blocks(self.context.weight(name)[1], inputs, outputs, experts)
            words += [*self.context.factor(name, 0, outputs, experts), row_bytes, blocks, outputs, out, stride]
        quant_type = _kind(self.context.weight(jobs[0][0])[1])
        tiles = self._tiles(quant_type, blocks)
        used = op.ids.elements
        table = 0
        if kept is not None:
            table = EXPERTS_HEAD + 1 + len(words)
            words += _numbers(kept, experts)
        lent = [place for name, _, _, outputs in jobs for place in self._lent(name, outputs, experts, used)]
        others = 0
        if lent:
            others = EXPERTS_HEAD + 1 + len(words)
            claims = self.context.scratch(f"claims:{len(self.out)}", CLAIM_BYTES * self.context.ranks)
            words += [claims, *(word for place in lent for word in place)]
        area = aligned(F32_BYTES * (here + 1 + 2 * self._max_rows(op.x) * used))
        lists = self.context.scratch("lists", area * self.context.ranks)
        self.emit(
            f"experts_{quant_type}", self._rows(op.x), x.address, x.row_stride, x.d_plane, x.sums_plane, *tiles,
            lists, area, *self.context.view(op.ids), used, here, x_of_each_item, x.own, table, others,
            len(jobs), *words,
        )  # fmt: skip

    def _lent(self, name: str, outputs: int, experts: int, used: int) -> tuple[tuple[int, int], ...]:
        """Where each rank's rows of an expert's matrix lie, if ranks help each other with it (`lent_experts`)."""
        helped = _kind(self.context.weight(name)[1]) not in FLOAT_TYPES and 2 * used <= MOST_CLAIMS
        return self.context.lent(name, 0, outputs, experts) if helped else ()

    def _token_chain(self, op: TokenChain) -> None:
        """One round for each row of the longest block: the rows of all blocks choose, and those whose predecessor was
        final before it are final after it. So a round reads the weight once for all blocks."""
        self._contiguous(op.base, op.logits, op.previous)
        rank, vocabulary = op.previous.elements, op.logits.elements
        (table_address, table), (_, weight) = self.context.weight(op.embedding), self.context.weight(op.weight)
        source = (table_address, *self._blocks(table, rank, vocabulary), rank, *self.context.view(op.previous))
        address, _ = self.context.factor(op.weight, 0, vocabulary)
        job = (address, *self._blocks(weight, rank, vocabulary), vocabulary, 0, *self.context.view(op.logits), 0)
        rows, ids = self._rows(op.out), self.context.scratch("chain", F32_BYTES * self._max_rows(op.out))
        for number in range(op.block):
            self.emit("chain_tokens", ids, F32_BYTES, *self.context.view(op.out), number)
            self.emit(f"table_rows_{_kind(table)}", rows, 1, ids, F32_BYTES, *source)
            self._multiply(_kind(weight), self._quantise(activation_kind(_kind(weight)), op.previous), op.logits, [job])
            self._binary("add", op.base, op.logits, op.logits)
            self.emit("argmax", rows, *self.context.view(op.logits), *self.context.view(op.out), vocabulary)

    def _hidden(
        self, kind: str, rows: int, used: int, items: int, hidden: int, gate: int, up: int, stride: int, limit: float
    ) -> Activations:
        """silu(gate) * up of every item (bounded by a limit > 0), in the form that the down matrices want."""
        if kind in FLOAT_TYPES:
            place = (gate, stride, 0)
            self.emit("swiglu", rows, used, 1, hidden, *place, up, stride, 0, *place, limit_of(limit))
            if kind == "F32":
                return Activations(gate, stride, 0, 0, 1)
            gate, up = gate, 0
        block = ACTIVATION_ELEMENTS[kind]
        d_plane, sums_plane, out_stride = planes(kind, hidden)
        out = self.context.scratch(f"hidden:{kind}", items * out_stride)
        buffer = self.context.scratch("buffer", BUFFER_BYTES * self.context.ranks)
        self.emit(
            f"quantise_{kind}", rows, used, 1, hidden // block, gate, stride, 0, up,
            out, out_stride, d_plane, sums_plane, buffer, limit_of(limit), 0,
        )  # fmt: skip
        return Activations(out, out_stride, d_plane, sums_plane, block)


def _numbers(kept: tuple[int, ...], experts: int) -> list[int]:
    """For each expert its number among those that are kept; 0 where it is none of them."""
    numbers = [0] * experts
    for number, expert in enumerate(kept):
        numbers[expert] = number
    return numbers


def _kind(tensor: Tensor) -> str:
    return tensor.quant_type.name
