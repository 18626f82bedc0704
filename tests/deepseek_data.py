"""Tiny `deepseek41` and `deepseek4` models, their figures, and a reference executor that keeps what every op made.

Files are written once a test run from fixed seeds (oracle_kit/make_tiny_deepseek41.py, make_tiny.py).
"""

from __future__ import annotations

import atexit
import contextlib
import io
import lzma
import shutil
import sys
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from oracle_data import DATA, HERE
from running import rows_of

from bloomery.runtime.architectures import build_draft, build_program
from bloomery.runtime.dequantised_weights import DequantisedWeights
from bloomery.runtime.executor import StepRows
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Op, Program, op_views
from bloomery.runtime.reference import ReferenceExecutor

FIGURES = DATA / "deepseek41"


@cache
def _work() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bloomery-deepseek-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _kit(module: str) -> Any:
    """A fresh import of a script of the oracle kit (one of them is configured by its globals)."""
    sys.path.insert(0, str(HERE / "oracle_kit"))
    try:
        sys.modules.pop(module, None)
        return __import__(module)
    finally:
        sys.path.pop(0)


@cache
def tiny41(variant: Literal["a", "dense", "b"], kind: Literal["mix", "f32"] = "mix") -> Path:
    """`mix` has the quant types of the published file, `f32` the same weights as F32."""
    kit = _kit("make_tiny_deepseek41")
    vars(kit).update(kit.VARIANTS[variant])
    path = _work() / f"tiny-deepseek41-{variant}-{kind}.gguf"
    with contextlib.redirect_stdout(io.StringIO()):
        kit.write(str(path), kit.make_tensors(), kind == "f32")
    return path


@cache
def tiny_draft(kind: Literal["mix", "f32"] = "mix") -> Path:
    """A block draft for variant `a`; `mix` has the quant types of the published draft."""
    kit = _kit("make_tiny_deepseek41")
    vars(kit).update(kit.VARIANTS["draft"])
    path = _work() / f"tiny-deepseek41-draft-{kind}.gguf"
    with contextlib.redirect_stdout(io.StringIO()):
        kit.write(str(path), kit.make_draft(), kind == "f32", draft=True)
    return path


@cache
def draft_program(kind: Literal["mix", "f32"] = "mix") -> Program:
    """Of the draft, with the head and embedding of variant `a`."""
    return build_draft(ModelFile.open(tiny_draft(kind)), ModelFile.open(tiny41("a", kind)))


@cache
def tapped_program(kind: Literal["mix", "f32"] = "mix") -> Program:
    """Of variant `a`, which reports what the draft reads."""
    return build_program(ModelFile.open(tiny41("a", kind)), (6, 7, 8))


@cache
def tiny4(quant: Literal["F32", "MXFP4_MOE"] = "F32") -> Path:
    path = _work() / f"deepseek4-{quant}.gguf"
    if quant == "F32":
        _kit("make_tiny").write_f32("deepseek4", path)
    else:
        path.write_bytes(lzma.decompress((FIGURES / f"deepseek4-{quant}.gguf.xz").read_bytes()))
    return path


@cache
def figures41(name: str) -> dict[str, NDArray[Any]]:
    with np.load(FIGURES / f"{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


@cache
def program_of(path: Path) -> Program:
    return build_program(ModelFile.open(path))


@lru_cache(maxsize=2)
def _weights(path: Path, wide: bool) -> DequantisedWeights:
    """Dequantised once for all executors of a file."""
    return DequantisedWeights(program_of(path), np.float64 if wide else np.float32, 1 << 30)


def forget() -> None:
    """Programs with the mappings of their files, and weights. Files stay: they are written once."""
    for kept in (_weights, program_of, draft_program, tapped_program):
        kept.cache_clear()


def executor_of(
    path: Path,
    *,
    wide: bool = True,
    context: int = 256,
    program: Program | None = None,
    kind: type[RecordingExecutor] | None = None,
    **arguments: Any,
) -> RecordingExecutor:
    """float64 with float64 caches if `wide`, else float32. `program` (default: the file's) has the file's weights."""
    if wide:
        arguments = {"dtype": np.float64, "cache_type": "f64", **arguments}
    executor = (kind or RecordingExecutor)(program or program_of(path), context=context, **arguments)
    executor._weights = _weights(path, wide)
    return executor


class RecordingExecutor(ReferenceExecutor):
    """`made[op name]`: each view that the op wrote in the last step, in the order of its fields."""

    made: dict[str, list[NDArray[Any]]]

    def step(self, rows: StepRows) -> Any:
        self.made = {}
        return super().step(rows)

    def _execute(self, op: Op, rows: StepRows) -> None:
        super()._execute(op, rows)
        if op.name.startswith("blk."):
            self.made[op.name] = [self.read(view).copy() for view, writes in op_views(op) if writes]

    def logits(self, tokens: Any, *, slot: int = 0, start: int = 0, block: int = 0) -> NDArray[Any]:
        """Logits after each token in the executor's own precision, the tokens taken in blocks (0: all at once)."""
        parts = []
        for first in range(0, len(tokens), block or len(tokens)):
            piece = tokens[first : first + (block or len(tokens))]
            self.step(rows_of(piece, slot=slot, start=start + first))
            parts.append(self._buffers[self.program.logits].copy())
        return np.concatenate(parts)

    def chosen(self, layer: int) -> NDArray[np.int32]:
        """The row lists (R, keep) that a layer published."""
        return np.asarray(self.made[f"blk.{layer}.index_rows"][0][:, 0])

    def experts(self) -> NDArray[np.int32]:
        """(layers, R, used)."""
        return np.stack([self.made[f"blk.{layer}.router"][0][:, 0] for layer in range(self.program.layers)])
