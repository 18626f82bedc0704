"""What the tests of the card executor share: skipping without a card, a context without memory, and programs of one op.

Owns no expectations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.gpu_worker.driver import load_pycuda
from bloomery.gpu_worker.launches import MAX_ROWS, HandOffAddresses, HandOffBuffers, StateAddress, StepAddresses
from bloomery.runtime.errors import PlanError
from bloomery.runtime.executor import StepRows
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Argmax, Buffer, CacheState, EmbedRows, Op, Program, SelectRows, View
from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.reference import ReferenceExecutor


def need_card() -> None:
    """Skips the test where no card can be used, saying what is missing."""
    try:
        load_pycuda()
    except PlanError as error:
        pytest.skip(error.message)


class NoCard:
    """A CardContext whose addresses mean nothing but are distinct and in range of their areas, for lowering."""

    multiprocessors = 132
    block_shared = 222 << 10
    spare = 16
    step = StepAddresses(256, 288, 320, 352, 384)
    prompt_step = StepAddresses(512, 768, 1024, 1280, 1536)
    payload = HandOffBuffers((1024, 64), (1280, 16), (1536, 16), (1792, 64))
    hand_off = HandOffAddresses(512, 640, 768, 776, 784, 792, 800, 2, 10**9, 0, 2, {"step": payload, "out": payload})

    def __init__(self, program: Program, context: int = 256, cache_type: str = "f16") -> None:
        self.program = program
        self.context, self.cache_type = context, cache_type
        self.areas: dict[str, tuple[int, int]] = {}
        self._end = 4096

    def _area(self, name: str, nbytes: int) -> int:
        if name not in self.areas:
            self.areas[name] = self._end, nbytes
            self._end += (nbytes + 511) // 256 * 256
        assert self.areas[name][1] >= nbytes, f"{name} grows after it was given out"
        return self.areas[name][0]

    def view(self, view: View) -> tuple[int, int]:
        width = self.program.buffers[view.buffer].width
        return self._area(f"buffer {view.buffer}", MAX_ROWS * 4 * width) + 4 * view.start, width

    def weight(self, name: str) -> tuple[int, Tensor]:
        tensor = self.program.weights[name]
        return self._area(f"weight {name}", tensor.nbytes), tensor

    def slot_map(self, name: str) -> int:
        return self._area(f"slot map {name}", 4 * self.program.weights[name].shape[2])

    def state(self, name: str) -> StateAddress:
        width = self.program.states[name].width
        rows = self.program.states[name].rows(self.context, self.spare)
        return StateAddress(self._area(f"cache {name}", rows * width * 4), rows * width, width, rows)

    def brought(self, table: str) -> int:
        return self._area(f"rows {table}", 1 << 20)

    def scratch(self, name: str, nbytes: int) -> int:
        assert nbytes <= 1 << 30
        return self._area(f"scratch {name}", 1 << 30)

    def constant(self, name: str, values: NDArray[Any]) -> int:
        return self._area(f"constant {name}", values.nbytes)


def tensor(name: str, shape: Sequence[int], quant_type: str, data: NDArray[Any]) -> Tensor:
    flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    kind = QuantType.named(quant_type)
    assert flat.size == kind.row_bytes(shape[0]) * int(np.prod(shape[1:])), (name, shape, quant_type)
    return Tensor(name, tuple(shape), kind, flat, Path("random"), 0)


def f32(name: str, values: NDArray[Any]) -> Tensor:
    return tensor(name, values.shape[::-1], "F32", values.astype(np.float32))


class Bench:
    """A program around a few ops: named inputs come out of embedding tables (row t of a table is what token t gives),
    so that every op runs as it runs in a model."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.states: dict[str, CacheState] = {}
        self.weights: dict[str, Tensor] = {}
        self.ops: list[Op] = []

    def input(self, name: str, values: NDArray[np.float32]) -> View:
        """A buffer whose row for token t is values[t]."""
        self.weights[f"{name}.table"] = f32(f"{name}.table", values)
        view = self.buffer(name, values.shape[1])
        self.ops.append(EmbedRows(f"embed {name}", view, f"{name}.table"))
        return view

    def buffer(self, name: str, width: int, dtype: Literal["f32", "i32"] = "f32") -> View:
        self.buffers[name] = Buffer(name, width, "step", dtype)
        return View(name, 0, width)

    def program(self, *ops: Op) -> Program:
        """The inputs, these ops, and a result of 64 logits that nobody reads."""
        self.buffers["logits"] = Buffer("logits", 64, "out")
        self.buffers["argmax"] = Buffer("argmax", 1, "out", "i32")
        noise = np.random.default_rng(1).standard_normal((64, 64), np.float32)
        last = self.input("noise", noise)
        logits = View("logits", 0, 64)
        tail = (SelectRows("select", last, logits), Argmax("argmax", logits, View("argmax", 0, 1)))
        return Program("test", self.buffers, self.states, self.weights, (*self.ops, *ops, *tail), 64, 4096, 1)


@contextmanager
def on_card(program: Program, **arguments: Any) -> Iterator[CardExecutor]:
    executor = CardExecutor(program, **{"context": 256, "cache_type": "f32", "deterministic": True, **arguments})
    try:
        yield executor
    finally:
        executor.close()


def steps(
    tokens: Sequence[int], positions: Sequence[int] | None = None, slots: Sequence[int] | None = None
) -> StepRows:
    n = len(tokens)
    at = np.arange(n) if positions is None else np.asarray(positions)
    where = np.zeros(n, np.int32) if slots is None else np.asarray(slots)
    return StepRows(
        np.asarray(tokens, np.int32), where.astype(np.int32), at.astype(np.int32), np.arange(n, dtype=np.int32)
    )


def read(executor: CardExecutor, view: View, rows: int) -> NDArray[Any]:
    with executor.card.current("reading"):
        return executor.memory.buffer(view, rows)


def expected(program: Program, rows: StepRows, *views: View, **arguments: Any) -> list[NDArray[Any]]:
    """What the float64 reference leaves in these views."""
    exact = {"context": 256, "cache_type": "f64", "dtype": np.float64, **arguments}
    executor = ReferenceExecutor(program, **exact)
    executor.step(rows)
    return [executor.read(view).copy() for view in views]
