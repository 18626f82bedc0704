"""bloomery-serve over HTTP with the demo model: shapes, numbers, errors, slots on disk."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import left_behind
from serving import DEMO, GREEDY, PROMPT, Serving, completion, numbers, serving

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a word?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    before = left_behind()
    folder = str(tmp_path_factory.mktemp("slots"))
    arguments = ("--parallel", "2", "-c", "1024", "--metrics", "--slot-save-path", folder, "--alias", "demo,tiny")
    with serving(*DEMO, *arguments) as running:
        yield running
    assert left_behind() <= before


# ---- what the server says about itself ----


def test_facts(server: Serving) -> None:
    props = server.get("/props").json
    assert props["total_slots"] == 2 and props["default_generation_settings"]["n_ctx"] == 512
    assert props["model_path"].endswith(".gguf") and props["chat_template"]
    models = server.get("/v1/models").json
    assert [entry["id"] for entry in models["data"]] == ["demo"]
    assert models["data"][0]["aliases"] == ["demo", "tiny"] and models["data"][0]["meta"]["n_ctx"] == 512
    assert models["data"][0]["meta"]["vocab_type"] == 2 and models["data"][0]["meta"]["n_embd"] > 0
    assert server.get("/health").json == {"status": "ok"} == server.get("/v1/health").json
    assert server.get("/nowhere").status == 404 and server.get("/nowhere").json["error"]["type"] == "not_found_error"
    assert server.get("/completion").status == 405
    for path in ("/cors-proxy?url=http://127.0.0.1:1/", "/tools"):
        assert server.get(path).status == server.post(path, {}).status == 403
        assert server.get(path).json["error"]["type"] == "permission_error"


def test_page_needs_nothing_from_outside(server: Serving) -> None:
    page = server.get("/")
    assert page.status == 200 and page.data.startswith(b"<!doctype html>")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert b"http://" not in page.data and b"https://" not in page.data and b"src=" not in page.data
    assert server.get("/manifest.webmanifest").json["name"] == "bloomery"


# ---- llama-server's own endpoint ----


def test_stream_and_whole_answer_agree(server: Serving) -> None:
    whole = completion(server, return_tokens=True)
    chunks = server.stream("/completion", GREEDY)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"] != ""
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"] and len(whole["tokens"]) == 12
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["generation_settings"] == whole["generation_settings"] | {"stream": True}
    assert whole["prompt"].endswith(PROMPT) and whole["stop_type"] == "limit" and not whole["truncated"]


def test_timings(server: Serving) -> None:
    first = completion(server, prompt="Numbers, counted: one two three", cache_prompt=False)["timings"]
    again = completion(server, prompt="Numbers, counted: one two three")["timings"]
    assert first["cache_n"] == 0 and again["cache_n"] == first["prompt_n"] - 1 and again["prompt_n"] == 1
    assert first["predicted_n"] == 12
    assert math.isclose(first["predicted_per_second"], 11e3 / first["predicted_ms"])
    single = completion(server, n_predict=1)["timings"]
    assert single["predicted_per_second"] == single["predicted_per_token_ms"] == 0


def test_seeds(server: Serving) -> None:
    def text(**fields: Any) -> str:
        return str(completion(server, temperature=1.5, top_k=0, top_p=1, n_predict=24, **fields)["content"])

    assert text(seed=5) == text(seed=5) != text(seed=6)
    random = completion(server, temperature=1.5, seed=-1)
    assert 0 <= random["generation_settings"]["seed"] < 2**32


def test_stop_words_and_end_tokens(server: Serving) -> None:
    whole = completion(server)["content"]
    word = whole[4:9]
    cut = completion(server, stop=["never, ever", word])
    assert cut["content"] == whole[: whole.index(word)]
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", word)
    settings = completion(server, ignore_eos=True)["generation_settings"]
    assert settings["ignore_eos"] and all(entry["bias"] is None for entry in settings["logit_bias"])
    assert settings["logit_bias"] and not completion(server)["generation_settings"]["logit_bias"]


def test_four_spellings_of_a_bias(server: Serving) -> None:
    chosen = completion(server, return_tokens=True)["tokens"][0]
    text = server.post("/detokenize", {"tokens": [chosen]}).json["content"]
    assert server.post("/tokenize", {"content": text}).json["tokens"] == [chosen]
    spellings: list[Any] = [[[chosen, False]], [[text, -1000]], {str(chosen): -1000}, {text: False}]
    answers = [completion(server, logit_bias=bias, return_tokens=True)["tokens"] for bias in spellings]
    assert answers[0][0] != chosen and answers.count(answers[0]) == 4


def test_probabilities(server: Serving) -> None:
    plain = completion(server, n_probs=3, n_predict=4)["completion_probabilities"]
    assert len(plain) == 4
    for entry in plain:
        assert len(entry["top_logprobs"]) == 3 and entry["id"] == entry["top_logprobs"][0]["id"]
        assert bytes(entry["bytes"]).decode("utf-8", "ignore") == entry["token"] and entry["logprob"] <= 0
    drawn = completion(server, n_probs=50, post_sampling_probs=True, temperature=1, top_k=5, top_p=1, min_p=0)
    for entry in drawn["completion_probabilities"]:
        assert 0 < entry["prob"] <= 1 and len(entry["top_probs"]) == 5
        assert math.isclose(sum(other["prob"] for other in entry["top_probs"]), 1, rel_tol=1e-4)
    chunks = server.stream("/completion", GREEDY | {"n_probs": 2})
    streamed = [entry["id"] for chunk in chunks for entry in chunk.get("completion_probabilities", [])]
    assert streamed == completion(server, return_tokens=True)["tokens"]


def test_forms_of_a_prompt(server: Serving) -> None:
    tokens = server.post("/tokenize", {"content": PROMPT, "add_special": True}).json["tokens"]
    whole = completion(server)["content"]
    assert completion(server, prompt=tokens)["content"] == whole
    assert completion(server, prompt={"prompt_string": PROMPT})["content"] == whole
    several = server.post("/completion", GREEDY | {"prompt": [tokens, PROMPT]}).json
    assert [entry["content"] for entry in several] == [whole, whole] and [entry["index"] for entry in several] == [0, 1]
    assert completion(server, prompt=[*tokens[:2], "history"])["tokens_evaluated"] >= 3


def test_chosen_fields(server: Serving) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/prompt_n", "nothing"]
    assert list(completion(server, response_fields=fields)) == fields[:3]


def test_pieces_of_tokens(server: Serving) -> None:
    text = "naïve 媽 🤗"
    entries = server.post("/tokenize", {"content": text, "with_pieces": True}).json["tokens"]
    pieces = [p.encode() if isinstance(p := entry["piece"], str) else bytes(p) for entry in entries]
    assert b"".join(pieces).decode() == text
    assert server.post("/detokenize", {"tokens": [entry["id"] for entry in entries]}).json["content"] == text


def test_progress_comes_first(server: Serving) -> None:
    prompt = "A rather long prompt about nothing in particular. " * 8
    chunks = server.stream("/completion", GREEDY | {"prompt": prompt, "return_progress": True, "cache_prompt": False})
    reports = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert reports[0]["processed"] == reports[0]["cache"] == 0
    assert reports[-1]["processed"] == reports[-1]["total"] == chunks[-1]["tokens_evaluated"]
    assert "prompt_progress" not in chunks[-1]


CONSTRAINED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"grammar": 'root ::= "yes" | "no"'}, r"yes|no"),
    ({"json_schema": {"const": "42"}}, r'"42"'),
    ({"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}, r"\[.*\]"),
    ({"response_format": {"type": "json_object", "schema": {"enum": [7, 8]}}}, r"7|8"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "x"}}}}, r'"x"'),
)


@pytest.mark.parametrize(("fields", "pattern"), CONSTRAINED, ids=str)
def test_constrained_answers(server: Serving, fields: dict[str, Any], pattern: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0.8, "seed": 3} | fields
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.data
    assert re.fullmatch(pattern, answer.json["choices"][0]["message"]["content"], re.DOTALL)


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "root ::= this is (not"},
        {"grammar": 'root ::= "a"', "json_schema": {}},
        {"json_schema": {"type": "hiccup"}},
        {"json_schema": 123},
        {"response_format": {"type": "sound"}},
        {"response_format": {"type": "json_schema", "json_schema": 3}},
        {"response_format": "json"},
    ],
    ids=str,
)
def test_impossible_constraints_are_refused(server: Serving, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, "stream": stream} | fields)
        assert answer.status == 400 and answer.json["error"]["message"], answer.data


# ---- errors ----

DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD_BODIES: dict[str, Any] = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"prompt": "\xff"}',
    "a list": [],
    "nested": DEEP,
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "no prompt": {},
    "prompt is a number": {"prompt": 3},
    "prompt is empty": {"prompt": []},
    "token too large": {"prompt": [10**6]},
    "temperature is text": {"prompt": "x", "temperature": "hot"},
    "seed is a list": {"prompt": "x", "seed": [1]},
    "n_predict too small": {"prompt": "x", "n_predict": -2},
    "n too large": {"prompt": "x", "n": 3},
    "stop is a number": {"prompt": "x", "stop": 3},
    "stream is text": {"prompt": "x", "stream": "yes"},
    "slot too large": {"prompt": "x", "id_slot": 2},
    "bias has a word": {"prompt": "x", "logit_bias": [[1, "y"]]},
    "bias is null": {"prompt": "x", "logit_bias": {"--5": 1, "-": 1, "9" * 5000: None}},
    "huge integer": b'{"prompt": "x", "n_predict": ' + b"9" * 400 + b"}",
    "images": {"prompt": {"prompt_string": "x", "multimodal_data": ["x"]}},
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_bodies_are_refused(server: Serving, name: str) -> None:
    for path in ("/completion", "/v1/completions"):
        answer = server.post(path, BAD_BODIES[name])
        assert answer.status in (400, 501), (path, answer.data)
        error = answer.json["error"]
        assert error["code"] == answer.status and error["message"] and error["type"]


BAD_MESSAGES: tuple[Any, ...] = (
    None,
    "text",
    [3],
    [{}],
    [{"role": 3, "content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}],
    [{"role": "assistant", "tool_calls": [{}]}, {"role": "user", "content": "x"}],
)


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=str)
def test_bad_messages_are_refused(server: Serving, messages: Any) -> None:
    for path in ("/v1/chat/completions", "/apply-template"):
        answer = server.post(path, {"messages": messages})
        assert answer.status == 400 and answer.json["error"]["type"] == "invalid_request_error", answer.data


def test_large_bodies(server: Serving) -> None:
    answer = server.post("/completion", {"prompt": "word " * 200_000})
    assert answer.status == 400 and answer.json["error"]["type"] == "exceed_context_size_error"
    connection = server.connect()
    connection.putrequest("POST", "/completion")
    connection.putheader("Content-Length", str(1 << 30))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit(server: Serving, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "a word " * 600}], "stream": stream}
    answer = server.post("/v1/chat/completions", body)
    error = answer.json["error"]
    assert answer.status == 400 and error["type"] == "exceed_context_size_error"
    assert error["n_ctx"] == 512 < error["n_prompt_tokens"] and "available context size" in error["message"]


def test_the_context_ends_an_answer(server: Serving) -> None:
    answer = completion(server, n_predict=-1, ignore_eos=True)
    assert answer["truncated"] and answer["stop_type"] == "limit"
    assert answer["tokens_evaluated"] + answer["tokens_predicted"] == 512


# ---- slots ----


def test_slots_are_saved_and_brought_back(server: Serving, tmp_path: Path) -> None:
    prompt = "Slots are kept on disk, said the manual, " * 3
    first = completion(server, prompt=prompt, id_slot=0, cache_prompt=False)
    saved = server.post("/slots/0?action=save", {"filename": "one.bin"}).json
    assert saved["n_saved"] == first["tokens_evaluated"] + 11 and saved["n_written"] > 0
    erased = server.post("/slots/0?action=erase", {}).json
    assert erased == {"id_slot": 0, "n_erased": saved["n_saved"]}
    restored = server.post("/slots/1?action=restore", {"filename": "one.bin"}).json
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    again = completion(server, prompt=prompt, id_slot=1)
    assert again["timings"]["prompt_n"] == 1 and again["content"] == first["content"]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "x" * 300, "gone.bin"])
def test_names_of_slot_files(server: Serving, name: str) -> None:
    for action in ("save", "restore") if name != "gone.bin" else ("restore",):
        answer = server.post(f"/slots/0?action={action}", {"filename": name})
        assert answer.status == 400, (action, answer.data)
    assert server.post("/slots/7?action=erase", {}).status == 400
    assert server.post("/slots/0?action=eat", {}).status == 400


def test_damaged_slot_files(server: Serving) -> None:
    completion(server, id_slot=0)
    folder = Path(next(arg for arg in _arguments(server) if "slots" in arg and arg.startswith("/")))
    assert server.post("/slots/0?action=save", {"filename": "good.bin"}).status == 200
    data = (folder / "good.bin").read_bytes()
    for index, damaged in enumerate((b"", data[:10], data[:-1], b"x" + data[1:], data.replace(b'"plan"', b'"pain"'))):
        (folder / f"bad{index}.bin").write_bytes(damaged)
        answer = server.post("/slots/1?action=restore", {"filename": f"bad{index}.bin"})
        assert answer.status == 400 and "cannot be restored" in answer.json["error"]["message"], index


def _arguments(server: Serving) -> list[str]:
    return Path(f"/proc/{server.process.pid}/cmdline").read_bytes().decode().split("\0")


# ---- counters ----


def test_metrics_add_up(server: Serving) -> None:
    before = numbers(server)
    answers = [completion(server, prompt="Counters count. " * count)["timings"] for count in (3, 3, 5)]
    after = numbers(server)
    for name, field in (
        ("llamacpp:prompt_tokens_total", "prompt_n"),
        ("llamacpp:prompt_tokens_cached_total", "cache_n"),
        ("llamacpp:tokens_predicted_total", "predicted_n"),
    ):
        assert after[name] - before[name] == sum(answer[field] for answer in answers), name
    assert after["llamacpp:n_decode_total"] > before["llamacpp:n_decode_total"]
    assert after["llamacpp:requests_processing"] == 0 and after["llamacpp:n_tokens_max"] > 0
