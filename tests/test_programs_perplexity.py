"""Perplexities of the trained models equal llama.cpp's: its rule, its chunks, F16 caches, without BOS."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import program

from bloomery.launcher.demo_model import demo_model_path

DATA = Path(__file__).parent / "data"
MODELS = {
    "qwen3moe-Q4_K_M": Path(demo_model_path("tiny-qwen3moe")),
    "deepseek2-Q3_K_M": DATA / "models" / "tiny-deepseek2-Q3_K_M.gguf",
}
# llama.cpp on these files and texts: first 20 chunks of 512 tokens, no BOS, F16 KV cache, two threads.
LLAMA_CPP = {
    ("qwen3moe-Q4_K_M", "prose"): 23.477,
    ("qwen3moe-Q4_K_M", "code"): 6.246,
    ("deepseek2-Q3_K_M", "prose"): 25.209,
    ("deepseek2-Q3_K_M", "code"): 7.053,
}
# Sums of rounded activations run in another order than llama.cpp's; the figures found differ by up to 0.3 %.
BAND = 0.005


@pytest.mark.parametrize(("model", "text"), LLAMA_CPP)
def test_perplexity_equals_llama_cpp(model: str, text: str) -> None:
    options = ("-m", str(MODELS[model]), "-f", str(DATA / "text" / f"{text}.txt"), "--no-bos")
    command = program("perplexity", *options, "--ctx", "512", "--chunks", "20", "--cache-type", "f16", "--json")
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["tokens"] == 20 * 255
    assert answer["ppl"] == pytest.approx(LLAMA_CPP[model, text], rel=BAND)
