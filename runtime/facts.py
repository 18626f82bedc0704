"""What a daemon tells a client about itself in WELCOME: model, plan, limits.

Owns the values and their schemas. It does not know where they come from (`coordinator.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from bloomery.runtime.field_types import Field, Schema, flag, integer, nullable, number, record, text, token_array
from bloomery.runtime.protocol import VERSIONS

_ANY_SIZE = integer(0, 2**63 - 1)
_TOKEN = nullable(integer(0, 2**31 - 1))


@dataclass(frozen=True)
class ModelFacts:
    """`context` is the number of positions of a slot, `trained_context` what the file was trained for; `parameters` the
    elements of all tensors; tokens that the file does not name are None; `chat_template` is Jinja source or "";
    `draft` is the kind of guesses that steps check, "none" if they check none; `width` is that of the residual stream,
    `tokenizer` what the file calls its kind ("gpt2", "llama"), 0 and "" if that is not known."""

    name: str
    alias: str
    path: str
    architecture: str
    parameters: int
    file_bytes: int
    file_type: str
    vocabulary: int
    context: int
    trained_context: int
    slots: int
    bos: int | None
    eos: int | None
    end_tokens: tuple[int, ...]
    add_bos: bool
    tokenizer_digest: str
    chat_template: str
    draft: str = "none"
    width: int = 0
    tokenizer: str = ""


@dataclass(frozen=True)
class PlanFacts:
    """`digest` changes whenever what is computed where may change: same digest, same result bit for bit."""

    name: str
    digest: str


@dataclass(frozen=True)
class Limits:
    """Bytes and counts that a client has to respect, and the seconds after which silence means something."""

    max_message: int = 64 << 20
    max_in_flight: int = 256
    queue: int = 64
    chunk_bytes: int = 4 << 20
    buffer_bytes: int = 64 << 20
    stall_timeout_s: float = 30.0
    heartbeat_s: float = 1.0
    client_timeout_s: float = 10.0


@dataclass(frozen=True)
class Welcome:
    """Everything WELCOME says. `control` is the endpoint of the control socket."""

    version: int
    server: str
    control: str
    model: ModelFacts
    plan: PlanFacts
    limits: Limits

    def body(self) -> dict[str, Any]:
        body = asdict(self)
        for name, unknown in (("draft", "none"), ("width", 0), ("tokenizer", "")):
            if body["model"][name] == unknown:
                del body["model"][name]
        return body

    @classmethod
    def of(cls, body: dict[str, Any]) -> Welcome:
        """Reads and checks a body. Raises RequestError("invalid_request") naming the field."""
        return cls(**_build(WELCOME_SCHEMA.read(body)))


MODEL_SCHEMA = Schema(
    "model",
    (
        Field("name", text()),
        Field("alias", text(), ""),
        Field("path", text(), ""),
        Field("architecture", text()),
        Field("parameters", _ANY_SIZE),
        Field("file_bytes", _ANY_SIZE, 0),
        Field("file_type", text(), ""),
        Field("vocabulary", integer(1, 2**31 - 1)),
        Field("context", integer(1, 2**31 - 1)),
        Field("trained_context", integer(0, 2**63 - 1), 0),
        Field("slots", integer(1, 2**31 - 1)),
        Field("bos", _TOKEN, None),
        Field("eos", _TOKEN, None),
        Field("end_tokens", token_array(), ()),
        Field("add_bos", flag(), False),
        Field("tokenizer_digest", text(), ""),
        Field("chat_template", text(), ""),
        Field("draft", text(), "none"),
        Field("width", integer(0, 2**31 - 1), 0),
        Field("tokenizer", text(), ""),
    ),
)
PLAN_SCHEMA = Schema("plan", (Field("name", text()), Field("digest", text())))
LIMITS_SCHEMA = Schema(
    "limits",
    tuple(
        Field(field.name, number(0) if field.type == "float" else _ANY_SIZE, field.default) for field in fields(Limits)
    ),
)
WELCOME_SCHEMA = Schema(
    "WELCOME",
    (
        Field("version", integer(min(VERSIONS), 2**31 - 1)),
        Field("server", text()),
        Field("control", text(), ""),
        Field("model", record(MODEL_SCHEMA)),
        Field("plan", record(PLAN_SCHEMA)),
        Field("limits", record(LIMITS_SCHEMA)),
    ),
)


def _build(values: dict[str, Any]) -> dict[str, Any]:
    return values | {
        "model": ModelFacts(**values["model"]),
        "plan": PlanFacts(**values["plan"]),
        "limits": Limits(**values["limits"]),
    }
