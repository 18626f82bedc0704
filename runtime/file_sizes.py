"""Whether a model file has become shorter under those who have it mapped, which kills whoever reads behind its new end.

Owns the sizes of a model's files at the start. Looked at only when a process has died of a page that is not there.
"""

from __future__ import annotations

from pathlib import Path

from bloomery.runtime.gguf_shards import shard_files


class FileSizes:
    """The sizes that the file or the shards of a model have when this is made."""

    def __init__(self, model: str) -> None:
        self._sizes = {path: size for path in shard_files(Path(model)) if (size := _size(path)) is not None}

    def shortened(self) -> str:
        """Names the first file that is shorter now, with both sizes; "" if there is none."""
        for path, size in self._sizes.items():
            now = _size(path)
            if now is not None and now < size:
                return (
                    f"{path} has {now} bytes and had {size} when it was opened: it was cut or overwritten while in use"
                )
        return ""


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
