"""Architecture `deepseek41`: DeepSeek-V4.1-Flash. Residual copies joined by lagged hyper-connections; attention over a
window of positions and over chosen compressed rows, which several layers share; n-gram tables ("engrams") that add to
the copies at some layers. Knows no device.

What a layer does is told by the tensors it has (`read_roles`). A layer with a compressor keeps compressed rows and
index keys, one with index queries publishes the list of rows to attend to; the layers after it read the rows and the
list of the latest such layer. The lag: a sublayer collapses the copies with the mix of the sublayer before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.runtime.architectures.builder import ProgramBuilder, heads
from bloomery.runtime.architectures.deepseek4_hyper import Deepseek4Hyper, check_same_type, read_hyper
from bloomery.runtime.architectures.deepseek4_layers import (
    FEATURES,
    Candidates,
    Compressor,
    Product,
    attend,
    choose_rows,
    collapse,
    flat,
    indexer_products,
    keep_rows,
    mix,
    mixture,
    spread,
    start_streams,
    tap,
    turn,
    write_window,
)
from bloomery.runtime.architectures.hyper_parameters import positive, refuse
from bloomery.runtime.engram_hash import EngramHash, read_engram_hash
from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.ops_deepseek4 import EngramGate, EngramRows, TableRows, TokenWrite
from bloomery.runtime.program import Program
from bloomery.runtime.states import RingState
from bloomery.runtime.views import View

CANDIDATE_SOURCE, CANDIDATE_BLOCK, CANDIDATE_BLOCKS = 20, 8, 2048
"""Of files without the attention.candidate_* keys, as the published one."""

ENGRAM_TENSORS = ("engram_embd", "engram_wkv", "engram_k", "engram_q")


@dataclass(frozen=True)
class Role:
    """What one layer does. `rows_of`, `keys_of`, `list_of`: the layers whose compressed rows, index keys and row list
    it reads (-1 on window layers). `source`: it makes compressed rows and index keys; `publisher`: it chooses rows."""

    ratio: int
    source: bool
    publisher: bool
    rows_of: int
    keys_of: int
    list_of: int


def build(model: ModelFile, taps: tuple[int, ...] = ()) -> Program:
    """`taps`: the layers, ascending, of whose entering copies the program reports the means, for a draft."""
    h = read_hyper(model)
    if h.hash_layers:
        raise refuse(model, "hash_layer_count", h.hash_layers, "0")
    engram = read_engram_hash(model, h.trunk.layers, h.trunk.vocabulary)
    check_engram_tensors(model, h, engram)
    roles = read_roles(model, h)
    source, candidates = read_candidates(model, h, roles)
    b = ProgramBuilder(model, h.trunk.epsilon)
    streams = start_streams(b, h)
    tables = find_rows(b, engram) if engram else {}
    states: dict[str, str] = {}
    pre: View | None = None
    for layer, role in enumerate(roles):
        b.layer(layer)
        if engram and layer in tables:
            remember(b, engram, tables[layer], streams)
        tap(b, streams, layer, taps)
        attn = mix(b, h.connections, "attn", streams)
        # before the first sublayer there is no mix: copy 0 stands for all, which are equal but for an engram
        x = collapse(b, "attn", streams, pre) if pre else View(streams.buffer, streams.start, streams.width)
        x = b.norm("attn_norm", x, b.buffer("normed", h.trunk.width))
        limits = candidates if candidates and role.publisher and layer >= source else None
        spread(b, "attn", attention(b, h, role, x, states, limits, layer == source), streams, attn)
        pre = attn.pre
        if layer == h.trunk.layers - 1:
            streams = heads(b.select_rows(flat(streams)), streams.count, streams.width)
            pre = b.select_also(pre)
        ffn = mix(b, h.connections, "ffn", streams)
        x = b.norm("ffn_norm", collapse(b, "ffn", streams, pre), b.buffer("normed", h.trunk.width))
        spread(b, "ffn", mixture(b, h, layer, x), streams, ffn)
        pre = ffn.pre
    assert pre is not None
    b.prefix = ""
    model.tensor("output.weight", (h.trunk.width, h.trunk.vocabulary))
    b.head(collapse(b, "output", streams, pre), h.trunk.vocabulary)
    return b.finish(
        vocabulary=h.trunk.vocabulary,
        context_length=h.trunk.context_length,
        layers=h.trunk.layers,
        read_elsewhere=[name for name in model.tensors if name.endswith(".exp_probs_b_vl.bias")],
        engram=engram,
        reports=(FEATURES,) if taps else (),
        taps=taps,
    )


# -- roles ------------------------------------------------------------------------------------------------------------
def read_roles(model: ModelFile, h: Deepseek4Hyper) -> list[Role]:
    """Walks the layers, keeping the latest source and publisher. ModelFileError naming the tensor where a layer has a
    part of a role only, or reads what no layer before it makes."""
    roles: list[Role] = []
    source = publisher = -1
    for layer, ratio in enumerate(h.ratios):
        if not ratio:
            _absent(model, layer, "attn_compressor_kv", "indexer.attn_k", "indexer.attn_q_b", "indexer.proj")
            roles.append(Role(0, False, False, -1, -1, -1))
            continue
        makes, chooses = _has(model, layer, "attn_compressor_kv"), _has(model, layer, "indexer.attn_q_b")
        together = ["attn_compressor_norm", "indexer.attn_k", "indexer.k_norm"]
        together += ["attn_compressor_gate"] if ratio > 1 else []
        if makes:
            _present(model, layer, "attn_compressor_kv", *together)
            source = layer
        else:
            _absent(model, layer, "attn_compressor_gate", *together)
        if chooses:
            _present(model, layer, "indexer.attn_q_b", "indexer.proj")
            publisher = layer
        else:
            _absent(model, layer, "indexer.proj")
        role = Role(ratio, makes, chooses, source, source, publisher)
        _check_sources(model, layer, role, roles)
        roles.append(role)
    return roles


def _check_sources(model: ModelFile, layer: int, role: Role, before: list[Role]) -> None:
    """The rows are of the layer's own ratio and the list is one of these rows."""
    missing = [
        what for what, of in (("attn_compressor_kv", role.rows_of), ("indexer.attn_q_b", role.list_of)) if of < 0
    ]
    if missing:
        raise _refuse_role(
            model, f"no tensor {missing[0]} in layers 0 to {layer}", f"one for layer {layer} to read from"
        )
    of = role if role.rows_of == layer else before[role.rows_of]
    if of.ratio != role.ratio:
        found = f"layer {layer} of compress ratio {role.ratio} reads layer {role.rows_of} of ratio {of.ratio}"
        raise _refuse_role(model, found, "equal ratios")
    listed = role if role.list_of == layer else before[role.list_of]
    if listed.rows_of != role.rows_of:
        found = f"layer {layer} reads rows of layer {role.rows_of} by a list of layer {role.list_of}"
        raise _refuse_role(model, found, f"a list of rows of layer {role.rows_of}")


