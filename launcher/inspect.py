"""bloomery-inspect: what is in a model file, as tables for people or one JSON object for scripts.

Owns how a model file is shown. What its parts are for is known by `runtime/tensor_roles.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bloomery.launcher.command_line import Parser, program_parser, run_program
from bloomery.launcher.tables import new_console, new_table, ranges
from bloomery.runtime.model_file import ModelFile, Tensor, Value
from bloomery.runtime.tensor_roles import ExpertBytes, bytes_by_role, bytes_by_type, expert_bytes, layer_of, role_of

PROGRAM = "bloomery-inspect"
SHOWN_ELEMENTS = 8  # of an array, unless --full
SHOWN_CHARACTERS = 100  # of a string in a table, unless --full


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "What is in a GGUF model file: metadata, tensors, bytes by role and by quant type, bytes of experts. "
        "The whole file is checked on the way; damage ends in an error that names the place.",
        (
            "bloomery-inspect model.gguf",
            "bloomery-inspect model-00001-of-00004.gguf --tensors",
            "bloomery-inspect model.gguf --json | jq .experts.active_bytes_per_token",
        ),
    )
    parser.add_argument("file", metavar="FILE", help="GGUF file, or the first of its shards")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--tensors", action="store_true", help="list every tensor, not one line for all layers")
    parser.add_argument("--full", action="store_true", help="print long strings and arrays whole")
    return parser


def file_report(model: ModelFile, *, full: bool) -> dict[str, Any]:
    """The file as plain values; arrays longer than SHOWN_ELEMENTS are objects {count, type, first} unless `full`."""
    tensors = model.tensors.values()
    experts = expert_bytes(model)
    return {
        "path": str(model.path),
        "version": model.version,
        "architecture": model.metadata.get("general.architecture"),
        "bytes": model.size,
        "shards": [{"path": str(path), "bytes": path.stat().st_size} for path in model.shards],
        "parameters": sum(tensor.elements for tensor in tensors),
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors),
        "bytes_by_role": bytes_by_role(tensors),
        "bytes_by_type": bytes_by_type(tensors),
        "experts": experts and _expert_report(experts),
        "metadata": {name: _plain(value, full) for name, value in model.metadata.items()},
        "tensors": [_tensor_report(tensor) for tensor in tensors],
    }


def _expert_report(experts: ExpertBytes) -> dict[str, Any]:
    least, greatest = experts.per_expert
    return {
        "bytes": experts.total,
        "layers": [
            {"layer": layer, "experts": count, "bytes": nbytes, "bytes_per_expert": nbytes // count}
            for layer, (nbytes, count) in experts.layers.items()
        ],
        "bytes_per_expert": {"least": least, "greatest": greatest},
        "used_per_token": experts.used,
        "active_bytes_per_token": experts.active_per_token,
    }


def _tensor_report(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "type": tensor.quant_type.name,
        "bytes": tensor.nbytes,
        "role": role_of(tensor.name),
        "shard": tensor.path.name,
        "offset": tensor.offset,
    }


def _plain(value: Value, full: bool) -> Any:
    """A value that JSON has: numbers that are not finite become strings."""
    if isinstance(value, list | np.ndarray):
        if not full and len(value) > SHOWN_ELEMENTS:
            kind = "string" if isinstance(value, list) else value.dtype.name
            return {"count": len(value), "type": kind, "first": _elements(value[:SHOWN_ELEMENTS])}
        return _elements(value)
    return _finite(value)


def _elements(values: list[str] | np.ndarray[Any, Any]) -> list[Any]:
    return [_finite(value) for value in (values if isinstance(values, list) else values.tolist())]


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def show_report(console: Console, model: ModelFile, report: Mapping[str, Any], *, each: bool, full: bool) -> None:
    """Everything as tables, the short overview last, where a person looks first."""
    console.print(_metadata_table(model, full))
    if model.tensors:
        console.print(_each_tensor_table(model) if each else _tensor_table(model.tensors.values()))
        for title, totals in (("role", report["bytes_by_role"]), ("quant type", report["bytes_by_type"])):
            console.print(_bytes_table(title, totals, report["tensor_bytes"]))
    console.print(_overview(model, report))


def _metadata_table(model: ModelFile, full: bool) -> Table:
    table = new_table(f"{len(model.metadata)} metadata keys")
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, value in model.metadata.items():
        table.add_row(_visible(name), _value_text(value, full))
    return table


def _value_text(value: Value, full: bool) -> str:
    if isinstance(value, list | np.ndarray):
        shown = ", ".join(repr(element) for element in _elements(value if full else value[:SHOWN_ELEMENTS]))
        rest = "" if full or len(value) <= SHOWN_ELEMENTS else f", ... ({len(value)} in all)"
        return _visible(f"[{shown}{rest}]")
    text = _visible(str(value))
    if full or len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"


def _visible(text: str) -> str:
    """Text that any terminal can show: control characters escaped, what is no UTF-8 as replacement characters."""
    clean = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], clean)


def _tensor_table(tensors: Iterable[Tensor]) -> Table:
    """One line for the tensors of all layers that have the same name, shape and quant type."""
    groups: dict[tuple[str, tuple[int, ...], str], list[Tensor]] = {}
    for tensor in tensors:
        pattern = re.sub(r"^blk\.\d+\.", "blk.N.", tensor.name)
        groups.setdefault((pattern, tensor.shape, tensor.quant_type.name), []).append(tensor)
    table = _new_tensor_table(f"{sum(map(len, groups.values()))} tensors", "layers")
    for (pattern, shape, kind), members in groups.items():
        layers = [layer for tensor in members if (layer := layer_of(tensor.name)) is not None]
        size = sum(tensor.nbytes for tensor in members)
        table.add_row(_visible(pattern), ranges(layers), _shape(shape), kind, role_of(members[0].name), _size(size))
    return table


def _each_tensor_table(model: ModelFile) -> Table:
    table = _new_tensor_table(f"{len(model.tensors)} tensors", "shard:offset")
    for tensor in model.tensors.values():
        place = f"{model.shards.index(tensor.path) + 1}:{tensor.offset}"
        kind, role = tensor.quant_type.name, role_of(tensor.name)
        table.add_row(_visible(tensor.name), place, _shape(tensor.shape), kind, role, _size(tensor.nbytes))
    return table


def _new_tensor_table(title: str, second: str) -> Table:
    table = new_table(title)
    table.add_column("tensor", no_wrap=True)
    table.add_column(second, overflow="fold")
    for heading in ("shape (ne)", "type"):
        table.add_column(heading, no_wrap=True)
    table.add_column("role", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    return table


def _bytes_table(what: str, totals: Mapping[str, int], whole: int) -> Table:
    table = new_table(f"bytes by {what}")
    table.add_column(what)
    for heading in ("bytes", "size", "share"):
        table.add_column(heading, justify="right")
    for name, total in totals.items():
        table.add_row(name, f"{total:,}", _size(total), f"{100 * total / whole:.1f} %")
    return table


def _overview(model: ModelFile, report: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("file", _visible(str(model.path)) + (f" and {len(model.shards) - 1} more" if model.shards[1:] else ""))
    grid.add_row("format", f"GGUF version {model.version}, {len(model.shards)} shard(s), {_size(model.size)}")
    grid.add_row("architecture", _visible(str(report["architecture"])))
    if model.tensors:
        bits = 8 * report["tensor_bytes"] / report["parameters"]
        grid.add_row("parameters", f"{report['parameters']:,} in {_size(report['tensor_bytes'])}, {bits:.2f} bits each")
    else:
        grid.add_row("parameters", "none: the file holds a vocabulary only")
    if model.tensors and not model.has("output.weight"):
        grid.add_row("head", "none of its own: it is the embedding's transpose")
    if (experts := expert_bytes(model)) is not None:
        for name, text in _expert_lines(experts):
            grid.add_row(name, text)
    return grid


def _expert_lines(experts: ExpertBytes) -> Iterable[tuple[str, str]]:
    counts = sorted({count for _, count in experts.layers.values()})
    per_layer = sorted({nbytes for nbytes, _ in experts.layers.values()})
    yield "experts", f"{_size(experts.total)} in layers {ranges(experts.layers)}, {_span(counts, str)} a layer"
    yield "  of one layer", _span(per_layer, _size)
    yield "  one expert", _span(sorted(set(experts.per_expert)), _size)
    if experts.active_per_token is not None:
        share = 100 * experts.active_per_token / experts.total
        yield "  read per token", f"{_size(experts.active_per_token)} ({share:.1f} %), {experts.used} experts a layer"


def _span(values: Sequence[int], text: Any) -> str:
    return text(values[0]) if len(values) == 1 else f"{text(values[0])} to {text(values[-1])}"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"


def run(args: argparse.Namespace) -> int:
    with ModelFile.open(args.file) as model:
        report = file_report(model, full=args.full)
        if args.json:
            print(json.dumps(report, allow_nan=False))
        else:
            show_report(new_console(), model, report, each=args.tensors, full=args.full)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
