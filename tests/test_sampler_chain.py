"""Each sampling step against its formula in plain Python, the long way against the short one, DRY against brute force.

llama.cpp's own draws through these steps are in test_sampling.py. Planted once and seen to fail: typical-p one token
short, or by the greatest instead of the nearest surprise; a sigma of n - 1; min-p that ignores min_keep; XTC that drops
the last token above the threshold too, or below it; entropy that is not relative in the dynamic temperature; mirostat's
error with the wrong sign; DRY windows longer by one, breakers that do not count, or of one token only, or that end a
token late, the shortest repetition instead of the longest; `samplers` that keeps a step which it does not name.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from vocabularies import path_of

from bloomery.runtime.candidates import Candidates
from bloomery.runtime.dry import BreakerCache, Breakers, DryPenalty, next_repeats
from bloomery.runtime.errors import RequestError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.requests import SAMPLER_ORDER, SamplingParameters
from bloomery.runtime.sampler_chain import (
    SamplerChain,
    active_steps,
    effective,
    is_usual,
    make_step,
    min_p,
    temperature,
    top_n_sigma,
    top_p,
    typical,
)
from bloomery.runtime.sampling import Sampler
from bloomery.runtime.sampling_checks import check_sampling
from bloomery.runtime.tokenizer import Tokenizer

NO_HISTORY = np.empty(0, dtype=np.int32)
OFF = SamplingParameters(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)
Logits = NDArray[np.float32]


def some_logits(seed: int, size: int) -> Logits:
    logits = (np.random.default_rng(seed).normal(size=size) * 2.5).astype(np.float32)
    if size > 3:
        logits[1] = logits[2]
    return logits


def softmax(logits: Logits) -> list[float]:
    weights = [math.exp(float(value) - float(logits.max())) for value in logits]
    return [weight / sum(weights) for weight in weights]


def by_probability(logits: Logits) -> list[int]:
    return sorted(range(len(logits)), key=lambda index: (-logits[index], index))


SIZES = st.sampled_from([1, 2, 3, 17, 300, 1500])
SEEDS = st.integers(0, 2**31)


@settings(max_examples=150, deadline=None)
@given(SEEDS, SIZES, st.floats(0.01, 0.999), st.integers(0, 20))
def test_typical(seed: int, size: int, share: float, keep: int) -> None:
    logits = some_logits(seed, size)
    p = softmax(logits)
    entropy = -sum(value * math.log(value) for value in p)
    order = sorted(by_probability(logits), key=lambda index: abs(-math.log(p[index]) - entropy))
    reached, kept = 0.0, []
    for index in order:
        kept.append(index)
        reached += p[index]
        if reached > share and len(kept) >= keep:
            break
    candidates = Candidates(logits)
    typical(candidates, share, keep)
    assert abs(len(candidates) - len(kept)) <= 1, "one more or less at the bound: float32"
    if len(candidates) != len(kept):
        assert abs(reached - share) < 1e-5 or abs(reached - p[kept[-1]] - share) < 1e-5
    assert {round(p[index], 6) for index in candidates.ids[: len(kept)]} <= {round(p[index], 6) for index in kept}


@settings(max_examples=100, deadline=None)
@given(SEEDS, SIZES, st.floats(0.05, 4))
def test_top_n_sigma(seed: int, size: int, count: float) -> None:
    logits = some_logits(seed, size)
    logits[size // 2 + 1 :: 7] = -np.inf
    finite = [float(value) for value in logits if value != -np.inf]
    mean = sum(finite) / len(finite)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in finite) / len(finite))
    bound = max(finite) - count * deviation
    candidates = Candidates(logits)
    top_n_sigma(candidates, count)
    for index, value in enumerate(logits):
        if size > 1 and abs(value - bound) > 1e-4:
            assert candidates.logits[index] == (value if value >= bound else -np.inf)


@settings(max_examples=150, deadline=None)
@given(SEEDS, SIZES, st.floats(0.001, 1), st.integers(0, 40), st.booleans())
def test_min_p_and_top_p_with_min_keep(seed: int, size: int, share: float, keep: int, ordered: bool) -> None:
    logits = some_logits(seed, size)
    p, order = softmax(logits), by_probability(logits)
    for step in (min_p, top_p):
        candidates = Candidates(logits)
        if ordered:
            candidates.sort()
        step(candidates, share, keep)
        count = len(candidates)
        assert sorted(candidates.ids.tolist()) == sorted(order[:count]), "the most probable ones"
        assert count >= min(keep, size)
        if count > max(keep, 1):
            assert p[order[count - 1]] >= share * max(p) - 1e-6 or step is top_p
            assert sum(p[index] for index in order[: count - 1]) < share + 1e-5 or step is min_p
        if count < size:
            assert p[order[count]] <= share * max(p) + 1e-6 or step is top_p
            assert sum(p[index] for index in order[:count]) >= share - 1e-5 or step is min_p


@settings(max_examples=100, deadline=None)
@given(SEEDS, SIZES, st.floats(0, 2), st.floats(0.01, 3), st.floats(0.1, 3))
def test_dynamic_temperature(seed: int, size: int, base: float, spread: float, exponent: float) -> None:
    logits = some_logits(seed, size)
    p = softmax(logits)
    candidates = Candidates(logits)
    temperature(candidates, replace(OFF, temperature=base, dynatemp_range=spread, dynatemp_exponent=exponent))
    if size == 1:
        assert candidates.logits.tolist() == logits.tolist()
        return
    relative = -sum(value * math.log(value) for value in p) / math.log(size)
    low = max(0.0, base - spread)
    divisor = low + (base + spread - low) * relative**exponent
    order = by_probability(logits)
    assert candidates.ids.tolist() == order
    distances = [float(logits[index]) - float(logits[order[0]]) for index in order]
    expected = [distance / divisor for distance in distances]
    assert (candidates.logits - candidates.logits[0]).tolist() == pytest.approx(expected, rel=2e-4, abs=2e-4)


def test_exclude_top_choices() -> None:
    logits = np.log(np.array([0.05, 0.4, 0.25, 0.2, 0.1], dtype=np.float32))
    always = make_step("xtc", replace(OFF, xtc_probability=1.0, xtc_threshold=0.15), 1, None)
    for threshold, keep, expected in (
        (0.15, 0, {3, 4, 0}),
        (0.3, 0, {1, 2, 3, 4, 0}),
        (0.01, 0, {0}),
        (0.01, 2, {1, 2, 3, 4, 0}),
        (0.15, 3, {3, 4, 0}),
    ):
        parameters = replace(OFF, xtc_probability=1.0, xtc_threshold=threshold, min_keep=keep)
        candidates = Candidates(logits)
        make_step("xtc", parameters, 1, None)(candidates, NO_HISTORY)
        assert set(candidates.ids.tolist()) == expected
    sometimes = make_step("xtc", replace(OFF, xtc_probability=0.3, xtc_threshold=0.15), 5, None)
    cut = 0
    for _ in range(2000):
        candidates = Candidates(logits)
        sometimes(candidates, NO_HISTORY)
        cut += len(candidates) < 5
    assert abs(cut - 600) < 6 * math.sqrt(2000 * 0.3 * 0.7)
    single = Candidates(logits[:1])
    always(single, NO_HISTORY)
    assert len(single) == 1


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_holds_the_surprise(version: int) -> None:
    """The mean surprise of 1500 tokens comes near tau, whatever the temperature would give."""
    for tau in (1.5, 3.0):
        parameters = effective(replace(OFF, mirostat=version, mirostat_tau=tau, temperature=1.2))
        chain = SamplerChain(parameters, 3, None)
        surprises = []
        for step in range(1500):
            logits = some_logits(step, 400)
            token = chain.choose(logits, NO_HISTORY)
            surprises.append(-math.log2(float(chain.last[1][chain.last[0] == token][0])))
        assert abs(np.mean(surprises[300:]) - tau) < 0.15


def test_adaptive_p_prefers_tokens_near_the_target() -> None:
    """Of three tokens, that near the target is drawn most; the mean probability of the drawn ones comes near it."""
    logits = np.log(np.array([0.6, 0.3, 0.1], dtype=np.float32))
    counts = {}
    for target in (0.1, 0.3, 0.6):
        chain = SamplerChain(replace(OFF, samplers=("adaptive_p",), adaptive_target=target), 1, None)
        drawn = [chain.choose(logits, NO_HISTORY) for _ in range(600)]
        counts[target] = np.bincount(drawn, minlength=3)
        assert abs(np.mean([math.exp(logits[token]) for token in drawn]) - target) < 0.06
    assert counts[0.1].argmax() == 2 and counts[0.6].argmax() == 0


USUAL = st.builds(
    SamplingParameters,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 3)),
    top_k=st.sampled_from([0, 1, 7, 40, 3000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    repeat_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    repeat_last_n=st.sampled_from([-1, 0, 5, 600]),
    logit_bias=st.sampled_from([(), ((0, -math.inf), (1, 3.0))]),
    seed=st.integers(0, 2**32 - 1),
)


@settings(max_examples=200, deadline=None)
@given(USUAL, SEEDS, st.sampled_from([3, 700, 2500]))
def test_the_short_way_leads_to_the_same_tokens(parameters: SamplingParameters, seed: int, vocabulary: int) -> None:
    short, long = Sampler(parameters), Sampler(parameters)
    assert short._chain is None and is_usual(parameters)
    long._chain = SamplerChain(parameters, long.seed, None)
    long._random = short._random and long._random
    history = np.random.default_rng(seed).integers(0, vocabulary, 300).astype(np.int32)
    for step in range(3):
        logits = some_logits(seed + step, vocabulary)
        biased = long._biased(logits)
        assert short.choose(logits, int(logits.argmax()), history) == long._chain.choose(biased, history)


def brute_force_repeats(window: list[int], shortest: int, limit: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for end in range(len(window) - 1):
        length = 0
        while length < limit and length <= end and window[end - length] == window[-1 - length]:
            length += 1
        if length >= shortest:
            found[window[end + 1]] = max(found.get(window[end + 1], 0), length)
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(0, 5), st.integers(0, 60))
def test_repetitions_equal_brute_force(window: list[int], shortest: int, more: int) -> None:
    limit = shortest + more
    expected = brute_force_repeats(window, shortest, limit)
    assert next_repeats(np.array(window, dtype=np.int32), shortest, limit) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 3), st.sampled_from([-1, 0, 1, 10, 40]))
def test_dry_lowers_what_would_go_on(history: list[int], allowed: int, last: int) -> None:
    """Tokens 0..3 of a vocabulary of 6; 4 is a breaker, and so is 3 followed by 2."""
    parameters = replace(OFF, dry_multiplier=0.5, dry_base=1.5, dry_allowed_length=allowed, dry_penalty_last_n=last)
    window = history if last < 0 else history[len(history) - min(last, len(history)) :]
    limit = len(window)
    for back in range(len(window)):
        rest = window[len(window) - back :]
        if window[-1 - back] == 4:
            limit = back
        elif window[-1 - back] == 3 and rest[:1] == [2]:
            limit = back - 1
        else:
            continue
        break
    expected = [0.0] * 6
    if last != 0 and len(window) > allowed and limit >= allowed:
        for token, length in brute_force_repeats(window, allowed, limit).items():
            if token != 4:
                expected[token] = -0.5 * 1.5 ** (length - allowed)
    candidates = Candidates(np.zeros(6, dtype=np.float32))
    DryPenalty(parameters, Breakers({4: [()], 3: [(2,)]}))(candidates, np.array(history, dtype=np.int32))
    assert candidates.logits.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_repetition_does_not_reach_into_a_breaker_of_several_tokens() -> None:
    breakers = Breakers({3: [(2,), (2, 1, 1)], 4: [()]})
    for window, limit in (
        ([0, 0, 1], 3),
        ([0, 4, 1, 1], 2),
        ([0, 3, 2, 0], 1),
        ([0, 3, 2, 1, 1, 0, 0], 2),
        ([0, 3, 2, 1, 0], 2),
        ([0, 3], 2),
        ([4, 3, 1], 2),
    ):
        assert breakers.repeat_limit(np.array(window, dtype=np.int32)) == limit, window


def test_strings_become_breakers_of_tokens() -> None:
    with ModelFile.open(path_of("gpt-2")) as model:
        tokenizer = Tokenizer.from_model_file(model)
    cache = BreakerCache(tokenizer)
    breakers = cache.breakers(("the house", "\n"))
    assert breakers is cache.breakers(("the house", "\n"))
    for text in ("see the house and go", "bathe house and go", "line\nand go", "x\n\nand go"):
        tokens = tokenizer.encode(text, add_special=False)
        rest = tokens[len(tokens) - breakers.repeat_limit(np.array(tokens, dtype=np.int32)) :]
        assert tokenizer.decode(rest).strip() == "and go", text
    other = np.array(tokenizer.encode("see the hous and go", add_special=False), dtype=np.int32)
    assert breakers.repeat_limit(other) == len(other)
    for head, tails in breakers.tails.items():
        for tail in tails:
            spelt = tokenizer.decode_bytes((head, *tail))
            assert b"the house" in spelt or b"\n" in spelt


def test_dry_penalty_stays_finite() -> None:
    history = np.zeros(5000, dtype=np.int32)
    parameters = replace(OFF, dry_multiplier=1000.0, dry_base=2.0, dry_penalty_last_n=-1)
    candidates = Candidates(np.zeros(3, dtype=np.float32))
    DryPenalty(parameters, Breakers({}))(candidates, history)
    assert candidates.logits[0] < -1e37 and candidates.logits[1] == 0


def test_samplers_says_which_steps_run_and_when() -> None:
    on = replace(
        OFF,
        temperature=0.5,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repeat_penalty=1.1,
        typical_p=0.5,
        top_n_sigma=1.0,
        xtc_probability=0.5,
        dry_multiplier=1.0,
    )
    assert active_steps(effective(on)) == list(SAMPLER_ORDER)
    assert active_steps(effective(replace(on, samplers=("top_p", "top_k")))) == ["top_p", "top_k"]
    assert active_steps(effective(replace(on, samplers=("top_k", "top_k")))) == ["top_k", "top_k"]
    assert active_steps(effective(replace(on, mirostat=2))) == ["temperature"]
    assert active_steps(effective(OFF)) == []
    assert is_usual(effective(replace(on, samplers=("penalties", "top_k", "temperature"))))
    assert not is_usual(effective(replace(on, samplers=("temperature", "top_k"))))
    logits = some_logits(1, 50)
    drawn = {
        Sampler(replace(OFF, temperature=0.0, samplers=(), seed=seed)).choose(logits, 0, NO_HISTORY)
        for seed in range(20)
    }
    assert len(drawn) > 3, "no temperature among the steps: it is not greedy"


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"typical_p": 0.6}, {"mirostat": 2}], ids=str)
def test_probabilities_after_sampling(changes: dict[str, Any]) -> None:
    logits = some_logits(4, 300)
    parameters = replace(SamplingParameters(seed=3, logprobs=20, post_sampling_probs=True), **changes)
    sampler = Sampler(parameters)
    token = sampler.choose(logits, int(logits.argmax()), NO_HISTORY)
    report = sampler.logprob(logits, token)
    shares = dict(report.top)
    assert report.token == token and 1 <= len(shares) <= 20
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert all(-math.inf < value <= 0 for value in shares.values())
    if token in shares:
        assert shares[token] == report.logprob
    if changes == {"temperature": 0.0}:
        assert shares == {int(logits.argmax()): 0.0}
    assert sum(math.exp(value) for value in shares.values()) <= 1 + 1e-5


BAD: list[tuple[dict[str, Any], str]] = [
    ({"typical_p": 1.5}, "typical_p is 1.5, expected a number from 0 to 1"),
    ({"top_n_sigma": math.nan}, "top_n_sigma is nan"),
    ({"min_keep": -1}, "min_keep is -1"),
    ({"dynatemp_range": -0.1}, "dynatemp_range is -0.1"),
    ({"dynatemp_exponent": math.inf}, "dynatemp_exponent is inf"),
    ({"xtc_probability": 2}, "xtc_probability is 2"),
    ({"xtc_threshold": -1}, "xtc_threshold is -1"),
    ({"dry_multiplier": -1}, "dry_multiplier is -1"),
    ({"dry_base": 0.5}, "dry_base is 0.5, expected a number from 1"),
    ({"dry_allowed_length": 1.5}, "dry_allowed_length is 1.5"),
    ({"dry_penalty_last_n": -2}, "dry_penalty_last_n is -2"),
    ({"dry_sequence_breakers": ("",)}, "dry_sequence_breakers is '', expected strings that are not empty"),
    ({"mirostat": 3}, "mirostat is 3, expected an integer from 0 to 2"),
    ({"mirostat_tau": -1}, "mirostat_tau is -1"),
    ({"mirostat_eta": math.nan}, "mirostat_eta is nan"),
    ({"adaptive_target": 1.5}, "adaptive_target is 1.5"),
    ({"adaptive_decay": 1.0}, "adaptive_decay is 1.0, expected a number from 0 to 0.99"),
    ({"samplers": ("top_k", "magic")}, "samplers is 'magic', expected names among penalties"),
    ({"samplers": 5}, "samplers is 5, expected a list"),
]


@pytest.mark.parametrize("changes, message", BAD, ids=lambda value: str(value)[:40])
def test_bad_parameters_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_sampling(replace(SamplingParameters(), **changes), 100)
    assert caught.value.code == "invalid_request"
    assert message in caught.value.message
    assert caught.value.details["field"] == next(iter(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"typical_p": 0.0, "top_k": 0},
        {"top_n_sigma": 1e-6},
        {"dynatemp_range": 1e6, "dynatemp_exponent": 0.0},
        {"temperature": 1e-300, "xtc_probability": 1.0},
        {"mirostat": 1, "mirostat_tau": 0.0, "mirostat_eta": 1e6},
        {"mirostat": 2, "mirostat_tau": 1e6, "temperature": 0.0},
        {"samplers": ("adaptive_p",), "adaptive_target": 1.0, "adaptive_decay": 0.99},
        {"top_n_sigma": 1.0, "typical_p": 0.5, "top_k": 0},
        {"dry_multiplier": 1e6, "dry_base": 1e6, "dry_allowed_length": 0, "dry_penalty_last_n": -1},
    ],
    ids=str,
)
def test_extreme_valid_parameters_work(changes: dict[str, Any]) -> None:
    parameters = replace(SamplingParameters(seed=1), **changes)
    check_sampling(parameters, 100)
    chain = SamplerChain(effective(parameters), 1, Breakers({}))
    for size in (1, 2, 100):
        for step in range(20):
            token = chain.choose(some_logits(step, size), np.arange(50, dtype=np.int32) % size)
            assert 0 <= token < size


@pytest.mark.parametrize("changes", [{"xtc_probability": 0.5}, {"dry_multiplier": 1.0}, {"min_keep": 5}], ids=str)
def test_a_large_vocabulary_takes_a_few_milliseconds(changes: dict[str, Any]) -> None:
    generator = np.random.default_rng(6)
    logits = (generator.normal(size=151936) * 2.5).astype(np.float32)
    history = generator.integers(0, 151936, 4000).astype(np.int32)
    parameters = replace(SamplingParameters(seed=1), **changes)
    chain = SamplerChain(parameters, 1, Breakers({13: [()]}))
    times = []
    for _ in range(9):
        begun = time.perf_counter()
        chain.choose(logits, history)
        times.append(time.perf_counter() - begun)
    print(f"{changes}: {min(times) * 1e3:.3f} ms at best, {sorted(times)[4] * 1e3:.3f} ms at the median")
    assert min(times) < 5e-3
