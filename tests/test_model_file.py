"""Model files: values and views of sound files, typed keys, checked tensors, shards, and sampling of scales."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    FLOAT32,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    Blocks,
    Draft,
    Key,
    random_blocks,
    shard_drafts,
)
from small_model import small_draft

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.scale_check import WHOLE_BYTES

SEED = 727
DEQUANTISABLE = [kind.name for kind in gguf.quants._type_traits] + ["F32", "F16"]


def written(path: Path, draft: Draft) -> ModelFile:
    path.write_bytes(draft.build())
    return ModelFile.open(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return written(tmp_path_factory.mktemp("small") / "small.gguf", small_draft())


def test_every_value_type_comes_back(tmp_path: Path) -> None:
    scalars = {UINT8: 200, INT8: -100, UINT16: 60000, INT16: -30000, UINT32: 4 * 10**9, INT32: -(2 * 10**9)}
    scalars |= {UINT64: 2**63 + 1, INT64: -(2**62)}
    floats = {FLOAT32: 0.15625, FLOAT64: 0.1}
    keys = [Key(f"s.{kind}", kind, value) for kind, value in (scalars | floats).items()]
    keys += [Key(f"a.{kind}", (ARRAY, kind), [value, 0, 1]) for kind, value in (scalars | floats).items()]
    keys += [Key("s.bool", BOOL, True), Key("a.bool", (ARRAY, BOOL), [0, 1, 1]), Key("s.text", STRING, "grün 水")]
    keys += [Key("a.text", (ARRAY, STRING), ["", "a", "日本"]), Key("a.none", (ARRAY, FLOAT32), [])]
    with written(tmp_path / "types.gguf", Draft(tuple(keys), ())) as model:
        assert len(model.metadata) == len(keys) and not model.tensors
        for kind, value in scalars.items():
            found = model.key(f"s.{kind}", int)
            assert (type(found), found) == (int, value)
            array = model.key(f"a.{kind}", np.ndarray)
            assert array.tolist() == [value, 0, 1] and array.dtype.itemsize == {0: 1, 1: 1, 2: 2, 3: 2}.get(
                kind, 4 if kind < 6 else 8
            )
        assert model.key("s.6", float) == 0.15625 and model.key("s.12", float) == 0.1
        assert model.key("a.12", np.ndarray).tolist() == [0.1, 0.0, 1.0]
        assert model.key("s.bool", bool) is True and model.key("a.bool", np.ndarray).tolist() == [False, True, True]
        assert model.key("s.text", str) == "grün 水" and model.key("a.text", list[str]) == ["", "a", "日本"]
        assert model.key("a.none", np.ndarray).size == 0


def test_text_that_is_not_utf8_keeps_its_bytes(tmp_path: Path) -> None:
    raw = b"\xff\xfe<0xE2>\xe2"
    with written(tmp_path / "bytes.gguf", Draft((Key("t", (ARRAY, STRING), [raw, b"ok"]),), ())) as model:
        first, second = model.key("t", list[str])
        assert first.encode("utf-8", "surrogateescape") == raw and second == "ok"


@pytest.mark.parametrize("type_name", DEQUANTISABLE)
def test_values_of_every_quant_type_equal_the_reference(tmp_path: Path, type_name: str) -> None:
    generator = np.random.default_rng(SEED)
    kind = gguf.GGMLQuantizationType[type_name]
    shape = (512, 3, 2)
    data = random_blocks(generator, type_name, shape)
    draft = Draft((), (Blocks("pad", (7,), 24, b"1234567"), Blocks("t", shape, kind, data)))
    with written(tmp_path / "q.gguf", draft) as model:
        tensor = model.tensor("t", (512, None, 2))
        assert tensor.quant_type == QuantType.named(type_name) == QuantType.by_id(int(kind))
        assert tensor.nbytes == len(data) == tensor.quant_type.row_bytes(512 * 6) and tensor.data.tobytes() == data
        rows = np.frombuffer(data, np.uint8).reshape(6, -1)
        plain = {"F32": "<f4", "F16": "<f2"}.get(type_name)
        expected = rows.view(plain).astype(np.float32) if plain else gguf.quants.dequantize(rows, kind)
        assert np.isfinite(expected).all() and expected.std() > 0
        assert np.array_equal(tensor.dequantise(), expected.reshape(2, 3, 512))
        assert np.array_equal(tensor.dequantise_rows([5, 0, 5]), expected[[5, 0, 5]])
        wide = tensor.expert(1).dequantise(np.float64)
        assert wide.dtype == np.float64 and np.array_equal(wide, expected[3:].astype(np.float64))


def test_data_is_a_read_only_view_of_the_mapping(small: ModelFile) -> None:
    whole = small.path.read_bytes()
    for tensor in small.tensors.values():
        assert whole[tensor.offset : tensor.offset + tensor.nbytes] == tensor.data.tobytes()
        assert not tensor.data.flags.owndata and not tensor.data.flags.writeable
    expert = small.tensors["blk.0.ffn_up_exps.weight"].expert(3)
    assert whole[expert.offset : expert.offset + expert.nbytes] == expert.data.tobytes()
    addresses = [tensor.data.__array_interface__["data"][0] - tensor.offset for tensor in small.tensors.values()]
    assert len(set(addresses)) == 1, "the tensors are not views of one mapping"


def test_agrees_with_the_gguf_package(small: ModelFile) -> None:
    reader = gguf.GGUFReader(small.path)
    assert [tensor.name for tensor in reader.tensors] == list(small.tensors)
    for theirs in reader.tensors:
        ours = small.tensors[theirs.name]
        assert ours.shape == tuple(theirs.shape.tolist()) and ours.offset == theirs.data_offset
        assert ours.quant_type.type_id == int(theirs.tensor_type)
    for name, value in small.metadata.items():
        theirs_value = reader.fields[name].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == theirs_value, name


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    values = np.random.default_rng(SEED).standard_normal((4, 64), dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("x", values)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("y", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with ModelFile.open(tmp_path / "w.gguf") as model:
        assert model.architecture == "llama" and all(t.offset % 64 == 0 for t in model.tensors.values())
        assert np.array_equal(model.tensors["x"].dequantise(), values)
        assert np.abs(model.tensors["y"].dequantise() - values).max() < 0.02


def test_version_2_and_other_alignments(tmp_path: Path) -> None:
    draft = replace(small_draft(), version=2, alignment=256).with_key("general.alignment", UINT32, 256)
    with written(tmp_path / "v2.gguf", draft) as model:
        assert model.version == 2 and all(tensor.offset % 256 == 0 for tensor in model.tensors.values())
        assert [tensor.data.tobytes() for tensor in model.tensors.values()] == [t.data for t in draft.tensors]


def test_keys_are_typed_and_named(small: ModelFile) -> None:
    assert small.architecture == "qwen3moe" and small.hyper("expert_count", int) == 4
    assert small.hyper("no_such", int, 7) == 7 and small.hyper("no_such", int, None) is None
    for name, kind, texts in (
        ("qwen3moe.no_such", int, ("missing", "a whole number")),
        ("general.name", int, ("'small'", "a whole number")),
        ("qwen3moe.expert_count", float, ("int '4'", "a float")),
        ("qwen3moe.expert_count", str, ("int '4'", "a string")),
        ("tokenizer.ggml.add_bos_token", int, ("bool 'False'", "a whole number")),
        ("tokenizer.ggml.tokens", np.ndarray, ("266 strings", "an array of numbers")),
        ("tokenizer.ggml.token_type", list[str], ("266 int32", "an array of strings")),
    ):
        with pytest.raises(ModelFileError) as caught:
            small.key(name, kind)
        assert all(text in caught.value.message for text in (str(small.path), name, *texts)), caught.value.message


def test_tensor_shapes_are_checked_and_named(small: ModelFile) -> None:
    assert small.has("output.weight") and not small.has("nothing.weight")
    assert small.tensor("output_norm.weight", (256, 1)).shape == (256, 1)
    assert small.tensor("output.weight", (256, None)).shape == (256, 266)
    for name, shape, text in (
        ("nothing.weight", (4,), "missing"),
        ("output.weight", (256, 265), "has shape (256, 266), expected (256, 265)"),
        ("output.weight", (None, None, 2), "expected (any, any, 2)"),
        ("output.weight", (256,), "expected (256)"),
    ):
        with pytest.raises(ModelFileError) as caught:
            small.tensor(name, shape)
        assert name in caught.value.message and text in caught.value.message and str(small.path) in caught.value.message
    with pytest.raises(ModelFileError, match="expert 4"):
        small.tensors["blk.0.ffn_up_exps.weight"].expert(4)


def test_shards_are_one_model_file(tmp_path: Path, small: ModelFile) -> None:
    for number, shard in enumerate(shard_drafts(small_draft(), 4)):
        (tmp_path / f"m-{number + 1:05d}-of-00004.gguf").write_bytes(shard.build())
    with ModelFile.open(tmp_path / "m-00001-of-00004.gguf") as model:
        assert len(model.shards) == 4 and list(model.tensors) == list(small.tensors)
        assert model.size == sum(path.stat().st_size for path in model.shards)
        assert model.hyper("block_count", int) == 1
        for tensor in model.tensors.values():
            assert tensor.data.tobytes() == small.tensors[tensor.name].data.tobytes()
            assert tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes] == tensor.data.tobytes()


def test_views_outlive_close(tmp_path: Path) -> None:
    model = written(tmp_path / "m.gguf", small_draft())
    tensor = model.tensors["output_norm.weight"]
    model.close()
    assert np.isfinite(tensor.dequantise()).all()


def test_great_tensors_are_sampled_and_small_ones_read_whole(tmp_path: Path) -> None:
    """A bad scale is always found in a small tensor; of a great one a few runs are read, the first among them."""
    generator = np.random.default_rng(SEED)
    small_shape, great_shape = (256, 64), (256, 8192)
    for shape, whole in ((small_shape, True), (great_shape, False)):
        data = bytearray(random_blocks(generator, "Q4_K", shape))
        assert (len(data) <= WHOLE_BYTES) is whole
        blocks = len(data) // 144
        bad = np.arange(blocks) if not whole else generator.integers(blocks, size=1)
        for block in bad:
            data[144 * block : 144 * block + 2] = b"\x00\xfc"
        message = f"tensor t \\(Q4_K\\) has a scale that is not finite in block {bad[0]} "
        with pytest.raises(ModelFileError, match=message):
            written(tmp_path / "bad.gguf", Draft((), (Blocks("t", shape, 12, bytes(data)),)))


def faults(model: ModelFile) -> int:
    """Page faults that looking at every page of the tensor `w` takes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    int(model.tensors["w"].data[::4096].sum())
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_mapped_pages_cost_no_faults(tmp_path: Path) -> None:
    """An I8 tensor, whose values nothing looks at when the file is opened."""
    model = written(tmp_path / "pages.gguf", Draft((), (Blocks("w", (64 << 20,), 24, bytes(64 << 20)),)))
    if not model.map_pages(60.0):
        pytest.skip("no MADV_POPULATE_READ, or too little memory")
    mapped = faults(model)
    assert mapped < 8 < faults(ModelFile.open(tmp_path / "pages.gguf"))
    assert not model.map_pages(-1.0), "out of time"


