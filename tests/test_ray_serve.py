"""Two daemons as replicas on a local Ray: turns return to their cache, streams pass, dead replicas are replaced."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice, pairwise
from typing import Any

import psutil
import pytest
from serving import Serving, wait_for

ray = pytest.importorskip("ray", reason="the extra bloomery[ray] is not installed")
serve = pytest.importorskip("ray.serve", reason="the extra bloomery[ray] is not installed")

SECONDS = 100.0
ROOM = 16384


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def replica_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("ServeReplica:bloomery:Replica" in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Serving]:
    from bloomery.launcher.ray_serve import app

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    daemons: list[psutil.Process] = []
    with socket.create_server(("127.0.0.1", 0)) as free:  # now that Ray has taken its own ports
        port = free.getsockname()[1]
    try:
        serve.start(http_options={"port": port})
        flags = f"--demo tiny-qwen3moe -t 1 -c {2 * ROOM} -np 2 --metrics"
        serve.run(app({"flags": flags, "replicas": "2", "per_node": "0", "cpus": "1"}), name="bloomery")
        yield Serving(process=subprocess.Popen(["true"], text=True), port=port)
        daemons = [child for process in replica_processes() for child in process.children(recursive=True)]
        assert daemons
    finally:
        serve.shutdown()
        ray.shutdown()
    wait_for(lambda: not any(daemon.is_running() for daemon in daemons), 20)


def chat(cluster: Serving, messages: list[dict[str, str]], **fields: Any) -> tuple[str, dict[str, Any]]:
    answer = cluster.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0, **fields})
    assert answer.status == 200, answer.data
    return answer.headers["x-bloomery-replica"], answer.json


@pytest.mark.timeout(180)
def test_turns_return_to_the_replica_that_knows_them(cluster: Serving) -> None:
    chosen = set()
    for number in range(6):
        messages = [message("system", "You write code. " * 5)]
        replicas, answers = [], []
        for turn in range(3):
            messages.append(message("user", f"conversation {number}, question {turn}"))
            replica, body = chat(cluster, messages)
            replicas.append(replica)
            answers.append(body)
            messages.append(body["choices"][0]["message"])
        assert len(set(replicas)) == 1, replicas
        for before, after in pairwise(answers):
            known = before["usage"]["prompt_tokens"]
            assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= known > 0
        chosen.add(replicas[0])
    assert len(chosen) == 2, "conversations with one system message are spread"


def test_answers_and_errors_are_those_of_bloomery_serve(cluster: Serving) -> None:
    assert cluster.get("/health").json == {"status": "ok", "replicas": 2}
    assert cluster.get("/v1/models").json["object"] == "list"
    assert cluster.post("/completion", b"{").status == 400
    assert cluster.post("/completion", {"prompt": "x", "n_predict": "y"}).json["error"]["param"] == "n_predict"
    assert cluster.get("/nothing").status == 404
    assert cluster.post("/v1/messages", {}).json["type"] == "error"
    assert cluster.post("/completion", b"x" * (33 << 20)).status == 413
    assert b"<!doctype html>" in cluster.get("/").data


def test_a_stream_comes_in_pieces_and_equals_the_whole(cluster: Serving) -> None:
    messages = [message("user", "func main")]
    whole = chat(cluster, messages, max_tokens=40)[1]["choices"][0]["message"]["content"]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0}
    chunks = cluster.stream("/v1/chat/completions", body)
    assert chunks[-1] == "[DONE]" and len(chunks) > 20
    texts = [choice["delta"].get("content") or "" for chunk in chunks[:-1] for choice in chunk["choices"]]
    assert "".join(texts) == whole


def figures(cluster: Serving, path: str = "/metrics") -> dict[str, float]:
    lines = cluster.get(path).data.decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))}


def test_metrics_are_those_of_all_replicas(cluster: Serving) -> None:
    """Sums grow by what was generated, wherever; with labels each replica has its part."""
    name = "llamacpp:tokens_predicted_total"
    wait_for(lambda: figures(cluster).get("bloomery_replicas") == 2, 20)
    time.sleep(3)  # reports of what came before
    before = figures(cluster)[name]
    replicas = {chat(cluster, [message("user", f"count {number}")], ignore_eos=True)[0] for number in range(8)}
    assert len(replicas) == 2
    wait_for(lambda: figures(cluster)[name] == before + 8 * 8, 10)
    parts = figures(cluster, "/metrics?by=replica")
    assert sum(value for sample, value in parts.items() if sample.startswith(name + "{")) == before + 8 * 8
    assert all(f'{name}{{replica="{replica}"}}' in parts for replica in replicas)


def open_stream(cluster: Serving, prompt: str) -> tuple[http.client.HTTPResponse, socket.socket]:
    """A stream that goes on for long, after its first event; shutting the socket down ends it."""
    connection = cluster.connect()
    body = {"prompt": prompt, "n_predict": -1, "ignore_eos": True, "stream": True}
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    link = connection.sock
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return response, link


def test_a_client_that_goes_frees_its_slot(cluster: Serving) -> None:
    streams = [open_stream(cluster, f"{number} func") for number in range(4)]
    replicas = [response.headers["x-bloomery-replica"] for response, _ in streams]
    assert sorted(map(replicas.count, set(replicas))) == [2, 2], "full replicas are passed over"
    began = time.monotonic()
    for response, link in streams:
        link.shutdown(socket.SHUT_RDWR)
        response.close()
    chat(cluster, [message("user", "is anybody there?")])
    assert time.monotonic() - began < 10


@pytest.mark.timeout(180)
def test_a_replica_that_dies_is_replaced_and_its_streams_end_with_an_error(cluster: Serving) -> None:
    messages = [message("user", "who will survive this?")]
    chat(cluster, messages)
    streams = [open_stream(cluster, f"{number} package main") for number in range(4)]
    victim, _ = replica_processes()
    daemons = victim.children(recursive=True)
    assert daemons
    with ThreadPoolExecutor(len(streams)) as pool:
        endings = [pool.submit(response.read) for response, _ in streams]
        victim.kill()
        dead = list(islice(as_completed(endings, 60), 2))
        for ending in dead:
            last = json.loads(ending.result().rstrip().split(b"data: ")[-1])
            assert last["error"]["code"] == 503 and last["error"]["type"] == "unavailable_error"
        for _, link in streams:
            link.shutdown(socket.SHUT_RDWR)
    again, _ = chat(cluster, messages)  # whoever is left
    wait_for(lambda: not any(daemon.is_running() for daemon in daemons))
    wait_for(lambda: len(replica_processes()) == 2 and cluster.get("/health").json.get("replicas") == 2, SECONDS)
    assert chat(cluster, messages)[0] == again, "the conversation stays where it has moved"
