"""From one row of logits to one token: bias, penalties, filters, draw, and log-probabilities.

Owns the sampling state of one request, and the short way for the usual steps (penalties, top-k, top-p, min-p,
temperature): whatever else is asked for takes the long way of `sampler_chain`. Knows nothing of sequences or text. The
steps and their order are llama.cpp's, so that equal logits, parameters and seed choose its tokens.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.candidates import (
    Ids,
    Row,
    exp_below,
    log_sum_exp,
    pick,
    token_counts,
    top_ids,
    top_values,
)
from bloomery.runtime.dry import BreakerCache
from bloomery.runtime.errors import RequestError
from bloomery.runtime.random_stream import RandomStream
from bloomery.runtime.requests import SamplingParameters, TokenLogprob
from bloomery.runtime.sampler_chain import SamplerChain, active_steps, effective, is_usual
from bloomery.runtime.sampling_checks import SEEDS

_NUCLEUS = 1024  # logits that top-p sorts before it sorts them all


class Sampler:
    """Chooses the tokens of one request.

    The draw takes its candidates in descending order of logit if top-k or top-p is on, else in the order of ids, and
    picks the first whose cumulated probability reaches u * total. u comes from a Mersenne Twister (MT19937) seeded with
    the request's 32-bit seed, two outputs a token: u = (first + second * 2**32) / 2**64, as std::mt19937 with
    std::uniform_real_distribution<double>. So a request's tokens depend on its seed and its own logits only.
    """

    def __init__(
        self,
        parameters: SamplingParameters,
        excluded: frozenset[int] = frozenset(),
        breakers: BreakerCache | None = None,
    ) -> None:
        """`excluded` tokens are never chosen (ignore_eos); `breakers` are the tokenizer's, needed for DRY."""
        self.parameters = effective(parameters)
        self.seed = secrets.randbelow(SEEDS) if parameters.seed is None else parameters.seed
        bias = dict(parameters.logit_bias) | dict.fromkeys(excluded, -math.inf)
        self._bias_ids = np.array(list(bias), dtype=np.intp)
        self._bias = np.array(list(bias.values()), dtype=np.float32)
        self._lowered = frozenset(bias) if all(value <= 0 for value in bias.values()) else None
        steps = active_steps(self.parameters)
        self._chain: SamplerChain | None = None
        if not is_usual(self.parameters):
            found = breakers.breakers(parameters.dry_sequence_breakers) if "dry" in steps and breakers else None
            self._chain = SamplerChain(self.parameters, self.seed, found)
        self._penalises = "penalties" in steps
        self._ordered = self.parameters.top_k > 0 or self.parameters.top_p < 1
        greedy = self._chain is None and np.float32(self.parameters.temperature) == 0
        self._random = None if greedy else RandomStream(self.seed)

    @property
    def takes_greatest(self) -> bool:
        """Whether it chooses the greatest logit, but for what bias forbids."""
        return self._random is None and not self._penalises

    def choose(self, logits: Row, greedy: int, history: NDArray[np.int32]) -> int:
        """The next token after `history` (int32: prompt and generated tokens), given its logits (float32, V) and the
        executor's argmax of them. Raises RequestError if no token can be chosen."""
        if self._random is None and not self._penalises and self._lowered is not None and greedy not in self._lowered:
            return greedy  # lowering other logits cannot change the argmax
        return self._chosen(self._biased(logits), history)

    def force(self, token: int, vocabulary: int, history: NDArray[np.int32]) -> int:
        """`token`, as if no other were possible: random numbers are drawn and the steps' states go on as ever."""
        if self._random is None and not self._chain:
            return token
        scores = np.full(vocabulary, -math.inf, dtype=np.float32)
        scores[token] = 0.0
        self._chosen(scores, history)
        return token

    def _chosen(self, scores: Row, history: NDArray[np.int32]) -> int:
        if self._chain is None:
            scores = self._penalised(scores, history)
        best = float(scores.max())
        if best == -math.inf:
            raise RequestError("invalid_request", "logit_bias excludes every token", "leave one token possible")
        if not math.isfinite(best):
            raise RequestError("internal", f"the logits are not finite (greatest: {best})", "check the model file")
        if self._chain:
            return self._chain.choose(scores, history)
        if self._random is None:
            return int(scores.argmax())
        uniform = self._random.uniform()
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
        of the raw logits, before bias, penalties, filters and temperature (as llama-server reports them). With
        `post_sampling_probs`: in the distribution that the last token was drawn from, possible tokens only."""
        if self._chain and self.parameters.post_sampling_probs:
            return self._drawn_logprob(*self._chain.last, token)
        total = log_sum_exp(logits)
        top = top_ids(logits, min(self.parameters.logprobs, len(logits)))
        pairs = tuple((int(index), float(logits[index]) - total) for index in top)
        return TokenLogprob(token, float(logits[token]) - total, pairs)

    def _drawn_logprob(self, ids: Ids, share: Row, token: int) -> TokenLogprob:
        top = [index for index in top_ids(share, min(self.parameters.logprobs, len(share))) if share[index] > 0]
        pairs = tuple((int(ids[index]), math.log(float(share[index]))) for index in top)
        return TokenLogprob(token, math.log(float(share[ids == token][0])), pairs)

    def _biased(self, logits: Row) -> Row:
        """A copy of the logits with bias, or the logits themselves where there is none."""
        if not len(self._bias_ids):
            return logits
        scores = logits.copy()
        scores[self._bias_ids] += self._bias
        return scores

    def _penalised(self, logits: Row, history: NDArray[np.int32]) -> Row:
        if not self._penalises:
            return logits
        scores = logits.copy()
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


def token_logprobs(logits: NDArray[np.float32], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Log-probability (float32, n) of tokens[i] in the softmax of logits[i] (float32, n x V). Row by row, so that the
    figure of a row does not depend on the rows beside it."""
    pairs = zip(logits, tokens, strict=True)
    return np.array([float(row[token]) - log_sum_exp(row) for row, token in pairs], dtype=np.float32)
