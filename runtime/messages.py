"""Bodies of the messages: the values of `requests.py` turned into maps and back, checked field by field.

Owns the schema of every kind; docs/protocol.md prints them as tables and a test compares the two. It does not know
sockets, sessions or credit. WELCOME is in `facts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import RequestError
from bloomery.runtime.facts import WELCOME_SCHEMA
from bloomery.runtime.field_types import (
    Field,
    Schema,
    any_float,
    anything,
    array,
    binary,
    choice,
    flag,
    integer,
    mapping,
    nullable,
    number,
    pair,
    record,
    refuse,
    schema_value,
    text,
    token_array,
)
from bloomery.runtime.pooling import POOLINGS
from bloomery.runtime.protocol import Frame, Kind, Message
from bloomery.runtime.requests import (
    SAMPLERS,
    Admitted,
    Chunk,
    Constraint,
    Event,
    Failed,
    Final,
    GenerationRequest,
    Progress,
    Reasoning,
    SamplingParameters,
    TokenLogprob,
)

DEFAULT_CREDIT = 256
CREDIT_UNIT_BYTES = 1 << 20
_COUNT = integer(0, 2**31 - 1)
_TOKEN = integer(0, 2**31 - 1)
_SECONDS = number(0)
_SAMPLING = SamplingParameters()

HELLO_SCHEMA = Schema("HELLO", (Field("versions", array(integer(0, 2**31 - 1), 64)), Field("client", text(), "")))
SAMPLING_SCHEMA = Schema(
    "sampling",
    (
        Field("temperature", number(0, 100), _SAMPLING.temperature),
        Field("top_k", integer(0, 2**31 - 1), _SAMPLING.top_k),
        Field("top_p", number(0, 1), _SAMPLING.top_p),
        Field("min_p", number(0, 1), _SAMPLING.min_p),
        Field("repeat_penalty", number(1e-3, 1000), _SAMPLING.repeat_penalty),
        Field("presence_penalty", number(-1000, 1000), _SAMPLING.presence_penalty),
        Field("frequency_penalty", number(-1000, 1000), _SAMPLING.frequency_penalty),
        Field("repeat_last_n", integer(-1, 2**31 - 1), _SAMPLING.repeat_last_n),
        Field("logit_bias", array(pair(_TOKEN, any_float()), 1 << 16), ()),
        Field("seed", nullable(integer(0, 2**63 - 1)), None),
        Field("logprobs", integer(0, 1024), _SAMPLING.logprobs),
        Field("post_sampling_probs", flag(), _SAMPLING.post_sampling_probs),
        Field("min_keep", _COUNT, _SAMPLING.min_keep),
        Field("typical_p", number(0, 1), _SAMPLING.typical_p),
        Field("top_n_sigma", number(-1000, 1000), _SAMPLING.top_n_sigma),
        Field("dynatemp_range", number(0, 100), _SAMPLING.dynatemp_range),
        Field("dynatemp_exponent", number(0, 1000), _SAMPLING.dynatemp_exponent),
        Field("xtc_probability", number(0, 1), _SAMPLING.xtc_probability),
        Field("xtc_threshold", number(0, 1), _SAMPLING.xtc_threshold),
        Field("dry_multiplier", number(0, 1000), _SAMPLING.dry_multiplier),
        Field("dry_base", number(1, 1000), _SAMPLING.dry_base),
        Field("dry_allowed_length", _COUNT, _SAMPLING.dry_allowed_length),
        Field("dry_penalty_last_n", integer(-1, 2**31 - 1), _SAMPLING.dry_penalty_last_n),
        Field("dry_sequence_breakers", array(text(), 256), _SAMPLING.dry_sequence_breakers),
        Field("mirostat", integer(0, 2), _SAMPLING.mirostat),
        Field("mirostat_tau", number(0, 1000), _SAMPLING.mirostat_tau),
        Field("mirostat_eta", number(0, 1000), _SAMPLING.mirostat_eta),
        Field("adaptive_target", number(-1000, 1), _SAMPLING.adaptive_target),
        Field("adaptive_decay", number(0, 0.99), _SAMPLING.adaptive_decay),
        Field("samplers", array(choice(*SAMPLERS), 64), _SAMPLING.samplers),
    ),
)
CONSTRAINT_SCHEMA = Schema(
    "constraint",
    (
        Field("grammar", nullable(text()), None),
        Field("json_schema", nullable(schema_value()), None),
        Field("regex", nullable(text()), None),
        Field("lark", nullable(text()), None),
        Field("triggers", array(text(), 64), ()),
    ),
)
REASONING_SCHEMA = Schema(
    "reasoning",
    (
        Field("start", text()),
        Field("ends", array(text(), 16)),
        Field("budget", integer(-1, 2**31 - 1), -1),
        Field("message", text(), ""),
    ),
)
REQUEST_SCHEMA = Schema(
    "REQUEST",
    (
        Field("tokens", nullable(token_array()), None),
        Field("text", nullable(text()), None),
        Field("messages", nullable(array(mapping(), 1 << 16)), None),
        Field("template_variables", mapping(), {}),
        Field("add_special", flag(), True),
        Field("parse_special", flag(), True),
        Field("max_tokens", integer(-1, 2**31 - 1), -1),
        Field("sampling", record(SAMPLING_SCHEMA), SAMPLING_SCHEMA.read({})),
        Field("stop", array(text(), 256), ()),
        Field("stop_tokens", token_array(), ()),
        Field("ignore_eos", flag(), False),
        Field("cache_prompt", flag(), True),
        Field("score_prompt", flag(), False),
        Field("logits", choice("none", "generated", "all"), "none"),
        Field("slot", nullable(_COUNT), None),
        Field("embeddings", choice(*POOLINGS), "none"),
        Field("context_shift", flag(), False),
        Field("keep", _COUNT, 0),
        Field("discard", _COUNT, 0),
        Field("constraint", nullable(record(CONSTRAINT_SCHEMA)), None),
        Field("shown_tokens", token_array(), ()),
        Field("draft_tokens", nullable(_COUNT), None),
        Field("reasoning", nullable(record(REASONING_SCHEMA)), None),
        Field("credit", integer(0, 2**31 - 1), DEFAULT_CREDIT),
    ),
)
CREDIT_SCHEMA = Schema("CREDIT", (Field("chunks", integer(1, 2**31 - 1)),))
ADMITTED_SCHEMA = Schema(
    "ADMITTED", (Field("slot", _COUNT), Field("prompt_tokens", _COUNT), Field("cached_tokens", _COUNT, 0))
)
PROGRESS_SCHEMA = Schema(
    "PROGRESS",
    (
        Field("processed", _COUNT),
        Field("total", _COUNT),
        Field("cached", _COUNT, 0),
        Field("seconds", _SECONDS, 0.0),
    ),
)
LOGPROB_SCHEMA = Schema(
    "logprob",
    (Field("token", _TOKEN), Field("logprob", any_float()), Field("top", array(pair(_TOKEN, any_float()), 1024), ())),
)
ARRAY_SCHEMA = Schema(
    "array",
    (Field("buffer", integer(0, 15)), Field("dtype", choice("<f4")), Field("shape", array(integer(0, 2**31 - 1), 4))),
)
CHUNK_SCHEMA = Schema(
    "CHUNK",
    (
        Field("tokens", token_array(), ()),
        Field("text", text(), ""),
        Field("logprobs", array(record(LOGPROB_SCHEMA)), ()),
        Field("prompt_logprobs", array(any_float()), ()),
        Field("logits", nullable(record(ARRAY_SCHEMA)), None),
    ),
)
FINAL_SCHEMA = Schema(
    "FINAL",
    (
        Field("reason", text()),
        Field("stop", text(), ""),
        Field("prompt_tokens", _COUNT),
        Field("cached_tokens", _COUNT, 0),
        Field("generated_tokens", _COUNT),
        Field("seed", integer(0, 2**63 - 1), 0),
        Field("queue_seconds", _SECONDS, 0.0),
        Field("prompt_seconds", _SECONDS, 0.0),
        Field("generate_seconds", _SECONDS, 0.0),
        Field("shifted_tokens", _COUNT, 0),
        Field("draft_tokens", _COUNT, 0),
        Field("draft_accepted", _COUNT, 0),
        Field("reasoning_tokens", _COUNT, 0),
    ),
)
ERROR_SCHEMA = Schema(
    "ERROR",
    (Field("code", text()), Field("message", text(), ""), Field("hint", text(), ""), Field("details", mapping(), {})),
)
CALL_SCHEMA = Schema("CALL", (Field("method", text()), Field("arguments", mapping(), {})))
END_REASONING_SCHEMA = Schema("end_reasoning", (Field("request", binary()),))
RESULT_SCHEMA = Schema("RESULT", (Field("value", anything(), None),))
EMPTY_SCHEMA = Schema("empty", ())

SCHEMAS: dict[Kind, Schema] = {
    Kind.HELLO: HELLO_SCHEMA,
    Kind.WELCOME: WELCOME_SCHEMA,
    Kind.PING: EMPTY_SCHEMA,
    Kind.PONG: EMPTY_SCHEMA,
    Kind.BYE: EMPTY_SCHEMA,
    Kind.REQUEST: REQUEST_SCHEMA,
    Kind.ABORT: EMPTY_SCHEMA,
    Kind.CREDIT: CREDIT_SCHEMA,
    Kind.ADMITTED: ADMITTED_SCHEMA,
    Kind.PROGRESS: PROGRESS_SCHEMA,
    Kind.CHUNK: CHUNK_SCHEMA,
    Kind.FINAL: FINAL_SCHEMA,
    Kind.ERROR: ERROR_SCHEMA,
    Kind.CALL: CALL_SCHEMA,
    Kind.RESULT: RESULT_SCHEMA,
}

_LEFT_OUT_IF_ZERO = ("shifted_tokens", "draft_tokens", "draft_accepted", "reasoning_tokens")
_OF_THEIR_OWN = ("request_id", "sampling", "constraint", "reasoning")
_PLAIN_REQUEST_FIELDS = tuple(field.name for field in fields(GenerationRequest) if field.name not in _OF_THEIR_OWN)


@dataclass(frozen=True)
class Submission:
    """A REQUEST as the daemon reads it: the request, and how many chunks the client takes before it grants more."""

    request: GenerationRequest
    credit: int


def sampling_body(parameters: SamplingParameters) -> dict[str, Any]:
    """The map `sampling` of a REQUEST: what differs from the defaults. Not checked; SAMPLING_SCHEMA does that."""
    body = _changed(parameters)
    if "logit_bias" in body:
        body["logit_bias"] = [list(entry) for entry in body["logit_bias"]]
    return body


def request_message(request: GenerationRequest, credit: int = DEFAULT_CREDIT) -> Message:
    """REQUEST for a generation; fields at their default are left out."""
    body: dict[str, Any] = {}
    for name in _PLAIN_REQUEST_FIELDS:
        value = getattr(request, name)
        default = next(field.default for field in REQUEST_SCHEMA.fields if field.name == name)
        if value != default:
            body[name] = list(value) if isinstance(value, tuple) else value
    if sampling := sampling_body(request.sampling):
        body["sampling"] = sampling
    if request.constraint:
        body["constraint"] = _changed(request.constraint)
    if request.reasoning:
        body["reasoning"] = {**asdict(request.reasoning), "ends": list(request.reasoning.ends)}
    if credit != DEFAULT_CREDIT:
        body["credit"] = credit
    return Message(Kind.REQUEST, request.request_id, body)


def _changed(values: SamplingParameters | Constraint) -> dict[str, Any]:
    """The fields that are not at their default, with lists for tuples."""
    changed = {field.name: getattr(values, field.name) for field in fields(values)}
    defaults = {field.name: field.default for field in fields(values)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in changed.items()
        if value != defaults[name]
    }


def read_request(message: Message) -> Submission:
    """The generation that a REQUEST asks for. Raises RequestError("invalid_request") naming the field."""
    values = REQUEST_SCHEMA.read(message.body)
    prompts = [name for name in ("tokens", "text", "messages") if values[name] is not None]
    if len(prompts) != 1:
        refuse("tokens", "exactly one of tokens, text and messages", ", ".join(prompts) or "none of them")
    if not any(message.request_id):
        raise RequestError("invalid_request", "field id: a request's id must not be all zero", field="id")
    credit = values.pop("credit")
    values["template_variables"] = dict(values["template_variables"])
    values["sampling"] = SamplingParameters(**values["sampling"])
    if values["constraint"] is not None:
        values["constraint"] = Constraint(**values["constraint"])
    if values["reasoning"] is not None:
        values["reasoning"] = Reasoning(**values["reasoning"])
    return Submission(GenerationRequest(request_id=message.request_id, **values), credit)


def event_message(event: Event, request_id: bytes) -> Message:
    """The message that reports an engine event under the client's own id of the request."""
    match event:
        case Chunk():
            return _chunk_message(event, request_id)
        case Failed(code=code, message=text_, hint=hint, details=details):
            return error_message(request_id, failure(code, text_, hint, details))
        case Admitted():
            kind, names = Kind.ADMITTED, ADMITTED_SCHEMA.fields
        case Progress():
            kind, names = Kind.PROGRESS, PROGRESS_SCHEMA.fields
        case Final():
            kind, names = Kind.FINAL, FINAL_SCHEMA.fields
    body = {field.name: getattr(event, field.name) for field in names}
    for name in _LEFT_OUT_IF_ZERO:
        if not body.get(name, True):
            del body[name]
    return Message(kind, request_id, body)


