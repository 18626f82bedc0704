"""Vector types of the host kernels, for Numba and for LLVM. Knows no operation on them (`simd`)."""

from __future__ import annotations

import functools
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

ELEMENTS: Final = {
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
}
BYTES: Final = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "f32": 4, "f64": 8}


class Vector(types.Type):
    """Numba type of `lanes` elements ("i8", "i16", "i32", "i64", "f16", "f32", "f64") held in a vector register."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        self.ir = ir.VectorType(ELEMENTS[element], lanes)
        self.nbytes = BYTES[element] * lanes
        super().__init__(name=f"{element}x{lanes}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, fe_type.ir)  # type: ignore[no-untyped-call]


@functools.cache
def vector(element: str, lanes: int) -> Vector:
    return Vector(element, lanes)


i8x16, i8x32, i8x64 = vector("i8", 16), vector("i8", 32), vector("i8", 64)
i16x4, i16x8, i16x16, i16x32 = (vector("i16", lanes) for lanes in (4, 8, 16, 32))
i32x4, i32x8, i32x16 = vector("i32", 4), vector("i32", 8), vector("i32", 16)
f16x4, f16x8 = vector("f16", 4), vector("f16", 8)
f32x4, f32x8 = vector("f32", 4), vector("f32", 8)
f64x4, f64x8 = vector("f64", 4), vector("f64", 8)
