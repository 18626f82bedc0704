"""Architectures as modules: the ops they emit, the numbers they read, and what they refuse by name.

That the ops compute the right thing is test_reference_oracle.py's business.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle_data import HERE, TINY, f32_file, quantised_file

from bloomery.runtime.architectures import build_program, deepseek2, rotary
from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import Attention, CacheWrite, MatMul, Program, Router, op_views, op_weights

sys.path.insert(0, str(HERE / "oracle_kit"))
from variants import Draft


def program_of(name: str) -> Program:
    return build_program(ModelFile.open(f32_file(name)))


def written(draft: Draft, folder: Path) -> ModelFile:
    draft.write(folder / "edited.gguf")
    return ModelFile.open(folder / "edited.gguf")


def thin(base: str) -> Draft:
    """A draft with its layers' matrices cut to the first layers' (so that many files can be written fast)."""
    draft = Draft(base)
    draft.set("block_count", 2)
    draft.tensors = {
        name: values
        for name, values in draft.tensors.items()
        if not name.startswith("blk.") or int(name.split(".")[1]) < 2
    }
    return draft


def test_a_layer_of_qwen3moe_reads_as_one_would_tell_it() -> None:
    program = program_of("qwen3moe")
    assert [op.name for op in program.ops[:18]] == [
        "token_embd",
        "blk.0.attn_norm",
        "blk.0.attn_q+attn_k+attn_v",
        "blk.0.attn_q_norm",
        "blk.0.attn_k_norm",
        "blk.0.rope_q",
        "blk.0.rope_k",
        "blk.0.write_keys",
        "blk.0.write_values",
        "blk.0.attention",
        "blk.0.attn_output",
        "blk.0.attn_residual",
        "blk.0.ffn_norm",
        "blk.0.ffn_gate_inp",
        "blk.0.router",
        "blk.0.routed_experts",
        "blk.0.ffn_residual",
        "blk.1.attn_norm",
    ]
    assert [op.name for op in program.ops[-3:]] == ["output_norm", "output", "argmax"]


@pytest.mark.parametrize("name", TINY)
def test_programs_are_whole(name: str) -> None:
    """Every tensor is used once, states are written before they are read, ops have names of their own, rows end as
    the wanted rows."""
    model = ModelFile.open(f32_file(name))
    program = build_program(model)
    used = Counter(weight for op in program.ops for weight in op_weights(op))
    assert set(used) == set(model.tensors) == set(program.weights)
    assert set(used.values()) == {1}
    names = [op.name for op in program.ops]
    assert len(names) == len(set(names))
    filled: set[str] = set()
    for op in program.ops:
        if isinstance(op, CacheWrite):
            filled.add(op.state)
        if isinstance(op, Attention):
            assert {op.keys, op.values} <= filled
    assert filled == set(program.states)
    assert program.buffers[program.logits].rows == program.buffers[program.argmax].rows == "out"
    for op in program.ops:
        kinds = {program.buffers[view.buffer].rows for view, _ in op_views(op)}
        assert len(kinds) == 1 or op.name == "select_rows"


def test_products_that_share_an_input_are_one_op() -> None:
    """But for the router, whose weights are F32 and whose input is therefore not quantised."""
    products = [op for op in program_of("deepseek2-v3").ops if isinstance(op, MatMul)]
    names = [op.name for op in products if op.name.startswith("blk.1.")]
    assert names == [
        "blk.1.attn_q_a+attn_kv_a_mqa",
        "blk.1.attn_q_b",
        "blk.1.attn_output",
        "blk.1.ffn_gate_inp",
        "blk.1.ffn_gate_shexp+ffn_up_shexp",
        "blk.1.ffn_down_shexp",
    ]


def test_latents_or_whole_keys_are_cached() -> None:
    """lite: kv_lora 256 and 16 rotated; 2 heads of 32 + 16 and values of 64."""
    latent, whole = program_of("deepseek2-lite"), program_of("deepseek2-lite-kvb")
    assert {state.width for state in latent.states.values()} == {256 + 16}
    assert {name.split(".")[2]: state.width for name, state in whole.states.items()} == {"keys": 96, "values": 128}
    assert len(latent.states) == 27 and len(whole.states) == 54


def test_router_kinds() -> None:
    lite = next(op for op in program_of("deepseek2-lite").ops if isinstance(op, Router))
    v3 = next(op for op in program_of("deepseek2-v3").ops if isinstance(op, Router))
    assert (lite.gating, lite.normalise, lite.scale, lite.bias, lite.groups) == ("softmax", False, 1.0, None, 1)
    assert (v3.gating, v3.normalise, v3.scale, v3.groups, v3.groups_used) == ("sigmoid", True, 2.5, 4, 2)
    assert v3.bias == "blk.1.exp_probs_b.bias"


def test_softmax_scale_of_published_models() -> None:
    """DeepSeek-V3's own code: softmax_scale = 192^-0.5 * (0.1 * mscale_all_dim * ln 40 + 1)^2 with mscale_all_dim 1;
    V2-Lite has 0.707. Their rotation has magnitude 1."""
    for stored, multiplier in ((0.1, 1.0), (0.0707, 0.707)):
        read = float(np.float32(np.float32(stored)) / np.float32(0.1))
        assert read == pytest.approx(multiplier, abs=1e-6)
        rope = rotary.Rotary((1.0,), 1.0, 40.0, "yarn")
        published = (0.1 * multiplier * math.log(40) + 1) ** 2
        assert deepseek2.softmax_scale(rope, read) == pytest.approx(published, rel=1e-6)
    (scale,) = {op.scale for op in program_of("deepseek2-v3").ops if isinstance(op, Attention)}
    assert scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(96), rel=1e-6)


def test_yarn_ramp_of_deepseek() -> None:
    """64 rotated elements, base 10000, context 4096: DeepSeek's find_correction_range gives pairs 10 to 23."""
    keep = rotary.yarn_kept_share(64, 10000.0, 4096)
    np.testing.assert_array_equal(keep[:11], 1.0)
    np.testing.assert_array_equal(keep[23:], 0.0)
    np.testing.assert_allclose(keep[10:24], 1 - np.arange(14) / 13)


