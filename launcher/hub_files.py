"""Which files of a model repository are meant by `USER/MODEL:QUANT`: names only, nothing is fetched.

Owns how quant types are found in file names, and which of several files is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bloomery.runtime.errors import BloomeryError

DEFAULT_QUANT = "Q4_K_M"
"""What llama-server takes, too, where no quant type is named."""
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d|TQ\d|MXFP4|BF16|F16|F32)[A-Z0-9_]*)(?=[-./]|$)", re.IGNORECASE)
_NOT_MODELS = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix)(?:[-._/]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Wanted:
    """What `--hf` and `--hf-file` say; `file` is a name in the repository or ""."""

    repository: str
    quant: str = ""
    file: str = ""

    @staticmethod
    def parse(text: str, file: str = "", option: str = "--hf") -> Wanted:
        """ "USER/MODEL" or "USER/MODEL:QUANT". Raises BloomeryError that names the option."""
        repository, _, quant = text.partition(":")
        if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
            raise BloomeryError(f"{option} {text!r} names no repository", "write it as USER/MODEL or USER/MODEL:QUANT")
        return Wanted(repository, "" if quant.lower() == "latest" else quant, file)


def quant_of(name: str) -> str:
    """The quant type in a file's name, in capitals; "" if there is none."""
    found = _QUANT.findall(_SHARD.sub("", name).removesuffix(".gguf"))
    return found[-1].upper() if found else ""


def models_of(names: Iterable[str]) -> list[str]:
    """The model files among the names: GGUF, of split ones the first shard, no projectors and importance matrices."""
    found = (name for name in names if name.lower().endswith(".gguf") and not _NOT_MODELS.search(name))
    return sorted(name for name in found if not (shard := _SHARD.search(name)) or int(shard[1]) == 1)


def chosen_files(wanted: Wanted, names: Iterable[str]) -> list[str]:
    """The file that is meant, then its other shards. Raises BloomeryError that lists what there is."""
    names = list(names)
    models = models_of(names)
    if not models:
        raise BloomeryError(
            f"{wanted.repository} has no GGUF files", "look for a repository that has, often named -GGUF"
        )
    if wanted.file:
        if wanted.file not in names:
            raise BloomeryError(f"{wanted.repository} has no file {wanted.file}", f"it has {', '.join(models)}")
        return _shards(wanted, wanted.file, names)
    quant = (wanted.quant or DEFAULT_QUANT).upper()
    fitting = [name for name in models if quant_of(name) == quant]
    if not fitting and wanted.quant:
        raise BloomeryError(
            f"{wanted.repository} has no quant type {wanted.quant}", f"it has {', '.join(_types(models))}"
        )
    return _shards(wanted, min(fitting or models, key=lambda name: (len(name), name)), names)


def _types(models: Sequence[str]) -> list[str]:
    return sorted({quant_of(name) or name for name in models})


def _shards(wanted: Wanted, first: str, names: Sequence[str]) -> list[str]:
    if not (shard := _SHARD.search(first)):
        return [first]
    count = int(shard[2])
    parts = [f"{first[: shard.start()]}-{part:05}-of-{count:05}{first[shard.end() :]}" for part in range(1, count + 1)]
    if missing := [part for part in parts if part not in names]:
        raise BloomeryError(f"{wanted.repository} lacks the shard {missing[0]}", "name another quant type or file")
    return parts
