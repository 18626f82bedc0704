"""Products: which quant types have kernels, the forms in which activations meet them, and the weights of one launch.

Owns what `matmul.cu` and its callers agree on; knows no op's launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bloomery.runtime.errors import PlanError
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.ops_deepseek4 import HyperMix, SoftplusRouter, WindowAttention
from bloomery.runtime.program import Op, Program, RmsNorm, Router, op_weights
from bloomery.runtime.quant_types import QuantType

SUPER_TYPES: Final = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_XXS", "IQ4_XS")
SMALL_TYPES: Final = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")
FLOAT_TYPES: Final = ("F32", "F16", "BF16")
WEIGHT_TYPES: Final = (*FLOAT_TYPES, *SMALL_TYPES, *SUPER_TYPES)

UNIT_TYPES: Final = ("Q3_K", "Q4_K", "Q6_K")
"""Types of which a warp has some rows at a time; see units.cuh."""
_STAGED: Final = ("Q3_K",)
"""Those that come by way of shared memory."""
_BLOCKS_EACH: Final = {"Q3_K": 7, "Q4_K": 5, "Q6_K": 4}
_UNIT: Final = {"Q3_K": 128, "Q4_K": 64, "Q6_K": 64}
_BLOCK: Final = 256

JOBS: Final = 4
_JOB_WORDS: Final = 5
USE_HOST: Final = "run it with --plan cpu"


@dataclass(frozen=True)
class Activations:
    """Where the input of a product lies in the form that its weights want; `stride` in bytes, of both arrays.

    A head of n elements takes n * value_bytes bytes of `values` and n // 32 * 8 of `scales`.
    """

    values: int
    scales: int
    stride: int
    value_bytes: int


@dataclass(frozen=True)
class Job:
    """One weight of a product: its address, bias address or 0, output address, outputs, output stride in floats."""

    weights: int
    bias: int
    out: int
    outputs: int
    out_stride: int


def activation_form(quant_type: str) -> str:
    """Form of the activations that meet weights of this type: "F32", "F16", "BF16", "Q8_0", "Q8_1" or "Q8_K"."""
    if quant_type in FLOAT_TYPES:
        return quant_type
    if quant_type in SUPER_TYPES:
        return "Q8_K"
    return "Q8_1" if quant_type in ("Q4_1", "Q5_1") else "Q8_0"


def check_types(program: Program) -> None:
    """Raises PlanError naming tensor and type where there is no kernel."""
    for op in program.ops:
        for name in op_weights(op):
            _check_type(program.weights[name], op)


def _check_type(tensor: Tensor, op: Op) -> None:
    name = tensor.quant_type.name
    expected: tuple[str, ...] = WEIGHT_TYPES
    if isinstance(op, RmsNorm | Router | HyperMix | WindowAttention | SoftplusRouter):
        expected = ("I32",) if isinstance(op, SoftplusRouter) and tensor.name == op.table else ("F32",)
    if name not in expected:
        raise PlanError(
            f"{tensor.path}: tensor {tensor.name} of op {op.name} has type {name}, for which the card executor has no"
            f" kernel (expected {', '.join(expected)})",
            USE_HOST,
        )


def job_words(jobs: list[Job]) -> tuple[int, ...]:
    words = tuple(w for job in jobs for w in (job.weights, job.bias, job.out, job.outputs, job.out_stride))
    return words + (0,) * (JOBS * _JOB_WORDS - len(words))


def ring_bytes(kind: QuantType, width: int) -> int:
    """Shared memory of a warp that takes rows of so many elements of this quantised type, see products.cuh and
    staged.cuh."""
    if kind.name in _STAGED:
        rows = rows_of_warp(kind.name, width)
        taken = kind.row_bytes(32 // rows * _UNIT[kind.name])
        return 2 * rows * (aligned(taken + 14) + (32 if rows in (2, 8) else 16))
    if kind.name in UNIT_TYPES:
        return 0
    return 4 * 2 * (aligned(1024 // kind.block_elements * kind.block_bytes) + 32)


def rows_of_warp(kind: str, width: int) -> int:
    """Weight rows of so many elements that a warp has at a time: 2 to the power of `row_bits` of units.cuh,
    `rows_together` of products.cuh."""
    if kind not in UNIT_TYPES:
        return 1 if kind in FLOAT_TYPES else 2
    units, least = width // _UNIT[kind], _BLOCK // _UNIT[kind]
    lanes = 32
    while lanes > least:
        taken = blocks(units, lanes) * lanes
        if units > lanes and 8 * taken <= (9 if lanes > 2 * least else 10) * units:
            break
        lanes //= 2
    return 32 // lanes


def blocks_each(kind: str) -> int:
    """Blocks of a product that a multiprocessor holds; more would wait for their turn."""
    return _BLOCKS_EACH.get(kind, 7)


def resident(kind: str) -> int:
    """Blocks of 512 threads that a multiprocessor holds: RESIDENT of units.cuh."""
    return 1 if kind == "Q6_K" else 2


def most_openers(kind: str) -> int:
    """Warps that a block of open_experts may have: OPENERS of units.cuh."""
    return 12 if kind == "Q3_K" else 16


def blocks(elements: int, each: int) -> int:
    return -(-elements // each)


def aligned(nbytes: int) -> int:
    return blocks(nbytes, 16) * 16
