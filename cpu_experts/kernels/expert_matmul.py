"""Matrix products by chosen expert: kernels `experts_<type>`.

Owns how items are grouped by expert and which experts' weights are read together. The products themselves are `matmul`
and `row_matmul`; arguments are laid out by `lowering`.
"""

from __future__ import annotations

from collections.abc import Callable

from bloomery.cpu_experts.kernels.block_dots import with_pairs
from bloomery.cpu_experts.kernels.float_dots import ELEMENT_BYTES
from bloomery.cpu_experts.kernels.layouts import EXPERTS_HEAD, EXPERTS_JOB
from bloomery.cpu_experts.kernels.lent_experts import lent_experts
from bloomery.cpu_experts.kernels.matmul import multiply_of
from bloomery.cpu_experts.kernels.row_matmul import multiply_pairs, multiply_runs
from bloomery.cpu_experts.kernels.work import share_end, share_start
from bloomery.cpu_experts.simd import argument, compiled, inlined, load_i32, store_i32

# Arguments of experts_<type>: EXPERTS_HEAD words, then EXPERTS_JOB words for every weight.
# Head: rows (index of the step's row count), x, x stride, d plane, sums plane, tiles, bytes of a tile area, lists,
# bytes of a list area, ids, ids row stride, used, experts, 1 if x has a row for every item (0: for every row), bytes
# from one rank's x to the next one's (0: all have the same), the word of the arguments at which a table begins that has
# for each id the number of its matrices among the `experts` that are here (0: all are), the word at which the table of
# other ranks' rows begins (`lent_experts`; 0: there is none).
# Job: weight, bytes of an expert, bytes of a row, blocks of a row, output rows, out, out stride.


@inlined
def _number(table: int, chosen: int) -> int:
    number: int = chosen if table == 0 else argument(table, chosen)
    return number


@compiled
def group_by_expert(
    lists: int, ids: int, ids_stride: int, rows: int, used: int, experts: int, x_of_each_item: int, table: int
) -> int:
    """Writes at `lists` int32 starts[experts + 1], then pairs (row of x, item) ordered by expert, then by item.

    `table` is the address of a word for each id, the number of its expert (0: ids are numbers).
    Item number = row * used + place in the row's list of chosen experts, which ends at a negative id. Returns the
    address of the pairs; the number of pairs takes the place of the first start, which is 0.
    """
    pairs = lists + 4 * (experts + 1)
    for expert in range(experts + 1):
        store_i32(lists + 4 * expert, 0)
    for row in range(rows):
        for place in range(used):
            chosen = load_i32(ids + row * ids_stride + 4 * place)
            if chosen < 0:
                break
            counter = lists + 4 * (_number(table, chosen) + 1)
            store_i32(counter, load_i32(counter) + 1)
    for expert in range(experts):
        store_i32(lists + 4 * (expert + 1), load_i32(lists + 4 * (expert + 1)) + load_i32(lists + 4 * expert))
    total = load_i32(lists + 4 * experts)
    for row in range(rows - 1, -1, -1):  # backwards, so that starts[e + 1] ends up as the start of e
        count = 0
        while count < used and load_i32(ids + row * ids_stride + 4 * count) >= 0:
            count += 1
        for place in range(count - 1, -1, -1):
            counter = lists + 4 * (_number(table, load_i32(ids + row * ids_stride + 4 * place)) + 1)
            position = load_i32(counter) - 1
            store_i32(counter, position)
            item = row * used + place
            store_i32(pairs + 8 * position, item if x_of_each_item != 0 else row)
            store_i32(pairs + 8 * position + 4, item)
    store_i32(lists, total)
    return pairs


@compiled
def next_expert(lists: int, expert: int, experts: int) -> int:
    """The next expert after `expert` that `group_by_expert` found items for; `experts` if there is none."""
    found = expert + 1
    while found < experts:
        stop = load_i32(lists) if found + 1 == experts else load_i32(lists + 4 * (found + 2))
        if stop > load_i32(lists + 4 * (found + 1)):
            return found
        found += 1
    return found


@inlined
def items_end(lists: int, expert: int, experts: int) -> int:
    """One past the last item of an expert."""
    end: int = load_i32(lists) if expert + 1 == experts else load_i32(lists + 4 * (expert + 2))
    return end


@inlined
def has_one_item(lists: int, expert: int, experts: int) -> bool:
    if expert >= experts:
        return False
    one: bool = items_end(lists, expert, experts) == load_i32(lists + 4 * (expert + 1)) + 1
    return one


@inlined
def _input(args: int, rank: int) -> int:
    """Address of row 0 of x."""
    x: int = argument(args, 1) + rank * argument(args, 14)
    return x


Together = Callable[[int, int, int, int, int, int, int], int]


def _never() -> Together:
    @inlined
    def together(args: int, expert: int, lists: int, experts: int, pairs: int, rank: int, ranks: int) -> int:
        return expert

    together_: Together = together
    return together_


def _two_jobs(name: str) -> Together:
    """Numba function: two jobs (gate and up) of an expert with one item, if their shapes are equal; returns the next
    expert, or the same one where nothing was done."""
    runs = multiply_runs(name)

    @inlined
    def together(args: int, expert: int, lists: int, experts: int, pairs: int, rank: int, ranks: int) -> int:
        at = EXPERTS_HEAD + 1
        up = at + EXPERTS_JOB
        outputs, row_bytes, blocks = argument(args, at + 4), argument(args, at + 2), argument(args, at + 3)
        if outputs != argument(args, up + 4):
            return expert
        after: int = next_expert(lists, expert, experts)
        first, last = share_start(outputs, rank, ranks), share_end(outputs, rank, ranks)
        if first < last:
            item = pairs + 8 * load_i32(lists + 4 * (expert + 1))
            row = _input(args, rank) + load_i32(item) * argument(args, 2)
            to = load_i32(item + 4)
            gate_weights = argument(args, at) + first * row_bytes
            up_weights = argument(args, up) + first * row_bytes
            following = then = 0
            if after < experts:
                following = gate_weights + after * argument(args, at + 1)
                then = up_weights + after * argument(args, up + 1)
            runs(
                gate_weights + expert * argument(args, at + 1), last - first,
                argument(args, at + 5) + to * argument(args, at + 6) + 4 * first,
                up_weights + expert * argument(args, up + 1), last - first,
                argument(args, up + 5) + to * argument(args, up + 6) + 4 * first,
                row_bytes, blocks, row, argument(args, 3), argument(args, 4), following, then,
            )  # fmt: skip
        return after

    together_: Together = together
    return together_


