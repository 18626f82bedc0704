"""Slots on disk: the tokens of a slot and the cached rows that belong to them, saved to a file and brought back.

Owns the format and the folder's boundary. It knows executors only by `snapshot` and `restore`.

A file begins as llama.cpp's sequence files do: magic, version and a count of 32-bit words, then the words, which are a
packed header (-1, format, number of tokens) and the tokens, or just the tokens. The rest is ours: a JSON line with the
tokenizer's digest, the plan's digest and each state's name, dtype and shape, then the states' rows.
"""

from __future__ import annotations

import json
import os
import re
import struct
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import RequestError
from bloomery.runtime.executor import StateSnapshot

MAGIC, VERSION, FORMAT = 0x67677371, 3, 1
_HEADER = struct.Struct("<3I")
_PACKED = struct.Struct("<iII")
_NAME = re.compile(r"[^/\\\x00-\x1f\x7f:*?\"<>|]{1,200}")
_LINE_LIMIT = 1 << 20


def slot_path(folder: str, name: str) -> Path:
    """The file `name` inside `folder`. Raises RequestError for a name that could lead elsewhere."""
    if not _NAME.fullmatch(name) or name in (".", "..") or name.startswith(" ") or name.endswith((" ", ".")):
        raise RequestError("invalid_request", "Invalid filename", "give a name without folders", field="filename")
    return Path(folder) / name


def save_slot(path: Path, tokens: NDArray[np.int32], snapshot: StateSnapshot, marks: dict[str, str]) -> int:
    """Writes the file, whole or not at all; returns its bytes. `marks` say which model and plan the rows belong to."""
    description = {
        **marks,
        "positions": snapshot.positions,
        "states": [[name, rows.dtype.str, list(rows.shape)] for name, rows in snapshot.rows.items()],
    }
    words = _PACKED.pack(-1, FORMAT, len(tokens)) + np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".slot-", delete=False) as file:
            try:
                file.write(_HEADER.pack(MAGIC, VERSION, len(words) // 4) + words)
                file.write(json.dumps(description).encode() + b"\n")
                for rows in snapshot.rows.values():
                    file.write(np.ascontiguousarray(rows).data)
                size = file.tell()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise RequestError("internal", f"{path.name} cannot be written: {error.strerror}") from error
    return size


def load_slot(path: Path, marks: dict[str, str], context: int) -> tuple[NDArray[np.int32], StateSnapshot, int]:
    """Tokens, rows and the file's bytes. Raises RequestError if it is no slot file, or not of this model and plan."""
    try:
        with open(path, "rb") as file:
            return _read(file, path, marks, context)
    except FileNotFoundError:
        raise _refusal(path, "there is no such file") from None
    except OSError as error:
        raise RequestError("internal", f"{path.name} cannot be read: {error.strerror}") from error


def _read(
    file: IO[bytes], path: Path, marks: dict[str, str], context: int
) -> tuple[NDArray[np.int32], StateSnapshot, int]:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or _HEADER.unpack(header)[:2] != (MAGIC, VERSION):
        raise _refusal(path, "it is no slot file")
    count = _HEADER.unpack(header)[2]
    if count > context + _PACKED.size // 4:
        raise _refusal(path, f"it holds {count} words, the slot {context} positions")
    words = file.read(4 * count)
    if len(words) >= _PACKED.size and _PACKED.unpack_from(words)[0] == -1:
        words = words[_PACKED.size :]
    tokens = np.frombuffer(words, dtype="<i4").astype(np.int32)
    line = file.readline(_LINE_LIMIT)
    try:
        description = json.loads(line)
        found = {name: description[name] for name in marks}
        states = [(str(name), np.dtype(kind), tuple(shape)) for name, kind, shape in description["states"]]
        positions = int(description["positions"])
    except (ValueError, KeyError, TypeError):
        raise _refusal(path, "its description cannot be read") from None
    if found != marks:
        differing = ", ".join(name for name in marks if found[name] != marks[name])
        raise _refusal(path, f"it was saved with another {differing}")
    if positions != len(tokens) or positions > context:
        raise _refusal(path, f"it holds {positions} positions and {len(tokens)} tokens, the slot {context} positions")
    rows: dict[str, NDArray[Any]] = {}
    for name, kind, shape in states:
        data = np.fromfile(file, dtype=kind, count=int(np.prod(shape)))
        if data.size != int(np.prod(shape)):
            raise _refusal(path, "it is cut off")
        rows[name] = data.reshape(shape)
    return tokens, StateSnapshot(positions, rows), file.tell()


def _refusal(path: Path, why: str) -> RequestError:
    return RequestError("invalid_request", f"{path.name} cannot be restored: {why}", field="filename")


class SlotFiles:
    """The files of one folder, for slots of one model and plan. `folder` "" refuses files."""

    def __init__(self, folder: str, marks: dict[str, str]) -> None:
        self._folder, self._marks = folder, marks

    def path(self, name: str) -> Path:
        if not self._folder:
            raise RequestError("unsupported", "the daemon has no folder for slots", "start it with --slot-save-path")
        return slot_path(self._folder, name)

    def save(self, path: Path, tokens: NDArray[np.int32], snapshot: StateSnapshot) -> dict[str, Any]:
        begun = time.perf_counter()
        size = save_slot(path, tokens, snapshot, self._marks)
        return {"tokens": len(tokens), "bytes": size, "seconds": time.perf_counter() - begun}

    def load(self, path: Path, context: int) -> tuple[NDArray[np.int32], StateSnapshot, int]:
        return load_slot(path, self._marks, context)
