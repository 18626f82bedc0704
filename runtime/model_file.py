"""Model files: a GGUF file or its shards as one mapping of metadata and one of tensors, memory-mapped and read-only.

Owns typed access to keys and tensors with errors that name them. Does not know the container's bytes
(`gguf_reader`), how shards are found (`gguf_shards`), nor any architecture.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, TypeVar, get_origin, overload

import numpy as np
import numpy.typing as npt

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.gguf_reader import DAMAGED_HINT, Container, Value
from bloomery.runtime.gguf_shards import read_shards
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.scale_check import check_scales

__all__ = ["REQUIRED", "ModelFile", "QuantType", "Tensor", "Value"]

_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, which Python's mmap does not name
_MAP_CHUNK: Final = 64 << 20
_SHARE_OF_MEMORY: Final = 0.9  # of what is available: above it pages would be mapped only to be taken away again

T = TypeVar("T")
D = TypeVar("D")

REQUIRED: Final[Any] = object()
"""Default of `ModelFile.key`: the key must be present."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor in its blocks. `shape` is in ne order (shape[0] contiguous); `data` is a flat read-only uint8 view of
    the mapped file, `nbytes` long, starting at byte `offset` of the shard `path`."""

    name: str
    shape: tuple[int, ...]
    quant_type: QuantType
    data: npt.NDArray[np.uint8]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return self.data.size

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The blocks as (number of rows, bytes of a row), all dimensions but the first flattened; no copy."""
        return self.data.reshape(-1, self.quant_type.row_bytes(self.shape[0]))

    def dequantise(self, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """All elements in NumPy order (shape reversed), by the reference of the `gguf` package."""
        return self._dequantised(self.rows, dtype).reshape(self.shape[::-1])

    def dequantise_rows(self, indices: npt.ArrayLike, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """(n, shape[0]): the rows with these indices of the tensor flattened to rows."""
        return self._dequantised(self.rows[np.asarray(indices, dtype=np.int64)], dtype)

    def expert(self, index: int) -> Tensor:
        """Matrix `index` of a three-dimensional tensor; no copy."""
        if len(self.shape) != 3 or not 0 <= index < self.shape[2]:
            raise ModelFileError(
                f"{self.path}: tensor {self.name} has shape {self.shape}, expected 3 dimensions with an expert {index}"
            )
        size = self.nbytes // self.shape[2]
        return Tensor(
            f"{self.name}[{index}]",
            self.shape[:2],
            self.quant_type,
            self.data[index * size : (index + 1) * size],
            self.path,
            self.offset + index * size,
        )

    def _dequantised(self, rows: npt.NDArray[np.uint8], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        if not self.quant_type.dequantisable:
            raise ModelFileError(
                f"{self.path}: tensor {self.name} has quant type {self.quant_type.name}, which cannot be dequantised",
                "choose another quantisation of this model",
            )
        return self.quant_type.dequantise(rows, dtype)


class ModelFile:
    """One GGUF file, or several shards as if they were one. The mapping is freed by `close` or with the last view."""

    def __init__(self, containers: Sequence[Container], tensors: Mapping[str, Tensor]) -> None:
        self._containers = tuple(containers)
        self.path: Final = containers[0].path
        self.shards: Final = tuple(container.path for container in containers)
        self.version: Final = containers[0].version
        self.metadata: Final[Mapping[str, Value]] = MappingProxyType(dict(containers[0].metadata))
        self.tensors: Final[Mapping[str, Tensor]] = MappingProxyType(dict(tensors))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ModelFile:
        """Opens a file or, given the first of several shards, all of them; ModelFileError for whatever is not sound."""
        containers = read_shards(Path(path))
        tensors: dict[str, Tensor] = {}
        for container in containers:
            check_scales(container)
            data: npt.NDArray[np.uint8] = np.frombuffer(container.mapping, dtype=np.uint8)
            for entry in container.entries:
                blocks = data[entry.offset : entry.offset + entry.nbytes]
                tensors[entry.name] = Tensor(
                    entry.name, entry.shape, entry.quant_type, blocks, container.path, entry.offset
                )
        return cls(containers, tensors)

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(container.size for container in self._containers)

    def map_pages(
        self,
        seconds: float,
        besides: Collection[str] = (),
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> bool:
        """Maps all pages of the file now, so that no later access has to; whether it did. The tensors named `besides`
        are left out, but for their first and last page.

        Reads what is not in the page cache. Stops after about `seconds`; does nothing for a file that would not stay in
        memory, nor on a kernel without MADV_POPULATE_READ (before 5.14). `progress(done, total)` in bytes.
        """
        total = self.size - sum(self.tensors[name].nbytes for name in besides)
        if total > available_memory() * _SHARE_OF_MEMORY:
            return False
        done = 0
        end = time.monotonic() + seconds
        for container in self._containers:
            holes = sorted((entry.offset, entry.nbytes) for entry in container.entries if entry.name in besides)
            begin = 0
            for offset, nbytes in (*holes, (container.size, 0)):
                for start in range(begin, offset, _MAP_CHUNK):
                    if time.monotonic() > end:
                        return False
                    try:
                        container.mapping.madvise(_POPULATE_READ, start, min(_MAP_CHUNK, offset - start))
                    except OSError:
                        return False
                    done += min(_MAP_CHUNK, offset - start)
                    progress(min(done, total), total)
                begin = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        return True

    @property
    def architecture(self) -> str:
        return self.key("general.architecture", str)

    @overload
    def key(self, name: str, kind: type[T]) -> T: ...

    @overload
    def key(self, name: str, kind: type[T], default: D) -> T | D: ...

    def key(self, name: str, kind: type[Any], default: Any = REQUIRED) -> Any:
        """The value of a metadata key as `kind`: str, int, float, bool, list (of str) or np.ndarray (of numbers).

        Without a default the key must be present; floats must be finite; a bool is no int and an int no float.
        """
        if name not in self.metadata:
            if default is not REQUIRED:
                return default
            raise ModelFileError(
                f"{self.path}: metadata key {name} is missing, expected {_kind_name(kind)}",
                "the file is not a complete model of its architecture; convert it again",
            )
        value = self.metadata[name]
        expected = get_origin(kind) or kind
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise ModelFileError(
                f"{self.path}: metadata key {name} is {_described(value)}, expected {_kind_name(kind)}", DAMAGED_HINT
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelFileError(f"{self.path}: metadata key {name} is {value}, expected a finite number", DAMAGED_HINT)
        return value

    @overload
    def hyper(self, name: str, kind: type[T]) -> T: ...

    @overload
    def hyper(self, name: str, kind: type[T], default: D) -> T | D: ...

    def hyper(self, name: str, kind: type[Any], default: Any = REQUIRED) -> Any:
        """The architecture's own key: `key` of "<architecture>.<name>"."""
        return self.key(f"{self.architecture}.{name}", kind, default)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.tensors

    def tensor(self, name: str, shape: Sequence[int | None]) -> Tensor:
        """The tensor of this name if it has this shape (ne order; None: any length; trailing 1s do not count)."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(
                f"{self.path}: tensor {name} is missing, expected one of shape {_shape_text(shape)}",
                "the file is not a complete model of its architecture; convert it again",
            )
        width = max(len(shape), len(tensor.shape))
        found = tensor.shape + (1,) * (width - len(tensor.shape))
        wanted = tuple(shape) + (1,) * (width - len(shape))
        if any(want is not None and want != have for want, have in zip(wanted, found, strict=True)):
            raise ModelFileError(
                f"{tensor.path}: tensor {name} has shape {_shape_text(tensor.shape)}, expected {_shape_text(shape)}",
                "the tensor does not agree with the file's metadata; convert the model again",
            )
        return tensor if len(tensor.shape) == len(shape) else replace(tensor, shape=found[: len(shape)])

    def close(self) -> None:
        """Drops the mappings; those of which a view is still held are freed with their last view."""
        for container in self._containers:
            try:
                container.mapping.close()
            except BufferError:
                continue

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _kind_name(kind: Any) -> str:
    return {str: "a string", int: "a whole number", float: "a float", bool: "a bool", list: "an array of strings"}.get(
        get_origin(kind) or kind, "an array of numbers"
    )


def _described(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype.name}"
    if isinstance(value, list):
        return f"an array of {len(value)} strings"
    return f"the {type(value).__name__} {str(value)[:40]!r}"


def _shape_text(shape: Sequence[int | None]) -> str:
    return "(" + ", ".join("any" if length is None else str(length) for length in shape) + ")"