def error_message(request_id: bytes, error: RequestError) -> Message:
    """ERROR: ends the request `request_id`, or answers a message that belongs to none (all-zero id)."""
    body: dict[str, Any] = {"code": error.code, "message": " ".join(error.message.split())}
    if error.hint:
        body["hint"] = error.hint
    if error.details:
        body["details"] = dict(error.details)
    return Message(Kind.ERROR, request_id, body)


def _chunk_message(chunk: Chunk, request_id: bytes) -> Message:
    body: dict[str, Any] = {"tokens": list(chunk.tokens), "text": chunk.text}
    buffers: tuple[Frame, ...] = ()
    if chunk.logprobs:
        body["logprobs"] = [
            {"token": entry.token, "logprob": entry.logprob, "top": [list(other) for other in entry.top]}
            for entry in chunk.logprobs
        ]
    if chunk.prompt_logprobs:
        body["prompt_logprobs"] = list(chunk.prompt_logprobs)
    if chunk.logits is not None:
        rows = np.ascontiguousarray(chunk.logits, dtype="<f4")
        body["logits"] = {"buffer": 0, "dtype": "<f4", "shape": list(rows.shape)}
        buffers = (rows.data.cast("B"),) if rows.size else (b"",)
    return Message(Kind.CHUNK, request_id, body, buffers)


