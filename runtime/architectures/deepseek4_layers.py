"""Owns the parts of a layer that `deepseek4` and `deepseek41` have in common: hyper-connections, queries and latent,
compressed rows, the indexer's choice, attention with its output, the mixture.

Each adds its ops to a ProgramBuilder and returns the views of its results. Which layer has which of them, and when
copies are collapsed with which mix, is each architecture's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.runtime.architectures.builder import ProgramBuilder, heads
from bloomery.runtime.architectures.deepseek4_hyper import (
    Deepseek4Hyper,
    HyperConnections,
    SparseAttention,
    check_expert_table,
)
from bloomery.runtime.architectures.layers import feed_forward
from bloomery.runtime.ops_deepseek4 import (
    GroupPool,
    GroupWrite,
    HyperCollapse,
    HyperMix,
    HyperPost,
    IndexRows,
    SoftplusRouter,
    WindowAttention,
)
from bloomery.runtime.ops_drafts import StreamMean
from bloomery.runtime.program import Add, CacheWrite, CopyHeads, HeadMatMul, MatMul, Rope, RoutedExperts
from bloomery.runtime.states import GroupState, RingState
from bloomery.runtime.views import View

Product = tuple[str, View]

FEATURES = "features"
"""The buffer in which a target leaves for its draft what that reads of each row."""


# -- hyper-connections ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mix:
    """How one sublayer collapses the copies, spreads its result over them and mixes them; see op HyperMix."""

    pre: View
    post: View
    mixing: View


def start_streams(b: ProgramBuilder, h: Deepseek4Hyper) -> View:
    """Every copy of the residual starts as the token's embedding."""
    return start_from(b, h, b.embed(h.trunk.width, h.trunk.vocabulary))


def start_from(b: ProgramBuilder, h: Deepseek4Hyper, hidden: View) -> View:
    """Every copy of the residual starts as `hidden`."""
    copies, width = h.connections.copies, h.trunk.width
    streams = heads(b.buffer("streams", copies * width), copies, width)
    b.emit(CopyHeads("start_streams", hidden, streams))
    return streams


def flat(streams: View) -> View:
    """The copies one after the other as one head."""
    return View(streams.buffer, streams.start, streams.elements)


def mix(b: ProgramBuilder, c: HyperConnections, part: str, streams: View) -> Mix:
    """The mix of sublayer `part` ("attn" or "ffn") from the copies as they are now."""
    logits = b.buffer("hyper_logits", c.mixes)
    b.matmul(flat(streams), (f"hc_{part}_fn", logits))
    pre = b.buffer(f"pre_{part}", c.copies)
    post, mixing = b.buffer("post", c.copies), b.buffer("mixing", c.copies * c.copies)
    base, scale = b.weight(f"hc_{part}_base", (c.mixes,)), b.weight(f"hc_{part}_scale", (3,))
    numbers = (base, scale, b.epsilon, c.epsilon, c.rounds)
    b.emit(HyperMix(b.op_name(f"hc_{part}_mix"), streams, logits, pre, post, mixing, *numbers))
    return Mix(pre, post, mixing)


def collapse(b: ProgramBuilder, role: str, streams: View, pre: View) -> View:
    """The copies as one vector, weighted by `pre`."""
    out = b.buffer("collapsed", streams.width)
    b.emit(HyperCollapse(b.op_name(f"{role}_collapse"), streams, pre, out))
    return out


def tap(b: ProgramBuilder, streams: View, layer: int, taps: tuple[int, ...]) -> None:
    """Leaves the mean of the copies that enter a layer for a draft, if it is one of those that the draft reads."""
    if layer in taps:
        features = b.buffer(FEATURES, len(taps) * streams.width)
        out = View(features.buffer, taps.index(layer) * streams.width, streams.width)
        b.emit(StreamMean(b.op_name("tap"), streams, out))


def spread(b: ProgramBuilder, part: str, y: View, streams: View, how: Mix) -> None:
    """Adds a sublayer's result to the copies, after they are mixed."""
    b.emit(HyperPost(b.op_name(f"hc_{part}_post"), y, streams, how.post, how.mixing, streams))


