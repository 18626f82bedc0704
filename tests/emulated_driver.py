"""A driver for the card that is not there: the real CardExecutor, and with it the real worker, over emulated kernels.

Stands in for PyCUDA's module, streams, graphs and mapped memory: the card's memory is this process's, everything is
done at once and in order. A graph keeps what was launched while it was captured and runs it again, so that a launch
that was not captured is missed. Knows no expectations.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from emulated_card import run
from numpy.typing import NDArray

from bloomery.gpu_worker import card_executor, model_workload
from bloomery.gpu_worker.launches import KernelName, Launch
from bloomery.gpu_worker.model_workload import ModelWorkload
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


class Event:
    def __init__(self, flags: int = 0) -> None:
        self._at = 0

    def record(self, stream: object) -> None:
        self._at = time.monotonic_ns()

    def synchronize(self) -> None:
        assert self._at, "an event is waited for that was never recorded"

    def time_since(self, other: Event) -> float:
        """Milliseconds."""
        return (self._at - other._at) / 1e6


class Cuda:
    """What is used of pycuda.driver."""

    Error = type("Error", (Exception,), {})
    MemoryError = type("MemoryError", (Error,), {})
    Event = Event
    mem_alloc = Allocation

    class event_flags:
        DISABLE_TIMING = 2

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        return 1 << 40, 1 << 40

    @staticmethod
    def pagelocked_empty(shape: Any, dtype: Any) -> NDArray[Any]:
        return np.empty(shape, dtype)

    @staticmethod
    def memcpy_htod(target: int, source: NDArray[Any]) -> None:
        assert source.flags.c_contiguous
        ctypes.memmove(int(target), source.ctypes.data, source.nbytes)

    @staticmethod
    def memcpy_dtoh(target: NDArray[Any], source: int) -> None:
        assert target.flags.c_contiguous
        ctypes.memmove(target.ctypes.data, int(source), target.nbytes)

    @staticmethod
    def memcpy_dtod(target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(int(target), int(source), nbytes)

    @classmethod
    def memcpy_htod_async(cls, target: int, source: NDArray[Any], stream: object) -> None:
        cls.memcpy_htod(target, source)

    @classmethod
    def memcpy_dtoh_async(cls, target: NDArray[Any], source: int, stream: object) -> None:
        cls.memcpy_dtoh(target, source)


class Stream:
    handle = 0

    def synchronize(self) -> None:
        pass


class EmulatedCard:
    """In place of driver.Card."""

    cuda, name, architecture, multiprocessors = Cuda, "an emulated card", "sm_80", 4

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
        for launch in self._launches:
            run(launch)

    def close(self) -> None:
        self._launches.clear()


class EmulatedKernels:
    """In place of kernel_functions.Kernels."""

    def __init__(self, card: EmulatedCard) -> None:
        self._card, self._loaded = card, set[KernelName]()

    def load(self, names: set[KernelName], progress: Callable[[str, int, int], None]) -> None:
        self._loaded |= names
        progress("card kernels", len(names), len(names))

    def launch(self, launch: Launch) -> None:
        assert launch.kernel in self._loaded, f"{launch.kernel} is launched and was not loaded"
        if self._card.captured is None:
            run(launch)
        else:
            self._card.captured.append(launch)


class EmulatedMapping:
    """In place of driver.MappedMemory: the card sees the host's memory where the host does."""

    def __init__(self, card: EmulatedCard, start: int, nbytes: int) -> None:
        self._first, self._nbytes = start, nbytes

    def holds(self, address: int) -> bool:
        return self._first <= address < self._first + self._nbytes

    def address_of(self, address: int) -> int:
        return address

    def close(self) -> None:
        pass


def stand_in(replace: Callable[[object, str, object], None]) -> None:
    """Puts the emulated driver in the real one's place; `replace(module, name, value)` is setattr or a fixture's."""
    for name, value in (
        ("Card", EmulatedCard),
        ("Graph", EmulatedGraph),
        ("Kernels", EmulatedKernels),
        ("MappedMemory", EmulatedMapping),
    ):
        replace(card_executor, name, value)
    replace(model_workload, "load_pycuda", lambda: Cuda)
    replace(model_workload, "find_compiler", lambda: "")


def load(start: CardStart) -> ModelWorkload:
    """A card worker's workload over emulated kernels."""
    stand_in(setattr)
    return ModelWorkload(start)
