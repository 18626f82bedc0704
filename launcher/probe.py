"""bloomery-probe: what this machine is (topology) and how fast its memory and disk are (bandwidth, engram).

Owns tables and the plot. What is measured and how is known by `runtime/topology.py` and `runtime/bandwidth_probe.py`;
rows of a file are `launcher/probe_engram.py`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bloomery.launcher import probe_engram
from bloomery.launcher.command_line import Parser, positive, program_parser, run_program
from bloomery.launcher.plots import check_plot, new_figure
from bloomery.launcher.progress import ProgressDisplay
from bloomery.launcher.tables import new_console, new_table, ranges
from bloomery.runtime.bandwidth_probe import BandwidthReport, probe_bandwidth
from bloomery.runtime.cpu_limits import affinity_mask, cpu_quota
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.topology import Topology, default_processes

PROGRAM = "bloomery-probe"
GIBIBYTE, GIGA = 1 << 30, 1e9
BUSY = 0.97  # a lower share of their CPUs is worth a remark


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "What this machine is, and how fast its memory and disk can be read.",
        (
            "bloomery-probe topology",
            "bloomery-probe bandwidth",
            "bloomery-probe bandwidth --disk-file model.gguf --plot bandwidth.png",
            "bloomery-probe bandwidth --json --no-disk > bandwidth.json",
            "bloomery-probe engram model.gguf",
        ),
    )
    # Without the program's own Parser a subcommand's errors would not be one line.
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    topology = commands.add_parser(
        "topology", help="packages, NUMA nodes, caches, cores, GPUs, limits", allow_abbrev=False
    )
    topology.set_defaults(run=run_topology)
    bandwidth = commands.add_parser(
        "bandwidth",
        help="read bandwidth per process count and per NUMA node, memory latency, disk read rate",
        allow_abbrev=False,
    )
    bandwidth.set_defaults(run=run_bandwidth)
    engram = commands.add_parser(
        "engram",
        help="single rows of an n-gram table, or of any large file: latency and rows a second",
        allow_abbrev=False,
    )
    probe_engram.add_options(engram)
    for command in (topology, bandwidth, engram):
        command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    bandwidth.add_argument("--plot", type=Path, metavar="FILE", help="draw the read bandwidth (png, svg, pdf)")
    bandwidth.add_argument("--processes", type=positive, metavar="N", help="measure with up to N processes")
    disk = bandwidth.add_mutually_exclusive_group()
    disk.add_argument(
        "--disk-file",
        type=Path,
        metavar="FILE",
        help="read this file for the disk's rate; its cached pages are dropped first (default: a file of 256 MiB is "
        "made in the current folder, read and removed)",
    )
    disk.add_argument("--no-disk", action="store_true", help="leave the disk out")
    return parser


def table_of(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    table = new_table(title)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def run_topology(args: argparse.Namespace) -> int:
    topology, mask, quota = Topology.read(), affinity_mask(), cpu_quota()
    if args.json:
        limits = {"affinity": sorted(mask), "quota": quota, "available_memory": available_memory()}
        processes = {"default_processes": default_processes(), "pin_order": topology.within(mask).pin_order()}
        print(json.dumps({**topology.as_dict(), **limits, **processes}))
    else:
        show_topology(new_console(), topology, mask, quota)
    return 0


def show_topology(console: Console, topology: Topology, mask: frozenset[int], quota: float | None) -> None:
    nodes = table_of("NUMA nodes", "node", "packages", "cores", "logical CPUs", "memory", right=("cores", "memory"))
    for node in topology.nodes:
        members = [core for core in topology.cores if core.node == node.number]
        packages = ranges({core.package for core in members})
        cpus = ranges(node.cpus) or "none: memory only"
        nodes.add_row(str(node.number), packages, str(len(members)), cpus, gibibytes(node.memory))
    console.print(nodes)
    caches = table_of("Last-level caches", "domain", "level", "size", "logical CPUs", right=("size",))
    for index, domain in enumerate(topology.l3_domains):
        size = f"{domain.nbytes / (1 << 20):g} MiB" if domain.nbytes else "unknown"
        caches.add_row(str(index), str(domain.level or "unknown"), size, ranges(domain.cpus))
    console.print(caches)
    grid = Table.grid(padding=(0, 2))
    for name, text in summary(topology, mask, quota):
        grid.add_row(name, text)
    console.print(grid)


def summary(topology: Topology, mask: frozenset[int], quota: float | None) -> Iterable[tuple[str, str]]:
    """The lines below the tables: what a person wants to know first."""
    siblings = max(len(core.cpus) for core in topology.cores)
    threads = f"up to {siblings} threads each" if siblings > 1 else "one thread each"
    yield "cores", f"{len(topology.cores)} in {len(topology.packages)} package(s), {threads}"
    for kind in ("performance", "efficiency"):
        members = [core.cpus for core in topology.cores if core.kind == kind]
        if members:
            yield f"  {kind}", f"{len(members)} cores: CPUs {ranges(cpu for cpus in members for cpu in cpus)}"
    if topology.offline:
        yield "offline", f"CPUs {ranges(topology.offline)}"
    for gpu in topology.gpus:
        yield "GPU", f"{gpu.address} on node {gpu.node}"
    yield "this process", f"may run on CPUs {ranges(mask)}" + (f", {quota:g} CPUs' worth of time" if quota else "")
    yield "memory", f"{gibibytes(available_memory())} available"
    order = topology.within(mask).pin_order()
    shown = ", ".join(map(str, order[:16])) + (" ..." if len(order) > 16 else "")
    yield "processes", f"{default_processes()} by default, pinned to CPUs {shown}"


def run_bandwidth(args: argparse.Namespace) -> int:
    if args.plot is not None:
        check_plot(args.plot)
    with ProgressDisplay(PROGRAM) as progress:
        report = probe_bandwidth(
            processes=args.processes or 0, disk=not args.no_disk, disk_file=args.disk_file, progress=progress
        )
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        show_bandwidth(new_console(), report)
    if args.plot is not None:
        plot_bandwidth(args.plot, report)
    return 0


def show_bandwidth(console: Console, report: BandwidthReport) -> None:
    right = ("processes", "GB/s", "GB/s each", "cores", "latency")
    reads = table_of("Memory read bandwidth", "processes", "GB/s", "GB/s each", "", right=right)
    best = max(rate.bytes_per_second for rate in report.reads)
    for rate in report.reads:
        speed = rate.bytes_per_second / GIGA
        bar = "█" * round(30 * rate.bytes_per_second / best)
        reads.add_row(str(rate.processes), f"{speed:.1f}", f"{speed / rate.processes:.1f}", bar)
    console.print(reads)
    nodes = table_of("By NUMA node", "node", "cores", "GB/s", "latency", right=right)
    for node in report.nodes:
        speed, latency = node.bytes_per_second / GIGA, f"{node.latency_seconds * 1e9:.0f} ns"
        nodes.add_row(str(node.node), str(node.processes), f"{speed:.1f}", latency)
    console.print(nodes)
    if report.disk is not None:
        disk = report.disk
        console.print(
            f"Disk: {disk.bytes_per_second / GIGA:.2f} GB/s ({disk.nbytes >> 20} MiB of {disk.path}; its pages were"
            f" dropped from the page cache first with posix_fadvise, {100 * disk.cached_share:.0f} % stayed in it)"
        )
    console.print(
        f"Each process read {report.buffer_bytes >> 20} MiB in the memory of its own node; the last-level cache has"
        f" {report.cache_bytes / (1 << 20):g} MiB."
        " Latency: dependent loads at random lines, in huge pages where the kernel grants them."
    )
    if report.least_cpu_share < BUSY:
        share = 100 * report.least_cpu_share
        console.print(f"Other programs were running: at worst the readers had their CPUs {share:.0f} % of the time.")
    if not report.beyond_cache:
        console.print("Memory was too scarce for greater buffers: figures of few processes may be the cache's.")


def plot_bandwidth(path: Path, report: BandwidthReport) -> None:
    """Read bandwidth over the number of processes, and the line that it would follow if nothing were shared."""
    figure = new_figure(7, 4.5)
    axes: Any = figure.add_subplot()
    counts = [rate.processes for rate in report.reads]
    speeds = [rate.bytes_per_second / GIGA for rate in report.reads]
    axes.plot(counts, speeds, marker="o", label="measured")
    axes.plot(counts, [speeds[0] * count for count in counts], linestyle=":", color="gray", label="one process times n")
    axes.set_xlabel("processes, one pinned to a core")
    axes.set_ylabel("memory read bandwidth, GB/s")
    axes.set_xlim(0, counts[-1] + 0.5)
    axes.set_ylim(0, 1.25 * max(speeds))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def gibibytes(nbytes: int) -> str:
    return f"{nbytes / GIBIBYTE:.1f} GiB"


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: int(args.run(args)))


if __name__ == "__main__":
    sys.exit(main())
