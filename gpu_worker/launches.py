"""Launches: what a lowered program is made of on the card, and what lowering asks of the card's memory.

Owns the shape of a launch and the convention of parameters. Every kernel's parameters are 8 bytes wide: pointers,
int64 or float64, so that a launch's parameters are one tuple of int64 words (floats as their bit patterns). It knows
neither kernels nor PyCUDA.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import View

MAX_ROWS: Final = 8
"""Rows that the kernels take at once; longer steps run in groups of so many."""
STATE_WORDS: Final = 5  # of a hand-off: HandOffAddresses
RECORD_LINES: Final = 5
"""Arrays of a step record: the fields of StepAddresses, one after the other."""


@dataclass(frozen=True)
class KernelName:
    """A function of a kernel file; `quant_type` is what the file is compiled for, or empty."""

    file: str
    function: str
    quant_type: str = ""

    def __str__(self) -> str:
        return f"{self.file}.{self.function}" + (f"[{self.quant_type}]" if self.quant_type else "")


@dataclass(frozen=True)
class Launch:
    """One kernel on one grid. `label` is the op's name, for errors and timings; `shared` is dynamic shared memory.
    `beside`: in a graph it may run while those after it do, up to the first one that `joins`, which waits for it."""

    kernel: KernelName
    grid: tuple[int, int, int]
    threads: int
    words: tuple[int, ...]
    label: str
    shared: int = 0
    beside: bool = False
    joins: bool = False


@dataclass(frozen=True)
class StepAddresses:
    """Where the step's int32 arrays lie: MAX_ROWS elements each, or as many as a prompt block has rows. `laps` has two:
    which of the steps ahead it is (0: the first), and how many follow."""

    tokens: int
    slots: int
    positions: int
    out_rows: int
    laps: int


@dataclass(frozen=True)
class StateAddress:
    """Where the rows of a state lie; strides in elements. Logical row i of a slot is its row i % `rows`."""

    address: int
    slot_stride: int
    row_stride: int
    rows: int


@dataclass(frozen=True)
class HandOffBuffers:
    """(address, row stride in elements) of the arena's payload buffers, as the card sees them."""

    x: tuple[int, int]
    ids: tuple[int, int]
    mix: tuple[int, int]
    out: tuple[int, int]


@dataclass(frozen=True)
class HandOffAddresses:
    """Where the card meets the host (`runtime/hand_off.py`): words and control block in mapped memory, STATE_WORDS
    words of the card's own (the step's and the lap's number; the step that was given up; the flag of the last hand-off
    whose sums have been brought to the card's memory; whether the host has a part in the last one; how many blocks
    beside the one that sent are done), how many ranks answer and how long they may take, the numbers of the program's
    first and last hand-off, and the arena's buffers by the rows that a layer computes. `times` is region `leg_times` in
    mapped memory; 0: nobody asks for times."""

    words: int
    control: int
    step: int
    cut: int
    landed: int
    decided: int
    done: int
    ranks: int
    deadline_ns: int
    first: int
    last: int
    buffers: Mapping[str, HandOffBuffers]
    times: int = 0


@dataclass(frozen=True)
class AheadAddresses:
    """Where steps ahead tell their tokens and find the rows of n-gram tables (`rows_ahead`), as the card sees it: two
    words, the tokens (int32[MAX_ROWS]), the rows of each table and their bytes a token."""

    told: int
    flag: int
    tokens: int
    rows: dict[str, int]
    token_bytes: int


def fill_record(
    record: NDArray[np.int32],
    tokens: NDArray[np.int32],
    slots: NDArray[np.int32],
    positions: NDArray[np.int32],
    wanted: NDArray[np.int32],
    ahead: int = 0,
) -> None:
    """A step record (StepAddresses), of the first of so many steps ahead."""
    for line, values in zip(record, (tokens, slots, positions, wanted)):
        line[: len(values)] = values
    record[4, :2] = 0, ahead


class CardContext(Protocol):
    """The card's memory as lowering sees it. Buffers have room for MAX_ROWS rows and for those of a prompt block."""

    @property
    def multiprocessors(self) -> int: ...

    @property
    def block_shared(self) -> int:
        """Bytes of shared memory that a launch can ask for a block, besides what its kernel declares."""

    @property
    def context(self) -> int:
        """Positions that a slot can hold."""

    @property
    def cache_type(self) -> str:
        """Element type of the caches: "f32" or "f16"."""

    @property
    def step(self) -> StepAddresses: ...

    @property
    def prompt_step(self) -> StepAddresses:
        """The same for a prompt block."""

    @property
    def hand_off(self) -> HandOffAddresses:
        """Only asked for by programs with hand-offs."""

    def view(self, view: View) -> tuple[int, int]:
        """Address of element `view.start` of row 0, and the distance between rows in elements."""

    def weight(self, name: str) -> tuple[int, Tensor]:
        """Address of the tensor's first byte, and the tensor."""

    def slot_map(self, name: str) -> int:
        """Address of int32[experts]: in which place of an expert tensor's memory each expert lies; -1: not here."""

    def state(self, name: str) -> StateAddress:
        """Where the rows of a cache state lie."""

    def scratch(self, name: str, nbytes: int) -> int:
        """Address (256-byte aligned) of at least `nbytes` bytes; the same name gives the same bytes."""

    def brought(self, table: str) -> int:
        """Where the host puts the rows of an n-gram table for the rows of a part of a step (`engram_feed`)."""

    def constant(self, name: str, values: NDArray[Any]) -> int:
        """Address of these values, uploaded once under this name."""


def float_word(value: float) -> int:
    """The bit pattern of a float64 as int64."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
