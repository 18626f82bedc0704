"""Compiled kernels: from a kernel's name to the address of its machine code, through a cache on disk.

Owns the cache folder, its key, and the files in it. It does not know what kernels do (`kernels`).

The folder is `$BLOOMERY_CACHE/numba/<key>`, else `bloomery/numba/<key>` in `$XDG_CACHE_HOME` or `~/.cache`. The key is
a hash of the versions of Numba, llvmlite and gguf (value tables), of the CPU's name and features and of the instruction
set in use: code compiled for another CPU is never found. One file a kernel, named by it and by a hash of the sources
that it is made of (`kernel_sources`), so that an edit elsewhere compiles nothing anew. Files are written aside and
renamed into place; a lock a file, so that processes that start together share the work instead of repeating it. A file
that does not match its checksum is compiled anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import types
from numba.core import config as _config
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from bloomery.cpu_experts.isa import active_isa, host_features, refusal
from bloomery.cpu_experts.kernel_sources import source_digest
from bloomery.cpu_experts.kernels import kernel_factory, kernel_function
from bloomery.runtime.cache_base import cache_base
from bloomery.runtime.errors import PlanError

numba_config: Any = _config
log = logging.getLogger(__name__)

INTERPRETER: Final = "bloomery.cpu_experts.interpreter"
"""The module whose functions Numba's own cache keeps."""
_INT: Final = types.int64
_SIGNATURE: Final = ((_INT, _INT, _INT, _INT), types.void)
_loaded: dict[str, tuple[Any, int]] = {}  # the libraries must outlive their addresses


def cache_key() -> str:
    """Hex digest of everything that compiled code depends on beside its own sources: this module is how it is made."""
    features = ",".join(f"{name}={present}" for name, present in sorted(host_features().items()))
    settings = (os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_OPT"))
    versions = (numba.__version__, llvmlite.__version__, version("gguf"))
    compiling = Path(__file__).read_text(encoding="utf-8")
    facts = (*versions, llvm.get_host_cpu_name(), features, active_isa(), *settings, compiling)
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


@functools.cache
def kernel_path(name: str) -> Path:
    """Where the kernel's compiled code is kept. KeyError for an unknown name."""
    module, factory, variant = kernel_factory(name)
    sources = source_digest(module)
    key = hashlib.sha256(f"{module}.{factory}({variant})\0{sources}".encode()).hexdigest()[:16]
    return cache_folder() / f"{name}.{key}.kernel"


@functools.cache
def cache_folder() -> Path:
    """The folder of this key, created. Where it cannot be written, a private temporary one, which is said once."""
    folder = cache_base() / "numba" / cache_key()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        return folder
    except OSError as error:
        substitute = _temporary_folder()
        log.warning("compiled kernels cannot be kept in %s (%s); using %s instead", folder, error, substitute)
        return substitute


def _temporary_folder() -> Path:
    """A folder of this user and key below the system's temporary folder; refuses one that others could have filled."""
    folder = Path(tempfile.gettempdir()) / f"bloomery-{os.getuid()}-{cache_key()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if facts.st_uid == os.getuid() and not facts.st_mode & 0o022 and folder.is_dir() and not folder.is_symlink():
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="bloomery-numba-"))


def use_numba_cache() -> None:
    """Sends Numba's own cache (functions with cache=True outside the kernels) into a folder of this one, named by their
    sources, since Numba looks at the file of a function only. Call it before their modules are imported."""
    folder = str(cache_folder() / f"numba.{source_digest(INTERPRETER)[:16]}")
    os.environ["NUMBA_CACHE_DIR"] = folder
    numba_config.CACHE_DIR = folder


def compile_kernel(name: str) -> int:
    """Address of the C function of kernel `name` (see `stage`), loaded from the cache or compiled into it.

    Waits while another process compiles the same kernel. Raises PlanError on a CPU without the needed instructions,
    KeyError for an unknown name.
    """
    if name not in _loaded:
        if (reason := refusal()) is not None:
            raise PlanError(reason, "take a CPU with AVX2, FMA and F16C, or --executor reference")
        path = kernel_path(name)
        kernel = _load(path)
        if kernel is None:
            with _locked(path.with_suffix(".lock")):
                kernel = _load(path) or _compile(name, path)
        _loaded[name] = kernel
    return _loaded[name][1]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(name: str, path: Path) -> tuple[Any, int]:
    function = kernel_function(name)
    function.__name__ = function.__qualname__ = name
    kernel: Any = CFunc(function, _SIGNATURE, locals={}, options={"error_model": "numpy"})
    kernel.compile()
    library = kernel._library
    head = json.dumps([kernel.native_name]).encode()
    body = b"%s\n%s" % (head, library._get_compiled_object())
    content = hashlib.sha256(body).digest() + body
    _store(path, content)
    # Not the code in memory: functions inside it were compiled on their own, those of the object once more with it.
    loaded = _from_content(content)
    assert loaded is not None, "a checksum just made"
    return loaded


def _store(path: Path, content: bytes) -> None:
    """Writes aside and renames. A full disk costs the next start a compilation, not this one its success."""
    file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.", delete=False)  # noqa: SIM115
    try:
        with file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        os.unlink(file.name)
        log.warning("compiled code of %s cannot be kept in %s (%s)", path.stem, path.parent, error.strerror)


def _load(path: Path) -> tuple[Any, int] | None:
    """The kernel in a cache file; None if there is none or it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return _from_content(content)


def _from_content(content: bytes) -> tuple[Any, int] | None:
    """The kernel in the bytes of a cache file; None if they are damaged."""
    checksum, body = content[:32], content[32:]
    if hashlib.sha256(body).digest() != checksum:
        return None
    head, _, machine_code = body.partition(b"\n")
    rtsys.initialize(cpu_target.target_context)  # Numba's wrapper of a C function names symbols of its runtime
    # An engine for each kernel: inner functions of kernels that other processes compiled may have the same names.
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    return (engine, machine_code), int(engine.get_function_address(json.loads(head)[0]))
