"""What an installation contains: built from a clean clone of HEAD, installed, and looked at from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
PROGRAMS: dict[str, str] = PROJECT["project"]["scripts"]
DEMOS = "launcher/demo/tiny-deepseek41-Q3_K_M.gguf", "launcher/demo/tiny-qwen3moe-Q4_K_M.gguf"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone of HEAD, as a newcomer would have it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is nothing to clone")
    folder = tmp_path_factory.mktemp("clone") / "bloomery"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(clone)]
    subprocess.run(command, check=True, timeout=280)
    (path,) = folder.glob("bloomery-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh environment with only the wheel in it; dependencies come from the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps"]
    subprocess.run([*command, str(wheel)], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    parents = [path for path in sys.path if path.endswith("site-packages")]
    # Plain path entries: .pth files of those folders (an editable installation among them) are not processed.
    (site / "dependencies.pth").write_text("\n".join(parents))
    yield folder
    shutil.rmtree(folder)


def run_installed(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Without PYTHONPATH and the like, which would bring the checkout's package in before the installed one."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd="/")


def test_every_folder_with_modules_is_a_listed_package() -> None:
    folders = {
        path.parent
        for top in ("runtime", "cpu_experts", "gpu_worker", "engram_io", "launcher")
        for path in (ROOT / top).rglob("*.py")
    }
    found = {"bloomery." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert found == set(PACKAGES)


def test_wheel_contains_every_module_marker_and_the_demo_models(wheel: Path, clone: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        folder = clone / Path(*package.split(".")[1:])
        for module in folder.glob("*.py"):
            assert f"{package.replace('.', '/')}/{module.name}" in names
    for top in {package.split(".")[1] for package in PACKAGES}:
        assert f"bloomery/{top}/py.typed" in names
    assert names >= {f"bloomery/{path}" for path in DEMOS}
    assert "bloomery/launcher/demo/README.md" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "docs/", "runtime/")) for name in names), "only bloomery.* is installed"


def test_demo_models_in_the_wheel_are_the_trained_files(wheel: Path) -> None:
    for path in DEMOS:
        info = zipfile.ZipFile(wheel).getinfo(f"bloomery/{path}")
        assert info.file_size == (ROOT / path).stat().st_size > 18_000_000


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_installed_program_shows_help_with_examples(program: str, installed: Path) -> None:
    run = run_installed([installed / "bin" / program, "--help"])
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"usage: {program}")
    assert "examples:" in run.stdout
    assert f"  {program} " in run.stdout.split("examples:")[1], "an example shows the program itself"


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_installed_program_knows_its_version(program: str, installed: Path) -> None:
    run = run_installed([installed / "bin" / program, "--version"])
    assert (run.returncode, run.stdout.strip()) == (0, f"{program} {PROJECT['project']['version']}")


def test_installed_package_is_the_one_that_runs(installed: Path) -> None:
    code = "import bloomery.launcher.command_line as m; print(m.__file__)"
    run = run_installed([installed / "bin" / "python", "-c", code])
    assert run.stdout.startswith(str(installed)), run.stdout + run.stderr
