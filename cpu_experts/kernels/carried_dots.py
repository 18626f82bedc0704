"""Dots of four weight rows of K types with one row of activations (AVX2), in `block_dots`' order, sums carried on.

Owns how integer sums are taken there, and when they meet the accumulator. The float steps are the canonical ones.

A core (Zen 3) has less than one block of four rows in flight, so the chain of additions, conversion and fused
multiply-adds at the end of a block would leave it idle. The sums of a block are therefore carried into the next one and
meet the accumulator amid its products, where there is other work to do.

Where two rows share a register (`paired_formats`), rows 0 and 2 do, and rows 1 and 3: as sums are added in pairs, they
end up in the order of the rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

from numba import types

from bloomery.cpu_experts.isa import AVX512VNNI, at_least
from bloomery.cpu_experts.kernels.block_dots import prefetch
from bloomery.cpu_experts.kernels.block_formats import SUPER_BLOCKS
from bloomery.cpu_experts.kernels.block_parts import half_floats
from bloomery.cpu_experts.kernels.paired_formats import PAIRED_BLOCKS, PairedBlocks
from bloomery.cpu_experts.simd import Emitter, Value, emits, f16x8, f32x4, f32x8, i8x16, i8x32, i16x16, i32x4, i32x8

_INT = types.int64
_tuple: Any = types.Tuple
_ROW_BY_ROW: Final = ("Q6_K",)  # nothing is gained where two rows share a register: bytes joined cost what scales gain
_EVEN: Final = (0, 2, 4, 6)
_ODD: Final = (1, 3, 5, 7)

Amid = Callable[[Value], None]
"""Called once amid the products, with a vector that has been computed by then."""


def with_carried_sums(name: str) -> bool:
    """Whether `CarriedDots` knows the type and this variant gains by it."""
    return (name in PAIRED_BLOCKS or name in _ROW_BY_ROW) and not at_least(AVX512VNNI)


class CarriedDots:
    """The parts of a loop over blocks of four rows. `start` () -> (acc, sums, factors) of no blocks; `step` (w0 to w3,
    p0 to p3, x values, x d, x sums, acc, sums, factors) -> the same three one block later, while the blocks at p0 to p3
    are fetched; `finish` (acc, sums, factors) -> f32x4 of all blocks.

    `sums` are integers of the four rows, and what they are multiplied with are `factors`; of a type with minima, totals
    and the sums of minima in turns."""

    start: Any
    step: Any
    finish: Any

    def __init__(self, name: str) -> None:
        self.name, self.facts = name, SUPER_BLOCKS[name]
        self.minima = self.facts.minimum_at is not None
        lanes = (i32x8, f32x8) if self.minima else (i32x4, f32x4)
        state = _tuple((f32x4, *lanes))

        @emits(state)
        def start(s: Emitter) -> Value:
            return s.zero(f32x4), *(s.zero(kind) for kind in lanes)

        @emits(state, *[_INT] * 11, f32x4, *lanes)
        def step(s: Emitter, *operands: Value) -> Value:
            prefetch(s, self.facts.nbytes, operands[4:8])
            return self._step(s, operands[:4], operands[8:11], *operands[11:])

        @emits(f32x4, f32x4, *lanes)
        def finish(s: Emitter, acc: Value, sums: Value, factors: Value) -> Value:
            return self._accumulated(s, acc, sums, factors)

        self.start, self.step, self.finish = start, step, finish

    def _accumulated(self, s: Emitter, acc: Value, sums: Value, factors: Value) -> Value:
        if not self.minima:
            return s.fma(factors, s.to_float(f32x4, sums), acc)
        floats = s.to_float(f32x8, sums)
        acc = s.fma(s.lanes(factors, _EVEN), s.lanes(floats, _EVEN), acc)
        return s.fma(s.fneg(s.lanes(factors, _ODD)), s.lanes(floats, _ODD), acc)

    def _step(
        self, s: Emitter, addresses: Sequence[Value], x: Sequence[Value], acc: Value, sums: Value, factors: Value
    ) -> Value:
        x_values, x_d, x_sums = x
        accumulated = []

        def amid(computed: Value) -> None:
            accumulated.append(self._accumulated(s, acc, s.after(sums, computed), factors))

        make = self._row_by_row if self.name in _ROW_BY_ROW else self._paired
        following = make(s, addresses, x_values, x_sums, amid)
        return *accumulated, following, self._factors(s, addresses, x_d)

    def _factors(self, s: Emitter, addresses: Sequence[Value], x_d: Value) -> Value:
        dx = s.load_scalar("f32", x_d)
        if not self.minima:
            return s.fmul(half_floats(s, addresses, self.facts.d_at), s.splat(f32x4, dx))
        words = s.gather_lanes(i32x4, [s.load_scalar("i32", address, self.facts.d_at) for address in addresses])
        return s.fmul(s.widen(f32x8, s.as_(f16x8, words)), s.splat(f32x8, dx))

    def _row_by_row(self, s: Emitter, addresses: Sequence[Value], x_values: Value, x_sums: Value, amid: Amid) -> Value:
        beside, shift = s.load(i16x16, x_sums), self.facts.offset.bit_length() - 1
        totals = []
        for row, address in enumerate(addresses):
            block = self.facts(s, address)
            total = None
            for group in range(8):
                products = s.pair_products_u8(block.values(group), s.load(i8x32, x_values, 32 * group))
                scaled = s.pair_products_i16(products, block.scale(group))
                total = scaled if total is None else s.add(total, scaled)
                if (row, group) == (1, 4):
                    amid(total)
            totals.append(s.sub(total, s.shl(s.pair_products_i16(block.scales, beside), shift)))
        fours = _added(s, _added(s, totals[0], totals[1], 1), _added(s, totals[2], totals[3], 1), 2)
        return s.add(s.low(fours), s.high(fours))

    def _paired(self, s: Emitter, addresses: Sequence[Value], x_values: Value, x_sums: Value, amid: Amid) -> Value:
        kind = PAIRED_BLOCKS[self.name]
        pairs = [kind(s, (addresses[row], addresses[row + 2])) for row in range(2)]
        beside = [s.as_(i16x16, _on_both_sides(s, x_sums, 16 * odd)) for odd in range(2)]  # even sub-blocks, odd ones
        if kind.halves_add:
            beside = [s.add(*beside)]
        by_sums = []
        for pair in pairs:
            those = pair.minima if self.minima else pair.scales
            by_sums.append(functools.reduce(s.add, [s.pair_products_i16(*both) for both in zip(those, beside)]))
        totals = self._paired_totals(s, pairs, x_values, amid)
        if self.minima:
            first, second = (_added(s, total, minima, 1) for total, minima in zip(totals, by_sums))
            return _added(s, first, second, 2)
        shift = self.facts.offset.bit_length() - 1
        first, second = (s.sub(total, s.shl(offset, shift)) for total, offset in zip(totals, by_sums))
        twos = _added(s, first, second, 1)
        fours = s.add(twos, s.lanes(twos, [2, 3, 0, 1, 6, 7, 4, 5]))
        return s.ashr(s.lanes(fours, [0, 1, 4, 5]), kind.scales_lifted)

    def _paired_totals(self, s: Emitter, pairs: Sequence[PairedBlocks], x_values: Value, amid: Amid) -> list[Value]:
        """i32x8 for each of two pairs of rows: four partial sums of scaled products of each row."""
        totals: list[dict[int, Value]] = [{} for _ in pairs]  # by lift
        for first in range(0, 8, 2):
            places = [(group, half) for half in range(2) for group in (first, first + 1)]
            x = {(group, half): _on_both_sides(s, x_values, 32 * group + 16 * half) for group, half in places}
            for pair, mine in zip(pairs, totals):
                products, lifts = {}, {}
                for group, half in places:
                    values, lifts[group] = pair.values(group, half)
                    products[group, half] = s.pair_products_u8(values, x[group, half])
                for group in (first, first + 1):
                    halves = [products[group, half] for half in range(2)]
                    for half, product in enumerate([s.add(*halves)] if pair.halves_add else halves):
                        scaled = s.pair_products_i16(product, pair.scale(group, half))
                        lift = lifts[group]
                        mine[lift] = s.add(mine[lift], scaled) if lift in mine else scaled
                if first == 0 and pair is pairs[-1]:
                    amid(mine[lifts[0]])
        return [_brought_down(s, mine) for mine in totals]


def _on_both_sides(s: Emitter, address: Value, at: int) -> Value:
    """i8x32: 16 bytes twice."""
    part = s.load(i8x16, address, at)
    return s.concat(part, part)


def _brought_down(s: Emitter, totals: dict[int, Value]) -> Value:
    """One sum of those that are 2 to their lift too great, and divisible by it."""
    lifts = sorted(totals, reverse=True)
    total = totals[lifts[0]]
    for above, lift in itertools.pairwise(lifts):
        total = s.add(s.ashr(total, above - lift), totals[lift])
    return total


def _added(s: Emitter, x: Value, y: Value, width: int) -> Value:
    """i32x8: in each 16 bytes the sum of the halves of x beside that of y, in turns `width` lanes wide."""
    places = [[lane + first + at for at in range(width)] for first in range(0, 2, width) for lane in (0, 8)]
    lower = [place for part in places for place in part]
    lower += [place + 4 for place in lower]
    return s.add(s.shuffle(x, y, lower), s.shuffle(x, y, [place + 2 for place in lower]))
