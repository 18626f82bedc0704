"""Finds the shards of a model file: `NAME-00001-of-0000N.gguf` and the split.* keys inside.

Owns which files belong together and whether they do. Does not know what the tensors are for.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.gguf_reader import Container, read_container

_SHARD_NAME: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MIXED_HINT: Final = "keep only shards of one and the same split in a folder; download them again"


def shard_path(path: Path, number: int) -> Path:
    """The path of shard `number` (from 0) of the split to which the shard `path` belongs."""
    match = _SHARD_NAME.fullmatch(path.name)
    assert match is not None
    return path.with_name(f"{match['stem']}-{number + 1:05d}-of-{match['count']}.gguf")


def shard_files(path: Path) -> list[Path]:
    """The files of a model as their names tell: `path` alone, or the whole split to which it belongs."""
    match = _SHARD_NAME.fullmatch(path.name)
    return [path] if match is None else [shard_path(path, number) for number in range(int(match["count"]))]


def read_shards(path: Path) -> list[Container]:
    """The container of `path` and, if it is the first shard of a split, those of all the others in order."""
    first = read_container(path)
    count = _split_key(first, "split.count", 1)
    named = _SHARD_NAME.fullmatch(path.name)
    _check_first(first, count, named)
    if count <= 1:
        return [first]
    missing = [str(other) for n in range(1, count) if not (other := shard_path(path, n)).exists()]
    if missing:
        raise ModelFileError(
            f"{path}: {len(missing)} of {count} shards missing: {', '.join(missing[:8])}"
            + (" ..." if len(missing) > 8 else ""),
            "put all shards into the same folder",
        )
    containers = [first]
    for number in range(1, count):
        containers.append(read_container(shard_path(path, number)))
        _check_later(first, containers[-1], number, count)
    _check_tensors(containers)
    return containers


def _check_first(first: Container, count: int, named: re.Match[str] | None) -> None:
    """The name and the keys of the file that was named must both say that it is the first shard, or neither."""
    path, number = first.path, _split_key(first, "split.no", 0)
    if named is not None and int(named["number"]) != 1:
        raise ModelFileError(
            f"{path}: is shard {int(named['number'])} of {int(named['count'])}, expected the first",
            f"name {shard_path(path, 0)} instead",
        )
    if count > 1 and number != 0:
        raise ModelFileError(
            f"{path}: key split.no says shard {number + 1} of {count}, expected the first",
            "name the shard that ends in -00001-of-" + f"{count:05d}.gguf",
        )
    if count > 1 and named is None:
        raise ModelFileError(
            f"{path}: is the first of {count} shards (key split.count), but the others cannot be found by its name",
            f"rename the shards to NAME-00001-of-{count:05d}.gguf and so on, or join them with llama-gguf-split",
        )
    if named is not None and int(named["count"]) != max(count, 1):
        raise ModelFileError(
            f"{path}: key split.count is {count}, expected the {int(named['count'])} of the file's name", MIXED_HINT
        )


def _check_later(first: Container, later: Container, number: int, count: int) -> None:
    for key, expected in (
        ("split.no", number),
        ("split.count", count),
        ("split.tensors.count", _split_key(first, "split.tensors.count", -1)),
    ):
        found = _split_key(later, key, -1)
        if found != expected:
            text = "missing" if found == -1 else str(found)
            raise ModelFileError(f"{later.path}: key {key} is {text}, expected {expected}: mixed shards", MIXED_HINT)
    ours, theirs = (container.metadata.get("general.architecture") for container in (first, later))
    if theirs is not None and theirs != ours:
        raise ModelFileError(
            f"{later.path}: key general.architecture is {theirs!r}, expected {ours!r}: mixed shards", MIXED_HINT
        )


def _check_tensors(containers: list[Container]) -> None:
    owner: dict[str, Path] = {}
    for container in containers:
        for entry in container.entries:
            if entry.name in owner:
                raise ModelFileError(
                    f"{container.path}: tensor {entry.name} is also in {owner[entry.name]}: mixed shards",
                    MIXED_HINT,
                )
            owner[entry.name] = container.path
    expected = _split_key(containers[0], "split.tensors.count", -1)
    if expected != -1 and len(owner) != expected:
        raise ModelFileError(
            f"{containers[0].path}: its {len(containers)} shards hold {len(owner)} tensors,"
            f" expected {expected} (key split.tensors.count): mixed shards",
            MIXED_HINT,
        )


def _split_key(container: Container, key: str, default: int) -> int:
    value = container.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise ModelFileError(f"{container.path}: key {key} is {str(value)[:40]!r}, expected a whole number", MIXED_HINT)
    return value
