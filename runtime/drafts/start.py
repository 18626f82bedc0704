"""From the daemon's settings to a draft: which kind, its model and its executor

Owns the kinds' names and their defaults. Heavy modules are imported when a kind needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from bloomery.runtime.drafts.draft import MOST_TOKENS, Draft
from bloomery.runtime.drafts.drafting import DraftLimits
from bloomery.runtime.drafts.synthetic import check_rates, rates_of_length
from bloomery.runtime.errors import PlanError

if TYPE_CHECKING:
    from bloomery.runtime.daemon_config import DaemonConfig
    from bloomery.runtime.executor import StepExecutor
    from bloomery.runtime.model_file import ModelFile
    from bloomery.runtime.placement import Plan
    from bloomery.runtime.program import Program

KINDS = ("none", "lookup", "model", "dspark")
OF_FILES = ("model", "dspark")
"""Kinds that want a draft model file."""

DEFAULT_MOST = 7
"""With the row before them eight, the rows of a decode group."""

StartExecutor = Callable[["DaemonConfig", "Program", "Plan"], "StepExecutor"]


def draft_kind(config: DaemonConfig) -> str:
    """The kind that is asked for. Raises PlanError for what cannot be meant."""
    kind = config.draft or ("model" if config.draft_model else "none")
    if kind not in KINDS:
        raise PlanError(f"there is no draft {kind!r}", f"drafts are {', '.join(KINDS)}")
    if (kind in OF_FILES) != bool(config.draft_model):
        raise PlanError(
            f"draft {kind} with{'' if config.draft_model else 'out'} a draft model file",
            f"--model-draft FILE goes with --draft {' and '.join(OF_FILES)}, and with no other",
        )
    if not 0 <= config.draft_max <= MOST_TOKENS or not 0 <= config.draft_min <= MOST_TOKENS:
        raise PlanError(
            f"drafts of {config.draft_min} to {config.draft_max} tokens", f"--draft-max takes 1 to {MOST_TOKENS}"
        )
    if not 0 <= config.draft_p_min <= 1:
        raise PlanError(f"a least chance of {config.draft_p_min:g}", "--draft-p-min takes 0 to 1")
    return kind


def draft_limits(config: DaemonConfig) -> DraftLimits:
    most = config.draft_max or DEFAULT_MOST
    rates = tuple(config.draft_rates) or (rates_of_length(config.draft_length, most) if config.draft_length else ())
    check_rates(rates)
    return DraftLimits(most, min(config.draft_min, most), config.draft_fixed or bool(rates), rates)


def start_draft(
    config: DaemonConfig, model: ModelFile, plan: Plan, start_executor: StartExecutor, stack: ExitStack
) -> tuple[Draft | None, int]:
    """The draft that `config` asks for, and the bytes that it takes; `plan` is the model's, whose executor has not
    started yet. What has to be closed goes on the stack. Raises ModelFileError or PlanError for a draft model that does
    not fit."""
    kind = draft_kind(config)
    if kind == "none":
        return None, 0
    if kind == "lookup":
        from bloomery.runtime.drafts.lookup import LookupDraft

        draft: Draft = LookupDraft()
        nbytes = 0
    else:
        draft, nbytes = _draft_of_file(kind, config, model, plan, start_executor, stack)
    stack.callback(draft.close)
    return draft, nbytes


def draft_taps(config: DaemonConfig, model: ModelFile) -> tuple[int, ...]:
    """The layers of the model that the draft reads (`architectures.build_program`). Raises as `start_draft`."""
    if draft_kind(config) != "dspark":
        return ()
    from bloomery.runtime.architectures.dflash import draft_facts
    from bloomery.runtime.model_file import ModelFile

    with ModelFile.open(config.draft_model) as file:
        return draft_facts(file, model).target_layers


def _draft_of_file(
    kind: str, config: DaemonConfig, model: ModelFile, plan: Plan, start_executor: StartExecutor, stack: ExitStack
) -> tuple[Draft, int]:
    from bloomery.runtime.architectures import build_draft, build_program
    from bloomery.runtime.drafts.block import BlockDraft
    from bloomery.runtime.drafts.model import ModelDraft
    from bloomery.runtime.drafts.vocabulary_check import shared_vocabulary
    from bloomery.runtime.model_file import ModelFile
    from bloomery.runtime.placement import MemoryRoom, make_plan, memory_room

    file = stack.enter_context(ModelFile.open(config.draft_model))
    if kind == "dspark":
        program, vocabulary = build_draft(file, model), 0
    else:
        program, vocabulary = build_program(file), shared_vocabulary(model, file)
    own = replace(config, model=config.draft_model, context=plan.context, slots=plan.slots, cache_ram=0, plan="cpu")
    room = (
        memory_room()
    )  # of which the model's own executor will take what its plan says, but for what only may be kept
    taken = plan.total("mapped", "shared", "private") - plan.term("snapshots")
    left = MemoryRoom(room.memory - taken, room.shared - plan.total("shared"))
    try:
        draft_plan = make_plan(own, program, left)
    except PlanError as error:
        raise PlanError(f"draft model {config.draft_model}: {error.message}", error.hint) from None
    executor = start_executor(own, program, draft_plan)
    if kind == "dspark":
        return BlockDraft(executor, program, config.draft_p_min), draft_plan.total()
    return ModelDraft(executor, vocabulary, config.draft_p_min), draft_plan.total()
