"""The benchmark files that can be asked for by name: which shapes, how many layers, what llama.cpp takes.

Owns the names. Shapes and drafts are `synthetic_model.py`'s and `synthetic_deepseek41.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.synthetic_deepseek41 import DEEPSEEK_V41_FLASH, LEAST_LAYERS, SMALL_LAYERS, deepseek41_draft
from bloomery.runtime.synthetic_model import (
    DEEPSEEK_V2_LITE,
    LLAMA_1B,
    QWEN3_30B_A3B,
    Draft,
    Shapes,
    deepseek2_draft,
    llama_draft,
    qwen3moe_draft,
)


@dataclass(frozen=True)
class Template:
    """A model by name. `default_layers` and `default_experts` (0: all) keep files small where fewer say the same about
    speed, `least_layers` is what the architecture needs. `peer_layers`: the numbers of layers at which llama.cpp takes
    the file, None for any, empty where it does not know the architecture."""

    shapes: Shapes
    draft: Callable[[Shapes, str], Draft]
    default_layers: int
    least_layers: int = 1
    peer_layers: tuple[int, ...] | None = None
    default_mix: str = "Q4_K_M"
    default_experts: int = 0


TEMPLATES: Final[Mapping[str, Template]] = {
    "qwen3-30b-a3b": Template(QWEN3_30B_A3B, qwen3moe_draft, 5),
    "deepseek-v2-lite": Template(DEEPSEEK_V2_LITE, deepseek2_draft, 27, peer_layers=(26, 27)),
    "llama-1b": Template(LLAMA_1B, llama_draft, 16),
    "deepseek41": Template(
        DEEPSEEK_V41_FLASH,
        deepseek41_draft,
        SMALL_LAYERS,
        LEAST_LAYERS,
        peer_layers=(),
        default_mix="Q3_K_M",
        default_experts=24,
    ),
}


def synthetic_draft(name: str, layers: int = 0, mix: str = "", experts: int = 0, used: int = 0) -> Draft:
    """The draft of a model by name; 0 and "" mean the template's own. Fewer `experts` make a smaller file of which a
    token reads as much, fewer `used` ones a file of the same size of which it reads less. BloomeryError for what cannot
    be made."""
    template = TEMPLATES.get(name)
    if template is None:
        raise BloomeryError(f"there is no benchmark file called {name}", f"choose one of {', '.join(TEMPLATES)}")
    layers, mix = layers or template.default_layers, mix or template.default_mix
    experts = experts or template.default_experts
    if layers < template.least_layers:
        message = f"{name} with {layers} layers: at least {template.least_layers} make a model of its architecture"
        raise BloomeryError(message, f"--layers {template.least_layers}")
    shapes = replace(template.shapes, layers=layers, used=used or template.shapes.used)
    if experts:
        if not shapes.used <= experts <= shapes.experts:
            expected = f"{shapes.used} to {shapes.experts}" if shapes.experts else "no such number: it has none"
            raise BloomeryError(f"{name} with {experts} experts a layer, expected {expected}", "change --experts")
        shapes = replace(shapes, experts=experts)
    draft = template.draft(shapes, mix)
    draft.keys["general.name"] = f"synthetic {name}, {layers} layers, {mix}"
    return draft