def test_layers_for_prediction_are_left_out(tmp_path: Path) -> None:
    draft = Draft("deepseek2-v3")
    draft.set("nextn_predict_layers", 1)
    draft.tensors["blk.3.nextn.eh_proj.weight"] = draft.noise(256, 512)
    program = build_program(written(draft, tmp_path))
    assert program.layers == 3 and not any(name.startswith("blk.3.") for name in program.weights)


def test_arrays_of_one_value_are_that_value(tmp_path: Path) -> None:
    draft = thin("qwen3moe")
    for key, value in (("attention.head_count_kv", [2, 2]), ("feed_forward_length", [512, 512])):
        draft.drop(key)
        draft.writer.add_array(f"{draft.architecture}.{key}", value)
    assert build_program(written(draft, tmp_path)).layers == 2
    draft = thin("qwen3moe")
    draft.drop("attention.head_count_kv")
    draft.writer.add_array("qwen3moe.attention.head_count_kv", [2, 4])
    with pytest.raises(ModelFileError, match=r"head_count_kv differs from layer to layer \(\[2, 4\]\)"):
        build_program(written(draft, tmp_path))


def test_unknown_architecture(tmp_path: Path) -> None:
    draft = thin("qwen3")
    draft.writer.kv_data[0]["general.architecture"].value = "mamba"
    with pytest.raises(ModelFileError, match=r"'mamba', which no module .* deepseek2, .*llama, qwen3, qwen3moe"):
        build_program(written(draft, tmp_path))


def test_vocabulary_only(tmp_path: Path) -> None:
    draft = thin("qwen3")
    draft.tensors.clear()
    with pytest.raises(ModelFileError, match="no tensors"):
        build_program(written(draft, tmp_path))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("blk.1.attn_k_norm.weight"), r"blk\.1\.attn_k_norm\.weight is missing, expected .*\(64\)"),
        (
            lambda t: t.update({"blk.0.ffn_down_exps.weight": t["blk.0.ffn_down_exps.weight"][:, :, :128]}),
            r"blk\.0\.ffn_down_exps\.weight has shape \(128, 256, 16\), expected \(256, 256, 16\)",
        ),
        (
            lambda t: t.update({"blk.0.attn_sinks.weight": np.ones(8, np.float32)}),
            r"blk\.0\.attn_sinks\.weight \(1 such\) has no place in architecture qwen3moe",
        ),
    ],
    ids=["missing", "misshapen", "unexpected"],
)
def test_tensors_that_do_not_fit(edit: Any, message: str, tmp_path: Path) -> None:
    draft = thin("qwen3moe")
    edit(draft.tensors)
    with pytest.raises(ModelFileError, match=message):
        build_program(written(draft, tmp_path))


