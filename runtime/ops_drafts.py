"""The ops that block drafts add, and what a target leaves for its draft: means of residual copies, chains of tokens.

Owns their fields and meaning in words, in the terms of `program.py`. A *block* is the rows of one slot among the O rows
of a step: neighbours, at consecutive positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.runtime.views import View


@dataclass(frozen=True)
class DraftFacts:
    """Of a program that drafts a block of tokens for a target model: the greatest length of a block, the token that
    stands for those not known yet, and the target's layers whose entering copies it reads (`StreamMean`), in order."""

    block: int
    mask: int
    target_layers: tuple[int, ...]


@dataclass(frozen=True)
class StreamMean:
    """out = mean over the residual copies of a row: what a draft reads of its target."""

    name: str
    streams: View
    out: View


@dataclass(frozen=True)
class TokenChain:
    """The rows of a block, in order, choose a token each; a row's logits know the token before it.

    previous[o] = row t of `embedding` (ne = (rank, V)), where t is the token of row o if it is the first of its block,
    else out[o - 1]; logits[o] = base[o] + weight @ previous[o], weight ne = (rank, V); out[o] (i32) = the index of the
    greatest logit, ties to the lower. A block has at most `block` rows.
    """

    name: str
    base: View
    logits: View
    previous: View
    out: View
    embedding: str
    weight: str
    block: int
