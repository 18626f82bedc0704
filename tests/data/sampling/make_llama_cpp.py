"""Writes llama_cpp.json: tokens that llama.cpp's sampler chain draws from stated logits, for test_sampling.py.

Run with a Python that has llama-cpp-python: python tests/data/sampling/make_llama_cpp.py
The logits of step i of a case are LOGITS_SCALE * RandomState(case["logits_seed"] + i).standard_normal(VOCABULARY), as
float32, plus case["boost"] for the last 20 prompt tokens, so that penalties meet tokens that would be chosen. NumPy
keeps the stream of RandomState for ever. The chain is penalties, top-k, top-p, min-p, temperature, dist, each only if
it is on, as llama-server builds it; the prompt's tokens have been accepted by the penalties.
"""

from __future__ import annotations

import ctypes
import json
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
]


def draw(case: dict[str, Any]) -> list[int]:
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    penalties = llama.llama_sampler_init_penalties(
        VOCABULARY,
        case["repeat_last_n"],
        case["repeat_penalty"],
        case["frequency_penalty"],
        case["presence_penalty"],
    )
    stages = [penalties]
    if case["temperature"] <= 0:
        stages.append(llama.llama_sampler_init_greedy())
    else:
        if case["top_k"] > 0:
            stages.append(llama.llama_sampler_init_top_k(case["top_k"]))
        if case["top_p"] < 1:
            stages.append(llama.llama_sampler_init_top_p(case["top_p"], 0))
        if case["min_p"] > 0:
            stages.append(llama.llama_sampler_init_min_p(case["min_p"], 0))
        stages += [llama.llama_sampler_init_temp(case["temperature"]), llama.llama_sampler_init_dist(case["seed"])]
    for stage in stages:
        llama.llama_sampler_chain_add(chain, stage)
    for token in case["prompt"]:
        llama.llama_sampler_accept(penalties, token)
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
    for number, changes in enumerate(CASES):
        prompt = np.random.RandomState(number).randint(0, VOCABULARY, size=100).tolist()
        case = {**DEFAULTS, **changes, "prompt": prompt, "logits_seed": 1000 * (number + 1)}
        cases.append({**case, "tokens": draw(case)})
    document = {
        "source": f"llama-cpp-python {llama.__version__}",
        "vocabulary": VOCABULARY,
        "logits_scale": LOGITS_SCALE,
        "cases": cases,
    }
    Path(__file__).with_name("llama_cpp.json").write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
