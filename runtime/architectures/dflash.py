"""Architecture `dflash`: a DSpark draft, which proposes a block of tokens for a `deepseek41` target. Knows no device.

A step has two sorts of rows. Rows at committed positions bring what the target computed there (`features`: means of the
copies that enter some of its layers); they leave one window row in each layer, and nothing else is made of them. Rows
of a block, the O rows of the step, are the token that comes next and masks: they run through the layers together,
seeing the window of committed positions and each other, and choose a token each, one after the other (TokenChain).
The window rows of a block lie in the ring behind the committed ones, which overwrite them later: taking a block back
is nothing to do. Embedding and head are the target's.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from bloomery.runtime.architectures.builder import ProgramBuilder, heads
from bloomery.runtime.architectures.deepseek4_hyper import Deepseek4Hyper, read_draft_hyper
from bloomery.runtime.architectures.deepseek4_layers import (
    FEATURES,
    attend,
    collapse,
    mix,
    mixture,
    spread,
    start_from,
    turn,
)
from bloomery.runtime.architectures.hyper_parameters import positive, read_trunk, refuse
from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.ops_drafts import DraftFacts, TokenChain
from bloomery.runtime.program import CacheWrite, CopyHeads, EmbedRows, MatMul, Program, RmsNorm
from bloomery.runtime.states import RingState
from bloomery.runtime.views import View

TARGET = "deepseek41"
CONFIDENCE = "confidence.out"
"""The buffer of a row's confidence, a logit."""
MOST_ROWS = 16


