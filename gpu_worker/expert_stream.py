"""Experts on the host on their way to a block of a prompt: layer after layer into two staging areas of the card.

Owns the staging areas, the copies of every layer, and the order between copies and the launches that read what they
bring. A stream of its own copies layer L + 1 into one area while the card's stream computes layer L out of the other:
before a copy the copying stream waits until the launches that read the area before are done (`used`), before these
launches the card's stream waits until the copies are (`copied`). Experts that lie on the card are copied inside it, so
that a staged layer is whole and lies in the order of its ids. Where host bytes come from is `expert_source`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bloomery.gpu_worker.card_memory import CardMemory
from bloomery.gpu_worker.driver import Card, CardError
from bloomery.gpu_worker.expert_source import ExpertSource, HostCopy, expert_source
from bloomery.gpu_worker.launches import CardContext
from bloomery.runtime.expert_staging import AREAS, StagedLayer, area_bytes, staged_layers
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Program


@dataclass(frozen=True)
class _Way:
    """How a layer comes to its area: from the host, and (target, source, bytes) from the card's own memory."""

    layer: StagedLayer
    copies: tuple[HostCopy, ...]
    moves: tuple[tuple[int, int, int], ...]


class StagedContext:
    """The card's memory as blocks see it: layers with experts on the host lie in their staging area, whole."""

    def __init__(
        self, memory: CardMemory, layers: Sequence[StagedLayer], areas: Sequence[int], there: ExpertTiers
    ) -> None:
        """`there` says which experts stand on the card during a block; the others are handed over."""
        self._memory, self._there = memory, there
        self._places = {name: areas[layer.area] + at for layer in layers for name, at in layer.places.items()}
        self._gates = {layer.op.gate for layer in layers}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def weight(self, name: str) -> tuple[int, Tensor]:
        address, tensor = self._memory.weight(name)
        return self._places.get(name, address), tensor

    def slot_map(self, name: str) -> int:
        if name not in self._gates:
            return self._memory.slot_map(name)
        experts, ids = self._memory.weight(name)[1].shape[2], list(self._there.on_card[name])
        places = np.full(experts, -1, np.int32)
        places[ids] = ids
        return self._memory.constant(f"places {places.tobytes().hex()}", places)


@dataclass(frozen=True)
class Kind:
    """How blocks of at least `rows` rows are computed: where their weights are, and the layers that are brought by the
    names of their ops. `alone`: nothing is handed over."""

    rows: int
    context: CardContext
    ways: Mapping[str, _Way]
    alone: bool


