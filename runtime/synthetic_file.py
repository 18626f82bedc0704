"""Drafts of synthetic models become model files in a cache folder, made once and found again.

Owns the folder, the file's name (which changes whenever its contents would), the check for disk space and the writing.
Knows no architecture.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from bloomery.runtime.cache_base import cache_base
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.quant_types import Bytes
from bloomery.runtime.synthetic_blocks import random_blocks, random_values
from bloomery.runtime.synthetic_model import Draft, DraftTensor
from bloomery.runtime.synthetic_templates import synthetic_draft

WRITER_VERSION: Final = 1  # of the way in which bytes are drawn: a new one makes new files
SPARE_BYTES: Final = 1 << 30  # of the disk, which stay free
PIECE_ELEMENTS: Final = 1 << 24

Progress = Callable[[str, int, int], None]


def bench_folder() -> Path:
    """`$BLOOMERY_CACHE/bench`, else `bloomery/bench` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return cache_base() / "bench"


def synthetic_file(
    name: str,
    layers: int = 0,
    mix: str = "",
    experts: int = 0,
    used: int = 0,
    *,
    folder: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Path:
    """The benchmark file of a model by name (see `synthetic_draft`), made if it is not in the folder yet. Raises
    BloomeryError for what cannot be made, and if the disk has no room."""
    draft = synthetic_draft(name, layers, mix, experts, used)
    folder = folder or bench_folder()
    path = folder / f"{name}-{draft.layers}-layers-{draft.mix}-{digest(draft)}.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder, draft.written_bytes)
        write_draft(draft, path, progress=progress)
    return path


def digest(draft: Draft) -> str:
    """Names the contents: keys, tensors and the way they are drawn."""
    contents = (WRITER_VERSION, draft.architecture, draft.keys, draft.tensors)
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:8]


def check_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes + SPARE_BYTES:
        raise BloomeryError(
            f"{folder}: {free >> 20} MiB are free, the benchmark file takes {nbytes >> 20} MiB and"
            f" {SPARE_BYTES >> 20} MiB shall stay free",
            "ask for fewer layers (--layers), remove older files there, or set BLOOMERY_CACHE to another disk",
        )


def write_draft(
    draft: Draft, path: Path, *, seed: int = 1, progress: Progress = lambda stage, done, total: None
) -> None:
    """Writes the model file; the same draft and seed give the same bytes. `path` appears only when it is whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with contextlib.ExitStack() as stack:
        stack.callback(part.unlink, missing_ok=True)
        writer = GGUFWriter(part, draft.architecture)
        stack.callback(writer.close)
        _add_keys(writer, draft)
        for tensor in draft.tensors:
            blocks = tensor.quant_type
            shape = (*reversed(tensor.shape[1:]), blocks.row_bytes(tensor.shape[0]))
            kind = GGMLQuantizationType(blocks.type_id)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for index, tensor in enumerate(draft.tensors):
            if tensor.hollow:
                _leave_hole(writer, tensor)
                continue
            data = np.empty(tensor.nbytes, np.uint8)
            for piece in _pieces(tensor, np.random.default_rng([seed, index]), data):
                done += piece
                progress("write the benchmark file", done, draft.written_bytes)
            writer.write_tensor_data(data)
        writer.close()
        os.replace(part, path)


def _leave_hole(writer: GGUFWriter, tensor: DraftTensor) -> None:
    """What `write_tensor_data` does, for a tensor of zeros that need not be written."""
    assert writer.fout is not None
    [file], [waiting] = writer.fout, writer.tensors
    assert waiting.pop(tensor.name).nbytes == tensor.nbytes
    writer.write_padding(file, file.tell())
    end = file.tell() + tensor.nbytes
    end = GGUFWriter.ggml_pad(end, writer.data_alignment)
    file.flush()
    file.truncate(end)
    file.seek(end)


def _pieces(tensor: DraftTensor, generator: np.random.Generator, data: Bytes) -> Iterator[int]:
    """Fills `data` piece by piece; yields the bytes of each."""
    whole, blocks = tensor.elements, tensor.quant_type
    for first in range(0, whole, PIECE_ELEMENTS):
        count = min(PIECE_ELEMENTS, whole - first)
        begin, end = (blocks.row_bytes(element) for element in (first, first + count))
        if tensor.mean:
            data[begin:end] = random_values(generator, count, tensor.mean, tensor.deviation).view(np.uint8)
        else:
            data[begin:end] = random_blocks(generator, blocks, count, tensor.deviation)
        yield end - begin


def _add_keys(writer: GGUFWriter, draft: Draft) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
        tuple: lambda key, value: writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64),
    }
    for key, value in draft.keys.items():
        adders[type(value)](key, value)
