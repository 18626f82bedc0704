"""bloomery-generate: token ids or text in, token ids and text out; greedy unless told otherwise."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np

from bloomery.launcher.command_line import (
    Parser,
    UsageError,
    add_daemon_options,
    add_endpoint_option,
    plain_text,
    program_parser,
    read_text,
    run_program,
    token_list,
)
from bloomery.launcher.progress import ProgressDisplay
from bloomery.launcher.sampling_options import add_sampling_options, sampling_parameters
from bloomery.launcher.session import open_session
from bloomery.runtime.client import Client
from bloomery.runtime.completion import Completion, CompletionBuilder, new_request_id
from bloomery.runtime.requests import Chunk, GenerationRequest, Progress, SamplingParameters

PROGRAM = "bloomery-generate"
GREEDY = SamplingParameters(temperature=0.0)
DEFAULT_TOKENS = 128


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "Continues a prompt given as text or token ids. Greedy by default, so the same prompt gives the same tokens.",
        (
            'bloomery-generate --prompt "func (r *Reader) Read" -n 40',
            "bloomery-generate -m model.gguf --tokens 1,15043,29892 -n 16 --json",
            "bloomery-generate -m model.gguf --file prompt.txt -n 0 --logits prompt.npz",
            'bloomery-generate --prompt "The history of the" --temp 0.8 --seed 7',
        ),
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--tokens", type=token_list, metavar="IDS", help="prompt as ids, such as 1,2,3; no BOS is added"
    )
    prompt.add_argument("-p", "--prompt", type=plain_text, metavar="TEXT", help="prompt as text; BOS as the file says")
    prompt.add_argument("-f", "--file", metavar="FILE", help='prompt from a UTF-8 file ("-": standard input)')
    parser.add_argument("--json", action="store_true", help="print one object: prompt_tokens, tokens, text, reason")
    parser.add_argument(
        "--logits", metavar="OUT.npz", help="store tokens (int32) and logits (float32; row i follows tokens[0..i])"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the end token")
    add_sampling_options(parser, GREEDY)
    add_daemon_options(parser)
    add_endpoint_option(parser)
    return parser


def prompt_tokens(client: Client, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """Ids as given, or the text as the file's tokenizer splits it. Raises UsageError for an empty prompt."""
    if not isinstance(prompt, str):
        return prompt
    tokens = tuple(client.tokenize(prompt))
    if not tokens:
        raise UsageError("the prompt is empty and the model has no BOS token", "give at least one character")
    return tokens


def generate(
    client: Client, prompt: tuple[int, ...], args: argparse.Namespace, write: Callable[[str], object]
) -> Completion:
    """Runs the request; `write` gets the text as it grows."""
    request = GenerationRequest(
        request_id=new_request_id(),
        tokens=prompt,
        max_tokens=DEFAULT_TOKENS if args.max_tokens is None else args.max_tokens,
        sampling=sampling_parameters(args, GREEDY),
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        cache_prompt=args.logits is None,  # a row of logits for every token means that every token is evaluated
        logits="none" if args.logits is None else "all",
    )
    builder = CompletionBuilder()
    with client.generate(request) as events, ProgressDisplay(PROGRAM) as display:
        for event in events:
            builder.add(event)
            if isinstance(event, Chunk):
                write(event.text)
            elif isinstance(event, Progress):
                display("prompt tokens", event.processed, event.total)
    return builder.result()


def store_logits(path: str, prompt: tuple[int, ...], completion: Completion) -> None:
    """tokens (int32): prompt and all generated but the last, which was not evaluated; logits: one row for each."""
    tokens = np.array(prompt + completion.tokens[:-1], dtype=np.int32)
    rows = completion.logits
    assert rows is not None and len(rows) == len(tokens), "one row of logits for each evaluated token"
    with open(path, "wb") as file:
        np.savez(file, tokens=tokens, logits=rows)


def require_writable(path: str) -> None:
    """Raises UsageError before a model is loaded and run for a file that could not be written afterwards."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        reason = "is a directory"
    elif not os.path.isdir(folder):
        reason = f"there is no directory {folder}"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        reason = "is not writable"
    else:
        return
    raise UsageError(f"--logits {path!r}: {reason}", "name a file that can be written")


def run(args: argparse.Namespace) -> int:
    def stream(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    sampling_parameters(args, GREEDY)
    if args.logits is not None:
        require_writable(args.logits)
    given = args.tokens or (args.prompt if args.prompt is not None else read_text(args.file))
    with open_session(PROGRAM, args, slots=1) as client:
        prompt = prompt_tokens(client, given)
        completion = generate(client, prompt, args, (lambda text: None) if args.json else stream)
    if args.logits is not None:
        store_logits(args.logits, prompt, completion)
    if args.json:
        answer = {"prompt_tokens": prompt, "tokens": completion.tokens, "text": completion.text}
        print(json.dumps(answer | {"reason": completion.final.reason}))
    else:
        print()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
