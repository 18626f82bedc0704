"""Flags of bloomery-serve that set defaults of requests, and flags of llama-server that change nothing here.

Owns both lists, and the forms of values that only flags have. What the defaults mean is `http/fields.py`'s.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from bloomery.launcher.command_line import UsageError

# Flag spellings, request field, type.
_DEFAULTS: tuple[tuple[tuple[str, ...], str, type], ...] = (
    (("-n", "--predict", "--n-predict"), "n_predict", int),
    (("--temp", "--temperature"), "temperature", float),
    (("-s", "--seed"), "seed", int),
    (("--top-k",), "top_k", int),
    (("--top-p",), "top_p", float),
    (("--min-p",), "min_p", float),
    (("--top-n-sigma", "--top-nsigma"), "top_n_sigma", float),
    (("--xtc-probability",), "xtc_probability", float),
    (("--xtc-threshold",), "xtc_threshold", float),
    (("--typical", "--typical-p"), "typical_p", float),
    (("--repeat-last-n",), "repeat_last_n", int),
    (("--repeat-penalty",), "repeat_penalty", float),
    (("--presence-penalty",), "presence_penalty", float),
    (("--frequency-penalty",), "frequency_penalty", float),
    (("--dry-multiplier",), "dry_multiplier", float),
    (("--dry-base",), "dry_base", float),
    (("--dry-allowed-length",), "dry_allowed_length", int),
    (("--dry-penalty-last-n",), "dry_penalty_last_n", int),
    (("--dynatemp-range",), "dynatemp_range", float),
    (("--dynatemp-exp",), "dynatemp_exponent", float),
    (("--mirostat",), "mirostat", int),
    (("--mirostat-lr",), "mirostat_eta", float),
    (("--mirostat-ent",), "mirostat_tau", float),
    (("--adaptive-target",), "adaptive_target", float),
    (("--adaptive-decay",), "adaptive_decay", float),
    (("--keep",), "n_keep", int),
    (("--sse-ping-interval",), "sse_ping_interval", int),
)

# Flags with a value, then those without, whose purpose is llama-server's own machinery or its default here.
_WITH_VALUE = [
    "--cpu-mask",
    "-C",
    "--cpu-mask-batch",
    "-Cb",
    "--cpu-range",
    "-Cr",
    "--cpu-range-batch",
    "-Crb",
    "--cpu-strict",
    "--cpu-strict-batch",
    "--poll-batch",
    "--prio-batch",
    "--n-cpu-moe",
    "-ncmoe",
    "--n-cpu-ffn",
    "-ncffn",
    "--fit-ctx",
    "-fitc",
    "--fit-target",
    "-fitt",
    "-lm",
    "--lazy-mode",
    "-lzm",
    "--swa-checkpoints",
    "--checkpoint-min-step",
    "-cms",
    "--log-colors",
    "--log-prompts-dir",
    "--verbosity",
    "--rpc",
    "--lookup-cache-static",
    "-lcs",
    "--lookup-cache-dynamic",
    "-lcd",
    "--media-path",
    "-ub",
    "--ubatch-size",
    "-fa",
    "--flash-attn",
    "-ngl",
    "--gpu-layers",
    "--n-gpu-layers",
    "-tb",
    "--threads-batch",
    "--threads-http",
    "--grp-attn-n",
    "--grp-attn-w",
    "-ctxcp",
    "--ctx-checkpoints",
    "--cache-reuse",
    "--log-file",
    "--log-verbosity",
    "-lv",
    "--slot-prompt-similarity",
    "-sps",
    "--poll",
    "--prio",
    "--numa",
    "-fit",
    "--fit",
    "--defrag-thold",
    "-dt",
    "--rope-scaling",
    "--device",
    "-dev",
    "--split-mode",
    "-sm",
    "--main-gpu",
    "-mg",
    "--tensor-split",
    "-ts",
    "--override-tensor",
    "-ot",
    "--models-max",
    "-td",
    "--threads-draft",
    "--spec-draft-threads",
    "-tbd",
    "--threads-batch-draft",
    "--spec-draft-threads-batch",
    "-devd",
    "--device-draft",
    "--spec-draft-device",
    "-ngld",
    "--gpu-layers-draft",
    "--n-gpu-layers-draft",
    "--spec-draft-ngl",
    "-ctkd",
    "--cache-type-k-draft",
    "--spec-draft-type-k",
    "-ctvd",
    "--cache-type-v-draft",
    "--spec-draft-type-v",
    "--draft-p-split",
    "--spec-draft-p-split",
    "--load-mode",
]
_WITHOUT_VALUE = [
    "--cpu-moe",
    "-cmoe",
    "--repack",
    "--no-repack",
    "-nr",
    "--op-offload",
    "--no-op-offload",
    "--kv-offload",
    "-kvo",
    "--no-kv-offload",
    "-nkvo",
    "--no-log-prefix",
    "--no-log-timestamps",
    "--log-verbose",
    "--log-jsonl",
    "--no-log-jsonl",
    "--mmproj-auto",
    "--no-mmproj-auto",
    "--mmproj-offload",
    "--no-mmproj-offload",
    "--models-autoload",
    "--no-agent",
    "-no-ag",
    "--reuse-port",
    "--escape",
    "--no-skip-chat-parsing",
    "-cb",
    "--cont-batching",
    "-nocb",
    "--no-cont-batching",
    "--mmap",
    "--no-mmap",
    "--swa-full",
    "--no-warmup",
    "--warmup",
    "--log-disable",
    "--log-timestamps",
    "--log-prefix",
    "--no-perf",
    "--perf",
    "--no-cache-idle-slots",
    "--cache-idle-slots",
    "--backend_sampling",
    "--backend-sampling",
    "-bs",
    "--no-mmproj",
    "--no-models-autoload",
    "--no-host",
    "--check-tensors",
    "--direct-io",
]


def add_default_flags(group: argparse._ArgumentGroup) -> None:
    for spellings, field, kind in _DEFAULTS:
        group.add_argument(*spellings, dest=f"default_{field}", type=kind, metavar="X", help=f"default of {field}")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
    group.add_argument(
        "--cache-prompt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on from what is in the caches (default on); answers are the same without, only later",
    )
    group.add_argument("--samplers", metavar="NAMES", help="samplers in their order, with semicolons")
    group.add_argument(
        "-l",
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID+BIAS",
        help="add to a token's logit, such as 15043+1 or 15043-1.5; repeatable; a request's logit_bias replaces them",
    )
    group.add_argument("--grammar", default="", metavar="GBNF", help="form of answers whose request asks for none")
    group.add_argument("--grammar-file", metavar="FILE", help="the same from a file")
    group.add_argument("-j", "--json-schema", metavar="JSON", help="the same as a JSON schema")
    group.add_argument("-jf", "--json-schema-file", metavar="FILE", help="the same from a file")
    group.add_argument("-r", "--reverse-prompt", action="append", default=[], metavar="TEXT", help="stop at this text")


def default_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Request fields that the command line sets."""
    fields = {field: getattr(args, f"default_{field}") for _, field, _ in _DEFAULTS}
    chosen = {field: value for field, value in fields.items() if value is not None}
    if chosen.get("seed", 0) < 0:
        del chosen["seed"]
    if not args.cache_prompt:
        chosen["cache_prompt"] = False
    if args.ignore_eos:
        chosen["ignore_eos"] = True
    if args.reverse_prompt:
        chosen["stop"] = tuple(args.reverse_prompt)
    chosen |= _forms(args)
    if args.logit_bias:
        chosen["logit_bias"] = [_bias(text) for text in args.logit_bias]
    if args.samplers:
        from bloomery.launcher.http.fields import read_samplers

        chosen["samplers"] = read_samplers(args.samplers)
    return chosen


