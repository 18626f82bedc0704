"""Architecture `qwen3moe`: the mixture-of-experts Qwen3 models (Yang et al., arXiv:2505.09388). Qwen3's attention;
every layer's feed-forward is a mixture with softmax scores over all experts, the chosen ones' scaled to sum to 1.
"""

from __future__ import annotations

from bloomery.runtime.architectures.hyper_parameters import Mixture, positive, read_mixture
from bloomery.runtime.architectures.layers import routed_experts
from bloomery.runtime.architectures.qwen3 import build_trunk, read_hyper
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program


def read_experts(model: ModelFile) -> Mixture:
    """Files without expert_feed_forward_length share feed_forward_length among the experts used."""
    if f"{model.architecture}.expert_feed_forward_length" in model.metadata:
        width = positive(model, "expert_feed_forward_length")
    else:
        width = positive(model, "feed_forward_length") // positive(model, "expert_used_count")
    return read_mixture(model, width, gating=1, normalise=True, scale=1.0)


def build(model: ModelFile) -> Program:
    mixture = read_experts(model)
    return build_trunk(model, read_hyper(model), lambda b, normed: routed_experts(b, normed, mixture))
