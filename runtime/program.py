"""The op vocabulary and the program: what one step computes, without saying on which device.

Legend of shapes: R rows of a step, O rows whose logits are wanted (O <= R), D model width, H heads, E experts,
A experts used by a row, F expert hidden width, V vocabulary. A *row* is one token position (token, slot, position);
rows of one step may belong to several slots, and several rows may belong to one slot (a prompt block).

The ops here are those that most architectures use; those of `deepseek4` and `deepseek41` stand in `ops_deepseek4`.

A program is emitted once by an architecture (`runtime/architectures`) and is symbolic in R and O. Executors allocate
every `Buffer` for the greatest R (or O) that they serve. The normative meaning of each op is its function in
`runtime/reference_ops.py` or `runtime/reference_deepseek4.py`; a step may want no logits at all (O = 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from bloomery.runtime.engram_hash import EngramHash
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.ops_deepseek4 import (
    EngramGate,
    EngramRows,
    GroupPool,
    GroupWrite,
    HyperCollapse,
    HyperMix,
    HyperPost,
    IndexRows,
    SoftplusRouter,
    TableRows,
    TokenWrite,
    UnitNorm,
    WindowAttention,
)
from bloomery.runtime.ops_drafts import DraftFacts, StreamMean, TokenChain
from bloomery.runtime.ops_hand_off import HandOffAnswer, HandOffReceive, HandOffSend, HandOffWait
from bloomery.runtime.states import CacheState as CacheState
from bloomery.runtime.states import GroupState as GroupState
from bloomery.runtime.states import RingState as RingState
from bloomery.runtime.views import Buffer as Buffer
from bloomery.runtime.views import View as View


@dataclass(frozen=True)
class EmbedRows:
    """out[r] = row token[r] of `weight` (ne = D, V), dequantised."""

    name: str
    out: View
    weight: str


@dataclass(frozen=True)
class RmsNorm:
    """Each head of x separately: x / sqrt(mean(x^2) + epsilon) * weight of x.width elements. out has x's heads."""

    name: str
    x: View
    out: View
    weight: str
    epsilon: float


@dataclass(frozen=True)
class MatMul:
    """outs[i] = weights[i] @ x (+ biases[i]) for every row; weight ne = (x.elements, outs[i].elements); x contiguous.

    Weights that share an input are one op, so that x is quantised once for each activation type.
    """

    name: str
    x: View
    outs: tuple[View, ...]
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]


@dataclass(frozen=True)
class HeadMatMul:
    """Head by head: out[h] = weight[h] @ x[h]; weight ne = (x.width, out.width, H); x and out have H heads."""

    name: str
    x: View
    out: View
    weight: str


@dataclass(frozen=True)
class Rope:
    """Rotates the first 2*len(frequencies) elements of each head of x by position * frequencies[i]; the rest is copied.

    `pairs` = "neighbours" rotates (x[2i], x[2i+1]) (llama, deepseek2), "halves" rotates (x[i], x[i+n]) with
    n = len(frequencies) (NeoX: qwen3). cos and sin are multiplied by `magnitude` (YaRN). out may be x itself. Negative
    frequencies turn back. The angles are those of position - behind (a group's row stands for its first position).
    """

    name: str
    x: View
    out: View
    frequencies: tuple[float, ...]
    magnitude: float
    pairs: Literal["neighbours", "halves"]
    behind: int = 0


@dataclass(frozen=True)
class CopyHeads:
    """out[h] = x[h] for every head; an x of one head goes to every head of out. x.width = out.width.

    Puts keys together that come in parts (deepseek2 files with an undivided attn_kv_b: each head's own part, and the
    rotated part that all heads share).
    """

    name: str
    x: View
    out: View


@dataclass(frozen=True)
class CacheWrite:
    """state[slot[r], position[r]][start : start + x.elements] = x[r] (heads in order), rounded to the cache type."""

    name: str
    x: View
    state: str
    start: int = 0


@dataclass(frozen=True)
class Attention:
    """Causal attention of each row over its own slot's positions 0..position[r].

    Query head h of H = q.count uses group g = h // (H // kv_heads). Its key at position p is
    keys[slot, p][g*key_width : (g+1)*key_width], its value values[slot, p][g*value_width : (g+1)*value_width].
    (MLA: kv_heads = 1 and values is the keys' state, whose first value_width elements are the latent.)
    out[h] = sum_p softmax_p(scale * q[h].key) * value; q.width = key_width, out.width = value_width.
    """

    name: str
    q: View
    out: View
    keys: str
    values: str
    kv_heads: int
    key_width: int
    value_width: int
    scale: float


@dataclass(frozen=True)
class Router:
    """Chooses `used` of E experts from `logits` (E wide) and their mixing weights; ids is i32 (used), mix f32 (used).

    scores = softmax(logits) or sigmoid(logits); selection = scores + bias. With groups > 1 only the groups_used groups
    with the greatest sum of their two best selections stay. Chosen in descending order of selection, ties to the lower
    id. mix = scores of the chosen, divided by max(sum, 2^-14) if `normalise`, times `scale`.
    """

    name: str
    logits: View
    ids: View
    mix: View
    bias: str | None
    gating: Literal["softmax", "sigmoid"]
    normalise: bool
    scale: float
    groups: int
    groups_used: int


@dataclass(frozen=True)
class RoutedExperts:
    """out = sum over the chosen experts e in rank order of mix[e] * (down[e] @ (silu(gate[e] @ x) * (up[e] @ x))).

    gate, up ne = (D, F, E); down ne = (F, D, E). Only the experts in `ids` are computed; a negative id, which no router
    writes, ends a row's list (host part of a hand-off). With a `limit` the products
    are bounded as SwiGlu has it.
    """

    name: str
    x: View
    ids: View
    mix: View
    out: View
    gate: str
    up: str
    down: str
    limit: float = 0.0


