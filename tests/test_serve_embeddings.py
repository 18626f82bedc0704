"""Embeddings: pooling of hidden states, and /v1/embeddings over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serving import Serving, serving

from bloomery.launcher.http.embeddings import normalised
from bloomery.runtime.pooling import Pool, Pooling

TEXTS = ["the meaning of a word", "a word", "the meaning of a word"]


@pytest.mark.parametrize("kind", ["last", "first", "mean", "all"])
def test_pieces_do_not_matter(kind: Pooling) -> None:
    rows = np.random.default_rng(3).normal(size=(9, 5)).astype(np.float32)
    whole, pieces = Pool(kind), Pool(kind)
    whole.add(rows)
    for piece in (rows[:1], rows[1:6], rows[6:]):
        pieces.add(piece)
    expected = {"last": rows[-1:], "first": rows[:1], "mean": rows.mean(axis=0, keepdims=True), "all": rows}[kind]
    np.testing.assert_array_equal(whole.result(), pieces.result())
    np.testing.assert_allclose(whole.result(), expected, rtol=1e-6)


def test_norms() -> None:
    rows = np.array([[3.0, -4.0], [0.0, 0.0]], dtype=np.float32)
    np.testing.assert_allclose(normalised(rows, 2)[0], [0.6, -0.8], rtol=1e-6)
    np.testing.assert_allclose(normalised(rows, 1)[0], [3 / 7, -4 / 7], rtol=1e-6)
    np.testing.assert_allclose(normalised(rows, 0)[0], [24570, -32760], rtol=1e-6)
    np.testing.assert_array_equal(normalised(rows, -1), rows)
    assert not normalised(rows, 2)[1].any()


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    flags = ("--embeddings", "-np", "2", "-c", "512")
    with serving("--demo", "tiny-qwen3moe", "--executor", "reference", *flags) as running:
        yield running


def vectors(server: Serving, **body: Any) -> list[Any]:
    answer = server.post("/v1/embeddings", body)
    assert answer.status == 200, answer.data
    return [entry["embedding"] for entry in answer.json["data"]]


def test_vectors(server: Serving) -> None:
    first, second, third = vectors(server, input=TEXTS)
    assert first == third != second and abs(sum(x * x for x in first) - 1) < 1e-5
    (packed,) = vectors(server, input=TEXTS[0], encoding_format="base64")
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.float32(first))
    tokens = server.post("/tokenize", {"content": TEXTS[0], "add_special": True}).json["tokens"]
    assert vectors(server, input=tokens) == [first]
    usage = server.post("/v1/embeddings", {"input": TEXTS[0]}).json["usage"]
    assert usage == {"prompt_tokens": len(tokens), "total_tokens": len(tokens)}
    native = server.post("/embedding", {"content": TEXTS[0]}).json
    assert native == [{"index": 0, "embedding": [first]}]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": 3},
        {"input": {"content": "x"}},
        {"input": {"content": [{"type": "image_url"}]}},
        {"input": "x", "encoding_format": "hex"},
        {"input": "x", "embd_normalize": "much"},
        {"input": "word " * 600},
    ],
    ids=str,
)
def test_bad_input(server: Serving, body: dict[str, Any]) -> None:
    answer = server.post("/v1/embeddings", body)
    assert answer.status == 400 and answer.json["error"]["message"], answer.data
