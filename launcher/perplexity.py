"""bloomery-perplexity: how well a model predicts a text, and how far its predictions are from stored ones.

Owns llama-perplexity's rule of which tokens are scored. The model is only reached through the protocol.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.launcher.command_line import (
    Parser,
    UsageError,
    add_daemon_options,
    add_endpoint_option,
    positive,
    program_parser,
    read_text,
    run_program,
)
from bloomery.launcher.progress import ProgressDisplay
from bloomery.launcher.session import open_session
from bloomery.runtime.client import Client
from bloomery.runtime.completion import CompletionBuilder, new_request_id
from bloomery.runtime.divergence import kl_divergence, same_top
from bloomery.runtime.requests import Chunk, GenerationRequest, SamplingParameters

PROGRAM = "bloomery-perplexity"
DEFAULT_CONTEXT = 512


def build_parser() -> Parser:
    parser = program_parser(
        PROGRAM,
        "Perplexity over a text file by llama-perplexity's rule: consecutive chunks of --ctx tokens, the second half "
        "of each scored. With --kl-base the divergence from logits that bloomery-generate --logits stored.",
        (
            "bloomery-perplexity -f wiki.test.raw",
            "bloomery-perplexity -m model.gguf -f prose.txt --ctx 512 --chunks 20 --json",
            "bloomery-perplexity -m model-Q3_K_M.gguf --kl-base model-F16.npz",
        ),
    )
    parser.add_argument("-f", "--file", metavar="TEXT", help='UTF-8 text ("-": standard input)')
    parser.add_argument("--chunks", type=positive, metavar="N", help="score only the first N chunks")
    parser.add_argument("--no-bos", action="store_true", help="add no BOS anywhere, whatever the file says")
    parser.add_argument("--kl-base", metavar="NPZ", help="tokens and logits to compare with (the --logits form)")
    parser.add_argument("--json", action="store_true", help="print one object: ppl, nll, tokens; kld_mean, ...")
    add_daemon_options(parser)
    add_endpoint_option(parser)
    return parser


def chunks_of(tokens: Sequence[int], context: int, limit: int | None, bos: int | None) -> list[tuple[int, ...]]:
    """Whole consecutive chunks; `bos`, where there is one, takes the place of the first token of each."""
    number = len(tokens) // context
    if number == 0:
        raise UsageError(
            f"the text has {len(tokens)} tokens, fewer than one chunk of {context}",
            "give a longer text or a smaller --ctx",
        )
    chunks = []
    for start in range(0, min(number, limit or number) * context, context):
        chunk = tuple(tokens[start : start + context])
        chunks.append(chunk if bos is None else (bos, *chunk[1:]))
    return chunks


def evaluation(tokens: tuple[int, ...], **wanted: Any) -> GenerationRequest:
    """Process `tokens` from an empty cache and generate nothing; `wanted` are fields of GenerationRequest."""
    greedy = SamplingParameters(temperature=0.0)
    return GenerationRequest(
        new_request_id(), tokens=tokens, max_tokens=0, sampling=greedy, cache_prompt=False, **wanted
    )


def scored_logprobs(client: Client, chunk: tuple[int, ...]) -> NDArray[np.float64]:
    """Natural-log probabilities of the tokens that follow positions context/2 .. context-2."""
    found = client.complete(evaluation(chunk, score_prompt=True)).prompt_logprobs
    assert len(found) == len(chunk) - 1, f"{len(found)} log-probabilities for {len(chunk)} tokens"
    return np.array(found[len(chunk) // 2 :], dtype=np.float64)


def perplexity(client: Client, text: str, args: argparse.Namespace, context: int) -> dict[str, float]:
    """ppl, its standard error, nll (mean nats a scored token), numbers of scored tokens and of chunks."""
    bos = None if args.no_bos or not client.facts.add_bos else client.facts.bos
    tokens = client.tokenize(text, add_special=bos is not None, parse_special=False)
    chunks = chunks_of(tokens, context, args.chunks, bos)
    scores = []
    with ProgressDisplay(PROGRAM) as display:
        display("chunks", 0, len(chunks))
        for number, chunk in enumerate(chunks, start=1):
            scores.append(-scored_logprobs(client, chunk))
            display("chunks", number, len(chunks))
    losses = np.concatenate(scores)
    nll = float(losses.mean())
    spread = float(losses.std(ddof=1)) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
    ppl = math.exp(nll)
    return {"ppl": ppl, "ppl_error": ppl * spread, "nll": nll, "tokens": len(losses), "chunks": len(chunks)}


@dataclass(frozen=True)
class Base:
    """What to compare with: tokens (int32, n) and logits (float32, n x V), row i after tokens[0..i]."""

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]

    @classmethod
    def load(cls, path: str) -> Base:
        """Reads the form that bloomery-generate --logits writes. Raises UsageError for anything else."""
        hint = "make it with bloomery-generate --logits"
        try:
            with np.load(path, allow_pickle=False) as stored:
                tokens, logits = stored["tokens"], stored["logits"]
        except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise UsageError(f"{path} does not hold tokens and logits: {error}", hint) from None
        if tokens.ndim != 1 or logits.ndim != 2 or len(tokens) != len(logits) or not len(tokens):
            raise UsageError(f"{path}: tokens {tokens.shape} and logits {logits.shape} do not belong together", hint)
        return cls(tokens.astype(np.int32), logits.astype(np.float32))


def divergence(client: Client, base: Base) -> dict[str, float]:
    """KL(base || this model) in nats over all rows (mean, median, greatest), and the share with the same top token."""
    if base.logits.shape[1] != client.facts.vocabulary:
        raise UsageError(
            f"the stored logits are {base.logits.shape[1]} wide, the model's vocabulary has {client.facts.vocabulary}",
            "compare models with the same vocabulary",
        )
    divergences: list[NDArray[np.float64]] = []
    tops: list[NDArray[np.bool_]] = []
    done, total = 0, len(base.tokens)
    request = evaluation(tuple(base.tokens.tolist()), logits="all")
    builder = CompletionBuilder()
    with ProgressDisplay(PROGRAM) as display, client.generate(request) as events:
        for event in events:
            if (
                isinstance(event, Chunk) and event.logits is not None
            ):  # compared at once: all rows may not fit in memory
                rows = base.logits[done : done + len(event.logits)]
                divergences.append(kl_divergence(rows, event.logits))
                tops.append(same_top(rows, event.logits))
                done += len(event.logits)
                display("tokens", done, total)
            else:
                builder.add(event)
    builder.result()
    assert done == total, f"{done} rows of logits for {total} tokens"
    kld = np.concatenate(divergences)
    return {
        "kld_mean": float(kld.mean()),
        "kld_median": float(np.median(kld)),
        "kld_max": float(kld.max()),
        "same_top": float(np.concatenate(tops).mean()),
        "positions": total,
    }


def table(result: dict[str, float]) -> str:
    """What a person reads."""
    lines = []
    if "ppl" in result:
        lines.append(
            f"perplexity {result['ppl']:.4f} +/- {result['ppl_error']:.4f}  "
            f"({result['nll']:.5f} nats a token, {result['tokens']} tokens scored in {result['chunks']} chunks)"
        )
    if "kld_mean" in result:
        lines.append(
            f"KL divergence mean {result['kld_mean']:.3e}, median {result['kld_median']:.3e}, greatest "
            f"{result['kld_max']:.3e}; same top token {result['same_top']:.2%}  ({result['positions']} positions)"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    if args.file is None and args.kl_base is None:
        raise UsageError("nothing to measure", "give a text with -f or stored logits with --kl-base")
    chunk = args.ctx or DEFAULT_CONTEXT
    if chunk < 4:
        raise UsageError(f"--ctx {chunk} leaves no token to score", "use at least 4")
    args.ctx = None  # here it is the size of a chunk, which a running daemon can be asked for too
    text = read_text(args.file) if args.file is not None else None
    base = Base.load(args.kl_base) if args.kl_base is not None else None
    context = max(chunk if text is not None else 0, len(base.tokens) if base is not None else 0)
    result: dict[str, float] = {}
    with open_session(PROGRAM, args, slots=1, context=context) as client:
        if text is not None:
            result |= perplexity(client, text, args, chunk)
        if base is not None:
            result |= divergence(client, base)
    print(json.dumps(result) if args.json else table(result))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_program(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
