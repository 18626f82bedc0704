"""bloomery-tokenize: text to the token ids of a model file, as llama-tokenize.

Owns its options and forms of output. Needs no daemon: only the file's vocabulary is read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bloomery.launcher.command_line import (
    Parser,
    UsageError,
    add_model_options,
    program_parser,
    run_program,
    write_line,
)
from bloomery.launcher.demo_model import chosen_model
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer import Tokenizer

PROGRAM = "bloomery-tokenize"


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "Token ids of the text on standard input (bytes as they are, a line end at the end included). Without --json "
        "one token a line: its id and the text that it stands for.",
        (
            "printf 'Hello, world' | bloomery-tokenize",
            "bloomery-tokenize -m model.gguf --json < prompt.txt",
            "printf '<|im_start|>user' | bloomery-tokenize -m model.gguf --parse-special --no-bos",
            """printf '"one text"\\n"another"\\n' | bloomery-tokenize -m model.gguf --json-lines""",
        ),
    )
    add_model_options(parser)
    parser.add_argument(
        "--parse-special",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="find control tokens such as <|im_end|> in the text",
    )
    parser.add_argument("--no-bos", action="store_true", help="add no BOS, whatever the file says")
    parser.add_argument("--json", action="store_true", help="print one array of ids")
    parser.add_argument(
        "--json-lines", action="store_true", help="read a JSON string a line, answer each with a line: an array of ids"
    )
    return parser


def open_tokenizer(args: argparse.Namespace) -> Tokenizer:
    with ModelFile.open(chosen_model(args)) as model:
        return Tokenizer.from_model_file(model)


def json_lines(expected: str, accepted: Callable[[Any], bool]) -> Iterator[Any]:
    """The values on standard input, one a line; empty lines are passed over. `expected` says what is `accepted`."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"line {number} is no JSON: {error}", f"write {expected} on every line") from None
        if not accepted(value):
            raise UsageError(
                f"line {number} is {json.dumps(value)[:60]}, expected {expected}", f"write {expected} on every line"
            )
        yield value


def encode(tokenizer: Tokenizer, text: str, args: argparse.Namespace) -> list[int]:
    """As llama-tokenize: without BOS there is no EOS either."""
    add_special = tokenizer.add_bos and not args.no_bos
    return tokenizer.encode(text, add_special=add_special, parse_special=args.parse_special)


def run(args: argparse.Namespace) -> int:
    tokenizer = open_tokenizer(args)
    if args.json_lines:
        for text in json_lines("a JSON string", lambda value: isinstance(value, str)):
            write_line(json.dumps(encode(tokenizer, text, args)))
        return 0
    tokens = encode(tokenizer, sys.stdin.buffer.read().decode("utf-8", "surrogateescape"), args)
    if args.json:
        print(json.dumps(tokens))
    else:
        for token in tokens:
            print(f"{token:6} -> {tokenizer.piece(token).decode('utf-8', 'backslashreplace')!r}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
