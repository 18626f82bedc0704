"""bloomery-chat at a terminal: typed lines, Ctrl-C at the prompt and in an answer, a history that is kept, Ctrl-D."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import Daemon, program

NO_END = ("--logit-bias", "8187=-inf", "--logit-bias", "8189=-inf")


class Terminal:
    """A program on a pseudo-terminal: what is typed, and what has been shown since the last `expect`."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()

        def take_terminal() -> None:  # so that Ctrl-C typed here becomes a signal there
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(slave)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self, seconds: float = 60.0) -> None:
        """Ctrl-C as a person presses it: once the program waits. Python's line editing notices the one that comes just
        before it waits for keys only at the next key."""
        deadline = time.monotonic() + seconds
        while psutil.Process(self.process.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline, "the program never waits"
            time.sleep(0.01)
        self.type("\x03")

    def expect(self, text: str, seconds: float = 60.0) -> str:
        """Waits until `text` is shown; returns what came before it."""
        deadline = time.monotonic() + seconds
        while text not in self._shown:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._master], [], [], left)[0], f"{text!r} not in {self._shown!r}"
            self._shown += os.read(self._master, 4096).decode(errors="replace")
        before, _, self._shown = self._shown.partition(text)
        return before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def chat(demo_daemon: Daemon, tmp_path: Path) -> Iterator[Terminal]:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    options = ("--endpoint", demo_daemon.endpoint, "--temp", "0", "-n", "900", "-v", *NO_END)
    terminal = Terminal(program("chat", *options), environment)
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_conversation_at_a_terminal(chat: Terminal, tmp_path: Path) -> None:
    assert "tiny-qwen3moe" in chat.expect("> ")
    chat.type("/help\n")
    assert "/reset" in chat.expect("\n> ")
    chat.type("half a line")
    chat.expect("half a line")
    chat.interrupt()
    chat.expect("\n> ")
    chat.type("Hello\n")
    chat.expect("Hello")
    time.sleep(0.3)
    chat.type("\x03")
    assert "answer" in chat.expect("; aborted]")
    chat.expect("> ")
    chat.type("\x04")
    assert chat.process.wait(20) == 0
    history = (tmp_path / "bloomery" / "chat_history").read_text().splitlines()
    assert history == ["/help", "Hello"]
