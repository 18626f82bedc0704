"""Stages: what a worker process runs between two barriers, and what lowering asks of the memory it runs in.

Owns the shape of a lowered program and the calling convention of a kernel. It knows neither kernels nor processes.

Calling convention. Every kernel is compiled to one C function `void(int64 args, int64 rank, int64 ranks, int64 step)`:

* `args`   address of the stage's arguments, int64 each (`Stage.arguments`; floats travel as float64 bit patterns);
* `rank`, `ranks`   which share of the work is computed: all ranks of a stage together compute all of it, once (who is
  done may compute of another's share, where ranks claim pieces of it: `kernels/claims.py`);
* `step`   address of the step record's pointers, int64 each (the STEP_ constants).

A kernel makes no system call, takes no lock and allocates nothing. One that leaves out stages behind it does so in
every rank of the step, since their barriers are left out, too. Every output element is computed by one rank in one
order, so results depend neither on `ranks` nor on which rows share a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import View

STEP_ROWS: Final = 0  # R, rows of this step
STEP_OUT_ROWS: Final = 1  # O, rows whose logits are wanted
STEP_TOKENS: Final = 2  # address of int32[R]
STEP_SLOTS: Final = 3  # address of int32[R]
STEP_POSITIONS: Final = 4  # address of int32[R]
STEP_OUT_INDICES: Final = 5  # address of int32[O]: indices of the wanted rows
STEP_FAILURE: Final = 6  # set by a kernel that waited in vain for another process; the rank then leaves the step
STEP_SKIP: Final = 7  # set by a kernel to the number of stages behind it that are left out; else 0
STEP_LAP: Final = 8  # which lap of the step it is: 0 its own, then the steps ahead
STEP_NUMBER: Final = 9  # the step's number
STEP_WORDS: Final = 10


@dataclass(frozen=True)
class Stage:
    """One call of one kernel by every rank. A barrier follows, unless what comes next needs nothing of other ranks.

    `kernel` is a name that `compile_cache.compile_kernel` knows, `label` the op's name for errors and timings.
    """

    kernel: str
    arguments: tuple[int, ...]
    label: str
    barrier: bool = True


@dataclass(frozen=True)
class CacheAddress:
    """Where the rows of one state lie; strides in bytes.

    Head h of logical row i of a slot (`states`) starts at
    address + slot*slot_stride + h*head_stride + (i mod rows)*row_stride. A state without heads has only head 0.
    """

    address: int
    slot_stride: int
    row_stride: int
    rows: int
    head_stride: int


@dataclass(frozen=True)
class BroughtRows:
    """Where the engram I/O process puts the table rows of a site (`engram_record`): addresses."""

    flag: int
    control: int
    rows: int
    places: int


@dataclass(frozen=True)
class HandOffPlace:
    """Where the words of hand-offs with a card (`hand_off`) and the control block lie: addresses. `deadline_ns` is how
    long a rank waits for the card."""

    words: int
    control: int
    deadline_ns: int


class LoweringContext(Protocol):
    """The memory of one worker process as lowering sees it. All addresses are this process's own."""

    @property
    def max_rows(self) -> int:
        """Greatest R of a step."""

    @property
    def max_out_rows(self) -> int:
        """Greatest O of a step."""

    @property
    def ranks(self) -> int:
        """How many ranks share the work of a step."""

    @property
    def context(self) -> int:
        """Positions that a slot can hold."""

    @property
    def cache_type(self) -> str:
        """Type of the caches: "f32", "f16" or "q8_0"."""

    def view(self, view: View) -> tuple[int, int]:
        """Address of element `view.start` of row 0, and the distance between rows in bytes."""

    def weight(self, name: str) -> tuple[int, Tensor]:
        """Address of the tensor's first byte, and the tensor."""

    def factor(self, name: str, before: int, total: int, matrices: int = 1) -> tuple[int, int]:
        """Of a weight that is multiplied: address of its first byte, and bytes from one of its `matrices` to the next.
        Ranks share `total` output rows (`kernels/work.py`), of which the rows of each matrix are those from `before`
        on; only this rank's need be there, each at its distance from the matrix's address. Of `matrices` those that are
        `kept` count."""

    def lent(self, name: str, before: int, total: int, matrices: int = 1) -> tuple[tuple[int, int], ...]:
        """What `factor` says to each rank of its rows, in this process's addresses; address 0 where they cannot be seen
        from here. Empty if ranks see their own rows only."""

    def kept(self, name: str) -> tuple[int, ...] | None:
        """Of a weight of several matrices the numbers of those that are there, side by side; None: all are."""

    def state(self, name: str) -> CacheAddress:
        """Where the rows of a state lie."""

    def brought(self, site: int) -> BroughtRows | None:
        """Where the rows of an engram site are brought to; None if kernels are to take them from the table."""

    def hand_off(self) -> HandOffPlace:
        """Where this rank meets the card."""

    def scratch(self, name: str, nbytes: int) -> int:
        """Address (64-byte aligned) of at least `nbytes` bytes that all ranks see at their own address; the same name
        gives the same bytes. Their contents are undefined between stages of different ops."""
