"""What a kernel's compiled code is kept under: the sources that it is made of, and no others."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery import cpu_experts, runtime
from bloomery.cpu_experts.kernel_sources import imports_of, sources_of
from bloomery.cpu_experts.kernels import kernel_factory, kernel_names

FOLDERS = {
    name: Path(str(package.__file__)).parent for name, package in (("cpu_experts", cpu_experts), ("runtime", runtime))
}
KERNELS = "bloomery.cpu_experts.kernels"
COMPILE = """
import sys
from bloomery.cpu_experts import compile_cache
for name in sys.argv[1:]:
    compile_cache.compile_kernel(name)
compile_cache.use_numba_cache()
from bloomery.cpu_experts import interpreter
interpreter.wake_up.compile((interpreter.int64,) * 2)
"""


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules and packages of bloomery that Python loads names from, as the parser sees them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("bloomery."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not looked for"
            package = node.module or ""
            for alias in node.names if package.startswith("bloomery") else ():
                _, *names = f"{package}.{alias.name}".split(".")
                place = FOLDERS[names[0]].joinpath(*names[1:]) if names[0] in FOLDERS else Path("/nowhere")
                within = place.is_dir() or place.with_suffix(".py").is_file()
                yield f"{package}.{alias.name}" if within else package


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_imports_are_those_that_the_parser_sees(folder: Path) -> None:
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert set(imports_of(text)) == set(imported(ast.parse(text))), path


FORMS = """
from bloomery.runtime import arena, futex as waiting  # noqa
import bloomery.runtime.errors
def late():
    from bloomery.cpu_experts.kernels.work import (
        share_end,  # one past
        share_start,
    )
from bloomery.cpu_experts.kernels import FLOAT_TYPES
import numpy
"""


def test_every_form_of_import_is_seen() -> None:
    expected = {f"bloomery.runtime.{name}" for name in ("arena", "futex", "errors")} | {f"{KERNELS}.work", KERNELS}
    assert set(imports_of(FORMS)) == expected


def test_kernels_are_made_of_what_they_import_and_not_of_other_families() -> None:
    for name in kernel_names():
        module, _, _ = kernel_factory(name)
        found = sources_of(module)
        assert module in found and "bloomery.cpu_experts.simd" in found and "bloomery.cpu_experts.lowering" not in found
    products, waits = sources_of(f"{KERNELS}.matmul"), sources_of(f"{KERNELS}.engram_wait")
    assert f"{KERNELS}.wide_formats" in products and f"{KERNELS}.attention" not in products
    assert "bloomery.runtime.step_record" in waits and "bloomery.runtime.step_record" not in products


def compiled(tree: Path, cache: Path, *kernels: str) -> dict[str, int]:
    """What is kept after these kernels and the interpreter were compiled from a copy of the sources: name, time."""
    environment = {**os.environ, "PYTHONPATH": str(tree.parent), "BLOOMERY_CACHE": str(cache)}
    command = [sys.executable, "-c", COMPILE, *kernels]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (folder,) = (cache / "numba").iterdir()
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in (*folder.glob("*.kernel"), *folder.glob("numba.*"))
    }


def test_an_edit_keeps_what_does_not_depend_on_it(tmp_path: Path) -> None:
    tree, cache = tmp_path / "sources/bloomery", tmp_path / "cache"
    for name, folder in FOLDERS.items():
        shutil.copytree(folder, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    kernels = ("add", "argmax")  # of elementwise and of router
    first = compiled(tree, cache, *kernels)
    assert sorted(name.split(".")[0] for name in first) == ["add", "argmax", "numba"]

    def edit(module: str) -> dict[str, int]:
        with (tree / module).open("a") as file:
            file.write("\n# edited\n")
        return compiled(tree, cache, *kernels)

    for unrelated in ("cpu_experts/lowering.py", "cpu_experts/kernels/attention.py", "cpu_experts/kernels/__init__.py"):
        assert edit(unrelated) == first, unrelated
    second = edit("cpu_experts/kernels/block_formats.py")  # elementwise imports it, router does not
    assert [name.split(".")[0] for name in second.keys() - first.keys()] == ["add"]
    assert first.items() <= second.items()
    third = edit("runtime/sync.py")  # the interpreter's
    assert [name.split(".")[0] for name in third.keys() - second.keys()] == ["numba"]
