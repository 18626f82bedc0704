"""Weights in a worker's own memory: of everything that is multiplied the rows that its rank computes, in huge pages.

Owns which rows those are, where they lie and how they come from the file. Private memory gets huge pages where shared
memory gets none by itself, and lies near the core that fills it. Its price: nobody else has these rows, so a worker
that takes the place of a dead one reads them again. Ranks that lend have them in `lent_memory`, where others see them
(`lent`, once told where: `borrow`), and a successor takes them over. What is not multiplied (embeddings, norms, biases)
stays in the mapped file.

The rows of a rank lie side by side, matrix after matrix (of experts only those that the host computes), in the order of
the file; the address that kernels get is that which row 0 would have.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bloomery.cpu_experts.kernels.work import share_start
from bloomery.cpu_experts.lent_memory import LentMemory
from bloomery.runtime.errors import PlanError
from bloomery.runtime.host_weights import HUGE_PAGE, PAGE, POPULATE_WRITE, huge_bytes, lock_memory
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Program
from bloomery.runtime.weight_loading import WeightFile

READERS: Final = 4
PIECE: Final = 2 << 20
"""Bytes that a thread reads at once, into memory of its own, since rows lie at any byte of a page."""
GAP: Final = 64 << 10
"""Bytes that are read and thrown away sooner than that two reads are made."""
_POPULATE_PIECE: Final = 64 << 20
_LINE: Final = 64
_share_start: Final[Callable[[int, int, int], int]] = share_start.py_func
"""That of the kernels, as Python."""


@dataclass(frozen=True)
class Part:
    """Rows `first` to `last`-1 of those that are `kept` of `matrices` equal matrices that a tensor is made of; at byte
    `place`."""

    tensor: Tensor
    first: int
    last: int
    matrices: int
    kept: tuple[int, ...]
    place: int

    @property
    def row_bytes(self) -> int:
        return self.tensor.quant_type.row_bytes(self.tensor.shape[0])

    @property
    def matrix_bytes(self) -> int:
        """Of the rows that are here."""
        return (self.last - self.first) * self.row_bytes

    @property
    def nbytes(self) -> int:
        return len(self.kept) * self.matrix_bytes


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, and where they go."""

    path: Path
    offset: int
    nbytes: int
    place: int


