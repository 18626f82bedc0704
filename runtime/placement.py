"""Plans: where every weight lives and which executor runs every op, and whether that fits before anything is loaded.

Owns the plan names, the choice of a context and of expert tiers that fit, refusals, and the plan's digest. The terms in
bytes are `memory_terms`'s. It starts nothing and knows no kernels.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from bloomery.runtime.cache_support import check_cache_type
from bloomery.runtime.card_probe import CardRoom, may_have_card, probe_cards
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.errors import PlanError
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.host_weights import copied_bytes, copy_pays, own_copy_pays, private_pays
from bloomery.runtime.hot_list import HotList
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.memory_terms import REFERENCE_WEIGHT_BYTES as REFERENCE_WEIGHT_BYTES
from bloomery.runtime.memory_terms import (
    MemoryTerm,
    block_of,
    card_cache_bytes,
    card_plan_terms,
    host_plan_terms,
    weight_bytes,
)
from bloomery.runtime.program import Program
from bloomery.runtime.prompt_streams import PromptStream, choose_stream, machine_rates
from bloomery.runtime.runtime_files import SHARED_MEMORY
from bloomery.runtime.topology import default_processes

log = logging.getLogger(__name__)

PLANS = ("auto", "cpu", "a", "b", "bp")
LATER_PLANS = {
    "b": "layers split over several cards",
    "bp": "plan a, with the other cards as tiers of experts",
}
LEAST_CONTEXT = 256
COPY_SHARE = 0.8
"""Of the free memory, what a program may take whose weights are copied although nobody asked for it."""
AUTO_CONTEXT_SHARE = 0.5
"""Of the memory that is left, what caches of a context that nobody asked for may take."""
TIERED_CONTEXT_SHARE = 0.125
"""The same of a card's memory that experts compete for."""
_KEPT_CORES = 2


@dataclass(frozen=True)
class MemoryRoom:
    """Bytes that are free: of the machine and its control groups (`memory`), in /dev/shm (`shared`), which counts as
    memory, too, and on the cards. `no_card` says why there are none, where somebody asked."""

    memory: int
    shared: int
    cards: tuple[CardRoom, ...] = ()
    no_card: str = ""


def memory_room() -> MemoryRoom:
    """What is free now on the host."""
    shared = os.statvfs(SHARED_MEMORY)
    return MemoryRoom(available_memory(), shared.f_bavail * shared.f_frsize)


def machine_room(plan: str, card_memory: int = 0) -> MemoryRoom:
    """What is free now for this plan; cards are asked for only if it may use one, as if they had `card_memory` bytes at
    most. PlanError if the plan needs a card and there is none."""
    room = memory_room()
    if plan == "cpu" or (plan == "auto" and not may_have_card()):
        return replace(room, no_card="" if plan == "cpu" else "no NVIDIA driver is loaded")
    try:
        cards = probe_cards()
    except PlanError as error:
        if plan != "auto":
            raise
        return replace(room, no_card=error.message)
    return replace(room, cards=tuple(card.limited(card_memory) for card in cards))


@dataclass(frozen=True)
class Plan:
    """What runs where and what it takes. `processes` is 0 for the reference executor and where no expert lies on the
    host. With a card: its number, and the tiers of experts; blocks of at least `stream_rows` rows of a prompt are
    computed on the card, to which the experts on the host come (0: none are; `stream_note` says why), but for those
    that `stream_tiers` (of CardStart) leaves to the host. With `deterministic` there are no blocks. `note` says why
    plan auto is not the one with a card."""

    name: str
    digest: str
    context: int
    slots: int
    prompt_block: int
    processes: int
    terms: tuple[MemoryTerm, ...]
    card: CardRoom | None = None
    tiers: ExpertTiers | None = None
    note: str = ""
    host_weights: str = "mmap"
    stream_rows: int = 0
    stream_tiers: tuple[tuple[int, str], ...] = ()
    stream_note: str = ""
    deterministic: bool = False

    def total(self, *places: str) -> int:
        """Bytes of the terms in some places; of all that take memory without arguments."""
        return sum(term.nbytes for term in self.terms if (term.place in places if places else term.place != "disk"))

    def term(self, name: str) -> int:
        """Bytes of the term of that name, 0 if there is none."""
        return sum(term.nbytes for term in self.terms if term.name == name)


def check_plan_name(name: str) -> None:
    """PlanError for a name that no plan has, or one that is not built yet, before any file is opened."""
    if name in LATER_PLANS:
        raise PlanError(f"plan {name} ({LATER_PLANS[name]}) is not built yet", "use --plan a, or leave --plan out")
    if name not in PLANS:
        raise PlanError(f"there is no plan {name!r}", f"plans are {', '.join(PLANS)}")


