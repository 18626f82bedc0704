"""Models of true layer shapes and random weights, as drafts: metadata keys and a table of tensors, no bytes yet.

Owns what a draft is and the shapes of models of ordinary layers. `synthetic_file.py` turns a draft into a model file;
what it answers is noise, but every product has the size, the quant type and the sparsity of the real thing. Routers are
random, so every expert is as likely as any other: the hardest case for caches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.type_mixes import mixed_type

EMBEDDING_DEVIATION: Final = 0.5
SPECIAL: Final = ("<|start|>", "<|end|>")
_CONTROL, _UNUSED, _NORMAL = 3, 5, 1  # token types


@dataclass(frozen=True)
class DraftTensor:
    """`shape` in the file's order, contiguous dimension first. Values have this mean and standard deviation; only F32
    tensors have a mean other than 0. A `hollow` one is a hole in the file: it reads as zeros and takes no room."""

    name: str
    quant_type: QuantType
    shape: tuple[int, ...]
    mean: float
    deviation: float
    hollow: bool = False

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        return self.quant_type.row_bytes(self.shape[0]) * (self.elements // self.shape[0])


@dataclass
class Draft:
    """A model file to be. Keys: int is stored as uint32, float as float32, a list of int as int32, a tuple of int as
    uint64. `router`: quant type of the routers."""

    architecture: str
    mix: str
    layers: int
    tied: bool = False
    router: str = "F32"
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: list[DraftTensor] = field(default_factory=list)
    _prefix: str = ""
    _layer: int = 0

    def hyper(self, **values: Any) -> None:
        """Keys of the architecture; a double underscore stands for a dot."""
        for name, value in values.items():
            self.keys[f"{self.architecture}.{name.replace('__', '.')}"] = value

    def layer(self, index: int) -> None:
        """The tensors that follow belong to this layer."""
        self._prefix, self._layer = f"blk.{index}.", index

    def no_layer(self) -> None:
        self._prefix = ""

    def matrix(self, stem: str, *shape: int, deviation: float | None = None, hollow: bool = False) -> None:
        """A weight of the mix's type; values of deviation row^-1/2, so that products keep the size of their input."""
        kind = mixed_type(self.mix, stem, self._layer, self.layers, tied=self.tied, row=shape[0], router=self.router)
        name = f"{self._prefix}{stem}.weight"
        spread = shape[0] ** -0.5 if deviation is None else deviation
        self.tensors.append(DraftTensor(name, kind, shape, 0.0, spread, hollow))

    def vector(self, name: str, width: int, mean: float, deviation: float) -> None:
        """F32; `name` with its suffix, .weight or .bias."""
        self.tensors.append(DraftTensor(self._prefix + name, QuantType.named("F32"), (width,), mean, deviation))

    def norm(self, stem: str, width: int) -> None:
        self.vector(f"{stem}.weight", width, 1.0, 0.05)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def written_bytes(self) -> int:
        """What the file takes on a disk: all but its holes."""
        return sum(tensor.nbytes for tensor in self.tensors if not tensor.hollow)


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model. `hidden`: of the dense feed-forward (0: none), `expert_hidden` of one expert. `latent`, `plain`
    and `rotated` are deepseek2's: width of the key/value latent, of a head's unrotated and of its rotated key part."""

    layers: int
    width: int
    vocabulary: int
    context: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int = 0
    experts: int = 0
    used: int = 0
    expert_hidden: int = 0
    shared: int = 0
    latent: int = 0
    plain: int = 0
    rotated: int = 0


QWEN3_30B_A3B: Final = Shapes(
    layers=48, width=2048, vocabulary=151936, context=40960, heads=32, kv_heads=4, head_width=128, hidden=6144,
    experts=128, used=8, expert_hidden=768,
)  # fmt: skip
DEEPSEEK_V2_LITE: Final = Shapes(
    layers=27, width=2048, vocabulary=102400, context=163840, heads=16, kv_heads=1, head_width=128, hidden=10944,
    experts=64, used=6, expert_hidden=1408, shared=2, latent=512, plain=128, rotated=64,
)  # fmt: skip
LLAMA_1B: Final = Shapes(
    layers=16, width=2048, vocabulary=128256, context=131072, heads=32, kv_heads=8, head_width=64, hidden=8192,
)  # fmt: skip


def qwen3moe_draft(s: Shapes, mix: str) -> Draft:
    d = begin_draft("qwen3moe", s, mix, "qwen2")
    d.hyper(
        attention__head_count_kv=s.kv_heads,
        attention__key_length=s.head_width,
        attention__value_length=s.head_width,
        rope__freq_base=1e6,
        expert_feed_forward_length=s.expert_hidden,
    )
    for layer in range(s.layers):
        d.layer(layer)
        _grouped_attention(d, s)
        for stem in ("attn_q_norm", "attn_k_norm"):
            d.norm(stem, s.head_width)
        d.norm("ffn_norm", s.width)
        _experts(d, s)
    return end_draft(d, s)


def deepseek2_draft(s: Shapes, mix: str) -> Draft:
    """V2-Lite's form: queries are projected at once, attn_k_b and attn_v_b stand apart, the first layer is dense."""
    d = begin_draft("deepseek2", s, mix, "deepseek-llm")
    d.hyper(
        attention__head_count_kv=1,
        attention__kv_lora_rank=s.latent,
        attention__key_length=s.latent + s.rotated,
        attention__value_length=s.latent,
        attention__key_length_mla=s.plain + s.rotated,
        attention__value_length_mla=s.head_width,
        rope__dimension_count=s.rotated,
        rope__freq_base=10000.0,
        rope__scaling__type="yarn",
        rope__scaling__factor=40.0,
        rope__scaling__original_context_length=4096,
        rope__scaling__yarn_log_multiplier=0.0707,
        leading_dense_block_count=1,
        expert_feed_forward_length=s.expert_hidden,
        expert_shared_count=s.shared,
        expert_weights_scale=1.0,
        expert_weights_norm=False,
        expert_gating_func=1,
    )
    for layer in range(s.layers):
        d.layer(layer)
        d.norm("attn_norm", s.width)
        d.matrix("attn_q", s.width, s.heads * (s.plain + s.rotated))
        d.matrix("attn_kv_a_mqa", s.width, s.latent + s.rotated)
        d.norm("attn_kv_a_norm", s.latent)
        d.matrix("attn_k_b", s.plain, s.latent, s.heads)
        d.matrix("attn_v_b", s.latent, s.head_width, s.heads)
        d.matrix("attn_output", s.heads * s.head_width, s.width)
        d.norm("ffn_norm", s.width)
        if layer == 0:
            feed_forward_tensors(d, s.width, s.hidden)
        else:
            _experts(d, s)
            feed_forward_tensors(d, s.width, s.shared * s.expert_hidden, "_shexp")
    return end_draft(d, s)


