"""Lowering of the ops that `deepseek4` and `deepseek41` add.

Owns the parameters and grids of their kernels, how many rows go through the scratch of one op at a time, and what is
refused by name. Scratch names: `window:parts`, `window:extremes` (attention), `index:scores`, `index:blocks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bloomery.gpu_worker.launches import MAX_ROWS, float_word
from bloomery.gpu_worker.products import SUPER_TYPES, USE_HOST, blocks
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
from bloomery.runtime.program import Op, View

if TYPE_CHECKING:
    from bloomery.gpu_worker.chains import TurnedWindow
    from bloomery.gpu_worker.lowering import Lowering

MOST_COPIES: Final = 8  # hyper.cuh
_KEYS: Final = 64  # indexer.cu
_QUERY_HEADS: Final = 16
_WALKERS_EACH: Final = 4
_SPLIT: Final = 32  # window.cu
_HEADS: Final = 8
_TEAMS: Final = 16
_EACH: Final = 512  # elements of a head that its usual kernel holds; twice as many in the wide one
_ROW_WIDTHS: Final = (128, 256, 512)  # window_rows.cu, window_cores.cu
_ROW_HEADS: Final = 32
_ROW_KEYS: Final = 32
_CORE_HEADS: Final = 16
_SCORE_WIDTHS: Final = (64, 128)  # indexer_cores.cu
_SCORE_KEYS: Final = 128
_MOST_SCORE_HEADS: Final = 128
NO_ENDING: Final = (0,) * 6
_SCRATCH: Final = 128 << 20
"""Bytes of scratch by which the rows of a prompt block are cut in groups."""


def lower_deepseek4(lowering: Lowering, op: Op) -> None:
    """The launches of one op. Raises PlanError naming the op where the card has no kernel for it."""
    words: tuple[int, ...]
    match op:
        case UnitNorm():
            words = (*lowering._heads(op.x), *lowering._heads(op.out), 0, op.x.width, float_word(op.epsilon))
            threads = min(512, 32 * blocks(op.x.width, 128))
            lowering.emit("norm_rope", "rms_norm", (op.x.count, lowering._count(op.x)), threads, *words)
        case HyperMix():
            _hyper_mix(lowering, op)
        case HyperCollapse():
            (streams, row, copy), grid = lowering._heads(op.streams), _across(lowering, op.out)
            words = (streams, row, copy, *lowering._row(op.pre), *lowering._row(op.out))
            lowering.emit("hyper", "hyper_collapse", grid, 256, *words, op.streams.count, op.out.width)
        case HyperPost():
            _check_copies(op, op.streams)
            made = (*lowering._row(op.y), *lowering._heads(op.streams), *lowering._row(op.post))
            words = (*made, *lowering._row(op.mixing), *lowering._heads(op.out), op.streams.count, op.streams.width)
            lowering.emit("hyper", "hyper_post", _across(lowering, op.y), 256, *words)
        case TokenWrite():
            step, rows = lowering.step, lowering.rows
            words = (step.tokens, step.slots, step.positions, rows, *_state(lowering, op.state))
            lowering.emit("engram", "token_write", (blocks(rows, 64),), 64, *words)
        case EngramRows():
            pass  # whoever brings the rows makes their numbers
        case TableRows():
            _table_rows(lowering, op)
        case EngramGate():
            _engram_gate(lowering, op)
        case GroupPool():
            _group_pool(lowering, op)
        case GroupWrite():
            words = (*_places(lowering, op, op.x), *lowering._row(op.x), op.x.elements, op.ratio)
            name = f"group_write_{lowering.context.cache_type}"
            lowering.emit("compressor", name, _across(lowering, op.x), 256, *words, *_state(lowering, op.state)[:3])
        case IndexRows():
            _index_rows(lowering, op)
        case WindowAttention():
            window_attention(lowering, op)
        case SoftplusRouter():
            _softplus_router(lowering, op)
        case _:
            raise _refuse(lowering, op, "has no card kernel yet")


def _refuse(lowering: Lowering, op: Op, why: str) -> PlanError:
    return PlanError(f"{lowering.program.architecture}: op {op.name} ({type(op).__name__}) {why}", USE_HOST)


def _across(lowering: Lowering, view: View) -> tuple[int, int]:
    """A grid of 256 threads for each 256 elements of each row."""
    return blocks(view.elements, 256), lowering._count(view)


def _state(lowering: Lowering, name: str) -> tuple[int, int, int, int]:
    state = lowering.context.state(name)
    return state.address, state.slot_stride, state.row_stride, state.rows


def _places(lowering: Lowering, op: Op, view: View) -> tuple[int, int]:
    """Where the slots and positions of a view's rows lie."""
    if lowering.program.buffers[view.buffer].rows != "step":
        raise _refuse(lowering, op, "of wanted rows only has no card kernel yet")
    return lowering.step.slots, lowering.step.positions


