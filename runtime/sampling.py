"""From one row of logits to one token: bias, penalties, filters, draw, and log-probabilities.

Owns the sampling state of one request and the checks of its parameters. Knows nothing of sequences or text. The steps
and their order are llama.cpp's, so that equal logits, parameters and seed choose its tokens.
"""

from __future__ import annotations

import math
import secrets
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import RequestError
from bloomery.runtime.requests import SamplingParameters, TokenLogprob

Row = NDArray[np.float32]
Ids = NDArray[np.intp]

SEEDS = 2**32
_BLOCK = 128  # logits a block in `top_ids`: block maxima of the largest vocabularies still fit the first-level cache
_FEW = 512  # penalty windows up to this size are counted by sorting, longer ones by a table over the vocabulary


class Sampler:
    """Chooses the tokens of one request.

    The draw takes its candidates in descending order of logit if top-k or top-p is on, else in the order of ids, and
    picks the first whose cumulated probability reaches u * total. u comes from a Mersenne Twister (MT19937) seeded with
    the request's 32-bit seed, two outputs a token: u = (first + second * 2**32) / 2**64, as std::mt19937 with
    std::uniform_real_distribution<double>. So a request's tokens depend on its seed and its own logits only.
    """

    def __init__(self, parameters: SamplingParameters, excluded: frozenset[int] = frozenset()) -> None:
        """`excluded` tokens are never chosen (ignore_eos)."""
        self.parameters = parameters
        self.seed = secrets.randbelow(SEEDS) if parameters.seed is None else parameters.seed
        bias = dict(parameters.logit_bias) | dict.fromkeys(excluded, -math.inf)
        self._bias_ids = np.array(list(bias), dtype=np.intp)
        self._bias = np.array(list(bias.values()), dtype=np.float32)
        self._lowered = frozenset(bias) if all(value <= 0 for value in bias.values()) else None
        self._penalises = parameters.repeat_last_n != 0 and (
            parameters.repeat_penalty != 1 or parameters.presence_penalty != 0 or parameters.frequency_penalty != 0
        )
        self._random = np.random.RandomState(self.seed) if parameters.temperature > 0 else None

    def choose(self, logits: Row, greedy: int, history: NDArray[np.int32]) -> int:
        """The next token after `history` (int32: prompt and generated tokens), given its logits (float32, V) and the
        executor's argmax of them. Raises RequestError if no token can be chosen."""
        if self._random is None and not self._penalises and self._lowered is not None and greedy not in self._lowered:
            return greedy  # lowering other logits cannot change the argmax
        scores = self._adjusted(logits, history)
        best = float(scores.max())
        if best == -math.inf:
            raise RequestError("invalid_request", "logit_bias excludes every token", "leave one token possible")
        if not math.isfinite(best):
            raise RequestError("internal", f"the logits are not finite (greatest: {best})", "check the model file")
        if self._random is None:
            return int(scores.argmax())
        ids, values = self._candidates(scores, best)
        weights = np.exp((values - np.float32(best)) / np.float32(self.parameters.temperature))
        cumulated = np.cumsum(weights, dtype=np.float64)
        drawn = int(np.searchsorted(cumulated, cumulated[-1] * self._uniform()))
        if cumulated[drawn] == 0:  # u was 0: the first token that can be drawn at all
            drawn = int(np.searchsorted(cumulated, 0, side="right"))
        return drawn if ids is None else int(ids[drawn])

    def logprob(self, logits: Row, token: int) -> TokenLogprob:
        """Log-probability of `token` and of the `logprobs` most probable ones, in the model's own distribution: softmax
        of the raw logits, before bias, penalties, filters and temperature (as llama-server reports them)."""
        total = log_sum_exp(logits)
        top = top_ids(logits, min(self.parameters.logprobs, len(logits)))
        pairs = tuple((int(index), float(logits[index]) - total) for index in top)
        return TokenLogprob(token, float(logits[token]) - total, pairs)

    def _adjusted(self, logits: Row, history: NDArray[np.int32]) -> Row:
        """A copy of the logits with bias and penalties, or the logits themselves where there are none."""
        if not (self._penalises or len(self._bias_ids)):
            return logits
        scores = logits.copy()
        scores[self._bias_ids] += self._bias
        if self._penalises:
            last = self.parameters.repeat_last_n
            ids, counts = token_counts(history if last < 0 else history[-last:], len(logits))
            chosen, penalty = scores[ids], np.float32(self.parameters.repeat_penalty)
            chosen = np.where(chosen <= 0, chosen * penalty, chosen / penalty)
            chosen -= counts * np.float32(self.parameters.frequency_penalty)
            scores[ids] = chosen - np.float32(self.parameters.presence_penalty)
        return scores

    def _candidates(self, scores: Row, best: float) -> tuple[Ids | None, Row]:
        """Ids and logits of what top-k, top-p and min-p leave (ids None: all, in order).

        Each filter keeps a beginning of the descending order and min-p depends on the greatest logit alone, so top-p
        needs to sort no further than min-p reaches.
        """
        top_k, top_p, min_p = self.parameters.top_k, self.parameters.top_p, self.parameters.min_p
        floor = np.float32(best + math.log(min_p)) if min_p > 0 else np.float32(-np.inf)
        if top_k == 0 and top_p >= 1:
            if min_p == 0:
                return None, scores
            kept = np.flatnonzero(scores >= floor)
            return kept, scores[kept]
        ids = top_ids(scores, top_k or 256)
        values = scores[ids]
        if top_p < 1:
            weights = np.exp((values if top_k else scores) - np.float32(best))
            wanted = top_p * float(weights.sum(dtype=np.float64))
            while True:
                cumulated = np.cumsum(np.exp(values - np.float32(best)), dtype=np.float64)
                if top_k or len(ids) == len(scores) or cumulated[-1] >= wanted or values[-1] < floor:
                    break
                ids = top_ids(scores, 8 * len(ids))
                values = scores[ids]
            count = int(np.searchsorted(cumulated, wanted)) + 1
            ids, values = ids[:count], values[:count]
        count = max(1, int(np.count_nonzero(values >= floor)))
        return ids[:count], values[:count]

    def _uniform(self) -> float:
        assert self._random is not None
        first, second = self._random.randint(0, SEEDS, size=2, dtype=np.uint32)
        return min((float(first) + float(second) * 2.0**32) / 2.0**64, math.nextafter(1.0, 0.0))


