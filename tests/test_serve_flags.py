"""Flags of bloomery-serve that set defaults of requests, and the proxy for web pages.

Planted once and seen to fail: a proxy that passes on a request's own headers; defaults that a request cannot replace.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from serving import Serving, serving

from bloomery.launcher.command_line import UsageError
from bloomery.launcher.demo_model import demo_model_path
from bloomery.launcher.serve import build_parser, daemon_of, settings_of
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer import Tokenizer

DEMO = "tiny-qwen3moe"
ANSWER = {"temperature": 0, "n_predict": 4}


def token(text: str) -> int:
    with ModelFile.open(str(demo_model_path(DEMO))) as model:
        (found,) = Tokenizer.from_model_file(model).encode(text, add_special=False)
    return int(found)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    flags = ("--grammar", 'root ::= "y" | "n"', "-l", f"{token('n')}+50", "--reasoning-budget", "0")
    with serving("--demo", DEMO, "--threads", "1", "-c", "256", "-np", "1", "--ui-mcp-proxy", *flags) as started:
        yield started


def text(server: Serving, **fields: object) -> str:
    return str(server.post("/completion", {"prompt": "Is it?", **ANSWER, **fields}).json["content"])


def test_what_requests_say_replaces_defaults(server: Serving) -> None:
    params = server.get("/props").json["default_generation_settings"]["params"]
    assert params["grammar"] == 'root ::= "y" | "n"' and params["logit_bias"] == [{"bias": 50.0, "token": token("n")}]
    assert text(server) == "n" and text(server, logit_bias=[["y", 50]]) == "y"
    assert text(server, grammar='root ::= "yy"') == "yy" and text(server, json_schema={"const": 7}) == "7"
    assert text(server, response_format={"type": "text"}, grammar="") == "n", "neither asks for a form"
    chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Is it?"}], **ANSWER}).json
    assert chat["choices"][0]["message"]["content"] == "n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-l", "15043"), "--logit-bias 15043 is not"),
        (("-l", "x+1"), "is not a token id"),
        (("-l", "7+1e400x"), "is not a token id"),
        (("--json-schema", "{"), "--json-schema is not JSON"),
        (("--json-schema", "7"), "is not a JSON object"),
        (("--grammar", "root ::= x", "-j", "{}"), "--grammar and --json-schema exclude each other"),
    ],
)
def test_values_that_make_no_sense(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_of(build_parser().parse_args(flags))


def test_forms_from_files(tmp_path: Path) -> None:
    (tmp_path / "g").write_text('root ::= "y"')
    (tmp_path / "s").write_text('{"const": 1}')
    for flag, name, defaults in (
        ("--grammar-file", "g", {"grammar": 'root ::= "y"'}),
        ("-jf", "s", {"json_schema": {"const": 1}}),
    ):
        assert settings_of(build_parser().parse_args([flag, str(tmp_path / name)])).defaults == defaults


class Target(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(404 if self.path == "/gone" else 200)
        self.send_header("Set-Cookie", "a=b")
        self.send_header("Mcp-Session-Id", "five")
        self.end_headers()
        self.wfile.write(b"<script>1</script>")

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def target() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Target) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def test_the_proxy_passes_on_what_it_is_told(server: Serving) -> None:
    prefix = "x-llama-server-proxy-header-"
    own = {
        "Authorization": "Bearer secret",
        "X-Api-Key": "secret",
        "Cookie": "a=secret",
        "Origin": "http://localhost:1",
    }
    with target() as url:
        told = {f"{prefix}authorization": "Bearer explicit", f"{prefix}Accept": "text/x", prefix: "nothing"}
        answer = server.request("POST", f"/cors-proxy?url={url}/a%3Fb=1", b"body", {**own, **told})
        assert (answer.status, answer.data) == (200, b"<script>1</script>")
        assert "set-cookie" not in answer.headers and answer.headers["mcp-session-id"] == "five"
        assert answer.headers["content-security-policy"].startswith("sandbox")
        path, headers, body = Target.seen[-1]
        assert (path, body) == ("/a?b=1", b"body")
        assert (headers["authorization"], headers["accept"]) == ("Bearer explicit", "text/x")
        assert "secret" not in str(headers) and "origin" not in headers
        assert server.get(f"/cors-proxy?url={url}/gone").status == 404
        asked = len(Target.seen)
        assert server.get(f"/cors-proxy?url={url}", Origin="http://elsewhere.example").status == 403
        for bad in ("", "file:///etc/passwd", "http://", url.replace("//", "//a:b@"), "http://[", "http://x:99999"):
            assert server.get(f"/cors-proxy?url={bad}").status == 400, bad
        assert len(Target.seen) == asked
    assert server.get(f"/cors-proxy?url={url}").status == 502
    assert server.get("/props").json["cors_proxy_enabled"]


def test_every_option_of_a_plan_reaches_the_daemon() -> None:
    """What `add_plan_options` gives all programs, serve hands on: seen failing for --step-ahead."""
    given = {"--card-memory": "3GiB", "--step-ahead": "0", "--hot-list": "/no/list", "--shared-blocks": None}
    given["--deterministic"] = None
    words = [word for option, value in given.items() for word in (option, value) if word is not None]
    found = daemon_of(build_parser().parse_args(words))
    assert (found.card_memory, found.step_ahead, found.shared_blocks) == (3 << 30, 0, True)
    assert found.deterministic
    assert found.hot_list == "/no/list"
