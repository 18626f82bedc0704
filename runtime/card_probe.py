"""What cards there are and what they have free, asked of a process of its own: the coordinator never touches CUDA.

Owns the question and the words for a machine on which it cannot be answered. The answer is
`bloomery.gpu_worker.probe`'s.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from bloomery.runtime.errors import PlanError

_MODULE = "bloomery.gpu_worker.probe"
_SECONDS = 120.0
_DEVICES = ("dev/nvidiactl", "dev/dxg")


@dataclass(frozen=True)
class CardRoom:
    """A card as placement sees it, in bytes: all its memory, and what a process that comes to it finds free, its
    context included. `read` is how fast it reads its memory, `link` how fast pinned memory of the host comes to it, in
    bytes a second (0: not measured)."""

    number: int
    name: str
    architecture: str
    total: int
    free: int
    read: float = 0.0
    link: float = 0.0

    def limited(self, nbytes: int) -> CardRoom:
        """As a smaller card (0: as it is)."""
        if not nbytes:
            return self
        return replace(self, total=min(self.total, nbytes), free=min(self.free, nbytes))


def may_have_card(root: Path = Path("/")) -> bool:
    """Whether a driver's device file is there: a look that costs nothing."""
    return any((root / device).exists() for device in _DEVICES)


def probe_cards() -> tuple[CardRoom, ...]:
    """The cards that the driver sees. PlanError that says what is missing: PyCUDA, the driver, a card, the compiler."""
    command = [sys.executable, "-P", "-m", _MODULE]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"the NVIDIA driver did not answer within {_SECONDS:.0f} s", "see nvidia-smi, or run with --plan cpu"
        ) from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise PlanError(f"the cards cannot be probed: {words[-1]}", "see nvidia-smi, or run with --plan cpu")
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise PlanError(answer["error"], answer["hint"])
    return tuple(CardRoom(**card) for card in answer["cards"])
