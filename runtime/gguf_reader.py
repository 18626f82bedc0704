"""The GGUF container of one file: header, metadata and tensor table, read strictly from a memory mapping.

Owns the byte layout (format versions 2 and 3, little endian). Does not know shards, architectures or what any key
means, except `general.alignment`, on which the layout depends. Every length and count is compared with the bytes that
are left in the file before anything is allocated, so a hostile file cannot ask for more memory than it has bytes for.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.quant_types import QuantType, removed_type

Value: TypeAlias = str | int | float | bool | list[str] | npt.NDArray[Any]

VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMENSIONS: Final = 4
MAX_KEY_BYTES: Final = 65535  # the specification's limit
MAX_NAME_BYTES: Final = 64  # the specification's limit for tensor names
MAX_STRING_BYTES: Final = 64 << 20  # no known key comes near; keeps a damaged length from copying gigabytes of weights
MAX_ARRAY_ELEMENTS: Final = 1 << 24  # likewise: vocabularies have some hundred thousand
MAX_INT64: Final = 2**63 - 1

TRUNCATED_HINT: Final = "the file is cut short or damaged; compare its size with the source's and download it again"
DAMAGED_HINT: Final = "the file is damaged or was written by a faulty program; download or convert it again"
NEWER_HINT: Final = "the file may come from a newer program; update bloomery or choose another quantisation"


@dataclass(frozen=True)
class TensorEntry:
    """A row of the tensor table; `offset` is absolute in the file, `shape` in ne order (shape[0] contiguous)."""

    name: str
    shape: tuple[int, ...]
    quant_type: QuantType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Container:
    """One GGUF file: everything but the tensor data, which stays in `mapping`."""

    path: Path
    version: int
    size: int
    alignment: int
    metadata: Mapping[str, Value]
    entries: tuple[TensorEntry, ...]
    mapping: mmap.mmap


def read_container(path: Path) -> Container:
    """Maps `path` and reads all of it but the tensor data; ModelFileError for whatever is not a sound GGUF file."""
    mapping = _map(path)
    try:
        return _Reader(path, mapping).container()
    except BaseException:
        mapping.close()
        raise


def _map(path: Path) -> mmap.mmap:
    try:
        if path.exists() and not path.is_file():
            raise ModelFileError(f"{path}: is no regular file, expected a GGUF file", "name a GGUF file")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelFileError(f"{path}: the file is empty, expected a GGUF file", TRUNCATED_HINT) from None
    except OSError as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else "name a readable GGUF file"
        raise ModelFileError(f"{path}: cannot be opened: {error.strerror}", hint) from None


_U8, _U16, _U32, _U64 = Struct("<B"), Struct("<H"), Struct("<I"), Struct("<Q")
_I8, _I16, _I32, _I64 = Struct("<b"), Struct("<h"), Struct("<i"), Struct("<q")
_F32, _F64 = Struct("<f"), Struct("<d")

BOOL, STRING, ARRAY = 7, 8, 9
_SCALARS: Final[dict[int, tuple[str, Struct, str]]] = {
    0: ("uint8", _U8, "<u1"),
    1: ("int8", _I8, "<i1"),
    2: ("uint16", _U16, "<u2"),
    3: ("int16", _I16, "<i2"),
    4: ("uint32", _U32, "<u4"),
    5: ("int32", _I32, "<i4"),
    6: ("float32", _F32, "<f4"),
    10: ("uint64", _U64, "<u8"),
    11: ("int64", _I64, "<i8"),
    12: ("float64", _F64, "<f8"),
}
_MIN_KEY_BYTES: Final = 8 + 1 + 4 + 1  # name length, name, value type, smallest value
_MIN_ENTRY_BYTES: Final = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, dimension count, one dimension, type, offset


class _Reader:
    """A cursor over the mapping that never moves past the end of the file."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.mapping = mapping
        self.size = len(mapping)
        self.position = 0

    def fail(self, message: str, hint: str = DAMAGED_HINT) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}", hint)

    def take(self, count: int, what: str) -> int:
        """Position of the next `count` bytes, which are then behind the cursor."""
        start = self.position
        if count > self.size - start:
            raise self.fail(
                f"ends inside {what}: found {self.size - start} bytes at byte {start}, expected {count}", TRUNCATED_HINT
            )
        self.position = start + count
        return start

    def scalar(self, layout: Struct, what: str) -> Any:
        return layout.unpack_from(self.mapping, self.take(layout.size, what))[0]

    def raw_string(self, limit: int, what: str) -> bytes:
        length = self.scalar(_U64, f"the length of {what}")
        if length > limit:
            raise self.fail(f"{what} has a length of {length} bytes, expected at most {limit}")
        start = self.take(length, what)
        return self.mapping[start : start + length]

    def identifier(self, limit: int, what: str) -> str:
        """A key or tensor name: not empty and valid UTF-8."""
        raw = self.raw_string(limit, what)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is {raw!r}, expected UTF-8 text") from None
        if not text:
            raise self.fail(f"{what} is empty, expected a name")
        return text

    def container(self) -> Container:
        version, tensors, keys = self.header()
        metadata = self.metadata(keys)
        alignment = self.alignment(metadata)
        entries = self.entries(tensors, alignment)
        return Container(self.path, version, self.size, alignment, metadata, entries, self.mapping)

    def header(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of keys."""
        magic = self.mapping[: min(4, self.size)]
        if magic != b"GGUF":
            hint = "name a GGUF file; convert other formats with llama.cpp's convert_hf_to_gguf.py"
            raise self.fail(f"begins with {magic!r}, expected the magic b'GGUF'", hint)
        self.position = 4
        version = self.scalar(_U32, "the header")
        if version & 0xFFFF == 0 and version:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = "convert it to little endian with gguf-py's gguf-convert-endian"
            raise self.fail(f"is a big-endian GGUF file (version {swapped}), expected little endian", hint)
        if version not in VERSIONS:
            hint = "convert the model again with a current llama.cpp" if version == 1 else NEWER_HINT
            raise self.fail(f"has GGUF version {version}, expected 2 or 3", hint)
        tensors, keys = self.scalar(_U64, "the header"), self.scalar(_U64, "the header")
        self.check_count(keys, _MIN_KEY_BYTES, "metadata keys")
        self.check_count(tensors, _MIN_ENTRY_BYTES, "tensors")
        return version, tensors, keys

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        room = (self.size - self.position) // least_bytes
        if count > room:
            raise self.fail(
                f"claims {count} {what}, but its {self.size} bytes have room for {room} at most", TRUNCATED_HINT
            )

    def metadata(self, count: int) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for index in range(count):
            name = self.identifier(MAX_KEY_BYTES, f"the name of metadata key {index} of {count}")
            if name in values:
                raise self.fail(f"metadata key {name} occurs twice, expected once")
            values[name] = self.value(name)
        return values

    def value(self, name: str) -> Value:
        kind = self.scalar(_U32, f"the type of key {name}")
        if kind == STRING:
            return self.raw_string(MAX_STRING_BYTES, f"the value of key {name}").decode("utf-8", "surrogateescape")
        if kind == BOOL:
            return self.boolean(name)
        if kind == ARRAY:
            return self.array(name)
        if kind not in _SCALARS:
            raise self.fail(f"key {name} has value type {kind}, expected 0 to 12", NEWER_HINT)
        value: int | float = self.scalar(_SCALARS[kind][1], f"the value of key {name}")
        return value

    def boolean(self, name: str) -> bool:
        value = self.scalar(_U8, f"the value of key {name}")
        if value > 1:
            raise self.fail(f"key {name} is a bool of value {value}, expected 0 or 1")
        return bool(value)

    def array(self, name: str) -> Value:
        kind = self.scalar(_U32, f"the element type of array {name}")
        count = self.scalar(_U64, f"the length of array {name}")
        if kind == ARRAY:
            raise self.fail(f"key {name} is an array of arrays, expected an array of scalars or strings", NEWER_HINT)
        if count > MAX_ARRAY_ELEMENTS:
            raise self.fail(f"array {name} claims {count} elements, expected at most {MAX_ARRAY_ELEMENTS}")
        if kind == STRING:
            self.check_count(count, 8, f"strings in array {name}")
            return self.strings(name, count)
        dtype = np.dtype("u1") if kind == BOOL else np.dtype(_SCALARS[kind][2]) if kind in _SCALARS else None
        if dtype is None:
            raise self.fail(f"array {name} has element type {kind}, expected 0 to 12", NEWER_HINT)
        self.check_count(count, dtype.itemsize, f"elements in array {name}")
        start = self.take(count * dtype.itemsize, f"array {name}")
        # A copy, so that the elements are aligned and outlive the mapping.
        elements: npt.NDArray[Any] = np.frombuffer(self.mapping[start : self.position], dtype=dtype)
        if kind == BOOL:
            if elements.size and int(elements.max()) > 1:
                raise self.fail(f"array {name} has a bool of value {elements.max()}, expected 0 or 1")
            return elements.astype(np.bool_)
        return elements

    def strings(self, name: str, count: int) -> list[str]:
        """A string array; written flat, as vocabularies have hundreds of thousands of entries."""
        mapping, size, position = self.mapping, self.size, self.position
        unpack: Callable[[mmap.mmap, int], tuple[int]] = _U64.unpack_from
        texts: list[str] = []
        append = texts.append
        for index in range(count):
            end = position + 8
            if end > size:
                self.position = position
                self.take(8, f"the length of element {index} of array {name}")
            length = unpack(mapping, position)[0]
            position, end = end, end + length
            if length > MAX_STRING_BYTES or end > size:
                raise self.fail(
                    f"element {index} of array {name} has a length of {length} bytes, but {size - position} are left",
                    TRUNCATED_HINT,
                )
            append(mapping[position:end].decode("utf-8", "surrogateescape"))
            position = end
        self.position = position
        return texts

    def alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(f"key general.alignment is {value!r}, expected a number")
        if value < 8 or value & (value - 1):
            raise self.fail(f"key general.alignment is {value}, expected a power of two of at least 8")
        return value

    def entries(self, count: int, alignment: int) -> tuple[TensorEntry, ...]:
        self.check_count(count, _MIN_ENTRY_BYTES, "tensors")
        names: set[str] = set()
        entries: list[TensorEntry] = []
        for index in range(count):
            name = self.identifier(MAX_NAME_BYTES, f"the name of tensor {index} of {count}")
            if name in names:
                raise self.fail(f"tensor {name} occurs twice, expected once")
            names.add(name)
            entries.append(self.entry(name, alignment))
        start = -(-self.position // alignment) * alignment
        placed = tuple(
            TensorEntry(entry.name, entry.shape, entry.quant_type, start + entry.offset, entry.nbytes)
            for entry in entries
        )
        self.check_places(placed)
        return placed

    def entry(self, name: str, alignment: int) -> TensorEntry:
        """One row of the table, its offset still relative to the data section."""
        dimensions = self.scalar(_U32, f"the shape of tensor {name}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.fail(f"tensor {name} has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(self.scalar(_U64, f"the shape of tensor {name}") for _ in range(dimensions))
        elements = 1
        for length in shape:
            elements *= length
        if not 0 < elements <= MAX_INT64:
            raise self.fail(f"tensor {name} has shape {shape}, expected positive lengths whose product fits 63 bits")
        quant_type = self.quant_type(name)
        if shape[0] % quant_type.block_elements:
            raise self.fail(
                f"tensor {name} has rows of {shape[0]} elements,"
                f" expected a multiple of the {quant_type.name} block of {quant_type.block_elements}"
            )
        offset = self.scalar(_U64, f"the offset of tensor {name}")
        if offset % alignment:
            raise self.fail(f"tensor {name} has offset {offset}, expected a multiple of the alignment {alignment}")
        return TensorEntry(name, shape, quant_type, offset, quant_type.row_bytes(elements))

    def quant_type(self, name: str) -> QuantType:
        type_id = self.scalar(_U32, f"the type of tensor {name}")
        try:
            return QuantType.by_id(type_id)
        except KeyError:
            removed = removed_type(type_id)
            found = f"type {type_id} ({removed}, which ggml has removed)" if removed else f"unknown type {type_id}"
            hint = "convert the model again with a current llama.cpp" if removed else NEWER_HINT
            raise self.fail(f"tensor {name} has {found}, expected a ggml quant type", hint) from None

    def check_places(self, entries: tuple[TensorEntry, ...]) -> None:
        """Every tensor inside the file, none over another."""
        previous: TensorEntry | None = None
        for entry in sorted(entries, key=lambda entry: entry.offset):
            end = entry.offset + entry.nbytes
            if end > self.size:
                raise self.fail(
                    f"tensor {entry.name} needs bytes {entry.offset} to {end}, but the file has {self.size}",
                    TRUNCATED_HINT,
                )
            if previous is not None and entry.offset < previous.offset + previous.nbytes:
                raise self.fail(
                    f"tensor {entry.name} begins at byte {entry.offset}, inside tensor {previous.name},"
                    f" which ends at {previous.offset + previous.nbytes}"
                )
            previous = entry
