"""The workload of a CPU-expert worker beside a card that answers every hand-off at once and computes nothing: what is
left is what hand-offs themselves cost. Results are wrong."""

from __future__ import annotations

from dataclasses import replace

from bloomery.cpu_experts import expert_workload
from bloomery.cpu_experts.model_workload import ModelWorkload
from bloomery.cpu_experts.stage import LoweringContext, Stage
from bloomery.runtime.worker_messages import WorkerStart

MEETINGS = ("hand_off_wait", "hand_off_answer")


class IdleExperts:
    def __init__(self, start: WorkerStart) -> None:
        inner: ModelWorkload = expert_workload.load(start)
        self.program, self.kept = inner.program, inner.kept
        self.map_weights, self.compile = inner.map_weights, inner.compile
        self._stages = inner.stages

    def stages(self, context: LoweringContext) -> list[Stage]:
        """Nothing is left out of what is not there: a wait's last word counts the stages up to its answer."""
        stages = [stage for stage in self._stages(context) if stage.kernel in MEETINGS]
        return [
            replace(stage, arguments=(*stage.arguments[:-1], 0)) if stage.kernel == MEETINGS[0] else stage
            for stage in stages
        ]


def load(start: WorkerStart) -> IdleExperts:
    return IdleExperts(start)
