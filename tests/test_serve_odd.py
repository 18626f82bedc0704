"""What real clients send and few servers are tried with: lists of many prompts, deep schemas, odd values, slow readers.

Planted once and seen to fail: all prompts of a list submitted at once; a limit of 32 levels; the spelling "--5" read as
a number; values beyond a range refused that llama-server takes.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serving import Serving, serving, wait_for

from bloomery.launcher.http.embeddings import normalised

ASKED: dict[str, Any] = {"prompt": "The", "n_predict": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    flags = ("--threads", "1", "-np", "2", "-c", "2048", "--queue", "2", "--embeddings", "--metrics")
    with serving("--demo", "tiny-qwen3moe", *flags) as started:
        yield started


def completion(server: Serving, **fields: Any) -> Any:
    answer = server.post("/completion", ASKED | fields)
    assert answer.status == 200, answer.data
    return answer.json


def test_a_list_of_prompts_takes_slots_and_no_queue(server: Serving) -> None:
    """Twelve prompts on two slots with a queue of two; each answer is that of its prompt alone."""
    prompts = [f"number {index} is" for index in range(12)]
    several = completion(server, prompt=prompts)
    assert [entry["index"] for entry in several] == list(range(12))
    alone = [completion(server, prompt=prompt)["content"] for prompt in prompts[::5]]
    assert [entry["content"] for entry in several[::5]] == alone
    chunks = server.stream("/v1/completions", {"prompt": prompts, "max_tokens": 2})
    assert {chunk["choices"][0]["index"] for chunk in chunks[:-1] if chunk["choices"]} == set(range(12))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"end": {"enum": [1]}}, "required": ["end"]}
    for _ in range(levels):
        inner = {"anyOf": [schema, {"type": "null"}]}
        schema = {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}
    return schema


def test_schemas_as_deep_as_openai_allows_them(server: Serving) -> None:
    answer = completion(server, json_schema=deep(10), n_predict=200, ignore_eos=False)
    assert answer["stop_type"] == "limit" or isinstance(json.loads(answer["content"]), dict)
    tool = {"type": "function", "function": {"name": "f", "parameters": deep(10)}}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "tools": [tool], "tool_choice": "required"}
    assert server.post("/v1/chat/completions", chat).status == 200
    refused = server.post("/completion", ASKED | {"json_schema": deep(100)})
    assert refused.status == 400 and "levels deep" in refused.json["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"--5": 1, "-": 1, "9" * 5000: 2}},
        {"typical_p": 5},
        {"dry_multiplier": 1, "dry_base": 0},
        {"top_n_sigma": 1e9},
        {"dynatemp_range": 1e9},
        {"mirostat": 7},
        {"adaptive_target": -5000},
        {"n_probs": 10**9},
        {"dry_multiplier": 1, "dry_sequence_breakers": ["y" * 20_000 + str(index) for index in range(200)]},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_values_that_are_moved_into_their_range(server: Serving, fields: dict[str, Any]) -> None:
    assert completion(server, **fields)["tokens_predicted"] == 3


def test_what_would_take_too_long_is_refused(server: Serving) -> None:
    answer = server.post("/completion", ASKED | {"logit_bias": [[f"word {index}", 1] for index in range(1025)]})
    assert answer.status == 400 and "give token ids" in answer.json["error"]["message"]


def test_what_llama_server_has_and_this_one_has_not(server: Serving) -> None:
    assert server.get("/lora-adapters").json == []
    for path in ("/rerank", "/v1/reranking", "/v1/audio/transcriptions", "/lora-adapters"):
        answer = server.post(path, {})
        assert answer.status == 501 and answer.json["error"]["type"] == "not_supported_error", path


def test_a_response_has_one_answer(server: Serving) -> None:
    for stream in (False, True):
        answer = server.post("/v1/responses", {"input": "x", "n": 2, "stream": stream})
        assert answer.status == 400 and answer.json["error"]["param"] == "n"


def test_norms_of_any_power() -> None:
    rows = np.array([[3.0, -4.0, 0.0], [0.0, 0.0, 0.0], [1e-30, 2e30, 1.0]], dtype=np.float32)
    with np.errstate(all="raise", under="ignore"):
        assert normalised(rows, 2)[0] == pytest.approx([0.6, -0.8, 0])
        assert normalised(rows, 2**31 - 1)[0] == pytest.approx([0.75, -1, 0], abs=1e-6)
        assert normalised(rows, 1)[2] == pytest.approx([0, 1, 0])
        assert not normalised(rows, 7)[1].any()


def test_a_reader_that_does_not_read_is_let_go(server: Serving) -> None:
    """It takes the beginning of a long stream and then nothing; its slot is free again when it leaves, and others are
    served meanwhile."""
    body = json.dumps(ASKED | {"n_predict": -1, "stream": True, "n_probs": 50}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert link.recv(100).startswith(b"HTTP/1.1 200")
        assert completion(server)["tokens_predicted"] == 3 and server.get("/health").status == 200
    wait_for(lambda: not any(slot["is_processing"] for slot in server.get("/slots").json), seconds=3)
