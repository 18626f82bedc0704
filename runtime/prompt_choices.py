"""Where experts that lie on the host are computed for a block of a prompt: there, or on the card after their weights
have been sent to it. Those that lie on the card stay. And from how many rows on a block whose experts are all sent is
faster than as many groups of a few rows, which meet the host at every layer.

Owns the cost of both ways from bandwidths that were probed, and the rule that comes of it: experts that so many rows of
a block have chosen are streamed. The rule is a function of the plan and the number of rows alone, so that what is
computed where, and with it every bit of a result, depends on nothing that is measured while steps run. Nothing here
moves weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.program import Program, RoutedExperts
from bloomery.runtime.step_work import expected_experts


@dataclass(frozen=True)
class Rates:
    """Of the host's cores together and of the card: bytes a second that they read and operations a second (two a
    multiply-add) on many rows; `link`: bytes a second from pinned memory to the card."""

    host_read: float
    host_operations: float
    link: float
    card_read: float
    card_operations: float


@dataclass(frozen=True)
class Expert:
    """An expert's bytes, and its operations for one row."""

    nbytes: int
    operations: float


@dataclass(frozen=True)
class Choice:
    """Experts with at least `threshold` rows are streamed. `seconds` is what the layer takes then: the longest of the
    three legs, which run at the same time (`link` with the first expert's weights ahead of the card's work on them)."""

    threshold: int
    streamed: int
    seconds: float
    host_seconds: float
    link_seconds: float
    card_seconds: float


_SMALL = 500.0  # means for which e^-mean is no zero
NEVER = 1 << 30
"""A threshold that no expert reaches."""


def choose(expert: Expert, rows: Sequence[int], rates: Rates, card_busy: float) -> Choice:
    """The best threshold for one layer: `rows` are those of each expert on the host (0 for one that nobody chose),
    `card_busy` the seconds that the card works on its own experts and whatever else can be done meanwhile. Of equally
    fast choices the one that streams least."""
    called = sorted((count for count in rows if count > 0), reverse=True)
    host = sum(_host_seconds(expert, count, rates) for count in called)
    link, card = 0.0, card_busy
    best = Choice(NEVER, 0, max(host, card), host, link, card)
    for streamed, count in enumerate(called, 1):
        host -= _host_seconds(expert, count, rates)
        link += expert.nbytes / rates.link
        card += max(expert.nbytes / rates.card_read, count * expert.operations / rates.card_operations)
        if streamed < len(called) and called[streamed] == count:
            continue  # a threshold takes all that have as many rows
        seconds = max(host, link + expert.nbytes / rates.link, card)
        if seconds < best.seconds:
            best = Choice(count, streamed, seconds, max(0.0, host), link, card)
    return best


def least_streamed_rows(tiers: ExpertTiers, link: float, host_read: float, group: int, least: int) -> int:
    """From how many rows on it is faster to send all experts on the host to the card than to hand rows over to the host
    in groups of so many: `least` or more, and a power of two times it, so that what is measured a little differently
    gives the same. `link` and `host_read` in bytes a second."""
    sent = tiers.host_bytes / link
    read = 0.0
    for layer in tiers.layers:
        on_host = layer.experts - len(tiers.on_card[layer.gate])
        read += layer.nbytes * expected_experts(layer.experts, layer.used, group) * on_host / layer.experts
    rows = least
    while -(-rows // group) * read / host_read < sent:
        rows *= 2
    return rows


PARTS = 8
"""Into so many parts the experts on the host are divided when a block leaves some of them there."""
HAND_OFF_SECONDS = 20e-6
HANDED_ROW_SECONDS = 2.5e-6
"""What a hand-off takes, and each of its rows, out and back: the card's two kernels are one block each."""
LEAST_GAIN = 1.25
"""So much faster a block that leaves experts to the host must be to do so."""


def parts_for_the_host(program: Program, tiers: ExpertTiers, rows: int, rates: Rates) -> int:
    """How many of PARTS equal parts of each layer's experts on the host are best computed there in a block of so many
    rows, while the others come to the card; 0 unless that is worth it. As if the router chose evenly."""
    routed = [op for op in program.ops if isinstance(op, RoutedExperts)]
    layers = []
    for op, layer in zip(routed, tiers.layers, strict=True):
        on_host = layer.experts - len(tiers.on_card[layer.gate])
        elements = sum(math.prod(program.weights[name].shape) for name in (op.gate, op.up, op.down))
        expert = Expert(layer.nbytes, 2.0 * elements / layer.experts)
        counts = poisson_quantiles(rows * layer.used / layer.experts, on_host, rows)
        each = sum(_host_seconds(expert, count, rates) for count in counts if count) / max(1, on_host)
        layers.append((on_host, each, layer.nbytes / rates.link))

    def seconds(parts: int) -> float:
        fixed = HAND_OFF_SECONDS + rows * HANDED_ROW_SECONDS if parts else 0.0
        share = parts / PARTS
        return sum(max(n * share * host + fixed, n * (1 - share) * link) for n, host, link in layers if n)

    best = min(range(PARTS + 1), key=seconds)
    return best if seconds(best) * LEAST_GAIN <= seconds(0) else 0


def _host_seconds(expert: Expert, count: int, rates: Rates) -> float:
    return max(expert.nbytes / rates.host_read, count * expert.operations / rates.host_operations)


def stream_threshold(expert: Expert, rates: Rates, *, rows: int, experts: int, on_host: int, used: int) -> Choice:
    """The rule for blocks of so many rows, each of which chooses `used` of a layer's `experts`, `on_host` of which lie
    on the host: `choose` for the counts that even choices are expected to give."""
    mean = rows * used / experts
    counts = poisson_quantiles(mean, on_host, rows)
    of_the_card = poisson_quantiles(mean, experts - on_host, rows)
    busy = sum(
        max(expert.nbytes / rates.card_read, count * expert.operations / rates.card_operations)
        for count in of_the_card
        if count
    )
    return choose(expert, counts, rates, busy)


def poisson_quantiles(mean: float, parts: int, most: int) -> tuple[int, ...]:
    """The middle values of so many equally probable parts of a Poisson distribution, ascending and at most `most`: what
    the row counts of that many experts look like."""
    if mean > _SMALL:
        spread = NormalDist(mean, math.sqrt(mean))
        return tuple(min(most, round(spread.inv_cdf((part + 0.5) / parts))) for part in range(parts))
    found: list[int] = []
    count, below = 0, math.exp(-mean)
    probability = below
    for part in range(parts):
        while below < (part + 0.5) / parts and count < most:
            count += 1
            probability *= mean / count
            below += probability
        found.append(count)
    return tuple(found)
