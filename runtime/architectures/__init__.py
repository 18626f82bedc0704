"""Owns the map from `general.architecture` to the module that turns such a model file into a program.

An architecture module reads hyper-parameters, checks the tensor table and emits ops in the order in which a person
would explain the model. It knows no device and no executor. Mainline llama.cpp defines what each architecture means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bloomery.runtime.architectures import deepseek2, deepseek4, deepseek41, llama, qwen3, qwen3moe
from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Program

ARCHITECTURES: Mapping[str, Callable[[ModelFile], Program]] = {
    "deepseek2": deepseek2.build,
    "deepseek4": deepseek4.build,
    "deepseek41": deepseek41.build,
    "llama": llama.build,
    "qwen3": qwen3.build,
    "qwen3moe": qwen3moe.build,
}


def build_program(model: ModelFile) -> Program:
    """The program of a model file. Raises ModelFileError for an unknown architecture, an unsupported variant of a known
    one, and missing, misshapen or unexpected tensors, always by name."""
    builder = ARCHITECTURES.get(model.architecture)
    if builder is None:
        raise ModelFileError(
            f"{model.path}: general.architecture is {model.architecture!r}, which no module here can run",
            f"known architectures: {', '.join(sorted(ARCHITECTURES))}",
        )
    if not model.tensors:
        raise ModelFileError(
            f"{model.path}: holds a vocabulary and metadata but no tensors", "open a file with the model's weights"
        )
    return builder(model)
