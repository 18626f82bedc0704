"""A complete qwen3moe model file of a few hundred kilobytes with random weights, built field by field."""

from __future__ import annotations

import gguf
import numpy as np
from gguf_bytes import ARRAY, FLOAT32, INT32, STRING, UINT32, Blocks, Draft, Key, random_blocks

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_WIDTH, EXPERTS, USED, HIDDEN = 256, 1, 4, 2, 32, 4, 2, 256


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte value, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types (1 normal, 3 control) and merges of a small byte-level BPE vocabulary."""
    tokens, merges = byte_alphabet(), []
    for left, right in (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or")):
        tokens.append(left + right)
        merges.append(f"{left} {right}")
    types = [1] * len(tokens)
    return [*tokens, "<|endoftext|>", "<|im_start|>", "<|im_end|>"], [*types, 3, 3, 3], merges


def small_draft(seed: int = 20240229) -> Draft:
    """The model: one layer, four experts, and one of each kind of scale among its quant types."""
    generator = np.random.default_rng(seed)
    tokens, types, merges = vocabulary()
    arch = "qwen3moe"
    keys = [
        Key("general.architecture", STRING, arch),
        Key("general.name", STRING, "small"),
        Key(f"{arch}.context_length", UINT32, 128),
        Key(f"{arch}.embedding_length", UINT32, WIDTH),
        Key(f"{arch}.block_count", UINT32, LAYERS),
        Key(f"{arch}.feed_forward_length", UINT32, HIDDEN),
        Key(f"{arch}.expert_feed_forward_length", UINT32, HIDDEN),
        Key(f"{arch}.attention.head_count", UINT32, HEADS),
        Key(f"{arch}.attention.head_count_kv", UINT32, KV_HEADS),
        Key(f"{arch}.attention.key_length", UINT32, HEAD_WIDTH),
        Key(f"{arch}.attention.value_length", UINT32, HEAD_WIDTH),
        Key(f"{arch}.attention.layer_norm_rms_epsilon", FLOAT32, 1e-6),
        Key(f"{arch}.rope.freq_base", FLOAT32, 10000.0),
        Key(f"{arch}.expert_count", UINT32, EXPERTS),
        Key(f"{arch}.expert_used_count", UINT32, USED),
        Key("tokenizer.ggml.model", STRING, "gpt2"),
        Key("tokenizer.ggml.pre", STRING, "qwen2"),
        Key("tokenizer.ggml.tokens", (ARRAY, STRING), tokens),
        Key("tokenizer.ggml.token_type", (ARRAY, INT32), types),
        Key("tokenizer.ggml.merges", (ARRAY, STRING), merges),
        Key("tokenizer.ggml.eos_token_id", UINT32, len(tokens) - 1),
        Key("tokenizer.ggml.padding_token_id", UINT32, len(tokens) - 3),
        Key("tokenizer.ggml.add_bos_token", 7, False),
    ]
    queries, kv = HEADS * HEAD_WIDTH, KV_HEADS * HEAD_WIDTH
    table: list[tuple[str, str, tuple[int, ...]]] = [
        ("token_embd.weight", "Q8_0", (WIDTH, len(tokens))),
        ("blk.0.attn_norm.weight", "F32", (WIDTH,)),
        ("blk.0.attn_q.weight", "Q4_K", (WIDTH, queries)),
        ("blk.0.attn_k.weight", "Q5_0", (WIDTH, kv)),
        ("blk.0.attn_v.weight", "Q6_K", (WIDTH, kv)),
        ("blk.0.attn_output.weight", "BF16", (queries, WIDTH)),
        ("blk.0.attn_q_norm.weight", "F32", (HEAD_WIDTH,)),
        ("blk.0.attn_k_norm.weight", "F32", (HEAD_WIDTH,)),
        ("blk.0.ffn_norm.weight", "F32", (WIDTH,)),
        ("blk.0.ffn_gate_inp.weight", "F32", (WIDTH, EXPERTS)),
        ("blk.0.ffn_gate_exps.weight", "Q4_K", (WIDTH, HIDDEN, EXPERTS)),
        ("blk.0.ffn_up_exps.weight", "Q3_K", (WIDTH, HIDDEN, EXPERTS)),
        ("blk.0.ffn_down_exps.weight", "Q4_1", (HIDDEN, WIDTH, EXPERTS)),
        ("output_norm.weight", "F32", (WIDTH,)),
        ("output.weight", "F16", (WIDTH, len(tokens))),
    ]
    tensors = [
        Blocks(name, shape, int(gguf.GGMLQuantizationType[kind]), random_blocks(generator, kind, shape))
        for name, kind, shape in table
    ]
    return Draft(tuple(keys), tuple(tensors))
