"""Chains: what a decode step's launches take over from their neighbours, so that fewer of them wait for one another.

Owns the patterns beyond those of `fusions`: a residual sum formed by the product before it; a norm made by every block
of the product after it; a choice of experts made by those that use it; hand-offs, and an expert that every row takes,
taken in by the experts beside them; residual copies made by the product whose result is spread over them. It knows no
kernel and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from bloomery.gpu_worker.fusions import AddNorm, Attended, HeadJob, HeadRun, Routed
from bloomery.runtime.ops_deepseek4 import HyperCollapse, HyperPost, SoftplusRouter, WindowAttention
from bloomery.runtime.ops_hand_off import HandOffReceive, HandOffSend
from bloomery.runtime.program import (
    Add,
    HeadMatMul,
    MatMul,
    Op,
    Program,
    RmsNorm,
    Rope,
    RoutedExperts,
    SwiGlu,
    View,
    op_views,
)

_MOST_PAIRS: Final = 256  # window.cu: a thread turns one


@dataclass(frozen=True)
class Always:
    """An expert that every row takes besides the chosen ones: its products, and the sum of its result and theirs."""

    opened: MatMul
    hidden: SwiGlu
    closed: MatMul
    add: Add


@dataclass(frozen=True)
class Shared:
    """Routed experts, what goes out to the host of their work, what comes back if nothing else happens meanwhile, and
    an expert that every row takes."""

    experts: RoutedExperts
    send: HandOffSend | None = None
    receive: HandOffReceive | None = None
    always: Always | None = None

    @property
    def parts(self) -> tuple[Op, ...]:
        always = self.always
        also = (always.opened, always.hidden, always.closed) if always else ()
        return tuple(
            op for op in (self.send, self.experts, *also, self.receive, always and always.add) if op is not None
        )

    @property
    def name(self) -> str:
        return " & ".join(op.name for op in self.parts)


@dataclass(frozen=True)
class Summed:
    """A product, routed experts or what the host did of them, and the sum of the result, which is kept, with what was
    there."""

    op: MatMul | Shared | HandOffReceive
    add: Add

    @property
    def name(self) -> str:
        return f"{self.op.name} & {self.add.name}"


@dataclass(frozen=True)
class Spreading:
    """A sublayer's last product or its experts, the residual copies that a hyper-connection makes of the result, and
    perhaps what the next sublayer reads of them (`early_collapse`)."""

    op: MatMul | Shared
    post: HyperPost
    collapse: HyperCollapse | None = None

    @property
    def name(self) -> str:
        names = [self.op.name, self.post.name, *([self.collapse.name] if self.collapse else [])]
        return " & ".join(names)


@dataclass(frozen=True)
class TurnedWindow:
    """Attention over a window whose heads are turned back behind it, and the weight of the product of groups of heads
    that takes the result ("" if none does next)."""

    attention: WindowAttention
    rope: Rope
    into: View | None = None
    reader: str = ""

    @property
    def name(self) -> str:
        return f"{self.attention.name} & {self.rope.name}"


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
    shared: Shared
    add: Add | None

    @property
    def name(self) -> str:
        names = [self.norm.name, self.routed.name, self.shared.name, *([self.add.name] if self.add else [])]
        return " & ".join(names)


@dataclass(frozen=True)
class NormedChoice:
    """A norm, a router's product of its result, and the choice by scores that each stand for themselves."""

    norm: AddNorm
    product: MatMul
    router: SoftplusRouter

    @property
    def name(self) -> str:
        return f"{self.norm.name} & {self.product.name} & {self.router.name}"


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
Chained = (
    Fused | Shared | Summed | Spreading | TurnedWindow | NormedProduct | NormedExperts | NormedChoice | FreshAttention
)


