"""Model files with other keys and tensors, edited in memory; files are opened once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bloomery.runtime.architectures import build_draft, build_program
from bloomery.runtime.model_file import ModelFile, Tensor
from bloomery.runtime.program import Program
from bloomery.runtime.quant_types import QuantType

DROP = object()


@cache
def opened(path: Path) -> ModelFile:
    return ModelFile.open(path)


def plain(name: str, array: Any) -> Tensor:
    """A tensor that no file holds: F32, or I32 for whole numbers."""
    values = np.asarray(array)
    kind = QuantType.named("I32" if values.dtype.kind == "i" else "F32")
    data = np.frombuffer(values.astype(np.int32 if kind.name == "I32" else np.float32).tobytes(), np.uint8)
    return Tensor(name, values.shape[::-1], kind, data, Path("edited.gguf"), 0)


class Edit:
    """A model file with changes: `keys` without the architecture's prefix, `tensors` by full name; DROP removes."""

    def __init__(self, path: Path, keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> None:
        base = opened(path)
        metadata, held = dict(base.metadata), dict(base.tensors)
        for name, value in (keys or {}).items():
            full = name if name.startswith(("general.", "tokenizer.")) else f"{base.architecture}.{name}"
            metadata[full] = value
            if value is DROP:
                del metadata[full]
        for name, tensor in (tensors or {}).items():
            held[name] = tensor(held) if callable(tensor) else tensor
            if tensor is DROP:
                del held[name]
        self.model = ModelFile(base._containers, held)
        vars(self.model)["metadata"] = MappingProxyType(metadata)

    def build(self, target: Path | None = None) -> Program:
        """Its program; with a target, as a draft for it."""
        return build_draft(self.model, opened(target)) if target else build_program(self.model)


def like(name: str, **changes: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """A tensor of the file with other attributes."""
    return lambda held: dataclasses.replace(held[name], **changes)
