"""A driver for the card that is not there: the real CardExecutor, and with it the real worker, over emulated kernels.

Stands in for PyCUDA's module, streams, graphs and mapped memory: the card's memory is this process's. Streams do their
work when somebody waits for it; copies out of pinned memory find what is there then. A graph keeps what was launched
while it was captured and runs it again, so that a launch that was not captured is missed. Knows no expectations.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np
from emulated_card import run
from numpy.typing import NDArray

from bloomery.gpu_worker import card_executor, expert_source, model_workload
from bloomery.gpu_worker.launches import KernelName, Launch
from bloomery.gpu_worker.model_workload import ModelWorkload
from bloomery.runtime.errors import PlanError
from bloomery.runtime.worker_messages import CardStart

_ALIGN = 256
_FILLED = 0x7D  # what memory holds before it is written


class Allocation:
    def __init__(self, nbytes: int) -> None:
        self._memory = np.full(nbytes + _ALIGN, _FILLED, np.uint8)

    def __int__(self) -> int:
        address: int = self._memory.ctypes.data
        return address + -address % _ALIGN

    def __add__(self, offset: int) -> int:
        return int(self) + offset

    def free(self) -> None:
        del self._memory


class Queue:
    """The work of one stream, done when somebody waits for it, as late as that: what is not ordered by an event happens
    in the least welcome order. `Queue.turns` says whose work is done first where either may be: "copies" are the
    streams that were made last, "launches" those that were made first."""

    every: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()
    numbers: ClassVar[Iterator[int]] = itertools.count()
    turns: ClassVar[str] = os.environ.get("EMULATED_TURNS", "copies")

    @classmethod
    def run_until(cls, done: Callable[[], bool]) -> None:
        while not done():
            ready = [number for number, stream in sorted(cls.every.items()) if stream.ready()]
            assert ready, "what is waited for never comes"
            stream = cls.every[ready[-1] if cls.turns == "copies" else ready[0]]
            stream.work.popleft()()

    @classmethod
    def drain(cls) -> None:
        """Everything: as a synchronous copy waits for all streams."""
        cls.run_until(lambda: not any(stream.work for stream in cls.every.values()))


class Wait:
    """Work that is none: it is done once an event has been recorded so many times."""

    def __init__(self, event: Event, times: int) -> None:
        self.event, self.times = event, times

    def __call__(self) -> None:
        pass


class Event:
    def __init__(self, flags: int = 0) -> None:
        self._at = self.asked = self.recorded = 0

    def record(self, stream: Stream) -> None:
        self.asked += 1
        stream.work.append(self._note)

    def _note(self) -> None:
        self._at, self.recorded = time.monotonic_ns(), self.recorded + 1

    def synchronize(self) -> None:
        assert self.asked, "an event is waited for that was never recorded"
        times = self.asked
        Queue.run_until(lambda: self.recorded >= times)

    def time_since(self, other: Event) -> float:
        """Milliseconds."""
        assert self._at and other._at
        return (self._at - other._at) / 1e6


class Stream:
    handle = 0

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        Queue.every[next(Queue.numbers)] = self

    def ready(self) -> bool:
        if not self.work:
            return False
        head = self.work[0]
        return not isinstance(head, Wait) or head.event.recorded >= head.times

    def wait_for_event(self, event: Event) -> None:
        self.work.append(Wait(event, event.asked))

    def synchronize(self) -> None:
        Queue.run_until(lambda: not self.work)


class Cuda:
    """What is used of pycuda.driver."""

    Error = type("Error", (Exception,), {})
    MemoryError = type("MemoryError", (Error,), {})
    Event = Event
    Stream = Stream
    mem_alloc = Allocation
    pinned: ClassVar[list[tuple[int, int]]] = []
    """(first, after the last) address of memory that copies are made from when they are made, not when they are asked
    for."""

    class event_flags:
        DISABLE_TIMING = 2

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        return 1 << 40, 1 << 40

    @classmethod
    def pagelocked_empty(cls, shape: Any, dtype: Any) -> NDArray[Any]:
        made: NDArray[Any] = np.empty(shape, dtype)
        cls.pinned.append((made.ctypes.data, made.ctypes.data + made.nbytes))
        return made

    @staticmethod
    def memcpy_htod(target: int, source: NDArray[Any]) -> None:
        Queue.drain()
        _copy(int(target), source)

    @staticmethod
    def memcpy_dtoh(target: NDArray[Any], source: int) -> None:
        Queue.drain()
        _copy_back(target, int(source))

    @staticmethod
    def memcpy_dtod(target: int, source: int, nbytes: int) -> None:
        Queue.drain()
        ctypes.memmove(int(target), int(source), nbytes)

    @classmethod
    def memcpy_htod_async(cls, target: int, source: NDArray[Any], stream: Stream) -> None:
        begin, end = source.ctypes.data, source.ctypes.data + source.nbytes
        whole = any(first <= begin and end <= last for first, last in cls.pinned)
        assert whole or not any(first < end and begin < last for first, last in cls.pinned), "across a range's border"
        held = source if whole else source.copy()
        stream.work.append(lambda: _copy(int(target), held))

    @staticmethod
    def memcpy_dtoh_async(target: NDArray[Any], source: int, stream: Stream) -> None:
        stream.work.append(lambda: _copy_back(target, int(source)))

    @staticmethod
    def memcpy_dtod_async(target: int, source: int, nbytes: int, stream: Stream) -> None:
        def move() -> None:
            ctypes.memmove(target, source, nbytes)

        stream.work.append(move)


def _copy(target: int, source: NDArray[Any]) -> None:
    assert source.flags.c_contiguous
    ctypes.memmove(target, source.ctypes.data, source.nbytes)


def _copy_back(target: NDArray[Any], source: int) -> None:
    assert target.flags.c_contiguous
    ctypes.memmove(target.ctypes.data, source, target.nbytes)


class EmulatedCard:
    """In place of driver.Card."""

    cuda, name, architecture, multiprocessors, block_shared = Cuda, "an emulated card", "sm_80", 4, 158 << 10

    def __init__(self, number: int = 0) -> None:
        self.stream = Stream()
        self.captured: list[Launch] | None = None

    @contextlib.contextmanager
    def current(self, what: str) -> Iterator[None]:
        yield

    def free_memory(self) -> int:
        return 1 << 40

    def close(self) -> None:
        pass


class EmulatedGraph:
    """In place of driver.Graph."""

    def __init__(self, card: EmulatedCard) -> None:
        self._card, self._launches = card, list[Launch]()

    @property
    def nodes(self) -> int:
        return len(self._launches)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self._card.captured = self._launches
        yield
        self._card.captured = None

    def launch(self) -> None:
        self._card.stream.work.extend(partial(run, launch) for launch in self._launches)

    def close(self) -> None:
        self._launches.clear()


class EmulatedKernels:
    """In place of kernel_functions.Kernels."""

    def __init__(self, card: EmulatedCard) -> None:
        self._card, self._loaded = card, set[KernelName]()
        self._held: list[Launch] | None = None

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """A launch that may run beside others does so as late as it may: before the one that waits, or at the end."""
        self._held = []
        yield
        self._release()
        self._held = None

    def _release(self) -> None:
        assert self._card.captured is not None and self._held is not None
        self._card.captured += self._held
        self._held.clear()

    def load(self, names: set[KernelName], progress: Callable[[str, int, int], None]) -> None:
        self._loaded |= names
        progress("card kernels", len(names), len(names))

    def launch(self, launch: Launch) -> None:
        assert launch.kernel in self._loaded, f"{launch.kernel} is launched and was not loaded"
        if self._card.captured is None:
            self._card.stream.work.append(partial(run, launch))
            return
        if self._held is not None and launch.joins:
            self._release()
        target = self._held if self._held is not None and launch.beside else self._card.captured
        target.append(launch)


class EmulatedMapping:
    """In place of driver.MappedMemory: the card sees the host's memory where the host does."""

    def __init__(self, card: EmulatedCard, start: int, nbytes: int) -> None:
        self._first, self._nbytes = start, nbytes
        Cuda.pinned.append((start, start + nbytes))

    def holds(self, address: int) -> bool:
        return self._first <= address < self._first + self._nbytes

    def address_of(self, address: int) -> int:
        return address

    def close(self) -> None:
        pass