def draft_facts(model: ModelFile, target: ModelFile) -> DraftFacts:
    """What the target has to be built with. ModelFileError naming the file and key where they do not go together."""
    if target.architecture != TARGET:
        raise ModelFileError(
            f"{target.path}: general.architecture is {target.architecture!r}, but the draft {model.path} is one for "
            f"{TARGET}",
            "give a draft that was made for this model",
        )
    trunk = read_trunk(target)
    block = positive(model, "block_size")
    if block > MOST_ROWS:
        raise refuse(model, "block_size", block, f"at most {MOST_ROWS}")
    stated = model.hyper("target_layers", np.ndarray)
    layers = tuple(int(layer) for layer in stated) if stated.dtype.kind in "iu" else ()
    rising = all(before < after for before, after in pairwise(layers))
    if not layers or not rising or layers[0] < 0 or layers[-1] >= trunk.layers:
        raise refuse(
            model, "target_layers", stated.tolist(), f"ascending layers of the target, 0 to {trunk.layers - 1}"
        )
    mask = model.metadata.get("tokenizer.ggml.mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < trunk.vocabulary:
        raise ModelFileError(
            f"{model.path}: key tokenizer.ggml.mask_token_id is {mask!r}, expected a token of the target, 0 to "
            f"{trunk.vocabulary - 1}",
            "the file is damaged, or the draft was made for another model",
        )
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens != target.metadata.get("tokenizer.ggml.tokens"):
        raise ModelFileError(
            f"{model.path}: its tokens are not those of {target.path}", "give a draft that was made for this model"
        )
    return DraftFacts(block, mask, layers)


def build(model: ModelFile, target: ModelFile) -> Program:
    facts, trunk = draft_facts(model, target), read_trunk(target)
    h = read_draft_hyper(model, trunk)
    b = ProgramBuilder(model, h.trunk.epsilon)
    commit(b, h, facts)
    confidence(b, *block_logits(b, h, facts, target))
    return b.finish(
        vocabulary=trunk.vocabulary,
        context_length=trunk.context_length,
        layers=h.trunk.layers,
        inputs=(FEATURES,),
        reports=(CONFIDENCE,),
        draft=facts,
        target=str(target.path),
    )


def window_of(b: ProgramBuilder) -> str:
    return b.op_name("window")


def commit(b: ProgramBuilder, h: Deepseek4Hyper, facts: DraftFacts) -> None:
    """What a committed position leaves in each layer's window."""
    width, a = h.trunk.width, h.attention
    features = b.buffer(FEATURES, len(facts.target_layers) * width)
    condition = b.buffer("condition", width)
    b.matmul(features, ("fc", condition))
    b.norm("enc.output_norm", condition, condition)
    latent = b.buffer("latent", a.width)
    for layer in range(h.trunk.layers):
        b.layer(layer)
        weight = b.weight("attn_kv", (width, a.width))
        b.emit(MatMul(b.op_name("commit_kv"), condition, (latent,), (weight,), (None,)))
        gain = b.weight("attn_kv_a_norm", (a.width,))
        b.emit(RmsNorm(b.op_name("commit_norm"), latent, latent, gain, b.epsilon))
        turn(b, "rope_commit", latent, a.plain)
        # one row more than `window`: the first row of a block sees a whole window before it
        window = b.add_state(RingState(window_of(b), a.width, a.window + 1))
        b.emit(CacheWrite(b.op_name("commit_window"), latent, window))
    b.prefix = ""


def block_logits(b: ProgramBuilder, h: Deepseek4Hyper, facts: DraftFacts, target: ModelFile) -> tuple[View, View]:
    """(the rows that the logits are made of, before their norm; w1 of the token before each row)."""
    width, vocabulary = h.trunk.width, h.trunk.vocabulary
    table = b.borrow(target, "token_embd.weight", (width, vocabulary))
    hidden = b.buffer("hidden", width)
    b.emit(EmbedRows("token_embd", hidden, table))
    streams = start_from(b, h, b.select_rows(hidden))
    pre: View | None = None
    for layer in range(h.trunk.layers):
        b.layer(layer)
        attn = mix(b, h.connections, "attn", streams)
        x = collapse(b, "attn", streams, pre) if pre else View(streams.buffer, streams.start, streams.width)
        x = b.norm("attn_norm", x, b.buffer("normed", width))
        spread(b, "attn", attention(b, h, x), streams, attn)
        ffn = mix(b, h.connections, "ffn", streams)
        x = b.norm("ffn_norm", collapse(b, "ffn", streams, attn.pre), b.buffer("normed", width))
        spread(b, "ffn", mixture(b, h, layer, x), streams, ffn)
        pre = ffn.pre
    assert pre is not None
    b.prefix = ""
    collapsed = collapse(b, "output", streams, pre)
    base, logits = b.buffer("base_logits", vocabulary), b.buffer("logits", vocabulary)
    normed = b.norm("output_norm", collapsed, b.buffer("normed", width))
    head = b.borrow(target, "output.weight", (width, vocabulary))
    b.emit(MatMul("output", normed, (base,), (head,), (None,)))
    rank = b.model.tensor("markov_w1.weight", (None, vocabulary)).shape[0]
    tables = (b.weight("markov_w1", (rank, vocabulary)), b.weight("markov_w2", (rank, vocabulary)))
    joined = b.buffer("confidence_input", width + rank)
    previous = View(joined.buffer, width, rank)
    chosen = b.buffer("argmax", 1, "i32")
    b.emit(TokenChain("markov", base, logits, previous, chosen, *tables, facts.block))
    return collapsed, previous


def attention(b: ProgramBuilder, h: Deepseek4Hyper, x: View) -> View:
    """A window layer's, but that the rows of a block see each other."""
    a = h.attention
    q_a, latent = b.buffer("q_a", a.q_rank), b.buffer("latent", a.width)
    b.matmul(x, ("attn_q_a", q_a), ("attn_kv", latent))
    b.norm("attn_q_a_norm", q_a, q_a)
    b.norm("attn_kv_a_norm", latent, latent)
    q = b.buffer("q", a.heads * a.width)
    b.matmul(q_a, ("attn_q_b", q))
    queries = heads(q, a.heads, a.width)
    turn(b, "rope_q", queries, a.plain)
    turn(b, "rope_latent", latent, a.plain)
    b.emit(CacheWrite(b.op_name("write_window"), latent, window_of(b)))
    return attend(b, a, queries, window_of(b), a.plain, block=True)


def confidence(b: ProgramBuilder, collapsed: View, previous: View) -> None:
    """A logit for each row: how likely its token is to be accepted."""
    copy = View(previous.buffer, 0, collapsed.width)
    b.emit(CopyHeads("confidence_input", collapsed, copy))
    whole = View(previous.buffer, 0, collapsed.width + previous.width)
    b.matmul(whole, ("conf_proj", b.buffer("confidence", 1)))
