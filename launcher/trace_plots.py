"""The plots of a trace: how unevenly experts are used, and what row caches of several sizes hold.

Owns the pictures. What was counted is `trace_recorder.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bloomery.launcher.plots import new_figure
from bloomery.launcher.trace_recorder import CacheRates, Counts
from bloomery.runtime.hot_list import HotList

_DOTS: Final = 130  # an inch, of a png


def plot_usage(path: Path, hot: HotList, texts: Mapping[str, Counts]) -> None:
    """Left: each layer's experts by rank, as multiples of an even share. Right: the share of picks that the hottest
    experts of the list take, of each text, mean over layers with the range shaded."""
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    layers = list(hot.ranks)
    usage = np.array([hot.counts[layer] for layer in layers], np.float64)
    multiples = usage / np.maximum(1.0, usage.sum(axis=1, keepdims=True)) * hot.experts
    picture = left.imshow(multiples, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    left.set_title(f"{hot.model}: use of experts", fontsize=10)
    left.set_xlabel("expert, by rank in its layer")
    left.set_ylabel("layer")
    step = -(-len(layers) // 16)
    left.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    figure.colorbar(picture, ax=left, label="times an even share")
    kept = np.arange(hot.experts + 1)
    for name, counts in texts.items():
        shares = covered(hot, counts)
        (line,) = right.plot(kept, 100 * shares.mean(axis=0), label=name)
        right.fill_between(kept, 100 * shares.min(axis=0), 100 * shares.max(axis=0), alpha=0.15, color=line.get_color())
    right.plot(kept, 100 * kept / hot.experts, linestyle=":", color="gray", label="even use")
    right.set_title("picks that the hottest take (mean, least, most of layers)", fontsize=10)
    right.set_xlabel("experts of each layer, hottest first")
    right.set_ylabel("share of picks, %")
    _finish(figure, right, path)


def covered(hot: HotList, counts: Counts) -> NDArray[np.float64]:
    """(layers, experts + 1): the share of a text's picks that the first n experts of the list take."""
    rows = []
    for layer in hot.ranks:
        ordered = counts[layer][list(hot.order(layer))].astype(np.float64)
        rows.append(np.concatenate([[0.0], np.cumsum(ordered)]) / max(1.0, ordered.sum()))
    return np.array(rows)


def plot_caches(path: Path, model: str, texts: Mapping[str, CacheRates]) -> None:
    """Hit rate over the size of the cache, of each text; dotted: what a cache of any size could hold."""
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    for name, found in texts.items():
        sizes = [size / (1 << 20) for size in found.rates]
        (line,) = axes.plot(sizes, [100 * rate for rate in found.rates.values()], marker="o", label=name)
        axes.axhline(100 * found.ceiling, linestyle=":", color=line.get_color(), label=f"{name}: every row kept")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}" if size >= 1 else f"1/{1 / size:g}")
    axes.set_ylim(0, 100)
    axes.set_title(f"{model}: n-gram table rows found in the row cache", fontsize=10)
    axes.set_xlabel("size of the cache, MiB")
    axes.set_ylabel("hit rate, %")
    _finish(figure, axes, path)


def _finish(figure: Any, axes: Any, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)
    figure.savefig(path, dpi=_DOTS)
