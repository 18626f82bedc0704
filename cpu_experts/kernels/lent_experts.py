"""Experts of a single row by ranks that help each other: who is done with its own share computes of those of others.

Owns the pieces into which a rank's share is cut, and where the rows of other ranks lie. Ranks read memory at rates that
differ by a tenth, and by half where two virtual cores happen to share one, so whoever shares evenly waits for the
slowest. A share is its rows of one expert after the other; the last experts are cut in halves, since what is left at
the end of a stage is a piece. Which rank computes a row changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bloomery.cpu_experts.kernels.block_dots import with_pairs
from bloomery.cpu_experts.kernels.claims import claim, lap_tag
from bloomery.cpu_experts.kernels.float_dots import ELEMENT_BYTES
from bloomery.cpu_experts.kernels.layouts import CLAIM_BYTES, EXPERTS_HEAD, EXPERTS_JOB
from bloomery.cpu_experts.kernels.row_matmul import multiply_halves, multiply_pairs, multiply_runs
from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import argument, inlined, load_i32

_CUT_EXPERTS: Final = 4  # the last ones, of two jobs
_CUT_PAIRS: Final = 2  # the last ones, of one job
_LEAST_CUT: Final = 8  # rows of a share that are cut: every beginning of a run costs time
_TABLE: Final = EXPERTS_HEAD - 1  # the word that says where the table begins
Compute = Callable[[int, int, int, int, int, int, int, int, int], None]
Lent = Callable[[int, int, int, int, int, int, int, int], bool]

# The table: address of the claim words, then for every job and rank the address of row 0 of matrix 0, as if that rank's
# rows were part of whole matrices, and bytes from a matrix to the next one; address 0: this rank cannot see them.


@inlined
def _place(args: int, ranks: int, job: int, of: int) -> int:
    at: int = argument(args, _TABLE) + 1 + 2 * (job * ranks + of)
    return at


@inlined
def _pieces(units: int, cut: int) -> int:
    halved = min(units, cut)
    pieces: int = units + halved
    return pieces


@inlined
def _part(args: int, piece: int, units: int, cut: int, of: int, ranks: int) -> tuple[int, int, int, int, int]:
    """Of a piece the unit, which rows of the share (0: all, 1 and 2: a half), the share's first row, the piece's first
    row and one past its last."""
    whole = units - min(units, cut)
    unit, half = piece, 0
    if piece >= whole:
        unit, half = whole + ((piece - whole) >> 1), 1 + ((piece - whole) & 1)
    outputs = argument(args, EXPERTS_HEAD + 5)
    first, last = share_start(outputs, of, ranks), share_end(outputs, of, ranks)
    begin, middle = first, first + ((last - first + 1) >> 1)
    if half == 1:
        last = middle
    elif half == 2:
        begin = middle
    return unit, half, first, begin, last


@inlined
def _expert(args: int, pairs: int, place: int, numbers: int) -> int:
    """Number of the expert that comes at this place in the order of experts."""
    chosen = load_i32(argument(args, 9) + 4 * load_i32(pairs + 8 * place + 4))
    number: int = chosen if numbers == 0 else argument(numbers, chosen)
    return number


def _two_jobs(name: str) -> Compute:
    runs = multiply_runs(name)

    @inlined
    def compute(
        args: int, x: int, pairs: int, count: int, numbers: int, piece: int, cut: int, of: int, ranks: int
    ) -> None:
        at = EXPERTS_HEAD + 1
        up = at + EXPERTS_JOB
        row_bytes, blocks = argument(args, at + 2), argument(args, at + 3)
        place, half, first, begin, last = _part(args, piece, count, cut, of, ranks)
        if begin >= last:
            return
        gates, ups = _place(args, ranks, 0, of), _place(args, ranks, 1, of)
        gate, gate_matrix = argument(args, gates), argument(args, gates + 1)
        other, other_matrix = argument(args, ups), argument(args, ups + 1)
        expert = _expert(args, pairs, place, numbers)
        following = then = 0
        after, row = expert, last
        if half != 1:
            row = first
            after = _expert(args, pairs, place + 1, numbers) if place + 1 < count else -1
        if after >= 0:
            following = gate + after * gate_matrix + row * row_bytes
            then = other + after * other_matrix + row * row_bytes
        item = pairs + 8 * place
        source, to = x + load_i32(item) * argument(args, 2), load_i32(item + 4)
        runs(
            gate + expert * gate_matrix + begin * row_bytes, last - begin,
            argument(args, at + 5) + to * argument(args, at + 6) + 4 * begin,
            other + expert * other_matrix + begin * row_bytes, last - begin,
            argument(args, up + 5) + to * argument(args, up + 6) + 4 * begin,
            row_bytes, blocks, source, argument(args, 3), argument(args, 4), following, then,
        )  # fmt: skip

    compute_: Compute = compute
    return compute_


def _single_experts(name: str) -> Compute:
    """One job of types that have no pairs."""
    one = multiply_halves(name)

    @inlined
    def compute(
        args: int, x: int, pairs: int, count: int, numbers: int, piece: int, cut: int, of: int, ranks: int
    ) -> None:
        at = EXPERTS_HEAD + 1
        row_bytes, blocks = argument(args, at + 2), argument(args, at + 3)
        place, half, first, begin, last = _part(args, piece, count, cut, of, ranks)
        if begin >= last:
            return
        table = _place(args, ranks, 0, of)
        weights, matrix = argument(args, table), argument(args, table + 1)
        run, following = weights + _expert(args, pairs, place, numbers) * matrix, 0
        if half == 1:
            following = run + last * row_bytes
        elif place + 1 < count:
            following = weights + _expert(args, pairs, place + 1, numbers) * matrix + first * row_bytes
        item = pairs + 8 * place
        source = x + load_i32(item) * argument(args, 2)
        to = argument(args, at + 5) + load_i32(item + 4) * argument(args, at + 6) + 4 * begin
        one(
            run + begin * row_bytes, last - begin, to, row_bytes, blocks, source, argument(args, 3), argument(args, 4),
            following,
        )  # fmt: skip

    compute_: Compute = compute
    return compute_


def _expert_pairs(name: str) -> Compute:
    """One job by two experts at a time."""
    two, one = multiply_pairs(name), multiply_halves(name)

    @inlined
    def compute(
        args: int, x: int, pairs: int, count: int, numbers: int, piece: int, cut: int, of: int, ranks: int
    ) -> None:
        at = EXPERTS_HEAD + 1
        row_bytes, blocks = argument(args, at + 2), argument(args, at + 3)
        unit, half, first, begin, last = _part(args, piece, (count + 1) >> 1, cut, of, ranks)
        place = 2 * unit
        if begin >= last:
            return
        table = _place(args, ranks, 0, of)
        weights, matrix = argument(args, table), argument(args, table + 1)
        out, out_stride = argument(args, at + 5) + 4 * begin, argument(args, at + 6)
        item = pairs + 8 * place
        source, to = x + load_i32(item) * argument(args, 2), out + load_i32(item + 4) * out_stride
        expert = _expert(args, pairs, place, numbers)
        run = weights + expert * matrix + begin * row_bytes
        if place + 1 == count:
            one(run, last - begin, to, row_bytes, blocks, source, argument(args, 3), argument(args, 4), 0)
            return
        other = _expert(args, pairs, place + 1, numbers)
        following = then = 0
        if half == 1:
            following, then = run + (last - begin) * row_bytes, weights + other * matrix + last * row_bytes
        elif place + 2 < count:
            following = then = weights + _expert(args, pairs, place + 2, numbers) * matrix + first * row_bytes
            if place + 3 < count:
                then = weights + _expert(args, pairs, place + 3, numbers) * matrix + first * row_bytes
        two(
            run, to, source, weights + other * matrix + begin * row_bytes, out + load_i32(item + 12) * out_stride,
            x + load_i32(item + 8) * argument(args, 2), last - begin, row_bytes, blocks, argument(args, 3),
            argument(args, 4), following, then,
        )  # fmt: skip

    compute_: Compute = compute
    return compute_


def _helping(compute: Compute, jobs: int, together: int, most_cut: int) -> Lent:
    """Numba function: all pieces that this rank gets of a single row's `count` items, `together` of them in a unit."""

    @inlined
    def helping(args: int, x: int, pairs: int, numbers: int, count: int, rank: int, ranks: int, step: int) -> bool:
        table = argument(args, _TABLE)
        if table == 0 or argument(args, EXPERTS_HEAD) != jobs:
            return False
        claims, tag = argument(args, table), lap_tag(step)
        cut = most_cut if argument(args, EXPERTS_HEAD + 5) >= _LEAST_CUT * ranks else 0
        pieces = _pieces((count + together - 1) // together, cut)
        for distance in range(ranks):
            of = rank + distance
            if of >= ranks:
                of -= ranks
            if argument(args, _place(args, ranks, 0, of)) == 0:
                continue
            piece = claim(claims + CLAIM_BYTES * of, tag, pieces)
            while piece >= 0:
                compute(args, x, pairs, count, numbers, piece, cut, of, ranks)
                piece = claim(claims + CLAIM_BYTES * of, tag, pieces)
        return True

    helping_: Lent = helping
    return helping_


def lent_experts(name: str) -> Lent:
    """Numba function (args, x, pairs, numbers, count, rank, ranks, step): the `count` items of a single row, if the
    stage has a table of others' rows and there are kernels for its jobs; whether it has done so."""
    two = one = _none()
    if name not in ELEMENT_BYTES:
        two = _helping(_two_jobs(name), 2, 1, _CUT_EXPERTS)
        one = _helping(_single_experts(name), 1, 1, _CUT_EXPERTS)
    if with_pairs(name):
        one = _helping(_expert_pairs(name), 1, 2, _CUT_PAIRS)

    @inlined
    def lent(args: int, x: int, pairs: int, numbers: int, count: int, rank: int, ranks: int, step: int) -> bool:
        done: bool = two(args, x, pairs, numbers, count, rank, ranks, step)
        if not done:
            done = one(args, x, pairs, numbers, count, rank, ranks, step)
        return done

    lent_: Lent = lent
    return lent_


def _none() -> Lent:
    @inlined
    def none(args: int, x: int, pairs: int, numbers: int, count: int, rank: int, ranks: int, step: int) -> bool:
        return False

    none_: Lent = none
    return none_
