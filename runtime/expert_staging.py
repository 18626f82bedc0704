"""Staging areas: where the experts of a layer stand on the card while a block of a prompt needs them.

Owns how many areas there are, which layer uses which, and where the three matrices of a layer lie in one. A layer's
experts stand in the order of their ids, so that expert i is in place i. Knows neither devices nor who copies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from bloomery.runtime.program import Program, RoutedExperts

AREAS: Final = 2
"""One is filled while the other is read."""
PINNED_BYTES: Final = 128 << 20
"""Of the buffers through which weights go that the card cannot read where they lie."""
_ALIGN: Final = 256
_BEHIND: Final = 256
"""Bytes that kernels may read past a matrix."""


@dataclass(frozen=True)
class StagedLayer:
    """A routed layer whose experts are brought: its op, its area, and where in the area each of its tensors begins."""

    op: RoutedExperts
    area: int
    places: Mapping[str, int]
    nbytes: int


def staged_layers(program: Program, host_layers: Collection[int]) -> tuple[StagedLayer, ...]:
    """The layers with these numbers, in the program's order; neighbours use different areas."""
    routed = [op for op in program.ops if isinstance(op, RoutedExperts)]
    found = []
    for number, index in enumerate(sorted(host_layers)):
        op, places, end = routed[index], dict[str, int](), 0
        for name in (op.gate, op.up, op.down):
            places[name] = end
            end += -(-(program.weights[name].nbytes + _BEHIND) // _ALIGN) * _ALIGN
        found.append(StagedLayer(op, number % AREAS, places, end))
    return tuple(found)


def area_bytes(layers: Collection[StagedLayer]) -> int:
    """Of one area."""
    return max((layer.nbytes for layer in layers), default=0)