def top_ids(scores: Row, count: int) -> Ids:
    """Indices of the `count` greatest scores (all if there are fewer), best first, ties to the lower index.

    The count-th greatest of the maxima of blocks bounds the count-th greatest score from below, so only the few scores
    that reach it have to be sorted.
    """
    if count == 0:
        return np.empty(0, dtype=np.intp)
    size = len(scores)
    blocks = size // _BLOCK
    if count < blocks:
        maxima = scores[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        candidates = np.flatnonzero(scores >= np.partition(maxima, blocks - count)[blocks - count])
    elif count < size:
        candidates = np.flatnonzero(scores >= np.partition(scores, size - count)[size - count])
    else:
        candidates = np.arange(size)
    order = np.argsort(-scores[candidates], kind="stable")
    return candidates[order[:count]]


def token_counts(tokens: NDArray[np.int32], vocabulary: int) -> tuple[Ids, Row]:
    """The distinct tokens and how often each occurs (float32)."""
    if len(tokens) <= _FEW:
        ids, counts = np.unique(tokens, return_counts=True)
    else:
        table = np.bincount(tokens, minlength=vocabulary)
        ids = np.flatnonzero(table)
        counts = table[ids]
    return ids.astype(np.intp, copy=False), counts.astype(np.float32)


def log_sum_exp(logits: Row) -> float:
    """log(sum(exp(logits))) of one row: float32 exponentials relative to the greatest, summed in float64."""
    best = logits.max()
    return float(best) + math.log(float(np.exp(logits - best).sum(dtype=np.float64)))


def token_logprobs(logits: NDArray[np.float32], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Log-probability (float32, n) of tokens[i] in the softmax of logits[i] (float32, n x V). Row by row, so that the
    figure of a row does not depend on the rows beside it."""
    pairs = zip(logits, tokens, strict=True)
    return np.array([float(row[token]) - log_sum_exp(row) for row, token in pairs], dtype=np.float32)


def check_sampling(parameters: SamplingParameters, vocabulary: int) -> None:
    """Raises RequestError("invalid_request") that names the first field out of its range."""
    check_number("temperature", parameters.temperature, 0, math.inf)
    check_integer("top_k", parameters.top_k, 0, 2**31 - 1)
    check_number("top_p", parameters.top_p, 0, 1)
    check_number("min_p", parameters.min_p, 0, 1)
    check_number("repeat_penalty", parameters.repeat_penalty, 2.0**-64, math.inf)
    check_number("presence_penalty", parameters.presence_penalty, -math.inf, math.inf)
    check_number("frequency_penalty", parameters.frequency_penalty, -math.inf, math.inf)
    check_integer("repeat_last_n", parameters.repeat_last_n, -1, 2**31 - 1)
    check_integer("logprobs", parameters.logprobs, 0, vocabulary)
    if parameters.seed is not None:
        check_integer("seed", parameters.seed, 0, SEEDS - 1)
    for entry in check_list("logit_bias", parameters.logit_bias):
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise invalid("logit_bias", entry, "pairs of token and bias")
        check_integer("logit_bias", entry[0], 0, vocabulary - 1)
        if entry[1] != -math.inf:
            check_number("logit_bias", entry[1], -math.inf, math.inf)


def check_number(field: str, value: object, low: float, high: float) -> None:
    valid = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not valid:
        limits = f" from {low:g} to {high:g}" if high < math.inf else f" of {low:g} or more" if low > -math.inf else ""
        raise invalid(field, value, "a finite number" + limits)


def check_integer(field: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise invalid(field, value, f"an integer from {low} to {high}")


def check_list(field: str, value: object) -> tuple[object, ...] | list[object]:
    if not isinstance(value, (tuple, list)):
        raise invalid(field, value, "a list")
    return value


def invalid(field: str, found: object, expected: str) -> RequestError:
    text = repr(found)
    shown = text if len(text) <= 80 else text[:77] + "..."
    return RequestError("invalid_request", f"{field} is {shown}, expected {expected}", f"correct {field}", field=field)