def chained(ops: Iterable[Fused], joins: Callable[[Shared], bool] = lambda shared: False) -> Iterator[Chained]:
    """The same ops in the same order, in chains as far as they go. `joins` says of routed experts with one that every
    row takes whether they can be one."""
    parts = list(_summed(_shared(list(ops), joins)))
    at = 0
    while at < len(parts):
        three, two = parts[at : at + 3], parts[at : at + 2]
        taken = _experts(three) or _choice(three) or _product(two) or _fresh(two) or _spreading(two) or _turned(three)
        if isinstance(taken, NormedExperts | NormedChoice):
            at += 2
        elif isinstance(taken, NormedProduct | FreshAttention | Spreading | TurnedWindow):
            at += 1
        yield taken or parts[at]
        at += 1


def _shared(ops: list[Fused], joins: Callable[[Shared], bool]) -> Iterator[Fused | Shared]:
    """Experts take the hand-offs beside them, and the expert behind them that every row takes."""
    at = 0
    while at < len(ops):
        joined = _with_always(ops[at : at + 7])
        if joined is not None and joins(joined):
            yield joined
            at += len(joined.parts)
            continue
        match ops[at : at + 3]:
            case [HandOffSend() as send, RoutedExperts() as experts, HandOffReceive() as receive]:
                yield Shared(experts, send, receive)
                at += 3
            case [HandOffSend() as send, RoutedExperts() as experts, *_]:
                yield Shared(experts, send)
                at += 2
            case [RoutedExperts() as experts, *_]:
                yield Shared(experts)
                at += 1
            case [op, *_]:
                yield op
                at += 1


def _with_always(ops: list[Fused]) -> Shared | None:
    """Routed experts and all that belongs to them, if they come first and another expert follows."""
    send = ops[0] if isinstance(ops[0], HandOffSend) else None
    match ops[1:] if send else ops:
        case [RoutedExperts() as experts, MatMul() as opened, SwiGlu() as hidden, MatMul() as closed, *rest]:
            receive = rest[0] if rest and isinstance(rest[0], HandOffReceive) else None
            add = rest[bool(receive)] if len(rest) > bool(receive) else None
            if not isinstance(add, Add) or (send is None) != (receive is None):
                return None
            out, biases = experts.out, (*opened.biases, *closed.biases)
            fits = opened.x == experts.x and opened.outs == (hidden.gate, hidden.up) and closed.x == hidden.out
            fits = fits and (add.x, add.out) == (out, out) and closed.outs == (add.y,) and not any(biases)
            if fits and (receive is None or receive.x == receive.out == out):
                return Shared(experts, send, receive, Always(opened, hidden, closed, add))
    return None


def _summed(ops: Iterable[Fused | Shared]) -> Iterator[Fused | Shared | Summed]:
    """Sums go to the product before them."""
    before: Fused | Shared | None = None
    for op in ops:
        add = op if isinstance(op, Add) else op.add if isinstance(op, AddNorm) else None
        if add is not None and isinstance(before, MatMul | Shared | HandOffReceive) and _adds(before, add):
            yield Summed(before, add)
            before = replace(op, add=None) if isinstance(op, AddNorm) else None
            continue
        if before is not None:
            yield before
        before = op
    if before is not None:
        yield before


def _adds(op: MatMul | Shared | HandOffReceive, add: Add) -> bool:
    whole = all(view.contiguous for view in (add.x, add.y, add.out))
    if isinstance(op, HandOffReceive):  # one thread has an element from beginning to end
        return whole and op.out in (add.x, add.y) and add.x != add.y
    outs, x = (op.outs, op.x) if isinstance(op, MatMul) else ((op.experts.out,), op.experts.x)
    return whole and outs == (add.y,) and not {x.buffer, add.y.buffer} & {add.x.buffer, add.out.buffer}


def _product(parts: list[Fused | Shared | Summed]) -> NormedProduct | None:
    match parts:
        case [AddNorm(add=None, norm=norm) as first, MatMul() as product] if product.x == norm.out:
            if _apart(norm) and norm.x.buffer not in {view.buffer for view in product.outs}:
                return NormedProduct(first, product)
    return None


