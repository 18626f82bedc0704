"""Writes GGUF files byte by byte from the format's specification and remembers where every field lies.

Independent of the package's reader on purpose; used to build small model files and to damage them at known places.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import gguf
import numpy as np

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
_LAYOUTS = dict(enumerate(["<B", "<b", "<H", "<h", "<I", "<i", "<f", "<B", "_", "_", "<Q", "<q", "<d"]))


@dataclass(frozen=True)
class Key:
    """A metadata entry; `kind` is the value type, for an array (ARRAY, element type)."""

    name: str | bytes
    kind: int | tuple[int, int]
    value: object


@dataclass(frozen=True)
class Blocks:
    """A tensor: ne order shape, ggml type id, and its bytes."""

    name: str | bytes
    shape: tuple[int, ...]
    type_id: int
    data: bytes


@dataclass(frozen=True)
class Draft:
    """What a file is to hold. `overrides` replaces 8-byte offsets of named tensors by other values."""

    keys: tuple[Key, ...]
    tensors: tuple[Blocks, ...]
    version: int = 3
    alignment: int = 32
    overrides: Mapping[str, int] = field(default_factory=dict)

    def with_key(self, name: str, kind: int | tuple[int, int], value: object) -> Draft:
        """The draft with this key's value replaced, or added at the end."""
        new = Key(name, kind, value)
        kept = [new if key.name == name else key for key in self.keys]
        return replace(self, keys=tuple(kept if new in kept else [*kept, new]))

    def without_key(self, name: str) -> Draft:
        return replace(self, keys=tuple(key for key in self.keys if key.name != name))

    def with_tensor(self, name: str, /, **changes: object) -> Draft:
        tensors = [replace(t, **changes) if t.name == name else t for t in self.tensors]  # type: ignore[arg-type]
        return replace(self, tensors=tuple(tensors))

    def build(self) -> bytes:
        return self.build_with_places()[0]

    def build_with_places(self) -> tuple[bytes, dict[str, int]]:
        """The file and the positions of its fields: "version", "key:NAME", "type:NAME", "value:NAME", "count:ARRAY",
        "tensor:NAME" (its name's length), "dims:NAME", "ne:NAME", "quant:NAME", "offset:NAME", "data", "data:NAME"."""
        out, places = bytearray(b"GGUF"), {}

        def put(label: str, layout: str, *values: object) -> None:
            if label:
                places[label] = len(out)
            out.extend(struct.pack(layout, *values))

        def put_string(text: str | bytes) -> None:
            raw = text.encode() if isinstance(text, str) else text
            out.extend(struct.pack("<Q", len(raw)) + raw)

        def put_value(label: str, kind: int, value: object) -> None:
            places[label] = len(out)
            if kind == STRING:
                put_string(value)  # type: ignore[arg-type]
            else:
                put("", _LAYOUTS[kind], value)

        put("version", "<I", self.version)
        put("tensor_count", "<Q", len(self.tensors))
        put("key_count", "<Q", len(self.keys))
        for key in self.keys:
            name = key.name if isinstance(key.name, str) else "bad"
            places[f"key:{name}"] = len(out)
            put_string(key.name)
            if isinstance(key.kind, tuple):
                put(f"type:{name}", "<I", ARRAY)
                put(f"element_type:{name}", "<I", key.kind[1])
                put(f"count:{name}", "<Q", len(key.value))  # type: ignore[arg-type]
                for index, value in enumerate(key.value):  # type: ignore[arg-type,var-annotated]
                    put_value(f"value:{name}[{index}]", key.kind[1], value)
            else:
                put(f"type:{name}", "<I", key.kind)
                put_value(f"value:{name}", key.kind, key.value)
        offset = 0
        for tensor in self.tensors:
            name = tensor.name if isinstance(tensor.name, str) else "bad"
            places[f"tensor:{name}"] = len(out)
            put_string(tensor.name)
            put(f"dims:{name}", "<I", len(tensor.shape))
            put(f"ne:{name}", f"<{len(tensor.shape)}Q", *tensor.shape)
            put(f"quant:{name}", "<I", tensor.type_id)
            put(f"offset:{name}", "<Q", self.overrides.get(name, offset))
            offset += -(-len(tensor.data) // self.alignment) * self.alignment
        for tensor in self.tensors:
            out.extend(bytes(-len(out) % self.alignment))
            places.setdefault("data", len(out))
            places[f"data:{tensor.name if isinstance(tensor.name, str) else 'bad'}"] = len(out)
            out.extend(tensor.data)
        return bytes(out), places


def shard_drafts(draft: Draft, count: int) -> list[Draft]:
    """The draft as `count` shards as llama.cpp's gguf-split makes them: all keys in the first, split.* keys in each."""
    shards = []
    step = -(-len(draft.tensors) // count)
    for number in range(count):
        split: Sequence[Key] = (
            Key("split.no", UINT16, number),
            Key("split.count", UINT16, count),
            Key("split.tensors.count", INT32, len(draft.tensors)),
        )
        keys = (*draft.keys, *split) if number == 0 else tuple(split)
        shards.append(replace(draft, keys=keys, tensors=draft.tensors[number * step : (number + 1) * step]))
    return shards


def random_blocks(generator: np.random.Generator, type_name: str, shape: tuple[int, ...]) -> bytes:
    """Random but sound blocks of any quant type: random bytes whose float scales are small finite numbers."""
    kind = gguf.GGMLQuantizationType[type_name]
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // elements
    if type_name in ("F32", "F16", "BF16"):
        values = generator.standard_normal(count, dtype=np.float32) * np.float32(0.05)
        return bytes(gguf.quants.quantize(values, kind).tobytes())
    blocks = generator.integers(0, 256, (count, nbytes), dtype=np.uint8)
    scale = generator.uniform(0.001, 0.01, (count, 2)).astype("<f2").view(np.uint8)
    first, last = scale[:, :2], scale[:, 2:]
    if type_name in ("Q2_K",):
        blocks[:, 80:82], blocks[:, 82:84] = first, last
    elif type_name in ("Q3_K", "Q6_K", "TQ1_0", "TQ2_0"):
        blocks[:, -2:] = last
    elif type_name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        blocks[:, 0:2], blocks[:, 2:4] = first, last
    elif type_name == "IQ1_M":
        blocks[:, [49, 51, 53, 55]] &= 0x0F  # the f16 scale's nibbles, lowest first: 0x2000 is 2^-7
        blocks[:, 55] |= 0x20
    elif type_name == "MXFP4":
        blocks[:, 0] = generator.integers(110, 125, count)
    elif type_name == "NVFP4":
        blocks[:, :4] = generator.integers(1, 0x70, (count, 4))
    else:
        blocks[:, 0:2] = first
    return bytes(blocks.tobytes())
