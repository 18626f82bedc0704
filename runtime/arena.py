"""The arena: the shared memory of one executor pool, its layout, and who may unlink it.

Owns the layout (which bytes of which segment mean what) and the segments themselves. Knows neither the meaning of the
control words (`step_record.py`) nor what kernels do with the buffers.

Four named segments in /dev/shm, created by the coordinator and attached by the workers:

| segment     | regions                                                                    |
|-------------|----------------------------------------------------------------------------|
| control     | control block, step record, stage timings, words of the engram I/O process |
|             | and of hand-offs with a card (`hand_off`), times of both (`leg_times`)     |
| activations | every Buffer of the program, logits included: one row after another; table |
|             | rows that the engram I/O process brings (`engram_record`)                  |
| scratch     | what the kernels asked for by name while the program was lowered           |
| cache       | every state: [slot][head][row], in the cache type or the state's own       |

The layout is a pure function of program, shape, scratch and stage count. Every process computes it for itself and the
digest in each segment's header proves on attach that all came to the same one.

Order of events for scratch, whose sizes only the kernels' side knows: each worker lowers the program once without
addresses to learn its scratch and stage count, and reports both; the coordinator checks that all reports are equal,
lays the arena out, creates it and sends the report back; only then do workers attach and lower with real addresses. So
no process ever sees an arena whose layout is not final, and a program that cannot be lowered fails before any memory is
taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.cache_types import CacheType, stored_dtype
from bloomery.runtime.engram_record import engram_bytes, engram_tables
from bloomery.runtime.errors import BloomeryError, PlanError
from bloomery.runtime.hand_off import HAND_OFF_BUFFERS, hand_off_bytes
from bloomery.runtime.leg_times import leg_bytes
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.ops_hand_off import HandOffWait
from bloomery.runtime.program import Buffer, CacheState, Program
from bloomery.runtime.runtime_files import SHARED_MEMORY
from bloomery.runtime.states import element_type, row_width
from bloomery.runtime.step_record import control_bytes, record_bytes

LAYOUT_VERSION = 4
MAGIC = b"BLMARENA"
SEGMENTS = ("control", "activations", "scratch", "cache")
ALIGNMENT = 128
ROW_ALIGNMENT = 64
TICKS_PER_STAGE = 2
"""Timings of a stage: time stamp counter ticks in the kernel, ticks at the barrier."""
LEAST_SPARE = 16
"""So many rows of a slot can be taken back whatever the greatest step."""

_HEADER = struct.Struct("<8sIIQ32s16s")  # magic, version, header bytes, segment bytes, layout digest, segment
_HEADER_BYTES = 4096


class ArenaError(BloomeryError):
    """A segment that is missing, damaged, or laid out by another version or for another program."""


@dataclass(frozen=True)
class ArenaShape:
    """What sizes an arena besides the program."""

    context: int
    slots: int
    max_rows: int
    max_out_rows: int
    processes: int
    cache_type: CacheType
    cards: int = 0
    group_rows: int = 0
    """Beside a card: rows that are handed to the host at once (0: as many as a step has)."""

    @property
    def handed_rows(self) -> int:
        """Greatest number of rows that the ranks of the host see of a step."""
        return min(self.group_rows or self.max_rows, self.max_rows)

    @property
    def ranks(self) -> int:
        """Processes that run a step together: CPU-expert workers 0, 1, ..., then the card's."""
        return self.processes + self.cards

    @property
    def spare(self) -> int:
        """How far rings reach back beyond what a row reads (`states`)."""
        return max(self.max_rows, LEAST_SPARE)


@dataclass(frozen=True)
class Lowered:
    """What the kernels' side needs of the arena: named scratch with sizes in bytes, and its number of stages."""

    scratch: tuple[tuple[str, int], ...]
    stages: int


@dataclass(frozen=True)
class Region:
    segment: str
    offset: int
    nbytes: int


