"""The steps of sampling one by one, in any order: every filter, mirostat, adaptive-p and the plain draw.

Owns what each step does to the candidates; formulas and order of operations are llama.cpp's, so that equal logits,
parameters and seed choose its tokens. `sampling.py` takes a shorter way to the same tokens where only the usual steps
are on. Not known here: bias, grammar, text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.candidates import Candidates, Ids, Row, exp_below, pick, token_counts
from bloomery.runtime.dry import Breakers, DryPenalty
from bloomery.runtime.random_stream import RandomStream
from bloomery.runtime.requests import SAMPLER_ORDER, SamplingParameters

Tokens = NDArray[np.int32]
Step = Callable[[Candidates, Tokens], None]
Selector = Callable[[Candidates], int]

USUAL = ("penalties", "top_k", "top_p", "min_p", "temperature")
_NUCLEUS = 1024  # candidates that top-p sorts before it sorts them all
_MIROSTAT_TOKENS = 100  # most probable tokens from which mirostat 1 estimates the exponent
_TINY_TEMPERATURE = 1e-20
_PEAK, _SHARPNESS, _WIDTH = np.float32(5), np.float32(10), np.float32(0.3)  # adaptive-p's transformation

_OFF: dict[str, dict[str, float]] = {
    "penalties": {"repeat_last_n": 0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
"""What switches a step off that `samplers` does not name."""


def effective(parameters: SamplingParameters) -> SamplingParameters:
    """The same sampling with the steps switched off that do not take part."""
    taking = set(parameters.samplers) if parameters.mirostat == 0 else {"temperature"}
    changes: dict[str, float] = {}
    for name in SAMPLER_ORDER:
        if name not in taking:
            changes |= _OFF[name]
    if parameters.mirostat:
        changes["dynatemp_range"] = 0.0
    return replace(parameters, **changes) if changes else parameters  # type: ignore[arg-type]


def active_steps(parameters: SamplingParameters) -> list[str]:
    """The steps, in their order, that do something. `parameters` are effective ones."""
    p = parameters
    penalises = p.repeat_last_n != 0 and (p.repeat_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0)
    on = {
        "penalties": penalises,
        "dry": p.dry_multiplier != 0 and p.dry_penalty_last_n != 0,
        "top_n_sigma": p.top_n_sigma > 0,
        "top_k": p.top_k > 0,
        "typ_p": p.typical_p < 1,
        "top_p": p.top_p < 1,
        "min_p": p.min_p > 0,
        "xtc": p.xtc_probability > 0 and p.xtc_threshold <= 0.5,
        "temperature": p.temperature != 1 or p.dynatemp_range > 0,
    }
    names = p.samplers if p.mirostat == 0 else ("temperature",)
    return [name for name in names if on.get(name)]


def is_usual(parameters: SamplingParameters) -> bool:
    """Whether only the usual steps are on, in the usual order, before a plain draw."""
    steps = active_steps(parameters)
    in_order = [name for name in USUAL if name in steps]
    return (
        steps == in_order
        and parameters.min_keep <= 1
        and parameters.dynatemp_range == 0
        and parameters.mirostat == 0
        and "adaptive_p" not in parameters.samplers
        and not parameters.post_sampling_probs
    )


class SamplerChain:
    """State and steps of one request."""

    def __init__(self, parameters: SamplingParameters, seed: int, breakers: Breakers | None) -> None:
        """`parameters` are effective ones. `breakers` are needed where "dry" is on."""
        self._steps = [make_step(name, parameters, seed, breakers) for name in active_steps(parameters)]
        self._select = make_selector(parameters, RandomStream(seed))
        self.last: tuple[Ids, Row] = (np.empty(0, dtype=np.intp), np.empty(0, dtype=np.float32))
        """The last distribution that was drawn from: ids and probabilities."""

    def choose(self, logits: Row, history: Tokens) -> int:
        """The next token; the greatest of the logits (float32, V, not changed) is finite."""
        candidates = Candidates(logits)
        for step in self._steps:
            step(candidates, history)
        index = self._select(candidates)
        self.last = (candidates.ids, candidates.probabilities())
        return int(candidates.ids[index])


def make_step(name: str, parameters: SamplingParameters, seed: int, breakers: Breakers | None) -> Step:
    keep = parameters.min_keep
    match name:
        case "penalties":
            return Penalties(parameters)
        case "dry":
            assert breakers is not None
            return DryPenalty(parameters, breakers)
        case "top_n_sigma":
            return lambda candidates, _: top_n_sigma(candidates, parameters.top_n_sigma)
        case "top_k":
            return lambda candidates, _: candidates.sort(parameters.top_k)
        case "typ_p":
            return lambda candidates, _: typical(candidates, parameters.typical_p, keep)
        case "top_p":
            return lambda candidates, _: top_p(candidates, parameters.top_p, keep)
        case "min_p":
            return lambda candidates, _: min_p(candidates, parameters.min_p, keep)
        case "xtc":
            return ExcludeTopChoices(parameters, RandomStream(seed))
    assert name == "temperature"
    return lambda candidates, _: temperature(candidates, parameters)


class Penalties:
    """Recent tokens: positive logits are divided, others multiplied; then lowered once and for each occurrence."""

    def __init__(self, parameters: SamplingParameters) -> None:
        self._last = parameters.repeat_last_n
        self._repeat = np.float32(parameters.repeat_penalty)
        self._presence = np.float32(parameters.presence_penalty)
        self._frequency = np.float32(parameters.frequency_penalty)

    def __call__(self, candidates: Candidates, history: Tokens) -> None:
        window = history if self._last < 0 else history[-self._last :]
        ids, counts = token_counts(window, 0)

        def penalised(before: Row, which: Ids) -> Row:
            after = np.where(before <= 0, before * self._repeat, before / self._repeat)
            after -= counts[which] * self._frequency
            return after - self._presence

        candidates.change(ids, penalised)


def top_n_sigma(candidates: Candidates, count: float) -> None:
    """Excludes logits more than `count` standard deviations below the greatest."""
    if len(candidates) <= 1:
        return
    logits = candidates.own()
    finite = logits[logits != -np.inf].astype(np.float64)
    logits[logits < np.float32(finite.max() - count * finite.std())] = -np.inf


def typical(candidates: Candidates, share: float, keep: int) -> None:
    """Keeps the candidates whose surprise is nearest to the entropy, up to more than `share` of the probability."""
    candidates.sort()
    share_of = candidates.probabilities().astype(np.float64)
    with np.errstate(divide="ignore"):
        surprise = -np.log(share_of)
    possible = share_of > 0
    entropy = float((share_of[possible] * surprise[possible]).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    reached = int(np.searchsorted(np.cumsum(share_of[order]), share, side="right"))
    candidates.keep(order[: max(reached + 1, keep)], ordered=False)


def top_p(candidates: Candidates, share: float, keep: int) -> None:
    """Keeps the most probable candidates that together reach `share`."""
    best = candidates.best()
    total = float(exp_below(candidates.logits, best).sum(dtype=np.float64))
    for count in (_NUCLEUS, len(candidates)):
        order = candidates.order(count)
        cumulated = np.cumsum(exp_below(candidates.logits[order], best), dtype=np.float64)
        kept = max(int(np.searchsorted(cumulated, share * total)) + 1, keep)
        if kept <= len(order):
            break
    candidates.keep(order[:kept], ordered=True)


def min_p(candidates: Candidates, share: float, keep: int) -> None:
    """Keeps the candidates at least `share` times as probable as the most probable one, and `keep` in any case."""
    floor = np.float32(candidates.best() + math.log(share))
    passing = candidates.logits >= floor
    count = int(np.count_nonzero(passing))
    if count and count >= keep and not candidates.ordered:
        candidates.keep(passing, ordered=False)
    else:
        candidates.sort(max(1, count, keep))


class ExcludeTopChoices:
    """XTC: by chance, drops all candidates of at least the threshold's probability but the least probable of them."""

    def __init__(self, parameters: SamplingParameters, random: RandomStream) -> None:
        self._probability, self._threshold = parameters.xtc_probability, parameters.xtc_threshold
        self._keep = parameters.min_keep
        self._random = random

    def __call__(self, candidates: Candidates, _: Tokens) -> None:
        if len(candidates) < 2 or np.float32(self._random.uniform_float()) > np.float32(self._probability):
            return
        candidates.sort()
        drop = int(np.count_nonzero(candidates.probabilities() >= np.float32(self._threshold))) - 1
        if drop > 0 and len(candidates) - drop >= self._keep:
            candidates.keep(slice(drop, None), ordered=True)


