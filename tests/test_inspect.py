"""bloomery-inspect: roles and bytes of a known file, its JSON form, its tables, and errors as one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_bytes import ARRAY, FLOAT32, INT64, STRING, Draft, shard_drafts
from small_model import EXPERTS, USED, small_draft

from bloomery.launcher.inspect import main
from bloomery.runtime.tensor_roles import role_of

EXPERT_TENSORS = [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "small.gguf").write_bytes(small_draft().build())
    return tmp_path / "small.gguf"


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    return dict(json.loads(output))


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("token_embd.weight", "embedding"),
        ("output.weight", "head"),
        ("output_norm.weight", "norms"),
        ("blk.0.attn_norm.weight", "norms"),
        ("blk.12.attn_kv_a_norm.weight", "norms"),
        ("blk.3.indexer.k_norm.bias", "norms"),
        ("token_embd_norm.weight", "norms"),
        ("blk.7.attn_output.weight", "attention"),
        ("blk.7.attn_q.bias", "attention"),
        ("blk.7.attn_kv_a_mqa.weight", "attention"),
        ("blk.7.ffn_down.weight", "dense ffn"),
        ("blk.7.ffn_gate.weight", "dense ffn"),
        ("blk.7.ffn_gate_exps.weight", "experts"),
        ("blk.7.ffn_gate_up_exps.weight", "experts"),
        ("blk.7.ffn_down_shexp.weight", "shared experts"),
        ("blk.7.ffn_gate_inp.weight", "router"),
        ("blk.7.ffn_gate_inp_shexp.weight", "router"),
        ("blk.7.exp_probs_b.bias", "router"),
        ("blk.1.engram_embd.weight", "tables"),
        ("rope_freqs.weight", "other"),
        ("blk.0.hc_attn_fn.weight", "hyper-connections"),
        ("blk.0.hc_ffn_scale.weight", "hyper-connections"),
        ("output_hc_base.weight", "hyper-connections"),
        ("blk.1.engram_wkv.weight", "engrams"),
        ("blk.14.engram_q.weight", "engrams"),
        ("blk.2.indexer.attn_q_b.weight", "attention"),
        ("blk.2.indexer_compressor_kv.weight", "attention"),
        ("blk.2.indexer_compressor_norm.weight", "norms"),
        ("blk.2.attn_compressor_ape.weight", "attention"),
        ("enc.output_norm.weight", "norms"),
        ("markov_w1.weight", "draft"),
        ("conf_proj.weight", "draft"),
    ],
)
def test_roles_by_name(name: str, role: str) -> None:
    assert role_of(name) == role


def test_json_adds_up(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspected(capsys, str(path))
    sizes = {tensor.name: len(tensor.data) for tensor in small_draft().tensors}
    assert {tensor["name"]: tensor["bytes"] for tensor in report["tensors"]} == sizes
    assert report["bytes"] == path.stat().st_size and report["architecture"] == "qwen3moe"
    for totals in (report["bytes_by_role"], report["bytes_by_type"]):
        assert sum(totals.values()) == report["tensor_bytes"] == sum(sizes.values())
    experts = sum(sizes[name] for name in EXPERT_TENSORS)
    assert report["bytes_by_role"]["experts"] == report["experts"]["bytes"] == experts
    assert report["experts"]["layers"] == [
        {"layer": 0, "experts": EXPERTS, "bytes": experts, "bytes_per_expert": experts // EXPERTS}
    ]
    assert report["experts"]["active_bytes_per_token"] == experts * USED // EXPERTS
    assert report["metadata"]["qwen3moe.expert_count"] == EXPERTS
    tokens = report["metadata"]["tokenizer.ggml.tokens"]
    assert (tokens["count"], tokens["type"], len(tokens["first"])) == (266, "string", 8)
    data = path.read_bytes()
    for tensor, made in zip(report["tensors"], small_draft().tensors, strict=True):
        assert data[tensor["offset"] : tensor["offset"] + tensor["bytes"]] == made.data and tensor["role"]


def test_json_full_and_odd_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = small_draft().with_key("x.floats", (ARRAY, FLOAT32), [float("nan"), float("-inf"), 0.5])
    draft = draft.with_key("x.text", STRING, b"a\xff\n")
    draft = draft.with_key("x.numbers", (ARRAY, INT64), list(range(2**40, 2**40 + 9)))
    (tmp_path / "odd.gguf").write_bytes(draft.build())
    report = inspected(capsys, str(tmp_path / "odd.gguf"), "--full")
    assert report["metadata"]["x.floats"] == ["nan", "-inf", 0.5]
    assert report["metadata"]["x.numbers"] == list(range(2**40, 2**40 + 9))
    assert len(report["metadata"]["tokenizer.ggml.tokens"]) == 266
    assert report["metadata"]["x.text"].encode("utf-8", "surrogateescape") == b"a\xff\n"
    assert main([str(tmp_path / "odd.gguf"), "--full"]) == 0
    assert "a�\\n" in capsys.readouterr().out


def test_tables_show_what_a_person_asks_for(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path)]) == 0
    output = capsys.readouterr().out
    for text in ("qwen3moe.expert_used_count", "blk.N.ffn_up_exps.weight", "256x256x4", "Q3_K", "router"):
        assert text in output
    assert f"(50.0 %), {USED} experts a layer" in output and "(266 in all)" in output
    assert main([str(path), "--tensors"]) == 0
    assert "blk.0.ffn_up_exps.weight" in capsys.readouterr().out


def test_shards_vocabularies_and_nameless_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, shard in enumerate(shard_drafts(small_draft(), 2)):
        (tmp_path / f"m-{number + 1:05d}-of-00002.gguf").write_bytes(shard.build())
    report = inspected(capsys, str(tmp_path / "m-00001-of-00002.gguf"))
    assert [Path(shard["path"]).name for shard in report["shards"]] == [f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    assert {tensor["shard"] for tensor in report["tensors"]} == {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf"}
    for name, draft in (("vocabulary", replace(small_draft(), tensors=())), ("nothing", Draft((), ()))):
        (tmp_path / f"{name}.gguf").write_bytes(draft.build())
        report = inspected(capsys, str(tmp_path / f"{name}.gguf"))
        assert report["tensors"] == [] and report["experts"] is None
        assert main([str(tmp_path / f"{name}.gguf")]) == 0
        assert "vocabulary only" in capsys.readouterr().out


def test_errors_are_one_line_and_a_status(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])
    for arguments, texts in (
        ([str(path)], ("output.weight", "cut short", " -> ")),
        ([str(path.with_name("none.gguf"))], ("none.gguf", "No such file", " -> ")),
        ([str(path.parent)], ("is no regular file", " -> ")),
        ([], ("FILE", "--help")),
    ):
        command = [sys.executable, "-m", "bloomery.launcher.inspect", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode != 0 and result.stdout == "" and result.stderr.count("\n") == 1, result.stderr
        assert all(text in result.stderr for text in texts), result.stderr


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0 and "examples:" in capsys.readouterr().out
