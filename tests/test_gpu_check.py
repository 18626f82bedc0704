"""The check of a card, without one: parts are cut, kept and gone on with, and the commands of its parts are real."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import psutil
import pytest
from gpu_check import Part, finished, go, junit, parts, sanitizer_part

from bloomery.launcher.bench import build_parser, check

PYTHON = sys.executable
SLOW = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(77.125)"])
time.sleep(60)
"""


def lines(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_part_that_fails_or_is_cut_keeps_no_other_from_running(tmp_path: Path) -> None:
    todo = [
        Part("fails", 20, [PYTHON, "-c", "import sys; print('words'); sys.exit(3)"]),
        Part("slow", 1.5, [PYTHON, "-c", SLOW]),
        Part("missing", 20, ["/nowhere"], needs=lambda: "nothing is installed"),
        Part("well", 20, [PYTHON, "-c", "print(41)"], lambda log, status: {"value": int(log) + 1}),
        Part("unread", 20, [PYTHON, "-c", "print('x')"], lambda log, status: {"value": int(log)}),
        Part("tells", 20, [PYTHON, "-c", ""], lambda log, status: {"errors": 2}),
    ]
    begun = time.monotonic()
    assert not go(todo, tmp_path, 1000)
    assert time.monotonic() - begun < 15
    found = {str(line["part"]): line for line in lines(tmp_path)}
    assert {name: line["status"] for name, line in found.items()} == {
        "fails": "failed",
        "slow": "cut",
        "missing": "skipped",
        "well": "passed",
        "unread": "failed",
        "tells": "failed",
    }
    assert found["fails"]["exit"] == 3 and found["fails"]["tail"] == ["words"]
    assert found["well"]["result"] == {"value": 42} and found["missing"]["why"] == "nothing is installed"
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if "time.sleep(77.125)" in " ".join(p.info["cmdline"] or [])
    ]
    # another call: what passed or failed is not run again
    assert finished(tmp_path / "results.jsonl") == {"fails", "well", "unread", "tells"}
    go([part for part in todo if part.name != "slow"], tmp_path, 1000)
    assert [line["part"] for line in lines(tmp_path)][6:] == ["missing"]
    assert go([part for part in todo if part.name == "well"], tmp_path, 1000, again=True)
    assert lines(tmp_path)[-1]["part"] == "well"


def test_a_call_begins_nothing_that_its_budget_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 1.0)
    assert go([Part("one", 20, [PYTHON, "-c", ""])], tmp_path, gpu_check.LEAST_SECONDS - 1)
    assert "left for another call" in capsys.readouterr().out and not (tmp_path / "results.jsonl").exists()
    assert not go([Part("slow", 90, [PYTHON, "-c", SLOW])], tmp_path, gpu_check.LEAST_SECONDS + 0.01)
    assert "budget left it 1 of 90 s" in str(lines(tmp_path)[-1]["why"])


def test_the_parts_are_what_they_should_be(tmp_path: Path) -> None:
    every = parts(tmp_path, Path("/peer"), None)
    names = [part.name for part in every]
    with_peer = ("decode", "prompts", "prompts with a host", "decode with a host")
    assert names[:4] == ["compile", "tests", "file", "decode"] and len(set(names)) == len(names)
    assert sum(part.seconds for part in every) < 2750
    for part in every:
        assert Path(str(part.command[-1])).suffix != ".py" or Path(str(part.command[-1])).exists()
        if "bloomery.launcher.bench" in part.command:
            options = build_parser().parse_args([str(word) for word in part.command[3:]])
            check(options)
            assert options.plan == "a" or part.name == "file"
            assert (options.peer_path is not None) == (part.name in with_peer)
    assert {part.environment["BLOOMERY_STRESS_STEPS"] for part in every if part.name == "stress"} == {"100000"}


def test_a_sanitizers_findings_are_counted() -> None:
    part = sanitizer_part("racecheck", 10, ["program"], {})
    log = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n========= ERROR SUMMARY: 0 errors\n"
    assert part.result(log, 9) == {"errors": 3, "summaries": 2}
    assert part.environment["BLOOMERY_DEADLINE_SCALE"] == "40" and part.command[1:3] == ["--tool", "racecheck"]


def test_results_of_tests_are_read(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={tmp_path / 'r.xml'}", "test_a.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=60)
    assert junit(tmp_path / "r.xml") == {"passed": 1, "skipped": 1, "failed": ["test_a::test_b"]}


def test_steps_of_tiny_models_run_on_the_emulator() -> None:
    """What runs under the sanitizers, here with kernels on the host."""
    script = [PYTHON, str(Path(gpu_check.__file__).with_name("gpu_tiny_steps.py")), "--emulated", "qwen3moe-Q4_K_M"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "qwen3moe-Q4_K_M" in done.stdout
