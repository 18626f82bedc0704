"""Command-line options that choose the next token, turned into SamplingParameters. Defaults are the caller's."""

from __future__ import annotations

import argparse
from dataclasses import fields

from bloomery.launcher.command_line import UsageError, plain_text, token_limit
from bloomery.runtime.errors import RequestError
from bloomery.runtime.messages import SAMPLING_SCHEMA, sampling_body
from bloomery.runtime.requests import SamplingParameters

OPTION_SPELLINGS = {"temperature": "--temp"}


def bias_pair(text: str) -> tuple[int, float]:
    """ "15043+1.5", "15043-1" or "15043=-inf": token id and what is added to its logit."""
    for mark in "=+-":
        token, found, value = text.partition(mark)
        if found and token.strip().isdigit():
            try:
                return int(token), float(value) if mark == "=" else float(mark + value)
            except ValueError:
                break
    raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number such as 15043+1.5 or 15043=-inf")


def stop_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty text ends nothing")
    return plain_text(text)


def add_sampling_options(parser: argparse.ArgumentParser, defaults: SamplingParameters) -> None:
    group = parser.add_argument_group("sampling")
    temperature = f"0 always takes the most probable token (default {defaults.temperature:g})"
    group.add_argument("--temp", "--temperature", dest="temperature", type=float, metavar="T", help=temperature)
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same text (default: a fresh one each time)")
    group.add_argument("--top-k", type=int, metavar="K", help=f"0 switches it off (default {defaults.top_k})")
    group.add_argument("--top-p", type=float, metavar="P", help=f"1 switches it off (default {defaults.top_p:g})")
    group.add_argument("--min-p", type=float, metavar="P", help=f"0 switches it off (default {defaults.min_p:g})")
    group.add_argument("--repeat-penalty", type=float, metavar="X", help="1 switches it off (the default)")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="0 switches it off (the default)")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="0 switches it off (the default)")
    group.add_argument(
        "--repeat-last-n",
        type=int,
        metavar="N",
        help=f"tokens that penalties look at (default {defaults.repeat_last_n})",
    )
    group.add_argument(
        "--logit-bias", type=bias_pair, action="append", metavar="ID(+|-|=)X", help="such as 15043+1; may be repeated"
    )
    group.add_argument(
        "--stop",
        type=stop_text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    group.add_argument(
        "-n", "--max-tokens", type=token_limit, metavar="N", help="tokens to generate at most; -1: up to the end token"
    )


def sampling_parameters(args: argparse.Namespace, defaults: SamplingParameters) -> SamplingParameters:
    """What the person said, `defaults` for the rest."""
    values = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    given = {name: getattr(args, name, None) for name in values}
    values.update((name, value) for name, value in given.items() if value is not None)
    values["logit_bias"] = tuple(values["logit_bias"])
    parameters = SamplingParameters(**values)
    require_in_range(parameters)
    return parameters


def require_in_range(parameters: SamplingParameters) -> None:
    """Raises UsageError for a value that the daemon would refuse: before a model is loaded for nothing."""
    try:
        SAMPLING_SCHEMA.read(sampling_body(parameters))
    except RequestError as error:
        field = str(error.details.get("field", "")).partition("[")[0]
        spelling = OPTION_SPELLINGS.get(field, "--" + field.replace("_", "-"))
        raise UsageError(error.message.replace(f"field {field}", spelling), f"correct {spelling}") from None
