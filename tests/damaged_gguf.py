"""The damaged-GGUF set: 100 named files that must be refused, and a few whose damage is harmless, all from one seed.

`damaged_cases()` yields them one after the other; each is written with `Case.write(folder)`, which returns the path to
open. Everything is derived from the small model of `small_model.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from gguf_bytes import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT8, UINT32, Blocks, Draft, Key, shard_drafts
from small_model import small_draft

SEED = 20240229
REFUSED = 100
CUTS = 8
PLAIN_NAME = "small.gguf"
ARCH = "qwen3moe"


@dataclass(frozen=True)
class Case:
    """`files` by name, `open` the one to open. A refused case's error must contain all of `mentions`; a harmless one
    opens and behaves; of an "either" case (a flip in a place that may or may not matter) both are right."""

    name: str
    files: dict[str, bytes]
    open: str
    outcome: Literal["refused", "harmless", "either"]
    mentions: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder / self.open

    @property
    def size(self) -> int:
        return sum(map(len, self.files.values()))


def damaged_cases(seed: int = SEED) -> Iterator[Case]:
    """All cases: exactly REFUSED refused ones, then the others."""
    draft = small_draft(seed)
    whole, places = draft.build_with_places()
    damage = _Damage(whole, places, np.random.default_rng(seed))
    named = [*damage.headers(), *damage.counts(), *damage.values(), *damage.table()]
    named += [*_drafts(draft), *_non_finite(draft, places), *_shards(draft)]
    yield from named
    yield from damage.truncations(CUTS)
    yield from damage.flips(REFUSED - len(named) - CUTS)
    yield from damage.harmless(12)
    yield from _senseless(draft)


def _refused(name: str, data: bytes, *mentions: str) -> Case:
    return Case(name, {PLAIN_NAME: data}, PLAIN_NAME, "refused", mentions)


class _Damage:
    """Changes to the bytes of the sound file, at the places that its writer remembers."""

    def __init__(self, whole: bytes, places: dict[str, int], generator: np.random.Generator) -> None:
        self.whole, self.places, self.generator = whole, places, generator

    def put(self, place: str, layout: str, value: int | float, skip: int = 0) -> bytes:
        data = bytearray(self.whole)
        struct.pack_into(layout, data, self.places[place] + skip, value)
        return bytes(data)

    def headers(self) -> Iterator[Case]:
        whole = self.whole
        yield _refused("empty", b"", "empty")
        yield _refused("other-magic", b"ggjt" + whole[4:], "magic")
        yield _refused("safetensors", b'\x10\0\0\0\0\0\0\0{"a":{"dtype":1}}' + whole[:64], "magic")
        for version in (1, 4, 0xFFFFFFFF):
            yield _refused(f"version-{version}", self.put("version", "<I", version), f"version {version}")
        yield _refused("big-endian", self.put("version", ">I", 3), "big-endian", "version 3")

    def counts(self) -> Iterator[Case]:
        places = self.places
        for label, what in (("tensor_count", "tensors"), ("key_count", "keys")):
            right = struct.unpack_from("<Q", self.whole, places[label])[0]
            for value in (2**64 - 1, 2**32, len(self.whole)):
                yield _refused(f"{label}-{value}", self.put(label, "<Q", value), str(value), what)
            yield _refused(f"{label}-one-more", self.put(label, "<Q", right + 1))
        yield _refused("key_count-one-less", self.put("key_count", "<Q", right - 1))
        for value in (2**64 - 1, 2**61, len(self.whole) // 8):
            name = "tokenizer.ggml.tokens"
            yield _refused(f"strings-{value}", self.put(f"count:{name}", "<Q", value), name)
        for value in (2**64 - 1, 2**62, len(self.whole) // 4):
            name = "tokenizer.ggml.token_type"
            yield _refused(f"numbers-{value}", self.put(f"count:{name}", "<Q", value), name, str(value))

    def values(self) -> Iterator[Case]:
        for value in (2**64 - 1, len(self.whole)):
            yield _refused(f"string-{value}", self.put("value:general.name", "<Q", value), "general.name", str(value))
            yield _refused(f"key-length-{value}", self.put("key:general.name", "<Q", value), "key 1", str(value))
        yield _refused("token-length", self.put("value:tokenizer.ggml.tokens[7]", "<Q", 2**33), "element 7", "tokens")
        yield _refused("key-empty", self.put("key:general.name", "<Q", 0), "key 1", "empty")
        yield _refused("value-type-13", self.put("type:general.name", "<I", 13), "general.name", "13")
        yield _refused("element-type-99", self.put("element_type:tokenizer.ggml.merges", "<I", 99), "merges", "99")
        yield _refused("nested-arrays", self.put("element_type:tokenizer.ggml.merges", "<I", ARRAY), "arrays")
        yield _refused("bool-2", self.put("value:tokenizer.ggml.add_bos_token", "<B", 2), "add_bos_token", "2")

    def table(self) -> Iterator[Case]:
        name = "blk.0.attn_q.weight"
        for value in (0, 5, 2**31):
            yield _refused(f"dims-{value}", self.put(f"dims:{name}", "<I", value), name, str(value))
        for value in (0, 2**62):
            yield _refused(f"ne-{value}", self.put(f"ne:{name}", "<Q", value, skip=8), name, str(value))
        yield _refused("ne-beyond-file", self.put(f"ne:{name}", "<Q", 2**20, skip=8), name, "needs bytes")
        yield _refused("ne-broken-block", self.put(f"ne:{name}", "<Q", 255), name, "256", "Q4_K")
        for value, text in ((200, "unknown"), (2**32 - 1, "unknown"), (4, "Q4_2"), (31, "Q4_0_4_4")):
            yield _refused(f"quant-{value}", self.put(f"quant:{name}", "<I", value), name, text)
        yield _refused("quant-larger", self.put("quant:blk.0.attn_norm.weight", "<I", 28), "attn_q.weight", "inside")
        for value in (1, 2**64 - 1):
            yield _refused(f"offset-{value}", self.put(f"offset:{name}", "<Q", value), name, "alignment")
        for value in (2**64 - 32, 2**40):
            yield _refused(f"offset-{value}", self.put(f"offset:{name}", "<Q", value), name, "needs bytes")
        yield _refused("offset-overlap", self.put(f"offset:{name}", "<Q", 32), name, "inside tensor token_embd.weight")
        yield _refused("tensor-name-length", self.put(f"tensor:{name}", "<Q", 65), "tensor 2", "65")

    def truncations(self, count: int) -> Iterator[Case]:
        """Cut inside each part of the file; the last one lacks a single byte."""
        places, size = self.places, len(self.whole)
        parts = [(1, 24), (24, places["count:tokenizer.ggml.tokens"]), (places["data"], size)]
        parts += [(places["count:tokenizer.ggml.tokens"], places["tensor:token_embd.weight"])]
        parts += [(places["tensor:token_embd.weight"], places["data"] - 32)]
        for index in range(count - 1):
            first, last = parts[index % len(parts)]
            cut = int(self.generator.integers(first, last))
            yield _refused(f"cut-{index}-at-{cut}", self.whole[:cut])
        yield _refused("cut-last-byte", self.whole[:-1], "output.weight")

    def flips(self, count: int) -> Iterator[Case]:
        """A flipped bit where no value of the field is both different and sound: a high bit of a length or a count."""
        labels = [label for label in self.places if label.split(":")[0] in ("key", "count", "tensor", "dims", "quant")]
        for index in range(count):
            label = labels[int(self.generator.integers(len(labels)))]
            width = 4 if label.startswith(("dims", "quant")) else 8
            byte, bit = int(self.generator.integers(3, width)), int(self.generator.integers(8))
            data = bytearray(self.whole)
            data[self.places[label] + byte] ^= 1 << bit
            yield _refused(f"flip-{index}-{label}-byte-{byte}-bit-{bit}", bytes(data))

    def harmless(self, count: int) -> Iterator[Case]:
        """Flips in text and in weights (which may make a scale infinite), and bytes after the end."""
        places = self.places
        yield Case("bytes-after-end", {PLAIN_NAME: self.whole + b"\0" * 100}, PLAIN_NAME, "harmless")
        yield Case("text-flip", {PLAIN_NAME: self.put("value:general.name", "<B", 0xFF, 8)}, PLAIN_NAME, "harmless")
        token = self.put("value:tokenizer.ggml.tokens[40]", "<B", 0xFF, 8)
        yield Case("token-not-utf8", {PLAIN_NAME: token}, PLAIN_NAME, "harmless")
        quants = self.put("data:blk.0.attn_q.weight", "<B", 0x5A, 100)
        yield Case("quants-flip", {PLAIN_NAME: quants}, PLAIN_NAME, "harmless")
        for index in range(count):
            first, last = (24, places["data"]) if index % 2 else (places["data"], len(self.whole))
            position, bit = int(self.generator.integers(first, last)), int(self.generator.integers(8))
            data = bytearray(self.whole)
            data[position] ^= 1 << bit
            yield Case(f"any-flip-{index}-at-{position}-bit-{bit}", {PLAIN_NAME: bytes(data)}, PLAIN_NAME, "either")


def _drafts(draft: Draft) -> Iterator[Case]:
    """Files that a faulty program could have written: each field sound in itself."""
    name = "blk.0.attn_k.weight"
    for value in (0, 4, 2**31 + 1):
        made = draft.with_key("general.alignment", UINT32, value).build()
        yield _refused(f"alignment-{value}", made, "general.alignment", str(value))
    yield _refused("alignment-text", draft.with_key("general.alignment", STRING, "32").build(), "general.alignment")
    twice = replace(draft, keys=(*draft.keys, draft.keys[1]))
    yield _refused("key-twice", twice.build(), "general.name", "twice")
    yield _refused("key-not-utf8", replace(draft, keys=(*draft.keys, Key(b"a\xff", UINT8, 1))).build(), "UTF-8")
    flags = draft.with_key("some.flags", (ARRAY, BOOL), [1, 0, 7])
    yield _refused("bool-array-7", flags.build(), "some.flags", "7")
    yield _refused("tensor-twice", draft.with_tensor("blk.0.attn_v.weight", name=name).build(), name, "twice")
    yield _refused("tensor-name-empty", draft.with_tensor(name, name="").build(), "tensor 3", "empty")
    yield _refused("tensor-name-not-utf8", draft.with_tensor(name, name=b"\xc3\x28").build(), "tensor 3", "UTF-8")
    yield _refused("architecture-missing", draft.without_key("general.architecture").build(), "general.architecture")
    number = draft.with_key("general.architecture", UINT32, 7)
    yield _refused("architecture-number", number.build(), "general.architecture", "string")
    blocks = draft.with_key(f"{ARCH}.block_count", FLOAT32, 1.0)
    yield _refused("block-count-float", blocks.build(), f"{ARCH}.block_count", "whole number")
    epsilon = draft.with_key(f"{ARCH}.attention.layer_norm_rms_epsilon", FLOAT32, float("nan"))
    yield _refused("epsilon-nan", epsilon.build(), "layer_norm_rms_epsilon", "finite")


def _senseless(draft: Draft) -> Iterator[Case]:
    """Sound files whose values make no sense: refused by whoever reads them, or of no consequence."""
    tokens = next(key.value for key in draft.keys if key.name == "tokenizer.ggml.tokens")
    assert isinstance(tokens, list)
    changes: list[tuple[str, int | tuple[int, int], object]] = [
        (f"{ARCH}.{name}", UINT32, value)
        for name in ("block_count", "attention.head_count", "attention.head_count_kv", "attention.key_length")
        for value in (0, 3, 2**32 - 1)
    ]
    changes += [(f"{ARCH}.{name}", UINT32, 2**32 - 1) for name in ("context_length", "embedding_length")]
    changes += [(f"{ARCH}.{name}", UINT32, value) for name in ("expert_count", "expert_used_count") for value in (0, 5)]
    changes += [(f"{ARCH}.rope.freq_base", FLOAT32, value) for value in (0.0, -1.0)]
    changes += [(f"{ARCH}.rope.scaling.type", STRING, "nonsense"), (f"{ARCH}.rope.dimension_count", UINT32, 7)]
    changes += [(f"{ARCH}.attention.head_count", (ARRAY, INT32), [4])]
    changes += [("tokenizer.ggml.model", STRING, "nonsense"), ("tokenizer.ggml.pre", STRING, "nonsense")]
    changes += [("tokenizer.ggml.eos_token_id", UINT32, value) for value in (len(tokens), 2**32 - 1)]
    changes += [("tokenizer.ggml.tokens", (ARRAY, STRING), made) for made in ([], tokens[:-1], [*tokens[:-1], "h"])]
    changes += [("tokenizer.ggml.tokens", (ARRAY, STRING), [*tokens[:9], "", *tokens[10:]])]
    changes += [("tokenizer.ggml.tokens", (ARRAY, INT32), [1, 2, 3]), ("tokenizer.ggml.tokens", STRING, "abc")]
    changes += [("tokenizer.ggml.token_type", (ARRAY, INT32), made) for made in ([], [1] * 265, [99] * 266, [-1] * 266)]
    changes += [("tokenizer.ggml.token_type", (ARRAY, FLOAT32), [1.0] * 266)]
    for merges in (["h"], ["h e l"], [""], ["zz yy"], ["h e"] * 5, ["h e", "qq ee"]):
        changes.append(("tokenizer.ggml.merges", (ARRAY, STRING), merges))
    for index, (key, kind, value) in enumerate(changes):
        made = draft.with_key(key, kind, value).build()
        yield Case(f"senseless-{index}-{key}={str(value)[:30]}", {PLAIN_NAME: made}, PLAIN_NAME, "either", (key,))


def _non_finite(draft: Draft, places: dict[str, int]) -> Iterator[Case]:
    """An infinite or NaN scale in each kind of block; the error names the tensor and the block."""
    f16_infinity, f16_nan, bf16_nan = b"\x00\x7c", b"\x01\xfe", b"\xc0\x7f"
    for name, block, block_bytes, offset, scale in (
        ("token_embd.weight", 5, 34, 0, f16_infinity),
        ("blk.0.attn_norm.weight", 17, 4, 0, struct.pack("<f", float("nan"))),
        ("blk.0.attn_q.weight", 9, 144, 2, f16_nan),
        ("blk.0.attn_v.weight", 3, 210, 208, f16_infinity),
        ("blk.0.attn_output.weight", 300, 2, 0, bf16_nan),
        ("blk.0.ffn_up_exps.weight", 1001, 110, 108, f16_nan),
        ("output.weight", 77, 2, 0, f16_infinity),
    ):
        tensor = next(tensor for tensor in draft.tensors if tensor.name == name)
        data = bytearray(tensor.data)
        start = block * block_bytes + offset
        data[start : start + len(scale)] = scale
        made = draft.with_tensor(name, data=bytes(data)).build()
        byte = places[f"data:{name}"] + block * block_bytes
        yield _refused(f"not-finite-{name}", made, name, f"block {block} ", f"byte {byte}")


def _shards(draft: Draft) -> Iterator[Case]:
    count = 3
    names = [f"small-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)]
    sound = shard_drafts(draft, count)

    def case(name: str, change: Callable[[dict[str, bytes]], None], *mentions: str, named: str = names[0]) -> Case:
        files = {file: shard.build() for file, shard in zip(names, sound)}
        change(files)
        return Case(f"shards-{name}", files, named, "refused", mentions)

    def swap(files: dict[str, bytes]) -> None:
        files[names[1]], files[names[2]] = files[names[2]], files[names[1]]

    def drop(files: dict[str, bytes]) -> None:
        del files[names[1]]

    def rename(files: dict[str, bytes]) -> None:
        files[PLAIN_NAME] = files.pop(names[0])

    def put(index: int, changed: Draft) -> Callable[[dict[str, bytes]], None]:
        return lambda files: files.__setitem__(names[index], changed.build())

    extra = Blocks("extra.weight", (32,), 0, bytes(128))
    yield case("missing", drop, names[1], "missing")
    yield case("later-named", lambda files: None, names[0], "first", named=names[1])
    yield case("swapped", swap, names[1], "split.no")
    yield case("renamed", rename, "split.count", named=PLAIN_NAME)
    yield case("later-cut", lambda files: files.__setitem__(names[2], files[names[2]][:-100]), names[2])
    yield case("later-empty", lambda files: files.__setitem__(names[1], b""), names[1], "empty")
    yield case("other-count", put(1, sound[1].with_key("split.count", UINT32, 4)), names[1], "split.count")
    yield case("other-total", put(2, sound[2].with_key("split.tensors.count", INT32, 99)), names[2], "tensors.count")
    other = sound[1].with_key("general.architecture", STRING, "llama")
    yield case("other-architecture", put(1, other), names[1], "general.architecture", "llama")
    double = replace(sound[1], tensors=(*sound[1].tensors, sound[0].tensors[1]))
    yield case("tensor-in-two", put(1, double), "blk.0.attn_norm.weight", names[0], names[1])
    yield case("tensor-lacking", put(1, replace(sound[1], tensors=sound[1].tensors[1:])), "14", "15")
    yield case("tensor-too-many", put(1, replace(sound[1], tensors=(*sound[1].tensors, extra))), "16", "15")
    yield case("no-split-keys", put(0, draft), names[0], "split.count")
    yield case("count-text", put(0, sound[0].with_key("split.count", STRING, "3")), "split.count")