# -- attention --------------------------------------------------------------------------------------------------------
def tail(view: View, rotated: int) -> View:
    """The last `rotated` elements of each head: those that turn."""
    return View(view.buffer, view.start + view.width - rotated, rotated, view.count, view.stride or view.width)


def turn(b: ProgramBuilder, role: str, view: View, frequencies: tuple[float, ...], behind: int = 0) -> None:
    """Rotates the tails of the heads of `view` in place."""
    part = tail(view, 2 * len(frequencies))
    b.emit(Rope(b.op_name(role), part, part, frequencies, 1.0, "neighbours", behind))


def write_window(b: ProgramBuilder, latent: View, a: SparseAttention) -> str:
    """Keeps the latent for the rows that see this one through the window; the name of the state."""
    window = b.add_state(RingState(b.op_name("window"), a.width, a.window))
    b.emit(CacheWrite(b.op_name("write_window"), latent, window))
    return window


@dataclass(frozen=True)
class Compressor:
    """One row of `width` for every `ratio` positions. The tensors are `<stem>_kv`, `_gate`, `_ape`, `_norm`. `overlap`:
    a row is made from two groups; `pooled`: there is a gate, else a row is its position's own value; `biased`: the gate
    has a bias by the place in the group."""

    stem: str
    width: int
    ratio: int
    overlap: bool
    pooled: bool
    biased: bool

    @property
    def projected(self) -> int:
        return self.width * (2 if self.overlap else 1)

    def _projection(self, b: ProgramBuilder, what: str) -> View:
        return b.buffer(f"{self.stem}_{what}{'_of_two' if self.overlap else ''}", self.projected)

    def products(self, b: ProgramBuilder) -> tuple[Product, ...]:
        """What the layer's normed input is multiplied with."""
        values = (f"{self.stem}_kv", self._projection(b, "values"))
        if not self.pooled:
            return (values,)
        return values, (f"{self.stem}_gate", self._projection(b, "scores"))

    def rows(self, b: ProgramBuilder) -> View:
        """The normed rows of the groups that end here, not yet turned."""
        row = values = self._projection(b, "values")
        if self.pooled:
            row, scores = b.buffer(f"{self.stem}_row", self.width), self._projection(b, "scores")
            bias = b.weight(f"{self.stem}_ape", (self.projected, self.ratio)) if self.biased else None
            span = self.ratio * (2 if self.overlap else 1)
            slots = b.add_state(RingState(b.op_name(f"{self.stem}_slots"), 2 * self.projected, span, "f32"))
            name = b.op_name(f"{self.stem}_pool")
            b.emit(GroupPool(name, values, scores, row, slots, self.ratio, self.overlap, bias))
        return b.norm(f"{self.stem}_norm", row, row)


def keep_rows(b: ProgramBuilder, role: str, row: View, frequencies: tuple[float, ...], ratio: int) -> str:
    """Turns the rows of whole groups by the angle of their first position and keeps them; the name of the state."""
    turn(b, f"rope_{role}", row, frequencies, ratio - 1)
    state = b.add_state(GroupState(b.op_name(role), row.width, ratio))
    b.emit(GroupWrite(b.op_name(f"write_{role}"), row, state, ratio))
    return state


@dataclass(frozen=True)
class Candidates:
    """Two-level choice: blocks of `block` rows, of which `keep` stay."""

    block: int
    keep: int


def choose_rows(
    b: ProgramBuilder,
    h: Deepseek4Hyper,
    keys: str,
    ratio: int,
    *,
    candidates: Candidates | None = None,
    source: bool = False,
) -> View:
    """The list of rows that this layer and those after it attend to. `source` leaves the kept blocks to later layers,
    which choose among their rows."""
    i = h.indexer
    queries = heads(b.buffer("index_queries", i.heads * i.width), i.heads, i.width)
    turn(b, "rope_index_queries", queries, h.attention.compressed)
    chosen = b.buffer("chosen_rows", i.keep, "i32")
    blocks = b.buffer("kept_blocks", candidates.keep, "i32") if candidates else None
    b.emit(
        IndexRows(
            b.op_name("index_rows"),
            queries,
            b.buffer("index_weights", i.heads),
            chosen,
            keys,
            ratio,
            i.scale,
            candidates.block if candidates else 0,
            blocks if source else None,
            None if source else blocks,
        )
    )
    return chosen


