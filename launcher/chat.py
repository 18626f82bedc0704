"""bloomery-chat: a conversation in the terminal, or one answer for each line of standard input.

Owns lines, commands and what is printed. The conversation itself is `launcher/conversation.py`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bloomery.launcher.command_line import (
    Parser,
    UsageError,
    add_daemon_options,
    add_endpoint_option,
    plain_text,
    program_parser,
    run_program,
    write_line,
)
from bloomery.launcher.conversation import AnswerSettings, Conversation
from bloomery.launcher.demo_model import TINY_NOTICE, tiny_is_chosen
from bloomery.launcher.sampling_options import add_sampling_options, sampling_parameters
from bloomery.launcher.session import open_session
from bloomery.runtime.errors import RequestError
from bloomery.runtime.requests import Final, SamplingParameters

PROGRAM = "bloomery-chat"
DEFAULTS = SamplingParameters()
# The tiny models have learnt no end of an answer, and wander off at the usual temperature.
TINY_TOKENS = 96
TINY_DEFAULTS = SamplingParameters(temperature=0.5, repeat_penalty=1.1)
HISTORY_LINES = 1000
COMMANDS = """\
/reset         forget the conversation
/regen         answer the last question again
/system TEXT   set the system message (no TEXT: remove it) and forget the conversation
/help          this list
/quit          end (as does Ctrl-D); Ctrl-C ends only the running answer"""


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "A conversation with a model; without options with the demo model that comes with the package. "
        "When standard input is not a terminal, each of its lines is a turn and only answers are printed.",
        (
            "bloomery-chat -m model.gguf",
            "bloomery-chat --demo smollm2",
            'bloomery-chat --prompt "How do I open a file in Python?"',
            "printf 'Hello!\\nAnd in French?\\n' | bloomery-chat -m model.gguf --temp 0",
            "bloomery-chat --endpoint ipc:///run/user/1000/bloomery/daemon.sock",
        ),
    )
    parser.add_argument(
        "-p", "--prompt", type=plain_text, metavar="TEXT", help="one question; print the answer and end"
    )
    parser.add_argument("-s", "--system", type=plain_text, default="", metavar="TEXT", help="system message")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="no chat template: the model continues your text (so do the tiny demo models)",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="after each answer, its tokens and tokens a second"
    )
    add_sampling_options(parser, DEFAULTS)
    add_daemon_options(parser)
    add_endpoint_option(parser)
    return parser


def write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def report(final: Final) -> str:
    """One row for a finished answer: what was processed, how fast, and why it ended."""
    rate = final.generated_tokens / final.generate_seconds if final.generate_seconds > 0 else 0.0
    return (
        f"[prompt {final.prompt_tokens} tokens, {final.cached_tokens} cached, {final.prompt_seconds:.2f} s; "
        f"answer {final.generated_tokens} tokens, {rate:.1f} tokens/s; {final.reason}]"
    )


class Chat:
    """Turns lines into answers and commands into actions."""

    def __init__(self, conversation: Conversation, verbose: bool) -> None:
        self._conversation = conversation
        self._verbose = verbose

    def take(self, line: str) -> bool:
        """Handles one line; False when the person wants to leave. Raises RequestError for a question that fails."""
        text = line.strip()
        if not text:
            return True
        command, _, rest = text.partition(" ")
        if not command.startswith("/"):
            self.answer(text)
        elif command in ("/quit", "/exit"):
            return False
        elif command == "/reset":
            self._conversation.reset()
        elif command == "/regen":
            final = self._conversation.again(write_text)
            if final is None:
                write_line("nothing was asked yet", sys.stderr)
            else:
                self._finish(final)
        elif command == "/system":
            self._conversation.system = rest.strip()
            self._conversation.reset()
        else:
            if command != "/help":
                write_line(f"{command} is not a command", sys.stderr)
            write_line(COMMANDS, sys.stderr)
        return True

    def answer(self, text: str) -> None:
        self._finish(self._conversation.ask(text, write_text))

    def _finish(self, final: Final) -> None:
        write_line("")
        if self._verbose:
            write_line(report(final), sys.stderr)


def piped_lines() -> Iterator[str]:
    """Lines of standard input. Raises UsageError for one that is not UTF-8."""
    if not isinstance(sys.stdin, io.TextIOWrapper):
        yield from sys.stdin
        return
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            found = f"byte {error.start} is {line[error.start]:#04x}"
            raise UsageError(f"line {number} of standard input is not UTF-8: {found}", "convert it first") from None


def typed_lines() -> Iterator[str]:
    """Lines typed at a prompt, with editing and a history that is kept. Ctrl-C clears the line, Ctrl-D ends."""
    history = history_file()
    try:
        import readline

        readline.set_history_length(HISTORY_LINES)
        if history.exists():
            readline.read_history_file(history)
    except (ImportError, OSError):
        readline = None  # type: ignore[assignment]
    try:
        while True:
            try:
                yield input("> ")
            except KeyboardInterrupt:
                write_line("")
            except EOFError:
                write_line("")
                return
    finally:
        if readline is not None:
            try:
                history.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(history)
            except OSError as error:
                write_line(f"{PROGRAM}: the history was not kept: {error}", sys.stderr)


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "bloomery" / "chat_history"


def converse(chat: Chat) -> int:
    """At a terminal: an error is shown and the conversation goes on."""
    for line in typed_lines():
        try:
            if not chat.take(line):
                break
        except RequestError as error:
            hint = "/reset forgets the conversation" if error.code == "exceed_context_size" else error.hint
            write_line(f"{PROGRAM}: {error.message}" + (f" -> {hint}" if hint else ""), sys.stderr)
    return 0


def run(args: argparse.Namespace) -> int:
    tiny = args.endpoint is None and tiny_is_chosen(args)
    if tiny:
        write_line(f"{PROGRAM}: {TINY_NOTICE}", sys.stderr)
    max_tokens = args.max_tokens if args.max_tokens is not None else TINY_TOKENS if tiny else -1
    sampling = sampling_parameters(args, TINY_DEFAULTS if tiny else DEFAULTS)
    settings = AnswerSettings(sampling, max_tokens, tuple(args.stop), plain=args.plain or tiny)
    with open_session(PROGRAM, args, slots=1) as client:
        if not (settings.plain or client.facts.chat_template):
            raise UsageError(f"{client.facts.name} has no chat template", "--plain lets it continue your text")
        chat = Chat(Conversation(client, settings, PROGRAM, args.system), args.verbose)
        if args.prompt is not None:
            if not args.prompt.strip():
                raise UsageError("--prompt is empty", "give a question")
            chat.answer(args.prompt)
            return 0
        if not sys.stdin.isatty():
            for line in piped_lines():
                if not chat.take(line):
                    break
            return 0
        model = client.facts
        write_line(f"{model.name} ({model.architecture}), context {model.context}; /help lists the commands")
        return converse(chat)


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