def make_plan(config: DaemonConfig, program: Program, room: MemoryRoom, hot: HotList | None = None) -> Plan:
    """The plan of a program for the free memory; `hot` ranks the experts, where some are placed before others.
    PlanError names the term that does not fit, and by how much."""
    check_plan_name(config.plan)
    if config.slots < 1 or config.prompt_block < 0 or config.context < 0:
        raise PlanError(
            f"slots {config.slots}, prompt block {config.prompt_block} and context {config.context} make no plan",
            "slots are at least 1, prompt block and context at least 0 (0: chosen)",
        )
    check_cache_type(program, config.cache_type)
    if config.host_weights not in ("auto", "copy", "mmap"):
        raise PlanError(
            f"host weights {config.host_weights!r} are none of auto, copy and mmap", "use --host-weights auto"
        )
    if config.plan == "a":
        return _card_plan(config, program, room, hot)
    if config.plan == "cpu" or config.executor == "reference":
        return _host_plan(config, program, room, hot, "")
    if not room.cards:
        return _host_plan(config, program, room, hot, room.no_card)
    try:
        return _card_plan(config, program, room, hot)
    except PlanError as error:
        return _host_plan(config, program, room, hot, error.message)


def _host_plan(config: DaemonConfig, program: Program, room: MemoryRoom, hot: HotList | None, note: str) -> Plan:
    if hot is not None:
        log.info("plan cpu places no experts: %s changes nothing", hot.path)
    processes = 0 if config.executor == "reference" else config.processes or default_processes()
    if config.host_weights == "copy" and not processes:
        raise PlanError("the reference executor copies no weights", "leave out --host-weights")
    if config.host_weights == "auto":
        config = replace(config, host_weights="copy" if _copy_fits(config, program, processes, room) else "mmap")

    own = private_pays(copied_bytes(program))

    def terms(context: int) -> tuple[MemoryTerm, ...]:
        return host_plan_terms(config, program, processes, context, own)

    def fits(context: int) -> bool:
        cache, others, shared = _split(terms(context))
        left = room.memory - others
        if processes:
            left = min(left, room.shared - shared)
        return cache <= AUTO_CONTEXT_SHARE * left

    context = config.context or _greatest_context(program.context_length, fits)
    digest = _digest("cpu", config, program, "")
    plan = Plan(
        "cpu",
        digest,
        context,
        config.slots,
        block_of(config),
        processes,
        terms(context),
        note=note,
        host_weights=config.host_weights,
    )
    _refuse_what_does_not_fit(plan, room)
    return _with_snapshots(config, plan, room)


def _copy_fits(config: DaemonConfig, program: Program, processes: int, room: MemoryRoom) -> bool:
    """Whether weights are better copied, and there is plenty of room for that."""
    dense, experts, _ = weight_bytes(program)
    if not processes or not copy_pays(dense + experts, processes):
        return False
    copying, own = replace(config, host_weights="copy"), private_pays(copied_bytes(program))
    least = host_plan_terms(copying, program, processes, config.context or LEAST_CONTEXT, own)
    return _host_bytes(least) <= COPY_SHARE * room.memory


def _host_bytes(terms: Iterable[MemoryTerm]) -> int:
    return sum(term.nbytes for term in terms if term.place not in ("disk", "card"))


def _card_plan(config: DaemonConfig, program: Program, room: MemoryRoom, hot: HotList | None) -> Plan:
    """Everything on the card with the most free memory, experts by the hot list until it is full."""
    if config.executor == "reference":
        raise PlanError("the reference executor runs on the host", "use --plan cpu with --executor reference")
    if not room.cards:
        raise PlanError("plan a needs a card, and there is none", "run with --plan cpu")
    if config.cache_type == "q8_0":
        raise PlanError("caches of q8_0 are for plan cpu: cards have f16, f32", "use --cache-type f16 or --plan cpu")
    card = max(room.cards, key=lambda card: (card.free, -card.number))
    some = config.processes or max(1, default_processes() - _KEPT_CORES)
    whole = ExpertTiers.everything(program)
    none = replace(whole, on_card=dict.fromkeys(whole.on_card, ()))

    def left(context: int, tiers: ExpertTiers, streams: bool = False, block: int = 0) -> int:
        """Bytes of the card that are left for experts; with some on the host steps are short and take less, unless
        experts come to the card."""
        of_block = replace(config, prompt_block=block or config.prompt_block)
        terms = card_plan_terms(of_block, program, 0, context, tiers, streams)
        return card.free - sum(term.nbytes for term in terms if term.place == "card" and term.name != "card experts")

    def fits(context: int) -> bool:
        cache = card_cache_bytes(config, program, context)
        beside = left(context, whole) + cache - whole.card_bytes
        return cache <= max(AUTO_CONTEXT_SHARE * beside, TIERED_CONTEXT_SHARE * (left(context, none) + cache))

    context = config.context or _greatest_context(program.context_length, fits)
    tiers = whole
    if whole.layers and whole.card_bytes > left(context, whole):
        tiers = ExpertTiers.chosen(program, min(left(context, none), whole.card_bytes - 1), hot)
    processes, stream = 0, PromptStream(0, block_of(config), tiers)
    if tiers.host_layers:
        processes, rates = some, machine_rates(some, card.link)
        beside = partial(left, context, none, True)
        if config.deterministic:
            stream = replace(stream, note="blocks round otherwise than decoding does")
        else:
            stream = choose_stream(program, beside, config.prompt_block, context, rates, hot, config.shared_blocks)
        if stream.rows:
            tiers, config = stream.tiers, replace(config, prompt_block=stream.block)
    shape = (config, program, processes, context, tiers, bool(stream.rows), stream.handed_rows)
    own = config.host_weights == "copy" and bool(tiers.host_layers)
    if config.host_weights == "auto" and own_copy_pays(tiers.host_bytes, processes):
        own = _host_bytes(card_plan_terms(*shape, own=True)) <= COPY_SHARE * room.memory
    terms = card_plan_terms(*shape, own=own)
    parts = [tiers.text(), *([str(stream.rows)] if stream.rows else []), *(f"{n}:{ids}" for n, ids in stream.there)]
    parts += ["deterministic"] if config.deterministic else []
    digest = _digest("a", config, program, "/".join(parts))
    plan = Plan("a", digest, context, config.slots, block_of(config), processes, terms, card, tiers)
    plan = replace(plan, stream_rows=stream.rows, stream_tiers=stream.there, stream_note=stream.note)
    plan = replace(plan, deterministic=config.deterministic)
    plan = replace(plan, host_weights="copy" if own else "mmap")
    _refuse_what_does_not_fit(plan, room)
    return _with_snapshots(config, plan, room)


