"""`compiled`: Numba functions outside the host kernels, without the GIL, kept on disk by all sources they are made of.

Owns where their machine code is kept, `numba-rows/<key>` in the cache's folder: Numba alone would look at the file of
each function only, and take old code when a module that it inlines has changed. Where nothing can be written they are
compiled at every start.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from numba import njit
from numba.core import config as _config

from bloomery.runtime.cache_base import cache_base

_numba: Any = _config
SOURCES: Final = ("compiled", "engram_hash", "quick_rows", "row_cache", "row_reads", "sync")
"""Modules of this package whose contents are in the key: those of compiled functions, and whose constants they have."""


def compiled(function: Callable[..., Any]) -> Any:
    folder = cache_folder()
    if folder is None:
        return njit(nogil=True)(function)
    before = _numba.CACHE_DIR
    _numba.CACHE_DIR = folder  # read while a function is decorated
    try:
        return njit(nogil=True, cache=True)(function)
    finally:
        _numba.CACHE_DIR = before


@functools.cache
def cache_folder() -> str | None:
    """None where it cannot be written."""
    sources = [(Path(__file__).parent / f"{name}.py").read_bytes() for name in SOURCES]
    key = hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]
    folder = cache_base() / "numba-rows" / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError:
        return None
