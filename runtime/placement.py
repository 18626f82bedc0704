"""Plans: where every weight lives and which executor runs every op, and whether that fits before anything is loaded.

Owns the plan names, the memory terms in bytes, the choice of a context that fits, and the plan's digest. It starts
nothing and knows no kernels.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from bloomery.runtime.arena import ArenaLayout, ArenaShape, Lowered
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.errors import PlanError
from bloomery.runtime.host_pool import LOGITS_BYTES
from bloomery.runtime.hot_list import HotList
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.program import Program
from bloomery.runtime.row_cache import cache_room
from bloomery.runtime.runtime_files import SHARED_MEMORY
from bloomery.runtime.topology import default_processes

log = logging.getLogger(__name__)

CARD_PLANS = {
    "a": "every layer on one card, the experts that do not fit on the host",
    "b": "layers split over several cards",
    "bp": "plan a, with the other cards as tiers of experts",
}
LEAST_CONTEXT = 256
AUTO_CONTEXT_SHARE = 0.5
"""Of the memory that is left, what caches of a context that nobody asked for may take."""
PROCESS_BYTES = 160 << 20
"""An interpreter with NumPy and the compiled kernels."""
REFERENCE_WEIGHT_BYTES = 2 << 30
"""Bound of the dequantised weights that the reference executor keeps."""


@dataclass(frozen=True)
class MemoryRoom:
    """Bytes that are free: of the machine and its control groups (`memory`), and in /dev/shm (`shared`), which counts
    as memory, too."""

    memory: int
    shared: int


def memory_room() -> MemoryRoom:
    """What is free now."""
    shared = os.statvfs(SHARED_MEMORY)
    return MemoryRoom(available_memory(), shared.f_bavail * shared.f_frsize)


@dataclass(frozen=True)
class MemoryTerm:
    """`place`: "mapped" is page cache of the model file, "shared" lies in /dev/shm, "private" in processes."""

    name: str
    nbytes: int
    place: Literal["mapped", "shared", "private"]


@dataclass(frozen=True)
class Plan:
    """What runs where and what it takes. `processes` is 0 for the reference executor."""

    name: str
    digest: str
    context: int
    slots: int
    prompt_block: int
    processes: int
    terms: tuple[MemoryTerm, ...]

    def total(self, *places: str) -> int:
        """Bytes of the terms in some places; all of them without arguments."""
        return sum(term.nbytes for term in self.terms if not places or term.place in places)

    def term(self, name: str) -> int:
        """Bytes of the term of that name, 0 if there is none."""
        return sum(term.nbytes for term in self.terms if term.name == name)


def chosen_plan(name: str) -> str:
    """The plan behind a name: "cpu" for "cpu" and "auto". Raises PlanError for the others before any file is opened."""
    if name in ("cpu", "auto"):
        return "cpu"
    if name in CARD_PLANS:
        raise PlanError(
            f"plan {name} ({CARD_PLANS[name]}) is not available in this build: the card executor"
            " (bloomery.gpu_worker) is missing",
            "use --plan cpu or leave --plan out",
        )
    raise PlanError(f"there is no plan {name!r}", f"plans are auto, cpu, {', '.join(CARD_PLANS)}")


def make_plan(config: DaemonConfig, program: Program, room: MemoryRoom, hot: HotList | None = None) -> Plan:
    """The plan of a program for the free memory; `hot` ranks the experts, where some are placed before others.
    PlanError names the term that does not fit, and by how much."""
    name = chosen_plan(config.plan)
    if hot is not None and name == "cpu":
        log.info("plan cpu places no experts: %s changes nothing", hot.path)
    if config.slots < 1 or config.prompt_block < 1 or config.context < 0:
        raise PlanError(
            f"slots {config.slots}, prompt block {config.prompt_block} and context {config.context} make no plan",
            "slots and prompt block are at least 1, context is at least 0 (0: chosen)",
        )
    processes = 0 if config.executor == "reference" else config.processes or default_processes()
    wanted = config.context or _fitting_context(config, program, processes, room)
    plan = Plan(
        name=name,
        digest=_digest(name, config, program),
        context=wanted,
        slots=config.slots,
        prompt_block=config.prompt_block,
        processes=processes,
        terms=_terms(config, program, processes, wanted),
    )
    _refuse_what_does_not_fit(plan, room)
    return replace(plan, terms=(*plan.terms, MemoryTerm("snapshots", _snapshot_limit(config, plan, room), "private")))


def _terms(config: DaemonConfig, program: Program, processes: int, context: int) -> tuple[MemoryTerm, ...]:
    max_rows = max(config.prompt_block, config.slots)
    max_out_rows = min(max_rows, max(config.slots, LOGITS_BYTES // (4 * program.vocabulary), 1))
    shape = ArenaShape(context, config.slots, max_rows, max_out_rows, max(1, processes), config.cache_type)
    layout = ArenaLayout(program, shape, Lowered((), 0))
    logits = layout.regions[f"buffer:{program.logits}"].nbytes
    place: Literal["shared", "private"] = "shared" if processes else "private"
    tables = {table.weight for table in engram_tables(program)}
    weights = [tensor for name, tensor in program.weights.items() if name not in tables]
    terms = [MemoryTerm("weights", sum(tensor.nbytes for tensor in weights), "mapped")]
    brings = bool(tables and processes)  # a process of its own, for tables that may be larger than memory
    terms.append(MemoryTerm("processes", PROCESS_BYTES * (1 + processes + brings), "private"))
    if brings:
        room = cache_room(sum(program.weights[name].nbytes for name in tables), config.engram_cache << 20)
        terms.append(MemoryTerm("row cache", room, "private"))
    if not processes:
        elements = sum(4 * _elements(tensor.shape) for tensor in weights)
        terms.append(MemoryTerm("dequantised weights", min(elements, REFERENCE_WEIGHT_BYTES), "private"))
    terms += [  # what a person can ask less of comes last, and is therefore what a refusal names
        MemoryTerm("activations", layout.segments["activations"] - logits, place),
        MemoryTerm("logits", logits, place),
        MemoryTerm("cache", layout.segments["cache"], place),
    ]
    return tuple(terms)


def _elements(shape: Iterable[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _snapshot_limit(config: DaemonConfig, plan: Plan, room: MemoryRoom) -> int:
    """What was asked for, cut to what the plan leaves free: it is filled only as conversations come."""
    left = max(0, room.memory - plan.total())
    return left if config.cache_ram < 0 else min(config.cache_ram << 20, left)


def _fitting_context(config: DaemonConfig, program: Program, processes: int, room: MemoryRoom) -> int:
    """What the file was trained for, or the greatest context whose caches leave a share of the memory free."""
    trained = program.context_length

    def fits(context: int) -> bool:
        terms = _terms(config, program, processes, context)
        cache = sum(term.nbytes for term in terms if term.name == "cache")
        others = sum(term.nbytes for term in terms if term.name != "cache")
        others_shared = sum(term.nbytes for term in terms if term.name != "cache" and term.place == "shared")
        left = room.memory - others
        if processes:
            left = min(left, room.shared - others_shared)
        return cache <= AUTO_CONTEXT_SHARE * left

    if fits(trained):
        return trained
    least, too_much = 0, trained
    while too_much - least > 1:
        middle = (least + too_much) // 2
        least, too_much = (middle, too_much) if fits(middle) else (least, middle)
    return max(least, min(trained, LEAST_CONTEXT))


def _refuse_what_does_not_fit(plan: Plan, room: MemoryRoom) -> None:
    """Adds the terms up in order; the first that no longer fits is named."""
    used = shared = 0
    for term in plan.terms:
        used += term.nbytes
        shared += term.nbytes if term.place == "shared" else 0
        if used > room.memory:
            _refuse(plan, term, used - room.memory, f"{room.memory} bytes are free")
        if shared > room.shared:
            _refuse(plan, term, shared - room.shared, f"/dev/shm has {room.shared} bytes free")


_HINTS = {
    "weights": "free memory, or use a smaller file",
    "cache": "ask for less context (--ctx), fewer sequences (--parallel) or --cache-type f16",
    "activations": "ask for a smaller --prompt-block",
    "logits": "ask for a smaller --prompt-block or fewer sequences (--parallel)",
    "processes": "ask for fewer processes (--threads)",
    "row cache": "ask for a smaller --engram-cache",
    "dequantised weights": "use --executor host",
}


def _refuse(plan: Plan, term: MemoryTerm, shortfall: int, free: str) -> None:
    terms = ", ".join(f"{other.name} {other.nbytes}" for other in plan.terms)
    shape = f"context {plan.context}, {plan.slots} slots"
    raise PlanError(
        f"plan {plan.name} ({shape}) does not fit: {term.name} takes {term.nbytes} bytes, {shortfall} too many; {free};"
        f" terms in bytes: {terms}",
        _HINTS[term.name],
    )


def _digest(name: str, config: DaemonConfig, program: Program) -> str:
    """Hash of everything that says what is computed where. Context, slots and number of processes change no result."""
    weights = [
        (tensor.name, tensor.quant_type.name, list(tensor.shape))
        for tensor in sorted(program.weights.values(), key=lambda tensor: tensor.name)
    ]
    ops = [repr(op) for op in program.ops]
    facts = [name, config.executor, config.cache_type, program.architecture, weights, ops]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
