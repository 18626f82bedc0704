"""How work is shared: which run of units a rank computes; and which row of the step a row of a buffer is."""

from __future__ import annotations

from bloomery.cpu_experts.simd import argument, inlined, load_i32


@inlined
def share_start(units: int, rank: int, ranks: int) -> int:
    """First of the consecutive units that `rank` of `ranks` computes; shares differ by at most one unit."""
    share = units // ranks
    start: int = rank * share + min(rank, units - share * ranks)
    return start


@inlined
def share_end(units: int, rank: int, ranks: int) -> int:
    """One past the last unit that `rank` of `ranks` computes."""
    end: int = share_start(units, rank + 1, ranks)
    return end


@inlined
def step_row(step: int, kind: int, row: int) -> int:
    """The step's row that row `row` of a buffer stands for; `kind` is the index of the buffer's row count in the step
    record (0: it holds every row, 1: the wanted ones)."""
    found: int = load_i32(argument(step, 5) + 4 * row) if kind == 1 else row
    return found
