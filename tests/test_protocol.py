"""Frames and bodies: recorded bytes both ways, values both ways, and input that nobody should send."""

from __future__ import annotations

import json
import math
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.runtime.error_table import ERROR_TABLE, http_status
from bloomery.runtime.errors import RequestError
from bloomery.runtime.facts import Welcome
from bloomery.runtime.field_types import REQUIRED
from bloomery.runtime.messages import (
    SCHEMAS,
    chunk_cost,
    event_message,
    read_error,
    read_event,
    read_request,
    request_message,
)
from bloomery.runtime.protocol import (
    MAGIC,
    MAX_NESTING,
    NO_REQUEST,
    Kind,
    Message,
    NotOurs,
    pack,
    read_envelope,
    unpack,
    unpack_body,
)
from bloomery.runtime.requests import (
    Admitted,
    Chunk,
    Failed,
    Final,
    GenerationRequest,
    Progress,
    SamplingParameters,
    TokenLogprob,
)

VECTORS = Path(__file__).parent / "data" / "protocol"
ID = bytes(range(0xA0, 0xB0))


def vector(kind: Kind) -> dict[str, Any]:
    recorded = json.loads((VECTORS / f"{kind.name.lower()}.json").read_text())
    assert recorded["kind"] == kind.name
    return recorded


def recorded_frames(kind: Kind) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in vector(kind)["frames"]]


def refusal(function: Any, *arguments: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        function(*arguments)
    return caught.value


# ---- recorded messages ----


@pytest.mark.parametrize("kind", Kind)
def test_recorded_bytes_are_read_and_written(kind: Kind) -> None:
    recorded, frames = vector(kind), recorded_frames(kind)
    message = unpack(frames)
    assert (message.kind, message.request_id) == (kind, bytes.fromhex(recorded["id"]))
    assert message.body == recorded["body"]
    assert [bytes(buffer).hex() for buffer in message.buffers] == recorded["buffers"]
    assert [bytes(frame) for frame in pack(message)] == frames
    SCHEMAS[kind].read(message.body)


def test_recorded_values() -> None:
    submission = read_request(unpack(recorded_frames(Kind.REQUEST)))
    assert submission.credit == 64
    assert submission.request == GenerationRequest(
        ID,
        text="Once upon a time",
        max_tokens=16,
        sampling=SamplingParameters(temperature=0.0, logprobs=1),
        stop=("\n",),
        logits="generated",
    )
    assert read_event(unpack(recorded_frames(Kind.ADMITTED))) == Admitted(ID, 2, 5, 4)
    assert read_event(unpack(recorded_frames(Kind.PROGRESS))) == Progress(ID, 5, 5, 4, 0.125)
    assert read_event(unpack(recorded_frames(Kind.FINAL))) == Final(ID, "stop", "\n", 5, 4, 2, 42, 0.5, 0.125, 0.25)
    chunk = read_event(unpack(recorded_frames(Kind.CHUNK)))
    assert isinstance(chunk, Chunk) and chunk.logits is not None
    assert (chunk.tokens, chunk.text) == ((311, 8), " and é")
    assert chunk.logprobs == (TokenLogprob(311, -0.5, ((311, -0.5),)), TokenLogprob(8, -1.25, ((9, -1.0),)))
    assert chunk.logits.tolist() == [[1.0, -2.0, 0.5], [0.25, 3.0, -0.125]]
    error = read_error(unpack(recorded_frames(Kind.ERROR)))
    assert (error.code, error.details) == ("exceed_context_size", {"prompt_tokens": 2000, "context": 1024})
    welcome = Welcome.of(unpack(recorded_frames(Kind.WELCOME)).body)
    assert welcome.model.end_tokens == (8187, 8189) and welcome.model.bos is None and welcome.limits.queue == 64


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.ADMITTED, Kind.PROGRESS, Kind.CHUNK, Kind.FINAL, Kind.ERROR])
def test_recorded_values_are_written_as_recorded(kind: Kind) -> None:
    message = unpack(recorded_frames(kind))
    if kind == Kind.REQUEST:
        submission = read_request(message)
        written = request_message(submission.request, submission.credit)
    else:
        written = event_message(read_event(message), ID)
    read, again = SCHEMAS[kind].read(message.body), SCHEMAS[kind].read(unpack(pack(written)).body)
    assert again == read
    assert [bytes(buffer) for buffer in written.buffers] == [bytes(buffer) for buffer in message.buffers]


