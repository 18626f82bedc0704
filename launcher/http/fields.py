"""The fields of a generation request, by llama-server's names: types, ranges, defaults.

Owns reading them from JSON without trusting it, and showing them again as `generation_settings`. It does not know
which endpoint a request came from, nor how fields reach the daemon (`parameters.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from bloomery.launcher.http.errors import invalid

INT_MAX = 2**31 - 1
RANDOM_SEED = 2**32 - 1


@dataclass(frozen=True)
class Field:
    """`clamp`: values outside the range are moved into it, as llama-server does for sampling parameters; else refused.
    `aliases` are other names, of which the first that is present counts after `name`."""

    name: str
    kind: Literal["int", "float", "bool"]
    default: Any
    low: float = -math.inf
    high: float = math.inf
    clamp: bool = False
    aliases: tuple[str, ...] = ()


FIELDS: tuple[Field, ...] = (
    Field("verbose", "bool", False),
    Field("timings_per_token", "bool", False),
    Field("stream", "bool", False),
    Field("cache_prompt", "bool", True),
    Field("return_tokens", "bool", False),
    Field("return_progress", "bool", False),
    Field("sse_ping_interval", "int", 30, -1, INT_MAX),
    Field("n_predict", "int", -1, -1, INT_MAX, aliases=("max_completion_tokens", "max_tokens")),
    Field("n_indent", "int", 0, 0, INT_MAX),
    Field("n_keep", "int", 0, -1, INT_MAX),
    Field("n_discard", "int", 0, 0, INT_MAX),
    Field("n_cmpl", "int", 1, 1, 128, aliases=("n",)),
    Field("n_cache_reuse", "int", 0, 0, INT_MAX),
    Field("t_max_predict_ms", "int", -1, -1, 2**63 - 1),
    Field("id_slot", "int", -1, -1, INT_MAX),
    Field("top_k", "int", 40, 0, INT_MAX, clamp=True),
    Field("top_p", "float", 0.95, 0, 1, clamp=True),
    Field("min_p", "float", 0.05, 0, 1, clamp=True),
    Field("top_n_sigma", "float", -1.0, -1000, 1000, clamp=True),
    Field("xtc_probability", "float", 0.0, 0, 1, clamp=True),
    Field("xtc_threshold", "float", 0.1, 0, 1, clamp=True),
    Field("typical_p", "float", 1.0, 0, 1, clamp=True),
    Field("temperature", "float", 0.8, 0, math.inf, clamp=True),
    Field("dynatemp_range", "float", 0.0, 0, 100, clamp=True),
    Field("dynatemp_exponent", "float", 1.0),
    Field("repeat_last_n", "int", 64, -1, INT_MAX),
    Field("repeat_penalty", "float", 1.0, 1e-3, 1000),
    Field("frequency_penalty", "float", 0.0, -1000, 1000),
    Field("presence_penalty", "float", 0.0, -1000, 1000),
    Field("dry_multiplier", "float", 0.0),
    Field("dry_base", "float", 1.75),
    Field("dry_allowed_length", "int", 2, 0, INT_MAX),
    Field("dry_penalty_last_n", "int", -1, -1, INT_MAX),
    Field("mirostat", "int", 0, 0, 2, clamp=True),
    Field("mirostat_tau", "float", 5.0),
    Field("mirostat_eta", "float", 0.1),
    Field("adaptive_target", "float", -1.0, -1000, 1, clamp=True),
    Field("adaptive_decay", "float", 0.9, 0, 0.99),
    Field("seed", "int", RANDOM_SEED, -(2**63), 2**63 - 1),
    Field("n_probs", "int", 0, 0, 1024, clamp=True),
    Field("min_keep", "int", 0, 0, INT_MAX),
    Field("backend_sampling", "bool", False),
    Field("post_sampling_probs", "bool", False),
    Field("ignore_eos", "bool", False),
    Field("speculative.n_max", "int", -1, -1, INT_MAX),
    Field("reasoning_budget_tokens", "int", -1, -1, INT_MAX, aliases=("thinking_budget_tokens", "reasoning_budget")),
    Field("reasoning_control", "bool", False),
)
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
SAMPLER_NAMES = {
    **{name: name for name in (*SAMPLERS, "infill")},
    "typical_p": "typ_p",
    "top-k": "top_k",
    "top-p": "top_p",
    "min-p": "min_p",
    "typical": "typ_p",
    "temp": "temperature",
    "nucleus": "top_p",
}
SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
}
DRY_BREAKERS = ("\n", ":", '"', "*")
DRAFT_NAMES = {"lookup": "ngram-simple", "model": "draft-simple"}
"""What llama-server calls our drafts."""
DEFAULTS: dict[str, Any] = {field.name: field.default for field in FIELDS}

# In the order in which llama-server shows them; `max_tokens` repeats n_predict.
_SHOWN = [
    "seed",
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_k",
    "top_p",
    "min_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "typical_p",
    "repeat_last_n",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "adaptive_target",
    "adaptive_decay",
    "stop",
    "max_tokens",
    "n_predict",
    "n_keep",
    "n_discard",
    "ignore_eos",
    "stream",
    "logit_bias",
    "n_probs",
    "min_keep",
    "grammar",
    "samplers",
    "timings_per_token",
    "post_sampling_probs",
    "backend_sampling",
]


def read_fields(body: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Every field of FIELDS, plus `stop` (list), `samplers` (names), `response_fields`, `include_usage`,
    `dry_sequence_breakers` and `reasoning_budget_message`. null means absent. Raises RequestError("invalid_request")
    naming the field."""
    values = {field.name: _read(field, body, defaults) for field in FIELDS}
    values["stop"] = string_list(body, "stop", single=True) or list(defaults.get("stop", ()))
    values["response_fields"] = string_list(body, "response_fields")
    breakers = body.get("dry_sequence_breakers")
    values["dry_sequence_breakers"] = (
        list(defaults.get("dry_sequence_breakers", DRY_BREAKERS))
        if breakers is None
        else string_list(body, "dry_sequence_breakers")
    )
    values["reasoning_budget_tokens"] = reasoning_budget(body, defaults)
    message = defaults.get("reasoning_budget_message", "")
    values["reasoning_budget_message"] = string(body, "reasoning_budget_message", message)
    values["samplers"] = _samplers(body.get("samplers"), defaults)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid("stream_options must be an object", field="stream_options")
    if values["dry_base"] < 1:  # as in llama-server
        values["dry_base"] = defaults.get("dry_base", DEFAULTS["dry_base"])
    values["include_usage"] = flag(options or {}, "include_usage", False)
    seed = values["seed"]
    values["seed"] = RANDOM_SEED if seed < 0 else seed % 2**32
    return values


