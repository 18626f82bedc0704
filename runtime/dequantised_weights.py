"""Weights of a program as float arrays, dequantised when first used, in a bounded number of bytes.

Owns what the reference executor holds of a model; the formats are `quant_types`'.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bloomery.runtime.program import Program
from bloomery.runtime.reference_ops import Floats


class DequantisedWeights:
    """Weights of a program as float arrays, dequantised when first used; the least recently used go when more than
    `limit` bytes are held. Matrices of an expert tensor are separate entries."""

    def __init__(self, program: Program, dtype: DTypeLike, limit: int) -> None:
        self._tensors = program.weights
        self._dtype = np.dtype(dtype)
        self._limit = limit
        self._held: OrderedDict[tuple[str, int], Floats] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, name: str) -> Floats:
        """The whole tensor, shape reversed."""
        return self._get(name, -1)

    def expert(self, name: str, index: int) -> Floats:
        """Matrix `index` of a three-dimensional tensor: (outputs, inputs)."""
        return self._get(name, index)

    def embedding(self, name: str, rows: NDArray[np.int32]) -> Floats:
        """Rows of a matrix, dequantised anew each time."""
        return self._tensors[name].dequantise_rows(rows, self._dtype)

    def _get(self, name: str, index: int) -> Floats:
        key = (name, index)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        tensor = self._tensors[name] if index < 0 else self._tensors[name].expert(index)
        array = tensor.dequantise(self._dtype)
        self._held[key] = array
        self._bytes += array.nbytes
        while self._bytes > self._limit and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._bytes -= dropped.nbytes
        return array