def test_welcome_is_written_as_recorded() -> None:
    message = unpack(recorded_frames(Kind.WELCOME))
    written = Message(Kind.WELCOME, NO_REQUEST, Welcome.of(message.body).body())
    assert [bytes(frame) for frame in pack(written)] == recorded_frames(Kind.WELCOME)


# ---- values both ways ----

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(tuple)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
sampling = st.builds(
    SamplingParameters,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 100),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    repeat_last_n=st.integers(-1, 100),
    logit_bias=st.lists(st.tuples(st.integers(0, 1000), st.sampled_from([-math.inf, -1.5, 3.0])), max_size=3).map(
        tuple
    ),
    seed=st.none() | st.integers(0, 2**63 - 1),
    logprobs=st.integers(0, 20),
)
requests = st.builds(
    GenerationRequest,
    request_id=st.binary(min_size=16, max_size=16).filter(any),
    text=texts,
    max_tokens=st.integers(-1, 1000),
    sampling=sampling,
    stop=st.lists(texts, max_size=3).map(tuple),
    stop_tokens=tokens,
    ignore_eos=st.booleans(),
    add_special=st.booleans(),
    parse_special=st.booleans(),
    cache_prompt=st.booleans(),
    score_prompt=st.booleans(),
    logits=st.sampled_from(["none", "generated", "all"]),
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(request=requests, credit=st.integers(0, 1000))
def test_any_request_arrives_as_it_was_sent(request: GenerationRequest, credit: int) -> None:
    submission = read_request(unpack(pack(request_message(request, credit))))
    assert (submission.request, submission.credit) == (request, credit)


def test_the_other_prompts_arrive() -> None:
    conversation = ({"role": "user", "content": "héllo"}, {"role": "assistant", "content": "x", "extra": [1, None]})
    for request in (
        GenerationRequest(ID, tokens=()),
        GenerationRequest(ID, tokens=(1, 2, 3)),
        GenerationRequest(ID, messages=conversation, template_variables={"thinking": False}),
    ):
        assert read_request(unpack(pack(request_message(request)))).request == request


def test_every_request_field_is_on_the_wire() -> None:
    described = {field.name for field in SCHEMAS[Kind.REQUEST].fields} - {"credit"}
    assert described == {field.name for field in fields(GenerationRequest)} - {"request_id"}
    for field in fields(SamplingParameters):
        special = {
            "logit_bias": ((1, 2.0),),
            "seed": 7,
            "mirostat": 2,
            "dry_base": 2.5,
            "dry_sequence_breakers": ("x", "\n"),
            "samplers": ("temperature", "adaptive_p"),
            "post_sampling_probs": True,
        }
        value: Any = special.get(field.name, 0.25 if field.type == "float" else 3)
        request = GenerationRequest(ID, text="x", sampling=replace(SamplingParameters(), **{field.name: value}))
        assert read_request(unpack(pack(request_message(request)))).request == request


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    chunk_tokens=tokens,
    text=texts,
    values=st.lists(st.floats(-1e9, 0) | st.just(-math.inf), max_size=4).map(tuple),
    shape=st.tuples(st.integers(0, 4), st.integers(1, 5)),
)
def test_any_chunk_arrives_as_it_was_sent(
    chunk_tokens: tuple[int, ...], text: str, values: tuple[float, ...], shape: tuple[int, int]
) -> None:
    logits = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)[:, ::-1]  # not contiguous
    entries = tuple(TokenLogprob(token, -0.25, ((token, -0.25), (0, -math.inf))) for token in chunk_tokens)
    sent = Chunk(b"", chunk_tokens, text, entries, values, logits)
    arrived = read_event(unpack([bytes(frame) for frame in pack(event_message(sent, ID))]))
    assert isinstance(arrived, Chunk) and arrived.logits is not None
    assert replace(arrived, logits=None) == replace(sent, request_id=ID, logits=None)
    np.testing.assert_array_equal(arrived.logits, logits)