def _fresh(parts: list[Fused | Shared | Summed]) -> FreshAttention | None:
    match parts:
        case [HeadRun() as run, Attended(attention=attention) as attended]:
            written = {job.write.state: job for job in run.jobs if job.write is not None and job.write.start == 0}
            query = next((job for job in run.jobs if job.view == attention.q and job.write is None), None)
            key, value = written.get(attention.keys), written.get(attention.values)
            if query is None or key is None or value is None or key is value or len(run.jobs) != 3:
                return None
            widths = query.view.width == key.view.width == attention.key_width
            heads = key.view.count == value.view.count == attention.kv_heads
            ropes = [(job.rope, job.view) for job in (query, key)]  # of whole heads, not of their ends
            turned = all(rope is not None and rope.x == view for rope, view in ropes)
            turned = turned and value.rope is None and value.norm is None
            if widths and heads and turned and value.view.width == attention.value_width:
                return FreshAttention(run, query, key, value, attended)
    return None


def _experts(parts: list[Fused | Shared | Summed]) -> NormedExperts | None:
    match parts:
        case [AddNorm(add=None, norm=norm) as first, Routed() as routed, Shared() | Summed() as last]:
            shared = last.op if isinstance(last, Summed) else last
            if not isinstance(shared, Shared) or not _apart(norm):
                return None
            experts, router = shared.experts, routed.router
            same = (experts.x, experts.ids, experts.mix) == (norm.out, router.ids, router.mix)
            if same and routed.product.x == norm.out and router.groups == 1:
                return NormedExperts(first, routed, shared, last.add if isinstance(last, Summed) else None)
    return None


def _choice(parts: list[Fused | Shared | Summed]) -> NormedChoice | None:
    match parts:
        case [AddNorm(add=None, norm=norm) as first, MatMul() as product, SoftplusRouter() as router]:
            if _apart(norm) and product.x == norm.out and product.outs == (router.logits,):
                return NormedChoice(first, product, router)
    return None


def _spreading(parts: list[Fused | Shared | Summed]) -> Spreading | None:
    match parts:
        case [MatMul() as product, HyperPost() as post] if product.outs == (post.y,) and not any(product.biases):
            return Spreading(product, post) if _spread_apart(product.x, post) else None
        case [Shared() as shared, HyperPost() as post] if shared.experts.out == post.y:
            return Spreading(shared, post) if _spread_apart(shared.experts.x, post) else None
    return None


def _spread_apart(x: View, post: HyperPost) -> bool:
    """Whether blocks may write results and copies while others still read."""
    made = {post.y.buffer, post.out.buffer}
    apart = len(made) == 2 and not made & {x.buffer, post.post.buffer, post.mixing.buffer}
    return apart and (post.out == post.streams or post.streams.buffer not in made)


def _turned(parts: list[Fused | Shared | Summed]) -> TurnedWindow | None:
    match parts:
        case [WindowAttention(out=out) as attention, Rope(x=x) as rope, *rest] if x == rope.out:
            within = out.start <= x.start and x.start + x.width <= out.start + out.width
            turns = rope.pairs == "neighbours" and 2 * len(rope.frequencies) == x.width <= 2 * _MOST_PAIRS
            if not turns or not within or (x.buffer, x.count, x.stride) != (out.buffer, out.count, out.stride):
                return None
            match rest:
                case [HeadMatMul(x=into, weight=weight)] if into.contiguous and out.contiguous:
                    if (into.buffer, into.start, into.elements) == (out.buffer, out.start, out.elements):
                        return TurnedWindow(attention, rope, into, weight)
            return TurnedWindow(attention, rope)
    return None


def _apart(norm: RmsNorm) -> bool:
    """Whether blocks may still read what is normed while one of them writes the result."""
    return norm.x.buffer != norm.out.buffer


def read_later(program: Program, op: Op, view: View) -> bool:
    """Whether an op after this one reads what the view holds now, or the step's caller does."""
    if view.buffer in {program.logits, program.argmax, *program.reports}:
        return True
    at = next(i for i, each in enumerate(program.ops) if each is op)
    for later in program.ops[at + 1 :]:
        views = [(other, writes) for other, writes in op_views(later) if other.buffer == view.buffer]
        if any(not writes and other.start < view.end and view.start < other.end for other, writes in views):
            return True
        if any(writes and other.start <= view.start and view.end <= other.end for other, writes in views):
            return False
    return False
