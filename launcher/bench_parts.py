"""What head, experts and all else of a layer take of a generated token, on both sides, by differences between files.

Owns the files that differ in one of them and the sums over their times. No engine tells what its parts take while
another's are measured the same way; a file with fewer of them does: half of the used experts, or fewer layers. Mixes
give layers different quant types, so differences are scaled by bytes, not by counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bloomery.launcher.bench_engine import BenchEngine
from bloomery.launcher.bench_peer import LlamaPeer
from bloomery.launcher.bench_trial import Trial, paired_ratios, summary
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.step_work import EXPERTS, HEAD
from bloomery.runtime.synthetic_templates import TEMPLATES, Template

GIGA: Final = 1e9
WHOLE: Final = "whole"
FEWER_EXPERTS: Final = "fewer experts"
FEWER_LAYERS: Final = "fewer layers"
REST: Final = "rest of the layers"


@dataclass(frozen=True)
class Shape:
    """Layers and used experts of a synthetic file; 0 experts for a dense model."""

    layers: int
    used: int


@dataclass
class Variant:
    """A smaller file, open on both sides, and the seconds of its rounds."""

    name: str
    engine: BenchEngine
    peer: LlamaPeer | None
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def forget(self) -> None:
        """The rounds of the trial before."""
        self.ours, self.theirs = [], []


def smaller_shapes(name: str, layers: int) -> dict[str, Shape]:
    """The files beside that of `layers` layers by which its parts are told; 0 layers: the template's."""
    template: Template = TEMPLATES[name]
    layers, used = layers or template.default_layers, template.shapes.used
    fewer = fewer_layers(template, layers)
    shapes = {FEWER_LAYERS: Shape(fewer, used)}
    return {FEWER_EXPERTS: Shape(layers, used // 2), **shapes} if used else shapes


def fewer_layers(template: Template, layers: int) -> int:
    """About half as many, that the architecture and llama.cpp take."""
    if template.peer_layers is None:
        found = max(template.least_layers, layers // 2)
    else:
        found = max((count for count in template.peer_layers if count < layers), default=layers)
    if found >= layers:
        raise BloomeryError(f"{layers} layers: no file with fewer would do", "ask for more with --layers")
    return found


def part_rows(
    trial: Trial,
    ours: Sequence[float],
    theirs: Sequence[float],
    variants: Sequence[Variant],
    bytes_of: Callable[[str], Mapping[str, float]],
    ceiling: float,
) -> dict[str, dict[str, Any]]:
    """For each part: bytes and seconds a token, GB/s and share of the ceiling, the same of the peer, and the ratio of
    the speeds with its spread. `ours` and `theirs` (or none) are seconds of the whole file's rounds; `bytes_of` gives
    a trial's bytes by kind of op for a variant's name; `ceiling` is in bytes a second."""
    needed = {name: bytes_of(name) for name in (WHOLE, *(variant.name for variant in variants))}
    parts = part_bytes(needed[WHOLE])
    sides = {}
    for side, whole, pick in (("ours", ours, _ours), ("theirs", theirs, _theirs)):
        if whole:
            rounds = [
                part_seconds({WHOLE: second, **{v.name: pick(v)[number] for v in variants}}, needed)
                for number, second in enumerate(whole)
            ]
            sides[side] = {part: [found[part] / trial.count for found in rounds] for part in rounds[0]}
    rows: dict[str, dict[str, Any]] = {}
    for part, seconds in sides["ours"].items():
        nbytes = parts[part] / trial.count
        row: dict[str, Any] = {"bytes": nbytes} | _side("", seconds, nbytes, ceiling)
        if others := sides.get("theirs"):
            ratio = summary(list(paired_ratios(others[part], seconds)))
            row |= _side("against_", others[part], nbytes, ceiling)
            row |= {"ratio": ratio.median, "ratio_spread": ratio.spread}
        rows[part] = row
    return rows


def part_bytes(kinds: Mapping[str, float]) -> dict[str, float]:
    """Bytes by kind of op as bytes by part."""
    head, experts = kinds.get(HEAD, 0.0), kinds.get(EXPERTS, 0.0)
    found = {HEAD: head, EXPERTS: experts, REST: sum(kinds.values()) - head - experts}
    return {part: nbytes for part, nbytes in found.items() if nbytes}


def part_seconds(seconds: Mapping[str, float], needed: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Seconds of the whole file's parts, from those of whole files by name, and their bytes by kind of op. What belongs
    to no layer counts as the head's."""
    whole = part_bytes(needed[WHOLE])
    layers = _by_difference(seconds, needed, FEWER_LAYERS, lambda kinds: sum(kinds.values()) - kinds.get(HEAD, 0.0))
    found = {HEAD: seconds[WHOLE] - layers}
    if EXPERTS in whole:
        found[EXPERTS] = _by_difference(seconds, needed, FEWER_EXPERTS, lambda kinds: kinds.get(EXPERTS, 0.0))
    found[REST] = layers - found.get(EXPERTS, 0.0)
    return found


def _by_difference(
    seconds: Mapping[str, float],
    needed: Mapping[str, Mapping[str, float]],
    smaller: str,
    of: Callable[[Mapping[str, float]], float],
) -> float:
    """Seconds of some bytes of the whole file, at the rate at which it reads those that the smaller one lacks."""
    whole, less = of(needed[WHOLE]), of(needed[smaller])
    return (seconds[WHOLE] - seconds[smaller]) * whole / (whole - less)


def _ours(variant: Variant) -> list[float]:
    return variant.ours


def _theirs(variant: Variant) -> list[float]:
    return variant.theirs


def _side(prefix: str, seconds: Sequence[float], nbytes: float, ceiling: float) -> dict[str, float]:
    found = statistics.median(seconds)
    speed = nbytes / found if found > 0 else 0.0
    return {
        f"{prefix}seconds": found,
        f"{prefix}spread": summary(seconds).spread,
        f"{prefix}gbps": speed / GIGA,
        f"{prefix}ceiling_share": speed / ceiling,
    }
