"""The CUDA driver: PyCUDA where it has what is needed, libcuda by ctypes where it has not (graphs).

Owns finding a card, the words for what is missing, contexts, and the capture and replay of graphs. PyCUDA is imported
here and only when a card is asked for: without it, without a driver or a card every other part of bloomery works.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, Final

from bloomery.runtime.errors import PlanError, WorkerLost

_CAPTURE_THREAD_LOCAL = 1
_PORTABLE, _DEVICE_MAP, _READ_ONLY = 1, 2, 8
_INSTALL = "pip install 'bloomery[cuda]', or run with --plan cpu"

_DECLARED: Final = 5 << 10
_BLOCK_SHARED: Final = {
    name: (kib << 10) - _DECLARED
    for name, kib in (("sm_80", 163), ("sm_87", 163), ("sm_90", 227), ("sm_100", 227), ("sm_103", 227))
}
_LEAST_BLOCK_SHARED: Final = (99 << 10) - _DECLARED
"""Bytes of shared memory that a block can have at most (CUDA C++ Programming Guide, technical specifications), less the
most that a kernel here declares itself; cards that are not named have 99 KiB or more."""


class CardError(WorkerLost):
    """The CUDA driver reported a failure; the context and what it held are lost."""


def load_pycuda() -> Any:
    """The module pycuda.driver, initialised. PlanError that says what is missing: PyCUDA, the driver or a card."""
    try:
        import pycuda.driver as cuda
    except ModuleNotFoundError as error:
        raise PlanError(f"plans with a card need PyCUDA, which is not installed ({error})", _INSTALL) from error
    except ImportError as error:
        raise PlanError(
            f"PyCUDA finds no NVIDIA driver on this machine ({error})", "install the driver, or run with --plan cpu"
        ) from error
    try:
        cuda.init()
        count = cuda.Device.count()
    except cuda.Error as error:
        raise PlanError(
            f"the NVIDIA driver does not start ({error})", "see nvidia-smi, or run with --plan cpu"
        ) from error
    if count == 0:
        raise PlanError("the NVIDIA driver sees no card", "see nvidia-smi, or run with --plan cpu")
    return cuda


class Card:
    """One card with a context of its own. Enter `current()` in the thread that talks to it."""

    def __init__(self, number: int = 0) -> None:
        self.cuda = load_pycuda()
        if number >= self.cuda.Device.count():
            raise PlanError(f"there is no card {number}: the driver sees {self.cuda.Device.count()}", "see nvidia-smi")
        self._device = self.cuda.Device(number)
        self.name: str = self._device.name()
        major, minor = self._device.compute_capability()
        self.architecture = f"sm_{major}{minor}"
        if major < 8:
            raise PlanError(f"card {number}, {self.name}, is {self.architecture}, expected sm_80 or newer", _INSTALL)
        self.block_shared = _BLOCK_SHARED.get(self.architecture, _LEAST_BLOCK_SHARED)
        self.multiprocessors: int = self._device.get_attribute(self.cuda.device_attribute.MULTIPROCESSOR_COUNT)
        try:
            self._context = self._device.make_context()
        except self.cuda.Error as error:
            raise PlanError(f"card {number}, {self.name}, gives no context ({error})", "see nvidia-smi") from error
        self.stream = self.cuda.Stream()
        self.cuda.Context.pop()

    @contextlib.contextmanager
    def current(self, what: str) -> Iterator[None]:
        """Makes the context current; CUDA errors inside become a CardError that says during `what` they came."""
        try:
            self._context.push()
            try:
                yield
            finally:
                self.cuda.Context.pop()
        except self.cuda.MemoryError as error:
            raise PlanError(f"the card's memory does not suffice for {what} ({error})", "see nvidia-smi") from error
        except self.cuda.Error as error:
            raise CardError(f"{self.name}: {error} ({what})", "the card's context is lost; start it anew") from error

    def free_memory(self) -> int:
        """Free bytes of the card; call it inside `current`."""
        return int(self.cuda.mem_get_info()[0])

    def close(self) -> None:
        with contextlib.suppress(self.cuda.Error):
            self._context.detach()


class Library:
    """Functions of libcuda that PyCUDA does not have. Failures become a CardError that names the function."""

    def __init__(self, card_name: str) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._card_name = card_name

    def try_call(self, function: str, *arguments: Any) -> int:
        """The function's status."""
        status: int = getattr(self._library, function)(*arguments)
        return status

    def call(self, function: str, *arguments: Any) -> None:
        status = self.try_call(function, *arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            words = text.value.decode() if text.value else f"error {status}"
            raise CardError(f"{self._card_name}: {function}: {words}", "the card's context is lost; start it anew")


class _Registered:
    """Host memory of this process registered with the driver until it is closed. PlanError if it cannot be."""

    def __init__(self, card: Card, start: int, nbytes: int, flags: int, what: str, hint: str) -> None:
        self._library, self._start = Library(card.name), ctypes.c_void_p(start)
        size = ctypes.c_size_t(nbytes)
        status = self._library.try_call("cuMemHostRegister_v2", self._start, size, ctypes.c_uint(flags))
        if status:
            raise PlanError(
                f"{card.name}: {nbytes} bytes of {what} cannot be locked for the card (error {status})", hint
            )

    def close(self) -> None:
        self._library.try_call("cuMemHostUnregister", self._start)


class MappedMemory(_Registered):
    """Host memory of this process registered with the driver: copies from and to it are asynchronous, and kernels reach
    it at `address`. PlanError if it cannot be locked."""

    def __init__(self, card: Card, start: int, nbytes: int) -> None:
        hint = "raise the limit on locked memory (ulimit -l)"
        super().__init__(card, start, nbytes, _PORTABLE | _DEVICE_MAP, "host memory", hint)
        self._first, self._nbytes = start, nbytes
        address = ctypes.c_uint64()
        self._library.call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), self._start, ctypes.c_uint(0))
        self.address = address.value

    def holds(self, address: int) -> bool:
        """Whether an address of this process lies in it."""
        return self._first <= address < self._first + self._nbytes

    def address_of(self, address: int) -> int:
        """The card's address for one of this process."""
        return self.address + address - self._first