def read_event(message: Message) -> Event:
    """The event that a message from the daemon reports. Raises RequestError if it is none or cannot be read."""
    request_id = message.request_id
    match message.kind:
        case Kind.ADMITTED:
            return Admitted(request_id, **ADMITTED_SCHEMA.read(message.body))
        case Kind.PROGRESS:
            return Progress(request_id, **PROGRESS_SCHEMA.read(message.body))
        case Kind.CHUNK:
            return _read_chunk(message)
        case Kind.FINAL:
            return Final(request_id, **FINAL_SCHEMA.read(message.body))
        case Kind.ERROR:
            error = read_error(message)
            return Failed(request_id, error.code, error.message, error.hint, error.details)
    raise RequestError("unknown_kind", f"message kind {message.kind:#04x} reports no event", kind=message.kind)


def _read_chunk(message: Message) -> Chunk:
    values = CHUNK_SCHEMA.read(message.body)
    values["logprobs"] = tuple(TokenLogprob(**entry) for entry in values["logprobs"])
    if values["logits"] is not None:
        values["logits"] = _read_array(values["logits"], message.buffers)
    return Chunk(message.request_id, **values)


def _read_array(description: dict[str, Any], buffers: Sequence[Frame]) -> NDArray[np.float32]:
    """float32 array over the bytes of a raw frame (no copy)."""
    index, shape = description["buffer"], description["shape"]
    if index >= len(buffers):
        refuse("logits.buffer", f"one of {len(buffers)} raw frames", index)
    frame = memoryview(buffers[index])
    if frame.nbytes != 4 * int(np.prod(shape, dtype=np.int64)):
        refuse("logits.shape", f"the shape of {frame.nbytes} bytes of float32", str(list(shape)))
    return np.frombuffer(frame, dtype="<f4").reshape(shape)


def read_error(message: Message) -> RequestError:
    """The error that an ERROR message carries, as an exception to raise."""
    values = ERROR_SCHEMA.read(message.body)
    details = {key: value for key, value in values["details"].items() if isinstance(value, (int, float, str))}
    return failure(values["code"], values["message"], values["hint"], details)


def failure(code: str, message: str, hint: str, details: dict[str, Any]) -> RequestError:
    """RequestError of parts that were read from a message; details named like a parameter keep out of its way."""
    error = RequestError(code, message, hint)
    error.details = details
    return error


def chunk_cost(message: Message) -> int:
    """Credit that a CHUNK uses up: one, and one more for each whole MiB of its raw frames."""
    return 1 + sum(len(frame) for frame in message.buffers) // CREDIT_UNIT_BYTES