def read_candidates(model: ModelFile, h: Deepseek4Hyper, roles: list[Role]) -> tuple[int, Candidates | None]:
    """The layer that chooses candidate blocks, and how; every later publisher chooses among their rows. None if no
    layer does."""
    keys = ("attention.candidate_source_layer_id", "attention.candidate_block_size", "attention.candidate_topk_blocks")
    stated = any(f"{model.architecture}.{key}" in model.metadata for key in keys)
    source = model.hyper(keys[0], int, CANDIDATE_SOURCE)
    candidates = Candidates(positive(model, keys[1], CANDIDATE_BLOCK), positive(model, keys[2], CANDIDATE_BLOCKS))
    publishes = 0 <= source < len(roles) and roles[source].publisher
    if source < 0 or (not publishes and not stated):
        return -1, None
    if not publishes:
        raise refuse(model, keys[0], source, "a layer with indexer.attn_q_b, or a negative number for none")
    fewest = (candidates.keep - 1) * candidates.block + 1
    if fewest < h.indexer.keep:
        expected = f"enough blocks for attention.indexer.top_k, {h.indexer.keep} rows; they may hold but {fewest}"
        raise refuse(model, keys[2], candidates.keep, expected)
    for layer in range(source + 1, len(roles)):
        if roles[layer].publisher and roles[layer].keys_of != roles[source].keys_of:
            expected = f"a layer that chooses among the rows of layer {roles[layer].keys_of}, as layer {layer} does"
            raise refuse(model, keys[0], source, expected)
    return source, candidates


def check_engram_tensors(model: ModelFile, h: Deepseek4Hyper, engram: EngramHash | None) -> None:
    """The tensors stand exactly at the layers that the keys name."""
    sites = {site.layer for site in engram.sites} if engram else set()
    for layer in range(h.trunk.layers):
        if layer in sites:
            _present(model, layer, "engram.layer_ids", *ENGRAM_TENSORS)
        else:
            _absent(model, layer, *ENGRAM_TENSORS)
    check_same_type([model.tensors[f"blk.{layer}.engram_embd.weight"] for layer in sorted(sites)])


def _has(model: ModelFile, layer: int, role: str) -> bool:
    return model.has(f"blk.{layer}.{role}.weight")


