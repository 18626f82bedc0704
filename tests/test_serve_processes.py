"""bloomery-serve with other flags and in other states: keys, a full queue, loading, asleep, without its daemon."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from conftest import left_behind
from serving import (
    DEMO,
    GREEDY,
    PROMPT,
    busy,
    completion,
    events,
    numbers,
    serving,
    start_server,
    stop_server,
    wait_for,
)


def test_templates_are_told_about_thinking_and_the_date() -> None:
    template = "{{ enable_thinking }} {{ date_string }} {{ extra }} {% for m in messages %}{{ m.content }}{% endfor %}"
    arguments = ("--chat-template", template, "--chat-template-kwargs", '{"extra": "given"}', "-np", "1", "-c", "256")
    with serving(*DEMO, *arguments) as server:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "now?"}]}
        today = datetime.now().strftime("%d %b %Y")
        assert server.post("/apply-template", asked).json["prompt"] == f"True {today} given now?"
        own = asked | {"chat_template_kwargs": {"enable_thinking": False, "extra": "mine"}}
        assert server.post("/apply-template", own).json["prompt"] == f"False {today} mine now?"
        assert server.post("/apply-template", asked | {"reasoning_effort": "none"}).json["prompt"].startswith("False")
        wrong = asked | {"chat_template_kwargs": {"enable_thinking": "no"}}
        assert server.post("/apply-template", wrong).status == 400


def test_keys_and_origins() -> None:
    arguments = (
        "--api-key",
        "one,two",
        "--no-slots",
        "--cors-origins",
        "localhost",
        "--no-ui",
        "-c",
        "256",
        "-np",
        "1",
    )
    with serving(*DEMO, *arguments) as server:
        assert server.get("/health").status == 200
        refused = server.post("/completion", GREEDY)
        assert refused.status == 401 and refused.json["error"]["type"] == "authentication_error"
        assert server.post("/completion", GREEDY, Authorization="Bearer three").status == 401
        assert server.post("/completion", GREEDY, Authorization="Bearer two").status == 200
        assert server.post("/completion", GREEDY, **{"x-api-key": "one"}).status == 200
        key = {"Authorization": "Bearer one"}
        assert server.get("/slots", **key).status == server.get("/metrics", **key).status == 501
        assert server.get("/", **key).status == 404
        asked = server.request("OPTIONS", "/completion", headers={"Origin": "http://localhost:3000"})
        assert asked.status == 200 and asked.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"
        asked = server.request("OPTIONS", "/completion", headers={"Origin": "http://localhost.evil.com"})
        assert "Access-Control-Allow-Origin" not in asked.headers


def test_a_client_that_leaves_frees_its_slot() -> None:
    """The reference executor is slow enough for an answer to be left."""
    with serving("--demo", "tiny-qwen3moe", "--executor", "reference", "-np", "1", "-c", "512", "--metrics") as server:
        for count, stream in enumerate((False, True), 1):
            body = json.dumps({"prompt": PROMPT, "n_predict": -1, "ignore_eos": True, "stream": stream}).encode()
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                sock.sendall(head.encode() + body)
                wait_for(lambda: busy(server)[0] and "n_prompt_tokens" in server.get("/slots").json[0])
            wait_for(lambda: not busy(server)[0], seconds=2)
            assert numbers(server)['bloomery_requests_total{outcome="aborted"}'] == count
            slot = server.get("/slots").json[0]
            assert slot["n_prompt_tokens"] < 512 and slot["next_token"][0]["n_remain"] == -1


def test_full_queue() -> None:
    """One slot and a queue of one: the third request is refused. The reference executor is slow enough for that."""
    arguments = ("--executor", "reference", "-c", "512", "-np", "1", "--queue", "1", "--metrics")
    with serving("--demo", "tiny-qwen3moe", *arguments) as server:
        statuses: list[int] = []
        running = server.connect()  # until the others are there and it is left, on a busy machine too
        running.request("POST", "/completion", json.dumps(GREEDY | {"n_predict": -1, "ignore_eos": True}).encode())
        wait_for(lambda: busy(server)[0])
        waiting = threading.Thread(target=lambda: statuses.append(server.post("/completion", GREEDY).status))
        waiting.start()
        wait_for(lambda: numbers(server)["llamacpp:requests_deferred"] == 1)
        refused = server.post("/completion", GREEDY)
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json["error"]["type"] == "rate_limit_error"
        running.close()
        waiting.join()
        assert statuses == [200]


def test_shifted_context_and_log() -> None:
    """A shifted context goes on. Each request leaves a line, a refused one too."""
    server = start_server(*DEMO, "-c", "128", "-np", "1", "--context-shift", "--json-log", stderr=subprocess.PIPE)
    try:
        shifted = completion(server, n_predict=150, ignore_eos=True)
        assert shifted["tokens_predicted"] == 150 and shifted["truncated"]
        assert server.post("/completion", GREEDY | {"grammar": "root ::= ("}).status == 400
    finally:
        status = stop_server(server)
    assert status == 0 and server.process.stderr is not None
    first, second = (json.loads(line) for line in server.process.stderr.read().splitlines())
    assert (first["path"], first["generated_tokens"], first["finish"]) == ("/completion", 150, ["length"])
    assert first["first_token_seconds"] > 0 and first["error"] is None and second["error"] == "invalid_request"


def test_loading_and_ending() -> None:
    before = left_behind()
    server = start_server(*DEMO, "-c", "4096", "-np", "1", ready=False)
    loading = server.get("/health")
    if loading.status == 503:
        assert loading.json["error"] == {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        assert server.post("/completion", GREEDY).status == 503
    wait_for(lambda: server.get("/health").status == 200, seconds=60)
    got: list[bytes] = []
    body = GREEDY | {"n_predict": -1, "ignore_eos": True, "stream": True}
    thread = threading.Thread(target=lambda: got.append(server.post("/completion", body).data))
    thread.start()
    wait_for(lambda: server.get("/slots").json[0]["is_processing"])
    assert stop_server(server) == 0
    thread.join()
    chunks = list(events(got[0]))
    assert chunks[-1]["stop"] and chunks[-1]["tokens_predicted"] == sum(len(chunk["tokens"]) for chunk in chunks)
    assert left_behind() <= before


def test_an_idle_model_sleeps_and_wakes() -> None:
    with serving(*DEMO, "-c", "256", "-np", "1", "--metrics", "--sleep-idle-seconds", "0.5") as server:
        first = completion(server)
        tokens = numbers(server)["llamacpp:tokens_predicted_total"]
        wait_for(lambda: server.get("/props").json["is_sleeping"])
        wait_for(lambda: not psutil.Process(server.process.pid).children(), seconds=20)
        assert server.get("/health").status == 200 and server.get("/v1/models").json["data"]
        assert numbers(server)["llamacpp:tokens_predicted_total"] == tokens == 12
        assert server.get("/props").json["is_sleeping"], "questions about it have woken the model"
        again = completion(server)
        assert again["content"] == first["content"] and again["timings"]["cache_n"] == 0
        assert numbers(server)["llamacpp:tokens_predicted_total"] == 24


def test_a_killed_daemon_is_replaced() -> None:
    with serving(*DEMO, "-c", "256", "-np", "1") as server:
        first = completion(server)["content"]
        (daemon,) = psutil.Process(server.process.pid).children()
        daemon.kill()
        wait_for(lambda: server.get("/health").status == 503)
        wait_for(lambda: server.get("/health").status == 200, seconds=60)
        assert completion(server)["content"] == first


def test_a_model_that_cannot_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"not a model")
    server = start_server("-m", str(path), ready=False, stderr=subprocess.PIPE)
    _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 1 and "no.gguf" in errors and len(errors.splitlines()) == 1
