"""Benchmark files: random blocks, llama.cpp's mixes, drafts, and files that both engines load."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from bloomery.launcher.bench_engine import BenchEngine
from bloomery.launcher.bench_peer import LlamaPeer, PeerOptions
from bloomery.launcher.bench_trial import TokenSource, Trial
from bloomery.runtime import synthetic_file
from bloomery.runtime.architectures import build_program
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.step_work import step_work
from bloomery.runtime.synthetic_blocks import random_blocks
from bloomery.runtime.synthetic_deepseek41 import DEEPSEEK_V41_FLASH, SparseShapes, deepseek41_draft
from bloomery.runtime.synthetic_file import check_room, digest, write_draft
from bloomery.runtime.synthetic_model import (
    DEEPSEEK_V2_LITE,
    LLAMA_1B,
    QWEN3_30B_A3B,
    Draft,
    deepseek2_draft,
    llama_draft,
    qwen3moe_draft,
)
from bloomery.runtime.synthetic_templates import synthetic_draft
from bloomery.runtime.tensor_roles import bytes_by_type
from bloomery.runtime.type_mixes import MIXES, PURE_MIXES, mixed_type

# The same models with few and narrow layers. V2-Lite keeps its number of layers: llama.cpp knows it by that.
SMALL = {
    "qwen3-30b-a3b": qwen3moe_draft(
        replace(QWEN3_30B_A3B, layers=2, width=256, vocabulary=600, heads=4, kv_heads=2, head_width=64, hidden=256,
                experts=8, used=2, expert_hidden=256), "Q4_K_M"),
    "deepseek-v2-lite": deepseek2_draft(
        replace(DEEPSEEK_V2_LITE, width=256, vocabulary=600, heads=2, hidden=320, experts=4, used=2, expert_hidden=128,
                latent=256), "Q3_K_M"),
    "llama-1b": llama_draft(
        replace(LLAMA_1B, layers=2, width=256, vocabulary=600, heads=4, kv_heads=2, head_width=64, hidden=512),
        "Q4_K_M"),
    "deepseek41": deepseek41_draft(
        replace(DEEPSEEK_V41_FLASH, layers=3, width=256, vocabulary=600, heads=4, head_width=64, experts=8, used=2,
                expert_hidden=256, rotated=16),
        "Q3_K_M",
        SparseShapes(q_rank=256, groups=2, group_rank=256, window=16, index_heads=4, index_width=64, index_keep=8,
                     bucket_rows=80)),
}  # fmt: skip
RUN_HERE = [name for name in SMALL if name != "deepseek41"]
FULL_BYTES = {  # whole models in Q4_K_M, of which published files have 18.56, 10.36 and 0.81 GB
    "qwen3-30b-a3b": (48, 18.56e9),
    "deepseek-v2-lite": (27, 10.36e9),
    "llama-1b": (16, 0.81e9),
}
# deepseek41's published file (Q3_K_M): all tensors but 40 selection biases for images (384 F32); its n-gram tables
DEEPSEEK41_BYTES = 347_265_635_740 - 40 * 384 * 4
TABLE_BYTES = [42_240_678_480, 42_241_835_020]


@pytest.mark.parametrize("name", PURE_MIXES)
def test_random_blocks_are_finite_and_spread_as_asked(name: str) -> None:
    quant_type, seed = QuantType.named(name), 11
    print(f"seed {seed}")
    data = random_blocks(np.random.default_rng(seed), quant_type, 256 * 512, 0.02)
    assert data.nbytes == quant_type.row_bytes(256 * 512)
    assert not quant_type.non_finite(data.reshape(-1, quant_type.block_bytes)).any()
    values = quant_type.dequantise(data, np.float64)
    power_of_two = name == "MXFP4"
    assert values.std() == pytest.approx(0.02, rel=0.45 if power_of_two else 0.03)
    # types of signed codes have one code more below zero than above
    assert abs(values.mean()) < 0.02 * (0.15 if name in ("Q4_0", "Q5_0", "IQ4_NL") else 0.03)


def test_blocks_differ_from_one_another() -> None:
    data = random_blocks(np.random.default_rng(1), QuantType.named("Q4_K"), 256 * 64, 1.0).reshape(64, -1)
    assert len({block.tobytes() for block in data}) == 64
    assert len({block[:2].tobytes() for block in data}) > 32  # scales, too


def test_a_type_without_known_scales_is_refused() -> None:
    with pytest.raises(BloomeryError, match="IQ1_M"):
        random_blocks(np.random.default_rng(1), QuantType.named("IQ1_M"), 256, 1.0)


def test_mixes_are_those_of_llama_cpp() -> None:
    def named(mix: str, stem: str, layer: int, layers: int, *, row: int = 2048, tied: bool = False) -> str:
        return mixed_type(mix, stem, layer, layers, tied=tied, row=row).name

    # use_more_bits of 48 layers: the first 6, the last 6, and every third from the eighth on
    more = [layer for layer in range(48) if named("Q4_K_M", "ffn_down_exps", layer, 48) == "Q6_K"]
    assert more == [*range(6), *range(8, 42, 3), *range(42, 48)]
    assert more == [layer for layer in range(48) if named("Q4_K_M", "attn_v", layer, 48) == "Q6_K"]
    assert named("Q4_K_M", "attn_q", 0, 48) == named("Q4_K_M", "token_embd", 0, 48) == "Q4_K"
    assert [named("Q3_K_M", "ffn_down", layer, 48) for layer in (0, 2, 3, 47)] == ["Q5_K", "Q5_K", "Q4_K", "Q4_K"]
    assert [named("Q3_K_M", "attn_v", layer, 48) for layer in (1, 2)] == ["Q5_K", "Q4_K"]
    assert named("Q3_K_M", "attn_output", 9, 48) == "Q4_K"
    assert named("Q3_K_M", "ffn_up", 9, 48) == "Q3_K"
    for mix in ("Q3_K_M", "Q4_K_M"):
        assert named(mix, "output", 0, 48) == named(mix, "token_embd", 0, 16, tied=True) == "Q6_K"
        assert named(mix, "ffn_gate_inp", 3, 48) == "F32"
    # rows that do not fill a block of 256, and of 32
    assert named("Q4_K_M", "ffn_down_exps", 10, 27, row=1408) == "Q5_0"
    assert named("Q4_K_M", "ffn_down_exps", 0, 27, row=1408) == "Q8_0"
    assert named("Q3_K_M", "attn_k_b", 0, 27, row=128) == "Q4_0"
    assert named("Q8_0", "attn_q", 0, 4, row=40) == "F16"


def test_an_unknown_mix_is_refused() -> None:
    with pytest.raises(BloomeryError, match="Q9_Z") as caught:
        synthetic_draft("llama-1b", 0, "Q9_Z")
    assert "Q4_K_M" in caught.value.hint


@pytest.mark.parametrize("name", FULL_BYTES)
def test_whole_models_have_the_published_sizes(name: str) -> None:
    layers, published = FULL_BYTES[name]
    assert synthetic_draft(name, layers, "Q4_K_M").nbytes == pytest.approx(published, rel=0.02)


def test_deepseek41_has_the_published_bytes_and_holes_for_its_tables() -> None:
    draft = synthetic_draft("deepseek41", 40, experts=384)
    assert draft.mix == "Q3_K_M"
    tables = [tensor for tensor in draft.tensors if tensor.name.endswith("engram_embd.weight")]
    assert [tensor.name for tensor in tables] == ["blk.1.engram_embd.weight", "blk.14.engram_embd.weight"]
    assert [tensor.nbytes for tensor in tables] == TABLE_BYTES
    assert draft.nbytes == DEEPSEEK41_BYTES == draft.written_bytes + sum(TABLE_BYTES)
    assert draft.keys["deepseek41.engram.primes"][0] == 16000057  # and the last of each site, as published
    assert [draft.keys["deepseek41.engram.primes"][place] for place in (23, 24, 47)] == [16000463, 16000477, 16000889]


def test_deepseek41_in_eight_layers_has_every_role() -> None:
    draft = synthetic_draft("deepseek41")
    assert draft.layers == 8 and draft.keys["deepseek41.expert_count"] == 24
    assert draft.keys["deepseek41.attention.compress_ratios"] == [0, 0, 2, 2, 2, 2, 1, 1]

    def layers_with(stem: str) -> list[int]:
        return [int(t.name.split(".")[1]) for t in draft.tensors if t.name.endswith(f".{stem}.weight")]

    assert layers_with("attn_compressor_kv") == [2, 4, 6], "sources; 3 reads 2, 5 reads 4, 7 reads 6"
    assert layers_with("indexer.proj") == [2, 4, 6, 7], "publishers, two of them over the rows of 6"
    assert layers_with("engram_embd") == [1, 4]
    assert draft.nbytes - draft.written_bytes == sum(TABLE_BYTES)
    assert 4e9 < draft.written_bytes < 6e9


def test_bytes_that_deepseek41_reads_agree_with_a_count_by_hand(small_files: dict[str, Path]) -> None:
    with ModelFile.open(small_files["deepseek41"]) as model:
        work = step_work(build_program(model), 1, 99, 2)
        sizes = {name: tensor.nbytes for name, tensor in model.tensors.items()}
        row = {name: size // model.tensors[name].shape[1] for name, size in sizes.items() if "embd" in name}
        rare = [name for name in sizes if "_exps." in name or "embd" in name]
        dense = sum(size for name, size in sizes.items() if name not in rare)
        experts = sum(size * 2 / 8 for name, size in sizes.items() if "_exps." in name)
        rows = row["token_embd.weight"] + 24 * row["blk.1.engram_embd.weight"]
        assert sum(kind.weights for kind in work.values()) == pytest.approx(dense + experts + rows)
        assert work["tables"].weights == 24 * row["blk.1.engram_embd.weight"]
        # three windows of 16 rows, the 8 chosen of 50 compressed rows, 50 index keys; f16
        assert work["attention"].cache == (3 * 16 + 8) * 64 * 2
        assert work["index"].cache == 50 * 64 * 2


def test_fewer_experts_cost_a_token_the_same_and_bytes_less() -> None:
    whole, small = (synthetic_draft("qwen3-30b-a3b", 2, experts=experts) for experts in (0, 16))
    expert_bytes = [sum(t.nbytes for t in draft.tensors if "_exps" in t.name) for draft in (whole, small)]
    assert expert_bytes[0] == 8 * expert_bytes[1]
    for name, experts in (("qwen3-30b-a3b", 7), ("qwen3-30b-a3b", 129), ("llama-1b", 8)):
        with pytest.raises(BloomeryError, match=f"{experts} experts"):
            synthetic_draft(name, experts=experts)


def test_too_few_layers_for_an_architecture_are_refused() -> None:
    with pytest.raises(BloomeryError, match="at least 3"):
        synthetic_draft("deepseek41", 2)


def test_the_file_name_changes_with_the_contents() -> None:
    drafts = [synthetic_draft("llama-1b", layers, mix) for layers, mix in ((2, "Q4_K_M"), (3, "Q4_K_M"), (2, "Q3_K_M"))]
    assert len({digest(draft) for draft in drafts}) == 3
    assert digest(drafts[0]) == digest(synthetic_draft("llama-1b", 2, "Q4_K_M"))


@pytest.fixture(scope="module")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("synthetic")
    paths = {name: folder / f"{name}.gguf" for name in SMALL}
    for name, path in paths.items():
        write_draft(SMALL[name], path)
    return paths


@pytest.mark.parametrize("name", SMALL)
def test_a_file_is_what_its_draft_says(name: str, small_files: dict[str, Path]) -> None:
    draft, path = SMALL[name], small_files[name]
    with ModelFile.open(path) as model:
        assert {t.name: (t.shape, t.quant_type.name) for t in model.tensors.values()} == {
            t.name: (t.shape, t.quant_type.name) for t in draft.tensors
        }
        assert sum(bytes_by_type(model.tensors.values()).values()) == draft.nbytes
        assert build_program(model).layers == draft.layers
        for tensor, drafted in ((model.tensors[t.name], t) for t in draft.tensors):
            values = tensor.dequantise()
            assert np.isfinite(values).all()
            if drafted.hollow:
                assert not values.any()
                continue
            if values.size < 60:
                continue  # too few for their mean and deviation to say much
            assert values.std() == pytest.approx(drafted.deviation, rel=0.35), tensor.name
            assert values.mean() == pytest.approx(drafted.mean, abs=0.3 * drafted.deviation), tensor.name


def test_the_same_draft_gives_the_same_bytes(tmp_path: Path, small_files: dict[str, Path]) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    write_draft(SMALL["llama-1b"], again)
    write_draft(SMALL["llama-1b"], other, seed=2)
    assert again.read_bytes() == small_files["llama-1b"].read_bytes() != other.read_bytes()


@pytest.mark.parametrize("name", RUN_HERE)
def test_our_engine_runs_the_file(name: str, small_files: dict[str, Path]) -> None:
    with BenchEngine(str(small_files[name]), threads=1, context=64, prompt_block=16, cache_type="f16") as engine:
        source = TokenSource(600, 20)
        engine.fill(source.prefix(20))
        run = engine.run(Trial("tg", 8, 20), source.prefix(20), source.fresh(1))
        assert run.steps == len(run.tokens) == 8
        assert 0 < run.step_seconds < run.seconds
        prompt = engine.run(Trial("pp", 24, 20), source.prefix(20), source.fresh(24))
        assert prompt.steps == 2  # blocks of 16 rows
        # noise, but not the same noise for ever; where the embedding is the output, too, a token finds itself again
        assert SMALL[name].tied or len(set(run.tokens)) > 1


@pytest.mark.parametrize("name", RUN_HERE)
def test_llama_cpp_loads_the_file(name: str, small_files: dict[str, Path]) -> None:
    if find_spec("xllamacpp") is None and find_spec("llama_cpp") is None:
        pytest.skip("no llama.cpp wheel is installed (pip install 'bloomery[oracle]')")
    options = PeerOptions(sys.executable, "auto", True)
    with LlamaPeer(options, str(small_files[name]), threads=1, context=64, micro_batch=16) as peer:
        source = TokenSource(600, 20)
        peer.fill(source.prefix(20))
        assert peer.run(Trial("tg", 8, 20), source.fresh(8)).seconds > 0


def test_a_made_file_is_found_again_and_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path))
    monkeypatch.setattr(synthetic_file, "synthetic_draft", lambda name, *how: SMALL[name])
    told: list[tuple[str, int, int]] = []
    made = synthetic_file.synthetic_file("llama-1b", 0, "Q4_K_M", progress=lambda *report: told.append(report))
    assert made.parent == tmp_path / "bench"
    assert told[-1][1] == told[-1][2] == SMALL["llama-1b"].nbytes
    count, changed = len(told), made.stat().st_mtime_ns
    assert synthetic_file.synthetic_file("llama-1b", 0, "Q4_K_M", progress=lambda *report: told.append(report)) == made
    assert (len(told), made.stat().st_mtime_ns) == (count, changed)


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BloomeryError, match="MiB are free") as caught:
        check_room(tmp_path, 1 << 60)
    assert "--layers" in caught.value.hint


def test_an_interrupted_file_leaves_nothing(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(stage: str, done: int, total: int) -> None:
        if done > total // 2:
            raise Stopped

    draft: Draft = SMALL["llama-1b"]
    with pytest.raises(Stopped):
        write_draft(draft, tmp_path / "half.gguf", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_every_mix_that_is_offered_makes_a_draft() -> None:
    for mix in MIXES:
        assert synthetic_draft("deepseek-v2-lite", 2, mix).nbytes > 0
