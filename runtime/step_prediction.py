"""How long a decode step will take, from the bytes that it reads and probed bandwidths, and the bound of any overlap.

Owns the model of a step's time: a card and a host that read at their bandwidths, work on the experts of a layer at the
same time, and meet once a layer. It measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.hot_list import HotList
from bloomery.runtime.program import Program
from bloomery.runtime.step_work import EXPERTS, step_work

HAND_OFF_SECONDS: Final = 8e-6
"""A round from the card to the host and back without work in it: 7.3 to 7.7 us were measured on an H200, 20 KB."""
LAUNCH_SECONDS: Final = 1e-6
"""Of one op on the card: a node of a graph costs 0.65 to 1 us."""
_DECODE_ROWS: Final = 1


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second that the host's cores together and the card read; 0 where there is no figure."""

    host: float = 0.0
    card: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """A step of one row. `bound_seconds` is what no schedule of these bytes can beat: what the card reads alone, and in
    each routed layer the slower of both. `seconds` adds what launches and hand-offs cost."""

    seconds: float
    bound_seconds: float
    card_bytes: float
    host_bytes: float
    hand_offs: int


def predict(
    program: Program,
    tiers: ExpertTiers | None,
    bandwidth: Bandwidth,
    *,
    position: int,
    cache_bytes: int,
    hot: HotList | None = None,
) -> Prediction | None:
    """Decoding one row at a position; `tiers` None is plan cpu. None where a bandwidth that is needed is not known."""
    work = step_work(program, _DECODE_ROWS, position, cache_bytes)
    dense = sum(part.read for kind, part in work.items() if kind != EXPERTS)
    experts = work[EXPERTS].read if EXPERTS in work else 0.0
    if tiers is None:
        if not bandwidth.host:
            return None
        seconds = (dense + experts) / bandwidth.host
        return Prediction(seconds, seconds, 0.0, dense + experts, 0)
    if not bandwidth.card or (tiers.host_layers and not bandwidth.host):
        return None
    bound, host_bytes, card_bytes = dense / bandwidth.card, 0.0, dense
    for layer in tiers.layers:
        called = layer.used * layer.nbytes
        here = called * tiers.hit_share(layer, hot)
        there = called - here
        bound += max(here / bandwidth.card, there / bandwidth.host if there else 0.0)
        host_bytes, card_bytes = host_bytes + there, card_bytes + here
    hand_offs = len(tiers.host_layers)
    fixed = hand_offs * HAND_OFF_SECONDS + len(program.ops) * LAUNCH_SECONDS
    return Prediction(bound + fixed, bound, card_bytes, host_bytes, hand_offs)
