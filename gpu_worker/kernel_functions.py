"""Kernels on the card: compiled files loaded as modules, and their functions launched on the card's stream.

Owns modules and the launch call, and which stream a launch goes to. Functions are launched by ctypes, since PyCUDA
cannot let a kernel begin before its predecessor has ended (`kernels/machine.cuh`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

import numpy as np

from bloomery.gpu_worker.compile_cache import cubin
from bloomery.gpu_worker.driver import Card, CardError, Library
from bloomery.gpu_worker.launches import KernelName, Launch
from bloomery.gpu_worker.side_stream import SideStream

_PROGRAMMATIC_SERIALISATION = 6
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_ANYWAY = 0  # a kernel's own shared memory counts, too


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Kernels:
    """Functions of the compiled kernel files. Use it while the card's context is current.

    On cards that can (sm_90 and newer) launches overlap, unless BLOOMERY_CARD_OVERLAP=0.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._library = Library(card.name)
        self._modules: dict[tuple[str, str], ctypes.c_void_p] = {}
        self._functions: dict[KernelName, ctypes.c_void_p] = {}
        self._shared: dict[KernelName, int] = {}
        self._attribute = _Attribute(_PROGRAMMATIC_SERIALISATION, 0, 1, b"")
        able = int(card.architecture.removeprefix("sm_")) >= 90
        self._side = SideStream(card, self._library)
        self._apart = False
        self.overlap = able and os.environ.get("BLOOMERY_CARD_OVERLAP", "1") != "0"

    def load(self, names: set[KernelName], progress: Callable[[str, int, int], None]) -> None:
        """Compiles what is not in the cache and loads all of it."""
        files = sorted({(name.file, name.quant_type) for name in names} - self._modules.keys())
        for done, (file, kind) in enumerate(files):
            progress("card kernels", done, len(files))
            module = ctypes.c_void_p()
            path = str(cubin(file, kind, self._card.architecture)).encode()
            self._library.call("cuModuleLoad", ctypes.byref(module), path)
            self._modules[file, kind] = module
        for name in names - self._functions.keys():
            function = ctypes.c_void_p()
            module = self._modules[name.file, name.quant_type]
            self._library.call("cuModuleGetFunction", ctypes.byref(function), module, name.function.encode())
            self._functions[name] = function

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """While a graph is captured: launches that may run beside others do. All are joined at the end."""
        self._apart = True
        try:
            yield
            self._side.join()
        finally:
            self._apart = self._side.away = False

    def launch(self, launch: Launch) -> None:
        """Puts a launch on the card's stream; CardError names the kernel and the op."""
        away, joins = self._apart and launch.beside, self._apart and launch.joins
        words = np.array(launch.words, np.int64)
        size = ctypes.c_size_t(words.nbytes)
        extra = (ctypes.c_void_p * 5)(_BUFFER_POINTER, words.ctypes.data, _BUFFER_SIZE, ctypes.addressof(size), _END)
        configuration = _Configuration(
            launch.grid,
            (launch.threads, 1, 1),
            launch.shared,
            self._side.handle if away else self._card.stream.handle,
            ctypes.pointer(self._attribute),
            int(self.overlap and not (away or joins)),  # who follows another stream's launch waits for its end
        )
        function = self._functions[launch.kernel]
        try:
            if joins:
                self._side.join()
            if away:
                self._side.leave()
            if launch.shared > self._shared.get(launch.kernel, _SHARED_ANYWAY):
                self._library.call("cuFuncSetAttribute", function, _MOST_SHARED, launch.shared)
                self._shared[launch.kernel] = launch.shared
            self._library.call("cuLaunchKernelEx", ctypes.byref(configuration), function, None, extra)
        except CardError as error:
            raise CardError(f"{error.message} (launching {launch.kernel} for op {launch.label})", error.hint) from error
