"""Hot lists: the expert ids of each layer, ranked by how often the router picks them, as a text file.

Owns the format, its errors, and whether a list belongs to a model. Who counts is `launcher/trace.py`, who uses the
ranks is the placement of experts.

    # bloomery hot list 1
    # model NAME layers L experts E
    # any further lines of comment
    0: 17=4021 5=3990 30=12
    1: 5 17 30

The first two lines say what this is and for which model (`general.name`, its layers, the experts of each). Then
every layer that has routed experts has one line, in ascending order: its number, a colon, and expert ids, the most used
first. Every id may be followed by how often it was picked (all of a file, or none). Ids that a line leaves out were
picked less often than those that stand there. Blank lines and lines that begin with # are skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program, RoutedExperts
from bloomery.runtime.tensor_roles import layer_of

FIRST_LINE: Final = "# bloomery hot list 1"
_MODEL: Final = re.compile(r"# model (?P<name>.*) layers (?P<layers>\d+) experts (?P<experts>\d+)")
_ENTRY: Final = re.compile(r"(\d+)(?:=(\d+))?")
_MOST_BYTES: Final = 64 << 20
_HINT: Final = "make a hot list with bloomery-trace"


class HotListError(BloomeryError):
    """A hot list that cannot be read or belongs to another model."""


@dataclass(frozen=True)
class HotList:
    """`ranks`: of each routed layer the listed expert ids, most used first. `counts`: how often each of these was
    picked, or empty. `model` is a `general.name`; `comments` are lines without their #."""

    model: str
    layers: int
    experts: int
    ranks: Mapping[int, tuple[int, ...]]
    counts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    comments: tuple[str, ...] = ()
    path: str = ""

    @classmethod
    def of_counts(
        cls, model: str, layers: int, counts: Mapping[int, Sequence[int]], comments: Iterable[str]
    ) -> HotList:
        """From how often each expert of each layer was picked; of equally used ones the lower id comes first."""
        ranks = {layer: tuple(sorted(range(len(c)), key=lambda e: (-c[e], e))) for layer, c in sorted(counts.items())}
        ordered = {layer: tuple(int(counts[layer][expert]) for expert in order) for layer, order in ranks.items()}
        experts = max((len(row) for row in counts.values()), default=0)
        return cls(model, layers, experts, ranks, ordered, tuple(comments))

    def order(self, layer: int) -> tuple[int, ...]:
        """All experts of a layer, hottest first; those not listed follow by id. A layer without a line: by id."""
        listed = self.ranks.get(layer, ())
        return (*listed, *sorted(set(range(self.experts)).difference(listed)))

    def text(self) -> str:
        """The file."""
        lines = [FIRST_LINE, f"# model {_one_line(self.model)} layers {self.layers} experts {self.experts}"]
        lines += [f"# {_one_line(comment)}" for comment in self.comments]
        for layer, ids in self.ranks.items():
            counts = self.counts.get(layer)
            entries = (
                [str(i) for i in ids] if counts is None else [f"{i}={n}" for i, n in zip(ids, counts, strict=True)]
            )
            lines.append(f"{layer}: {' '.join(entries)}")
        return "\n".join(lines) + "\n"


def read_hot_list(path: str | os.PathLike[str]) -> HotList:
    """Reads a hot list. Raises HotListError naming file, line and what is wrong there."""
    name = os.fspath(path)
    try:
        if (size := Path(name).stat().st_size) > _MOST_BYTES:
            raise HotListError(f"{name}: {size} bytes are no hot list", _HINT)
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise HotListError(f"{name}: the hot list cannot be read: {error.strerror}", "check the path") from None
    except UnicodeDecodeError:
        raise HotListError(f"{name}: is not text", _HINT) from None
    return _Reader(name, text.splitlines()).read()


def routed_layers(program: Program) -> dict[int, int]:
    """The layers with routed experts and how many each has, in ascending order."""
    found = {}
    for op in program.ops:
        if isinstance(op, RoutedExperts):
            layer = layer_of(op.gate)
            assert layer is not None, op.gate
            found[layer] = program.weights[op.gate].shape[2]
    return dict(sorted(found.items()))


