"""llama.cpp's tokenizer out of an installed wheel (xllamacpp or llama-cpp-python), called through ctypes: what ours is
measured against. Tests that need it skip where no such wheel is installed."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

import pytest

PARAMETER_BYTES = 512  # more than any version's llama_model_params; passed by value, so more does no harm


class _ModelParameters(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint8 * PARAMETER_BYTES),)


@functools.cache
def library_path() -> Path | None:
    """The shared library that exports llama.h, or None."""
    for package, pattern in (("xllamacpp", "xllamacpp*.so"), ("llama_cpp", "lib/libllama.so")):
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            for path in sorted(Path(folder).glob(pattern)):
                return path
    return None


def require_library() -> None:
    if library_path() is None:
        pytest.skip("no llama.cpp wheel is installed (pip install 'bloomery[oracle]')")


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_path()
    assert path is not None
    library = ctypes.CDLL(str(path))
    pointer, text, flag, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool, ctypes.c_int32
    library.llama_model_default_params.restype = _ModelParameters
    library.llama_model_load_from_file.argtypes = (text, _ModelParameters)
    library.llama_model_load_from_file.restype = pointer
    library.llama_model_get_vocab.argtypes = (pointer,)
    library.llama_model_get_vocab.restype = pointer
    library.llama_model_free.argtypes = (pointer,)
    library.llama_tokenize.argtypes = (pointer, text, number, pointer, number, flag, flag)
    library.llama_token_to_piece.argtypes = (pointer, number, pointer, number, number, flag)
    library.llama_detokenize.argtypes = (pointer, pointer, number, pointer, number, flag, flag)
    library.llama_vocab_n_tokens.argtypes = (pointer,)
    library.llama_vocab_is_eog.argtypes = (pointer, number)
    library.llama_vocab_is_eog.restype = flag
    for name in ("bos", "eos", "eot", "pad", "get_add_bos", "get_add_eos"):
        getattr(library, f"llama_vocab_{name}").argtypes = (pointer,)
    library.llama_vocab_get_add_bos.restype = library.llama_vocab_get_add_eos.restype = flag
    library.llama_log_set(_SILENT, None)
    library.llama_backend_init()
    return library


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENT(level: int, text: bytes, user: int) -> None:
    pass


def _vocabulary_only() -> _ModelParameters:
    """Default parameters with `vocab_only` set. The booleans begin, aligned to 8 bytes, with vocab_only, check_tensors,
    use_extra_bufts, of which only the third is true by default; that finds them in every version."""
    parameters = _library().llama_model_default_params()
    data = bytes(parameters.bytes)
    place = next(place for place in range(0, len(data), 8) if data[place : place + 3] == b"\0\0\1")
    parameters.bytes[place] = 1
    return parameters


class LlamaVocabulary:
    """llama.cpp's view of the vocabulary of a file."""

    def __init__(self, path: Path) -> None:
        self._library = _library()
        self._model = self._library.llama_model_load_from_file(str(path).encode(), _vocabulary_only())
        assert self._model, f"llama.cpp cannot load {path}"
        self._vocabulary = self._library.llama_model_get_vocab(self._model)
        self.size: int = self._library.llama_vocab_n_tokens(self._vocabulary)
        self._tokens = (ctypes.c_int32 * 4096)()
        self._text = ctypes.create_string_buffer(1 << 16)

    def close(self) -> None:
        self._library.llama_model_free(self._model)

    def encode(self, text: bytes, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        while True:
            count = self._library.llama_tokenize(
                self._vocabulary, text, len(text), self._tokens, len(self._tokens), add_special, parse_special
            )
            if count >= 0:
                return self._tokens[:count]
            self._tokens = (ctypes.c_int32 * -count)()

    def piece(self, token: int, *, special: bool = True) -> bytes:
        count = self._library.llama_token_to_piece(self._vocabulary, token, self._text, len(self._text), 0, special)
        assert count >= 0
        return self._text.raw[:count]

    def detokenize(self, tokens: list[int], *, special: bool) -> bytes:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        count = self._library.llama_detokenize(
            self._vocabulary, array, len(tokens), self._text, len(self._text), False, special
        )
        assert count >= 0
        return self._text.raw[:count]

    def token(self, name: str) -> int | None:
        """bos, eos, eot or pad."""
        number: int = getattr(self._library, f"llama_vocab_{name}")(self._vocabulary)
        return number if number >= 0 else None

    def adds(self, name: str) -> bool:
        """bos or eos."""
        return bool(getattr(self._library, f"llama_vocab_get_add_{name}")(self._vocabulary))

    def end_tokens(self) -> set[int]:
        return {token for token in range(self.size) if self._library.llama_vocab_is_eog(self._vocabulary, token)}
