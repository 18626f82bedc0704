"""Chains: what a decode step's launches take over from their neighbours, so that fewer of them wait for one another.

Owns the patterns beyond those of `fusions`: a residual sum formed by the product before it; a norm made by every block
of the product after it; a choice of experts made by those that use it. It knows no kernel and no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from bloomery.gpu_worker.fusions import AddNorm, Attended, HeadJob, HeadRun, Routed
from bloomery.runtime.program import Add, MatMul, Op, RmsNorm, RoutedExperts


@dataclass(frozen=True)
class Summed:
    """A product or routed experts, and the sum of their result, which is kept, with what was there."""

    op: MatMul | RoutedExperts
    add: Add

    @property
    def name(self) -> str:
        return f"{self.op.name} & {self.add.name}"


@dataclass(frozen=True)
class NormedProduct:
    """A norm and the products of its result."""

    norm: AddNorm
    product: MatMul

    @property
    def name(self) -> str:
        return f"{self.norm.name} & {self.product.name}"


@dataclass(frozen=True)
class NormedExperts:
    """A norm, a router's product of its result, the choice, and the experts chosen, perhaps with the sum after them."""

    norm: AddNorm
    routed: Routed
    experts: RoutedExperts
    add: Add | None

    @property
    def name(self) -> str:
        names = [self.norm.name, self.routed.name, self.experts.name, *([self.add.name] if self.add else [])]
        return " & ".join(names)


@dataclass(frozen=True)
class FreshAttention:
    """Norms and rotations of queries, keys and values of whole heads, their way to the cache, and the attention that
    follows: `query`, `key` and `value` are the jobs of `run`."""

    run: HeadRun
    query: HeadJob
    key: HeadJob
    value: HeadJob
    attended: Attended

    @property
    def name(self) -> str:
        return f"{self.run.name} & {self.attended.name}"


Fused = Op | AddNorm | HeadRun | Attended | Routed
Chained = Fused | Summed | NormedProduct | NormedExperts | FreshAttention


def chained(ops: Iterable[Fused]) -> Iterator[Chained]:
    """The same ops in the same order, in chains as far as they go."""
    parts = list(_summed(ops))
    at = 0
    while at < len(parts):
        taken = _experts(parts[at : at + 3]) or _product(parts[at : at + 2]) or _fresh(parts[at : at + 2])
        if isinstance(taken, NormedExperts):
            at += 2
        elif isinstance(taken, NormedProduct | FreshAttention):
            at += 1
        yield taken or parts[at]
        at += 1


def _summed(ops: Iterable[Fused]) -> Iterator[Fused | Summed]:
    """Sums go to the product before them."""
    before: Fused | None = None
    for op in ops:
        add = op if isinstance(op, Add) else op.add if isinstance(op, AddNorm) else None
        if add is not None and isinstance(before, MatMul | RoutedExperts) and _adds(before, add):
            yield Summed(before, add)
            before = replace(op, add=None) if isinstance(op, AddNorm) else None
            continue
        if before is not None:
            yield before
        before = op
    if before is not None:
        yield before


def _adds(op: MatMul | RoutedExperts, add: Add) -> bool:
    outs = op.outs if isinstance(op, MatMul) else (op.out,)
    read = {op.x.buffer, add.y.buffer}
    whole = all(view.contiguous for view in (add.x, add.y, add.out))
    return whole and outs == (add.y,) and not read & {add.x.buffer, add.out.buffer}


def _product(parts: list[Fused | Summed]) -> NormedProduct | None:
    match parts:
        case [AddNorm(add=None, norm=norm) as first, MatMul() as product] if product.x == norm.out:
            if _apart(norm) and norm.x.buffer not in {view.buffer for view in product.outs}:
                return NormedProduct(first, product)
    return None


def _fresh(parts: list[Fused | Summed]) -> FreshAttention | None:
    match parts:
        case [HeadRun() as run, Attended(attention=attention) as attended]:
            written = {job.write.state: job for job in run.jobs if job.write is not None and job.write.start == 0}
            query = next((job for job in run.jobs if job.view == attention.q and job.write is None), None)
            key, value = written.get(attention.keys), written.get(attention.values)
            if query is None or key is None or value is None or key is value or len(run.jobs) != 3:
                return None
            widths = query.view.width == key.view.width == attention.key_width
            heads = key.view.count == value.view.count == attention.kv_heads
            turned = query.rope is not None and key.rope is not None and value.rope is None and value.norm is None
            if widths and heads and turned and value.view.width == attention.value_width:
                return FreshAttention(run, query, key, value, attended)
    return None


def _experts(parts: list[Fused | Summed]) -> NormedExperts | None:
    match parts:
        case [AddNorm(add=None, norm=norm) as first, Routed() as routed, RoutedExperts() | Summed() as last]:
            experts = last.op if isinstance(last, Summed) else last
            if not isinstance(experts, RoutedExperts) or not _apart(norm):
                return None
            router = routed.router
            same = (experts.x, experts.ids, experts.mix) == (norm.out, router.ids, router.mix)
            if same and routed.product.x == norm.out and router.groups == 1:
                return NormedExperts(first, routed, experts, last.add if isinstance(last, Summed) else None)
    return None


def _apart(norm: RmsNorm) -> bool:
    """Whether blocks may still read what is normed while one of them writes the result."""
    return norm.x.buffer != norm.out.buffer