def temperature(candidates: Candidates, parameters: SamplingParameters) -> None:
    """Divides the logits. With a range, the divisor is between temperature - range and temperature + range, by the
    power `dynatemp_exponent` of the entropy relative to that of equal probabilities."""
    divisor = parameters.temperature
    if parameters.dynatemp_range > 0:
        if len(candidates) <= 1:
            return
        candidates.sort()
        share = candidates.probabilities().astype(np.float64)
        share = share[share > 0]
        relative = float(-(share * np.log(share)).sum()) / math.log(len(candidates))
        low, high = max(0.0, divisor - parameters.dynatemp_range), divisor + parameters.dynatemp_range
        divisor = low + (high - low) * max(relative, 0.0) ** parameters.dynatemp_exponent
    if np.float32(divisor) <= 0:
        candidates.keep(slice(int(candidates.logits.argmax()), None), candidates.ordered)
        candidates.keep(slice(1), ordered=True)
        return
    logits = candidates.own()
    if divisor < _TINY_TEMPERATURE:  # all but the best weigh nothing; the best must stay finite
        logits -= np.float32(candidates.best())
    with np.errstate(over="ignore"):
        logits /= np.float32(divisor)


def make_selector(parameters: SamplingParameters, random: RandomStream) -> Selector:
    if parameters.mirostat == 1:
        return Mirostat(parameters, random, estimated_count)
    if parameters.mirostat == 2:
        return Mirostat(parameters, random, surprising_count)
    if "adaptive_p" in parameters.samplers:
        return AdaptiveTarget(parameters, random)
    return lambda candidates: draw(candidates, random.uniform())