def indexer_products(b: ProgramBuilder, h: Deepseek4Hyper) -> tuple[Product, Product]:
    """(product of the query's latent, product of the layer's normed input)."""
    i = h.indexer
    queries, weights = b.buffer("index_queries", i.heads * i.width), b.buffer("index_weights", i.heads)
    return ("indexer.attn_q_b", queries), ("indexer.proj", weights)


def attend(
    b: ProgramBuilder,
    a: SparseAttention,
    q: View,
    window: str,
    frequencies: tuple[float, ...],
    *,
    groups: str | None = None,
    chosen: View | None = None,
    ratio: int = 1,
    block: bool = False,
) -> View:
    """Attention over window and group rows (of a `block`: see WindowAttention), turned back by the row's own angle (a
    turned key served as value), then the output projection in two steps, the first group by group."""
    attended = heads(b.buffer("attended", a.heads * a.width), a.heads, a.width)
    sinks = b.weight("attn_sinks", (a.heads,))
    name = b.op_name("attention")
    b.emit(WindowAttention(name, q, attended, window, a.window, groups, chosen, ratio, sinks, a.scale, block))
    turn(b, "rope_back", attended, tuple(-f for f in frequencies))
    inputs = a.heads // a.groups * a.width
    grouped = b.buffer("grouped", a.groups * a.group_rank)
    weight = b.grouped_weight("attn_output_a", (inputs, a.group_rank, a.groups))
    whole = View(attended.buffer, 0, attended.elements)
    into, out = heads(whole, a.groups, inputs), heads(grouped, a.groups, a.group_rank)
    b.emit(HeadMatMul(b.op_name("attn_output_a"), into, out, weight))
    projected = b.buffer("projected", b.model.tensor(f"{b.prefix}attn_norm.weight", (None,)).shape[0])
    b.matmul(grouped, ("attn_output_b", projected))
    return projected


# -- mixture ----------------------------------------------------------------------------------------------------------
def mixture(b: ProgramBuilder, h: Deepseek4Hyper, layer: int, x: View) -> View:
    """The chosen experts' weighted sum plus the shared expert. The first `hash_layers` layers look their experts up by
    token; the others choose by score and bias."""
    m = h.mixture
    logits = b.buffer("router_logits", m.count)
    ids, mixing = b.buffer("expert_ids", m.used, "i32"), b.buffer("expert_mix", m.used)
    router = b.weight("ffn_gate_inp", (x.width, m.count))
    b.emit(MatMul(b.op_name("ffn_gate_inp"), x, (logits,), (router,), (None,)))
    bias = table = None
    if layer < h.hash_layers:
        table = b.weight("ffn_gate_tid2eid", (m.used, h.trunk.vocabulary))
        check_expert_table(b.model.tensors[table], m.count)
    else:
        bias = b.weight("exp_probs_b", (m.count,), "bias")
    b.emit(SoftplusRouter(b.op_name("router"), logits, ids, mixing, bias, table, m.normalise, m.scale))
    out = b.buffer("ffn", x.width)
    into, back = (x.width, m.width, m.count), (m.width, x.width, m.count)
    weights = (b.weight("ffn_gate_exps", into), b.weight("ffn_up_exps", into), b.weight("ffn_down_exps", back))
    b.emit(RoutedExperts(b.op_name("routed_experts"), x, ids, mixing, out, *weights, m.limits[layer]))
    shared = feed_forward(b, x, m.shared_width, "_shexp", m.shared_limits[layer])
    b.emit(Add(b.op_name("add_shexp"), out, shared, out))
    return out
