"""The workload of a CPU-expert worker beside a card that runs every stage of every hand-off, also without work."""

from __future__ import annotations

from dataclasses import replace

from bloomery.cpu_experts import expert_workload
from bloomery.cpu_experts.model_workload import ModelWorkload
from bloomery.cpu_experts.stage import LoweringContext, Stage
from bloomery.runtime.worker_messages import WorkerStart


class UnskippingExperts:
    def __init__(self, start: WorkerStart) -> None:
        inner: ModelWorkload = expert_workload.load(start)
        self.program, self.kept = inner.program, inner.kept
        self.map_weights, self.compile = inner.map_weights, inner.compile
        self._stages = inner.stages

    def stages(self, context: LoweringContext) -> list[Stage]:
        stages = self._stages(context)
        waits = [number for number, stage in enumerate(stages) if stage.kernel == "hand_off_wait"]
        for number in waits:
            *others, left_out = stages[number].arguments
            assert left_out > 0
            stages[number] = replace(stages[number], arguments=(*others, 0))
        return stages


def load(start: WorkerStart) -> UnskippingExperts:
    return UnskippingExperts(start)