def _floats(lowering: Lowering, name: str) -> int:
    """Address of a small weight as float32."""
    address, tensor = lowering.context.weight(name)
    if tensor.quant_type.name == "F32":
        return address
    return lowering.context.constant(f"floats {name}", np.ascontiguousarray(tensor.dequantise(np.float32)))


def _check_copies(op: Op, streams: View) -> None:
    if streams.count > MOST_COPIES:
        raise PlanError(
            f"op {op.name}: {streams.count} residual copies, the card's kernels take {MOST_COPIES}", USE_HOST
        )


# ---- hyper-connections
def mix_words(lowering: Lowering, op: HyperMix) -> tuple[int, ...]:
    """The Mixing of hyper.cuh."""
    words: tuple[int, ...] = (*lowering._row(op.streams), op.streams.elements)
    for view in (op.logits, op.pre, op.post, op.mixing):
        words += lowering._row(view) if view else (0, 0)
    weights = (lowering.context.weight(op.base)[0], lowering.context.weight(op.scale)[0])
    numbers = (op.streams.count, float_word(op.epsilon), float_word(op.hyper_epsilon), op.rounds)
    return (*words, *weights, *numbers)


def _hyper_mix(lowering: Lowering, op: HyperMix) -> None:
    _check_copies(op, op.streams)
    lowering.emit("hyper", "hyper_mix", (lowering._count(op.pre),), 512, *mix_words(lowering, op))


# ---- engrams
def _table_rows(lowering: Lowering, op: TableRows) -> None:
    tensor, count = lowering.program.weights[op.table], op.ids.elements
    width, kind = tensor.shape[0], tensor.quant_type
    assert count * width == op.out.elements
    grid = (lowering._count(op.out) * count, blocks(blocks(width, 32), 64))
    words = (lowering.context.brought(op.table), kind.row_bytes(width), width, count, *lowering._row(op.out))
    lowering.emit("matmul", "table_rows", grid, 64, *words, kind=kind.name)


def _engram_gate(lowering: Lowering, op: EngramGate) -> None:
    views = (*lowering._heads(op.streams), *lowering._heads(op.keys), *lowering._row(op.value))
    made = (*lowering._row(op.gate), *lowering._heads(op.out))
    weights = (_floats(lowering, op.key_weight), _floats(lowering, op.query_weight))
    grid = (op.streams.count, lowering._count(op.out))
    words = (*views, *made, *weights, op.streams.width, float_word(op.epsilon))
    lowering.emit("engram", "engram_gate", grid, 256, *words)


# ---- compressed rows
def _group_pool(lowering: Lowering, op: GroupPool) -> None:
    width, places, state = op.values.elements, _places(lowering, op, op.values), _state(lowering, op.state)
    bias = _floats(lowering, op.bias) if op.bias else 0
    words = (*places, *lowering._row(op.values), *lowering._row(op.scores), bias, width, op.ratio, *state)
    lowering.emit("compressor", "pool_write", _across(lowering, op.values), 256, *words)
    head = (*places, *lowering._row(op.out), op.out.elements, width, op.ratio, int(op.overlap))
    grid = (blocks(op.out.elements, 128), lowering._count(op.out))
    lowering.emit("compressor", "pool_rows", grid, 128, *head, *state)