def _forms(args: argparse.Namespace) -> dict[str, Any]:
    """The form of answers, from whichever flag says it. Raises UsageError for two of them and for what is no schema."""
    flags = ("--grammar", "--grammar-file", "--json-schema", "--json-schema-file")
    given = [flag for flag in flags if getattr(args, flag[2:].replace("-", "_"))]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", "give one of them")
    if not given:
        return {}
    flag, value = given[0], getattr(args, given[0][2:].replace("-", "_"))
    text = Path(value).read_text(encoding="utf-8") if flag.endswith("-file") else value
    if flag.startswith("--grammar"):
        return {"grammar": text}
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{flag} is not JSON: {error}", 'give a JSON schema, such as \'{"type": "object"}\'') from None
    if not isinstance(schema, dict):
        raise UsageError(f"{flag} is not a JSON object", 'give a JSON schema, such as \'{"type": "object"}\'')
    return {"json_schema": schema}


def _bias(text: str) -> list[int | float]:
    """A token and what is added to its logit, of ID+BIAS or ID-BIAS. Raises UsageError."""
    if found := re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+))", text):
        return [int(found[1]), float(found[2])]
    raise UsageError(f"--logit-bias {text} is not a token id, + or -, and a number", "such as 15043+1 or 15043-1.5")


def add_accepted_flags(group: argparse._ArgumentGroup) -> None:
    for flag in _WITH_VALUE:
        group.add_argument(flag, dest="accepted_value", help=argparse.SUPPRESS)
    for flag in _WITHOUT_VALUE:
        group.add_argument(flag, dest="accepted", action="store_true", help=argparse.SUPPRESS)