@dataclass(frozen=True)
class SwiGlu:
    """out = silu(gate) * up; with a limit > 0 silu(min(gate, limit)) * clip(up, -limit, limit)."""

    name: str
    gate: View
    up: View
    out: View
    limit: float = 0.0


@dataclass(frozen=True)
class Add:
    """out = x + y; out may be x."""

    name: str
    x: View
    y: View
    out: View


@dataclass(frozen=True)
class SelectRows:
    """Carries on with the O rows whose logits are wanted: out[o] = x[out_rows[o]]; out's buffer has rows="out"."""

    name: str
    x: View
    out: View


@dataclass(frozen=True)
class Argmax:
    """out[o] (i32) = index of the greatest element of x[o], ties to the lower index."""

    name: str
    x: View
    out: View


Op: TypeAlias = (
    EmbedRows
    | RmsNorm
    | MatMul
    | HeadMatMul
    | Rope
    | CopyHeads
    | CacheWrite
    | Attention
    | Router
    | RoutedExperts
    | SwiGlu
    | Add
    | SelectRows
    | Argmax
    | UnitNorm
    | HyperMix
    | HyperCollapse
    | HyperPost
    | TokenWrite
    | EngramRows
    | TableRows
    | EngramGate
    | GroupPool
    | GroupWrite
    | IndexRows
    | WindowAttention
    | SoftplusRouter
    | StreamMean
    | TokenChain
    | HandOffSend
    | HandOffReceive
    | HandOffWait
    | HandOffAnswer
)

WEIGHT_FIELDS = (
    "weight", "weights", "bias", "biases", "gate", "up", "down", "base", "scale", "table", "key_weight", "query_weight",
    "sinks", "embedding",
)  # fmt: skip
STATE_FIELDS = ("state", "keys", "values", "tokens", "window", "groups")
WRITTEN_FIELDS = frozenset(("out", "outs"))
ALSO_WRITTEN: Mapping[type[Op], frozenset[str]] = {
    Router: frozenset(("ids", "mix")),
    SoftplusRouter: frozenset(("ids", "mix")),
    HyperMix: frozenset(("pre", "post", "mixing")),
    EngramRows: frozenset(("ids",)),
    EngramGate: frozenset(("gate",)),
    IndexRows: frozenset(("kept",)),
    TokenChain: frozenset(("logits", "previous")),
}


def op_views(op: Op) -> Iterator[tuple[View, bool]]:
    """Every view of an op with whether the op writes it (a router writes ids and mix, experts read them)."""
    for field in fields(op):
        value = getattr(op, field.name)
        writes = field.name in WRITTEN_FIELDS or field.name in ALSO_WRITTEN.get(type(op), ())
        for view in value if isinstance(value, tuple) else (value,):
            if isinstance(view, View):
                yield view, writes


def written_buffers(ops: Iterable[Op]) -> set[str]:
    """Names of the buffers that ops write to."""
    return {view.buffer for op in ops for view, writes in op_views(op) if writes}


def op_weights(op: Op) -> Iterator[str]:
    """Names of the tensors that an op reads."""
    for field in fields(op):
        if field.name in WEIGHT_FIELDS:
            value = getattr(op, field.name)
            for name in value if isinstance(value, tuple) else (value,):
                if isinstance(name, str):
                    yield name


def op_states(op: Op) -> Iterator[str]:
    """Names of the states that an op reads or writes."""
    for name in STATE_FIELDS:
        value = getattr(op, name, None)
        if isinstance(value, str):
            yield value


@dataclass(frozen=True)
class Program:
    """The ordered ops of one step, with everything they name.

    `logits` names the buffer (O, V) that holds the result, `argmax` the buffer (O, 1) of greedy tokens. `weights` maps
    tensor names to tensors of the model file. `engram` has the constants of EngramRows. `inputs` names the buffers that
    the caller fills (StepRows.inputs), `reports` those that it gets back besides the logits (StepResult.reports);
    `draft` is set for programs that draft blocks for another model. `taps` and `target` are what another process needs
    to build the program again (`architectures.load_program`).
    """

    architecture: str
    buffers: Mapping[str, Buffer]
    states: Mapping[str, CacheState]
    weights: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    vocabulary: int
    context_length: int
    layers: int
    logits: str = "logits"
    argmax: str = "argmax"
    engram: EngramHash | None = None
    inputs: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    draft: DraftFacts | None = None
    taps: tuple[int, ...] = ()
    target: str = ""

    @property
    def hidden(self) -> View | None:
        """What the logits are a product of (the final norm's output, O rows); None if they are made in another way."""
        for op in self.ops:
            if isinstance(op, MatMul) and [view.buffer for view in op.outs] == [self.logits]:
                return op.x
        return None

    def __post_init__(self) -> None:
        written: set[str] = set(self.inputs)
        for op in self.ops:
            for view, writes in op_views(op):
                buffer = self.buffers[view.buffer]
                assert view.end <= buffer.width, f"{op.name}: view past the end of {buffer.name}"
                assert writes or view.buffer in written, f"{op.name} reads {view.buffer} before it is written"
            written |= written_buffers((op,))
            for name in op_weights(op):
                assert name in self.weights, f"{op.name} names tensor {name}, which the program does not hold"
            for state in op_states(op):
                assert state in self.states, f"{op.name} names state {state}"
        assert self.buffers[self.logits].width == self.vocabulary
