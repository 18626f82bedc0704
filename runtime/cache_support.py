"""Which programs can have which type of cache: what ops and widths allow.

Owns that one check; what the types are is `cache_types`'.
"""

from __future__ import annotations

from bloomery.runtime.cache_types import Q8_0_ELEMENTS, CacheType
from bloomery.runtime.errors import PlanError
from bloomery.runtime.program import Attention, CacheWrite, Program, op_states


def check_cache_type(program: Program, cache_type: CacheType) -> None:
    """PlanError unless the program's caches can have this type."""
    if cache_type != "q8_0":
        return
    hint = "use --cache-type f16"
    for op in program.ops:
        cached = list(op_states(op))
        if cached and not isinstance(op, Attention | CacheWrite):
            raise PlanError(
                f"cache type q8_0 is not available for {program.architecture}: op {op.name} ({type(op).__name__}) keeps"
                f" {cached[0]} in other types only",
                hint,
            )
        widths: tuple[int, ...] = ()
        if isinstance(op, Attention):
            widths = (op.key_width, op.value_width)
        elif isinstance(op, CacheWrite):
            widths = (op.x.width, op.start)
        for width in widths:
            if width % Q8_0_ELEMENTS:
                raise PlanError(
                    f"cache type q8_0 keeps blocks of {Q8_0_ELEMENTS} elements, which op {op.name} of"
                    f" {program.architecture} with heads of {width} elements does not fill",
                    hint,
                )