def aligned(count: int, alignment: int) -> int:
    """The least multiple of `alignment` that is not below `count`."""
    return -(-count // alignment) * alignment


class ArenaLayout:
    """Where everything is. `regions` maps names (`control`, `record`, `ticks`, `buffer:NAME`, `scratch:NAME`,
    `state:NAME`, `engram`, `engram_rows:SITE`, `engram_places:SITE`,
    `hand_off`, `leg_times`) to regions, `segments` maps segments to bytes,
    `digest` is the hash of all of it."""

    def __init__(self, program: Program, shape: ArenaShape, lowered: Lowered) -> None:
        self.shape = shape
        self.buffers: Mapping[str, Buffer] = program.buffers
        self.states: Mapping[str, CacheState] = program.states
        self.regions: dict[str, Region] = {}
        self.segments = dict.fromkeys(SEGMENTS, _HEADER_BYTES)
        self._add("control", "control", control_bytes(shape.ranks))
        self._add("control", "record", record_bytes(shape.max_rows))
        self._add("control", "ticks", 8 * TICKS_PER_STAGE * lowered.stages * shape.processes)
        for buffer in program.buffers.values():
            self._add("activations", f"buffer:{buffer.name}", self.rows(buffer) * self.buffer_stride(buffer.name))
        for name, nbytes in lowered.scratch:
            self._add("scratch", f"scratch:{name}", nbytes)
        for state in program.states.values():
            self._add("cache", f"state:{state.name}", shape.slots * self.slot_stride(state.name))
        if any(isinstance(op, HandOffWait) for op in program.ops):
            self._add("control", "hand_off", hand_off_bytes(shape.processes))
        if shape.cards:
            last = max((op.index for op in program.ops if isinstance(op, HandOffWait)), default=-1)
            self._add("control", "leg_times", leg_bytes(last + 1))
        if program.engram:
            tables, places = engram_tables(program), shape.max_rows * program.engram.buckets
            self._add("control", "engram", engram_bytes(len(tables)))
            for table in tables:
                self._add("activations", f"engram_rows:{table.site}", places * table.row_bytes)
                self._add("activations", f"engram_places:{table.site}", 4 * places)
        meaning = (list(self.buffers.values()), list(self.states.values()), lowered, shape)  # padding can hide a width
        facts = (LAYOUT_VERSION, meaning, list(self.regions.items()), list(self.segments.items()))
        self.digest = hashlib.sha256(repr(facts).encode()).digest()

    def _add(self, segment: str, name: str, nbytes: int) -> None:
        assert name not in self.regions, name
        offset = aligned(self.segments[segment], ALIGNMENT)
        self.regions[name] = Region(segment, offset, nbytes)
        self.segments[segment] = offset + nbytes

    def rows(self, buffer: Buffer) -> int:
        rows = self.shape.max_out_rows if buffer.rows == "out" else self.shape.max_rows
        return min(rows, self.shape.handed_rows) if buffer.name in HAND_OFF_BUFFERS else rows

    def buffer_stride(self, name: str) -> int:
        """Bytes from one row of a buffer to the next."""
        return aligned(4 * self.buffers[name].width, ROW_ALIGNMENT)

    def state_rows(self, name: str) -> int:
        """Rows of a slot of a state."""
        return self.states[name].rows(self.shape.context, self.shape.spare)

    def state_dtype(self, name: str) -> np.dtype[Any]:
        return element_type(self.states[name], self.shape.cache_type)

    def state_width(self, name: str) -> int:
        """How many of its type a row of a state takes: its elements, or the bytes of their blocks."""
        return row_width(self.states[name], self.shape.cache_type)

    def state_stride(self, name: str) -> int:
        """Bytes from one row of a head of a state to the next."""
        heads = self.states[name].heads
        nbytes = self.state_dtype(name).itemsize * self.state_width(name) // heads
        return nbytes if heads > 1 else aligned(nbytes, ROW_ALIGNMENT)

    def head_stride(self, name: str) -> int:
        """Bytes from one head of a state to the next."""
        return aligned(self.state_rows(name) * self.state_stride(name), ROW_ALIGNMENT)

    def slot_stride(self, name: str) -> int:
        """Bytes from one slot of a state to the next."""
        return self.states[name].heads * self.head_stride(name)


class Arena:
    """The mapped segments of one layout. Make one with `create` (coordinator) or `attach` (worker).

    Every process that maps a segment keeps a shared `flock` on it until it leaves, which is how `sweep` tells a living
    arena from an abandoned one. Views handed out keep their mapping alive after `close`.
    """

    def __init__(self, prefix: str, layout: ArenaLayout, maps: dict[str, mmap.mmap], descriptors: list[int]) -> None:
        self.prefix = prefix
        self.layout = layout
        self._maps = maps
        self._descriptors = descriptors
        self._bases = {name: np.frombuffer(memory, np.uint8).ctypes.data for name, memory in maps.items()}

    @classmethod
    def create(cls, prefix: str, layout: ArenaLayout) -> Arena:
        """Creates and maps the segments `<prefix>-<segment>`, all zero. Their memory is taken here and now, so that
        a full /dev/shm is this PlanError and not a SIGBUS in the middle of a step."""
        _refuse_what_cannot_fit(layout)
        maps: dict[str, mmap.mmap] = {}
        descriptors: list[int] = []
        try:
            for segment, nbytes in layout.segments.items():
                descriptors.append(_create_segment(segment_path(prefix, segment), segment, nbytes, layout))
                maps[segment] = mmap.mmap(descriptors[-1], nbytes)
                header = (MAGIC, LAYOUT_VERSION, _HEADER_BYTES, nbytes, layout.digest, segment.encode())
                _HEADER.pack_into(maps[segment], 0, *header)
        except BaseException:
            _let_go(maps, descriptors)
            unlink(prefix)
            raise
        return cls(prefix, layout, maps, descriptors)

    @classmethod
    def attach(cls, prefix: str, layout: ArenaLayout) -> Arena:
        """Maps what the coordinator created, after checking that it is what this process expects. ArenaError."""
        maps: dict[str, mmap.mmap] = {}
        descriptors: list[int] = []
        try:
            for segment, nbytes in layout.segments.items():
                path = segment_path(prefix, segment)
                try:
                    descriptors.append(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
                except OSError as error:
                    raise ArenaError(f"cannot attach the segment {path}: {error.strerror}") from error
                fcntl.flock(descriptors[-1], fcntl.LOCK_SH)
                _validate(path, segment, descriptors[-1], nbytes, layout.digest)
                maps[segment] = mmap.mmap(descriptors[-1], nbytes)
        except BaseException:
            _let_go(maps, descriptors)
            raise
        return cls(prefix, layout, maps, descriptors)

    def address(self, region: str) -> int:
        """Address of a region in this process."""
        where = self.layout.regions[region]
        return self._bases[where.segment] + where.offset

    def segment_address(self, segment: str) -> int:
        """Address of a whole segment in this process; its bytes are in the layout."""
        return self._bases[segment]

    def memory(self, region: str) -> NDArray[np.uint8]:
        """The bytes of a region."""
        where = self.layout.regions[region]
        return np.ndarray(where.nbytes, np.uint8, self._maps[where.segment], where.offset)

    def buffer(self, name: str) -> NDArray[Any]:
        """A buffer as (greatest number of rows, width)."""
        buffer, where = self.layout.buffers[name], self.layout.regions[f"buffer:{name}"]
        shape, strides = (self.layout.rows(buffer), buffer.width), (self.layout.buffer_stride(name), 4)
        return np.ndarray(shape, stored_dtype(buffer.dtype), self._maps[where.segment], where.offset, strides)

    def state(self, name: str) -> NDArray[Any]:
        """A state as (slots, rows, `state_width`) in its type; if it has heads: (slots, rows, heads, width of one)."""
        layout, where = self.layout, self.layout.regions[f"state:{name}"]
        dtype, heads = layout.state_dtype(name), layout.states[name].heads
        shape = (layout.shape.slots, layout.state_rows(name), heads, layout.state_width(name) // heads)
        strides = (layout.slot_stride(name), layout.state_stride(name), layout.head_stride(name), dtype.itemsize)
        state: NDArray[Any] = np.ndarray(shape, dtype, self._maps[where.segment], where.offset, strides)
        return state if heads > 1 else state[:, :, 0]

    def close(self) -> None:
        """Lets go of locks and mappings; a mapping that somebody still has a view of goes with the last view."""
        _let_go(self._maps, self._descriptors)

    def unlink(self) -> None:
        """Removes the names. Who has the arena mapped keeps it."""
        unlink(self.prefix)


def segment_path(prefix: str, segment: str) -> Path:
    return SHARED_MEMORY / f"{prefix}-{segment}"


def unlink(prefix: str) -> None:
    """Removes the names of an arena's segments; those that are gone are no error."""
    for segment in SEGMENTS:
        with contextlib.suppress(OSError):
            segment_path(prefix, segment).unlink()


def _let_go(maps: dict[str, mmap.mmap], descriptors: list[int]) -> None:
    for memory in maps.values():
        with contextlib.suppress(BufferError):
            memory.close()
    maps.clear()
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


def _refuse_what_cannot_fit(layout: ArenaLayout) -> None:
    needed, free = sum(layout.segments.values()), available_memory()
    if needed > free:
        parts = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in layout.segments.items())
        raise PlanError(f"the arena needs {_size(needed)} ({parts}), but {_size(free)} of memory are free", _smaller())


def _create_segment(path: Path, segment: str, nbytes: int, layout: ArenaLayout) -> int:
    """Creates, locks and fully allocates one segment; returns its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # a sweep in another pid namespace took it between the two calls
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        room = os.statvfs(SHARED_MEMORY)
        free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        raise PlanError(
            f"the {segment} segment {path} needs {_size(nbytes)}, but {SHARED_MEMORY} has {_size(free)} free of"
            f" {_size(size)} ({error.strerror}); the whole arena needs {_size(sum(layout.segments.values()))}",
            f"{_smaller()}, or enlarge {SHARED_MEMORY} (mount -o remount,size=..., docker run --shm-size=...)",
        ) from error
    return descriptor


def _smaller() -> str:
    return "ask for less context (--ctx) or fewer sequences (--parallel)"


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"


def _validate(path: Path, segment: str, descriptor: int, nbytes: int, digest: bytes) -> None:
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes < _HEADER.size:
        raise ArenaError(f"{path}: {found_bytes} bytes, too short for a header of {_HEADER.size}")
    magic, version, header, size, found_digest, name = _HEADER.unpack(os.pread(descriptor, _HEADER.size, 0))
    checks: Sequence[tuple[str, object, object]] = (
        ("magic", magic, MAGIC),
        ("layout version", version, LAYOUT_VERSION),
        ("header bytes", header, _HEADER_BYTES),
        ("segment", name.rstrip(b"\0").decode(errors="replace"), segment),
        ("segment bytes", size, nbytes),
        ("file bytes", found_bytes, nbytes),
        ("layout digest", found_digest.hex()[:16], digest.hex()[:16]),
    )
    for what, found, expected in checks:
        if found != expected:
            raise ArenaError(
                f"{path}: {what} is {found!r}, expected {expected!r}",
                "coordinator and workers must come from the same installation and read the same model file",
            )
