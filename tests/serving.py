"""A running bloomery-serve for tests, and small ways to ask it."""

from __future__ import annotations

import http.client
import json
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from conftest import START_SECONDS, program

SECONDS = START_SECONDS
PROMPT = "The history of the"
GREEDY = {"prompt": PROMPT, "temperature": 0, "seed": 1, "n_predict": 12}
DEMO = ("--demo", "tiny-qwen3moe", "--threads", "1")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


@dataclass(frozen=True)
class Serving:
    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """`body` is JSON, or bytes as they are."""
        connection = self.connect()
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.request("POST", path, body, headers)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a streamed answer, "[DONE]" included."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status == 200, answer.data
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(events(answer.data))


def events(data: bytes) -> Iterator[Any]:
    for block in data.decode().split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                yield "[DONE]" if line == "data: [DONE]" else json.loads(line[6:])


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.02)
    return value


def start_server(*arguments: str, ready: bool = True, stderr: int = subprocess.DEVNULL) -> Serving:
    """bloomery-serve on a free port; returns when it is ready, or as soon as it listens."""
    command = program("serve", "--port", "0", *arguments)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    try:
        port = int(re.search(r"listening on http://[\d.]+:(\d+)", _line(process))[1])  # type: ignore[index]
        if ready:
            assert "is ready" in _line(process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return Serving(process, port)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(SECONDS), "the server said nothing"
    line = process.stdout.readline()
    assert line, f"the server ended with status {process.wait()}"
    return line


def stop_server(server: Serving) -> int:
    server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(20)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
        raise AssertionError("the server did not end") from None


@contextmanager
def serving(*arguments: str) -> Iterator[Serving]:
    server = start_server(*arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            assert stop_server(server) == 0


def completion(server: Serving, **fields: Any) -> dict[str, Any]:
    """The whole answer to GREEDY with these fields beside or instead of its own."""
    answer = server.post("/completion", GREEDY | fields)
    assert answer.status == 200, answer.data
    return answer.json  # type: ignore[no-any-return]


def busy(server: Serving) -> list[bool]:
    """Of each slot."""
    return [slot["is_processing"] for slot in server.get("/slots").json]


def numbers(server: Serving) -> dict[str, float]:
    """What /metrics counts, by name and labels."""
    lines = server.get("/metrics").data.decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line[:1] not in ("#", ""))}
