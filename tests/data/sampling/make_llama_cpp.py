"""Writes llama_cpp.json: tokens that llama.cpp's sampler chain draws from stated logits, for test_sampling.py.

Run with a Python that has llama-cpp-python: python tests/data/sampling/make_llama_cpp.py
The logits of step i of a case are LOGITS_SCALE * RandomState(case["logits_seed"] + i).standard_normal(VOCABULARY), as
float32, plus case["boost"] for the last 20 prompt tokens, so that penalties meet tokens that would be chosen. NumPy
keeps the stream of RandomState for ever. The chain has the steps that case["samplers"] names, then dist, mirostat or
adaptive-p, as llama-server builds it (a step that is off does nothing); the prompt's tokens have been accepted by it.
"copied" numbers the prompt tokens that are repeated at its end, for DRY to find; its strings become tokens by the
vocabulary `ggml-vocab-llama-spm.gguf` beside the tokenizer's test data.
"""

from __future__ import annotations

import ctypes
import json
import lzma
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

VOCABULARY = 3000
LOGITS_SCALE = 2.0
STEPS = 40
DEFAULTS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repeat_last_n": 64,
    "seed": 42,
    "boost": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "min_keep": 0,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "copied": 0,
}
CASES: list[dict[str, Any]] = [
    {},
    {"seed": 4294967294},
    {"seed": 0, "temperature": 1.5},
    {"top_k": 0},
    {"top_k": 0, "min_p": 0.0},
    {"top_k": 0, "top_p": 1.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 0.3},
    {"top_p": 1.0, "min_p": 0.0},
    {"top_p": 0.3},
    {"top_k": 5, "min_p": 0.5, "temperature": 2.0},
    {"top_k": 1},
    {"top_k": 12, "repeat_penalty": 1.3, "boost": 6.0},
    {
        "top_k": 12,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repeat_last_n": 8,
        "boost": 6.0,
    },
    {"temperature": 0.0, "repeat_penalty": 1.5, "boost": 6.0},
    {"temperature": 0.0, "presence_penalty": 3.0, "frequency_penalty": -0.5, "boost": 6.0},
    {"typical_p": 0.5},
    {"typical_p": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"typical_p": 0.2, "min_keep": 5, "top_p": 1.0},
    {"top_n_sigma": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"top_n_sigma": 0.7, "temperature": 2.5},
    {"top_k": 0, "top_p": 0.02, "min_p": 0.9, "min_keep": 12, "temperature": 3.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.95, "min_keep": 4, "temperature": 3.0},
    {"dynatemp_range": 0.7, "top_k": 0, "min_p": 0.0},
    {"dynatemp_range": 2.0, "dynatemp_exponent": 0.5, "temperature": 1.2},
    {"dynatemp_range": 0.5, "dynatemp_exponent": 3.0, "temperature": 0.1},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02, "min_keep": 30},
    {"xtc_probability": 0.9, "xtc_threshold": 0.1, "temperature": 0.0},
    {"dry_multiplier": 0.8, "copied": 6, "boost": 6.0},
    {"dry_multiplier": 2.0, "dry_base": 1.1, "dry_allowed_length": 0, "boost": 6.0, "dry_penalty_last_n": 1000},
    {"dry_multiplier": 5.0, "dry_base": 1.0, "dry_allowed_length": 1, "copied": 12, "boost": 6.0, "temperature": 0.0},
    {
        "dry_multiplier": 3.0,
        "dry_sequence_breakers": ["the house", " a", "\n"],
        "dry_penalty_last_n": 500,
        "dry_allowed_length": 1,
        "copied": 30,
        "boost": 7.0,
    },
    {"mirostat": 1},
    {"mirostat": 1, "mirostat_tau": 2.0, "mirostat_eta": 0.6, "temperature": 1.3},
    {"mirostat": 2},
    {"mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 0.9, "temperature": 0.6},
    {"adaptive_target": 0.3, "samplers": ["top_k", "min_p", "adaptive_p"], "min_p": 0.01},
    {"adaptive_target": 0.05, "adaptive_decay": 0.5, "samplers": ["adaptive_p", "penalties", "temperature"]},
    {"samplers": ["min_p", "adaptive_p"]},
    {"samplers": ["temperature", "top_p", "top_k"], "temperature": 2.0},
    {"samplers": ["top_k"], "temperature": 0.0},
    {"samplers": []},
    {
        "samplers": ["top_k", "temperature", "penalties", "min_p", "xtc", "typ_p"],
        "repeat_penalty": 1.4,
        "presence_penalty": 0.3,
        "typical_p": 0.8,
        "xtc_probability": 0.4,
        "boost": 5.0,
    },
    {
        "typical_p": 0.95,
        "top_n_sigma": 2.5,
        "xtc_probability": 0.3,
        "dynatemp_range": 0.3,
        "repeat_penalty": 1.2,
        "dry_multiplier": 1.0,
        "min_keep": 3,
        "copied": 8,
        "boost": 6.0,
    },
]


