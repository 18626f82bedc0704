"""Dots of four weight rows of K types with one row of activations (AVX2), in `block_dots`' order, sums carried on.

Owns how integer sums are taken there, and when they meet the accumulator. The float steps are the canonical ones.

A core (Zen 3) has less than one block of four rows in flight, so the chain of additions, conversion and fused
multiply-adds at the end of a block would leave it idle. The sums of a block are therefore carried into the next one and
meet the accumulator amid its products, where there is other work to do.

Where two rows share a register (`paired_formats`), rows 0 and 2 do, and rows 1 and 3: as sums are added in pairs, they
end up in the order of the rows.
"""

from __future__ import annotations

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
_EVEN: Final = (0, 2, 4, 6)
_ODD: Final = (1, 3, 5, 7)

Amid = Callable[[Value], None]
"""Called once amid the products, with a vector that has been computed by then."""


def with_carried_sums(name: str) -> bool:
    """Whether `CarriedDots` knows the type and this variant gains by it."""
    return name in PAIRED_BLOCKS and not at_least(AVX512VNNI)


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
        self.facts, self.kind = SUPER_BLOCKS[name], PAIRED_BLOCKS[name]
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

        make = self._paired if self.kind.halves_add else self._row_by_row
        pairs = [self.kind(s, (addresses[row], addresses[row + 2])) for row in range(2)]
        following = make(s, pairs, x_values, x_sums, amid)
        return *accumulated, following, self._factors(s, addresses, x_d)

    def _factors(self, s: Emitter, addresses: Sequence[Value], x_d: Value) -> Value:
        dx = s.load_scalar("f32", x_d)
        if not self.minima:
            return s.fmul(half_floats(s, addresses, self.facts.d_at), s.splat(f32x4, dx))
        words = s.gather_lanes(i32x4, [s.load_scalar("i32", address, self.facts.d_at) for address in addresses])
        return s.fmul(s.widen(f32x8, s.as_(f16x8, words)), s.splat(f32x8, dx))

    def _row_by_row(
        self, s: Emitter, pairs: Sequence[PairedBlocks], x_values: Value, x_sums: Value, amid: Amid
    ) -> Value:
        beside = s.load(i16x16, x_sums)
        totals, by_sums = [], []
        for row in range(4):
            pair, second = pairs[row % 2], row // 2
            block = pair.one(second)
            # LLVM would keep activations from one row to the next, in the frame: as operands they cost nothing
            x = s.opaque(x_values)
            mine: dict[int, Value] = {}
            for group in range(8):
                values, lift = block.values(group)
                products = s.pair_products_u8(values, s.load(i8x32, x, 32 * group))
                _add(s, mine, lift, s.pair_products_i16(products, block.scale(group)))
                if (row, group) == (1, 4):
                    amid(mine[lift])
            total = _brought_down(s, mine)
            if self.minima:
                by_sums.append(s.pair_products_i16(pair.of_row(pair.minima, second), beside))
            else:
                by_scales = s.pair_products_i16(block.scales[0], beside)
                total = s.sub(total, s.shl(by_scales, self.facts.offset.bit_length() - 1))
            totals.append(total)
        if not self.minima:
            fours = _added(s, _added(s, totals[0], totals[1], 1), _added(s, totals[2], totals[3], 1), 2)
            return s.add(s.low(fours), s.high(fours))
        twos = [_added(s, total, minima, 1) for total, minima in zip(totals, by_sums)]
        lower, upper = (_added(s, twos[row], twos[row + 1], 2) for row in (0, 2))
        return s.add(s.concat(s.low(lower), s.low(upper)), s.concat(s.high(lower), s.high(upper)))

    def _paired(self, s: Emitter, pairs: Sequence[PairedBlocks], x_values: Value, x_sums: Value, amid: Amid) -> Value:
        beside = s.as_(i16x16, s.add(*(s.as_(i16x16, _on_both_sides(s, x_sums, 16 * odd)) for odd in range(2))))
        by_sums = [s.pair_products_i16(pair.minima[0], beside) for pair in pairs]
        totals: list[dict[int, Value]] = [{} for _ in pairs]
        for first in range(0, 8, 2):
            groups = (first, first + 1)
            x = {
                (group, half): _on_both_sides(s, x_values, 32 * group + 16 * half)
                for half in range(2)
                for group in groups
            }
            for pair, mine in zip(pairs, totals):
                products: dict[int, Value] = {}
                lifts = {}
                for half in range(2):
                    for group in groups:
                        values, lifts[group] = pair.values(group, half)
                        product = s.pair_products_u8(values, x[group, half])
                        products[group] = s.add(products[group], product) if half else product
                for group in groups:
                    _add(s, mine, lifts[group], s.pair_products_i16(products[group], pair.scale(group)))
                if first == 0 and pair is pairs[-1]:
                    amid(mine[0])
        first, second = (_added(s, _brought_down(s, mine), minima, 1) for mine, minima in zip(totals, by_sums))
        return _added(s, first, second, 2)


def _add(s: Emitter, totals: dict[int, Value], lift: int, scaled: Value) -> None:
    totals[lift] = s.add(totals[lift], scaled) if lift in totals else scaled


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
