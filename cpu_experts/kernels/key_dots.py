"""Dots of one query head with four cached keys, for caches of float32 or float16; the query stays float32.

Owns nothing but the step: the order of the sums is `float_dots`'.
"""

from __future__ import annotations

from typing import Any

from numba import types

from bloomery.cpu_experts.kernels.float_dots import (
    LANES,
    f32x16,
    f32x64,
    finish_lanes,
    load_float,
    load_floats,
    no_lanes,
)
from bloomery.cpu_experts.simd import Emitter, Value, emits, inlined

_INT = types.int64


def key_dots(name: str) -> Any:
    """Numba function (k0, k1, k2, k3, q, width) -> f32x4 for keys of type F32 or F16."""
    element = 4 if name == "F32" else 2

    @emits(f32x64, _INT, _INT, _INT, _INT, _INT, f32x64)
    def step(s: Emitter, k0: Value, k1: Value, k2: Value, k3: Value, q: Value, lanes: Value) -> Value:
        keys = [load_floats(s, name, key) for key in (k0, k1, k2, k3)]
        wide = s.concat(s.concat(keys[0], keys[1]), s.concat(keys[2], keys[3]))
        query = s.load(f32x16, q)
        twice = s.concat(query, query)
        return s.fma(wide, s.concat(twice, twice), lanes)

    @emits(f32x64, _INT, _INT, _INT, _INT, _INT, types.int64, f32x64)
    def tail(s: Emitter, k0: Value, k1: Value, k2: Value, k3: Value, q: Value, lane: Value, lanes: Value) -> Value:
        query = s.load_scalar("f32", q)
        for row, key in enumerate((k0, k1, k2, k3)):
            at = s.add(lane, lane.type(LANES * row))
            total = s.fma(load_float(s, name, key), query, s.b.extract_element(lanes, at))
            lanes = s.b.insert_element(lanes, total, at)
        return lanes

    @inlined
    def dots(k0: int, k1: int, k2: int, k3: int, q: int, width: int) -> Any:
        whole = width // LANES * LANES
        lanes = no_lanes()
        for start in range(0, whole, LANES):
            at = start * element
            lanes = step(k0 + at, k1 + at, k2 + at, k3 + at, q + 4 * start, lanes)
        for start in range(whole, width):
            at = start * element
            lanes = tail(k0 + at, k1 + at, k2 + at, k3 + at, q + 4 * start, start - whole, lanes)
        return finish_lanes(lanes)

    return dots
