"""Early collapse: what a sublayer reads of the residual copies is made by the kernel that made the copies.

Owns the pattern and its conditions. With lagged hyper-connections a sublayer collapses the copies by the mix of the
sublayer before it, so that nothing that happens after the copies were made is needed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from bloomery.gpu_worker.chains import Chained, Shared, Spreading
from bloomery.gpu_worker.hyper_lowering import HyperRead
from bloomery.runtime.ops_deepseek4 import HyperCollapse
from bloomery.runtime.program import Op, Program, op_views, written_buffers


def collapsed_early(
    program: Program, parts: Iterable[Chained | HyperRead], spreads: Callable[[Spreading], bool]
) -> Iterator[Chained | HyperRead]:
    """The same parts, a collapse taken from where it stood to the copies it is of. `spreads` says whether a kernel
    makes them at all."""
    places = {id(op): at for at, op in enumerate(program.ops)}
    taken: set[int] = set()
    for part in parts:
        if isinstance(part, Spreading) and spreads(part):
            collapse = _collapse(program.ops[places[id(part.post)] + 1 :], part)
            if collapse is not None and _alike(program, part, collapse):
                taken.add(id(collapse))
                yield replace(part, collapse=collapse)
                continue
        if id(part) in taken:
            continue
        if isinstance(part, HyperRead) and id(part.collapse) in taken:
            yield replace(part, collapse=None)
        else:
            yield part


def _collapse(later: Iterable[Op], spreading: Spreading) -> HyperCollapse | None:
    """The next collapse of the copies as they are made here, if nothing before it touches its result or changes what
    it reads, neither beside the copies being made nor later."""
    source, post = spreading.op, spreading.post
    ops: list[Op] = [*(source.parts if isinstance(source, Shared) else (source,)), post]
    touched = {view.buffer for op in ops for view, _ in op_views(op)}
    written: set[str] = set()
    for op in later:
        if isinstance(op, HyperCollapse) and op.streams == post.out:
            return None if op.out.buffer in touched or op.pre.buffer in written | written_buffers(ops) else op
        touched |= {view.buffer for view, _ in op_views(op)}
        written |= written_buffers((op,))
        if post.out.buffer in written:
            return None
    return None


def _alike(program: Program, spreading: Spreading, collapse: HyperCollapse) -> bool:
    """Whether the rows are the same, and lie as the kernels want them."""
    post, out = spreading.post, collapse.out
    rows = {program.buffers[view.buffer].rows for view in (post.y, collapse.pre, out)}
    return len(rows) == 1 and out.contiguous and collapse.pre.contiguous and out.elements == post.streams.width
