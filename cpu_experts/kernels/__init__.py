"""The host kernels by name. Owns the registry; each module owns one family of ops and its order of operations.

`kernel_function(name)` gives the Python function that `compile_cache` compiles. Importing a family imports Numba, so
it happens only when a kernel has to be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final

KernelFunction = Callable[[int, int, int, int], None]

FLOAT_TYPES: Final = ("F32", "F16", "BF16")
SMALL_TYPES: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
SUPER_TYPES: Final = (
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS",
)  # fmt: skip
WEIGHT_TYPES: Final = (*FLOAT_TYPES, *SMALL_TYPES, *SUPER_TYPES)

# prefix of a kernel's name -> (module, factory); what follows the prefix is the factory's argument
_FAMILIES: Final = {
    "matmul_": ("matmul", "matmul"),
    "experts_": ("expert_matmul", "experts"),
    "embed_": ("elementwise", "embed"),
    "quantise_": ("activations", "quantise"),
    "cache_write_": ("cache_rows", "cache_write"),
    "attention_": ("attention", "attention"),
    "rope_": ("norm_rope", "rope"),
    "router_": ("router", "router"),
    "table_rows_": ("engram", "table_rows"),
    "index_scores_": ("indexer", "index_scores"),
    "index_rows_": ("indexer", "index_rows"),
    "window_attention_": ("window_attention", "window_attention"),
}
_SINGLE: Final = {
    "experts_sum": ("elementwise", "experts_sum"),
    "add": ("elementwise", "add"),
    "swiglu": ("elementwise", "swiglu"),
    "copy_heads": ("elementwise", "copy_heads"),
    "select_rows": ("elementwise", "select_rows"),
    "rms_norm": ("norm_rope", "rms_norm"),
    "rope_table": ("norm_rope", "rope_table"),
    "argmax": ("router", "argmax"),
    "unit_norm": ("norm_rope", "unit_norm"),
    "hyper_mix": ("hyper", "hyper_mix"),
    "hyper_collapse": ("hyper", "hyper_collapse"),
    "hyper_post": ("hyper", "hyper_post"),
    "token_write": ("engram", "token_write"),
    "engram_rows": ("engram", "engram_rows"),
    "engram_gate": ("engram", "engram_gate"),
    "engram_wait": ("engram_wait", "engram_wait"),
    "hand_off_wait": ("hand_off", "hand_off_wait"),
    "hand_off_answer": ("hand_off", "hand_off_answer"),
    "pool_write": ("compressor", "pool_write"),
    "pool_rows": ("compressor", "pool_rows"),
    "router_softplus": ("softplus_router", "router_softplus"),
    "stream_mean": ("drafts", "stream_mean"),
    "chain_tokens": ("drafts", "chain_tokens"),
}
_VARIANTS: Final = {
    "matmul_": WEIGHT_TYPES,
    "experts_": WEIGHT_TYPES,
    "embed_": WEIGHT_TYPES,
    "quantise_": ("Q8_K", "Q8_0", "F16", "BF16"),
    "cache_write_": ("f32", "f16", "q8_0"),
    "attention_": ("f32", "f16", "q8_0"),
    "rope_": ("halves", "neighbours"),
    "router_": ("softmax", "sigmoid"),
    "table_rows_": WEIGHT_TYPES,
    "index_scores_": ("f32", "f16"),
    "index_rows_": ("f32", "f16"),
    "window_attention_": ("f32", "f16"),
}


def kernel_names() -> list[str]:
    """Every kernel there is."""
    return [*_SINGLE, *(prefix + variant for prefix, variants in _VARIANTS.items() for variant in variants)]


def kernel_factory(name: str) -> tuple[str, str, str]:
    """(module, function, argument or "") that make a kernel; KeyError for a name that `kernel_names` does not list."""
    if name in _SINGLE:
        module, function = _SINGLE[name]
        return f"{__name__}.{module}", function, ""
    for prefix, variants in _VARIANTS.items():
        if name.startswith(prefix) and (variant := name.removeprefix(prefix)) in variants:
            module, function = _FAMILIES[prefix]
            return f"{__name__}.{module}", function, variant
    raise KeyError(name)


def kernel_function(name: str) -> KernelFunction:
    """The Python function of a kernel; KeyError as `kernel_factory`."""
    module, function, variant = kernel_factory(name)
    factory = getattr(import_module(module), function)
    made: KernelFunction = factory(variant) if variant else factory()
    return made
