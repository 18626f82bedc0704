"""A small stand-in for a model hub: its listing, its file addresses with redirects, ranges and faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubStand:
    """`files` by "USER/MODEL/NAME". `cut` ends a transfer's connection after so many bytes, `cuts` times; `damage`
    turns one byte of what is sent; `silent` refuses whoever asks to go on; `token` is asked for if not empty. `ranges`
    are those that were asked for, `strangers` the keys that came to the storage, which is another host."""

    files: dict[str, bytes]
    token: str = ""
    cut: int = 0
    cuts: int = 0
    damage: bool = False
    silent: bool = False
    ranges: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    sent: int = 0
    url: str = ""

    def names(self, repository: str) -> list[str]:
        return [name.removeprefix(f"{repository}/") for name in self.files if name.startswith(f"{repository}/")]


def _handler(hub: HubStand) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(self.path.split("?")[0])
            parts = path.strip("/").split("/")
            if parts[0] == "storage":  # where the hub redirects to
                return self._data("/".join(parts[1:]))
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._answer(401, {"X-Error-Code": "RepoNotFound"})
            if parts[:2] == ["api", "models"]:
                repository = "/".join(parts[2:4])
                names = hub.names(repository)
                if not names:
                    return self._answer(404, {"X-Error-Code": "RepoNotFound"})
                listing = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
                return self._answer(200, {"Content-Type": "application/json"}, json.dumps(listing).encode())
            name = "/".join([*parts[:2], *parts[4:]])  # USER/MODEL/resolve/REVISION/NAME
            if name not in hub.files:
                return self._answer(404, {"X-Error-Code": "EntryNotFound"})
            data = hub.files[name]
            facts = {
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"{hub.url.replace('127.0.0.1', 'localhost')}/storage/{name}",
            }
            return self._answer(302, facts)

        def _data(self, name: str) -> None:
            data, first = hub.files[name], 0
            hub.strangers += self.headers.get_all("Authorization", [])
            if wanted := self.headers.get("Range"):
                hub.ranges.append(wanted)
                if hub.silent:
                    return self._answer(500, {})
                first = int(wanted.removeprefix("bytes=").split("-")[0])
            if hub.damage:
                data = data[:-1] + bytes([data[-1] ^ 1])
            body = data[first:]
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(body)))
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.cuts > 0:
                hub.cuts -= 1
                body = body[: hub.cut]
                self.close_connection = True
            hub.sent += len(body)
            self.wfile.write(body)

    return Handler


@contextmanager
def hub_stand(files: dict[str, bytes]) -> Iterator[HubStand]:
    hub = HubStand(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
