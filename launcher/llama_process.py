"""llama.cpp at the other end of a pipe: run as a file by the interpreter in whose environment its wheel is installed.

Owns the calls of llama.h through ctypes (xllamacpp's or llama-cpp-python's shared library). It imports nothing but the
standard library, since bloomery need not be installed there. One JSON object a line in, one out:

* {"call": "open", "package", "model", "threads", "context", "batch", "micro_batch", "repack"} -> {"package", "version",
  "system"}
* {"call": "run", "keep", "tokens", "batch"}: drops all positions from `keep` on, evaluates the tokens, so many a call,
  each time up to the logits of the last -> {"seconds", "cpu_seconds"}

An answer {"error", "hint"} is the end of the process.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

PACKAGES = {  # import name: pattern of the library in its folder, name of the distribution
    "xllamacpp": ("xllamacpp*.so", "xllamacpp"),
    "llama_cpp": ("lib/libllama.so", "llama-cpp-python"),
}
PARAMETER_BYTES = 512  # more than any version's parameter structs; they are passed by value, so more does no harm
ERROR_LEVEL = 4


class PeerError(Exception):
    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Parameters(ctypes.Structure):
    """Model or context parameters of any version. Only places that all versions share are touched."""

    _fields_ = (("bytes", ctypes.c_uint8 * PARAMETER_BYTES),)

    def put(self, offset: int, value: int) -> None:
        ctypes.c_uint32.from_buffer(self, offset).value = value


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


def _write_error(level: int, text: bytes, user: int) -> None:
    if level == ERROR_LEVEL:
        sys.stderr.write(text.decode("utf-8", "replace"))


# kept here: llama.cpp calls it for as long as the process lives
log_errors = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_write_error)


def find_library(package: str) -> tuple[str, Path]:
    """The package whose library exports llama.h, and that library."""
    for name in PACKAGES if package == "auto" else (package,):
        found = importlib.util.find_spec(name)
        for folder in (found.submodule_search_locations or ()) if found else ():
            for path in sorted(Path(folder).glob(PACKAGES[name][0])):
                return name, path
    wanted = " or ".join(distribution for _, distribution in PACKAGES.values()) if package == "auto" else package
    raise PeerError(
        f"{sys.executable} has no llama.cpp ({wanted} is not installed there)",
        "pip install xllamacpp, or name the interpreter of another environment with --peer-python",
    )


def load_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "llama_model_default_params": (Parameters, ()),
        "llama_context_default_params": (Parameters, ()),
        "llama_model_load_from_file": (pointer, (ctypes.c_char_p, Parameters)),
        "llama_init_from_model": (pointer, (pointer, Parameters)),
        "llama_print_system_info": (ctypes.c_char_p, ()),
        "llama_set_n_threads": (None, (pointer, number, number)),
        "llama_get_memory": (pointer, (pointer,)),
        "llama_memory_seq_rm": (ctypes.c_bool, (pointer, number, number, number)),
        "llama_batch_get_one": (Batch, (pointer, number)),
        "llama_decode": (number, (pointer, Batch)),
        "llama_synchronize": (None, (pointer,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(log_errors, None)
    library.llama_backend_init()
    return library


def model_parameters(library: ctypes.CDLL, repack: bool) -> Parameters:
    """Defaults but for `use_extra_bufts`, which lets weights be repacked at load. The booleans begin, aligned to 8
    bytes, with vocab_only, check_tensors, use_extra_bufts, of which only the third is true by default."""
    parameters: Parameters = library.llama_model_default_params()
    data = bytes(parameters.bytes)
    place = next(place for place in range(0, len(data), 8) if data[place : place + 3] == b"\0\0\1")
    parameters.bytes[place + 2] = int(repack)
    return parameters


class Peer:
    """An open model and its one context."""

    def __init__(self, call: dict[str, Any]) -> None:
        self.package, path = find_library(call["package"])
        self._library = library = load_library(path)
        model = library.llama_model_load_from_file(call["model"].encode(), model_parameters(library, call["repack"]))
        if not model:
            raise PeerError(f"llama.cpp cannot load {call['model']}", "its messages are above; run without --against")
        parameters = library.llama_context_default_params()
        for offset, name in enumerate(("context", "batch", "micro_batch")):  # n_ctx, n_batch, n_ubatch
            parameters.put(4 * offset, call[name])
        self._context = library.llama_init_from_model(model, parameters)
        if not self._context:
            raise PeerError("llama.cpp cannot make a context", "its messages are above; run without --against")
        library.llama_set_n_threads(self._context, call["threads"], call["threads"])
        self._memory = library.llama_get_memory(self._context)

    def facts(self) -> dict[str, str]:
        distribution = PACKAGES[self.package][1]
        system = self._library.llama_print_system_info().decode()
        return {"package": distribution, "version": importlib.metadata.version(distribution), "system": system}

    def run(self, keep: int, tokens: list[int], batch: int) -> dict[str, float]:
        library, context = self._library, self._context
        if not library.llama_memory_seq_rm(self._memory, 0, keep, -1):
            raise PeerError(f"llama.cpp cannot take the cache back to {keep} tokens", "measure at depth 0")
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        begun, cpu = time.perf_counter(), time.process_time()
        for first in range(0, len(tokens), batch):
            count = min(batch, len(tokens) - first)
            status = library.llama_decode(
                context, library.llama_batch_get_one(ctypes.addressof(array) + 4 * first, count)
            )
            library.llama_synchronize(context)
            if status:
                raise PeerError(f"llama_decode returned {status}", "its messages are above")
        return {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - cpu}


def serve() -> None:
    peer: Peer | None = None
    for line in sys.stdin:
        call = json.loads(line)
        if call["call"] == "open":
            peer = Peer(call)
            answer: dict[str, Any] = peer.facts()
        else:
            assert peer is not None
            answer = peer.run(call["keep"], call["tokens"], call["batch"])
        print(json.dumps(answer), flush=True)


def main() -> int:
    try:
        serve()
    except PeerError as error:
        print(json.dumps({"error": str(error), "hint": error.hint}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
