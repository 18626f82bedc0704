"""From request fields to what the protocol asks for: sampling, token limits, biases, prompts.

Owns the four spellings of logit_bias and the forms of `prompt`. It does not know the shapes of answers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

from bloomery.launcher.http.backend import Backend
from bloomery.launcher.http.errors import invalid, unsupported
from bloomery.launcher.http.fields import (
    DEFAULTS,
    DRAFT_NAMES,
    RANDOM_SEED,
    SAMPLERS,
    is_number,
    read_fields,
    settings_object,
    shown,
)
from bloomery.launcher.http.settings import ServerSettings
from bloomery.runtime.completion import new_request_id
from bloomery.runtime.errors import RequestError
from bloomery.runtime.requests import Constraint, GenerationRequest, Reasoning, SamplingParameters

MAX_PROMPTS = 256
MAX_BIASES = 1 << 16
MAX_BIAS_TEXTS = 1024
_ID = re.compile(r"-?[0-9]{1,18}")
_SAMPLING_NAMES = frozenset(entry.name for entry in fields(SamplingParameters))
# Sampling fields that mean something only to samplers which the protocol may not have: their values for off.
_NEUTRAL: dict[str, Any] = {
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "typical_p": 1.0,
    "dynatemp_range": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "adaptive_target": -1.0,
}


@dataclass(frozen=True)
class Job:
    """One generation to run: choice `index` of the answer, prompt tokens, request fields, what constrains the text."""

    index: int
    tokens: tuple[int, ...]
    values: dict[str, Any]
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None
    shown_tokens: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    reasoning: Reasoning | None = None

    def settings(self, seed: int | None = None, end_tokens: tuple[int, ...] = ()) -> dict[str, Any]:
        """`generation_settings` of this job; the fields of `ignore_eos` appear as biases of minus infinity (null)."""
        biases = [{"bias": None if math.isinf(bias) else bias, "token": token} for token, bias in self.logit_bias]
        if self.values["ignore_eos"]:
            biases += [{"bias": None, "token": token} for token in end_tokens]
        values = self.values if seed is None else {**self.values, "seed": seed}
        grammar = (self.constraint.grammar or "") if self.constraint else ""
        return settings_object(values, logit_bias=biases, grammar=grammar, **self.extra)


async def read_values(backend: Backend, settings: ServerSettings, body: dict[str, Any]) -> dict[str, Any]:
    """The request's fields, checked. Raises RequestError."""
    values = read_fields(body, settings.defaults)
    values["speculative.types"] = DRAFT_NAMES.get(backend.facts.draft, backend.facts.draft)
    if settings.verbose:
        values["verbose"] = True
    values["n_probs"] = min(values["n_probs"], backend.facts.vocabulary)
    if values["id_slot"] >= backend.facts.slots:
        raise invalid(f"id_slot {values['id_slot']}: there are {backend.facts.slots} slots", field="id_slot")
    if body.get("lora"):
        raise unsupported("LoRA adapters are not supported")
    return values


async def read_biases(
    backend: Backend, body: dict[str, Any], defaults: dict[str, Any]
) -> tuple[tuple[int, float], ...]:
    """logit_bias as [[id, bias]], [["text", bias]], {"id": bias} or {"text": bias}; a bias of false excludes.
    A request that says nothing has those of `defaults`."""
    given = body.get("logit_bias")
    if given is None:
        given = defaults.get("logit_bias", [])
    if isinstance(given, dict):
        entries = [(int(key) if _ID.fullmatch(key) else key, bias) for key, bias in given.items()]
    elif isinstance(given, list):
        if not all(isinstance(entry, list) and len(entry) == 2 for entry in given):
            raise invalid("logit_bias must hold pairs of a token and a bias", field="logit_bias")
        entries = [tuple(entry) for entry in given]
    else:
        raise invalid(f"logit_bias must be a list or an object, found {shown(given)}", field="logit_bias")
    if len(entries) > MAX_BIASES:
        raise invalid(f"logit_bias has {len(entries)} entries, at most {MAX_BIASES} are allowed", field="logit_bias")
    if sum(isinstance(token, str) for token, _ in entries) > MAX_BIAS_TEXTS:
        raise invalid(f"logit_bias has more than {MAX_BIAS_TEXTS} texts", "give token ids", field="logit_bias")
    biases: dict[int, float] = {}
    for token, bias in entries:
        value = _bias(bias)
        if isinstance(token, int) and not isinstance(token, bool):
            if 0 <= token < backend.facts.vocabulary:
                biases[token] = value
        elif isinstance(token, str):
            found = await backend.tokenize(token, add_special=False)
            biases.update(dict.fromkeys(found, value))
        else:
            raise invalid(f"logit_bias has the token {shown(token)}: expected an id or a text", field="logit_bias")
    return tuple(biases.items())


