"""The workload of a CPU-expert worker beside a card that answers every hand-off at once and computes nothing: what is
left is what hand-offs themselves cost. Results are wrong."""

from __future__ import annotations

from unskipping_experts import UnskippingExperts

from bloomery.cpu_experts.stage import LoweringContext, Stage
from bloomery.runtime.worker_messages import WorkerStart


class IdleExperts(UnskippingExperts):
    def stages(self, context: LoweringContext) -> list[Stage]:
        """Waits leave nothing out, since nothing is there between them and their answers."""
        return [stage for stage in super().stages(context) if stage.kernel in ("hand_off_wait", "hand_off_answer")]


def load(start: WorkerStart) -> IdleExperts:
    return IdleExperts(start)
