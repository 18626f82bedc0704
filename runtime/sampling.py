"""From one row of logits to one token: bias, penalties, filters, draw, and log-probabilities.

Owns the sampling state of one request and the checks of its parameters. Knows nothing of sequences or text. The steps
and their order are llama.cpp's, so that equal logits, parameters and seed choose its tokens.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import RequestError
from bloomery.runtime.requests import SamplingParameters, TokenLogprob

Row = NDArray[np.float32]
Ids = NDArray[np.intp]

SEEDS = 2**32
_LARGEST = 1e6  # temperature, penalty or bias: beyond any use, and far below what float32 holds
_GROUP = 128  # scores of which `at_least` takes the greatest
_NUCLEUS = 1024  # logits that top-p sorts before it sorts them all
_PICK_BLOCK = 1024  # weights of a block in `pick`
_TINY = math.nextafter(0.0, 1.0)  # never reached by nothing: keeps `pick` from weights of zero
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
        self._ordered = parameters.top_k > 0 or parameters.top_p < 1
        greedy = np.float32(parameters.temperature) == 0
        self._random = None if greedy else np.random.RandomState(self.seed)

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
        uniform = self._uniform()
        if not self._ordered:
            ids = np.flatnonzero(scores >= self._floor(best)) if self.parameters.min_p > 0 else None
            drawn = pick(self._weights(scores if ids is None else scores[ids], best), uniform)
            return drawn if ids is None else int(ids[drawn])
        values = self._filtered(scores, best)
        drawn = pick(self._weights(values, best), uniform)
        before = int(np.count_nonzero(values[:drawn] > values[drawn]))
        return int(np.flatnonzero(scores == values[drawn])[drawn - before])

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
            before, penalty = scores[ids], np.float32(self.parameters.repeat_penalty)
            chosen = np.where(before <= 0, before * penalty, before / penalty)
            chosen -= counts * np.float32(self.parameters.frequency_penalty)
            scores[ids] = chosen - np.float32(self.parameters.presence_penalty)
        return scores

    def _filtered(self, scores: Row, best: float) -> Row:
        """The logits that top-k, top-p and min-p leave, in descending order. Each keeps a beginning of that order."""
        top_k, top_p, min_p = self.parameters.top_k, self.parameters.top_p, self.parameters.min_p
        values = top_values(scores, top_k or _NUCLEUS)
        if top_p < 1:
            cumulated = np.cumsum(exp_below(values, best), dtype=np.float64)
            if top_k:
                wanted = top_p * cumulated[-1]
            else:
                wanted = top_p * exp_below(scores, best).sum(dtype=np.float64)
                if cumulated[-1] < wanted:
                    values = top_values(scores, len(scores))
                    cumulated = np.cumsum(exp_below(values, best), dtype=np.float64)
            values = values[: int(np.searchsorted(cumulated, wanted)) + 1]
        if min_p > 0:
            values = values[: max(1, int(np.count_nonzero(values >= self._floor(best))))]
        return values

    def _floor(self, best: float) -> np.float32:
        """The logit whose probability is min_p times the greatest."""
        return np.float32(best + math.log(self.parameters.min_p))

    def _weights(self, values: Row, best: float) -> Row:
        with np.errstate(over="ignore"):  # a tiny temperature: all but the best weigh nothing
            weights: Row = np.exp((values - np.float32(best)) / np.float32(self.parameters.temperature))
        return weights

    def _uniform(self) -> float:
        assert self._random is not None
        first, second = self._random.randint(0, SEEDS, size=2, dtype=np.uint32)
        return min((float(first) + float(second) * 2.0**32) / 2.0**64, math.nextafter(1.0, 0.0))


def pick(weights: Row, uniform: float) -> int:
    """Index of the first weight at which the cumulated weights (float64) reach `uniform` (in [0, 1)) times their total;
    never a weight of zero. Block sums first: a full float64 cumulation of a large vocabulary costs milliseconds."""
    if len(weights) <= _PICK_BLOCK:
        cumulated = np.cumsum(weights, dtype=np.float64)
        return int(np.searchsorted(cumulated, max(uniform * cumulated[-1], _TINY)))
    starts = np.arange(0, len(weights), _PICK_BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    wanted = max(uniform * sums[-1], _TINY)
    block = int(np.searchsorted(sums, wanted))
    first = block * _PICK_BLOCK
    inside = np.cumsum(weights[first : first + _PICK_BLOCK], dtype=np.float64)
    wanted -= sums[block - 1] if block else 0.0
    return first + int(np.searchsorted(inside, min(max(wanted, _TINY), inside[-1])))


def exp_below(values: Row, best: float) -> Row:
    weights: Row = np.exp(values - np.float32(best))
    return weights


def at_least(scores: Row, count: int) -> np.float32:
    """A bound that at least `count` scores reach, and few more: the count-th greatest of the maxima of as many disjoint
    groups of scores as there are, if there are enough, else the count-th greatest score."""
    groups = len(scores) // _GROUP
    if count < groups:
        scores = scores[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    place = len(scores) - count
    return np.float32(np.partition(scores, place)[place])


def top_values(scores: Row, count: int) -> Row:
    """The `count` greatest scores (all if there are fewer) in descending order."""
    if count < len(scores):
        scores = scores[scores >= at_least(scores, count)]
    return np.sort(scores)[::-1][:count]


def top_ids(scores: Row, count: int) -> Ids:
    """Indices of the `count` greatest scores (count at most their number), best first, ties to the lower index."""
    if count == 0:
        return np.empty(0, dtype=np.intp)
    candidates = np.flatnonzero(scores >= at_least(scores, count))
    order = np.argsort(-scores[candidates], kind="stable")
    return candidates[order[:count]]


def token_counts(tokens: NDArray[np.int32], vocabulary: int) -> tuple[Ids, Row]:
    """The distinct tokens and how often each occurs (float32)."""
    if len(tokens) <= _FEW:
        ids, counts = np.unique(tokens, return_counts=True)
        return ids.astype(np.intp), counts.astype(np.float32)
    table = np.bincount(tokens, minlength=vocabulary)
    found = np.flatnonzero(table)
    return found, table[found].astype(np.float32)


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
    check_number("temperature", parameters.temperature, 0, _LARGEST)
    check_integer("top_k", parameters.top_k, 0, 2**31 - 1)
    check_number("top_p", parameters.top_p, 0, 1)
    check_number("min_p", parameters.min_p, 0, 1)
    check_number("repeat_penalty", parameters.repeat_penalty, 1 / _LARGEST, _LARGEST)
    check_number("presence_penalty", parameters.presence_penalty, -_LARGEST, _LARGEST)
    check_number("frequency_penalty", parameters.frequency_penalty, -_LARGEST, _LARGEST)
    check_integer("repeat_last_n", parameters.repeat_last_n, -1, 2**31 - 1)
    check_integer("logprobs", parameters.logprobs, 0, vocabulary)
    if parameters.seed is not None:
        check_integer("seed", parameters.seed, 0, SEEDS - 1)
    for entry in check_list("logit_bias", parameters.logit_bias):
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise invalid("logit_bias", entry, "pairs of token and bias")
        check_integer("logit_bias", entry[0], 0, vocabulary - 1)
        if entry[1] != -math.inf:
            check_number("logit_bias", entry[1], -_LARGEST, _LARGEST)


def check_number(field: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise invalid(field, value, f"a number from {low:g} to {high:g}")


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