class EmulatedLock:
    """In place of driver.LockedMemory; with EMULATED_LOCK=refuse as where pages cannot be locked."""

    def __init__(self, card: EmulatedCard, start: int, nbytes: int) -> None:
        assert start % 4096 == nbytes % 4096 == 0
        if os.environ.get("EMULATED_LOCK") == "refuse":
            raise PlanError(f"{nbytes} bytes cannot be locked", "see ulimit -l")
        self._range = start, start + nbytes
        assert not any(first < self._range[1] and start < last for first, last in self.locked), "locked twice"
        self.locked.append(self._range)
        Cuda.pinned.append(self._range)

    locked: ClassVar[list[tuple[int, int]]] = []

    def close(self) -> None:
        self.locked.remove(self._range)
        Cuda.pinned.remove(self._range)


def stand_in(replace: Callable[[object, str, object], None]) -> None:
    """Puts the emulated driver in the real one's place; `replace(module, name, value)` is setattr or a fixture's."""
    for name, value in (
        ("Card", EmulatedCard),
        ("Graph", EmulatedGraph),
        ("Kernels", EmulatedKernels),
        ("MappedMemory", EmulatedMapping),
    ):
        replace(card_executor, name, value)
    replace(expert_source, "LockedMemory", EmulatedLock)
    replace(model_workload, "load_pycuda", lambda: Cuda)
    replace(model_workload, "find_compiler", lambda: "")


def load(start: CardStart) -> ModelWorkload:
    """A card worker's workload over emulated kernels."""
    stand_in(setattr)
    return ModelWorkload(start)
