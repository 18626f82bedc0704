"""Programs that were started to ignore Ctrl-C, as a script's are that it puts in the background."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from conftest import Daemon, program

NO_END = ("--logit-bias", "8187=-inf", "--logit-bias", "8189=-inf")
TOKENS = 400


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_an_answer_goes_on_when_interrupts_are_ignored(demo_daemon: Daemon) -> None:
    command = program("chat", "--endpoint", demo_daemon.endpoint, "--temp", "0", "-n", str(TOKENS), "-v", *NO_END)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, preexec_fn=ignore_interrupts, **pipes)  # type: ignore[call-overload]
    assert process.stdin and process.stdout
    process.stdin.write("Hello\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate("/quit\n", timeout=60)
    assert process.returncode == 0
    assert f"answer {TOKENS} tokens" in errors and "aborted" not in errors, errors


def test_what_tests_start_can_be_interrupted_though_they_cannot() -> None:
    asked = "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
    code = f"import conftest, subprocess, sys; subprocess.run([sys.executable, '-c', {asked!r}])"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        preexec_fn=ignore_interrupts,
    )
    assert (result.stdout, result.stderr) == ("default_int_handler\n", "")
