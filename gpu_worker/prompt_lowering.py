"""Lowering of prompt blocks: many neighbouring rows of one slot, products on tensor cores, experts by group.

Owns which ops of a block take other kernels than a decode step's, and their scratch. Weights are made f16 in pieces,
just before the product that wants them; what concerns few rows (the head, mostly) runs as in a decode step.

Scratch names, besides those of `lowering`: `tiles:FORM` and `hidden:tiles` (rows as scaled f16) with their scales,
`weights:f16`, `sorted`, `counts`, `tile list` (items by expert), `opened` (hidden rows in sorted order).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from bloomery.gpu_worker.attention_lowering import attend
from bloomery.gpu_worker.chain_lowering import NO_RESIDUAL
from bloomery.gpu_worker.chains import Chained
from bloomery.gpu_worker.fusions import AddNorm, Attended, fused
from bloomery.gpu_worker.launches import MAX_ROWS, AheadAddresses, CardContext, Launch, float_word
from bloomery.gpu_worker.lowering import Lowering, lower
from bloomery.gpu_worker.products import Job as WeightJob
from bloomery.gpu_worker.products import activation_form, check_types, job_words
from bloomery.gpu_worker.step_ahead import ahead_launches
from bloomery.runtime.program import Attention, HeadMatMul, MatMul, Program, RoutedExperts, View
from bloomery.runtime.split_program import without_hand_offs

LEAST_ROWS: Final = 33
"""Rows of a slot from which on a block is faster than groups of a decode step's size: making the weights f16 takes as
long as a few such groups."""

_TILE: Final = 128  # many_rows.cu
_TILE_DEPTH: Final = 64
_TILE_THREADS: Final = 256
_TILE_MEMORY: Final = 3 * 2 * _TILE * _TILE_DEPTH * 2
_SIDE: Final = 64
_JOBS: Final = 4
_RAISED: Final = 64.0
"""Factor of quantised weights as f16, so that small ones keep their precision."""
_PIECE: Final = 512 << 20
"""Bytes of weights that are made f16 at a time."""
_FLASH: Final = ((64, 64), (128, 128), (192, 128))  # flash.cu
_FLASH_ROWS: Final = 128
_SPLIT: Final = 64
_PARTS: Final = 256 << 20


_Quantised = tuple[str, int, WeightJob]
"""Type, bytes of a row, and the weight."""


@dataclass(frozen=True)
class _Rows:
    """Rows as scaled f16: addresses of halves and scales, elements of a row (a multiple of 64)."""

    values: int
    scales: int
    width: int


def lower_prompt(program: Program, context: CardContext, rows: int, out_rows: int) -> list[Launch]:
    """The launches of a block of so many rows of one slot, where experts lie on the host `context` says where they
    are brought to. Raises PlanError where there is no kernel."""
    assert rows > 0 and 0 <= out_rows <= rows
    check_types(program)
    return _PromptLowering(program, context, rows, out_rows).launches()


def lower_all(
    program: Program,
    context: CardContext,
    block_rows: int,
    block_out_rows: int,
    blocks: CardContext | None = None,
    ahead: AheadAddresses | None = None,
) -> list[Launch]:
    """Launches that between them have every kernel that steps of this program take, and want the most scratch; blocks
    of prompts only if `block_rows` is not 0, in a context of their own where that is another (`blocks`). `ahead` is as
    for `ahead_launches`."""
    launches = lower(program, context, MAX_ROWS, MAX_ROWS) + ahead_launches(program, context, 1, ahead)
    launches += lower(program, context, MAX_ROWS, 0)  # hand-offs of no rows have launches of their own
    if block_rows:
        for wanted in (block_out_rows, 1):
            launches += lower_prompt(without_hand_offs(program), blocks or context, block_rows, wanted)
    return launches


class _PromptLowering(Lowering):
    def __init__(self, program: Program, context: CardContext, rows: int, out_rows: int) -> None:
        super().__init__(program, context, rows, out_rows)
        self.step = context.prompt_step
        self.tiled: dict[float, tuple[View, _Rows]] = {}

    def _forget(self, buffers: set[str]) -> None:
        super()._forget(buffers)
        self.tiled = {form: held for form, held in self.tiled.items() if held[0].buffer not in buffers}

    def parts(self) -> Iterable[Chained]:
        return fused(self.program)

    def _many(self, view: View) -> bool:
        return self._count(view) > MAX_ROWS

    def _add_norm(self, op: AddNorm) -> None:
        super()._add_norm(replace(op, readers=()) if self._many(op.norm.x) else op)

    # ---- rows and weights as f16
    def _as_f16(self, x: View, factor: float) -> _Rows:
        """Rows of a view for weights that were multiplied with `factor`, unless they are still there."""
        if factor in self.tiled and self.tiled[factor][0] == x:
            return self.tiled[factor][1]
        address, row, head = self._heads(x)
        source = (address, 0, row, head, x.width, float_word(0.0))
        made = self._make_rows(f"tiles:{factor:g}", source, x.elements, self._count(x), factor)
        self.tiled[factor] = x, made
        return made

    def _make_rows(self, name: str, source: tuple[int, ...], elements: int, rows: int, factor: float) -> _Rows:
        width = _padded(elements)
        values = self.context.scratch(name, max(rows, MAX_ROWS) * width * 2)
        scales = self.context.scratch(f"{name}:scales", max(rows, MAX_ROWS) * 4)
        words = (*source, elements, width, values, scales, float_word(1.0 / factor))
        self.emit("prompts", "rows_as_f16", (rows,), 256, *words)
        return _Rows(values, scales, width)

    def _direct(self, kind: str, width: int) -> bool:
        """Whether such a weight is f16 already, its rows as the kernels want them."""
        return kind == "F16" and width == _padded(width)

    def _dequantise(
        self, kind: str, source: tuple[int, int, int], outputs: int, to: int, matrices: tuple[int, int, int, int]
    ) -> None:
        """`source`: address, bytes of a row, width; `matrices`: slot map, counts (0: none), first and number."""
        address, row_bytes, width = source
        slots, counts, first, number = matrices
        grid = (-(-outputs * _padded(width) // (32 * 256)), number)
        words = (address, row_bytes, width, outputs, _padded(width), slots, counts, first, to, float_word(_RAISED))
        self.emit("matmul", "dequantise", grid, 256, *words, kind=kind)

    # ---- ops
    def lower_matmul(self, op: MatMul, residual: tuple[int, ...] = NO_RESIDUAL) -> None:
        if not self._many(op.x):
            return super().lower_matmul(op, residual)
        floats, halves, direct = [], [], []
        for out, name, bias in zip(op.outs, op.weights, op.biases, strict=True):
            address, kind, row_bytes = self._weight(name, op.x.elements, out.elements)
            place, stride = self._row(out)
            job = WeightJob(address, self._bias(bias, out.elements), place, out.elements, stride)
            if kind == "F32":
                floats.append(job)
            elif self._direct(kind, op.x.elements):
                direct.append(job)
            else:
                halves.append((kind, row_bytes, job))
        for jobs in _by_four(floats):
            self._floats(op.x, jobs)
        for jobs in _by_four(direct):
            self._halves(self._as_f16(op.x, 1.0), op.x, jobs)
        for some in self._pieces(halves, op.x.elements):
            x, width = self._as_f16(op.x, _RAISED), _padded(op.x.elements)
            to, made = self.context.scratch("weights:f16", sum(job.outputs for _, _, job in some) * width * 2), []
            for kind, row_bytes, job in some:
                self._dequantise(kind, (job.weights, row_bytes, op.x.elements), job.outputs, to, (0, 0, 0, 1))
                made.append(replace(job, weights=to))
                to += job.outputs * width * 2
            self._halves(x, op.x, made)

    def _pieces(
        self, weights: list[tuple[str, int, WeightJob]], width: int
    ) -> Iterator[list[tuple[str, int, WeightJob]]]:
        """The weights in sets of at most four that fit the scratch as f16; those that do not fit alone are cut."""
        each = _PIECE // (2 * _padded(width)) // _TILE * _TILE
        some: list[_Quantised] = []
        room = each
        for kind, row_bytes, job in weights:
            for first in range(0, job.outputs, each):
                n = min(each, job.outputs - first)
                bias = job.bias + 4 * first if job.bias else 0
                cut = WeightJob(job.weights + first * row_bytes, bias, job.out + 4 * first, n, job.out_stride)
                if some and (len(some) == _JOBS or n > room):
                    yield some
                    some, room = [], each
                some, room = [*some, (kind, row_bytes, cut)], room - n
        if some:
            yield some

    def _halves(self, x: _Rows, view: View, jobs: list[WeightJob], heads: tuple[int, int, int] = (1, 0, 0)) -> None:
        """`heads`: how many, and their distance in inputs and outputs."""
        rows = self._count(view)
        width = x.width if heads[0] == 1 else view.width
        grid = (-(-rows // _TILE), sum(-(-job.outputs // _TILE) for job in jobs), heads[0])
        words = (x.values, x.scales, x.width, rows, width, width, *heads[1:])
        self.emit("many_rows", "dense_f16", grid, _TILE_THREADS, *job_words(jobs), *words, shared=_TILE_MEMORY)

    def _floats(self, view: View, jobs: list[WeightJob], heads: tuple[int, int, int] = (1, 0, 0)) -> None:
        x, rows = self._form("F32", view), self._count(view)
        grid = (-(-rows // _SIDE), sum(-(-job.outputs // _SIDE) for job in jobs), heads[0])
        width = view.elements if heads[0] == 1 else view.width
        words = (x.values, x.stride // 4, rows, width, *heads[1:])
        self.emit("many_rows", "dense_f32", grid, 256, *job_words(jobs), *words)

    def _head_matmul(self, op: HeadMatMul) -> None:
        if not self._many(op.x):
            return super()._head_matmul(op)
        heads, width = op.x.count, op.x.width
        address, kind, row_bytes = self._weight(op.weight, width, op.out.width, heads)
        out, out_row, out_head = self._heads(op.out)
        job = WeightJob(address, 0, out, op.out.width, out_row)
        distances = (heads, width, out_head)
        if kind == "F32":
            self._floats(op.x, [job], distances)
        elif self._direct(kind, width):
            self._halves(self._as_f16(op.x, 1.0), op.x, [job], distances)
        elif width == _padded(width) and heads * op.out.width * width * 2 <= _PIECE:
            to = self.context.scratch("weights:f16", heads * op.out.width * width * 2)
            self._dequantise(kind, (address, row_bytes, width), heads * op.out.width, to, (0, 0, 0, 1))
            self._halves(self._as_f16(op.x, _RAISED), op.x, [replace(job, weights=to)], distances)
        else:
            self._head_groups(op)

    def _head_groups(self, op: HeadMatMul) -> None:
        """Heads too narrow for tiles: as a decode step has them, so many rows at a time."""
        address, kind, row_bytes = self._weight(op.weight, op.x.width, op.out.width, op.x.count)
        x = self._form(activation_form(kind), op.x)
        out, out_row, out_head = self._heads(op.out)
        heads = (op.x.count, op.x.width * x.value_bytes, op.x.width // 32 * 8, out_head)
        for first in range(0, self._count(op.x), MAX_ROWS):
            rows = min(MAX_ROWS, self._count(op.x) - first)
            part = replace(x, values=x.values + first * x.stride, scales=x.scales + first * x.stride)
            job = WeightJob(address, 0, out + 4 * first * out_row, op.out.width, out_row)
            self._multiply(kind, part, rows, op.x.width, row_bytes, [job], heads)

    def _attention(self, fused: Attended) -> None:
        op = fused.attention
        if self.context.cache_type != "f16" or (op.key_width, op.value_width) not in _FLASH:
            return self._attention_groups(op)
        rows, heads, step = self._count(op.q), op.q.count, self.step
        caches = (self.context.state(op.keys), self.context.state(op.values))
        places = [word for cache in caches for word in (cache.address, cache.slot_stride, cache.row_stride)]
        each = (heads // op.kv_heads, float_word(op.scale), rows)
        words = (step.slots, step.positions, *self._heads(op.q), *places, *each, *self._heads(op.out))
        shared = 2 * _SPLIT * (op.key_width + op.value_width) * 2
        name = f"flash_{op.key_width}_{op.value_width}"
        self.emit("flash", name, (-(-rows // _FLASH_ROWS), heads), 256, *words, shared=shared)

    def _attention_groups(self, op: Attention) -> None:
        """Other widths and f32 caches: a decode step's kernels, as many rows at a time as their parts have room."""
        splits = -(-self.context.context // _SPLIT)
        each = max(MAX_ROWS, min(512, _PARTS // (op.q.count * splits * op.value_width * 4)))
        for first in range(0, self._count(op.q), each):
            attend(self, op, first, min(each, self._count(op.q) - first), each)

    def _routed_experts(self, op: RoutedExperts) -> None:
        kinds = [self.program.weights[name].quant_type.name for name in (op.gate, op.up, op.down)]
        if not self._many(op.x) or "F32" in kinds:
            return super()._routed_experts(op)
        rows, used, inputs, outputs = self._count(op.x), op.ids.elements, op.x.elements, op.out.elements
        hidden, experts = self.program.weights[op.gate].shape[1:]
        items = rows * used
        ids, ids_row = self._row(op.ids)
        order, counts = self.context.scratch("sorted", items * 4), self.context.scratch("counts", experts * 4)
        self.emit("prompts", "sort_items", (experts,), 256, ids, ids_row, used, items, order, counts)
        tile_count = items // _TILE + experts
        tiles = self.context.scratch("tile list", tile_count * 16)
        self.emit("prompts", "list_tiles", (1,), 256, counts, experts, tiles, tile_count, shared=4 * experts)

        x = self._as_f16(op.x, _RAISED)
        opened = self.context.scratch("opened", items * hidden * 4)
        grid = (-(-hidden // (_TILE // 2)), tile_count)
        sides = [(self._weight(name, inputs, hidden, experts), name) for name in (op.gate, op.up)]
        for first, last, place in self._expert_pieces(experts, 2 * hidden * x.width * 2):
            halves = (place, place + (last - first) * hidden * x.width * 2)
            for ((address, kind, row_bytes), _), to in zip(sides, halves, strict=True):
                which = (self.context.slot_map(op.gate), counts, first, last - first)
                self._dequantise(kind, (address, row_bytes, inputs), hidden, to, which)
            rows_in = (x.values, x.scales, x.width, x.width, hidden)
            target = (opened, hidden, float_word(op.limit))
            words = (*halves, *rows_in, order, used, tiles, first, last, *target)
            self.emit("many_rows", "experts_open", grid, _TILE_THREADS, *words, shared=_TILE_MEMORY)

        closing = self._make_rows(
            "hidden:tiles", (opened, 0, hidden, hidden, hidden, float_word(0.0)), hidden, items, _RAISED
        )
        parts = self.context.scratch("experts", items * outputs * 4)
        address, kind, row_bytes = self._weight(op.down, hidden, outputs, experts)
        grid = (-(-outputs // _TILE), tile_count)
        for first, last, place in self._expert_pieces(experts, outputs * closing.width * 2):
            which = (self.context.slot_map(op.gate), counts, first, last - first)
            self._dequantise(kind, (address, row_bytes, hidden), outputs, place, which)
            rows_in = (closing.values, closing.scales, closing.width, closing.width, outputs)
            self.emit(
                "many_rows", "experts_close", grid, _TILE_THREADS, place, *rows_in, order, tiles, first, last, parts,
                outputs, shared=_TILE_MEMORY,
            )  # fmt: skip
        self._each("experts_sum", op.out, parts, *self._row(op.mix), used, *self._row(op.out), outputs)

    def _expert_pieces(self, experts: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(first, last, address): experts whose weights as f16, `nbytes` each, fit the scratch together."""
        each = max(1, _PIECE // nbytes)
        place = self.context.scratch("weights:f16", min(each, experts) * nbytes)
        for first in range(0, experts, each):
            yield first, min(experts, first + each), place


def _padded(width: int) -> int:
    return -(-width // _TILE_DEPTH) * _TILE_DEPTH


def _by_four(jobs: list[WeightJob]) -> Iterator[list[WeightJob]]:
    for first in range(0, len(jobs), _JOBS):
        yield jobs[first : first + _JOBS]
