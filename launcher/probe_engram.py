"""bloomery-probe engram: how fast rows of an n-gram table, or of any large file, come from its disk and from memory.

Owns the options and the table. What is measured and how is known by `runtime/row_probe.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bloomery.launcher.command_line import positive
from bloomery.launcher.progress import ProgressDisplay
from bloomery.launcher.tables import new_console, new_table
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.row_probe import ADVISED, READER, RowReport, probe_rows
from bloomery.runtime.row_reader import RowTable

ROW_BYTES = 110  # 256 weights of Q3_K, as in the published file
TABLE = ".engram_embd.weight"
WRITTEN = 0.99
CACHED = 0.01


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a model file with n-gram tables, or any large file")
    parser.add_argument("--row-bytes", type=positive, metavar="N", help=f"of a plain file (default {ROW_BYTES})")
    parser.add_argument("--rows", type=positive, default=48, metavar="N", help="rows of a fetch (default 48)")
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="fetches of each kind (default 15)")
    parser.set_defaults(run=run_engram)


def run_engram(args: argparse.Namespace) -> int:
    table = find_table(args.file, args.row_bytes)
    with ProgressDisplay("bloomery-probe") as progress:
        report = probe_rows(table, rows=args.rows, rounds=args.rounds, progress=progress)
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        show_rows(report)
    return 0


def find_table(path: Path, row_bytes: int | None) -> RowTable:
    """The largest n-gram table of a model file, else the whole file as rows."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        size = path.stat().st_size
    except OSError as error:
        raise BloomeryError(f"{path}: cannot be read: {error.strerror}", "name a readable file") from None
    if magic == b"GGUF" and row_bytes is None:
        with ModelFile.open(path) as model:
            tables = [RowTable.of(tensor) for name, tensor in model.tensors.items() if name.endswith(TABLE)]
        if not tables:
            raise BloomeryError(f"{path}: has no n-gram table (blk.N{TABLE})", "--row-bytes N takes any file as rows")
        return max(tables, key=lambda table: table.nbytes)
    row_bytes = row_bytes or ROW_BYTES
    return RowTable(str(path), 0, size // row_bytes, row_bytes)


def show_rows(report: RowReport) -> None:
    console = new_console()
    grid = new_table(f"{report.rows} random rows of {report.row_bytes} bytes, median (least to most) in ms")
    for column in ("way", "from disk", "from memory"):
        grid.add_column(column, justify="left" if column == "way" else "right", overflow="fold")
    for way in report.ways:
        cold = f"{1e3 * way.cold:.2f} ({1e3 * way.cold_least:.2f} to {1e3 * way.cold_most:.2f})"
        warm = f"{1e3 * way.warm:.3f} ({1e3 * way.warm_least:.3f} to {1e3 * way.warm_most:.3f})"
        grid.add_row(way.way, cold, warm)
    grid.add_row("row reader's own cache", "", f"{1e3 * report.row_cache_seconds:.3f}")
    console.print(grid)
    ratio = report.way(READER).cold / report.way(ADVISED).cold
    console.print(f"From disk the row reader took {ratio:.2f} times as long as {ADVISED}.")
    console.print(
        f"{report.bulk_rows} sorted rows at once: {report.bulk_cold:,.0f} rows/s from disk,"
        f" {report.bulk_warm:,.0f} from the page cache."
    )
    console.print(
        f"{report.rounds} rounds of fresh rows of {report.path}, the ways in turns; every byte was compared with a"
        f" second reading. Load of the machine at the end: {report.load:.1f}."
    )
    if report.written_share < WRITTEN:
        share = 100 * report.written_share
        console.print(f"Only {share:.0f} % of the file is on the disk: holes read as zeros and make disks look fast.")
    if report.cached_share > CACHED:
        share = 100 * report.cached_share
        console.print(f"Up to {share:.0f} % of the file stayed in the page cache: the figures from disk are too good.")
