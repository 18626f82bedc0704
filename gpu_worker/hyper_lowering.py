"""Hyper-connections in one launch: the product that makes a mix's logits, the mix, and the collapse that comes next.

Owns the pattern, its conditions and the parameters of the kernel `hyper_read`. For the few rows of a decode step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from bloomery.gpu_worker.chains import Chained
from bloomery.gpu_worker.launches import MAX_ROWS
from bloomery.gpu_worker.lowering_deepseek4 import MOST_COPIES, mix_words
from bloomery.gpu_worker.products import UNIT_TYPES, blocks
from bloomery.runtime.ops_deepseek4 import HyperCollapse, HyperMix
from bloomery.runtime.program import MatMul, View

if TYPE_CHECKING:
    from bloomery.gpu_worker.lowering import Lowering

_THREADS: Final = 800  # hyper_read.cuh
_CHUNK: Final = 1024
_MOST_LOGITS: Final = 50
_BEFORE: Final = 1 + 16  # words of a row before its terms
_TERMS: Final = 2  # of 64 elements by a logit, at most


@dataclass(frozen=True)
class HyperRead:
    """A product of residual copies, the mix of its result, and, if it is next, the collapse of the same copies."""

    product: MatMul
    mix: HyperMix
    collapse: HyperCollapse | None

    @property
    def parts(self) -> tuple[MatMul | HyperMix | HyperCollapse, ...]:
        return (self.product, self.mix, *([self.collapse] if self.collapse else []))

    @property
    def name(self) -> str:
        return " & ".join(op.name for op in self.parts)


def read_together(ops: Iterable[Chained]) -> Iterator[Chained | HyperRead]:
    """The same ops in the same order, those that read copies put together."""
    parts, at = list(ops), 0
    while at < len(parts):
        read = _hyper_read(parts[at : at + 3])
        yield read or parts[at]
        at += len(read.parts) if read else 1


def _hyper_read(parts: list[Chained]) -> HyperRead | None:
    match parts:
        case [MatMul() as product, HyperMix() as mix, *rest] if product.outs == (mix.logits,):
            collapse = rest[0] if rest and isinstance(rest[0], HyperCollapse) else None
            if collapse and not (collapse.streams == mix.streams and _apart(mix, collapse)):
                collapse = None
            if _flat(product.x) == _flat(mix.streams) and _apart(mix, collapse):
                return HyperRead(product, mix, collapse)
    return None


def _flat(view: View) -> View:
    """Heads without gaps as one."""
    return View(view.buffer, view.start, view.elements) if view.contiguous else view


def _apart(mix: HyperMix, collapse: HyperCollapse | None) -> bool:
    """Whether blocks may read while others write: no result lies in a buffer that is read, or in another result's."""
    made = [view.buffer for view in (mix.logits, mix.pre, mix.post, mix.mixing) if view]
    read = {mix.streams.buffer}
    if collapse:
        made.append(collapse.out.buffer)
        read |= {collapse.pre.buffer} if collapse.pre != mix.pre else set()
    return len(set(made)) == len(made) and not read & set(made)


def lower_hyper_read(lowering: Lowering, read: HyperRead) -> None:
    """The launch; the ops one after the other where there is no kernel for all of it."""
    if not _fits(lowering, read):
        lowering.lower_each(*read.parts)
        return
    product, mix, collapse = read.product, read.mix, read.collapse
    elements, outputs, rows = mix.streams.elements, mix.logits.elements, lowering._count(mix.pre)
    weights, kind, row_bytes = lowering._weight(product.weights[0], elements, outputs)
    collapsed, collapsing = (0, 0, 0, 0, 0), 0
    if collapse:
        width, own = collapse.out.elements, collapse.pre == mix.pre
        collapsed = (*((0, 0) if own else lowering._row(collapse.pre)), *lowering._row(collapse.out), width)
        collapsing = max(1, blocks(blocks(width, _THREADS), max(1, rows)))
    each = _BEFORE + _TERMS * outputs * elements // 64
    # One area for all: nobody looks at it before the launches before this one have ended, which leave it 0; each of
    # those that run beside others (`beside`) is waited for before the next begins.
    words = lowering.context.constant(f"words of hyper_read {each}", np.zeros(MAX_ROWS * each, np.int64))
    grid = (blocks(elements, _CHUNK) + 1 + collapsing, rows)
    given = (weights, row_bytes, outputs, *mix_words(lowering, mix), *collapsed, words, each)
    lowering.emit("matmul", "hyper_read", grid, _THREADS, *given, kind=kind)
    lowering.forget_written(*read.parts)


def _fits(lowering: Lowering, read: HyperRead) -> bool:
    product, mix, collapse = read.product, read.mix, read.collapse
    copies, views = mix.streams.count, [mix.streams, mix.logits, mix.pre]
    views += [view for view in (mix.post, mix.mixing) if view]
    if collapse:
        views += [collapse.pre, collapse.out]
    whole = all(view.contiguous for view in views) and len({lowering._count(view) for view in views}) == 1
    logits = copies * (copies + 2) if mix.post and mix.mixing else copies if not (mix.post or mix.mixing) else 0
    address, row = lowering.context.view(mix.streams)
    aligned = address % 16 == 0 and row % 4 == 0
    known = lowering.program.weights[product.weights[0]].quant_type.name in UNIT_TYPES and product.biases == (None,)
    small = mix.logits.elements == logits <= _MOST_LOGITS and copies <= MOST_COPIES
    small = small and lowering._count(mix.pre) <= MAX_ROWS
    return whole and aligned and known and small and mix.streams.elements % 256 == 0