def _two_experts(name: str) -> Together:
    """Numba function: the only job (down) of two experts with one item each; returns the next expert, or the same one
    where nothing was done."""
    multiply = multiply_pairs(name)

    @inlined
    def place(args: int, x: int, pairs: int, lists: int, expert: int, first: int) -> tuple[int, int]:
        item = pairs + 8 * load_i32(lists + 4 * (expert + 1))
        at = EXPERTS_HEAD + 1
        row = x + load_i32(item) * argument(args, 2)
        return row, argument(args, at + 5) + load_i32(item + 4) * argument(args, at + 6) + 4 * first

    @inlined
    def together(args: int, expert: int, lists: int, experts: int, pairs: int, rank: int, ranks: int) -> int:
        other = next_expert(lists, expert, experts)
        if not has_one_item(lists, other, experts):
            return expert
        at = EXPERTS_HEAD + 1
        outputs, row_bytes, blocks = argument(args, at + 4), argument(args, at + 2), argument(args, at + 3)
        after: int = next_expert(lists, other, experts)
        first, last = share_start(outputs, rank, ranks), share_end(outputs, rank, ranks)
        if first < last:
            weights, matrix = argument(args, at) + first * row_bytes, argument(args, at + 1)
            following = then = 0
            if after < experts:
                following = then = weights + after * matrix
                last_one = next_expert(lists, after, experts)
                if last_one < experts:
                    then = weights + last_one * matrix
            x = _input(args, rank)
            row, out = place(args, x, pairs, lists, expert, first)
            other_row, other_out = place(args, x, pairs, lists, other, first)
            multiply(
                weights + expert * matrix, out, row, weights + other * matrix, other_out, other_row, last - first,
                row_bytes, blocks, argument(args, 3), argument(args, 4), following, then,
            )  # fmt: skip
        return after

    together_: Together = together
    return together_


def experts(name: str) -> Callable[[int, int, int, int], None]:
    """Kernel `experts_<name>`: for every item (row, chosen expert) and job: out[item] = weight[expert] @ x.

    Items are grouped by expert, so that the weights of an expert are read once a step. Each expert's output rows are
    shared among the ranks. Every beginning of a run of rows costs time, so of experts with one item two jobs, or two
    experts of one job, are done together: their runs are twice as long as halves of one. Ranks that lend rows share the
    experts of a single row piece by piece instead (`lent_experts`).
    """
    multiply = multiply_of(name)
    two_jobs = _never() if name in ELEMENT_BYTES else _two_jobs(name)
    two_experts = _two_experts(name) if with_pairs(name) else _never()
    lent = lent_experts(name)

    def kernel(args: int, rank: int, ranks: int, step: int) -> None:
        rows = argument(step, argument(args, 0))
        x, x_stride, d_plane, sums_plane = _input(args, rank), argument(args, 2), argument(args, 3), argument(args, 4)
        tiles = argument(args, 5) + rank * argument(args, 6)
        lists = argument(args, 7) + rank * argument(args, 8)
        used, expert_count = argument(args, 11), argument(args, 12)
        table = 0 if argument(args, 15) == 0 else args + 8 * argument(args, 15)
        pairs = group_by_expert(
            lists, argument(args, 9), argument(args, 10), rows, used, expert_count, argument(args, 13), table
        )
        if rows == 1 and lent(args, x, pairs, table, load_i32(lists), rank, ranks, step):
            return
        jobs = argument(args, EXPERTS_HEAD)
        expert = next_expert(lists, -1, expert_count)
        while expert < expert_count:
            if has_one_item(lists, expert, expert_count):
                done = expert
                if jobs == 2:
                    done = two_jobs(args, expert, lists, expert_count, pairs, rank, ranks)
                elif jobs == 1:
                    done = two_experts(args, expert, lists, expert_count, pairs, rank, ranks)
                if done != expert:
                    expert = done
                    continue
            start, stop = load_i32(lists + 4 * (expert + 1)), items_end(lists, expert, expert_count)
            after = next_expert(lists, expert, expert_count)
            for job in range(jobs):
                at = EXPERTS_HEAD + 1 + job * EXPERTS_JOB
                following = 0
                if job + 1 < jobs:
                    following = argument(args, at + EXPERTS_JOB) + expert * argument(args, at + EXPERTS_JOB + 1)
                elif after < expert_count:
                    following = argument(args, EXPERTS_HEAD + 1) + after * argument(args, EXPERTS_HEAD + 2)
                outputs = argument(args, at + 4)
                first, last = share_start(outputs, rank, ranks), share_end(outputs, rank, ranks)
                if first < last:
                    multiply(
                        argument(args, at) + expert * argument(args, at + 1), argument(args, at + 2),
                        argument(args, at + 3), first, last, x, x_stride, d_plane, sums_plane,
                        pairs + 8 * start, stop - start, argument(args, at + 5), argument(args, at + 6), 0, tiles,
                        following,
                    )  # fmt: skip
            expert = after

    return kernel
