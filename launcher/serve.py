"""bloomery-serve: llama-server's and OpenAI's HTTP in front of a daemon, private or running.

Owns flags (llama-server's spellings), sockets and the order of start and end. The daemon is started before the HTTP
modules are imported, so that the model loads meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.launcher.command_line import (
    HOST_WEIGHTS_VARIABLE,
    HOT_LIST_VARIABLE,
    Parser,
    UsageError,
    add_endpoint_option,
    add_hot_list_option,
    add_memory_options,
    add_model_options,
    add_plan_options,
    positive,
    program_parser,
    run_program,
    write_line,
)
from bloomery.launcher.demo_model import chosen_draft, chosen_model
from bloomery.launcher.draft_options import DRAFT_OPTIONS, add_draft_options
from bloomery.launcher.serve_flags import add_accepted_flags, add_default_flags, default_fields
from bloomery.runtime.daemon_config import DaemonConfig

if TYPE_CHECKING:
    from bloomery.launcher.http.settings import ServerSettings

PROGRAM = "bloomery-serve"
DEFAULT_CONTEXT = 4096
DEFAULT_SLOTS = 4


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "Serves a model over HTTP as llama-server does: /completion, OpenAI's /v1 (chat, completions, responses), "
        "Anthropic's /v1/messages, and a chat page at /. Flags have llama-server's names.",
        (
            "bloomery-serve",
            "bloomery-serve -m model.gguf --port 8080 --parallel 4 -c 32768",
            "bloomery-serve -m model.gguf --host 0.0.0.0 --api-key secret --metrics --json-log",
            "bloomery-serve --endpoint ipc:///tmp/bloomery.sock",
        ),
    )
    add_model_options(parser)
    add_endpoint_option(parser)
    _add_machine_flags(parser.add_argument_group("machine"))
    add_draft_options(parser)
    _add_http_flags(parser.add_argument_group("HTTP"))
    _add_chat_flags(parser.add_argument_group("chat"))
    add_default_flags(parser.add_argument_group("defaults of requests"))
    add_accepted_flags(parser.add_argument_group("accepted for llama-server's sake, without effect here"))
    return parser


def _add_machine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        metavar="N",
        help=f"positions of all slots together (default {DEFAULT_CONTEXT} a slot); each slot has N / --parallel, "
        "or N with --kv-unified; 0: what the file was trained for",
    )
    group.add_argument("--ctx", type=positive, metavar="N", help="positions of one slot, as in the other programs")
    group.add_argument("-np", "--parallel", type=int, metavar="N", help=f"slots (default {DEFAULT_SLOTS})")
    group.add_argument(
        "-kvu", "--kv-unified", action=argparse.BooleanOptionalAction, default=False, help="see --ctx-size"
    )
    group.add_argument("-no-kvu", dest="kv_unified", action="store_false", help=argparse.SUPPRESS)
    group.add_argument("-t", "--threads", "--processes", type=int, metavar="N", help="CPU-expert processes")
    group.add_argument(
        "-b", "--batch-size", "--prompt-block", type=positive, metavar="N", help="rows of a step, at most"
    )
    add_plan_options(group)
    group.add_argument("-ctk", "--cache-type", "--cache-type-k", metavar="TYPE", help="f16 (default), f32 or q8_0")
    group.add_argument("-ctv", "--cache-type-v", metavar="TYPE", help="must be that of --cache-type-k")
    group.add_argument("--executor", choices=("host", "reference"), help=argparse.SUPPRESS)
    group.add_argument("--queue", type=positive, metavar="N", help="requests that may wait before one is refused")
    add_hot_list_option(group)
    add_memory_options(group)
    group.add_argument(
        "--context-shift",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="when a slot is full, forget the middle of the conversation and go on",
    )
    group.add_argument("--slot-save-path", default="", metavar="FOLDER", help="where slots are saved to")


def _add_http_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        default=os.environ.get("LLAMA_ARG_HOST", "127.0.0.1"),
        metavar="ADDRESS",
        help="address to listen on, or several with commas (default 127.0.0.1)",
    )
    group.add_argument("--port", type=int, default=int(os.environ.get("LLAMA_ARG_PORT", "9931")), help="default 9931")
    group.add_argument("--api-prefix", default="", metavar="PATH", help="put before every path")
    group.add_argument("-a", "--alias", default="", metavar="NAMES", help="names of the model, with commas")
    group.add_argument("--tags", default="", metavar="NAMES", help="tags of the model, with commas")
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help="keys that requests must show")
    group.add_argument("--api-key-file", metavar="FILE", help="one key a line")
    group.add_argument("--metrics", action="store_true", help="answer GET /metrics")
    group.add_argument("--slots", action=argparse.BooleanOptionalAction, default=True, help="answer GET /slots")
    group.add_argument("--tools", "--tools-runtime", metavar="NAMES", help=argparse.SUPPRESS)  # only restricts origins
    group.add_argument(
        "--ui-mcp-proxy",
        "--webui-mcp-proxy",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="answer /cors-proxy?url=...: whoever may use this server then reaches every address that this machine "
        "reaches, those of its own network too; allows only local web pages, and is meant for trusted machines "
        "(default off)",
    )
    group.add_argument("--props", action="store_true", help="answer POST /props")
    group.add_argument(
        "--ui", "--webui", action=argparse.BooleanOptionalAction, default=True, help="the chat page at / (default on)"
    )
    group.add_argument("--cors-methods", default="GET, POST, DELETE, OPTIONS", metavar="NAMES", help="said to browsers")
    group.add_argument("--cors-headers", default="*", metavar="NAMES", help="the same")
    group.add_argument(
        "--cors-credentials", action=argparse.BooleanOptionalAction, default=True, help="the same (default on)"
    )
    group.add_argument("--cors-origins", metavar="ORIGIN", help='"*" (default), "localhost" or one origin')
    group.add_argument("-to", "--timeout", type=float, default=600, metavar="S", help="idle seconds of a connection")
    group.add_argument(
        "--sleep-idle-seconds",
        type=float,
        default=-1,
        metavar="S",
        help="unload the model after so many idle seconds; the next request loads it again (default: never)",
    )
    group.add_argument("--json-log", action="store_true", help="one JSON line a request on standard error")
    group.add_argument("-v", "--verbose", action="store_true", help="answers contain __verbose")


def _add_chat_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--jinja", action=argparse.BooleanOptionalAction, default=True, help="tools may be used")
    group.add_argument("--chat-template", default="", metavar="NAME|SOURCE", help="instead of the file's")
    group.add_argument("--chat-template-file", metavar="FILE", help="the same from a file")
    group.add_argument("--chat-template-kwargs", default="", metavar="JSON", help="variables of the template")
    group.add_argument(
        "--reasoning-format",
        default="deepseek",
        choices=("none", "auto", "deepseek", "deepseek-legacy"),
        help="default deepseek",
    )
    group.add_argument(
        "-rea", "--reasoning", default="auto", choices=("on", "off", "auto"), help="whether models think"
    )
    group.add_argument(
        "--reasoning-budget",
        type=budget,
        default=-1,
        metavar="N",
        help="tokens of reasoning, after which its end is forced; 0: none, -1 (default): no limit",
    )
    group.add_argument(
        "--reasoning-budget-message", default="", metavar="TEXT", help="what reasoning that is cut off ends with"
    )
    group.add_argument(
        "--prefill-assistant",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="continue a last message of the assistant (default on)",
    )
    group.add_argument("--embedding", "--embeddings", action="store_true", help="answer /v1/embeddings and /embedding")
    group.add_argument(
        "--pooling",
        default="mean",
        choices=("none", "mean", "cls", "last"),
        help="how embeddings are made (default mean)",
    )


def budget(text: str) -> int:
    number = int(text)
    if number < -1:
        raise argparse.ArgumentTypeError(f"{number} is below -1, which sets no limit")
    return number


def names(text: str) -> tuple[str, ...]:
    return tuple(sorted({name.strip() for name in text.split(",") if name.strip()}))


def settings_of(args: argparse.Namespace) -> ServerSettings:
    """The server that the flags ask for. Raises UsageError."""
    import json

    from bloomery.launcher.http.named_templates import template_text
    from bloomery.launcher.http.settings import ServerSettings

    keys = {key for given in args.api_key for key in given.split(",") if key}
    if args.api_key_file:
        keys |= {line.strip() for line in Path(args.api_key_file).read_text().splitlines() if line.strip()}
    source = template_text(args.chat_template)
    if args.chat_template_file:
        source = Path(args.chat_template_file).read_text(encoding="utf-8")
    try:
        variables = json.loads(args.chat_template_kwargs or "{}")
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs is not JSON: {error}", "give an object") from None
    if not isinstance(variables, dict):
        raise UsageError("--chat-template-kwargs is not a JSON object", "such as '{\"enable_thinking\": false}'")
    if args.slot_save_path and not Path(args.slot_save_path).is_dir():
        raise UsageError(f"--slot-save-path {args.slot_save_path} is not a folder", "make it first")
    return ServerSettings(
        hosts=tuple(host.strip() for host in args.host.split(",") if host.strip()),
        port=args.port,
        aliases=names(args.alias),
        tags=names(args.tags),
        api_keys=frozenset(keys),
        defaults=default_fields(args) | reasoning_defaults(args),
        slots_endpoint=args.slots,
        metrics_endpoint=args.metrics,
        props_endpoint=args.props,
        slot_save_path=args.slot_save_path,
        page=args.ui,
        prefix=args.api_prefix,
        jinja=args.jinja,
        chat_template=source,
        chat_template_kwargs=variables,
        prefill_assistant=args.prefill_assistant,
        reasoning_format=args.reasoning_format,
        reasoning=args.reasoning,
        verbose=args.verbose,
        context_shift=args.context_shift,
        embeddings=args.embedding,
        pooling=args.pooling,
        cors_origins=args.cors_origins or ("localhost" if args.tools or args.ui_mcp_proxy else "*"),
        cors_methods=args.cors_methods,
        cors_headers=args.cors_headers,
        cors_credentials=args.cors_credentials,
        json_log=args.json_log,
        proxy=args.ui_mcp_proxy,
        sleep_seconds=args.sleep_idle_seconds,
    )


def reasoning_defaults(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "reasoning_budget_tokens": args.reasoning_budget,
        "reasoning_budget_message": args.reasoning_budget_message,
    }
    return {name: value for name, value in given.items() if value not in (-1, "")}


def daemon_of(args: argparse.Namespace) -> DaemonConfig:
    """The private daemon that the flags ask for."""
    slots = args.parallel if args.parallel and args.parallel > 0 else DEFAULT_SLOTS
    context = args.ctx
    if context is None:
        total = DEFAULT_CONTEXT * slots if args.ctx_size is None else args.ctx_size
        context = total if args.kv_unified and args.ctx_size is not None else total // slots
    cache = {None: "f16", "f16": "f16", "f32": "f32", "q8_0": "q8_0"}
    if args.cache_type not in cache or (args.cache_type_v or args.cache_type) != args.cache_type:
        raise UsageError(
            f"cache types {args.cache_type} and {args.cache_type_v}: only f16, f32 or q8_0 for both is supported",
            "leave out -ctk and -ctv",
        )
    given: dict[str, Any] = {
        "plan": args.plan,
        "processes": args.threads if args.threads and args.threads > 0 else None,
        "prompt_block": args.batch_size,
        "cache_type": cache[args.cache_type],
        "executor": args.executor,
        "queue_limit": args.queue,
        "card_memory": args.card_memory,
        "step_ahead": args.step_ahead,
        "shared_blocks": args.shared_blocks,
        "deterministic": args.deterministic,
        "hot_list": args.hot_list or os.environ.get(HOT_LIST_VARIABLE) or None,
        "cache_ram": args.cache_ram,
        "host_weights": args.host_weights or os.environ.get(HOST_WEIGHTS_VARIABLE) or None,
        "mlock": args.mlock,
        "engram_cache": args.engram_cache,
        "engram_direct": args.engram_direct,
        "slot_folder": str(Path(args.slot_save_path).resolve()) if args.slot_save_path else None,
        "alias": names(args.alias)[0] if names(args.alias) else None,
        **{field: getattr(args, attribute) for attribute, field, _ in DRAFT_OPTIONS},
        "draft_model": chosen_draft(args),
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return DaemonConfig(model=chosen_model(args), context=context, slots=slots, **chosen)


def serve(args: argparse.Namespace) -> int:
    from bloomery.launcher.http.starting import DaemonSource, NamedSource, PrivateSource
    from bloomery.runtime.private_daemon import PrivateDaemon

    settings = settings_of(args)
    source: DaemonSource
    if args.endpoint is None:
        config = daemon_of(args)
        source = PrivateSource(lambda: PrivateDaemon(config))
    else:
        source = NamedSource(args.endpoint)
    endpoint = source.start()
    try:
        from bloomery.launcher.http.run import run_server

        def say(text: str) -> None:
            write_line(f"{PROGRAM}: {text}")

        return run_server(settings, source, endpoint, timeout=args.timeout, prompt_block=args.batch_size, say=say)
    finally:
        source.stop()


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: serve(args))


if __name__ == "__main__":
    sys.exit(main())
