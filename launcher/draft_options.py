"""Options that choose who guesses tokens ahead, with llama-server's spellings beside our own

Owns their words and what they become in a DaemonConfig. What a draft does is `runtime/drafts`'.
"""

from __future__ import annotations

import argparse

from bloomery.runtime.drafts.draft import MOST_TOKENS
from bloomery.runtime.drafts.start import DEFAULT_MOST, KINDS

# Attribute of the parsed arguments, field of DaemonConfig, how a person writes it.
DRAFT_OPTIONS = (
    ("draft", "draft", "--draft"),
    ("draft_model", "draft_model", "--model-draft"),
    ("draft_hf", "draft_model", "--hf-repo-draft"),
    ("draft_max", "draft_max", "--draft-max"),
    ("draft_min", "draft_min", "--draft-min"),
    ("draft_p_min", "draft_p_min", "--draft-p-min"),
    ("draft_fixed", "draft_fixed", "--draft-fixed"),
    ("draft_length", "draft_length", "--spec-synth-len"),
    ("draft_rates", "draft_rates", "--spec-synth-rates"),
)
# llama-server's names of kinds. Its n-gram drafts differ in how they look for the last tokens, not in what they are.
_LLAMA_KINDS = {
    "none": "none",
    "draft-simple": "model",
    "ngram-simple": "lookup",
    "ngram-map-k": "lookup",
    "ngram-map-k4v": "lookup",
    "ngram-mod": "lookup",
    "ngram-cache": "lookup",
}


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafts: tokens guessed ahead, which one step checks; the text stays the same")
    group.add_argument(
        "--draft",
        choices=KINDS,
        help="lookup guesses what followed the last tokens before; model asks the smaller model --model-draft, dspark "
        "the DSpark module --model-draft of a DeepSeek V4.1 (default none, or model if that is given)",
    )
    group.add_argument("--spec-type", dest="draft", type=llama_kind, metavar="TYPE", help=argparse.SUPPRESS)
    group.add_argument(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        dest="draft_model",
        metavar="FILE",
        help="GGUF file of a smaller model with the same vocabulary, or of the model's DSpark module",
    )
    group.add_argument(
        "-hfd",
        "-hfrd",
        "--hf-repo-draft",
        "--spec-draft-hf",
        dest="draft_hf",
        metavar="USER/MODEL[:QUANT]",
        help="the same from the Hugging Face hub, fetched as --hf is, with its --hf-token and --offline",
    )
    group.add_argument(
        "--draft-max",
        "--draft-n",
        "--draft-n-max",
        "--spec-draft-n-max",
        dest="draft_max",
        type=most_tokens,
        metavar="N",
        help=f"tokens guessed for one step, at most (default {DEFAULT_MOST}, not more than {MOST_TOKENS})",
    )
    group.add_argument(
        "--draft-min",
        "--draft-n-min",
        "--spec-draft-n-min",
        dest="draft_min",
        type=least_tokens,
        metavar="N",
        help="shorter guesses are not checked (default 0)",
    )
    group.add_argument(
        "--draft-p-min",
        "--spec-draft-p-min",
        dest="draft_p_min",
        type=float,
        metavar="P",
        help="a draft model's guess ends at a token that it gives less than this (default 0)",
    )
    group.add_argument(
        "--draft-fixed",
        dest="draft_fixed",
        action="store_const",
        const=True,
        help="ask for a guess in every step and check it, even where that costs more time than it saves",
    )
    group.add_argument(
        "--spec-synth-len",
        dest="draft_length",
        type=float,
        metavar="N",
        help="for measuring: accept guesses at random so that a step brings N tokens; the text is not the model's",
    )
    group.add_argument(
        "--spec-synth-rates", dest="draft_rates", type=rate_list, metavar="P,P,...", help=argparse.SUPPRESS
    )


def llama_kind(text: str) -> str:
    """Our kind for one of llama-server's, or for several with commas: a draft model goes before looking up."""
    kinds = []
    for name in text.split(","):
        if name.strip() not in _LLAMA_KINDS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(_LLAMA_KINDS)}")
        kinds.append(_LLAMA_KINDS[name.strip()])
    return max(kinds, key=KINDS.index)


def most_tokens(text: str) -> int:
    """A number of tokens; more than a step can check is as many as it can."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive; --draft none guesses nothing")
    return min(number, MOST_TOKENS)


def least_tokens(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return min(number, MOST_TOKENS)


def rate_list(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0.8,0.6,0.4") from None