class LockedMemory(_Registered):
    """Pages of this process that may only be read, such as a mapped file's, locked so that the card copies out of them
    itself. PlanError if they cannot be."""

    def __init__(self, card: Card, start: int, nbytes: int) -> None:
        super().__init__(card, start, nbytes, _PORTABLE | _READ_ONLY, "the mapped file", "see ulimit -l")


class Graph:
    """Kernels of a stream captured once and replayed. PyCUDA has no graphs, so libcuda is called directly."""

    def __init__(self, card: Card) -> None:
        self._library = Library(card.name)
        self._stream = ctypes.c_void_p(card.stream.handle)
        self._executable = ctypes.c_void_p()
        self.nodes = 0

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """What is launched on the card's stream inside becomes the graph instead of running."""
        self._library.call("cuStreamBeginCapture_v2", self._stream, _CAPTURE_THREAD_LOCAL)
        graph = ctypes.c_void_p()
        try:
            yield
        except BaseException:
            self._library.try_call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
            raise
        self._library.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        count = ctypes.c_size_t()
        self._library.call("cuGraphGetNodes", graph, None, ctypes.byref(count))
        self.nodes = count.value
        self._library.call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0))
        self._library.call("cuGraphDestroy", graph)
        self._library.call("cuGraphUpload", self._executable, self._stream)

    def launch(self) -> None:
        """Runs the graph on the card's stream; returns at once."""
        self._library.call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        if self._executable:
            self._library.try_call("cuGraphExecDestroy", self._executable)
            self._executable = ctypes.c_void_p()
