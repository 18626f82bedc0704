"""The AMX part of the SIMD vocabulary: tile registers, their shapes, loads, stores and products.

Knows nothing of quant types or ops, nor whether the system lets a process use tiles (`isa`).

A tile is a matrix of up to 16 rows of 64 bytes. A product adds A (rows x 4k bytes) times B (k x 4 columns bytes, four
elements of k side by side) to C (rows x columns of 32 bits). Register numbers are constants of the code. A thread
configures tiles before it uses them and releases them afterwards, so that nobody else's context switch carries them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llvmlite import ir

from bloomery.cpu_experts.simd import Emitter, Value
from bloomery.cpu_experts.vectors import ELEMENTS

TILE_ROWS: Final = 16
TILE_BYTES: Final = 64  # of a row
_I8: Final = ELEMENTS["i8"]
_I64: Final = ELEMENTS["i64"]


def configuration(shapes: Sequence[tuple[int, int]]) -> bytes:
    """The 64 bytes that give tile i the shape shapes[i] = (rows, bytes of a row); palette 1, at most eight tiles."""
    assert len(shapes) <= 8 and all(0 < rows <= TILE_ROWS and 0 < nbytes <= TILE_BYTES for rows, nbytes in shapes)
    content = bytearray(64)
    content[0] = 1
    for index, (rows, nbytes) in enumerate(shapes):
        content[16 + 2 * index] = nbytes
        content[48 + index] = rows
    return bytes(content)


def configure(s: Emitter, shapes: Sequence[tuple[int, int]]) -> None:
    """ldtilecfg: shapes for tiles 0, 1, ...; all tiles are zero afterwards."""
    content = configuration(shapes)
    name = f"tiles_{content.hex()}"
    table = s.b.module.globals.get(name)
    if table is None:
        kind = ir.ArrayType(_I8, len(content))
        table = ir.GlobalVariable(s.b.module, kind, name)
        table.linkage, table.global_constant, table.align = "internal", True, 64
        table.initializer = ir.Constant(kind, bytearray(content))
    s.call("llvm.x86.ldtilecfg", ir.VoidType(), [s.b.bitcast(table, _I8.as_pointer())])


def release(s: Emitter) -> None:
    """tilerelease: tiles as they were before the first `configure`."""
    s.call("llvm.x86.tilerelease", ir.VoidType(), [])


def zero(s: Emitter, tile: int) -> None:
    s.call("llvm.x86.tilezero", ir.VoidType(), [_I8(tile)])


def load(s: Emitter, tile: int, address: Value, offset: int = 0, stride: int = TILE_BYTES) -> None:
    """Rows of a tile from memory, `stride` bytes apart."""
    s.call("llvm.x86.tileloadd64", ir.VoidType(), [_I8(tile), s.pointer(address, offset, _I8), _I64(stride)])


def store(s: Emitter, tile: int, address: Value, offset: int = 0, stride: int = TILE_BYTES) -> None:
    """Rows of a tile to memory, `stride` bytes apart."""
    s.call("llvm.x86.tilestored64", ir.VoidType(), [_I8(tile), s.pointer(address, offset, _I8), _I64(stride)])


def add_products(s: Emitter, c: int, a: int, b: int, a_signed: bool = True, b_signed: bool = True) -> None:
    """tdpb(s|u)(s|u)d: tile c += a @ b, bytes exact in int32, which wraps."""
    name = f"tdpb{'s' if a_signed else 'u'}{'s' if b_signed else 'u'}d"
    s.call(f"llvm.x86.{name}", ir.VoidType(), [_I8(c), _I8(a), _I8(b)])


def add_bf16_products(s: Emitter, c: int, a: int, b: int) -> None:
    """tdpbf16ps: tile c (f32) += a @ b; two bf16 side by side where the byte products have four. Denormals are zero and
    the order of sums is the CPU's: exact (and used) for integers whose sums stay below 2^24."""
    s.call("llvm.x86.tdpbf16ps", ir.VoidType(), [_I8(c), _I8(a), _I8(b)])