def _index_rows(lowering: Lowering, op: IndexRows) -> None:
    context, width = lowering.context, op.q.width
    slots, positions = _places(lowering, op, op.q)
    groups = max(1, blocks(context.context, op.ratio))
    of_blocks = blocks(groups, op.block) if op.block else 0
    state, cache_type = _state(lowering, op.keys)[:3], context.cache_type
    each = _rows_each(lowering, op.q, 4 * (groups + of_blocks))
    words: tuple[int, ...]
    on_cores = cache_type == "f16" and width in _SCORE_WIDTHS and op.q.count <= _MOST_SCORE_HEADS
    scores = context.scratch("index:scores", each * groups * 4)
    bests = context.scratch("index:blocks", each * max(1, of_blocks) * 4)
    padded = blocks(width, 4) * 4
    shared = 4 * (_KEYS * (padded + 4) + _QUERY_HEADS * padded)
    (q, q_row, q_head), (weights, weights_row) = lowering._heads(op.q), lowering._row(op.weights)
    for first in range(0, lowering._count(op.q), each):
        rows = min(each, lowering._count(op.q) - first)
        keys = _SCORE_KEYS if on_cores else _KEYS
        walkers = min(blocks(groups, keys), max(1, blocks(_WALKERS_EACH * context.multiprocessors, rows)))
        at = 4 * first
        query = (q + at * q_row, q_row, q_head, weights + at * weights_row, weights_row)
        sizes = (op.ratio, float_word(op.scale), scores, groups)
        words = (slots + at, positions + at, *query, *state, op.q.count)
        if on_cores:
            held = (keys + 2 * 16 * blocks(op.q.count, 16)) * width * 2
            lowering.emit("indexer_cores", f"score_cores_{width}", (walkers, rows), 256, *words, *sizes, shared=held)
        else:
            name = f"index_scores_{cache_type}"
            lowering.emit("indexer", name, (walkers, rows), 256, *words, width, *sizes, shared=shared)
        choice: tuple[int, ...] = ()
        for view in (op.out, op.kept, op.within):
            address, row = lowering._row(view) if view else (0, 0)
            choice += (address + at * row, row, view.elements if view else 0)
        words = (positions + at, scores, groups, op.ratio, *choice, op.block, bests, of_blocks)
        lowering.emit("indexer", "index_rows", (rows,), 1024, *words, shared=4 * (of_blocks // 32 + 1))


def _rows_each(lowering: Lowering, view: View, nbytes: int) -> int:
    """Rows of a block that go through scratch of so many bytes a row at a time; those of a decode step always do."""
    return min(max(MAX_ROWS, _SCRATCH // nbytes), lowering._room(view))


# ---- attention
def window_attention(lowering: Lowering, op: WindowAttention, ending: tuple[int, ...] = NO_ENDING) -> None:
    """`ending` is the Ending of window.cu, for a decode step's rows."""
    assert ending == NO_ENDING or lowering._count(op.q) <= MAX_ROWS
    context, heads, width = lowering.context, op.q.count, op.q.width
    if op.block:
        raise _refuse(lowering, op, "of a block that sees itself has no card kernel yet")
    if width % 4 or width > 2 * _EACH:
        raise _refuse(lowering, op, f"has heads {width} wide, the card's kernel takes multiples of 4 up to {2 * _EACH}")
    slots, positions = _places(lowering, op, op.q)
    window = (*_state(lowering, op.window), op.span)
    (q, q_row, q_head), (out, out_row, out_head) = lowering._heads(op.q), lowering._heads(op.out)
    sinks = context.weight(op.sinks)[0]
    on_cores = context.cache_type == "f16" and width in _ROW_WIDTHS
    if lowering._count(op.q) > MAX_ROWS and on_cores:
        grid = (blocks(heads, _ROW_HEADS), lowering._count(op.q))
        shared = (_ROW_HEADS + 2 * _ROW_KEYS) * width * 2 + _ROW_HEADS * (2 * _ROW_KEYS + 16)
        words = (slots, positions, q, q_row, q_head, *window, *_groups(lowering, op, 0))
        words += (sinks, heads, float_word(op.scale), out, out_row, out_head)
        lowering.emit("window_rows", f"attend_rows_{width}", grid, 256, *words, shared=shared)
        return
    each = _rows_each(lowering, op.q, heads * _TEAMS * width * 4)
    parts = context.scratch("window:parts", each * heads * _TEAMS * width * 4)
    extremes = context.scratch("window:extremes", each * heads * _TEAMS * 8)
    element = 4 if context.cache_type == "f32" else 2
    shared, batch = _SPLIT * (width * element + 16) + 4 * _HEADS * width, _HEADS
    kernel = "window", f"attend_window_{context.cache_type}" + ("_wide" if width > _EACH else "")
    if on_cores:
        shared = (2 * _CORE_HEADS + _ROW_KEYS) * width * 2 + _CORE_HEADS * _ROW_KEYS * 12
        batch, kernel = _CORE_HEADS, ("window_cores", f"window_cores_{width}")
    for first in range(0, lowering._count(op.q), each):
        rows, at = min(each, lowering._count(op.q) - first), 4 * first
        words = (slots + at, positions + at, q + at * q_row, q_row, q_head, *window, *_groups(lowering, op, at))
        sizes = (heads, *(() if on_cores else (width,)), float_word(op.scale), parts, extremes)
        lowering.emit(*kernel, (_TEAMS, blocks(heads, batch), rows), 256, *words, *sizes, shared=shared)
        joined = (parts, extremes, sinks, heads, width, out + at * out_row, out_row, out_head, *ending)
        lowering.emit("window", "join_window", (heads, rows), 256, *joined)


def lower_turned(lowering: Lowering, chain: TurnedWindow) -> None:
    """Attention whose parts' join turns the heads back and rounds them for the product that follows."""
    op, rope, made = chain.attention, chain.rope, None
    width, whole = op.out.width, chain.into
    kind = lowering.program.weights[chain.reader].quant_type.name if chain.reader else ""
    table = lowering._rope_table(rope)
    lowering.label = chain.name
    lowering.forget_written(op)
    ending: tuple[int, ...] = (table, len(rope.frequencies), rope.x.start - op.out.start)
    if whole is not None and kind in SUPER_TYPES and width % 256 == 0:
        made = lowering._place("Q8_K", "activations:Q8_K", whole.elements, lowering._room(op.out))
    window_attention(lowering, op, (*ending, *((made.values, made.scales, made.stride) if made else (0, 0, 0))))
    if made and whole is not None:
        lowering.formed["Q8_K"] = whole, made


def _groups(lowering: Lowering, op: WindowAttention, at: int) -> tuple[int, ...]:
    """The Groups of windows.cuh for the row whose numbers begin `at` bytes after the first one's."""
    if not op.groups:
        return (0,) * 7
    chosen, row = lowering._row(op.chosen) if op.chosen else (0, 0)
    most = op.chosen.elements if op.chosen else 0
    return (*_state(lowering, op.groups)[:3], op.ratio, chosen + at * row, row, most)


# ---- router
def _softplus_router(lowering: Lowering, op: SoftplusRouter) -> None:
    experts, grid = op.logits.elements, (lowering._count(op.logits),)
    words = (*lowering._row(op.logits), experts, *softplus_choice(lowering, op))
    lowering.emit("softplus_router", "softplus_router", grid, 128, *words, shared=8 * experts)


def softplus_choice(lowering: Lowering, op: SoftplusRouter) -> tuple[int, ...]:
    """The SoftplusChoice of softplus.cuh."""
    bias = lowering.context.weight(op.bias)[0] if op.bias else 0
    table = lowering.context.weight(op.table)[0] if op.table else 0
    of_step = lowering.program.buffers[op.logits.buffer].rows == "step"
    tokens = (lowering.step.tokens, 0 if of_step else lowering.step.out_rows)
    rule = (op.ids.elements, int(op.normalise), float_word(op.scale))
    return (*lowering._row(op.ids), *lowering._row(op.mix), bias, table, *tokens, *rule)
