"""Everything a daemon is started with, read once into one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from bloomery.runtime.cache_types import CacheType

STEP_AHEAD: Final = 8
"""Steps on the card that may follow one without a look at its tokens, unless somebody wants otherwise."""


@dataclass(frozen=True)
class DaemonConfig:
    """`context` is the number of positions of one slot (0: what the file was trained for, cut to what memory allows);
    `processes` is the number of CPU-expert processes (0: one for each core of the affinity mask and cgroup quota);
    `prompt_block` the greatest number of rows of a step (0: chosen); an empty endpoint is one in the runtime directory.
    `executor` "reference" runs the NumPy reference inside the coordinator instead of worker processes.
    `host_weights` says whether weights are copied to shared memory or mapped, `mlock` that they are locked there.
    Of n-gram table rows `engram_cache` MiB are kept in memory; with `engram_direct` they are read past the page cache.
    Plans with a card use at most `card_memory` bytes of it (0: what is free). `step_ahead` steps may follow one on the
    card without a look at its tokens, where all running requests choose greedily. With `shared_blocks` short blocks of
    a prompt to which experts come leave some to the host. `deterministic`: on a card prompts take the path of decoding.
    `hot_list` is a file that ranks the experts of each layer for plans that place them ("": none).
    Slots are saved to files in `slot_folder` ("": not at all). Of conversations that lost their slot, states of up to
    `cache_ram` MiB are kept in memory (0: none, -1: whatever the plan leaves free).

    `draft` says who guesses tokens ahead (`drafts.start.KINDS`; "": "model" if there is a `draft_model` file, else
    "none"): at most `draft_max` in a step (0: the default) and none if fewer than `draft_min`; a draft model's guess
    ends at a chance below `draft_p_min`. With `draft_fixed` guesses are checked whether or not that pays. For measuring
    guesses are accepted at `draft_rates`, or so that a step brings `draft_length` tokens (`drafts.synthetic`)."""

    model: str
    plan: str = "auto"
    context: int = 0
    slots: int = 4
    processes: int = 0
    prompt_block: int = 0
    cache_type: CacheType = "f16"
    executor: Literal["host", "reference"] = "host"
    queue_limit: int = 64
    endpoint: str = ""
    control: str = ""
    alias: str = ""
    exit_with_parent: bool = False
    slot_folder: str = ""
    host_weights: Literal["auto", "copy", "mmap"] = "auto"
    mlock: bool = False
    engram_cache: int = 256
    engram_direct: bool = False
    hot_list: str = ""
    cache_ram: int = 8192
    draft: str = ""
    draft_model: str = ""
    draft_max: int = 0
    draft_min: int = 0
    draft_p_min: float = 0.0
    draft_fixed: bool = False
    draft_rates: tuple[float, ...] = ()
    draft_length: float = 0.0
    card_memory: int = 0
    step_ahead: int = STEP_AHEAD
    shared_blocks: bool = False
    deterministic: bool = False
