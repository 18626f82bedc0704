"""Where everything is kept that can be made again: compiled code, benchmark files, logs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_base() -> Path:
    """`$BLOOMERY_CACHE`, else `bloomery` in `$XDG_CACHE_HOME` or `~/.cache`; it need not exist."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("BLOOMERY_CACHE") or os.path.join(caches, "bloomery"))