class RankRows:
    """Where the rows of one rank lie in its memory: what it wants, in the order in which it was wanted."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, int, int, int], Part] = {}
        self.nbytes = 0

    def add(self, key: tuple[str, int, int, int], tensor: Tensor, rows: tuple[int, int], kept: tuple[int, ...]) -> None:
        part = self.parts[key] = Part(tensor, *rows, key[3], kept, self.nbytes)
        self.nbytes += -(-part.nbytes // _LINE) * _LINE

    def factor(self, address: int, key: tuple[str, int, int, int]) -> tuple[int, int]:
        """As `LoweringContext.factor`, if the memory begins at `address`."""
        part = self.parts[key]
        return address + part.place - part.first * part.row_bytes, part.matrix_bytes


class OwnWeights:
    """What rank `rank` of `ranks` multiplies. Lowering first tells what it wants (`want`), then `load` reads it, then
    `factor` says where it is."""

    def __init__(
        self,
        program: Program,
        rank: int,
        ranks: int,
        kept: Mapping[str, tuple[int, ...]] | None = None,
        lends: bool = False,
        left: str = "",
    ) -> None:
        """`kept`: of which tensors only some matrices are wanted, in ascending order. `lends`: other ranks, of which
        that is true as well, may read these rows. `left`: where a predecessor's are found."""
        self._kept = kept or {}
        self._program, self._rank, self._ranks = program, rank, ranks
        self._rows = {each: RankRows() for each in (range(ranks) if lends else [rank])}
        self._lends, self._left = lends, left
        self._address = 0
        self._memory: mmap.mmap | None = None
        self._lent: LentMemory | None = None
        self._borrowed: dict[int, LentMemory] = {}

    @property
    def nbytes(self) -> int:
        return self._rows[self._rank].nbytes

    @property
    def _parts(self) -> dict[tuple[str, int, int, int], Part]:
        return self._rows[self._rank].parts

    @property
    def names(self) -> set[str]:
        """Tensors that need not be read from the mapped file."""
        return {name for name, *_ in self._parts}

    @property
    def path(self) -> str:
        """Where other ranks find these rows once they are loaded; "" if they cannot see them, or know them."""
        return self._lent.path if self._lent and not self._left else ""

    @property
    def seen(self) -> int:
        """How many other ranks' rows can be read here."""
        return len(self._borrowed)

    def borrow(self, paths: Sequence[str]) -> None:
        """Makes the rows of all other ranks readable; `paths` say where they are, "" for none. Those that cannot be
        mapped are not. If there are none at all nobody lends, of which all ranks are told alike."""
        self._lends = self._lends and any(paths)
        for rank, path in enumerate(paths):
            if path and self._lends and rank != self._rank and self._rows[rank].nbytes:
                with suppress(OSError):
                    self._borrowed[rank] = LentMemory.borrow(path, self._rows[rank].nbytes)

    def want(self, name: str, before: int, total: int, matrices: int) -> None:
        """Arguments as of `LoweringContext.factor`."""
        key = (name, before, total, matrices)
        if key in self._parts:
            return
        tensor = self._program.weights[name]
        rows = len(tensor.rows) // matrices
        kept = self._kept.get(name, tuple(range(matrices)))
        for rank, each in self._rows.items():
            first, last = (
                min(max(_share_start(total, end, self._ranks) - before, 0), rows) for end in (rank, rank + 1)
            )
            each.add(key, tensor, (first, last), kept)

    def factor(self, name: str, before: int, total: int, matrices: int) -> tuple[int, int]:
        """As `LoweringContext.factor`, of what was wanted and loaded."""
        return self._rows[self._rank].factor(self._address, (name, before, total, matrices))

    def lent(self, name: str, before: int, total: int, matrices: int) -> tuple[tuple[int, int], ...]:
        """As `LoweringContext.lent`."""
        begins = {rank: memory.address for rank, memory in self._borrowed.items()} | {self._rank: self._address}
        return tuple(
            each.factor(begins[rank], (name, before, total, matrices)) if begins.get(rank) else (0, 0)
            for rank, each in self._rows.items()
            if self._lends
        )

    def kept(self, name: str) -> tuple[int, ...] | None:
        """As `LoweringContext.kept`."""
        return self._kept.get(name)

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Takes the memory and reads the rows, or takes over what a predecessor left; `progress(done, total)` in bytes.
        ModelFileError for a file that cannot be read or has become shorter, PlanError where memory runs out."""
        if self._left and self.nbytes:
            with suppress(OSError):
                self._lent = LentMemory.borrow(self._left, self.nbytes)
                self._address = self._lent.address
                return progress(self.nbytes, self.nbytes)
        self._take()
        own = threading.local()

        def read(file: WeightFile, pieces: Sequence[Piece]) -> int:
            if not hasattr(own, "bounce"):
                own.bounce = mmap.mmap(-1, PIECE + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                own.at = _address_of(own.bounce)
            begin = pieces[0].offset // PAGE * PAGE
            wanted = pieces[-1].offset + pieces[-1].nbytes - begin
            file.read(begin, memoryview(own.bounce)[: -(-wanted // PAGE) * PAGE], wanted)
            for piece in pieces:
                ctypes.memmove(self._address + piece.place, own.at + piece.offset - begin, piece.nbytes)
            return sum(piece.nbytes for piece in pieces)

        with ExitStack() as stack:
            batches = list(batches_of(self._pieces()))
            paths = {pieces[0].path for pieces in batches}
            files = {path: stack.enter_context(WeightFile(path)) for path in paths}
            pool = stack.enter_context(ThreadPoolExecutor(READERS, "bloomery-weights"))
            stack.callback(pool.shutdown, cancel_futures=True)
            done = 0
            for reading in [pool.submit(read, files[pieces[0].path], pieces) for pieces in batches]:
                done += reading.result()
                progress(done, self.nbytes)
        progress(self.nbytes, self.nbytes)

    def _take(self) -> None:
        if self._lends and self.nbytes:
            try:
                self._lent = LentMemory.take(self.nbytes)
            except OSError as error:
                raise _no_memory(self.nbytes) from error
            if self._lent:
                self._address = self._lent.address
                return
        try:
            self._memory = mmap.mmap(-1, self.nbytes + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            raise _no_memory(self.nbytes) from error
        start = _address_of(self._memory)
        self._address = -(-start // HUGE_PAGE) * HUGE_PAGE
        for at in range(0, self.nbytes, _POPULATE_PIECE):
            nbytes = min(_POPULATE_PIECE, -(-(self.nbytes - at) // HUGE_PAGE) * HUGE_PAGE)
            try:
                self._memory.madvise(POPULATE_WRITE, self._address - start + at, nbytes)
            except OSError as error:
                if error.errno != 22:  # before Linux 5.14: the first to touch takes a page
                    raise _no_memory(self.nbytes) from error
                return

    def _pieces(self) -> Iterator[Piece]:
        for part in self._parts.values():
            whole = part.tensor.nbytes // part.matrices
            for number, matrix in enumerate(part.kept):
                offset = part.tensor.offset + matrix * whole + part.first * part.row_bytes
                for at in range(0, part.matrix_bytes, PIECE):
                    nbytes = min(PIECE, part.matrix_bytes - at)
                    yield Piece(part.tensor.path, offset + at, nbytes, part.place + number * part.matrix_bytes + at)

    def huge_share(self) -> float:
        """The part that lies in huge pages, as /proc/self/smaps tells."""
        if not self.nbytes:
            return 1.0
        kind = "ShmemPmdMapped" if self._lent else "AnonHugePages"
        found = huge_bytes(self._address, self._address + self.nbytes, kind)
        return min(1.0, found / self.nbytes)

    def lock(self) -> str:
        """Keeps the rows in memory; why that is not possible, or ""."""
        return lock_memory(self._address, self.nbytes) if self.nbytes else ""


def batches_of(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces that one read brings: neighbours in a file, less than GAP apart, at most PIECE together."""
    batch: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (str(piece.path), piece.offset)):
        if batch:
            last = batch[-1]
            near = last.path == piece.path and piece.offset - last.offset - last.nbytes <= GAP
            if not near or piece.offset + piece.nbytes - batch[0].offset > PIECE:
                yield batch
                batch = []
        batch.append(piece)
    if batch:
        yield batch


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _no_memory(nbytes: int) -> PlanError:
    return PlanError(
        f"memory ran out while a worker copied {nbytes} bytes of weights to it",
        "use --host-weights mmap, or free memory",
    )
