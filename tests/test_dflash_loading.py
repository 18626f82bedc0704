"""What the loader of `dflash` must refuse, by the name of the key or tensor, and what it accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from deepseek_data import tiny4, tiny41, tiny_draft
from edited_model import DROP, Edit, like, opened, plain

from bloomery.runtime.architectures import build_program
from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.ops_deepseek4 import WindowAttention
from bloomery.runtime.ops_drafts import DraftFacts
from bloomery.runtime.program import op_views, op_weights
from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.states import RingState

D, A = tiny_draft(), tiny41("a")
NONE: dict[str, Any] = {}
MASK = "tokenizer.ggml.mask_token_id"
TOKENS = "tokenizer.ggml.tokens"


def zeros(name: str, *shape: int) -> dict[str, Any]:
    return {name: plain(name, np.zeros(shape))}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another architecture": ({"general.architecture": "llama"}, NONE, "expected a draft"),
    "another width": ({"embedding_length": 512}, NONE, "embedding_length is 512, expected the target's, 256"),
    "no block": ({"block_size": DROP}, NONE, "block_size is missing"),
    "a block without rows": ({"block_size": 0}, NONE, "block_size is 0"),
    "a huge block": ({"block_size": 999}, NONE, "block_size is 999, expected at most"),
    "no targets": ({"target_layers": DROP}, NONE, "target_layers is missing"),
    "empty targets": ({"target_layers": np.zeros(0, np.int32)}, NONE, "target_layers is"),
    "targets not ascending": ({"target_layers": np.array([6, 8, 7])}, NONE, r"target_layers is \[6, 8, 7\]"),
    "a target twice": ({"target_layers": np.array([6, 7, 7])}, NONE, "target_layers is"),
    "a target behind the end": ({"target_layers": np.array([6, 7, 9])}, NONE, "layers of the target, 0 to 8"),
    "fewer targets than fc has": ({"target_layers": np.array([6, 7])}, NONE, "fc.weight has shape"),
    "no mask": ({MASK: DROP}, NONE, f"{MASK} is None"),
    "a mask outside": ({MASK: 512}, NONE, f"{MASK} is 512, expected a token of the target, 0 to 511"),
    "other tokens": ({TOKENS: ["a", "b"]}, NONE, "its tokens are not those of"),
    "ratios": ({"attention.compress_ratios": np.array([0, 2, 0])}, NONE, "compress_ratios is .*windows only"),
    "too few ratios": ({"attention.compress_ratios": np.array([0])}, NONE, "compress_ratios is"),
    "hash layers": ({"hash_layer_count": 1}, NONE, "hash_layer_count is 1, expected 0"),
    "stretched rope": ({"rope.scaling.type": "yarn"}, NONE, "rope.scaling.type is 'yarn', expected none"),
    "odd rope": ({"rope.dimension_count": 31}, NONE, "rope.dimension_count is 31, .* attention.key_length, 256"),
    "gating": ({"expert_gating_func": 2}, NONE, "expert_gating_func is 2"),
    "limits": ({"swiglu_clamp_exp": np.ones(2, np.float32)}, NONE, "swiglu_clamp_exp is 'an array of 2"),
    "no rounds": ({"hyper_connection.sinkhorn_iterations": DROP}, NONE, "sinkhorn_iterations is missing"),
    "epsilon": ({"attention.layer_norm_rms_epsilon": 0.0}, NONE, "layer_norm_rms_epsilon is 0.0"),
    "no fusion": (NONE, {"fc.weight": DROP}, "fc.weight is missing"),
    "no gain": (NONE, {"enc.output_norm.weight": DROP}, "enc.output_norm.weight is missing"),
    "no chain": (NONE, {"markov_w1.weight": DROP}, "markov_w1.weight is missing"),
    "a chain of two ranks": (NONE, zeros("markov_w2.weight", 512, 128), "markov_w2.weight has shape"),
    "a chain of fewer tokens": (NONE, zeros("markov_w1.weight", 500, 256), "markov_w1.weight has shape"),
    "no confidence": (NONE, {"conf_proj.weight": DROP}, "conf_proj.weight is missing"),
    "narrow confidence": (NONE, zeros("conf_proj.weight", 1, 256), "conf_proj.weight has shape"),
    "no sinks": (NONE, {"blk.1.attn_sinks.weight": DROP}, "blk.1.attn_sinks.weight is missing"),
    "vector of another type": (
        NONE, {"blk.1.attn_sinks.weight": like("blk.1.attn_sinks.weight", quant_type=QuantType.named("I32"))},
        "blk.1.attn_sinks.weight has type I32, expected F32",
    ),
    "a compressor": (NONE, zeros("blk.1.attn_compressor_kv.weight", 256, 256), "attn_compressor_kv.weight .* no place"),
    "a head of its own": (NONE, zeros("output.weight", 512, 256), "output.weight .* no place"),
    "a collapse of its own": (NONE, zeros("output_hc_fn.weight", 4, 1024), "output_hc_fn.weight .* no place"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    keys, tensors, message = REFUSED[case]
    with pytest.raises(ModelFileError, match=message) as caught:
        Edit(D, keys, tensors).build(A)
    assert caught.value.hint and str(caught.value).count("\n") == 0


def test_a_target_of_another_kind_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"architecture is 'deepseek4', but the draft .* for deepseek41"):
        Edit(D).build(tiny4())


def test_a_draft_alone_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"runs beside the model it was made for .*--draft dspark"):
        build_program(opened(D))


def test_only_some_targets_can_be_read() -> None:
    with pytest.raises(ModelFileError, match=r"deepseek4.* leaves nothing for a draft"):
        build_program(opened(tiny4()), (1, 2))


@pytest.mark.parametrize("key", ["attention.compress_ratios", "hash_layer_count", "context_length", TOKENS])
def test_keys_that_may_be_left_out(key: str) -> None:
    assert Edit(D, {key: DROP}).build(A).context_length == 4096


def test_the_program_is_whole() -> None:
    """Every tensor of the draft is used, of the target's two; ops have names of their own; a window has room for the
    row that the first row of a block sees beyond it."""
    program = Edit(D).build(A)
    assert program.draft == DraftFacts(5, 5, (6, 7, 8))
    used = {weight for op in program.ops for weight in op_weights(op)}
    assert used == set(opened(D).tensors) | {"token_embd.weight", "output.weight"}
    assert program.weights["output.weight"] is opened(A).tensors["output.weight"]
    names = [op.name for op in program.ops]
    assert len(names) == len(set(names))
    windows = [state for state in program.states.values() if isinstance(state, RingState)]
    assert [state.span for state in windows] == [9] * 3 == [state.span for state in program.states.values()]
    attention = [op for op in program.ops if isinstance(op, WindowAttention)]
    assert [(op.span, op.block) for op in attention] == [(8, True)] * 3
    for op in program.ops:
        kinds = {program.buffers[view.buffer].rows for view, _ in op_views(op)}
        assert len(kinds) <= 1 or op.name.startswith("select_")
