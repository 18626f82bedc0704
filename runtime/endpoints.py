"""Endpoints a daemon may listen on, and binding to them with the right permissions.

Owns the rule: Unix-domain sockets of mode 0600, or TCP on the loopback interface. It does not know what is said there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket as sockets
import stat
from pathlib import Path

import zmq

from bloomery.runtime.errors import BloomeryError

SOCKET_PATH_LIMIT = 107


class EndpointError(BloomeryError):
    """An endpoint that cannot or must not be listened on."""


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Binds and returns the endpoint as clients name it (a wildcard port resolved). Raises EndpointError."""
    if endpoint.startswith("ipc://"):
        _prepare_path(Path(endpoint.removeprefix("ipc://")), endpoint)
    elif endpoint.startswith("tcp://"):
        _require_loopback(endpoint)
    else:
        raise EndpointError(
            f"endpoint {endpoint!r} is neither ipc:// nor tcp://", "use ipc:///path or tcp://127.0.0.1:PORT"
        )
    previous = os.umask(0o177)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise EndpointError(f"cannot listen on {endpoint}: {error}", "choose another endpoint") from error
    finally:
        os.umask(previous)
    return socket.get_string(zmq.LAST_ENDPOINT)


def remove_socket(endpoint: str) -> None:
    """Removes the file of a Unix-domain endpoint, if it is still there."""
    if endpoint.startswith("ipc://"):
        with contextlib.suppress(OSError):
            os.unlink(endpoint.removeprefix("ipc://"))


def _prepare_path(path: Path, endpoint: str) -> None:
    """ZeroMQ replaces whatever lies at the path; so a living daemon's socket and files of others are refused here."""
    if not path.is_absolute():
        raise EndpointError(f"endpoint {endpoint}: the path must be absolute", "write ipc:///full/path")
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise EndpointError(
            f"endpoint {endpoint}: the path has {len(os.fsencode(path))} bytes, the system allows {SOCKET_PATH_LIMIT}",
            "choose a shorter path",
        )
    if not path.parent.is_dir():
        raise EndpointError(f"endpoint {endpoint}: there is no directory {path.parent}", "create it first")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise EndpointError(f"endpoint {endpoint}: {path} exists and is not a socket", "choose another path")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(os.fspath(path))
        raise EndpointError(f"endpoint {endpoint}: another program listens there", "stop it or choose another path")
    path.unlink()


def _require_loopback(endpoint: str) -> None:
    """The protocol has no authentication of its own, so nothing but this machine may reach it."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise EndpointError(
            f"endpoint {endpoint}: {host or 'no host'} is not a loopback address, and there is no CURVE encryption",
            "use tcp://127.0.0.1:PORT or ipc://, and a tunnel (ssh -L) to reach it from elsewhere",
        )
    if port != "*" and not (port.isascii() and port.isdigit() and int(port) < 1 << 16):  # ZeroMQ keeps the low 16 bits
        raise EndpointError(
            f"endpoint {endpoint}: {port or 'nothing'} is no port, expected 0 to 65535 or *", "use tcp://127.0.0.1:PORT"
        )
