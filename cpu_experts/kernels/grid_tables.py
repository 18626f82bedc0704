"""The value tables of quant types whose codes stand for whole groups of elements, as constants of compiled code.

Owns where the tables come from (the gguf package) and how code looks into them. Knows no blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import gguf
import numpy as np
from llvmlite import ir

from bloomery.cpu_experts.simd import Emitter, Value, vector

_WORD: Final = ir.IntType(32)


@functools.cache
def grid_words(name: str) -> tuple[int, ...]:
    """For each code of IQ2_XXS, IQ2_XS or IQ2_S eight positive bytes, at most 43, as two words; of IQ3_XXS or IQ3_S
    four, at most 62, as one. The first is lowest."""
    kind: Any = getattr(gguf.quants, name)
    kind.init_grid()
    return tuple(kind.grid.reshape(-1).astype(np.uint8).view("<u4").tolist())


def table_address(s: Emitter, name: str) -> Value:
    """Pointer to `grid_words(name)`, which are put into the module once."""
    module, words = s.b.module, grid_words(name)
    name = f"{name.lower()}_grid"
    table = module.globals.get(name)
    if table is None:
        kind = ir.ArrayType(_WORD, len(words))
        table = ir.GlobalVariable(module, kind, name)
        table.linkage, table.global_constant, table.align = "internal", True, 64
        table.initializer = ir.Constant(kind, [ir.Constant(_WORD, word) for word in words])
    return s.b.bitcast(table, ir.IntType(8).as_pointer())


def gather_8(s: Emitter, table: Value, indices: Value) -> Value:
    """vpgatherdd: i32x8 of the table's words at i32x8 indices."""
    kind, word = indices.type, _WORD
    arguments = [ir.Constant(kind, ir.Undefined), table, indices, ir.Constant(kind, [word(-1)] * 8), ir.IntType(8)(4)]
    return s.call("llvm.x86.avx2.gather.d.d.256", kind, arguments)


def load_eights(s: Emitter, table: Value, codes: Sequence[Value]) -> Value:
    """i64x4: the eight bytes of each of four codes (i32)."""
    eights = vector("i64", 4)
    entries = s.b.bitcast(table, eights.ir.element.as_pointer())
    loaded = [s.b.load(s.b.gep(entries, [s.b.zext(code, eights.ir.element)]), align=8) for code in codes]
    return s.gather_lanes(eights, loaded)
