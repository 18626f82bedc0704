"""Checks of sampling parameters and of plain values; errors name the field, what was found and what was expected.

Owns ranges. Knows nothing of how a parameter is used.
"""

from __future__ import annotations

import math

from bloomery.runtime.errors import RequestError
from bloomery.runtime.requests import SAMPLERS, SamplingParameters

SEEDS = 2**32
LARGEST = 1e6  # temperature, penalty or bias: beyond any use, and far below what float32 holds
_COUNTS = 2**31 - 1


def check_sampling(parameters: SamplingParameters, vocabulary: int) -> None:
    """Raises RequestError("invalid_request") that names the first field out of its range."""
    check_number("temperature", parameters.temperature, 0, LARGEST)
    check_integer("top_k", parameters.top_k, 0, _COUNTS)
    check_number("top_p", parameters.top_p, 0, 1)
    check_number("min_p", parameters.min_p, 0, 1)
    check_number("typical_p", parameters.typical_p, 0, 1)
    check_number("top_n_sigma", parameters.top_n_sigma, -LARGEST, LARGEST)
    check_integer("min_keep", parameters.min_keep, 0, _COUNTS)
    check_number("dynatemp_range", parameters.dynatemp_range, 0, LARGEST)
    check_number("dynatemp_exponent", parameters.dynatemp_exponent, 0, LARGEST)
    check_number("xtc_probability", parameters.xtc_probability, 0, 1)
    check_number("xtc_threshold", parameters.xtc_threshold, 0, 1)
    check_repetition(parameters)
    check_integer("mirostat", parameters.mirostat, 0, 2)
    check_number("mirostat_tau", parameters.mirostat_tau, 0, LARGEST)
    check_number("mirostat_eta", parameters.mirostat_eta, 0, LARGEST)
    check_number("adaptive_target", parameters.adaptive_target, -LARGEST, 1)
    check_number("adaptive_decay", parameters.adaptive_decay, 0, 0.99)
    for name in check_list("samplers", parameters.samplers):
        if name not in SAMPLERS:
            raise invalid("samplers", name, f"names among {', '.join(SAMPLERS)}")
    check_integer("logprobs", parameters.logprobs, 0, vocabulary)
    if parameters.seed is not None:
        check_integer("seed", parameters.seed, 0, SEEDS - 1)
    for entry in check_list("logit_bias", parameters.logit_bias):
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise invalid("logit_bias", entry, "pairs of token and bias")
        check_integer("logit_bias", entry[0], 0, vocabulary - 1)
        if entry[1] != -math.inf:
            check_number("logit_bias", entry[1], -LARGEST, LARGEST)


def check_repetition(parameters: SamplingParameters) -> None:
    check_number("repeat_penalty", parameters.repeat_penalty, 1 / LARGEST, LARGEST)
    check_number("presence_penalty", parameters.presence_penalty, -LARGEST, LARGEST)
    check_number("frequency_penalty", parameters.frequency_penalty, -LARGEST, LARGEST)
    check_integer("repeat_last_n", parameters.repeat_last_n, -1, _COUNTS)
    check_number("dry_multiplier", parameters.dry_multiplier, 0, LARGEST)
    check_number("dry_base", parameters.dry_base, 1, LARGEST)
    check_integer("dry_allowed_length", parameters.dry_allowed_length, 0, _COUNTS)
    check_integer("dry_penalty_last_n", parameters.dry_penalty_last_n, -1, _COUNTS)
    for breaker in check_list("dry_sequence_breakers", parameters.dry_sequence_breakers):
        if not isinstance(breaker, str) or not breaker:
            raise invalid("dry_sequence_breakers", breaker, "strings that are not empty")


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
