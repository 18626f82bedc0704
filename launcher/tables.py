"""How tables and lists of numbers look in the programs that print them for people. Knows nothing of their contents."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 160  # columns where there is no terminal to ask


def new_console() -> Console:
    """Standard output; text is printed as it is (no markup), since it may come from a file."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def new_table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def ranges(numbers: Iterable[int]) -> str:
    """ "0-3, 8" for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