def _present(model: ModelFile, layer: int, because: str, *roles: str) -> None:
    for role in roles:
        if not _has(model, layer, role):
            raise _refuse_role(model, f"tensor blk.{layer}.{role}.weight is missing", f"one beside {because}")


def _absent(model: ModelFile, layer: int, *roles: str) -> None:
    for role in roles:
        if _has(model, layer, role):
            raise _refuse_role(model, f"tensor blk.{layer}.{role}.weight stands alone", "none in a layer of this role")


def _refuse_role(model: ModelFile, found: str, expected: str) -> ModelFileError:
    return ModelFileError(
        f"{model.path}: {found}, expected {expected}",
        "the file is damaged or an unsupported variant of its architecture",
    )


# -- engram -----------------------------------------------------------------------------------------------------------
def find_rows(b: ProgramBuilder, engram: EngramHash) -> dict[int, View]:
    """Table rows of every site: they depend on tokens alone, so they come first and can be fetched ahead. Maps a site's
    layer to its row ids."""
    tokens = b.add_state(RingState("tokens", 1, engram.longest, "i32"))
    b.emit(TokenWrite("write_tokens", tokens))
    found = {}
    for number, site in enumerate(engram.sites):
        b.layer(site.layer)
        found[site.layer] = b.buffer(f"engram_ids.{site.layer}", engram.buckets, "i32")
        b.emit(EngramRows(b.op_name("engram_ids"), found[site.layer], tokens, number))
    return found


def remember(b: ProgramBuilder, engram: EngramHash, ids: View, streams: View) -> None:
    """Adds to each copy a share of the value that the token's n-grams have at this layer."""
    copies, width = streams.count, streams.width
    site = next(site for site in engram.sites if b.prefix == f"blk.{site.layer}.")
    rows = b.buffer("engram_rows", engram.buckets * engram.width)
    table = b.weight("engram_embd", (engram.width, site.rows))
    b.emit(TableRows(b.op_name("engram_embd"), ids, rows, table))
    both = b.buffer("engram_kv", (copies + 1) * width)
    b.matmul(rows, ("engram_wkv", both))
    keys, value = heads(both, copies, width), View(both.buffer, copies * width, width)
    gate = b.buffer("engram_gate", copies)
    weights = (b.weight("engram_k", (width, copies)), b.weight("engram_q", (width, copies)))
    b.emit(EngramGate(b.op_name("engram_gate"), streams, keys, value, gate, streams, *weights, b.epsilon))


# -- attention --------------------------------------------------------------------------------------------------------
def attention(
    b: ProgramBuilder,
    h: Deepseek4Hyper,
    role: Role,
    x: View,
    states: dict[str, str],
    candidates: Candidates | None,
    candidate_source: bool,
) -> View:
    """`states` maps "rows" and "keys" to the latest source's states, and is kept so."""
    a, ratio = h.attention, role.ratio
    frequencies = a.compressed if ratio else a.plain
    compressor = Compressor("attn_compressor", a.width, ratio, overlap=False, pooled=ratio > 1, biased=False)
    of_query, of_x = indexer_products(b, h) if role.publisher else (None, None)

    q_a, latent = b.buffer("q_a", a.q_rank), b.buffer("latent", a.width)
    products: list[Product] = [("attn_q_a", q_a), ("attn_kv", latent)]
    products += compressor.products(b) if role.source else ()
    b.matmul(x, *products, *([of_x] if of_x else []))
    q = b.buffer("q", a.heads * a.width)
    normed = b.norm("attn_q_a_norm", q_a, b.buffer("q_a_normed", a.q_rank))
    b.matmul(normed, ("attn_q_b", q), *([of_query] if of_query else []))
    queries = heads(q, a.heads, a.width)
    b.norm("attn_kv_a_norm", latent, latent)
    turn(b, "rope_q", queries, frequencies)
    turn(b, "rope_latent", latent, frequencies)
    window = write_window(b, latent, a)
    if role.source:
        row = compressor.rows(b)
        key = b.buffer("index_key", h.indexer.width)
        b.matmul(row, ("indexer.attn_k", key))  # of the row before it is turned
        b.norm("indexer.k_norm", key, key)
        states["keys"] = keep_rows(b, "index_keys", key, frequencies, ratio)
        states["rows"] = keep_rows(b, "compressed", row, frequencies, ratio)
    if not ratio:
        return attend(b, a, queries, window, frequencies)
    if role.publisher:
        choose_rows(b, h, states["keys"], ratio, candidates=candidates, source=candidate_source)
    chosen = b.buffer("chosen_rows", h.indexer.keep, "i32")
    return attend(b, a, queries, window, frequencies, groups=states["rows"], chosen=chosen, ratio=ratio)