def test_failures_keep_their_details() -> None:
    failed = Failed(ID, "overloaded", "full", "wait", {"retry_after_s": 1.5, "code": 3, "message": "odd"})
    assert read_event(unpack(pack(event_message(failed, ID)))) == failed


def test_cost_of_a_chunk() -> None:
    for nbytes, cost in ((0, 1), (4, 1), ((1 << 20) - 4, 1), (1 << 20, 2), (5 << 20, 6)):
        logits = np.zeros((1, nbytes // 4), np.float32)
        assert chunk_cost(event_message(Chunk(ID, logits=logits), ID)) == cost


# ---- input that nobody should send ----


def test_frames_that_are_no_message() -> None:
    good = recorded_frames(Kind.PING)
    for frames in (
        [],
        [b""],
        good[:3],
        [b"BLM2", *good[1:]],
        [MAGIC, b"", *good[2:]],
        [MAGIC, b"\x01\x02", *good[2:]],
        [*good[:2], bytes(15), good[3]],
        [*good, *[b""] * 20],
    ):
        with pytest.raises(NotOurs):
            read_envelope(frames)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91\x01",
        b"\xa3abc",
        b"\x80\x80",
        b"\x81\xa1",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\x01\x02",
        b"\x81\xc4\x01a\x02",
        b"\x81\x90\x02",
        b"\x81\xa1a\xa2\xff\xfe",
        b"\x81\xa1a\xd4\x05\x00",
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",
        b"\x81\xa1a" + b"\x91" * 200 + b"\x01",
        b"\x81\xa1a" + b"\x91" * 100_000 + b"\x01",
        b"\x81\xa1a" * 5000 + b"\x01",
    ],
)
def test_bodies_that_are_no_plain_map(body: bytes) -> None:
    assert refusal(unpack_body, body).code == "invalid_message"


def test_nesting_up_to_the_limit_is_read() -> None:
    def nested(levels: int) -> bytes:
        return b"\x81\xa1a" + b"\x91" * (levels - 1) + b"\x01"

    unpack_body(nested(MAX_NESTING))
    assert "128 levels" in refusal(unpack_body, nested(MAX_NESTING + 1)).message


