"""The reference executor with activations rounded as ggml rounds them before each product with quantised weights.

Owns a model of the error that any engine with 8-bit activations makes: it says how far two right engines may lie apart
(see oracle_kit/gates.py). Knows the activation formats, nothing of how integer kernels compute.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime import reference
from bloomery.runtime.executor import StepRows
from bloomery.runtime.program import Attention, HeadMatMul, MatMul, Op, RoutedExperts
from bloomery.runtime.reference import ReferenceExecutor
from bloomery.runtime.reference_ops import Floats, head_matmul, softmax, swiglu

# What ggml's CPU backend rounds activations to, by the quant type of the weight (ggml-cpu.c, type_traits_cpu)
_BLOCKS_OF_256 = {f"Q{bits}_K" for bits in range(2, 7)} | {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"}
_BLOCKS_OF_32 = {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"}


def rounded(x: Floats, weight_type: str) -> Floats:
    """x (..., n) as a product with weights of this type sees it."""
    if weight_type in _BLOCKS_OF_256:
        return _q8_k(x)
    if weight_type in _BLOCKS_OF_32:
        return _q8_0(x)
    if weight_type == "F16":
        return _half(x)
    if weight_type == "BF16":
        return _brain(x)
    assert weight_type == "F32", weight_type
    return x


def _q8_k(x: Floats) -> Floats:
    """Blocks of 256, one float32 scale: the element of greatest magnitude becomes -127."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // 256, 256)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(peak == 0, np.float32(0), np.float32(-127) / peak)
        scale = np.where(peak == 0, np.float32(0), np.float32(1) / inverse)
    whole = np.minimum(np.rint(inverse * blocks), 127)
    return (whole.astype(x.dtype) * scale.astype(x.dtype)).reshape(x.shape)


def _q8_0(x: Floats) -> Floats:
    """Blocks of 32, scale greatest magnitude / 127, kept as float16."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    peak = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(peak == 0, np.float32(0), np.float32(127) / peak)
    scale = (peak / np.float32(127)).astype(np.float16)
    return (np.rint(blocks * inverse).astype(x.dtype) * scale.astype(x.dtype)).reshape(x.shape)


def _half_attention(q: Floats, keys: Floats, values: Floats, positions: NDArray[np.int32], scale: float) -> Floats:
    """Attention over an F16 cache: both products have an F16 operand, so queries and probabilities become F16 too."""
    rows, count, width = q.shape
    groups = keys.shape[1]
    grouped = _half(q).reshape(rows, groups, count // groups, width)
    scores = np.einsum("rgjk,pgk->rgjp", grouped, keys, optimize=True) * q.dtype.type(scale)
    hidden = np.arange(keys.shape[0])[None, :] > positions[:, None]
    probabilities = softmax(np.where(hidden[:, None, None, :], q.dtype.type(-np.inf), scores))
    mixed = np.einsum("rgjp,pgv->rgjv", _half(probabilities), values, optimize=True)
    return np.asarray(mixed.reshape(rows, count, values.shape[2]))


def _brain(x: Floats) -> Floats:
    """To bfloat16, to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    whole: Floats = kept.view(np.float32).astype(x.dtype)
    return whole


def _half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(x.dtype)


class RoundingExecutor(ReferenceExecutor):
    """ReferenceExecutor whose products with quantised weights (and with an F16 cache) see rounded activations."""

    def _type(self, name: str) -> str:
        return self.program.weights[name].quant_type.name

    def _execute(self, op: Op, rows: StepRows) -> None:
        if isinstance(op, MatMul):
            self._buffers.allocate(op, rows)
            x = self._buffers.flat(op.x)
            for out, weight, bias in zip(op.outs, op.weights, op.biases, strict=True):
                product = rounded(x, self._type(weight)) @ self._weights[weight].T
                self._buffers.write(out, product if bias is None else product + self._weights[bias])
        elif isinstance(op, HeadMatMul):
            self._buffers.allocate(op, rows)
            x = rounded(self.read(op.x), self._type(op.weight))
            self._buffers.write(op.out, head_matmul(x, self._weights[op.weight]))
        elif isinstance(op, Attention) and self._states[op.keys].dtype == np.float16:
            with mock.patch.object(reference, "attention", _half_attention):
                super()._execute(op, rows)
        elif isinstance(op, RoutedExperts):
            self._buffers.allocate(op, rows)
            x, ids, mix = map(self._buffers.flat, (op.x, op.ids, op.mix))
            self._buffers.write(op.out, self._experts(op, x, ids, mix))
        else:
            super()._execute(op, rows)

    def _experts(self, op: RoutedExperts, x: Floats, ids: NDArray[np.int32], mix: Floats) -> NDArray[Any]:
        parts = np.empty((*ids.shape, x.shape[1]), x.dtype)
        for e in np.unique(ids):
            at = np.nonzero(ids == e)
            gate, up, down = (self._weights.expert(name, int(e)) for name in (op.gate, op.up, op.down))
            taken = x[at[0]]
            opened = rounded(taken, self._type(op.gate)) @ gate.T
            hidden = swiglu(opened, rounded(taken, self._type(op.up)) @ up.T, op.limit)
            parts[at] = rounded(hidden, self._type(op.down)) @ down.T
        out = np.zeros_like(x)
        for rank in range(ids.shape[1]):
            out += mix[:, rank, None] * parts[:, rank]
        return out
