"""Which quant type llama.cpp's mixes give to a weight matrix, and what it becomes where a row does not fill its blocks.

Owns the rules (after llama-quant.cpp, llama_tensor_get_type): what matters more gets more bits, in the outer layers
above all. Knows tensor names, not shapes of models.
"""

from __future__ import annotations

from typing import Final

from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.tensor_roles import role_of

NAMED_MIXES: Final = ("Q3_K_M", "Q4_K_M")
PURE_MIXES: Final = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_XS", "IQ4_NL",
                     "MXFP4", "F16", "BF16", "F32")  # fmt: skip
"""One type for every matrix."""
MIXES: Final = (*NAMED_MIXES, *PURE_MIXES)

_FALL_BACK: Final = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


def mixed_type(mix: str, stem: str, layer: int, layers: int, *, tied: bool, row: int, router: str = "F32") -> QuantType:
    """The type of the matrix `stem` (such as "attn_v", "ffn_down_exps", "output") with rows of `row` elements, in layer
    `layer` of `layers`. `tied`: the embedding serves as the output, too. Routers have the type `router`."""
    if mix not in MIXES:
        raise BloomeryError(f"{mix} is no mix of quant types that is known here", f"choose one of {', '.join(MIXES)}")
    if role_of(stem + ".weight") == "router":
        return QuantType.named(router)
    name = mix
    if mix in NAMED_MIXES:
        name = _named(mix, stem, layer, layers, head=stem == "output" or (tied and stem == "token_embd"))
    if row % QuantType.named(name).block_elements:
        name = _FALL_BACK.get(name, "F16")
    if row % QuantType.named(name).block_elements:
        name = "F16"
    return QuantType.named(name)


def _named(mix: str, stem: str, layer: int, layers: int, *, head: bool) -> str:
    if head:
        return "Q6_K"
    values, down = stem in ("attn_v", "attn_kv_b"), stem.startswith("ffn_down")
    if mix == "Q4_K_M":
        return "Q6_K" if (values or down) and _outer_or_third(layer, layers) else "Q4_K"
    if values:
        return "Q5_K" if layer < 2 else "Q4_K"
    if down:
        return "Q5_K" if layer < layers // 16 else "Q4_K"
    return "Q4_K" if stem == "attn_output" else "Q3_K"


def _outer_or_third(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
