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

from bloomery.cpu_experts.simd import Emitter, Value

_WORD: Final = ir.IntType(32)


@functools.cache
def iq3_xxs_words() -> tuple[int, ...]:
    """For each of the 256 codes of IQ3_XXS four positive bytes, at most 62, as one word, the first lowest."""
    kind: Any = gguf.quants.IQ3_XXS
    kind.init_grid()
    return tuple(kind.grid.reshape(256, 4).astype(np.uint8).view("<u4")[:, 0].tolist())


def table_address(s: Emitter, name: str, words: Sequence[int]) -> Value:
    """Pointer to the words, which are put into the module once."""
    module = s.b.module
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
