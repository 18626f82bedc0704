"""bloomery-launch: the daemon, in the foreground; and two questions to one that runs: its status, and to stop.

Owns options and what a person or script reads. The daemon itself is `runtime/coordinator.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from bloomery.launcher.command_line import (
    DAEMON_OPTIONS,
    Parser,
    UsageError,
    add_daemon_options,
    daemon_config,
    positive,
    program_parser,
    run_program,
    write_line,
)
from bloomery.launcher.demo_model import chosen_draft, chosen_model
from bloomery.launcher.progress import ProgressDisplay
from bloomery.runtime.client import Client, ControlClient
from bloomery.runtime.coordinator import run_daemon

PROGRAM = "bloomery-launch"


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "Serves a model until SIGTERM or Ctrl-C. Clients connect to the endpoint that it prints when it is ready.",
        (
            "bloomery-launch -m model.gguf",
            "bloomery-launch -m model.gguf --ctx 4096 --parallel 8 --endpoint ipc:///tmp/bloomery.sock",
            "bloomery-launch --json-status",
            "bloomery-launch --status --endpoint ipc:///tmp/bloomery.sock",
            "bloomery-launch --stop --endpoint ipc:///tmp/bloomery.sock",
        ),
    )
    parser.add_argument("--json-status", action="store_true", help="when ready, print one JSON line and nothing else")
    parser.add_argument(
        "--endpoint", metavar="ADDRESS", help="where clients connect (default: in the runtime directory)"
    )
    parser.add_argument("--control", metavar="ADDRESS", help="where status is asked for (default: beside the endpoint)")
    parser.add_argument("--alias", metavar="NAME", help="name of the model towards clients")
    parser.add_argument("--queue", type=positive, metavar="N", help="requests that may wait before one is refused")
    running = parser.add_mutually_exclusive_group()
    running.add_argument("--status", action="store_true", help="print the state of the daemon at --endpoint and end")
    running.add_argument("--stop", action="store_true", help="let the daemon at --endpoint finish its requests and end")
    add_daemon_options(parser)
    return parser


def control_client(args: argparse.Namespace) -> ControlClient:
    """The control socket of a running daemon, named itself or found through the endpoint."""
    for attribute, spelling in (
        *((name, flag) for name, _, flag in DAEMON_OPTIONS),
        ("alias", "--alias"),
        ("queue", "--queue"),
    ):
        if getattr(args, attribute) is not None:
            raise UsageError(f"{spelling} has no effect on a running daemon", f"leave out {spelling}")
    if args.control is not None:
        return ControlClient(args.control)
    if args.endpoint is None:
        raise UsageError("which daemon?", "name its --endpoint, as printed when it became ready")
    with Client(args.endpoint) as client:
        return ControlClient(client.control)


def serve(args: argparse.Namespace) -> int:
    options = {"endpoint": args.endpoint, "control": args.control, "alias": args.alias, "queue_limit": args.queue}
    given = {name: given for name, given in options.items() if given}
    config = daemon_config(args, chosen_model(args), chosen_draft(args), **given)

    def on_ready(status: dict[str, Any]) -> None:
        if args.json_status:
            write_line(json.dumps(status))
            return
        write_line(
            f"{PROGRAM}: {status['model']} is ready: plan {status['plan']}, {status['slots']} slots of {status['ctx']} "
            f"tokens, pid {status['pid']}\n  endpoint {status['endpoint']}\n  control  {status['control']}"
        )

    with ProgressDisplay(PROGRAM) as display:
        return run_daemon(config, on_ready=on_ready, progress=display)


def run(args: argparse.Namespace) -> int:
    if not (args.status or args.stop):
        return serve(args)
    with control_client(args) as control:
        if args.status:
            write_line(json.dumps(control.status(), indent=None if args.json_status else 2))
        else:
            control.drain()
            control.shutdown()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
