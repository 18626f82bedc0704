"""Engram row ids: which rows of the n-gram tables belong to a token, from it and the tokens before it.

Owns the constants of the hash (metadata keys `<architecture>.engram.*`), their checks and the arithmetic. Knows neither
the tables' rows nor who reads them.

A token's context is its own compressed id (`token_map`) and those of the longest - 1 tokens before it, newest first;
where there is none, before the sequence's start or behind an image, `pad` stands, which is itself a compressed id. With
acc = c[0]*m[0], every order n = 2, 3, ... takes acc ^= c[n-1]*m[n-1] (64 bits), and each of its heads has one row:
acc mod prime + offset. The heads of all orders tile the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile

NO_TOKEN = -1
"""In a history: nothing is there, neither a token before the start nor one of an image."""

_KEYS = (
    "layer_ids", "head_count", "key_length", "max_ngram_size", "multipliers", "primes", "offsets", "token_map",
    "pad_id",
)  # fmt: skip
_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class EngramSite:
    """The hash of the table at one layer: a multiplier for each place of the context; for each head of each order, in
    that order, its prime and the first of its rows. `rows` is the sum of the primes."""

    layer: int
    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.primes)


@dataclass(frozen=True, eq=False)
class EngramHash:
    """`heads` rows for each order from 2 to `longest`; table rows of `width` elements; `token_map` (V) uint32."""

    sites: tuple[EngramSite, ...]
    heads: int
    longest: int
    width: int
    pad: int
    token_map: NDArray[np.uint32]

    @property
    def buckets(self) -> int:
        """Rows of one token at one site."""
        return (self.longest - 1) * self.heads

    def contexts(self, history: ArrayLike) -> NDArray[np.uint64]:
        """Compressed ids (R, longest) of token histories (R, longest), newest first, NO_TOKEN where nothing is: from
        there on every place is `pad`."""
        tokens = np.asarray(history, dtype=np.int64)
        assert tokens.ndim == 2 and tokens.shape[1] == self.longest
        blocked = np.logical_or.accumulate(tokens < 0, axis=1)
        compressed = self.token_map[np.where(blocked, 0, tokens)].astype(np.uint64)
        return np.where(blocked, np.uint64(self.pad), compressed)

    def row_ids(self, site: int, history: ArrayLike) -> NDArray[np.int32]:
        """Table rows (R, buckets) at site number `site` for histories as in `contexts`."""
        return self.rows_of_contexts(site, self.contexts(history))

    def rows_of_contexts(self, site: int, contexts: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Table rows (R, buckets) for contexts of compressed ids (R, longest), newest first."""
        constants = self.sites[site]
        multipliers = np.asarray(constants.multipliers, dtype=np.uint64)
        primes = np.asarray(constants.primes, dtype=np.uint64).reshape(self.longest - 1, self.heads)
        offsets = np.asarray(constants.offsets, dtype=np.uint64).reshape(self.longest - 1, self.heads)
        hashed = np.bitwise_xor.accumulate(contexts * multipliers, axis=1)[:, 1:, None]
        return (hashed % primes + offsets).reshape(len(contexts), self.buckets).astype(np.int32)


def histories(tokens: ArrayLike, longest: int) -> NDArray[np.int64]:
    """(n, longest): every token of a whole sequence and those before it, newest first, NO_TOKEN before the start."""
    sequence = np.asarray(tokens, dtype=np.int64)
    padded = np.concatenate([np.full(longest - 1, NO_TOKEN, dtype=np.int64), sequence])
    return np.lib.stride_tricks.sliding_window_view(padded, longest)[:, ::-1].copy()


def read_engram_hash(model: ModelFile, layers: int, vocabulary: int) -> EngramHash | None:
    """The hash constants of a model file of `layers` layers, or None if it has no engram keys.

    Raises ModelFileError naming the key where they are incomplete, of the wrong number, or do not tile the tables.
    """
    prefix = f"{model.architecture}.engram."
    present = [key for key in _KEYS if prefix + key in model.metadata]
    if not present:
        return None
    layer_ids = _whole(model, "layer_ids")
    heads, longest, width = (_count(model, key) for key in ("head_count", "max_ngram_size", "key_length"))
    if longest < 2:
        raise _refuse(model, "max_ngram_size", longest, "at least 2")
    if not layer_ids or layer_ids != sorted(set(layer_ids)) or layer_ids[0] < 0 or layer_ids[-1] >= layers:
        raise _refuse(model, "layer_ids", layer_ids, f"ascending layers below block_count, {layers}")
    sites, buckets = len(layer_ids), (longest - 1) * heads
    multipliers = _whole(model, "multipliers", sites * longest)
    primes = _whole(model, "primes", sites * buckets)
    offsets = _whole(model, "offsets", sites * buckets)
    token_map = _whole(model, "token_map", vocabulary)
    pad = model.hyper("engram.pad_id", int)
    if min(primes) <= 0:
        raise _refuse(model, "primes", min(primes), "positive numbers")
    if min(*token_map, pad) < 0 or min(multipliers) < 0:
        raise _refuse(model, "token_map, pad_id, multipliers", "a negative number", "none below 0")
    if max(*token_map, pad) * max(multipliers) >= 2**63:
        raise _refuse(model, "multipliers", max(multipliers), "products with compressed ids below 2^63")
    found = []
    for site, layer in enumerate(layer_ids):
        own = slice(site * buckets, (site + 1) * buckets)
        sums = np.cumsum([0, *primes[own]]).tolist()
        if offsets[own] != sums[:-1]:
            raise _refuse(model, "offsets", offsets[own][:4], f"the sums of the primes before each, {sums[:4]}...")
        if sums[-1] > _MOST_ROWS:
            raise _refuse(model, "primes", f"{sums[-1]} rows at layer {layer}", f"at most {_MOST_ROWS} rows a table")
        numbers = slice(site * longest, (site + 1) * longest)
        found.append(EngramSite(layer, tuple(multipliers[numbers]), tuple(primes[own]), tuple(offsets[own])))
    return EngramHash(tuple(found), heads, longest, width, pad, np.asarray(token_map, dtype=np.uint32))


def _count(model: ModelFile, key: str) -> int:
    number = model.hyper(f"engram.{key}", int)
    if not 0 < number <= 1 << 20:
        raise _refuse(model, key, number, "a positive number")
    return number


def _whole(model: ModelFile, key: str, length: int | None = None) -> list[int]:
    """An array of whole numbers, of a given length."""
    array: NDArray[Any] = model.hyper(f"engram.{key}", np.ndarray)
    if array.dtype.kind not in "iu":
        raise _refuse(model, key, f"an array of {array.dtype.name}", "an array of whole numbers")
    if length is not None and array.size != length:
        raise _refuse(model, key, f"an array of {array.size} numbers", f"one of {length}")
    return [int(number) for number in array]


def _refuse(model: ModelFile, key: str, found: object, expected: str) -> ModelFileError:
    return ModelFileError(
        f"{model.path}: key {model.architecture}.engram.{key} is {found!r}, expected {expected}",
        "the file is damaged or an unsupported variant of its architecture",
    )