def _bias(value: Any) -> float:
    if value is False:
        return -math.inf
    if not is_number(value) or abs(value) > 1e6:
        raise invalid(f"logit_bias has the bias {shown(value)}: expected a number or false", field="logit_bias")
    return float(value)


async def read_prompts(backend: Backend, prompt: Any) -> list[tuple[int, ...]]:
    """Token ids of each prompt: a string, a list of ids, a list that mixes ids and strings (one prompt), an object with
    `prompt_string`, or a list of any of these (several prompts)."""
    if _is_single(prompt):
        return [await _prompt(backend, prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise invalid(
            '"prompt" must be a string, a list of tokens, a list of mixed strings & tokens, or a list of prompts'
        )
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"{len(prompt)} prompts in one request, at most {MAX_PROMPTS} are allowed", field="prompt")
    return [await _prompt(backend, single) for single in prompt]


def _is_single(prompt: Any) -> bool:
    if isinstance(prompt, (str, dict)):
        return True
    return isinstance(prompt, list) and any(isinstance(part, int) for part in prompt)


async def _prompt(backend: Backend, prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise unsupported("multimodal data: this model reads text only")
        prompt = prompt.get("prompt_string")
        if not isinstance(prompt, str):
            raise invalid('an object as prompt must have a string "prompt_string"', field="prompt")
    if isinstance(prompt, str):
        return tuple(await backend.tokenize(prompt))
    if not isinstance(prompt, list) or not prompt:
        raise invalid(f"prompt {shown(prompt)}: expected a text or token ids", field="prompt")
    return tuple(await mixed_tokens(backend, prompt, add_special=True, parse_special=True))


async def mixed_tokens(backend: Backend, parts: list[Any], *, add_special: bool, parse_special: bool) -> list[int]:
    """Token ids of a list of texts and ids; special tokens are added to the first text only, if it comes first."""
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            special = add_special and index == 0
            tokens += await backend.tokenize(part, add_special=special, parse_special=parse_special)
        elif isinstance(part, int) and not isinstance(part, bool) and 0 <= part < backend.facts.vocabulary:
            tokens.append(part)
        else:
            raise invalid(f"prompt has the token {shown(part)}: expected ids below {backend.facts.vocabulary}")
    return tokens


def check_room(tokens: tuple[int, ...], context: int) -> None:
    """A prompt must leave room for one token."""
    if not tokens:
        raise invalid("the prompt is empty", "give at least one token", field="prompt")
    if len(tokens) >= context:
        raise RequestError(
            "exceed_context_size",
            f"request ({len(tokens)} tokens) exceeds the available context size ({context} tokens), try increasing it",
            prompt_tokens=len(tokens),
            context=context,
        )


def generation_request(job: Job, settings: ServerSettings, context: int) -> GenerationRequest:
    """The REQUEST of a job. Raises RequestError for what the daemon cannot do."""
    values = job.values
    check_room(job.tokens, context)
    for name, neutral in _NEUTRAL.items():
        if values[name] != neutral and name not in _SAMPLING_NAMES:
            raise unsupported(f"{name} {values[name]:g}: this sampler is not there yet", f"leave out {name}")
    if values["n_indent"]:
        raise unsupported("n_indent is not supported", "leave it out")
    room = context - len(job.tokens)
    shifting = settings.context_shift
    limit = values["n_predict"] if shifting else room if values["n_predict"] < 0 else min(values["n_predict"], room)
    given: dict[str, Any] = {"samplers": tuple(values["samplers"])} if values["samplers"] != list(SAMPLERS) else {}
    for name in _SAMPLING_NAMES & DEFAULTS.keys():
        given[name] = values[name]
    sampling = SamplingParameters(
        **{
            **{name: value for name, value in given.items() if name in _SAMPLING_NAMES},
            "temperature": min(values["temperature"], 100.0),
            "seed": None if values["seed"] == RANDOM_SEED else values["seed"],
            "dry_sequence_breakers": tuple(values["dry_sequence_breakers"]),
            "logit_bias": job.logit_bias,
            "logprobs": values["n_probs"],
        }
    )
    request = GenerationRequest(
        request_id=new_request_id(),
        tokens=job.tokens,
        max_tokens=limit,
        sampling=sampling,
        stop=tuple(values["stop"]),
        ignore_eos=values["ignore_eos"],
        cache_prompt=values["cache_prompt"],
    )
    optional: dict[str, Any] = {
        "slot": values["id_slot"] if values["id_slot"] >= 0 else None,
        "context_shift": shifting,
        "keep": values["n_keep"] if values["n_keep"] >= 0 else len(job.tokens),
        "discard": values["n_discard"],
        "constraint": job.constraint,
        "shown_tokens": job.shown_tokens,
        "reasoning": job.reasoning,
        "draft_tokens": values["speculative.n_max"] if values["speculative.n_max"] >= 0 else None,
    }
    return replace(request, **optional)
