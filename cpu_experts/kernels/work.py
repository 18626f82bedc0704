"""How work is shared: which run of units a rank computes. Knows nothing of what a unit is."""

from __future__ import annotations

from bloomery.cpu_experts.simd import inlined


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
