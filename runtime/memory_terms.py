"""The memory terms of a plan: what takes how many bytes where, from the program and the shape of the caches alone.

Owns names, places and formulas of the terms. It measures nothing; whether they fit is `placement`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from bloomery.runtime.arena import LEAST_SPARE, ArenaLayout, ArenaShape, Lowered
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.expert_staging import AREAS, PINNED_BYTES, area_bytes, staged_layers
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.ops_deepseek4 import IndexRows, TableRows, WindowAttention
from bloomery.runtime.ops_drafts import TokenChain
from bloomery.runtime.program import (
    Attention,
    EmbedRows,
    HeadMatMul,
    MatMul,
    Program,
    Rope,
    RoutedExperts,
    op_weights,
)
from bloomery.runtime.row_cache import cache_room
from bloomery.runtime.row_reader import CACHE_BYTES
from bloomery.runtime.split_program import host_part
from bloomery.runtime.states import element_type

Place: TypeAlias = Literal["card", "mapped", "shared", "private", "disk"]

LOGITS_BYTES: Final = 64 << 20
"""Bound of the logits buffer, unless every slot must have a row."""
PROCESS_BYTES: Final = 160 << 20
"""An interpreter with NumPy and the compiled kernels."""
CARD_PROCESS_BYTES: Final = 512 << 20
"""The same with a CUDA driver in it."""
CARD_CONTEXT_BYTES: Final = 512 << 20
"""What a context takes of a card's memory before anything is allocated, kernels included."""
CARD_MARGIN_BYTES: Final = 128 << 20
"""Left free on a card: rounding of allocations, graphs, what else the driver takes."""
REFERENCE_WEIGHT_BYTES: Final = 2 << 30
"""Bound of the dequantised weights that the reference executor keeps."""
DEFAULT_BLOCK: Final = 512
"""Rows of a step, where nobody has said how many."""
CARD_ROWS: Final = 8
"""Rows that a card computes at once as it decodes; beside a host, always."""
PROMPT_ROWS: Final = 33
"""From so many rows on the card makes prompt blocks of them."""
_PIECE: Final = 512 << 20
_PARTS: Final = 256 << 20
_DEPTH: Final = 64
_SPLIT: Final = 64
_TEAMS: Final = 16
_GROUPS: Final = 128 << 20
_ROUNDING: Final = 512


@dataclass(frozen=True)
class MemoryTerm:
    """`place`: "card" is the card's memory, "mapped" page cache of the model file, "shared" lies in /dev/shm, "private"
    in processes, "disk" is read from the file row by row and takes no memory."""

    name: str
    nbytes: int
    place: Place


def block_of(config: DaemonConfig) -> int:
    """Greatest number of rows of a step, but for slots."""
    return config.prompt_block or DEFAULT_BLOCK


