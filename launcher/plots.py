"""Plots that programs draw on request: what has to hold before anything is measured, and an empty figure."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bloomery.launcher.command_line import UsageError
from bloomery.runtime.errors import BloomeryError

KINDS = (".png", ".svg", ".pdf")


def check_plot(path: Path, option: str = "--plot") -> None:
    """Whether the plot can be drawn at all. Raises BloomeryError without matplotlib, UsageError for its path."""
    if find_spec("matplotlib") is None:
        raise BloomeryError(f"{option} needs matplotlib, which is not installed", "pip install 'bloomery[plot]'")
    if path.suffix not in KINDS:
        raise UsageError(f"{option} {path}: unknown kind of picture", "end the name in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: its folder does not exist", "make the folder first")


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches that needs no display; `savefig(path, dpi=...)` writes it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
