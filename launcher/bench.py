"""bloomery-bench: prompt and generation rates, what bounds them, and how another engine does on the same file.

Owns options and the order of thread counts. Rounds and figures are `bench_rows.py`'s, looks `bench_report.py`'s.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bloomery.launcher import bench_report
from bloomery.launcher.bench_arithmetic import arithmetic_ceiling
from bloomery.launcher.bench_card import plan_facts
from bloomery.launcher.bench_engine import BenchEngine
from bloomery.launcher.bench_llama import LlamaBench, LlamaBenchOptions
from bloomery.launcher.bench_parts import Variant, smaller_shapes
from bloomery.launcher.bench_peer import BATCH, MICRO_BATCH, PACKAGES, REPACKING, LlamaPeer, PeerOptions
from bloomery.launcher.bench_rows import row_of, run_rounds, run_trial
from bloomery.launcher.bench_trial import TokenSource, Trial, trials_of
from bloomery.launcher.command_line import (
    Parser,
    UsageError,
    add_model_options,
    byte_count,
    positive,
    program_parser,
    run_program,
    whole,
)
from bloomery.launcher.demo_model import chosen_model
from bloomery.launcher.progress import ProgressDisplay
from bloomery.runtime.architectures import build_program
from bloomery.runtime.bandwidth_probe import ReadCeiling
from bloomery.runtime.daemon_config import STEP_AHEAD, DaemonConfig
from bloomery.runtime.memory_terms import DEFAULT_BLOCK
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.placement import Plan, machine_room, make_plan
from bloomery.runtime.synthetic_file import synthetic_file
from bloomery.runtime.synthetic_templates import TEMPLATES
from bloomery.runtime.topology import default_processes
from bloomery.runtime.type_mixes import MIXES

PROGRAM = "bloomery-bench"
OUTPUTS: dict[str, Callable[[Sequence[bench_report.Row]], str]] = {
    "json": bench_report.as_json,
    "csv": bench_report.as_csv,
    "md": bench_report.as_markdown,
}


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "Measures prompt (pp) and generation (tg) rates: median and spread (interquartile range over median) of several"
        " rounds, bytes read and their share of what the memory gives, time by kind of op. With --against llama.cpp"
        " rounds of both engines alternate on the same file.",
        (
            "bloomery-bench -p 128 -n 32",
            "bloomery-bench --synthetic qwen3-30b-a3b --layers 5 -d 0,4096",
            "bloomery-bench -m model.gguf -t 1,2,4 -r 9 -o json > rates.json",
            "bloomery-bench --synthetic deepseek-v2-lite --against llama.cpp --peer-python ~/llama/bin/python",
            "bloomery-bench -m model.gguf --plan a --card-memory 24GiB -p 512,4096 -d 6,4096",
            "bloomery-bench -m model.gguf --plan a --against llama.cpp --peer-path ~/llama.cpp/build/bin",
            "bloomery-bench --synthetic llama-1b --mix Q3_K_M -p 0 -n 0      # only makes the file",
        ),
    )
    model = parser.add_argument_group("model")
    add_model_options(model)
    model.add_argument(
        "--synthetic",
        choices=tuple(TEMPLATES),
        metavar="NAME",
        help=f"a file with this model's layer shapes and random weights, made once: {', '.join(TEMPLATES)}",
    )
    model.add_argument("--layers", type=positive, metavar="N", help="layers of the synthetic file (default: few)")
    model.add_argument(
        "--experts",
        type=positive,
        metavar="N",
        help="experts a layer (default: as the model, deepseek41 24 of 384); fewer make a smaller file of which a"
        " generated token reads as much",
    )
    model.add_argument(
        "--mix",
        choices=MIXES,
        metavar="MIX",
        help=f"its quant types (default Q4_K_M; deepseek41 Q3_K_M): {', '.join(MIXES)}",
    )
    trial = parser.add_argument_group("trials (lists: 0,4096)")
    trial.add_argument(
        "-p", "--prompt", type=numbers, default=[512], metavar="N,..", help="prompt tokens (512; 0: none)"
    )
    trial.add_argument(
        "-n", "--gen", type=numbers, default=[64], metavar="N,..", help="tokens to generate (64; 0: none)"
    )
    trial.add_argument(
        "-d", "--depth", type=numbers, default=[0], metavar="N,..", help="tokens in the cache before (0)"
    )
    trial.add_argument(
        "-t", "--threads", type=numbers, default=[], metavar="N,..", help="worker processes, one core each (all cores)"
    )
    trial.add_argument("-r", "--repeats", type=positive, default=5, metavar="N", help="rounds after a warm-up (5)")
    trial.add_argument(
        "--prompt-block", type=positive, metavar="N", help="greatest rows of a step (512, or what the plan chooses)"
    )
    trial.add_argument(
        "--host-weights",
        choices=("auto", "copy", "mmap"),
        default="auto",
        help="where weights lie: copied, mapped, or as a daemon would choose (auto)",
    )
    trial.add_argument(
        "--parts",
        action="store_true",
        help="with --synthetic: head, experts and the rest apart, on both sides, by differences between this file and"
        " two with fewer experts and layers, which are opened as well",
    )
    trial.add_argument(
        "--cache-type", choices=("f16", "f32", "q8_0"), default="f16", help="type of the attention caches"
    )
    card = parser.add_argument_group("card")
    card.add_argument(
        "--plan",
        choices=("auto", "a", "cpu"),
        default="cpu",
        help="what runs where: everything on the host (cpu, the default), a card and the host (a), or a card if there"
        " is one (auto)",
    )
    card.add_argument(
        "--card-memory", type=byte_count, metavar="SIZE", help="use at most so much of the card's memory, such as 24GiB"
    )
    card.add_argument(
        "--step-ahead",
        type=whole,
        metavar="N",
        help=f"steps that follow one before its token is looked at ({STEP_AHEAD})",
    )
    card.add_argument(
        "--shared-blocks", action="store_true", help="short prompt blocks leave some of the experts on the host there"
    )
    card.add_argument("--deterministic", action="store_true", help="prompts take the path of decoding")
    peer = parser.add_argument_group("comparison")
    peer.add_argument("--against", choices=("llama.cpp",), help="alternate with this engine's installed wheel")
    peer.add_argument(
        "--peer-python", metavar="FILE", help="interpreter (3.11 or newer) in whose environment the wheel is installed"
    )
    peer.add_argument(
        "--peer-package",
        type=words(PACKAGES),
        metavar="NAME,..",
        help=f"which wheels, if there are several, the fastest counts: {', '.join(PACKAGES)} (auto: the first found)",
    )
    peer.add_argument(
        "--repack",
        type=words(REPACKING),
        metavar="on,off",
        help="whether llama.cpp repacks weights (default on); both: two peers, the faster counts",
    )
    peer.add_argument(
        "--micro-batch",
        type=positive,
        metavar="N",
        help=f"tokens that llama.cpp evaluates together (default {MICRO_BATCH}, as llama.cpp's)",
    )
    peer.add_argument(
        "--peer-path",
        type=Path,
        metavar="DIR",
        help="alternate with llama-bench of the build in this folder instead",
    )
    peer.add_argument(
        "--peer-cpu-moe",
        type=positive,
        metavar="N",
        help="the experts of its first N layers on the host (llama-bench's -ncmoe), the rest on the card",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("-o", "--output", choices=("table", *OUTPUTS), default="table", help="how to print the rows")
    output.add_argument("--json", action="store_const", const="json", dest="output", help="the same as -o json")
    return parser


def numbers(text: str) -> list[int]:
    """ "0,4096" as numbers, none of them negative."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,4096") from None
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} has a negative number")
    return found


