"""The house as docs/architecture.md draws it: who imports whom, and a line for every module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("runtime", "cpu_experts", "gpu_worker", "engram_io", "launcher")
MAY_IMPORT = {room: {room, "runtime"} for room in ROOMS}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported_rooms(source: str) -> Iterator[str]:
    """Rooms that a module's source names in imports, at any depth of nesting."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if match := re.match(r"bloomery\.(\w+)", name):
                yield match.group(1)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_the_map_allows(room: str) -> None:
    for module in modules(room):
        foreign = set(imported_rooms(module.read_text())) - MAY_IMPORT[room]
        assert not foreign, f"{module.relative_to(ROOT)} imports {sorted(foreign)}; {room} may import runtime only"


def test_the_import_check_sees_every_form_of_import() -> None:
    forms = (
        "import bloomery.gpu_worker.graph",
        "from bloomery.gpu_worker import graph",
        "from bloomery import gpu_worker",
        "def late():\n    from bloomery.gpu_worker.graph import Graph",
    )
    for source in forms:
        assert set(imported_rooms(source)) == {"gpu_worker"}, source


def test_every_module_has_its_line_in_the_map() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", page, flags=re.MULTILINE))
    existing = {str(path.relative_to(ROOT)) for room in ROOMS for path in modules(room) if path.name != "__init__.py"}
    assert listed == existing, f"not in the map: {sorted(existing - listed)}; gone: {sorted(listed - existing)}"


def test_every_module_begins_by_saying_what_it_is() -> None:
    for room in ROOMS:
        for module in modules(room):
            assert ast.get_docstring(ast.parse(module.read_text())), f"{module.relative_to(ROOT)} has no docstring"


def test_files_keep_to_one_concept() -> None:
    for room in ROOMS:
        for module in modules(room):
            lines = len(module.read_text().splitlines())
            assert lines <= 520, f"{module.relative_to(ROOT)} has {lines} lines: split it along a concept"
