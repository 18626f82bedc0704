"""bloomery-plan: what a plan takes, term by term, whether it fits, and how fast its steps will be; nothing is loaded.

Owns options and how a plan is shown. Terms and refusals are `runtime/placement.py`'s, the prediction is
`runtime/step_prediction.py`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from bloomery.launcher.command_line import (
    Parser,
    add_daemon_options,
    byte_count,
    daemon_config,
    program_parser,
    run_program,
    write_line,
)
from bloomery.launcher.demo_model import chosen_draft, chosen_model
from bloomery.launcher.tables import new_console, new_table
from bloomery.runtime.architectures import build_program
from bloomery.runtime.card_probe import CardRoom
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.hot_list import HotList, check_hot_list, read_hot_list
from bloomery.runtime.memory_terms import MemoryTerm
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.placement import MemoryRoom, Plan, check_plan_name, machine_room, make_plan
from bloomery.runtime.program import Program
from bloomery.runtime.step_prediction import Bandwidth, Prediction, predict
from bloomery.runtime.topology import default_processes

PROGRAM = "bloomery-plan"
DEPTH = 1024
_PLACES = {
    "card": "card memory",
    "mapped": "host, page cache",
    "shared": "host, /dev/shm",
    "private": "host, processes",
    "disk": "on disk",
}


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "Shows where the weights of a model would lie and what that takes, without loading anything: every term in "
        "bytes, what is free, the step time that the memory's speed allows. Ends with an error if the plan does not "
        "fit, naming the term and the shortfall.",
        (
            "bloomery-plan -m model.gguf",
            "bloomery-plan -m model.gguf --plan a --card-memory 24GiB --ctx 16384",
            "bloomery-plan -m model.gguf --plan cpu --json --no-probe",
            "bloomery-plan -m model.gguf --plan a --card 24GiB --host 96GiB --no-probe   # a machine that is not here",
        ),
    )
    add_daemon_options(parser)
    machine = parser.add_argument_group("another machine")
    machine.add_argument("--card", type=byte_count, metavar="SIZE", help="as if there were a card with so much free")
    machine.add_argument("--host", type=byte_count, metavar="SIZE", help="as if so much host memory were free")
    machine.add_argument("--host-speed", type=byte_count, metavar="RATE", help="bytes a second the host reads: 80GB")
    machine.add_argument("--card-speed", type=byte_count, metavar="RATE", help="bytes a second the card reads: 3.3TB")
    parser.add_argument("--depth", type=int, default=DEPTH, metavar="N", help=f"position of the step ({DEPTH})")
    parser.add_argument("--no-probe", action="store_true", help="measure nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def room_of(args: argparse.Namespace, config: DaemonConfig) -> MemoryRoom:
    """What is free here, or on the machine that the options describe."""
    if args.card is None:
        room = machine_room(config.plan, config.card_memory)
    else:
        card = CardRoom(0, "a card", "sm_90", args.card, args.card, 0.0).limited(config.card_memory)
        room = replace(machine_room("cpu"), cards=(card,))
    return room if args.host is None else replace(room, memory=args.host, shared=args.host)


def bandwidth_of(args: argparse.Namespace, plan: Plan) -> Bandwidth:
    """What was given or, unless --no-probe, measured."""
    host = float(args.host_speed or 0)
    if not host and not args.no_probe and (plan.tiers is None or plan.tiers.host_layers):
        from bloomery.runtime.bandwidth_probe import ReadCeiling

        with ReadCeiling(plan.processes or default_processes()) as ceiling:
            host = ceiling.measure().bytes_per_second
    card = float(args.card_speed or (plan.card.read if plan.card else 0))
    return Bandwidth(host, card)


def report(plan: Plan, room: MemoryRoom, bandwidth: Bandwidth, prediction: Prediction | None) -> dict[str, Any]:
    """The plan as plain values."""
    tiers = plan.tiers
    return {
        "plan": plan.name,
        "digest": plan.digest,
        "context": plan.context,
        "slots": plan.slots,
        "processes": plan.processes,
        "note": plan.note,
        "card": plan.card and asdict(plan.card),
        "terms": [asdict(term) for term in plan.terms],
        "free": {"memory": room.memory, "shared": room.shared, "card": plan.card.free if plan.card else None},
        "experts_on_card": tiers and {layer.layer: len(tiers.on_card[layer.gate]) for layer in tiers.layers},
        "expert_share_on_card": tiers and tiers.share,
        "stream_rows": plan.stream_rows,
        "stream_note": plan.stream_note,
        "shared_block_rows": [rows for rows, _ in plan.stream_tiers],
        "bandwidth": asdict(bandwidth),
        "prediction": prediction and asdict(prediction),
    }


def show(plan: Plan, room: MemoryRoom, prediction: Prediction | None, depth: int) -> None:
    console = new_console()
    if plan.note:
        console.print(f"no card: {plan.note}")
    table = new_table(f"plan {plan.name}: context {plan.context}, {plan.slots} slots, {plan.processes} CPU processes")
    for name, justify in (("term", "left"), ("where", "left"), ("bytes", "right"), ("GiB", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for term in plan.terms:
        table.add_row(*_cells(term))
    console.print(table)
    places = [("host", plan.total("mapped", "shared", "private"), room.memory), *_card_line(plan)]
    for name, used, free in places:
        console.print(f"{name}: {used} bytes of {free} free ({100 * used / max(1, free):.1f} %)")
    if plan.tiers and plan.tiers.layers:
        console.print(f"experts on the card: {100 * plan.tiers.share:.1f} %")
    if plan.stream_rows:
        console.print(
            f"prompts: in blocks of {plan.stream_rows} rows and more the experts on the host come to the card"
        )
    elif plan.stream_note:
        console.print(f"prompts: the experts on the host do not come to the card: {plan.stream_note}")
    if prediction is None:
        console.print("step time: not predicted (no bandwidth was measured or given)")
        return
    console.print(
        f"decode at {depth}: {1e3 * prediction.seconds:.2f} ms a step, {1 / prediction.seconds:.1f} tokens/s; no"
        f" overlap can beat {1e3 * prediction.bound_seconds:.2f} ms; {prediction.card_bytes / 1e6:.1f} MB from the"
        f" card, {prediction.host_bytes / 1e6:.1f} MB from the host, {prediction.hand_offs} hand-offs"
    )


def _cells(term: MemoryTerm) -> tuple[str, str, str, str]:
    return term.name, _PLACES[term.place], str(term.nbytes), f"{term.nbytes / (1 << 30):.3f}"


def _card_line(plan: Plan) -> list[tuple[str, int, int]]:
    return [(plan.card.name, plan.total("card"), plan.card.free)] if plan.card else []


def run(args: argparse.Namespace) -> int:
    config = daemon_config(args, chosen_model(args), chosen_draft(args))
    check_plan_name(config.plan)
    with ModelFile.open(config.model) as model:
        program = build_program(model)
        hot = _hot_list(config, program)
        room = room_of(args, config)
        plan = make_plan(config, program, room, hot)
        bandwidth = bandwidth_of(args, plan)
        element = 4 if config.cache_type == "f32" else 2
        depth = min(args.depth, plan.context - 1)
        prediction = predict(program, plan.tiers, bandwidth, position=depth, cache_bytes=element, hot=hot)
    if args.json:
        write_line(json.dumps(report(plan, room, bandwidth, prediction)))
    else:
        show(plan, room, prediction, depth)
    return 0


def _hot_list(config: DaemonConfig, program: Program) -> HotList | None:
    if not config.hot_list:
        return None
    hot = read_hot_list(config.hot_list)
    check_hot_list(hot, program)
    return hot


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
