"""Models of true shapes without a byte behind them: enough to plan and to lower, nothing to run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from gpu_speeds import RandomQwen3

from bloomery.runtime.model_file import Tensor
from bloomery.runtime.quant_types import QuantType


class PaperQwen3(RandomQwen3):
    """Qwen3-30B-A3B in llama.cpp's Q4_K_M mix: 18.5 GB of zeros that are stored once."""

    def _add(self, name: str, kind: str, *shape: int) -> None:
        quant = QuantType.named(kind)
        nbytes = quant.row_bytes(shape[0]) * math.prod(shape[1:])
        data = np.broadcast_to(np.zeros(1, np.uint8), (nbytes,))
        full = f"{name}.weight"
        self.tensors[full] = Tensor(full, shape, quant, data, Path("paper"), 0)  # type: ignore[index]