def reasoning_budget(body: dict[str, Any], defaults: dict[str, Any]) -> int:
    """Tokens of reasoning; -1 sets no limit, and from a request it means the default, as in llama-server."""
    field = next(field for field in FIELDS if field.name == "reasoning_budget_tokens")
    default = int(defaults.get(field.name, field.default))
    given = int(_read(field, body, defaults))
    return default if given < 0 else given


def flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, found {shown(value)}", field=name)
    return value


def string(body: dict[str, Any], name: str, default: str = "") -> str:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise invalid(f"{name} must be a string, found {shown(value)}", field=name)
    return value


def string_list(body: dict[str, Any], name: str, *, single: bool = False) -> list[str]:
    """Strings that are not empty; with `single` also one string."""
    value = body.get(name)
    if value is None:
        return []
    if single and isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise invalid(f"{name} must be a list of strings, found {shown(value)}", field=name)
    if len(value) > 256:
        raise invalid(f"{name} has {len(value)} entries, at most 256 are allowed", field=name)
    return [item for item in value if item]


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def settings_object(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    """`generation_settings`: the fields as they took effect."""
    known = {**values, "max_tokens": values["n_predict"], "grammar": "", "logit_bias": [], **more}
    return {name: known[name] for name in _SHOWN} | {
        "speculative.types": values.get("speculative.types", "none"),
        "lora": [],
        **{name: value for name, value in more.items() if name not in _SHOWN},
    }


def is_number(value: Any) -> bool:
    """An integer of at most 64 bits or a finite float."""
    if isinstance(value, float):
        return math.isfinite(value)
    return type(value) is int and abs(value) < 2**63


def _read(field: Field, body: dict[str, Any], defaults: dict[str, Any]) -> Any:
    for name in (field.name, *field.aliases):
        value = body.get(name)
        if value is not None:
            return _checked(field, name, value)
    return defaults.get(field.name, field.default)


def _checked(field: Field, name: str, value: Any) -> Any:
    if field.kind == "bool":
        if not isinstance(value, bool):
            raise invalid(f"{name} must be true or false, found {shown(value)}", field=name)
        return value
    number = is_number(value)
    if field.kind == "int" and isinstance(value, float):
        number = number and value == int(value)
    if not number:
        kind = "an integer" if field.kind == "int" else "a number"
        raise invalid(f"{name} must be {kind}, found {shown(value)}", field=name)
    if field.clamp:
        value = min(max(value, field.low), field.high)
    elif not field.low <= value <= field.high:
        raise invalid(f"{name} must be from {field.low:g} to {field.high:g}, found {shown(value)}", field=name)
    return int(value) if field.kind == "int" else float(value)


def _samplers(value: Any, defaults: dict[str, Any]) -> list[str]:
    return list(defaults.get("samplers", SAMPLERS)) if value is None else read_samplers(value)


def read_samplers(value: Any) -> list[str]:
    """Names in their order, of a list of names, "name;name" or a string of letters. Unknown ones are left out."""
    names = value.split(";") if isinstance(value, str) and ";" in value else value
    if isinstance(names, str):
        return [SAMPLER_LETTERS[letter] for letter in names if letter in SAMPLER_LETTERS]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise invalid(
            f"samplers must be a list of names or a string of letters, found {shown(value)}", field="samplers"
        )
    return [SAMPLER_NAMES[name.lower()] for name in names if name.lower() in SAMPLER_NAMES]
