"""bloomery-trace: which experts the routers pick over a text, as a hot list, and how well table rows can be cached.

Owns options and tables. Counting is `trace_recorder.py`'s, pictures `trace_plots.py`'s, the list
`runtime/hot_list.py`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.launcher.command_line import (
    Parser,
    UsageError,
    add_model_options,
    positive,
    program_parser,
    read_text,
    run_program,
    write_line,
)
from bloomery.launcher.demo_model import chosen_model
from bloomery.launcher.plots import check_plot
from bloomery.launcher.progress import ProgressDisplay
from bloomery.launcher.tables import new_console, new_table
from bloomery.launcher.trace_plots import covered, plot_caches, plot_usage
from bloomery.launcher.trace_recorder import CacheRates, Counts, RouterTrace, TraceModel, cache_rates, cache_sizes
from bloomery.runtime.hot_list import HotList

PROGRAM = "bloomery-trace"
DEFAULT_CONTEXT = 512
KIBIBYTE = 1 << 10


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "Runs a model over texts and counts which experts its routers pick, layer by layer. Writes the ranks as a hot "
        "list (--output; programs take it with --hot-list), the counts as JSON, and plots. For a model with n-gram "
        "tables it also tells how many of a text's table rows row caches of several sizes would hold.",
        (
            "bloomery-trace -f README.md",
            "bloomery-trace -m model.gguf -f prose.txt -f code.txt -o model.hot --plot usage.png",
            "bloomery-trace -m model.gguf -f corpus.txt --tokens 100000 --json > counts.json",
            "bloomery-trace -m deepseek41.gguf -f code.txt --cache-plot hits.svg",
        ),
    )
    add_model_options(parser)
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        default=[],
        metavar="TEXT",
        help='UTF-8 text ("-": standard input); again for more',
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the hot list, all texts together")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the use of experts (png, svg, pdf)")
    parser.add_argument("--cache-plot", type=Path, metavar="FILE", help="draw the hit rates of row caches")
    parser.add_argument("--json", action="store_true", help="print one object with all counts instead of tables")
    parser.add_argument("--tokens", type=positive, metavar="N", help="only the first N tokens of each text")
    parser.add_argument(
        "-c", "--ctx", type=positive, default=DEFAULT_CONTEXT, metavar="N", help="tokens of a sequence (default 512)"
    )
    parser.add_argument(
        "--threads", type=positive, default=0, metavar="N", help="worker processes (default: all cores)"
    )
    parser.add_argument("--prompt-block", type=positive, default=512, metavar="N", help="greatest rows of a step (512)")
    return parser


def check(args: argparse.Namespace) -> None:
    """What can be known to go wrong before anything runs."""
    if not args.file:
        raise UsageError("there is no text", "name one or more with -f")
    if args.ctx < 2:
        raise UsageError("--ctx 1 leaves no room for text", "use at least 2")
    for path, option in ((args.plot, "--plot"), (args.cache_plot, "--cache-plot")):
        if path is not None:
            check_plot(path, option)
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise UsageError(f"--output {args.output}: its folder does not exist", "make the folder first")


def read_texts(args: argparse.Namespace, model: TraceModel) -> dict[str, list[int]]:
    """The tokens of each text, by a name that tells it from the others."""
    texts = {}
    for path in args.file:
        name = Path(path).stem if path != "-" else "standard input"
        name = path if name in texts else name
        if name in texts:
            raise UsageError(f"{path} is named twice", "name each text once")
        texts[name] = model.encode(read_text(path))[: args.tokens]
        if not texts[name]:
            raise UsageError(f"{path} has no tokens", "give a longer text")
    return texts


def record(
    args: argparse.Namespace, model: TraceModel, texts: dict[str, list[int]], progress: ProgressDisplay
) -> dict[str, Counts]:
    """Picks of each text."""
    total = sum(map(len, texts.values()))
    found: dict[str, Counts] = {}
    with RouterTrace(
        model, threads=args.threads, context=args.ctx, prompt_block=args.prompt_block, progress=progress
    ) as trace:
        before = 0

        def told(done: int) -> None:
            progress("tokens", before + done, total)

        told(0)
        for name, tokens in texts.items():
            found[name] = trace.record(tokens, told)
            before += len(tokens)
    return found


def hot_list(
    args: argparse.Namespace, model: TraceModel, texts: dict[str, list[int]], counts: dict[str, Counts]
) -> HotList:
    """All texts together."""
    together = {layer: sum(one[layer] for one in counts.values()) for layer in model.routed}
    sizes = [f"{name} {len(tokens)} tokens" for name, tokens in texts.items()]
    comments = [f"file {Path(model.path).name}", f"texts {', '.join(sizes)}", f"sequences of {args.ctx} tokens"]
    return HotList.of_counts(
        model.name, model.program.layers, {layer: np.asarray(row).tolist() for layer, row in together.items()}, comments
    )


def cached(model: TraceModel, texts: dict[str, list[int]], progress: ProgressDisplay) -> dict[str, CacheRates]:
    """Of each text, the same sizes for all; empty for a model without n-gram tables."""
    if model.program.engram is None:
        return {}
    sizes = cache_sizes(model.program, max(texts.values(), key=len))
    return {
        name: cache_rates(model.program, tokens, sizes, partial(progress, f"row caches, {name}"))
        for name, tokens in texts.items()
    }


def as_json(
    args: argparse.Namespace,
    model: TraceModel,
    hot: HotList,
    texts: dict[str, list[int]],
    counts: dict[str, Counts],
    caches: dict[str, CacheRates],
) -> dict[str, Any]:
    """One object. `counts[layer][expert]` of each text; `row_cache` only for a model with n-gram tables."""
    found: dict[str, Any] = {
        "model": model.name,
        "file": Path(model.path).name,
        "architecture": model.program.architecture,
        "layers": model.program.layers,
        "experts": hot.experts,
        "ctx": args.ctx,
        "ranks": {str(layer): list(ids) for layer, ids in hot.ranks.items()},
        "texts": [],
    }
    for name, tokens in texts.items():
        entry: dict[str, Any] = {"text": name, "tokens": len(tokens)}
        entry["counts"] = {str(layer): row.tolist() for layer, row in counts[name].items()}
        if name in caches:
            rates = caches[name]
            by_size = [{"bytes": size, "hit_rate": rate} for size, rate in rates.rates.items()]
            entry["row_cache"] = {"lookups": rates.lookups, "distinct": rates.distinct, "sizes": by_size}
        found["texts"].append(entry)
    return found


def show(hot: HotList, texts: dict[str, list[int]], counts: dict[str, Counts], caches: dict[str, CacheRates]) -> None:
    """How much of each text's picks the hottest quarter and half of the list take, by layer; hit rates by size."""
    console = new_console()
    quarter, half = max(1, hot.experts // 4), max(1, hot.experts // 2)
    table = new_table(f"{hot.model}, {hot.experts} experts: picks of the hottest {quarter} and {half}")
    table.add_column("layer", justify="right")
    table.add_column("hottest", overflow="fold")
    for name in texts:
        table.add_column(f"{name} ({len(texts[name])} tokens)", justify="right", overflow="fold")
    shares = {name: covered(hot, one) for name, one in counts.items()}
    for place, (layer, ids) in enumerate(hot.ranks.items()):
        cells = (f"{100 * one[place, quarter]:.0f} %, {100 * one[place, half]:.0f} %" for one in shares.values())
        table.add_row(str(layer), " ".join(map(str, ids[:4])), *cells)
    console.print(table)
    if caches:
        table = new_table("table rows in a row cache")
        table.add_column("cache", justify="right")
        for name in caches:
            table.add_column(name, justify="right", overflow="fold")
        for size in next(iter(caches.values())).rates:
            cells = (f"{100 * found.rates[size]:.1f} %" for found in caches.values())
            table.add_row(f"{size / KIBIBYTE:.0f} KiB", *cells)
        table.add_row("every row kept", *(f"{100 * found.ceiling:.1f} %" for found in caches.values()))
        console.print(table)


def run(args: argparse.Namespace) -> int:
    check(args)
    with TraceModel(chosen_model(args)) as model:
        if args.cache_plot is not None and model.program.engram is None:
            raise UsageError(f"--cache-plot: {model.path} has no n-gram tables", "leave --cache-plot out")
        texts = read_texts(args, model)
        with ProgressDisplay(PROGRAM) as progress:
            counts = record(args, model, texts, progress)
            caches = cached(model, texts, progress)
        hot = hot_list(args, model, texts, counts)
        if args.output is not None:
            args.output.write_text(hot.text(), encoding="utf-8")
        if args.plot is not None:
            plot_usage(args.plot, hot, counts)
        if args.cache_plot is not None:
            plot_caches(args.cache_plot, model.name, caches)
        if args.json:
            write_line(json.dumps(as_json(args, model, hot, texts, counts, caches)))
        else:
            show(hot, texts, counts, caches)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