class ExpertStream:
    """Use it while the card's context is current. One block at a time: `begin`, then for each of its layers `before`
    and `after` its launches, and `end`. `nbytes` and `ns` add up what blocks brought, and how long that took from the
    first copy to the last. The way for the weights is found by `connect`, once the rest of the card is ready."""

    def __init__(
        self,
        card: Card,
        program: Program,
        memory: CardMemory,
        tiers: ExpertTiers,
        there: Sequence[tuple[int, ExpertTiers]],
    ) -> None:
        """`there`: from how many rows on which experts stand on the card during a block, ascending. PlanError naming
        the staging areas if they do not fit the card's memory."""
        self._card = card
        layers = staged_layers(program, tiers.host_layers)
        areas = [memory.reserve(f"expert staging {number}", area_bytes(layers)) for number in range(AREAS)]
        self._kinds = [
            Kind(
                rows,
                StagedContext(memory, layers, areas, some),
                {layer.op.name: _way(memory, tiers, some, layer, areas[layer.area]) for layer in layers},
                not some.host_layers,
            )
            for rows, some in there
        ]
        cuda = card.cuda
        self._stream = cuda.Stream()
        self._copied, self._used = (
            [cuda.Event(cuda.event_flags.DISABLE_TIMING) for _ in range(AREAS)] for _ in range(2)
        )
        self._read_before = [False] * AREAS
        self._begun, self._ended = cuda.Event(), cuda.Event()
        self.nbytes = self.ns = 0
        self._order: list[_Way] = []
        self._issued = 0
        self._source: ExpertSource | None = None

    def connect(self, progress: Any) -> None:
        """Finds the way for the weights."""
        copies = [copy for kind in self._kinds for way in kind.ways.values() for copy in way.copies]
        self._source = expert_source(self._card, copies, progress)

    def kind(self, rows: int) -> Kind:
        """That of a block of so many rows."""
        return next(kind for kind in reversed(self._kinds) if kind.rows <= rows or kind is self._kinds[0])

    @property
    def handed(self) -> list[Kind]:
        """Those in which the host has a part."""
        return [kind for kind in self._kinds if not kind.alone]

    @property
    def source(self) -> str:
        """Where the weights come from and what that costs, for people."""
        assert self._source is not None
        return self._source.what

    def begin(self, kind: Kind, names: Sequence[str]) -> None:
        """The next block runs the ops of these names, in this order. The first layer's copies start."""
        assert self._source is not None
        self._order, self._issued = [kind.ways[name] for name in names], 0
        self._source.begin([way.copies for way in self._order])
        self._begun.record(self._stream)
        self._issue_to(AREAS if self._source.ahead else 1)

    def before(self, number: int, wait: bool = False) -> None:
        """The block's layer of this number is about to be launched; `wait`: until its copies are made."""
        way = self._order[number]
        try:
            self._issue_to(number + 1)
            for target, origin, nbytes in way.moves:
                self._card.cuda.memcpy_dtod_async(target, origin, nbytes, self._card.stream)
            self._card.stream.wait_for_event(self._copied[way.layer.area])
            if wait:
                self._stream.synchronize()
                self._card.stream.synchronize()
        except self._card.cuda.Error as error:
            raise self._failed(way, error) from error

    def after(self, number: int) -> None:
        """It has been launched. Waits until the layer before has been computed, so that the launches never run further
        ahead of the card than that, and an abort finds little under way."""
        area = self._order[number].layer.area
        self._used[area].record(self._card.stream)
        self._read_before[area] = True
        assert self._source is not None
        if self._source.ahead:
            self._issue_to(number + 1 + AREAS)
        if number and (other := self._order[number - 1].layer.area) != area:
            self._used[other].synchronize()

    def end(self) -> None:
        """The block is over or given up: waits for the copies that are under way."""
        self._stream.synchronize()
        if self._issued:
            self.ns += int(1e6 * self._ended.time_since(self._begun))
            self.nbytes += sum(copy.source.nbytes for way in self._order[: self._issued] for copy in way.copies)
        self._order, self._issued = [], 0
        if self._source:
            self._source.end()

    def _issue_to(self, number: int) -> None:
        """Copies of the layers before this number. One may be issued once the launches that read its area before have
        been made."""
        while self._issued < min(number, len(self._order)):
            self._issue()

    def _issue(self) -> None:
        """Copies of the next layer: they begin once what was read of its area has been."""
        assert self._source is not None
        way = self._order[self._issued]
        area = way.layer.area
        try:
            if self._read_before[area]:
                self._stream.wait_for_event(self._used[area])
            self._source.issue(self._stream)
            self._copied[area].record(self._stream)
        except self._card.cuda.Error as error:
            raise self._failed(way, error) from error
        self._issued += 1
        self._ended.record(self._stream)

    def _failed(self, way: _Way, error: Exception) -> CardError:
        return CardError(
            f"{self._card.name}: {error} (while experts of op {way.layer.op.name} were copied to the card)",
            "the card's context is lost; start it anew",
        )

    def close(self) -> None:
        if self._source:
            try:
                self._stream.synchronize()
            finally:  # also where the context is lost
                self._source.close()
        del self._copied, self._used, self._begun, self._ended, self._stream


def _way(memory: CardMemory, tiers: ExpertTiers, there: ExpertTiers, layer: StagedLayer, area: int) -> _Way:
    ids = tiers.on_card[layer.op.gate]
    brought = sorted(set(there.on_card[layer.op.gate]) - set(ids))
    copies, moves = [], []
    for name, place in layer.places.items():
        address, tensor = memory.weight(name)
        experts = tensor.shape[2]
        each, to = tensor.nbytes // experts, area + place
        for first, last in _runs(brought):
            copies.append(HostCopy(to + first * each, tensor.data[first * each : last * each]))
        for first, last in _runs(ids):
            moves.append((to + first * each, address + ids.index(first) * each, (last - first) * each))
    return _Way(layer, tuple(copies), tuple(moves))


def _runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """(first, after the last) of ascending numbers that follow each other."""
    found: list[tuple[int, int]] = []
    for number in ids:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found
