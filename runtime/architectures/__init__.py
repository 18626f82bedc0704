"""Owns the map from `general.architecture` to the module that turns such a model file into a program.

An architecture module reads hyper-parameters, checks the tensor table and emits ops in the order in which a person
would explain the model. It knows no device and no executor. Mainline llama.cpp defines what each architecture means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bloomery.runtime.architectures import deepseek2, deepseek4, deepseek41, dflash, llama, qwen3, qwen3moe
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
DRAFT = "dflash"


def build_program(model: ModelFile, taps: tuple[int, ...] = ()) -> Program:
    """The program of a model file. `taps` are layers that a draft reads (`deepseek41` only). Raises ModelFileError for
    an unknown architecture, an unsupported variant of a known one, and missing, misshapen or unexpected tensors, always
    by name."""
    if model.architecture == DRAFT:
        raise ModelFileError(
            f"{model.path}: general.architecture is {DRAFT!r}: a draft, which runs beside the model it was made for",
            "open that model and give this file with --draft dspark --model-draft FILE",
        )
    builder = ARCHITECTURES.get(model.architecture)
    if builder is None:
        raise ModelFileError(
            f"{model.path}: general.architecture is {model.architecture!r}, which no module here can run",
            f"known architectures: {', '.join(sorted(ARCHITECTURES))}",
        )
    _refuse_empty(model)
    if not taps:
        return builder(model)
    if model.architecture != dflash.TARGET:
        raise ModelFileError(
            f"{model.path}: general.architecture is {model.architecture!r}, which leaves nothing for a draft to read",
            f"only {dflash.TARGET} does",
        )
    return deepseek41.build(model, taps)


def build_draft(model: ModelFile, target: ModelFile) -> Program:
    """The program of a draft of architecture `dflash` for a target; ModelFileError as `build_program`."""
    if model.architecture != DRAFT:
        raise ModelFileError(
            f"{model.path}: general.architecture is {model.architecture!r}, expected a draft, {DRAFT!r}",
            "give a file that was made as a DSpark draft of the model",
        )
    _refuse_empty(model)
    return dflash.build(model, target)


def load_program(path: str, taps: tuple[int, ...] = (), target: str = "") -> tuple[ModelFile, Program]:
    """Opens a model file and builds its program: with a `target` (a path too) that of its draft, else that of a model
    which leaves its draft what enters the layers `taps`."""
    model = ModelFile.open(path)
    return model, build_draft(model, ModelFile.open(target)) if target else build_program(model, taps)


def _refuse_empty(model: ModelFile) -> None:
    if not model.tensors:
        raise ModelFileError(
            f"{model.path}: holds a vocabulary and metadata but no tensors", "open a file with the model's weights"
        )