@settings(deadline=None, max_examples=300, derandomize=True)
@given(body=st.binary(max_size=60))
def test_random_bytes_are_a_map_or_refused(body: bytes) -> None:
    try:
        assert isinstance(unpack_body(body), dict)
    except RequestError as error:
        assert error.code == "invalid_message"


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(data=st.data(), kind=st.sampled_from(Kind))
def test_wrong_types_are_refused_by_field(data: st.DataObject, kind: Kind) -> None:
    """Any value in any field either is accepted as described or refused with the field's name; nothing else happens."""
    schema = SCHEMAS[kind]
    valid = unpack(recorded_frames(kind)).body
    names = [field.name for field in schema.fields]
    name = data.draw(st.sampled_from(names)) if names else "unknown"
    body = msgpack.unpackb(msgpack.packb(valid | {name: data.draw(plain_values)}), strict_map_key=False)
    try:
        schema.read(body)
    except RequestError as error:
        assert error.code == "invalid_request"
        assert str(error.details["field"]).startswith(name)
        assert f"field {name}" in error.message


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("max_tokens", "four", "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_tokens", -2, "max_tokens"),
        ("tokens", [1, 2, "x"], "tokens[2]"),
        ("tokens", [1, -1], "tokens[1]"),
        ("tokens", [True], "tokens[0]"),
        ("tokens", [2**31], "tokens[0]"),
        ("tokens", "abc", "tokens"),
        ("messages", [{"role": "user"}, 3], "messages[1]"),
        ("sampling", 3, "sampling"),
        ("sampling", {"temperature": math.nan}, "sampling.temperature"),
        ("sampling", {"temperature": -0.5}, "sampling.temperature"),
        ("sampling", {"top_p": 1.5}, "sampling.top_p"),
        ("sampling", {"logit_bias": [[1, 2.0], [1]]}, "sampling.logit_bias[1]"),
        ("sampling", {"logit_bias": [[1, math.nan]]}, "sampling.logit_bias[0][1]"),
        ("sampling", {"seed": -1}, "sampling.seed"),
        ("stop", ["a", None], "stop[1]"),
        ("logits", "some", "logits"),
        ("credit", -1, "credit"),
    ],
)
def test_the_refusal_names_the_field(field: str, value: Any, named: str) -> None:
    body = {field: value} if field in ("tokens", "messages") else {"text": "x", field: value}
    error = refusal(read_request, Message(Kind.REQUEST, ID, body))
    assert (error.code, error.details) == ("invalid_request", {"field": named})
    assert f"field {named}: expected " in error.message and ", found " in error.message


def test_exactly_one_prompt() -> None:
    for body in ({}, {"text": "a", "tokens": [1]}, {"tokens": [1], "messages": []}):
        assert (
            "exactly one of tokens, text and messages" in refusal(read_request, Message(Kind.REQUEST, ID, body)).message
        )
    assert refusal(read_request, Message(Kind.REQUEST, NO_REQUEST, {"text": "a"})).details == {"field": "id"}


def test_unknown_fields_are_ignored() -> None:
    body = {"text": "x", "later": {"deep": [1]}, "sampling": {"temperature": 0, "mirostat": 2}}
    assert read_request(Message(Kind.REQUEST, ID, body)).request.sampling.temperature == 0.0
    for kind in Kind:
        valid = unpack(recorded_frames(kind)).body
        assert SCHEMAS[kind].read(valid | {"later": 1}) == SCHEMAS[kind].read(valid)


def test_missing_fields_are_named() -> None:
    for kind in Kind:
        for field in SCHEMAS[kind].fields:
            if field.default is REQUIRED:
                body = unpack(recorded_frames(kind)).body
                del body[field.name]
                assert refusal(SCHEMAS[kind].read, body).details == {"field": field.name}


def test_logits_must_match_their_buffer() -> None:
    body = unpack(recorded_frames(Kind.CHUNK)).body
    for buffers in ((), (bytes(20),)):
        assert refusal(read_event, Message(Kind.CHUNK, ID, body, buffers)).code == "invalid_request"


def test_what_msgpack_cannot_carry_is_refused_before_sending() -> None:
    for text in ("lone \ud800 surrogate",):
        assert refusal(pack, request_message(GenerationRequest(ID, text=text))).code == "invalid_request"
    variables = {"big": 2**70, "odd": object()}
    for name, value in variables.items():
        request = GenerationRequest(ID, messages=(), template_variables={name: value})
        assert refusal(pack, request_message(request)).code == "invalid_request"


def test_a_long_prompt_is_checked_quickly() -> None:
    request = GenerationRequest(ID, tokens=tuple(range(1_000_000)))
    frames = pack(request_message(request))
    start = time.perf_counter()
    assert read_request(unpack(frames)).request == request
    assert time.perf_counter() - start < 1.0


def test_error_table() -> None:
    codes = [row.code for row in ERROR_TABLE]
    assert len(set(codes)) == len(codes)
    assert all(400 <= row.status < 600 and row.meaning.endswith(".") for row in ERROR_TABLE)
    assert http_status("overloaded") == 429 and http_status("from the future") == 500
