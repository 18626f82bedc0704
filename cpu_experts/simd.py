"""The SIMD vocabulary of the host kernels: vector values in Numba, and LLVM emitted for them by small Python functions.

Owns vector types, the `emits` decorator and the vocabulary (`Emitter`). It knows nothing of quant types or ops.

A kernel's loops are ordinary Numba code over integer addresses. Where it needs vectors it calls a function made by
`emits`: plain Python that runs once, at compile time, and writes LLVM instructions through an `Emitter` (Python loops
in it are unrolled code). That keeps integer lanes at their own width (Numba widens to 64 bits) and leaves nothing to
the optimiser: multiply-adds are fused exactly where `fma` is written, no float operation may be reassociated.

AVX2 with FMA and F16C is the floor; the words that need more say so (`isa` decides who may use them).
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from bloomery.cpu_experts.vectors import BYTES, ELEMENTS
from bloomery.cpu_experts.vectors import Vector as Vector
from bloomery.cpu_experts.vectors import f16x4 as f16x4
from bloomery.cpu_experts.vectors import f16x8 as f16x8
from bloomery.cpu_experts.vectors import f32x4 as f32x4
from bloomery.cpu_experts.vectors import f32x8 as f32x8
from bloomery.cpu_experts.vectors import f64x4 as f64x4
from bloomery.cpu_experts.vectors import f64x8 as f64x8
from bloomery.cpu_experts.vectors import i8x16 as i8x16
from bloomery.cpu_experts.vectors import i8x32 as i8x32
from bloomery.cpu_experts.vectors import i8x64 as i8x64
from bloomery.cpu_experts.vectors import i16x4 as i16x4
from bloomery.cpu_experts.vectors import i16x8 as i16x8
from bloomery.cpu_experts.vectors import i16x16 as i16x16
from bloomery.cpu_experts.vectors import i16x32 as i16x32
from bloomery.cpu_experts.vectors import i32x4 as i32x4
from bloomery.cpu_experts.vectors import i32x8 as i32x8
from bloomery.cpu_experts.vectors import i32x16 as i32x16
from bloomery.cpu_experts.vectors import vector as vector

Value: TypeAlias = Any  # an llvmlite ir.Value, or a Numba value inside a kernel: neither package is typed

llvm.initialize_native_asmparser()  # Numba does not, and inline assembly aborts the process without it

_codegen: Any = cgutils
_I32: Final = ELEMENTS["i32"]
_I64: Final = ELEMENTS["i64"]
LLVM_VERSION: Final[int] = llvm.llvm_version_info[0]


class Emitter:
    """Writes LLVM instructions at the current place of a kernel. Operands are IR values; addresses are i64.

    Lane numbers in shuffles count the lanes of the first operand, then those of the second.
    """

    def __init__(self, builder: Any) -> None:
        self.b = builder

    # ---- constants
    def splat_constant(self, kind: Vector, value: float) -> Value:
        return self.constant(kind, [value] * kind.lanes)

    def constant(self, kind: Vector, values: Sequence[float]) -> Value:
        assert len(values) == kind.lanes
        return ir.Constant(kind.ir, [ir.Constant(kind.ir.element, value) for value in values])

    def bytes32(self, values: Sequence[int]) -> Value:
        return self.constant(i8x32, values)

    def zero(self, kind: Vector) -> Value:
        return self.splat_constant(kind, 0)

    # ---- memory
    def pointer(self, address: Value, offset: int, pointee: Any) -> Value:
        if offset:
            address = self.b.add(address, _I64(offset))
        return self.b.inttoptr(address, pointee.as_pointer())

    def load(self, kind: Vector, address: Value, offset: int = 0) -> Value:
        return self.b.load(self.pointer(address, offset, kind.ir), align=1)

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        self.b.store(value, self.pointer(address, offset, value.type), align=1)

    def _first(self, kind: Vector, count: Value) -> Value:
        """Mask of the lanes below `count` (i64)."""
        numbers = self.constant(vector("i64", kind.lanes), range(kind.lanes))
        return self.b.icmp_signed("<", numbers, self.splat(vector("i64", kind.lanes), count))

    def load_first(self, kind: Vector, address: Value, count: Value) -> Value:
        """The first `count` lanes (f32 or i32) from memory, zeros above; touches nothing past them."""
        arguments = [self.pointer(address, 0, kind.ir), self._first(kind, count), self.zero(kind)]
        if LLVM_VERSION < 22:
            arguments.insert(1, _I32(1))
        return self.call(f"llvm.masked.load.v{kind.lanes}{kind.element}.p0", kind.ir, arguments)

    def store_first(self, kind: Vector, value: Value, address: Value, count: Value) -> None:
        """Writes the first `count` lanes (f32 or i32)."""
        arguments = [value, self.pointer(address, 0, kind.ir), self._first(kind, count)]
        if LLVM_VERSION < 22:
            arguments.insert(2, _I32(1))
        self.call(f"llvm.masked.store.v{kind.lanes}{kind.element}.p0", ir.VoidType(), arguments)

    def first_or(self, value: Value, other: float, count: Value) -> Value:
        """The first `count` lanes of f32x8, `other` above."""
        return self.b.select(self._first(f32x8, count), value, self.splat_constant(f32x8, other))

    def load_scalar(self, element: str, address: Value, offset: int = 0) -> Value:
        return self.b.load(self.pointer(address, offset, ELEMENTS[element]), align=1)

    def prefetch(self, address: Value, offset: int = 0, level: int = 1) -> None:
        """Fetches a line into the cache of a level, 1 or 2."""
        byte = self.pointer(address, offset, ELEMENTS["i8"])
        self.call("llvm.prefetch.p0", ir.VoidType(), [byte, _I32(0), _I32(4 - level), _I32(1)])

    def call(self, name: str, result: Any, arguments: Sequence[Value]) -> Value:
        signature = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.b.call(_codegen.get_or_insert_function(self.b.module, signature, name), arguments)

    # ---- control
    def loop(
        self, count: Value, carried: Sequence[Value], body: Callable[[Value, list[Value]], Sequence[Value]]
    ) -> list[Value]:
        """for index in 0..count-1: carried = body(index, carried); count and index are i64. The last `carried`."""
        b = self.b
        before = b.block
        head, inside, after = (b.append_basic_block(name) for name in ("loop", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(_I64)
        index.add_incoming(_I64(0), before)
        values = [b.phi(value.type) for value in carried]
        for value, first in zip(values, carried):
            value.add_incoming(first, before)
        b.cbranch(b.icmp_signed("<", index, count), inside, after)
        b.position_at_end(inside)
        for value, following in zip(values, body(index, values)):
            value.add_incoming(following, b.block)
        index.add_incoming(b.add(index, _I64(1)), b.block)
        b.branch(head)
        b.position_at_end(after)
        return values

    # ---- lanes
    def splat(self, kind: Vector, scalar: Value) -> Value:
        undefined = ir.Constant(kind.ir, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, _I32(0))
        return self.shuffle(first, undefined, [0] * kind.lanes)

    def gather_lanes(self, kind: Vector, scalars: Sequence[Value]) -> Value:
        """A vector made of scalars."""
        result = ir.Constant(kind.ir, ir.Undefined)
        for lane, scalar in enumerate(scalars):
            result = self.b.insert_element(result, scalar, _I32(lane))
        return result

    def lane(self, value: Value, index: int) -> Value:
        return self.b.extract_element(value, _I32(index))

    def shuffle(self, first: Value, second: Value, lanes: Sequence[int]) -> Value:
        mask = ir.Constant(ir.VectorType(_I32, len(lanes)), [_I32(lane) for lane in lanes])
        return self.b.shuffle_vector(first, second, mask)

    def lanes(self, value: Value, chosen: Sequence[int]) -> Value:
        return self.shuffle(value, value, chosen)

    def low(self, value: Value) -> Value:
        return self.lanes(value, range(value.type.count // 2))

    def high(self, value: Value) -> Value:
        return self.lanes(value, range(value.type.count // 2, value.type.count))

    def concat(self, first: Value, second: Value) -> Value:
        return self.shuffle(first, second, range(2 * first.type.count))

    def as_(self, kind: Vector, value: Value) -> Value:
        """The same bits seen as another type."""
        return self.b.bitcast(value, kind.ir)

    def opaque(self, value: Value) -> Value:
        """The same value, of which the optimiser knows nothing."""
        register = "v" if isinstance(value.type, ir.VectorType) else "r"
        return self.b.asm(ir.FunctionType(value.type, [value.type]), "", f"={register},0", [value], False)

    def after(self, value: Value, *others: Value) -> Value:
        """The same vector, which the code that uses it can have only once `others` have been computed."""
        kinds = [value.type, *(other.type for other in others)]
        constraints = ",".join(["=v", "0", *["v"] * len(others)])
        return self.b.asm(ir.FunctionType(value.type, kinds), "", constraints, [value, *others], False)

    def table(self, table: Value, indices: Value) -> Value:
        """vpshufb: byte lookup inside each 16 bytes; a set top bit gives 0. 64 bytes need AVX-512."""
        if table.type.count == 64:
            return self.call("llvm.x86.avx512.pshuf.b.512", i8x64.ir, [table, indices])
        return self.call("llvm.x86.avx2.pshuf.b", i8x32.ir, [table, indices])

    # ---- integers
    def and_(self, x: Value, y: Value) -> Value:
        return self.b.and_(x, y)

    def or_(self, x: Value, y: Value) -> Value:
        return self.b.or_(x, y)

    def xor(self, x: Value, y: Value) -> Value:
        return self.b.xor(x, y)

    def add(self, x: Value, y: Value) -> Value:
        return self.b.add(x, y)

    def sub(self, x: Value, y: Value) -> Value:
        return self.b.sub(x, y)

    def mul(self, x: Value, y: Value) -> Value:
        return self.b.mul(x, y)

    def _amounts(self, value: Value, by: int | Sequence[int]) -> Value:
        amounts = [by] * value.type.count if isinstance(by, int) else by
        return ir.Constant(value.type, [value.type.element(amount) for amount in amounts])

    def shl(self, value: Value, by: int | Sequence[int]) -> Value:
        return self.b.shl(value, self._amounts(value, by))

    def lshr(self, value: Value, by: int | Sequence[int]) -> Value:
        return self.b.lshr(value, self._amounts(value, by))

    def ashr(self, value: Value, by: int | Sequence[int]) -> Value:
        return self.b.ashr(value, self._amounts(value, by))

    def shift_out(self, value: Value, starts: Sequence[int]) -> Value:
        """vpmultishiftqb (AVX-512-VBMI) of i8x64: byte i is 8 bits of its 8 bytes from bit starts[i] on, cyclic."""
        return self.call("llvm.x86.avx512.pmultishift.qb.512", i8x64.ir, [self.constant(i8x64, starts), value])

    def bytes_shr(self, value: Value, by: int, mask: int) -> Value:
        """(byte >> by) & mask for every byte; AVX2 shifts words, so `mask` must fit the bits that stay of a byte."""
        assert mask < 256 >> by
        words = self.as_(i16x16, value)
        shifted = self.as_(i8x32, self.lshr(words, by)) if by else value
        return self.and_(shifted, self.splat_constant(i8x32, mask))

    def bytes_shl(self, value: Value, by: int, mask: int) -> Value:
        """(byte << by) & mask for every byte; `mask` must lie above the shift."""
        assert mask % (1 << by) == 0 and mask < 256
        words = self.as_(i16x16, value)
        shifted = self.as_(i8x32, self.shl(words, by)) if by else value
        return self.and_(shifted, self.splat_constant(i8x32, mask))

    def zext(self, kind: Vector, value: Value) -> Value:
        return self.b.zext(value, kind.ir)

    def sext(self, kind: Vector, value: Value) -> Value:
        return self.b.sext(value, kind.ir)

    def trunc(self, kind: Vector, value: Value) -> Value:
        return self.b.trunc(value, kind.ir)

    def pair_products_u8(self, unsigned: Value, signed: Value) -> Value:
        """vpmaddubsw: i16[j] = u8[2j]*s8[2j] + u8[2j+1]*s8[2j+1], saturating; callers keep |sum| < 2^15. 64 bytes need
        AVX-512."""
        if unsigned.type.count == 64:
            return self.call("llvm.x86.avx512.pmaddubs.w.512", i16x32.ir, [unsigned, signed])
        return self.call("llvm.x86.avx2.pmadd.ub.sw", i16x16.ir, [unsigned, signed])

    def pair_products_i16(self, x: Value, y: Value) -> Value:
        """vpmaddwd: i32[j] = x[2j]*y[2j] + x[2j+1]*y[2j+1]."""
        lanes = x.type.count // 2
        name = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}[lanes]
        return self.call(f"llvm.x86.{name}", vector("i32", lanes).ir, [x, y])

    def pack_i16(self, x: Value, y: Value) -> Value:
        """vpackssdw of i32x16 (AVX-512): in each 16 bytes the four lanes of x, then those of y, saturated to i16."""
        return self.call("llvm.x86.avx512.packssdw.512", i16x32.ir, [x, y])

    def add_products_u8(self, total: Value, unsigned: Value, signed: Value) -> Value:
        """vpdpbusd (AVX-512-VNNI): total[j] + the sum over i < 4 of u8[4j+i] * s8[4j+i]; 8 or 16 lanes."""
        return self._vnni("vpdpbusd", "i8", total, unsigned, signed)

    def add_products_i16(self, total: Value, x: Value, y: Value) -> Value:
        """vpdpwssd (AVX-512-VNNI): total[j] + x[2j]*y[2j] + x[2j+1]*y[2j+1]."""
        return self._vnni("vpdpwssd", "i16", total, x, y)

    def _vnni(self, name: str, element: str, total: Value, x: Value, y: Value) -> Value:
        bits = 32 * total.type.count
        operand = vector(element, bits // (8 * BYTES[element])).ir if LLVM_VERSION >= 22 else total.type
        operands = [total, self.b.bitcast(x, operand), self.b.bitcast(y, operand)]
        return self.call(f"llvm.x86.avx512.{name}.{bits}", total.type, operands)

    def with_sign(self, value: Value, sign: Value) -> Value:
        """vpsignb: value, 0 or -value as `sign` is above, at or below zero."""
        return self.call("llvm.x86.avx2.psign.b", i8x32.ir, [value, sign])

    def sum4(self, w: Value, x: Value, y: Value, z: Value) -> Value:
        """i32x4 of the lane sums of four i32x8 (or i32x4) vectors: a transposed reduction."""
        wide = w.type.count == 8
        even = [0, 2, 8, 10, 4, 6, 12, 14] if wide else [0, 2, 4, 6]
        odd = [lane + 1 for lane in even]

        def pairs(a: Value, b: Value) -> Value:
            return self.add(self.shuffle(a, b, even), self.shuffle(a, b, odd))

        total = pairs(pairs(w, x), pairs(y, z))
        return self.add(self.low(total), self.high(total)) if wide else total

    # ---- floats
    def fadd(self, x: Value, y: Value) -> Value:
        return self.b.fadd(x, y)

    def fsub(self, x: Value, y: Value) -> Value:
        return self.b.fsub(x, y)

    def fmul(self, x: Value, y: Value) -> Value:
        return self.b.fmul(x, y)

    def fdiv(self, x: Value, y: Value) -> Value:
        return self.b.fdiv(x, y)

    def fneg(self, x: Value) -> Value:
        return self.b.fneg(x)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """x*y + z with one rounding."""
        return self.call(f"llvm.fma.{_suffix(x.type)}", x.type, [x, y, z])

    def fabs(self, x: Value) -> Value:
        return self.call(f"llvm.fabs.{_suffix(x.type)}", x.type, [x])

    def fmax(self, x: Value, y: Value) -> Value:
        """x where x > y, else y (so y where either is NaN)."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def fmin(self, x: Value, y: Value) -> Value:
        """x where x < y, else y (so y where either is NaN)."""
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def to_float(self, kind: Vector, value: Value) -> Value:
        return self.b.sitofp(value, kind.ir)

    def widen(self, kind: Vector, value: Value) -> Value:
        return self.b.fpext(value, kind.ir)

    def narrow(self, kind: Vector, value: Value) -> Value:
        """To a smaller float type, to nearest, ties to even."""
        return self.b.fptrunc(value, kind.ir)

    def round_to_i32(self, value: Value) -> Value:
        """vcvtps2dq: f32x8 to i32x8, to nearest, ties to even."""
        return self.call("llvm.x86.avx.cvt.ps2dq.256", i32x8.ir, [value])

    def float_sum4(self, w: Value, x: Value, y: Value, z: Value) -> Value:
        """f32x4 of the lane sums of four f32x8 vectors, each ((0+1)+(2+3)) + ((4+5)+(6+7))."""
        even = [0, 2, 8, 10, 4, 6, 12, 14]
        odd = [lane + 1 for lane in even]

        def pairs(a: Value, b: Value) -> Value:
            return self.fadd(self.shuffle(a, b, even), self.shuffle(a, b, odd))

        total = pairs(pairs(w, x), pairs(y, z))
        return self.fadd(self.low(total), self.high(total))

    def float_sum(self, value: Value) -> Value:
        """Scalar lane sum of f32x8 or f64x8 in the order of `float_sum4`."""
        pairs = [self.fadd(self.lane(value, index), self.lane(value, index + 1)) for index in range(0, 8, 2)]
        return self.fadd(self.fadd(pairs[0], pairs[1]), self.fadd(pairs[2], pairs[3]))

    def exp(self, x: Value, at_most_zero: bool = False) -> Value:
        """e^x of f32 lanes within 1 unit in the last place (measured: tests); 0 below -87.33, infinity above 88.72.

        x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 split in two so that r is exact to the last bit; a polynomial of
        degree 6 for e^r (minimax relative error 3.1e-9); 2^n applied in two halves so that neither overflows early.
        Where no x is above 0, n is at least -126 and one will do: the same numbers by fewer steps.
        """
        f, i = (vector(element, x.type.count) for element in ("f32", "i32"))
        magic = self.splat_constant(f, 12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
        shifted = self.fma(x, self.splat_constant(f, _f32(1.4426950408889634)), magic)
        n = self.fsub(shifted, magic)
        r = self.fma(n, self.splat_constant(f, -_f32(0.693145751953125)), x)
        r = self.fma(n, self.splat_constant(f, -_f32(1.428606765330187e-06)), r)
        result = self.splat_constant(f, _f32(EXP_COEFFICIENTS[-1]))
        for coefficient in reversed(EXP_COEFFICIENTS[:-1]):
            result = self.fma(result, r, self.splat_constant(f, _f32(coefficient)))
        power = self.sub(self.as_(i, shifted), self.as_(i, magic))
        half = self.b.ashr(power, self.splat_constant(i, 1))
        for exponent in (power,) if at_most_zero else (half, self.sub(power, half)):
            biased = self.add(exponent, self.splat_constant(i, 127))
            result = self.fmul(result, self.as_(f, self.shl(biased, 23)))
        below = self.b.fcmp_ordered("<", x, self.splat_constant(f, _f32(-87.33)))
        above = self.b.fcmp_ordered(">", x, self.splat_constant(f, _f32(88.7228)))
        result = self.b.select(below, self.zero(f), result)
        if at_most_zero:  # a NaN has stayed one
            return result
        result = self.b.select(above, self.splat_constant(f, float("inf")), result)
        return self.b.select(self.b.fcmp_unordered("uno", x, x), x, result)

    def silu(self, x: Value) -> Value:
        """x / (1 + e^-x) of f32x8."""
        one = self.splat_constant(f32x8, 1.0)
        return self.fdiv(x, self.fadd(one, self.exp(self.fneg(x))))


# e^r on |r| <= 0.34675: minimax in relative error with constant and linear term fixed at 1 (Remez in float64).
EXP_COEFFICIENTS: Final = (
    1.0,
    1.0,
    4.99999934e-01,
    1.66665204e-01,
    4.16683908e-02,
    8.36874574e-03,
    1.38145388e-03,
)


def _f32(value: float) -> float:
    """The nearest f32, as the Python float that LLVM's constant parser wants."""
    single: float = struct.unpack("f", struct.pack("f", value))[0]
    return single


def _suffix(kind: Any) -> str:
    """How LLVM spells a float type in an intrinsic's name."""
    names = {"half": "f16", "float": "f32", "double": "f64"}
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{names[str(kind.element)]}"
    return names[str(kind)]


def emits(result: Any, *arguments: Any) -> Callable[[Callable[..., Value]], Any]:
    """Makes a Python function `f(emitter, *values) -> IR value | None` callable from Numba code.

    `result` and `arguments` are Numba types; integers and floats passed are converted to them.
    """

    def wrap(function: Callable[..., Value]) -> Any:
        signature = result(*arguments)

        def generate(context: Any, builder: Any, _signature: Any, values: Sequence[Value]) -> Value:
            returned = function(Emitter(builder), *values)
            if returned is None:
                return context.get_dummy_value()
            return context.make_tuple(builder, result, returned) if isinstance(returned, tuple) else returned

        names = [f"a{index}" for index in range(len(arguments))]
        namespace: dict[str, Any] = {"answer": (signature, generate)}
        exec(f"def typed(typing_context, {', '.join(names)}):\n    return answer", namespace)  # fixed arity for Numba
        typed = namespace["typed"]
        typed.__name__ = typed.__qualname__ = function.__name__
        typed.__doc__ = inspect.getdoc(function)
        return intrinsic(typed)

    return wrap


def pair_of(kind: Any) -> Any:
    """Numba type of a tuple of two values of a type."""
    make: Any = types.UniTuple
    return make(kind, 2)


def inlined(function: Callable[..., Any]) -> Any:
    """A Numba function that is always inlined into its caller by LLVM."""
    return njit(forceinline=True, error_model="numpy")(function)


def compiled(function: Callable[..., Any]) -> Any:
    """A Numba function that stays a call of its own."""
    return njit(error_model="numpy")(function)


# ---- scalars at addresses, for the loops of kernels
def _scalar_load(element: str, numba_type: Any) -> Any:
    @emits(numba_type, types.int64)
    def load(s: Emitter, address: Value) -> Value:
        return s.load_scalar(element, address)

    return load


load_i64 = _scalar_load("i64", types.int64)
load_i32 = _scalar_load("i32", types.int32)
load_f32 = _scalar_load("f32", types.float32)
load_f64 = _scalar_load("f64", types.float64)


@emits(types.int64, types.int64, types.int64)
def argument(s: Emitter, args: Value, index: Value) -> Value:
    """The int64 at args[index]."""
    return s.load_scalar("i64", s.add(args, s.b.shl(index, _I64(3))))


@emits(types.float64, types.int64, types.int64)
def float_argument(s: Emitter, args: Value, index: Value) -> Value:
    """The float64 whose bits lie at args[index]."""
    return s.load_scalar("f64", s.add(args, s.b.shl(index, _I64(3))))


@emits(types.void, types.int64, types.float32)
def store_f32(s: Emitter, address: Value, value: Value) -> None:
    s.store(value, address)


@emits(types.void, types.int64, types.int32)
def store_i32(s: Emitter, address: Value, value: Value) -> None:
    s.store(value, address)