def llama_draft(s: Shapes, mix: str) -> Draft:
    """The embedding is the output, too (tied), as in the 1B model."""
    d = begin_draft("llama", s, mix, "llama-bpe", tied=True)
    d.hyper(
        attention__head_count_kv=s.kv_heads,
        attention__key_length=s.head_width,
        attention__value_length=s.head_width,
        rope__dimension_count=s.head_width,
        rope__freq_base=500000.0,
    )
    for layer in range(s.layers):
        d.layer(layer)
        _grouped_attention(d, s)
        d.norm("ffn_norm", s.width)
        feed_forward_tensors(d, s.width, s.hidden)
    return end_draft(d, s)


def begin_draft(architecture: str, s: Shapes, mix: str, pre_tokenizer: str, *, tied: bool = False) -> Draft:
    """Keys that all architectures have, the vocabulary, the embedding."""
    d = Draft(architecture, mix, s.layers, tied)
    d.keys["general.name"] = f"synthetic {architecture}"
    d.hyper(
        context_length=s.context,
        embedding_length=s.width,
        block_count=s.layers,
        feed_forward_length=s.hidden,
        attention__head_count=s.heads,
        attention__layer_norm_rms_epsilon=1e-6,
        vocab_size=s.vocabulary,
    )
    if s.experts:
        d.hyper(expert_count=s.experts, expert_used_count=s.used)
    _add_vocabulary(d, s.vocabulary, pre_tokenizer)
    d.matrix("token_embd", s.width, s.vocabulary, deviation=EMBEDDING_DEVIATION)
    return d


def end_draft(d: Draft, s: Shapes) -> Draft:
    """Adds the last norm and, unless the embedding serves as such, the output."""
    d.no_layer()
    d.norm("output_norm", s.width)
    if not d.tied:
        d.matrix("output", s.width, s.vocabulary)
    return d


def _grouped_attention(d: Draft, s: Shapes) -> None:
    d.norm("attn_norm", s.width)
    d.matrix("attn_q", s.width, s.heads * s.head_width)
    d.matrix("attn_k", s.width, s.kv_heads * s.head_width)
    d.matrix("attn_v", s.width, s.kv_heads * s.head_width)
    d.matrix("attn_output", s.heads * s.head_width, s.width)


def feed_forward_tensors(d: Draft, width: int, hidden: int, suffix: str = "") -> None:
    d.matrix(f"ffn_gate{suffix}", width, hidden)
    d.matrix(f"ffn_up{suffix}", width, hidden)
    d.matrix(f"ffn_down{suffix}", hidden, width)


def _experts(d: Draft, s: Shapes) -> None:
    d.matrix("ffn_gate_inp", s.width, s.experts)
    d.matrix("ffn_gate_exps", s.width, s.expert_hidden, s.experts)
    d.matrix("ffn_up_exps", s.width, s.expert_hidden, s.experts)
    d.matrix("ffn_down_exps", s.expert_hidden, s.width, s.experts)


def _add_vocabulary(d: Draft, size: int, pre_tokenizer: str) -> None:
    """Byte-pair tokens: the bytes, one pair, unused ones up to `size`, and two control tokens at the end."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    texts = [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)] + ["he"]
    kinds = [_NORMAL] * len(texts)
    unused = size - len(texts) - len(SPECIAL)
    assert unused >= 0, f"a vocabulary of {size} has no room for bytes and control tokens"
    texts += [f"<unused{index}>" for index in range(unused)]
    kinds += [_UNUSED] * unused
    d.keys |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer,
        "tokenizer.ggml.tokens": [*texts, *SPECIAL],
        "tokenizer.ggml.token_type": [*kinds, *[_CONTROL] * len(SPECIAL)],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": size - 2,
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.ggml.add_bos_token": False,
    }