def words(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of lists such as on,off."""

    def parse(text: str) -> list[str]:
        found = list(dict.fromkeys(text.split(",")))
        if unknown := [word for word in found if word not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return found

    return parse


def check(args: argparse.Namespace) -> None:
    """Options that would do nothing, or cannot be meant."""
    if args.synthetic is None:
        for name in ("layers", "experts", "mix"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name} shapes a synthetic file", "name one with --synthetic, or leave it out")
    elif any(name is not None for name in (args.model, args.hf_repo, args.demo)):
        raise UsageError("--synthetic and -m, --hf or --demo both name a model", "leave one of them out")
    check_parts(args)
    if args.against is None:
        for name in ("peer_python", "peer_package", "peer_path", "peer_cpu_moe", "repack", "micro_batch"):
            if getattr(args, name) is not None:
                spelling = f"--{name.replace('_', '-')}"
                raise UsageError(f"{spelling} is about the other engine", "add --against llama.cpp, or leave it out")
    if args.peer_path is not None:
        for name in ("peer_python", "peer_package", "repack"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is about a wheel, --peer-path about a build", "name one")
    elif args.peer_cpu_moe is not None:
        raise UsageError("--peer-cpu-moe is an option of a build's llama-bench", "name the build with --peer-path")
    elif args.against and args.plan != "cpu":
        raise UsageError("installed wheels of llama.cpp run on the host", "name a build for cards with --peer-path")
    if args.card_memory is not None and args.plan == "cpu":
        raise UsageError("--card-memory is about a card, and plan cpu uses none", "add --plan a or --plan auto")
    if 0 in args.threads:
        raise UsageError("-t 0: nothing runs on no thread", "leave -t out for all cores")
    most = default_processes()
    if args.threads and max(args.threads) > most:
        raise UsageError(f"-t {max(args.threads)}: this process may use {most} cores", f"ask for at most {most}")
    template = TEMPLATES.get(args.synthetic or "")
    layers = template and (args.layers or template.default_layers)
    if args.against and template and template.peer_layers == ():
        raise UsageError(f"llama.cpp does not know {args.synthetic}", "measure it without --against")
    if args.against and template and template.peer_layers and layers not in template.peer_layers:
        allowed = " or ".join(map(str, template.peer_layers))
        raise UsageError(f"llama.cpp takes {args.synthetic} only with {allowed} layers", f"--layers {allowed[-2:]}")


def check_parts(args: argparse.Namespace) -> None:
    if not args.parts:
        return
    if args.synthetic is None:
        raise UsageError("--parts compares synthetic files", "name one with --synthetic, or leave it out")
    if set(args.depth) != {0} or any(args.prompt) or not any(args.gen):
        raise UsageError("--parts is about generation at depth 0", "add -p 0 -d 0, and -n with a number of tokens")
    if args.plan != "cpu" or args.peer_path is not None:
        raise UsageError("--parts takes tokens apart on the host", "leave out --plan and --peer-path")
    if len(args.repack or []) > 1 or len(args.peer_package or []) > 1:
        raise UsageError("--parts opens three files on each side", "name one peer package and one way of repacking")


def benchmark(args: argparse.Namespace, path: str, progress: ProgressDisplay) -> list[bench_report.Row]:
    trials = trials_of(args.prompt, args.gen, args.depth)
    rows: list[bench_report.Row] = []
    with ModelFile.open(path) as model:
        facts = model_facts(model, args)
        plans = [card_plan(args, model, threads, trials) for threads in args.threads or [0]]
    for wanted, plan in zip(args.threads or [0], plans, strict=True):
        of_plan = facts | plan_facts(plan, args.card_memory or 0, steps_ahead(args))
        if plan is not None and plan.card is not None:
            threads = plan.processes
            of_plan |= {"isa": plan.card.architecture, "arithmetic_gops": None}
        else:
            plan, threads = None, wanted or default_processes()
            of_plan |= arithmetic_ceiling(threads)
        rows += thread_rows(args, path, threads, trials, of_plan, plan, progress)
    for row in rows:
        row["load_after"] = os.getloadavg()[0]
    return rows


def card_plan(args: argparse.Namespace, model: ModelFile, threads: int, trials: Sequence[Trial]) -> Plan | None:
    """The plan for --plan a and auto, which for auto may be one without a card; None for cpu. PlanError for a machine
    without a card, or with too small a one, where plan a was asked for."""
    if args.plan == "cpu":
        return None
    config = DaemonConfig(
        model.path.as_posix(),
        plan=args.plan,
        context=context_of(trials),
        slots=1,
        processes=threads,
        prompt_block=args.prompt_block or 0,
        cache_type=args.cache_type,
        host_weights=args.host_weights,
        card_memory=args.card_memory or 0,
        shared_blocks=args.shared_blocks,
        deterministic=args.deterministic,
        cache_ram=0,
    )
    return make_plan(config, build_program(model), machine_room(args.plan, config.card_memory))


def context_of(trials: Sequence[Trial]) -> int:
    """Positions that the slot needs."""
    return max(trial.positions for trial in trials)


def thread_rows(
    args: argparse.Namespace,
    path: str,
    threads: int,
    trials: Sequence[Trial],
    facts: dict[str, Any],
    plan: Plan | None,
    progress: ProgressDisplay,
) -> list[bench_report.Row]:
    """All trials with one number of threads: one pool, one peer process, one set of readers."""
    context = context_of(trials)
    build = llama_bench(args, path, threads, plan)  # whatever is wrong with it is found before a model is loaded
    with ExitStack() as stack:

        def sides(path: str) -> tuple[BenchEngine, list[LlamaPeer]]:
            engine = BenchEngine(
                path,
                threads=threads,
                context=context,
                prompt_block=args.prompt_block or DEFAULT_BLOCK,
                cache_type=args.cache_type,
                host_weights=args.host_weights,
                plan=plan,
                step_ahead=steps_ahead(args),
                progress=progress,
            )
            stack.callback(engine.close)
            batch = args.micro_batch or MICRO_BATCH
            peers = [
                stack.enter_context(LlamaPeer(options, path, threads=threads, context=context, micro_batch=batch))
                for options in peer_options(args)
            ]
            return engine, peers

        engine, peers = sides(path)
        facts = facts | {"host_weights": engine.host_weights}
        variants = []
        for name, smaller in part_files(args, progress).items():
            of_ours, of_theirs = sides(smaller)
            variants.append(Variant(name, of_ours, next(iter(of_theirs), None)))
        ceiling = stack.enter_context(ReadCeiling(threads, progress)) if threads else None
        source = TokenSource(engine.program.vocabulary, max(trial.depth for trial in trials))
        rows = []
        if build is not None:
            found = run_rounds(trials, args.repeats, engine, build, ceiling, source, progress)
        for trial in trials:
            for variant in variants:
                variant.forget()
            if build is not None:
                rounds = found[trial]
            else:
                rounds = run_trial(trial, args.repeats, engine, peers, ceiling, source, progress, variants)
            row = row_of(trial, threads, rounds, engine.program, engine.block, args.cache_type, plan) | facts
            arithmetic = row["arithmetic_gops"] if trial.kind == "pp" else None
            row["arithmetic_share"] = row["gops"] / arithmetic if arithmetic else None
            systems = {peer.name: peer.facts["system"] for peer in peers}
            if build is not None:
                systems[build.name] = build.facts["system"]
            row["against_system"] = systems.get(row["against"])
            rows.append(row)
    return rows


def part_files(args: argparse.Namespace, progress: ProgressDisplay) -> dict[str, str]:
    """The smaller files of --parts by name."""
    if not args.parts:
        return {}
    return {
        name: str(
            synthetic_file(
                args.synthetic, shape.layers, args.mix or "", args.experts or 0, shape.used, progress=progress
            )
        )
        for name, shape in smaller_shapes(args.synthetic, args.layers or 0).items()
    }


def llama_bench(args: argparse.Namespace, path: str, threads: int, plan: Plan | None) -> LlamaBench | None:
    """The build that --peer-path names: on the card if ours is, with as many threads."""
    if args.peer_path is None:
        return None
    micro = args.micro_batch or MICRO_BATCH
    options = LlamaBenchOptions(
        args.peer_path, plan is not None, args.peer_cpu_moe or 0, threads, args.cache_type, max(BATCH, micro), micro
    )
    return LlamaBench(options, path)


def peer_options(args: argparse.Namespace) -> list[PeerOptions]:
    """Every combination that was asked for; none without --against."""
    if not args.against or args.peer_path is not None:
        return []
    python = args.peer_python or sys.executable
    packages, repacking = args.peer_package or ["auto"], args.repack or ["on"]
    return [PeerOptions(python, package, repack == "on") for package in packages for repack in repacking]


def steps_ahead(args: argparse.Namespace) -> int:
    return STEP_AHEAD if args.step_ahead is None else int(args.step_ahead)


def model_facts(model: ModelFile, args: argparse.Namespace) -> dict[str, Any]:
    """The conditions that every row carries."""
    return {
        "model": Path(model.path).name,
        "architecture": model.architecture,
        "model_bytes": sum(tensor.nbytes for tensor in model.tensors.values()),
        "version": version("bloomery"),
        "executor": "host",
        "step_ahead": 0,
        "prompt_block": args.prompt_block or DEFAULT_BLOCK,
        "micro_batch": (args.micro_batch or MICRO_BATCH) if args.against else None,
        "cache_type": args.cache_type,
        "repeats": args.repeats,
        "cpu": cpu_name(),
        "load_before": os.getloadavg()[0],
    }


def cpu_name() -> str:
    """Model name and number of logical CPUs, as the kernel reports them."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return f"{len(names)} x {names[0]}" if names else "unknown CPU"


def run(args: argparse.Namespace) -> int:
    check(args)
    with ProgressDisplay(PROGRAM) as progress:
        if args.synthetic is None:
            path = chosen_model(args)
        else:
            path = str(
                synthetic_file(args.synthetic, args.layers or 0, args.mix or "", args.experts or 0, progress=progress)
            )
        if not trials_of(args.prompt, args.gen, args.depth):
            print(path)
            return 0
        rows = benchmark(args, path, progress)
    if args.output == "table":
        bench_report.print_tables(rows)
    else:
        print(OUTPUTS[args.output](rows))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