def _with_snapshots(config: DaemonConfig, plan: Plan, room: MemoryRoom) -> Plan:
    """Memory for snapshots: what was asked for, cut to what the plan leaves free. It fills as conversations come."""
    left = max(0, room.memory - plan.total("mapped", "shared", "private"))
    nbytes = left if config.cache_ram < 0 else min(config.cache_ram << 20, left)
    return replace(plan, terms=(*plan.terms, MemoryTerm("snapshots", nbytes, "private")))


def _split(terms: tuple[MemoryTerm, ...]) -> tuple[int, int, int]:
    """(bytes of caches, of everything else that takes memory, of everything else in /dev/shm)."""
    cache = sum(term.nbytes for term in terms if term.name == "KV cache")
    others = [term for term in terms if term.name != "KV cache" and term.place != "disk"]
    return cache, sum(term.nbytes for term in others), sum(term.nbytes for term in others if term.place == "shared")


def _greatest_context(trained: int, fits: Callable[[int], bool]) -> int:
    """What the file was trained for, or the greatest context that fits."""
    if fits(trained):
        return trained
    least, too_much = 0, trained
    while too_much - least > 1:
        middle = (least + too_much) // 2
        least, too_much = (middle, too_much) if fits(middle) else (least, middle)
    return max(least, min(trained, LEAST_CONTEXT))


def _refuse_what_does_not_fit(plan: Plan, room: MemoryRoom) -> None:
    """Adds the terms up in order; the first that no longer fits is named."""
    used = shared = on_card = 0
    for term in plan.terms:
        if term.place == "card":
            assert plan.card is not None
            on_card += term.nbytes
            if on_card > plan.card.free:
                _refuse(plan, term, on_card - plan.card.free, f"{plan.card.name} has {plan.card.free} bytes free")
        elif term.place != "disk":
            used += term.nbytes
            shared += term.nbytes if term.place == "shared" else 0
            if used > room.memory:
                _refuse(plan, term, used - room.memory, f"{room.memory} bytes are free")
            if shared > room.shared:
                _refuse(plan, term, shared - room.shared, f"/dev/shm has {room.shared} bytes free")


_HINTS = {
    "dense weights": "free memory, or use a smaller file",
    "host experts": "free memory, or use a smaller file",
    "streamed experts": "use --host-weights mmap",
    "looked-up weights": "free memory, or use a smaller file",
    "KV cache": "ask for less context (--ctx), fewer sequences (--parallel) or --cache-type f16 or q8_0",
    "activations": "ask for a smaller --prompt-block",
    "logits": "ask for a smaller --prompt-block or fewer sequences (--parallel)",
    "processes": "ask for fewer processes (--threads)",
    "row cache": "ask for a smaller --engram-cache",
    "dequantised weights": "use --executor host",
    "card scratch": "ask for less context (--ctx)",
}


def _refuse(plan: Plan, term: MemoryTerm, shortfall: int, free: str) -> None:
    terms = ", ".join(f"{other.name} {other.nbytes}" for other in plan.terms)
    shape = f"context {plan.context}, {plan.slots} slots"
    hint = _HINTS.get(term.name, "take a card with more free memory")
    raise PlanError(
        f"plan {plan.name} ({shape}) does not fit: {term.name} takes {term.nbytes} bytes, {shortfall} too many; {free};"
        f" terms in bytes: {terms}",
        f"{hint}; or use --plan cpu" if term.place == "card" else hint,
    )


def _digest(name: str, config: DaemonConfig, program: Program, tiers: str) -> str:
    """Hash of everything that says what is computed where. Context, slots and number of processes change no result."""
    weights = [
        (tensor.name, tensor.quant_type.name, list(tensor.shape))
        for tensor in sorted(program.weights.values(), key=lambda tensor: tensor.name)
    ]
    ops = [repr(op) for op in program.ops]
    facts = [name, config.executor, config.cache_type, program.architecture, weights, ops, tiers]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
