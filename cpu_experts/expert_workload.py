"""The workload of a worker beside a card: of a model file's program only the experts that are handed over."""

from __future__ import annotations

from bloomery.cpu_experts.model_workload import ModelWorkload
from bloomery.runtime.expert_tiers import ExpertTiers, kept_experts
from bloomery.runtime.split_program import host_part
from bloomery.runtime.worker_messages import WorkerStart


def load(start: WorkerStart) -> ModelWorkload:
    workload = ModelWorkload(start)
    workload.kept = kept_experts(workload.program, ExpertTiers.of_text(workload.program, start.tiers))
    workload.program = host_part(workload.program, start.hand_offs)
    return workload
