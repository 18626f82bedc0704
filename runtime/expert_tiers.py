"""Expert tiers: which routed experts of each layer lie on the card and which on the host, and how they are chosen.

Owns the choice by a hot list under a bound in bytes, and the text through which processes tell each other. It knows
neither devices nor who computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from bloomery.runtime.hot_list import HotList
from bloomery.runtime.program import Program, RoutedExperts
from bloomery.runtime.tensor_roles import layer_of


@dataclass(frozen=True)
class RoutedLayer:
    """One RoutedExperts op as placement sees it. `nbytes` are those of one expert's three matrices."""

    gate: str
    layer: int
    experts: int
    used: int
    nbytes: int


def routed_ops(program: Program) -> tuple[RoutedLayer, ...]:
    """The program's routed layers in its order."""
    found = []
    for op in program.ops:
        if isinstance(op, RoutedExperts):
            experts = program.weights[op.gate].shape[2]
            nbytes = sum(program.weights[name].nbytes for name in (op.gate, op.up, op.down)) // experts
            found.append(RoutedLayer(op.gate, layer_of(op.gate) or 0, experts, op.ids.elements, nbytes))
    return tuple(found)


def kept_experts(program: Program, tiers: ExpertTiers) -> dict[str, tuple[int, ...]]:
    """For the expert tensors of each routed layer, by name, the ids that lie on the host, ascending."""
    kept = {}
    for op in program.ops:
        if isinstance(op, RoutedExperts):
            there = set(tiers.on_card[op.gate])
            ids = tuple(expert for expert in range(program.weights[op.gate].shape[2]) if expert not in there)
            kept.update(dict.fromkeys((op.gate, op.up, op.down), ids))
    return kept


@dataclass(frozen=True)
class ExpertTiers:
    """`on_card`: the ids that lie on the card, ascending, for each routed layer by the name of its gate tensor."""

    layers: tuple[RoutedLayer, ...]
    on_card: Mapping[str, tuple[int, ...]]

    @property
    def card_bytes(self) -> int:
        return sum(layer.nbytes * len(self.on_card[layer.gate]) for layer in self.layers)

    @property
    def host_bytes(self) -> int:
        return sum(layer.nbytes * layer.experts for layer in self.layers) - self.card_bytes

    @property
    def host_layers(self) -> tuple[int, ...]:
        """Numbers, in the program's order, of the routed layers that have an expert on the host."""
        return tuple(i for i, layer in enumerate(self.layers) if len(self.on_card[layer.gate]) < layer.experts)

    @property
    def share(self) -> float:
        """Share of the experts that lie on the card."""
        return sum(map(len, self.on_card.values())) / max(1, sum(layer.experts for layer in self.layers))

    def text(self) -> str:
        """One hexadecimal number a routed layer, bit i for expert i."""
        return ".".join(f"{sum(1 << i for i in self.on_card[layer.gate]):x}" for layer in self.layers)

    @classmethod
    def of_text(cls, program: Program, text: str) -> Self:
        """The reverse of `text`; "" is everything on the card."""
        layers = routed_ops(program)
        if not text:
            return cls.everything(program)
        masks = [int(part, 16) for part in text.split(".")]
        assert len(masks) == len(layers), "the tiers are those of another model"
        ids = (tuple(i for i in range(layer.experts) if mask >> i & 1) for layer, mask in zip(layers, masks))
        return cls(layers, dict(zip((layer.gate for layer in layers), ids)))

    @classmethod
    def everything(cls, program: Program) -> Self:
        """All experts on the card."""
        layers = routed_ops(program)
        return cls(layers, {layer.gate: tuple(range(layer.experts)) for layer in layers})

    @classmethod
    def chosen(cls, program: Program, room: int, hot: HotList | None) -> Self:
        """The hottest experts of all layers that fit `room` bytes.

        With counts in the hot list the experts that are read most come first, whatever their layer. Without counts
        layers take turns: the first of every layer, then the second of every layer. Without a list ids rank.
        """
        layers = routed_ops(program)
        ranked = []
        for number, layer in enumerate(layers):
            order = hot.order(layer.layer) if hot else tuple(range(layer.experts))
            counts = hot.counts.get(layer.layer, ()) if hot else ()
            total = max(1, sum(counts))
            for rank, expert in enumerate(order[: layer.experts]):
                reads = counts[rank] / total if rank < len(counts) else 0.0
                ranked.append((-reads, rank, number, expert))
        taken: dict[str, list[int]] = {layer.gate: [] for layer in layers}
        for _, _, number, expert in sorted(ranked):
            if layers[number].nbytes <= room:
                room -= layers[number].nbytes
                taken[layers[number].gate].append(expert)
        return cls(layers, {gate: tuple(sorted(ids)) for gate, ids in taken.items()})

    def hit_share(self, layer: RoutedLayer, hot: HotList | None) -> float:
        """The part of a layer's routed calls that meet an expert on the card: by the list's counts, else as if the
        router chose evenly."""
        ids = set(self.on_card[layer.gate])
        counts = hot.counts.get(layer.layer) if hot else None
        if hot is None or not counts or not sum(counts):
            return len(ids) / layer.experts
        return sum(n for expert, n in zip(hot.ranks[layer.layer], counts) if expert in ids) / sum(counts)
