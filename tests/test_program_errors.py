"""What a person gets wrong on the command line: one line, exit status 1 or 2, before any model is loaded."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from bloomery.cpu_experts import compile_cache
from bloomery.launcher.command_line import run_program
from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime.coordinator import describe_error
from bloomery.runtime.endpoints import EndpointError, bind
from bloomery.runtime.errors import BloomeryError

REFUSED = (
    ("generate -p a --temp nan", "--temp: expected a number from 0 to 100, found nan"),
    ("generate -p a --top-k -1", "--top-k: expected an integer from 0"),
    ("generate -p a --seed 99999999999999999999", "--seed: expected an integer"),
    ("generate -p a --logit-bias 99999999999+1", "--logit-bias"),
    ("generate -p a --stop ", "--stop: an empty text ends nothing"),
    ("generate -p a --stop \udcff", r"--stop: b'\xff' is not UTF-8"),
    ("generate -p \udcff", r"--prompt: b'\xff' is not UTF-8"),
    ("generate -p a -n 99999999999", "99999999999 is neither"),
    ("generate --tokens 1,99999999999999999999", "99999999999999999999 is no token id"),
    ("generate -p a --logits /", "is a directory"),
    ("generate -p a --logits /no-such-folder/a.npz", "there is no directory /no-such-folder"),
    ("chat -p a --min-p 2", "--min-p: expected a number from 0 to 1"),
    ("chat -p \udcff", "is not UTF-8"),
    ("generate -p a -m ", "-m is empty"),
    ("tokenize -m ", "-m is empty"),
    ("launch -m ", "-m is empty"),
    ("launch --endpoint tcp://127.0.0.1:99999", "99999 is no port"),
)


def call(program: str, arguments: Sequence[str]) -> int:
    main: Callable[[Sequence[str]], int] = import_module(f"bloomery.launcher.{program}").main
    try:
        return main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


@pytest.mark.parametrize(("line", "expected"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_refused_before_a_model_is_loaded(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = line.split(" ")
    assert call(program, arguments) in (1, 2)
    out, err = capsys.readouterr()
    errors = [text for text in err.splitlines() if "demo model: a tiny mixture" not in text]
    assert out == ""
    assert len(errors) == 1, err
    assert errors[0].startswith(f"bloomery-{program}: ") and " -> " in errors[0]
    assert expected in errors[0]


def test_errors_without_a_next_step_of_their_own_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise BloomeryError("nothing works")

    assert run_program("bloomery-x", fail) == 1
    assert (
        capsys.readouterr().err
        == "bloomery-x: nothing works -> bloomery-x --help lists the options and what they take\n"
    )


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = command.replace("bloomery-", f"{sys.executable} -m bloomery.launcher.")
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=60, env={**os.environ, **variables}
    )


def test_closed_standard_input_is_an_empty_one() -> None:
    done = shell("bloomery-tokenize --json <&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize(("end", "expected"), [(">&-", "standard output is closed"), (">/dev/full", "No space left")])
def test_output_that_cannot_be_written_is_no_success(end: str, expected: str) -> None:
    done = shell(f"echo a | bloomery-tokenize --json {end}")
    assert done.returncode != 0
    assert expected in done.stderr and len(done.stderr.splitlines()) == 1 and " -> " in done.stderr


def test_output_in_an_encoding_without_the_character() -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"}
    done = shell(f"bloomery-inspect {demo_model_path('tiny')}", **ascii_only)  # its merges contain U+0120
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout
    done = shell("echo 127 102 | bloomery-detokenize --json", **ascii_only)  # JSON stays exact
    assert (done.returncode, done.stdout) == (0, '"\\u00e9"\n')


def test_json_and_json_lines_together() -> None:
    done = shell("""echo '"a"' | bloomery-tokenize --json --json-lines | bloomery-detokenize --json --json-lines""")
    assert (done.returncode, done.stdout) == (0, '"a"\n')


@pytest.mark.parametrize("port", ["65536", "x", "-1", ""])
def test_ports_that_zeromq_would_cut_down(port: str) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        with pytest.raises(EndpointError, match="no port"):
            bind(socket, f"tcp://127.0.0.1:{port}")
        assert bind(socket, "tcp://127.0.0.1:*").startswith("tcp://127.0.0.1:")


def test_what_the_system_refuses_has_a_next_step() -> None:
    described = describe_error(OSError(errno.EMFILE, "Too many open files"))
    assert "ulimit -n" in described["hint"]
    assert "trace" in describe_error(ZeroDivisionError("x"))["hint"]


def test_a_full_disk_costs_only_the_kept_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    compile_cache._store(tmp_path / "x.kernel", b"code")
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text
