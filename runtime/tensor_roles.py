"""What a tensor is for, from its name, and how many bytes each role and each expert take.

Owns the names that llama.cpp gives to tensors, coarsely. Does not know architectures: a name that no rule covers has
the role "other".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from bloomery.runtime.model_file import ModelFile, Tensor

Role: TypeAlias = Literal[
    "embedding",
    "attention",
    "dense ffn",
    "experts",
    "shared experts",
    "router",
    "norms",
    "hyper-connections",
    "engrams",
    "draft",
    "head",
    "tables",
    "other",
]
ROLES: Final[tuple[Role, ...]] = get_args(Role)

# The first rule that matches the name without "blk.N." and without its last part (".weight", ".bias") decides.
_RULES: Final[tuple[tuple[str, Role], ...]] = (
    (r"engram_embd|per_layer_token_embd", "tables"),
    (r"token_embd|position_embd|token_types", "embedding"),
    (r"output", "head"),
    (r"(output_)?hc_\w+", "hyper-connections"),
    (r"engram_\w+", "engrams"),
    (r"fc|markov_w\d|conf_proj", "draft"),
    (r".*norm(_\w+)?|.*_norm_.*", "norms"),
    (r"ffn_gate_inp(_shexp)?|exp_probs_b|ffn_gate_tid2eid", "router"),
    (r"ffn_\w+_(exps|chexps)", "experts"),
    (r"ffn_\w+_shexp", "shared experts"),
    (r"ffn_(gate|up|down|gate_up)", "dense ffn"),
    (r"attn_.*|indexer[._].*", "attention"),
)
_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_SUFFIX: Final = re.compile(r"\.(weight|bias|scale)$")


def role_of(name: str) -> Role:
    """The role of the tensor of this name."""
    stem = _SUFFIX.sub("", _LAYER.sub("", name, count=1))
    return next((role for pattern, role in _RULES if re.fullmatch(pattern, stem)), "other")


def layer_of(name: str) -> int | None:
    """The layer of a "blk.N." name."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def bytes_by_role(tensors: Iterable[Tensor]) -> dict[Role, int]:
    """Bytes of each role that occurs, in the order of ROLES."""
    totals: dict[Role, int] = dict.fromkeys(ROLES, 0)
    for tensor in tensors:
        totals[role_of(tensor.name)] += tensor.nbytes
    return {role: total for role, total in totals.items() if total}


def bytes_by_type(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes of each quant type that occurs, greatest first."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.quant_type.name] = totals.get(tensor.quant_type.name, 0) + tensor.nbytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class ExpertBytes:
    """Bytes of the routed experts: `layers` maps a layer to (bytes of all its experts, number of them).

    `used` is how many a token uses in each layer, if the file says so."""

    layers: Mapping[int, tuple[int, int]]
    used: int | None

    @property
    def total(self) -> int:
        return sum(nbytes for nbytes, _ in self.layers.values())

    @property
    def per_expert(self) -> tuple[int, int]:
        """Least and greatest bytes of one expert of one layer (layers may have different quant types)."""
        sizes = [nbytes // count for nbytes, count in self.layers.values()]
        return min(sizes), max(sizes)

    @property
    def active_per_token(self) -> int | None:
        """Bytes of expert weights that one token's step reads."""
        if self.used is None:
            return None
        return sum(nbytes // count * min(self.used, count) for nbytes, count in self.layers.values())


def expert_bytes(model: ModelFile) -> ExpertBytes | None:
    """The routed experts of a model file; None if it has none."""
    layers: dict[int, tuple[int, int]] = {}
    for tensor in model.tensors.values():
        layer = layer_of(tensor.name)
        if role_of(tensor.name) == "experts" and layer is not None and len(tensor.shape) >= 2:
            nbytes, _ = layers.get(layer, (0, 0))
            layers[layer] = nbytes + tensor.nbytes, tensor.shape[-1]
    used = model.metadata.get(f"{model.metadata.get('general.architecture')}.expert_used_count")
    return ExpertBytes(dict(sorted(layers.items())), used if isinstance(used, int) else None) if layers else None
