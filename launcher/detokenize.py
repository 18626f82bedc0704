"""bloomery-detokenize: token ids back to text, the reverse of bloomery-tokenize.

Owns its options and forms. Needs no daemon: only the file's vocabulary is read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from bloomery.launcher.command_line import (
    Parser,
    UsageError,
    add_model_options,
    program_parser,
    run_program,
    token_list,
    write_line,
)
from bloomery.launcher.tokenize import json_lines, open_tokenizer
from bloomery.runtime.tokenizer import Tokenizer

PROGRAM = "bloomery-detokenize"
IDS = "a JSON array of token ids"


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "Text of the token ids on standard input: numbers with blanks or commas between, or a JSON array. Without "
        "--json its bytes are written exactly. A BOS that the file adds to texts (first id) and its EOS (last id) are "
        "left out, so the text that was tokenised comes back.",
        (
            "echo 9707 11 1879 | bloomery-detokenize -m model.gguf",
            "bloomery-tokenize -m model.gguf --json < a.txt | bloomery-detokenize -m model.gguf | cmp - a.txt",
            "bloomery-detokenize -m model.gguf --json-lines < ids.jsonl",
        ),
    )
    add_model_options(parser)
    parser.add_argument("--no-bos", action="store_true", help="the ids were made with --no-bos: leave out nothing")
    parser.add_argument("--hide-special", action="store_true", help="leave out every control token")
    parser.add_argument("--json", action="store_true", help="print the text as one JSON string")
    parser.add_argument(
        "--json-lines", action="store_true", help=f"read {IDS} a line, answer each with a line: a JSON string"
    )
    return parser


def decode(tokenizer: Tokenizer, tokens: Sequence[int], args: argparse.Namespace) -> bytes:
    if tokenizer.add_bos and not args.no_bos:
        if tokens and tokens[0] == tokenizer.bos:
            tokens = tokens[1:]
        if tokens and tokenizer.add_eos and tokens[-1] == tokenizer.eos:
            tokens = tokens[:-1]
    return tokenizer.decode_bytes(tokens, special=not args.hide_special)


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def read_ids(text: str) -> Sequence[int]:
    if text.lstrip().startswith("["):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UsageError(f"standard input is no JSON: {error}", f"write {IDS}") from None
        if not are_ids(value):
            raise UsageError(f"standard input is {text.strip()[:60]}, expected {IDS}", f"write {IDS}")
        return list(value)
    try:
        return token_list(text) if text.strip() else ()
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"standard input: {error}", f"write numbers with blanks or commas between, or {IDS}") from None


def run(args: argparse.Namespace) -> int:
    tokenizer = open_tokenizer(args)
    if args.json_lines:
        for tokens in json_lines(IDS, are_ids):
            write_line(json.dumps(decode(tokenizer, tokens, args).decode("utf-8", "replace")))
        return 0
    tokens = read_ids(sys.stdin.buffer.read().decode("utf-8", "replace"))
    data = decode(tokenizer, tokens, args)
    if args.json:
        print(json.dumps(data.decode("utf-8", "replace")))
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