def out_rows_of(config: DaemonConfig, program: Program) -> tuple[int, int]:
    """(greatest R, greatest O) of a step."""
    max_rows = max(block_of(config), config.slots)
    return max_rows, min(max_rows, max(config.slots, LOGITS_BYTES // (4 * program.vocabulary), 1))


def weight_bytes(program: Program) -> tuple[int, int, int]:
    """(dense, experts, tables on disk) in bytes."""
    experts = {name for op in program.ops if isinstance(op, RoutedExperts) for name in op_weights(op)}
    tables = {table.weight for table in engram_tables(program)}
    sizes = {name: tensor.nbytes for name, tensor in program.weights.items()}
    return (
        sum(nbytes for name, nbytes in sizes.items() if name not in experts | tables),
        sum(sizes[name] for name in experts),
        sum(sizes[name] for name in tables),
    )


def looked_up_bytes(program: Program) -> tuple[int, int]:
    """Of weights from which steps take single rows (embeddings, tables that are no n-gram tables): the bytes of all,
    and of those that are not multiplied as well."""
    on_disk = {table.weight for table in engram_tables(program)}
    rows: set[str] = set()
    factors: set[str] = set()
    for op in program.ops:
        match op:
            case EmbedRows():
                rows.add(op.weight)
            case TokenChain():
                rows.add(op.embedding)
                factors.add(op.weight)
            case TableRows():
                rows.add(op.table)
            case MatMul():
                factors.update(op.weights)
            case _:
                pass
    rows -= on_disk
    sizes = {name: program.weights[name].nbytes for name in rows}
    return sum(sizes.values()), sum(sizes[name] for name in rows - factors)


def host_plan_terms(
    config: DaemonConfig, program: Program, processes: int, context: int, own: bool = False
) -> tuple[MemoryTerm, ...]:
    """Plan cpu; `processes` is 0 for the reference executor. With `own` workers have what they multiply in their own
    memory, and take single rows from the mapped file."""
    max_rows, max_out_rows = out_rows_of(config, program)
    shape = ArenaShape(context, config.slots, max_rows, max_out_rows, max(1, processes), config.cache_type)
    layout = ArenaLayout(program, shape, Lowered((), 0))
    logits = layout.regions[f"buffer:{program.logits}"].nbytes
    place: Place = "shared" if processes else "private"
    dense, experts, tables = weight_bytes(program)
    brings = bool(tables and processes)  # a process of its own, for tables that may be larger than memory
    held: Place = "private" if config.host_weights == "copy" and processes else "mapped"
    looked_up, alone = looked_up_bytes(program) if own and held == "private" else (0, 0)
    terms = [
        MemoryTerm("disk tables", tables, "disk"),
        MemoryTerm("looked-up weights", looked_up, "mapped"),
        MemoryTerm("dense weights", dense - alone, held),
        MemoryTerm("host experts", experts, held),
        MemoryTerm("processes", PROCESS_BYTES * (1 + processes + brings), "private"),
    ]
    if brings:
        terms.append(MemoryTerm("row cache", cache_room(tables, config.engram_cache << 20), "private"))
    if not processes:
        on_disk = {table.weight for table in engram_tables(program)}
        kept = [tensor for name, tensor in program.weights.items() if name not in on_disk]
        elements = sum(4 * math.prod(tensor.shape) for tensor in kept)
        terms.append(MemoryTerm("dequantised weights", min(elements, REFERENCE_WEIGHT_BYTES), "private"))
    terms += [  # what a person can ask less of comes last, and is therefore what a refusal names
        MemoryTerm("activations", layout.segments["activations"] - logits, place),
        MemoryTerm("logits", logits, place),
        MemoryTerm("KV cache", layout.segments["cache"], place),
    ]
    return _there(terms)


def card_plan_terms(
    config: DaemonConfig,
    program: Program,
    processes: int,
    context: int,
    tiers: ExpertTiers,
    streams: bool = False,
    handed_rows: int = CARD_ROWS,
    own: bool = False,
) -> tuple[MemoryTerm, ...]:
    """Plan a: everything on one card but the experts that `tiers` has on the host, for which there are `processes`.
    `streams`: blocks of a prompt are computed on the card all the same, to which these experts come. Up to
    `handed_rows` rows are handed to the host at once. With `own` the host's workers have these experts in their own
    memory, and the mapped file is wanted only for those that come to the card."""
    max_rows, max_out_rows = out_rows_of(config, program)
    rows, out_rows = max_rows, max_out_rows
    if (tiers.host_layers and not streams) or max_rows < PROMPT_ROWS:
        rows = out_rows = CARD_ROWS
    handed = min(handed_rows, max_rows) if tiers.host_layers else 0
    shape = ArenaShape(context, config.slots, max_rows, max_out_rows, processes, config.cache_type, 1, handed)
    staging = AREAS * (area_bytes(staged_layers(program, tiers.host_layers)) + _ROUNDING) if streams else 0
    layout = ArenaLayout(host_part(program, tiers.host_layers), shape, Lowered((), 0))
    logits = layout.regions[f"buffer:{program.logits}"].nbytes
    dense, _, tables = weight_bytes(program)
    brought = _brought_bytes(program, rows)
    terms = [
        MemoryTerm("disk tables", tables, "disk"),
        MemoryTerm("row cache", cache_room(tables, CACHE_BYTES) if tables else 0, "private"),
        MemoryTerm("CUDA context", CARD_CONTEXT_BYTES, "card"),
        MemoryTerm("card margin", CARD_MARGIN_BYTES, "card"),
        MemoryTerm("dense weights", dense, "card"),
        MemoryTerm("card activations", _buffer_bytes(program, rows, out_rows) + brought, "card"),
        MemoryTerm("card scratch", card_scratch_bytes(program, context, rows), "card"),
        MemoryTerm("KV cache", card_cache_bytes(config, program, context), "card"),
        MemoryTerm("expert staging", staging, "card"),
        MemoryTerm("card experts", tiers.card_bytes, "card"),
        MemoryTerm("streamed experts", tiers.host_bytes if own and streams else 0, "mapped"),
        MemoryTerm("host experts", tiers.host_bytes, "private" if own else "mapped"),
        MemoryTerm("processes", CARD_PROCESS_BYTES + PROCESS_BYTES * (1 + processes), "private"),
        MemoryTerm("pinned buffers", PINNED_BYTES if streams else 0, "private"),
        MemoryTerm("results", logits if streams else 0, "private"),
        MemoryTerm("activations", layout.segments["activations"] - logits, "shared"),
        MemoryTerm("logits", logits, "shared"),
    ]
    return _there(terms)


def _there(terms: Iterable[MemoryTerm]) -> tuple[MemoryTerm, ...]:
    return tuple(term for term in terms if term.nbytes)


def _buffer_bytes(program: Program, rows: int, out_rows: int) -> int:
    most = {"step": rows, "out": out_rows}
    return sum(most[buffer.rows] * 4 * buffer.width + _ROUNDING for buffer in program.buffers.values())


def _brought_bytes(program: Program, rows: int) -> int:
    """Rows of n-gram tables on a card."""
    buckets = program.engram.buckets if program.engram else 0
    return sum(rows * buckets * table.row_bytes + _ROUNDING for table in engram_tables(program))


def card_cache_bytes(config: DaemonConfig, program: Program, context: int) -> int:
    """All states of all slots as a card holds them."""
    spare = max(block_of(config), config.slots, LEAST_SPARE)
    return sum(
        config.slots * state.rows(context, spare) * state.width * element_type(state, config.cache_type).itemsize
        + _ROUNDING
        for state in program.states.values()
    )


def card_scratch_bytes(program: Program, context: int, rows: int) -> int:
    """A bound of what the card's kernels put between the launches of an op, for steps of so many rows.

    Names are shared by all layers, so the widest op of a kind counts: inputs of products in each of their forms (five
    bytes an element for each of three quantised or rounded ones, two for each of two halves), what every chosen expert
    makes, the parts of attention (of each split of the context; of each team over window and groups), an indexer's
    scores; in prompt blocks also a piece of the weights as f16.
    """
    inputs, experts, attention, window, index, tables, weights = 0, 0, 0, 0, 0, 0, 0
    blocks, splits = rows >= PROMPT_ROWS, -(-context // _SPLIT)
    for op in program.ops:
        halves = 2 * sum(math.prod(program.weights[name].shape) for name in op_weights(op))
        match op:
            case MatMul() | HeadMatMul():
                inputs, weights = max(inputs, op.x.elements), max(weights, halves)
            case RoutedExperts():
                inputs, weights = max(inputs, op.x.elements), max(weights, halves)
                hidden = program.weights[op.gate].shape[1]
                made = 17 * hidden + 4 * op.out.elements + 24  # gate, up, their product in its forms, the result
                experts = max(experts, op.ids.elements * made)
            case Attention():
                parts = op.q.count * splits * op.value_width * 4
                most = max(CARD_ROWS, min(512, _PARTS // parts)) if blocks else CARD_ROWS
                attention = max(attention, most * (parts + op.q.count * splits * 8))
            case WindowAttention():
                parts = op.q.count * _TEAMS * op.q.width * 4
                most = min(max(CARD_ROWS, _GROUPS // parts), max(rows, CARD_ROWS))
                window = max(window, most * (parts + op.q.count * _TEAMS * 8))
            case IndexRows():
                parts = 4 * (-(-context // op.ratio)) * (2 if op.block else 1)
                index = max(index, min(max(CARD_ROWS, _GROUPS // parts), max(rows, CARD_ROWS)) * parts)
            case Rope():
                tables += len(op.frequencies) * 16
            case _:
                pass
    forms = 3 * 5 + 2 * 2
    each = forms * (inputs + _DEPTH) + experts + tables + 1024
    attention += window + index
    return rows * each + attention + (min(weights, _PIECE) + _PIECE // 64 if blocks else 0) + 64 * _ROUNDING