@pytest.mark.parametrize(
    ("base", "key", "value", "message"),
    [
        ("llama", "rope.scaling.type", "longrope", r"rope\.scaling\.type is 'longrope', expected none, linear or yarn"),
        ("llama", "rope.dimension_count", 16, r"rope\.dimension_count is 16, expected attention\.key_length, 32"),
        ("llama", "attention.head_count_kv", 3, r"head_count_kv is 3, expected a divisor of .* 8"),
        ("llama", "attention.layer_norm_rms_epsilon", 2.0, r"epsilon is 2\.0, expected a small positive number"),
        ("llama", "rope.freq_base", 1.0, r"rope\.freq_base is 1\.0, expected a number above 1"),
        ("qwen3", "attention.value_length", 32, r"value_length is 32, expected attention\.key_length, 64"),
        ("qwen3moe", "expert_used_count", 17, r"expert_used_count is 17, expected at most expert_count, 16"),
        ("qwen3moe", "expert_group_count", 3, r"expert_group_count is 3, expected a divisor of expert_count, 16"),
        ("deepseek2-v3", "expert_group_used_count", 4, r"expert_group_used_count is 4, expected less than 4"),
        ("deepseek2-v3", "expert_gating_func", 4, r"expert_gating_func is 4, expected 1 \(softmax\) or 2 \(sigmoid\)"),
        ("deepseek2-v3", "attention.temperature_scale", 0.1, r"attention\.temperature_scale is 0\.1"),
        (
            "deepseek2-v3",
            "leading_dense_block_count",
            5,
            r"block_count is 5, expected 0 to block_count, 2",
        ),
        ("deepseek2-v3", "rope.dimension_count", 96, r"rope\.dimension_count is 96, expected less than .*, 96"),
        ("deepseek2-v3", "nextn_predict_layers", 2, r"nextn_predict_layers is 2, expected less than block_count, 2"),
    ],
)
def test_variants_that_are_refused(base: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    draft = thin(base)
    draft.set(key, value)
    with pytest.raises(ModelFileError, match=message) as caught:
        build_program(written(draft, tmp_path))
    assert "edited.gguf" in caught.value.message and caught.value.hint


def test_any_number_in_any_key_gives_a_program_or_a_clear_error() -> None:
    """No other exception, no hang and no great allocation, whatever stands in one or two of the keys."""
    rng = np.random.default_rng(20240611)
    print("seed 20240611")
    outcomes: Counter[str] = Counter()
    for name in ("llama-Q4_K_M", "qwen3moe-Q4_K_M", "deepseek2-v3-Q4_K_M"):
        model = ModelFile.open(quantised_file(name))
        keys = [key for key, value in model.metadata.items() if isinstance(value, int | float) and "." in key]
        numbers = (0, 1, 2, 3, 7, 255, -1, 2**31 - 2, 2**32 - 1, 2**63)
        fractions = (0.0, -1.0, 1.0, 1e-38, 3e38, 0.5)
        for _ in range(300):
            changed = dict(model.metadata)
            for key in rng.choice(keys, rng.integers(1, 3), replace=False):
                values = numbers if isinstance(changed[key], int) else fractions
                changed[str(key)] = values[rng.integers(len(values))]
            edited = object.__new__(ModelFile)
            edited.__dict__.update(model.__dict__ | {"metadata": changed})
            try:
                build_program(edited)
                outcomes["program"] += 1
            except ModelFileError as error:
                assert str(model.path) in error.message
                outcomes["refused"] += 1
    assert outcomes["program"] > 50 and outcomes["refused"] > 300, outcomes
