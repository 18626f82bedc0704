"""Lookups of bytes and words in tables that lie in registers (AVX-512-VBMI), for types whose codes stand for groups.

Owns those that several types share, and the order in which activations meet what is found. Knows no block.
"""

from __future__ import annotations

from llvmlite import ir

from bloomery.cpu_experts.simd import Emitter, Value, i8x64, i16x32


def by_position(s: Emitter, x_values: Value) -> list[Value]:
    """For each position in a group of four: i8x64 of the activations there, group after group."""
    quarters = [s.load(i8x64, x_values, 64 * quarter) for quarter in range(4)]
    found = []
    for two in ((0, 1), (2, 3)):
        lanes = [4 * group + position for position in two for group in range(32)]
        halves = [s.shuffle(quarters[first], quarters[first + 1], lanes) for first in (0, 2)]
        for start in (0, 32):
            found.append(s.shuffle(halves[0], halves[1], [*range(start, start + 32), *range(64 + start, 96 + start)]))
    return found


def even_bytes(s: Emitter, fields: Value) -> Value:
    """i8x64: the lower 7 bits of each byte with an eighth that makes the number of set bits even."""
    even = [field | (field.bit_count() & 1) << 7 for field in range(128)]
    return of_two(s, s.constant(i8x64, even[:64]), fields, s.constant(i8x64, even[64:]))


def of_two(s: Emitter, low: Value, indices: Value, high: Value) -> Value:
    """vpermi2b: bytes of two registers by the lower 7 bits of each index."""
    return s.call("llvm.x86.avx512.vpermi2var.qi.512", i8x64.ir, [low, indices, high])


def words_of_two(s: Emitter, low: Value, indices: Value, high: Value) -> Value:
    """vpermi2w: words of two registers (i16x32) by the lower 6 bits of each index."""
    return s.call("llvm.x86.avx512.vpermi2var.hi.512", i16x32.ir, [low, indices, high])


def constant_table(s: Emitter, label: str, content: bytes) -> Value:
    """Address (i64) of constant bytes of the module, at a multiple of 64."""
    module = s.b.module
    table = module.globals.get(label)
    if table is None:
        kind = ir.ArrayType(ir.IntType(8), len(content))
        table = ir.GlobalVariable(module, kind, label)
        table.linkage, table.global_constant, table.align = "internal", True, 64
        table.initializer = ir.Constant(kind, bytearray(content))
    return s.b.ptrtoint(table, ir.IntType(64))
