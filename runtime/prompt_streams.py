"""How prompts run with experts on the host: from how many rows on blocks are the card's, and what short ones leave it.

Owns these choices, and how long blocks are, as a function of plan, program and bandwidths; what each way costs is
`prompt_choices`'s. It measures nothing and moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.hot_list import HotList
from bloomery.runtime.memory_terms import CARD_ROWS, DEFAULT_BLOCK
from bloomery.runtime.program import Program
from bloomery.runtime.prompt_choices import PARTS, Rates, least_streamed_rows, parts_for_the_host

ASSUMED_LINK: Final = 16e9
ASSUMED_CORE_READ: Final = 7e9
ASSUMED_CORE_OPERATIONS: Final = 1.5e11
"""Bytes a second of a link, and bytes and operations a second of a core, where nobody has measured them."""
STREAM_ROWS: Final = 64
"""A block to which experts come has at least so many rows."""
STREAMED_BLOCKS: Final = (4096, 2048, 1024)
BLOCK_SHARE: Final = 0.75
"""Of the room for experts beside blocks of the default size, what larger ones that nobody asked for must leave."""


@dataclass(frozen=True)
class PromptStream:
    """`rows`: blocks have at least so many (0: there are none, and `note` says why), at most `block`. `tiers` are the
    experts on the card, `there` is CardStart's `stream_tiers`."""

    rows: int
    block: int
    tiers: ExpertTiers
    there: tuple[tuple[int, str], ...] = ()
    note: str = ""

    @property
    def handed_rows(self) -> int:
        """Greatest number of rows that are handed to the host at once."""
        return max([CARD_ROWS, *(rows - 1 for rows, text in self.there if not text)])


def machine_rates(processes: int, link: float) -> Rates:
    """What is known of a machine before anything is loaded. `link` 0: not measured."""
    return Rates(processes * ASSUMED_CORE_READ, processes * ASSUMED_CORE_OPERATIONS, link or ASSUMED_LINK, 1e12, 1e14)


def choose_stream(
    program: Program,
    room: Callable[[int], int],
    block: int,
    context: int,
    rates: Rates,
    hot: HotList | None,
    shared: bool,
) -> PromptStream:
    """`room` gives the bytes of the card that are left for experts beside blocks of so many rows, `block` how many were
    asked for (0: none). `shared`: short blocks may leave experts to the host."""
    rows = block or _longest(room, context)
    whole = sum(layer.nbytes * layer.experts for layer in ExpertTiers.everything(program).layers)
    tiers = ExpertTiers.chosen(program, min(max(0, room(rows)), whole - 1), hot)
    least = least_streamed_rows(tiers, rates.link, rates.host_read, CARD_ROWS, STREAM_ROWS)
    if least > rows:
        note = f"it pays from {least} rows on, and blocks have {rows} (--prompt-block)"
        return PromptStream(0, rows, tiers, note=note)
    if room(rows) < 0:
        note = f"expert staging and what {rows} rows (--prompt-block) take on the card are {-room(rows)} bytes too many"
        return PromptStream(0, rows, tiers, note=note)
    return PromptStream(least, rows, tiers, _there(program, tiers, least, rows, rates, hot) if shared else ())


def _longest(room: Callable[[int], int], context: int) -> int:
    """A block takes about as long however many rows it has, so that many are better, as far as they take little."""
    bare = room(DEFAULT_BLOCK)
    for rows in STREAMED_BLOCKS:
        if DEFAULT_BLOCK < rows <= context and room(rows) >= BLOCK_SHARE * bare > 0:
            return rows
    return DEFAULT_BLOCK


def _there(
    program: Program, tiers: ExpertTiers, least: int, most: int, rates: Rates, hot: HotList | None
) -> tuple[tuple[int, str], ...]:
    """From how many rows on which experts stand on the card during a block: rows double from entry to entry, and each
    is chosen for the middle of its range. () if blocks leave nothing to the host."""
    found: list[tuple[int, str]] = []
    rows, before = least, -1
    while rows <= most:
        parts = parts_for_the_host(program, tiers, rows * 3 // 2, rates)
        if parts != before:
            found.append((rows, _brought(tiers, parts, hot).text() if parts else ""))
        if not parts:
            break
        rows, before = 2 * rows, parts
    else:
        found.append((rows, ""))
    return tuple(found) if found[0][1] else ()


def _brought(tiers: ExpertTiers, parts: int, hot: HotList | None) -> ExpertTiers:
    """What is there during a block that leaves `parts` of PARTS of the experts on the host to it: the coldest."""
    there = {}
    for layer in tiers.layers:
        on_card = set(tiers.on_card[layer.gate])
        order = hot.order(layer.layer) if hot else tuple(range(layer.experts))
        on_host = [expert for expert in order[: layer.experts] if expert not in on_card]
        left = math.ceil(parts * len(on_host) / PARTS)
        there[layer.gate] = tuple(sorted(on_card | set(on_host[: len(on_host) - left])))
    return ExpertTiers(tiers.layers, there)