def model_name(model: ModelFile) -> str:
    """`general.name`, else the name of the file."""
    return _one_line(str(model.metadata.get("general.name") or Path(model.path).stem))


def check_hot_list(hot: HotList, program: Program) -> None:
    """Raises HotListError unless the list has the layers and experts of the program. The model's name may differ: a
    list serves other quantisations and fine-tunes too."""
    routed = routed_layers(program)
    if not routed:
        raise HotListError(f"{hot.path}: this model has no routed experts", "leave the hot list out")
    experts = max(routed.values())
    if (hot.layers, hot.experts) != (program.layers, experts):
        raise HotListError(
            f"{hot.path}: is for {hot.layers} layers of {hot.experts} experts ({hot.model}), the model has"
            f" {program.layers} layers of {experts}",
            "use a list of this model: bloomery-trace makes one",
        )
    missing, foreign = sorted(set(routed).difference(hot.ranks)), sorted(set(hot.ranks).difference(routed))
    if missing or foreign:
        what = f"has no line for layer {missing[0]}" if missing else f"layer {foreign[0]} has no routed experts"
        raise HotListError(f"{hot.path}: {what}", "use a list of this model: bloomery-trace makes one")


class _Reader:
    """One file's lines."""

    def __init__(self, path: str, lines: Sequence[str]) -> None:
        self._path, self._lines = path, lines

    def read(self) -> HotList:
        if not self._lines or self._lines[0].rstrip() != FIRST_LINE:
            raise self._error(1, f"does not begin with {FIRST_LINE!r}")
        header = _MODEL.fullmatch(self._lines[1].rstrip()) if len(self._lines) > 1 else None
        if header is None:
            raise self._error(2, "is not '# model NAME layers L experts E'")
        layers, experts = int(header["layers"]), int(header["experts"])
        comments: list[str] = []
        ranks: dict[int, tuple[int, ...]] = {}
        counts: dict[int, tuple[int, ...]] = {}
        for number, line in enumerate(self._lines[2:], start=3):
            if line.startswith("#"):
                comments.append(line[1:].strip())
            elif line.strip():
                layer, ids, picked = self._layer(number, line, layers, experts)
                if ranks and layer <= max(ranks):
                    raise self._error(number, f"layer {layer} stands after layer {max(ranks)}")
                if ranks and bool(counts) != bool(picked):
                    raise self._error(number, "some lines have counts and some have none")
                ranks[layer] = ids
                if picked:
                    counts[layer] = picked
        if not ranks:
            raise self._error(len(self._lines), "the list has no layer")
        return HotList(header["name"], layers, experts, ranks, counts, tuple(comments), self._path)

    def _layer(self, number: int, line: str, layers: int, experts: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Layer, ids and counts (empty: none) of one line."""
        head, colon, rest = line.partition(":")
        if not colon or not head.strip().isdecimal():
            raise self._error(number, f"{line[:40]!r} is not 'layer: id id ...'")
        layer = int(head)
        if layer >= layers:
            raise self._error(number, f"layer {layer}, but the list is for {layers} layers")
        ids, counts = [], []
        for word in rest.split():
            entry = _ENTRY.fullmatch(word)
            if entry is None:
                raise self._error(number, f"{word[:40]!r} is neither an expert id nor id=count")
            ids.append(int(entry[1]))
            if entry[2]:
                counts.append(int(entry[2]))
            if ids[-1] >= experts:
                raise self._error(number, f"expert {ids[-1]}, but the list is for {experts} experts")
        if not ids:
            raise self._error(number, f"layer {layer} has no expert")
        if len(set(ids)) < len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise self._error(number, f"expert {twice} stands there twice")
        if counts and len(counts) < len(ids):
            raise self._error(number, "some experts have counts and some have none")
        if any(first < second for first, second in pairwise(counts)):
            raise self._error(number, "the counts do not fall")
        return layer, tuple(ids), tuple(counts)

    def _error(self, number: int, what: str) -> HotListError:
        return HotListError(f"{self._path}: line {number}: {what}", _HINT)


def _one_line(text: str) -> str:
    return " ".join(text.split())