def vocabulary() -> Any:
    """llama.cpp's model with the vocabulary that DRY's strings are tokenised by."""
    packed = Path(__file__).parents[1] / "vocab" / "ggml-vocab-llama-spm.gguf.xz"
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(lzma.decompress(packed.read_bytes()))
        file.flush()
        parameters = llama.llama_model_default_params()
        parameters.vocab_only = True
        return llama.llama_model_load_from_file(file.name.encode(), parameters)


def step(name: str, case: dict[str, Any], model: Any) -> Any:
    match name:
        case "penalties":
            return llama.llama_sampler_init_penalties(
                VOCABULARY,
                case["repeat_last_n"],
                case["repeat_penalty"],
                case["frequency_penalty"],
                case["presence_penalty"],
            )
        case "dry":
            strings = [string.encode() for string in case["dry_sequence_breakers"]]
            return llama.llama_sampler_init_dry(
                llama.llama_model_get_vocab(model),
                case["dry_multiplier"],
                case["dry_base"],
                case["dry_allowed_length"],
                case["dry_penalty_last_n"],
                (ctypes.c_char_p * len(strings))(*strings),
                len(strings),
            )
        case "top_n_sigma":
            return llama.llama_sampler_init_top_n_sigma(case["top_n_sigma"])
        case "top_k":
            return llama.llama_sampler_init_top_k(case["top_k"])
        case "typ_p":
            return llama.llama_sampler_init_typical(case["typical_p"], case["min_keep"])
        case "top_p":
            return llama.llama_sampler_init_top_p(case["top_p"], case["min_keep"])
        case "min_p":
            return llama.llama_sampler_init_min_p(case["min_p"], case["min_keep"])
        case "xtc":
            return llama.llama_sampler_init_xtc(
                case["xtc_probability"], case["xtc_threshold"], case["min_keep"], case["seed"]
            )
    assert name == "temperature", name
    return llama.llama_sampler_init_temp_ext(case["temperature"], case["dynatemp_range"], case["dynatemp_exponent"])


def steps(case: dict[str, Any], model: Any) -> list[Any]:
    """The chain as llama-server builds it; greedy sampling that nothing random precedes ends in argmax, as ours."""
    if case["mirostat"]:
        tau, eta, seed = case["mirostat_tau"], case["mirostat_eta"], case["seed"]
        first = llama.llama_sampler_init_temp(case["temperature"])
        if case["mirostat"] == 1:
            return [first, llama.llama_sampler_init_mirostat(VOCABULARY, seed, tau, eta, 100)]
        return [first, llama.llama_sampler_init_mirostat_v2(seed, tau, eta)]
    chain = [step(name, case, model) for name in case["samplers"] if name != "adaptive_p"]
    if "adaptive_p" in case["samplers"]:
        last = llama.llama_sampler_init_adaptive_p(case["adaptive_target"], case["adaptive_decay"], case["seed"])
    else:
        last = llama.llama_sampler_init_dist(case["seed"])
    return [*chain, last]


def draw(case: dict[str, Any], model: Any) -> list[int]:
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    for stage in steps(case, model):
        llama.llama_sampler_chain_add(chain, stage)
    for token in case["prompt"]:
        llama.llama_sampler_accept(chain, token)
    tokens = []
    for step in range(STEPS):
        normal = np.random.RandomState(case["logits_seed"] + step).standard_normal(VOCABULARY)
        logits = (LOGITS_SCALE * normal).astype(np.float32)
        logits[case["prompt"][-20:]] += np.float32(case["boost"])
        data = (llama.llama_token_data * VOCABULARY)(
            *(llama.llama_token_data(id=index, logit=float(value), p=0.0) for index, value in enumerate(logits))
        )
        candidates = llama.llama_token_data_array(data=data, size=VOCABULARY, selected=-1, sorted=False)
        llama.llama_sampler_apply(chain, ctypes.byref(candidates))
        token = int(candidates.data[candidates.selected].id)
        llama.llama_sampler_accept(chain, token)
        tokens.append(token)
    llama.llama_sampler_free(chain)
    return tokens


def main() -> None:
    cases = []
    model = vocabulary()
    for number, changes in enumerate(CASES):
        prompt = np.random.RandomState(number).randint(0, VOCABULARY, size=100).tolist()
        case = {**DEFAULTS, **changes, "logits_seed": 1000 * (number + 1)}
        case["prompt"] = prompt + prompt[: case["copied"]]
        tokens = draw(case, model)
        cases.append({**changes, "logits_seed": case["logits_seed"], "prompt": case["prompt"], "tokens": tokens})
    document = {
        "source": f"llama-cpp-python {llama.__version__}",
        "vocabulary": VOCABULARY,
        "logits_scale": LOGITS_SCALE,
        "defaults": DEFAULTS,
        "cases": cases,
    }
    Path(__file__).with_name("llama_cpp.json").write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
