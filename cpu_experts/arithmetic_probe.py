"""`python -m bloomery.cpu_experts.arithmetic_probe CPU SECONDS`: how fast one core multiplies bytes in registers.

Owns the loop that does nothing else: the bound of prompts, as a read of memory is that of generation. The products are
those of the active instruction set (`isa`). Prints one line of JSON: `isa`, `gops` (10^9 operations a second, two a
multiply-add; the median of ten windows).
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import psutil
from numba import cfunc, types

from bloomery.cpu_experts import tiles
from bloomery.cpu_experts.isa import AMX, AVX512VNNI, active_isa, refusal
from bloomery.cpu_experts.simd import Emitter, Value, emits, i8x32, i16x16, i32x8, vector
from bloomery.cpu_experts.vectors import ELEMENTS

WINDOWS: Final = 10
_CHAINS: Final = 12  # of sums that wait for nothing but their own last product; and an operand fit 16 registers


def _tile_products(s: Emitter, turns: Value) -> None:
    tiles.configure(s, [(16, 64)] * 8)

    def turn(index: Value, carried: list[Value]) -> list[Value]:
        for number in range(8):
            tiles.add_products(s, number % 4, 4 + number % 2, 6 + number % 2)
        return []

    s.loop(turns, [], turn)
    tiles.release(s)


def _wide_products(s: Emitter, turns: Value) -> Value:
    kind = vector("i32", 16)
    bytes_ = s.splat(kind, s.b.trunc(turns, kind.ir.element))

    def turn(index: Value, sums: list[Value]) -> list[Value]:
        return [s.add_products_u8(total, bytes_, bytes_) for total in sums]

    return _folded(s, s.loop(turns, [s.zero(kind)] * _CHAINS, turn))


def _narrow_products(s: Emitter, turns: Value) -> Value:
    bytes_ = s.as_(i8x32, s.splat(i32x8, s.b.trunc(turns, i32x8.ir.element)))
    ones = s.splat_constant(i16x16, 1)

    def turn(index: Value, sums: list[Value]) -> list[Value]:
        operand = s.opaque(bytes_)  # or the products would leave the loop
        return [
            s.add(total, s.pair_products_i16(s.opaque(s.pair_products_u8(operand, bytes_)), ones)) for total in sums
        ]

    return _folded(s, s.loop(turns, [s.zero(i32x8)] * _CHAINS, turn))


def _folded(s: Emitter, sums: list[Value]) -> Value:
    total = sums[0]
    for part in sums[1:]:
        total = s.add(total, part)
    return s.b.zext(s.lane(total, 0), ELEMENTS["i64"])


def _kernel(isa: str) -> tuple[Callable[[int], None], int]:
    """A function of a number of turns, and the operations of a turn."""
    emit, operations = {
        AMX: (_tile_products, 8 * 2 * 16 * 16 * 64),
        AVX512VNNI: (_wide_products, _CHAINS * 2 * 64),
    }.get(isa, (_narrow_products, _CHAINS * 2 * 32))

    @emits(types.int64, types.int64)
    def products(s: Emitter, turns: Value) -> Value:
        result = emit(s, turns)
        return turns if result is None else result

    def run(turns: int) -> int:
        total: int = products(turns)
        return total

    compiled: Any = cfunc(types.int64(types.int64))(run)
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)
    keep = compiled

    def call(turns: int) -> None:
        assert keep is not None
        function(turns)

    return call, operations


def measure(seconds: float) -> float:
    """Operations a second of this thread, by the time that it ran."""
    run, operations = _kernel(active_isa())
    turns = 1000
    while True:
        begun = time.thread_time()
        run(turns)
        if (taken := time.thread_time() - begun) > seconds / WINDOWS / 4:
            break
        turns *= 4
    turns = max(1, int(turns * seconds / WINDOWS / taken))
    rates = []
    for _ in range(WINDOWS):
        begun = time.thread_time()
        run(turns)
        rates.append(turns * operations / (time.thread_time() - begun))
    return statistics.median(rates)


def main(cpu: int, seconds: float) -> None:
    if (reason := refusal()) is not None:
        sys.exit(reason)
    psutil.Process().cpu_affinity([cpu])
    print(json.dumps({"isa": active_isa(), "gops": measure(seconds) / 1e9}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
