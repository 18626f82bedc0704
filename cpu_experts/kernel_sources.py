"""Which sources a compiled function is made of: its module and all that this one imports, directly or not.

Owns finding imports in source text, so that asking neither imports nor parses anything: an import is a line that begins
with `from bloomery...` or `import bloomery...`, wherever it stands (`tests/test_kernel_sources.py` holds this to what
Python imports). Knows nothing of what the modules contain.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = "bloomery"
_IMPORT: Final = re.compile(
    rf"^[ \t]*(?:from[ \t]+({PACKAGE}[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)|import[ \t]+({PACKAGE}\.[\w.]+))",
    re.M,
)
_NAME: Final = re.compile(r"(\w+)(?:[ \t]+as[ \t]+\w+)?[ \t]*(?:[,\n]|$)")


def source_digest(module: str) -> str:
    """Hex digest of the sources of a module and of all that it imports inside bloomery."""
    digest = hashlib.sha256()
    for name in sources_of(module):
        digest.update(f"{name}\0".encode())
        digest.update(_source(name))
    return digest.hexdigest()


def sources_of(module: str) -> list[str]:
    """Names of a module and of all that it imports inside bloomery, sorted. A package counts only where names of its
    own are imported from it, not for the modules in it."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports_of(_source(name).decode())
    return sorted(found)


def imports_of(text: str) -> Iterator[str]:
    """Modules of bloomery that a source imports."""
    for package, names, module in _IMPORT.findall(text):
        if module:
            yield module
            continue
        for name in _NAME.findall(names.strip("()") + "\n"):
            within = f"{package}.{name}"
            yield within if _path(within) else package


@functools.cache
def _source(module: str) -> bytes:
    path = _path(module)
    if path is None:
        raise ModuleNotFoundError(f"{module} is imported, and there is no source of it", name=module)
    return path.read_bytes()


@functools.cache
def _path(module: str) -> Path | None:
    """The file of a module or package of bloomery, whose folders lie beside each other; None if there is none of that
    name."""
    place = Path(__file__).parent.parent.joinpath(*module.split(".")[1:])
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return path if path.is_file() else None