def test_types_without_dequantisation_are_refused_by_name(tmp_path: Path) -> None:
    data = bytes(292 * 2)
    model = written(tmp_path / "q8k.gguf", Draft((), (Blocks("t", (512,), 15, data),)))
    with pytest.raises(ModelFileError, match="tensor t has quant type Q8_K"):
        model.tensors["t"].dequantise()


def test_opening_a_great_vocabulary_is_quick(tmp_path: Path) -> None:
    """150,000 tokens and as many merges open in about 0.1 s; the limit leaves room for a busy machine."""
    tokens = [f"token{index}" for index in range(150_000)]
    keys = (
        Key("tokenizer.ggml.tokens", (ARRAY, STRING), tokens),
        Key("tokenizer.ggml.merges", (ARRAY, STRING), [f"{token} x" for token in tokens]),
        Key("tokenizer.ggml.scores", (ARRAY, FLOAT32), np.arange(150_000, dtype=np.float32)),
    )
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(Draft(keys, ()).build())
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        with ModelFile.open(path) as model:
            seconds.append(time.perf_counter() - begin)
            assert model.key("tokenizer.ggml.tokens", list[str]) == tokens
    assert min(seconds) < 0.8, seconds


@pytest.mark.parametrize("type_name", DEQUANTISABLE)
def test_non_finite_scales_are_seen_where_dequantisation_shows_them(type_name: str) -> None:
    """Wholly random blocks: a block is flagged exactly when the reference makes a non-finite value of it.

    MXFP4 and NVFP4 are flagged for their formats' NaN codes, which the reference maps to finite numbers; MXFP4's
    greatest powers of two overflow float32 only when multiplied by an element."""
    quant_type = QuantType.named(type_name)
    blocks = np.random.default_rng(SEED).integers(0, 256, (4000, quant_type.block_bytes), dtype=np.uint8)
    if type_name == "F32":
        blocks[::7, 2:] = 0x7F, 0x80
    flags = quant_type.non_finite(blocks)
    with np.errstate(all="ignore"):
        values = quant_type.dequantise(blocks).reshape(len(blocks), -1)
    shown = ~np.isfinite(values).all(axis=1)
    if type_name in ("MXFP4", "NVFP4"):
        codes = blocks[:, 0] == 255 if type_name == "MXFP4" else ((blocks[:, :4] & 0x7F) == 0x7F).any(axis=1)
        assert flags.any() and np.array_equal(flags, codes) and not shown[~flags & (blocks[:, 0] < 250)].any()
    else:
        assert flags.any() and not flags.all() and np.array_equal(flags, shown)
