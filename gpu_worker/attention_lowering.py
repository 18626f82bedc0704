"""Lowering of attention in steps of few rows: by tensor cores or threads, the join of its parts, and what a lone row's
queries, key and value still want before it.

Owns the parameters of the kernels of `attention.cu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bloomery.gpu_worker.chains import FreshAttention, read_later
from bloomery.gpu_worker.fusions import Attended
from bloomery.gpu_worker.launches import MAX_ROWS, CardContext, float_word
from bloomery.gpu_worker.products import SUPER_TYPES, Activations, blocks
from bloomery.runtime.program import Attention

if TYPE_CHECKING:
    from bloomery.gpu_worker.lowering import Lowering

_SPLIT, _ATTENDERS = 64, 256  # positions, threads; attention.cu
_CORES, _CORE_WIDTHS = 128, (64, 128)  # threads, widths of keys and values; cores.cuh
_DEPTH: Final = 64
_HEADS: Final = 8
_WALKERS_EACH: Final = 2


def lower_fresh(lowering: Lowering, op: FreshAttention) -> None:
    """For one row attention prepares what it adds to the cache: nobody else waits for that row's key."""
    attention, jobs = op.attended.attention, (op.query, op.key, op.value)
    places = [lowering._heads(job.view) for job in jobs]
    aligned_value = (places[2][0] | 4 * places[2][2]) % 16 == 0
    alone = lowering._count(attention.q) == 1 and _by_cores(lowering.context, attention) and aligned_value
    if not alone or any(read_later(lowering.program, attention, job.view) for job in jobs):
        lowering.lower_each(op.run, op.attended)
        return
    rope = op.key.rope
    assert rope is not None and op.key.write is not None and op.value.write is not None
    words: list[int] = []
    for norm in (op.query.norm, op.key.norm):
        words.append(lowering._weight(norm.weight, attention.key_width, 1)[0] if norm else 0)
    words += [float_word(norm.epsilon if norm else 0.0) for norm in (op.query.norm, op.key.norm)]
    for address, _, head in places[1:]:
        words += [address, head]
    words += [lowering._rope_table(rope), len(rope.frequencies), int(rope.pairs == "halves")]
    words += [lowering.context.state(write.state).rows for write in (op.key.write, op.value.write)]
    lowering._forget({attention.out.buffer, *(job.view.buffer for job in jobs)})
    attend_and_round(lowering, op.attended, tuple(words))


def _by_cores(context: CardContext, op: Attention) -> bool:
    """Whether tensor cores have a kernel for it."""
    caches = (context.state(op.keys), context.state(op.values))
    even = all(cache.row_stride % 8 == 0 for cache in caches)
    return even and context.cache_type == "f16" and op.key_width == op.value_width in _CORE_WIDTHS


def attend_and_round(lowering: Lowering, op: Attended, fresh: tuple[int, ...] = ()) -> None:
    """Attention of a step's rows, its result also as Q8_K if products want it so; see `attend`."""
    attention, rows = op.attention, lowering._count(op.attention.q)
    made = None
    kinds = {lowering.program.weights[name].quant_type.name for name in op.readers}
    if kinds & set(SUPER_TYPES) and attention.value_width == 128 and attention.q.count % 2 == 0:
        made = lowering._place("Q8_K", "activations:Q8_K", op.whole.elements, MAX_ROWS)
        lowering.formed["Q8_K"] = op.whole, made
    attend(lowering, attention, 0, rows, MAX_ROWS, made, fresh)


def attend(
    lowering: Lowering,
    op: Attention,
    first: int,
    rows: int,
    room: int,
    rounded: Activations | None = None,
    fresh: tuple[int, ...] = (),
) -> None:
    """Attention of so many rows from `first` on, with scratch for `room` rows; also `rounded` to Q8_K. `fresh`: the
    Fresh of cores.cuh."""
    heads = op.q.count
    splits = blocks(lowering.context.context, _SPLIT)
    sets = op.kv_heads * blocks(heads // op.kv_heads, _HEADS)
    by_cores = _by_cores(lowering.context, op)
    if by_cores:  # as many runs as blocks that a lone row can use
        splits = min(splits, max(1, blocks(_WALKERS_EACH * lowering.context.multiprocessors, sets)))
    parts = lowering.context.scratch("parts", room * heads * splits * op.value_width * 4)
    extremes = lowering.context.scratch("extremes", room * heads * splits * 8)
    walkers = min(splits, max(1, blocks(_WALKERS_EACH * lowering.context.multiprocessors, sets * rows)))
    caches = (lowering.context.state(op.keys), lowering.context.state(op.values))
    places = [word for cache in caches for word in (cache.address, cache.slot_stride, cache.row_stride)]
    even = all(n % 8 == 0 for n in (op.key_width, op.value_width, *(cache.row_stride for cache in caches)))
    name, threads = f"attend_{lowering.context.cache_type}" + ("" if even else "_odd"), _ATTENDERS
    shared = 4 * _HEADS * blocks(op.key_width, _DEPTH) * _DEPTH
    (q, q_row, q_head), (out, out_row, out_head) = lowering._heads(op.q), lowering._heads(op.out)
    slots, positions = lowering.step.slots + 4 * first, lowering.step.positions + 4 * first
    widths: tuple[int, ...] = (heads, op.kv_heads, op.key_width, op.value_width)
    if by_cores:
        name, threads, widths = f"attend_{'fresh' if fresh else 'cores'}_{op.key_width}", _CORES, widths[:2]
        shared = 2 * 2 * _SPLIT * op.key_width * 2 + _CORES // 32 * _HEADS * (op.key_width + 4) * 4
    words = (slots, positions, q + 4 * first * q_row, q_row, q_head, *places, *widths)
    ends = (float_word(op.scale), splits, parts, extremes)
    lowering.emit("attention", name, (walkers, sets, rows), threads, *words, *ends, *fresh, shared=shared)
    target = (out + 4 * first * out_row, out_row, out_head)
    if rounded:
        words = (positions, parts, extremes, heads, splits, *target)
        made = (rounded.values, rounded.scales, rounded.stride)
        lowering.emit("attention", "attend_join_q8_k", (heads // 2, rows), 1024, *words, *made)
        return
    join = (positions, parts, extremes, heads, op.value_width, splits, *target)
    lowering.emit("attention", "attend_join", (heads, rows), 1024, *join)
