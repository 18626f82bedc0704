"""Fusions: which neighbouring ops become one launch, since every launch costs about a microsecond.

Owns the patterns: a residual sum, the norm after it and the rounding of its result for the products that follow;
what happens to queries, keys and values between their projection and attention; attention and the rounding of its
result; a router and its product. It knows no kernel and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from bloomery.runtime.program import (
    Add,
    Attention,
    CacheWrite,
    MatMul,
    Op,
    Program,
    RmsNorm,
    Rope,
    RoutedExperts,
    Router,
    View,
    op_views,
)

MOST_JOBS: Final = 3
_WIDEST_NORM: Final = 8192
_WIDEST_HEAD: Final = 1024


@dataclass(frozen=True)
class AddNorm:
    """out = norm(x + y), x + y kept where `add` wants it; `readers` are the weights whose products take out next."""

    add: Add | None
    norm: RmsNorm
    readers: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.add.name} & {self.norm.name}" if self.add else self.norm.name


@dataclass(frozen=True)
class Attended:
    """Attention; `readers` are the weights whose products take its result, as one head, next."""

    attention: Attention
    readers: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.attention.name

    @property
    def whole(self) -> View:
        out = self.attention.out
        return View(out.buffer, out.start, out.elements) if out.contiguous else out


@dataclass(frozen=True)
class Routed:
    """A router and the product that makes its scores."""

    product: MatMul
    router: Router

    @property
    def name(self) -> str:
        return f"{self.product.name} & {self.router.name}"


@dataclass
class HeadJob:
    """One view's way to attention: norm, rotation (of its heads, or of the end of its only one), cache, each at most
    once and in this order."""

    view: View
    norm: RmsNorm | None = None
    rope: Rope | None = None
    write: CacheWrite | None = None


@dataclass
class HeadRun:
    """Neighbouring ops on a few views, all of which happen head by head."""

    jobs: list[HeadJob] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " & ".join(self.names)

    @property
    def rope(self) -> Rope | None:
        return next((job.rope for job in self.jobs if job.rope), None)

    def take(self, op: Op, ahead: Sequence[Op] = ()) -> bool:
        """Adds an op to the run if it fits; `ahead` are those that follow it."""
        if not isinstance(op, RmsNorm | Rope | CacheWrite) or op.x.width > _WIDEST_HEAD:
            return False
        if not isinstance(op, CacheWrite) and op.out != op.x:
            return False
        if isinstance(op, RmsNorm) and op.x.count == 1:  # but for one that turns, too, AddNorm does more for them
            turns = [later for later in ahead if isinstance(later, Rope) and _is_tail(later, op.x)]
            if not turns:
                return False
        job = next((job for job in self.jobs if job.view == op.x), None)
        if job is None and isinstance(op, Rope):
            job = next((job for job in self.jobs if _is_tail(op, job.view)), None)
        if job is None:
            if len(self.jobs) == MOST_JOBS or any(_overlap(job.view, op.x) for job in self.jobs):
                return False
            job = HeadJob(op.x)
        if not _joins(job, op) or (isinstance(op, Rope) and not _same_turn(self.rope, op)):
            return False
        match op:
            case RmsNorm():
                job.norm = op
            case Rope():
                job.rope = op
            case CacheWrite():
                job.write = op
        if job not in self.jobs:
            self.jobs.append(job)
        self.names.append(op.name)
        return True


def _is_tail(op: Rope, view: View) -> bool:
    """Whether what turns, all of it, is the end of the view's only head."""
    x = op.x
    whole = x.count == view.count == 1 and 2 * len(op.frequencies) == x.width and op.out == x
    return whole and x.buffer == view.buffer and view.start < x.start and x.end == view.end


def _overlap(one: View, other: View) -> bool:
    return one.buffer == other.buffer and one.start < other.end and other.start < one.end


def _joins(job: HeadJob, op: RmsNorm | Rope | CacheWrite) -> bool:
    """Whether the op comes after what the job already does."""
    if job.write:
        return False
    if isinstance(op, RmsNorm):
        return job.norm is None and job.rope is None
    return isinstance(op, CacheWrite) or job.rope is None


def _same_turn(first: Rope | None, second: Rope) -> bool:
    def turn(rope: Rope) -> tuple[object, ...]:
        return rope.frequencies, rope.magnitude, rope.pairs, rope.behind

    return first is None or turn(first) == turn(second)


def fused(program: Program) -> Iterator[Op | AddNorm | HeadRun | Attended | Routed]:
    """The program's ops in order, neighbours that can be one launch put together."""
    ops, at = program.ops, 0
    while at < len(ops):
        run = HeadRun()
        end = at
        while end < len(ops) and run.take(ops[end], ops[end + 1 : end + 1 + MOST_JOBS]):
            end += 1
        if end > at + 1:
            yield run
        elif (sum_and_norm := _add_norm(ops, at)) is not None:
            yield sum_and_norm
            end = at + (2 if sum_and_norm.add else 1)
        else:
            op, end = ops[at], at + 1
            after = ops[end] if end < len(ops) else None
            if isinstance(op, MatMul) and isinstance(after, Router) and op.outs == (after.logits,):
                yield Routed(op, after)
                end += 1
            elif isinstance(op, Attention):
                attended = Attended(op, ())
                yield Attended(op, tuple(_readers(ops[at + 1 :], attended.whole)))
            else:
                yield op
        at = end


def _add_norm(ops: Sequence[Op], at: int) -> AddNorm | None:
    op = ops[at]
    add = op if isinstance(op, Add) else None
    norm = ops[at + 1] if add and at + 1 < len(ops) else op
    if not isinstance(norm, RmsNorm) or norm.x.count != 1 or norm.x.width > _WIDEST_NORM:
        return None
    if add and not (norm.x == add.out and add.x.count == add.y.count == 1):
        return None
    return AddNorm(add, norm, tuple(_readers(ops[at + (2 if add else 1) :], norm.out)))


def _readers(ops: Sequence[Op], view: View) -> Iterator[str]:
    """Weights of the products that take the view before anything else is written to its buffer."""
    for op in ops:
        if isinstance(op, MatMul) and op.x == view:
            yield from op.weights
        elif isinstance(op, RoutedExperts) and op.x == view:
            yield from (op.gate, op.up)
        if any(writes and written.buffer == view.buffer for written, writes in op_views(op)):
            return
