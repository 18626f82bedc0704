"""What the loader of `deepseek41` and `deepseek4` must refuse, by name of key or tensor, and what it accepts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepseek_data import tiny4, tiny41
from edited_model import DROP, Edit, like, opened, plain
from running import rows_of

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.ops_deepseek4 import IndexRows, WindowAttention
from bloomery.runtime.program import MatMul, Program, RoutedExperts, op_views, op_weights
from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.reference import ReferenceExecutor


def array(path: Path, key: str) -> np.ndarray:
    value = opened(path).metadata[f"{opened(path).architecture}.{key}"]
    assert isinstance(value, np.ndarray)
    return value.copy()


def changed(path: Path, key: str, index: int, value: Any) -> np.ndarray:
    found = array(path, key)
    found[index] = value
    return found


A = tiny41("a")
V4 = tiny4()
NONE: dict[str, Any] = {}
ENGRAM_KEYS = ("layer_ids", "head_count", "key_length", "max_ngram_size", "multipliers", "primes", "offsets")
ENGRAM_KEYS += ("token_map", "pad_id")
NO_ENGRAM = dict.fromkeys((f"engram.{key}" for key in ENGRAM_KEYS), DROP)
SIDES = {"hash": "blk.0.ffn_gate_tid2eid.weight"}


def ids_with(row: list[int]) -> np.ndarray:
    table = opened(V4).tensors[SIDES["hash"]].dequantise(np.int32)
    table[17] = row
    return np.asarray(table)


REFUSED: dict[str, tuple[Path, dict[str, Any], dict[str, Any], str]] = {
    # metadata
    "architecture": (A, {"general.architecture": "deepseek42"}, NONE, "general.architecture is 'deepseek42'"),
    "value width": (A, {"attention.value_length": 128}, NONE, "attention.value_length is 128, expected 256"),
    "kv heads": (A, {"attention.head_count_kv": 2}, NONE, "head_count_kv is 2, expected 1"),
    "odd rope": (A, {"rope.dimension_count": 31}, NONE, "rope.dimension_count is 31"),
    "rope wider than index keys": (A, {"rope.dimension_count": 66}, NONE, "rope.dimension_count is 66"),
    "output groups": (A, {"attention.output_group_count": 3}, NONE, "output_group_count is 3, expected a divisor"),
    "output rank": (A, {"attention.output_lora_rank": 64}, NONE, "attn_output_a.weight has shape"),
    "scaling type": (A, {"rope.scaling.type": "linear"}, NONE, "rope.scaling.type is 'linear', expected yarn"),
    "no scaling type": (A, {"rope.scaling.type": DROP}, NONE, "rope.scaling.type is missing"),
    "scaling factor": (A, {"rope.scaling.factor": 0.0}, NONE, "rope.scaling.factor is 0.0"),
    "original context": (A, {"rope.scaling.original_context_length": 0}, NONE, "original_context_length is 0"),
    "betas": (A, {"rope.scaling.yarn_beta_fast": 1.0}, NONE, "yarn_beta_fast is 1.0, expected more than"),
    "compressed base": (A, {"attention.compress_rope_freq_base": 1.0}, NONE, "compress_rope_freq_base is 1.0"),
    "few ratios": (A, {"attention.compress_ratios": np.zeros(8, np.int32)}, NONE, "compress_ratios is 'an array of 8"),
    "all window": (A, {"attention.compress_ratios": np.zeros(9, np.int32)}, NONE, "compress_ratios is"),
    "three ratios": (A, {"attention.compress_ratios": np.arange(9) % 4}, NONE, "one or two different"),
    "negative ratio": (A, {"attention.compress_ratios": np.arange(9) - 1}, NONE, "compress_ratios is"),
    "gating": (A, {"expert_gating_func": 2}, NONE, "expert_gating_func is 2, expected 4"),
    "too many experts used": (A, {"expert_used_count": 9}, NONE, "expert_used_count is 9, expected at most"),
    "no shared expert": (A, {"expert_shared_count": 0}, NONE, "expert_shared_count is 0"),
    "limits of fewer layers": (A, {"swiglu_clamp_exp": np.ones(8, np.float32)}, NONE, "swiglu_clamp_exp is 'an array"),
    "infinite limit": (
        A, {"swiglu_clamp_shexp": np.full(9, np.inf, np.float32)}, NONE, "swiglu_clamp_shexp is .* expected finite"
    ),
    "no limits": (A, {"swiglu_clamp_exp": DROP}, NONE, "swiglu_clamp_exp is missing"),
    "copies": (A, {"hyper_connection.count": 5}, NONE, "hc_attn_fn.weight has shape"),
    "no rounds": (A, {"hyper_connection.sinkhorn_iterations": DROP}, NONE, "sinkhorn_iterations is missing"),
    "zero rounds": (A, {"hyper_connection.sinkhorn_iterations": 0}, NONE, "sinkhorn_iterations is 0"),
    "hyper epsilon": (A, {"hyper_connection.epsilon": 0.0}, NONE, "hyper_connection.epsilon is 0.0"),
    "epsilon": (A, {"attention.layer_norm_rms_epsilon": 0.0}, NONE, "layer_norm_rms_epsilon is 0.0"),
    "hash layers in V4.1": (A, {"hash_layer_count": 1}, NONE, "hash_layer_count is 1, expected 0"),
    "vocabulary": (A, {"tokenizer.ggml.tokens": ["a"] * 511}, NONE, "token_map is 'an array of 512 numbers'"),
    "vocabulary of V4": (V4, {"tokenizer.ggml.tokens": ["a"] * 511}, NONE, "token_embd.weight has shape"),
    # engram
    "some engram keys": (A, {"engram.pad_id": DROP}, NONE, "engram.pad_id is missing"),
    "engram layers descend": (
        A, {"engram.layer_ids": np.array([4, 1], np.uint32)}, NONE, r"engram.layer_ids is \[4, 1\], expected ascending"
    ),
    "engram layer beyond": (A, {"engram.layer_ids": np.array([1, 9], np.uint32)}, NONE, r"layer_ids is \[1, 9\]"),
    "engram layer elsewhere": (
        A, {"engram.layer_ids": np.array([1, 3], np.uint32)}, NONE, "blk.3.engram_embd.weight is missing"
    ),
    "order 1": (A, {"engram.max_ngram_size": 1}, NONE, "max_ngram_size is 1"),
    "multipliers": (A, {"engram.multipliers": array(A, "engram.multipliers")[:7]}, NONE, "multipliers is 'an array"),
    "primes": (A, {"engram.primes": array(A, "engram.primes")[:11]}, NONE, "primes is 'an array of 11"),
    "prime of 0": (A, {"engram.primes": changed(A, "engram.primes", 3, 0)}, NONE, "primes is 0"),
    "offsets": (A, {"engram.offsets": changed(A, "engram.offsets", 7, 98)}, NONE, "offsets is .* expected the sums"),
    "table rows": (
        A, {"engram.primes": changed(A, "engram.primes", 5, 97)}, NONE, r"blk.1.engram_embd.weight has shape"
    ),
    "huge table": (A, {"engram.primes": changed(A, "engram.primes", 5, 2**31)}, NONE, "rows at layer 1"),
    "token map": (A, {"engram.token_map": np.zeros(511, np.uint32)}, NONE, "token_map is 'an array of 511"),
    "real token map": (A, {"engram.token_map": np.zeros(512, np.float32)}, NONE, "an array of float32"),
    "products beyond 2^63": (
        A, {"engram.multipliers": changed(A, "engram.multipliers", 0, 2**62)}, NONE, "products with compressed ids"
    ),
    "pad beyond": (A, {"engram.pad_id": 2**40}, NONE, "products with compressed ids below 2\\^63"),
    "no engram keys": (A, NO_ENGRAM, NONE, "blk.1.engram_embd.weight stands alone"),
    "tables of two types": (
        A, NONE, {"blk.4.engram_embd.weight": plain("blk.4.engram_embd.weight", np.zeros((630, 256)))},
        "blk.4.engram_embd.weight has type F32, expected Q3_K, as blk.1.engram_embd.weight",
    ),
    # candidates
    "no publisher": (A, {"attention.candidate_source_layer_id": 6}, NONE, "candidate_source_layer_id is 6, expected a"),
    "no layer": (A, {"attention.candidate_source_layer_id": 20}, NONE, "candidate_source_layer_id is 20"),
    "other rows": (A, {"attention.candidate_source_layer_id": 4}, NONE, "candidate_source_layer_id is 4, expected a"),
    "too few candidates": (A, {"attention.candidate_topk_blocks": 2}, NONE, "candidate_topk_blocks is 2, expected"),
    "no blocks": (A, {"attention.candidate_topk_blocks": 0}, NONE, "candidate_topk_blocks is 0"),
    "empty block": (A, {"attention.candidate_block_size": 0}, NONE, "candidate_block_size is 0"),
    # roles
    "no source": (
        A, NONE,
        dict.fromkeys((f"blk.2.{n}.weight" for n in (
            "attn_compressor_kv", "attn_compressor_gate", "attn_compressor_norm", "indexer.attn_k", "indexer.k_norm"
        )), DROP),
        "no tensor attn_compressor_kv in layers 0 to 2",
    ),
    "no publisher at the source": (
        A, NONE, {"blk.4.indexer.attn_q_b.weight": DROP, "blk.4.indexer.proj.weight": DROP},
        "layer 4 reads rows of layer 4 by a list of layer 2",
    ),
    "source of another ratio": (
        A, {"attention.compress_ratios": np.array([0, 0, 2, 1, 2, 1, 1, 1, 1])}, NONE,
        "layer 3 of compress ratio 1 reads layer 2 of ratio 2",
    ),
    "window layer with an indexer": (
        A, NONE, {"blk.1.indexer.proj.weight": like("blk.2.indexer.proj.weight")}, "blk.1.indexer.proj.weight stands"
    ),
    "gate of ratio 1": (
        A, NONE, {"blk.5.attn_compressor_gate.weight": like("blk.4.attn_compressor_gate.weight")},
        "blk.5.attn_compressor_gate.weight",
    ),
    "no gate": (A, NONE, {"blk.4.attn_compressor_gate.weight": DROP}, "blk.4.attn_compressor_gate.weight is missing"),
    "no compressor norm": (A, NONE, {"blk.5.attn_compressor_norm.weight": DROP}, "compressor_norm.weight is missing"),
    "no index key": (A, NONE, {"blk.5.indexer.attn_k.weight": DROP}, "blk.5.indexer.attn_k.weight is missing"),
    "no key norm": (A, NONE, {"blk.5.indexer.k_norm.weight": DROP}, "blk.5.indexer.k_norm.weight is missing"),
    "no index weights": (A, NONE, {"blk.7.indexer.proj.weight": DROP}, "blk.7.indexer.proj.weight is missing"),
    "no index queries": (A, NONE, {"blk.7.indexer.attn_q_b.weight": DROP}, "blk.7.indexer.proj.weight stands alone"),
    "no engram_k": (A, NONE, {"blk.4.engram_k.weight": DROP}, "blk.4.engram_k.weight is missing"),
    "engram elsewhere": (A, NONE, {"blk.3.engram_q.weight": like("blk.4.engram_q.weight")}, "blk.3.engram_q.weight"),
    "no router": (A, NONE, {"blk.8.ffn_gate_inp.weight": DROP}, "blk.8.ffn_gate_inp.weight is missing"),
    "no bias": (A, NONE, {"blk.8.exp_probs_b.bias": DROP}, "blk.8.exp_probs_b.bias is missing"),
    # the two architectures
    "ape in V4.1": (
        A, NONE, {"blk.2.attn_compressor_ape.weight": plain("x", np.zeros((2, 256)))}, "blk.2.attn_compressor_ape"
    ),
    "index compressor in V4.1": (
        A, NONE, {"blk.2.indexer_compressor_kv.weight": plain("x", np.zeros((2, 256)))}, "blk.2.indexer_compressor_kv"
    ),
    "table in V4.1": (A, NONE, {SIDES["hash"]: plain("x", np.zeros((512, 2), np.int32))}, SIDES["hash"]),
    "head collapse in V4.1": (A, NONE, {"output_hc_scale.weight": plain("x", np.zeros(1))}, "output_hc_scale.weight"),
    "no head collapse": (V4, NONE, {"output_hc_base.weight": DROP}, "output_hc_base.weight is missing"),
    "index key in V4": (
        V4, NONE, {"blk.2.indexer.attn_k.weight": plain("x", np.zeros((64, 128)))}, "blk.2.indexer.attn_k.weight"
    ),
    "engram in V4": (V4, NONE, {"blk.1.engram_q.weight": plain("x", np.zeros((4, 256)))}, "blk.1.engram_q.weight"),
    "engram keys in V4": (V4, {"engram.pad_id": 7}, NONE, "engram.pad_id is 7, expected no such key"),
    "bias on a hash layer": (V4, NONE, {"blk.1.exp_probs_b.bias": like("blk.3.exp_probs_b.bias")}, "blk.1.exp_probs_b"),
    "table behind the hash layers": (V4, NONE, {"blk.3.ffn_gate_tid2eid.weight": like(SIDES["hash"])}, "blk.3.ffn"),
    "no table": (V4, NONE, {SIDES["hash"]: DROP}, "blk.0.ffn_gate_tid2eid.weight is missing"),
    "unknown expert": (V4, NONE, {SIDES["hash"]: plain(SIDES["hash"], ids_with([0, 12, 3]))}, "token 17: .0, 12, 3."),
    "expert twice": (V4, NONE, {SIDES["hash"]: plain(SIDES["hash"], ids_with([5, 1, 5]))}, "twice for token 17"),
    "table of floats": (
        V4, NONE, {SIDES["hash"]: plain(SIDES["hash"], ids_with([0, 1, 2]).astype(np.float32))}, "F32, expected I32"
    ),
    "no ape": (V4, NONE, {"blk.2.attn_compressor_ape.weight": DROP}, "blk.2.attn_compressor_ape.weight is missing"),
    "a compressor of a third width": (
        V4, NONE, {"blk.2.attn_compressor_kv.weight": plain("blk.2.attn_compressor_kv.weight", np.zeros((384, 256)))},
        "blk.2.attn_compressor_kv.weight has shape",
    ),
    # tensors
    "unknown tensor": (A, NONE, {"blk.0.attn_extra.weight": plain("x", np.zeros((2, 2)))}, "blk.0.attn_extra.weight"),
    "misshapen": (A, NONE, {"blk.3.attn_sinks.weight": plain("blk.3.attn_sinks.weight", np.zeros(5))}, "attn_sinks"),
    "tied head": (A, NONE, {"output.weight": DROP}, "output.weight is missing"),
    "vector of another type": (
        A, NONE, {"blk.3.attn_sinks.weight": like("blk.3.attn_sinks.weight", quant_type=QuantType.named("I32"))},
        "blk.3.attn_sinks.weight has type I32, expected F32",
    ),
    "stacks of different counts": (
        A, NONE, {"blk.3.ffn_up_exps.weight": like("blk.3.ffn_up_exps.weight", shape=(256, 256, 7))}, "ffn_up_exps"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    path, keys, tensors, message = REFUSED[case]
    with pytest.raises(ModelFileError, match=message) as caught:
        Edit(path, keys, tensors).build()
    assert caught.value.hint and str(caught.value).count("\n") == 0


def lists_of(program: Program) -> dict[int, IndexRows]:
    return {int(op.name.split(".")[1]): op for op in program.ops if isinstance(op, IndexRows)}


def test_roles_of_the_tiny_model() -> None:
    program = Edit(A).build()
    read = {
        int(op.name.split(".")[1]): (op.groups and op.groups.split(".")[1], op.ratio, bool(op.chosen))
        for op in program.ops
        if isinstance(op, WindowAttention)
    }
    assert read == {
        0: (None, 1, False), 1: (None, 1, False), 2: ("2", 2, True), 3: ("2", 2, True), 4: ("4", 2, True),
        5: ("5", 1, True), 6: ("5", 1, True), 7: ("5", 1, True), 8: ("5", 1, True),
    }  # fmt: skip
    lists = lists_of(program)
    assert {layer: op.keys.split(".")[1] for layer, op in lists.items()} == {2: "2", 4: "4", 5: "5", 7: "5"}
    assert [layer for layer, op in lists.items() if op.kept] == [5]
    assert [layer for layer, op in lists.items() if op.within] == [7]


def test_candidate_keys_are_optional() -> None:
    """Without them layer 20 is the source, and a file that has no such layer has no mask; nor if it is negative."""
    names = ("source_layer_id", "block_size", "topk_blocks")
    keys: dict[str, Any] = dict.fromkeys((f"attention.candidate_{name}" for name in names), DROP)
    for edit in (keys, {"attention.candidate_source_layer_id": -1}):
        assert not any(op.kept or op.within for op in lists_of(Edit(A, edit).build()).values())


def test_limits_may_be_one_number_or_none_at_all() -> None:
    program = Edit(A, {"swiglu_clamp_exp": 7.0, "swiglu_clamp_shexp": np.full(9, -1.0, np.float32)}).build()
    assert {op.limit for op in program.ops if isinstance(op, RoutedExperts)} == {7.0}
    assert {op.limit for op in program.ops if op.name.endswith("swiglu_shexp")} == {0.0}  # type: ignore[union-attr]


def test_a_model_without_engrams() -> None:
    names = [name for name in opened(A).tensors if ".engram_" in name]
    program = Edit(A, NO_ENGRAM, dict.fromkeys(names, DROP)).build()
    assert program.engram is None and "tokens" not in program.states


def test_output_projection_may_be_stored_as_three_dimensions() -> None:
    name = "blk.0.attn_output_a.weight"
    program = Edit(A, NONE, {name: like(name, shape=(512, 128, 2))}).build()
    assert program.weights[name].shape == (512, 128, 2) == Edit(A).build().weights[name].shape


@pytest.mark.parametrize("path", [A, V4], ids=["deepseek41", "deepseek4"])
def test_programs_are_whole(path: Path) -> None:
    """Every tensor is used once but those that text does not read; ops have names of their own; rows are cut once."""
    model = opened(path)
    program = Edit(path).build()
    used = [weight for op in program.ops for weight in op_weights(op)]
    assert len(used) == len(set(used))
    assert set(model.tensors) - set(used) == {name for name in model.tensors if "exp_probs_b_vl" in name}
    names = [op.name for op in program.ops]
    assert len(names) == len(set(names))
    for op in program.ops:
        kinds = {program.buffers[view.buffer].rows for view, _ in op_views(op)}
        assert len(kinds) <= 1 or op.name.startswith("select_")
    products = [op.name for op in program.ops if isinstance(op, MatMul) and op.name.startswith("blk.2.")]
    assert products[1].startswith("blk.2.attn_q_a+attn_kv+attn_compressor_kv+attn_compressor_gate")


def test_hash_layers_up_to_the_last_row() -> None:
    """The last layer computes wanted rows only and must look up their tokens."""
    tables = {f"blk.{layer}.ffn_gate_tid2eid.weight": like(SIDES["hash"]) for layer in range(6)}
    biases = {f"blk.{layer}.exp_probs_b.bias": DROP for layer in range(2, 6)}
    program = Edit(V4, {"hash_layer_count": 6}, tables | biases).build()
    tokens = np.random.default_rng(2).integers(0, 512, 9)
    every, last = (ReferenceExecutor(program, context=16) for _ in range(2))
    expected = every.step(rows_of(tokens)).logits
    wanted = dataclasses.replace(rows_of(tokens), out_rows=np.array([3, 7], np.int32))
    np.testing.assert_allclose(last.step(wanted).logits, expected[[3, 7]], rtol=0, atol=1e-4)
    ids = last.read(next(op.ids for op in program.ops if op.name == "blk.5.router"))[:, 0]  # type: ignore[union-attr]
    assert (ids == opened(V4).tensors[SIDES["hash"]].dequantise(np.int32)[tokens[[3, 7]]]).all()