def draw(candidates: Candidates, uniform: float) -> int:
    """Index of the candidate at which the cumulated probability reaches `uniform`."""
    return pick(exp_below(candidates.logits, candidates.best()), uniform)


def discrete_draw(candidates: Candidates, random: RandomStream) -> int:
    """As `draw`, but a single candidate uses up no random number (std::discrete_distribution)."""
    return draw(candidates, random.uniform()) if len(candidates) > 1 else 0


class Mirostat:
    """Keeps the surprise (-log2 p) of the chosen tokens near tau: cuts the candidates by `count_of`, and after each
    token moves the bound mu by eta times the error."""

    def __init__(
        self,
        parameters: SamplingParameters,
        random: RandomStream,
        count_of: Callable[[Candidates, Row, float, int], int],
    ) -> None:
        self._tau, self._eta = parameters.mirostat_tau, parameters.mirostat_eta
        self._mu = 2 * parameters.mirostat_tau
        self._random, self._count_of = random, count_of

    def __call__(self, candidates: Candidates) -> int:
        vocabulary = len(candidates)
        candidates.sort()
        count = self._count_of(candidates, candidates.probabilities(), self._mu, vocabulary)
        candidates.sort(max(count, 1))
        index = discrete_draw(candidates, self._random)
        surprise = -math.log2(max(float(candidates.probabilities()[index]), 1e-45))
        self._mu -= self._eta * (surprise - self._tau)
        return index


def surprising_count(candidates: Candidates, share: Row, bound: float, vocabulary: int) -> int:
    """Mirostat 2: the candidates before the first whose surprise exceeds the bound."""
    with np.errstate(divide="ignore"):
        above = -np.log2(share) > np.float32(bound)
    return int(above.argmax()) if above.any() else len(share)


def estimated_count(candidates: Candidates, share: Row, bound: float, vocabulary: int) -> int:
    """Mirostat 1: from the exponent of Zipf's law, fitted to the most probable tokens, so many tokens that their
    expected surprise is the bound."""
    top = share[:_MIROSTAT_TOKENS].astype(np.float64)
    top = top[top > 0]
    if len(top) < 2:
        return 1
    ranks = np.arange(1, len(top), dtype=np.float64)
    steps = np.log((ranks + 1) / ranks)
    exponent = float((steps * np.log(top[:-1] / top[1:])).sum() / (steps * steps).sum())
    excess = exponent - 1
    try:
        count = (excess * 2**bound / (1 - vocabulary**-excess)) ** (1 / exponent)
    except (ZeroDivisionError, OverflowError):
        return len(share) if exponent > 0 else 1
    return 1 if isinstance(count, complex) or math.isnan(count) else int(min(count, len(share)))


class AdaptiveTarget:
    """adaptive-p: prefers candidates whose probability is near a target, which moves so that the weighted mean of the
    chosen tokens' probabilities stays near the one asked for. A negative target draws plainly."""

    def __init__(self, parameters: SamplingParameters, random: RandomStream) -> None:
        self._target, self._decay = np.float32(parameters.adaptive_target), np.float32(parameters.adaptive_decay)
        self._weight = np.float32(1) / (np.float32(1) - self._decay)
        self._sum = self._target * self._weight
        self._random = random

    def __call__(self, candidates: Candidates) -> int:
        if self._target < 0:
            return discrete_draw(candidates, self._random)
        share = candidates.probabilities()
        target = np.float32(np.clip(2 * self._target - self._sum / self._weight, 0, 1))
        distance = np.abs((share - target) / _WIDTH)
        logits = candidates.own()
        logits[:] = np.where(logits == -np.inf, -np.inf, _PEAK - _SHARPNESS * distance * distance / (1 + distance))
        candidates.ordered = False
        index = discrete_draw(candidates, self._random)
        self._sum = share[index] + self._decay * self._sum
        self._weight = 1 + self._decay * self._weight
        return index
