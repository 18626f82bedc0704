"""Where the oracle's figures and their models are, and the band that an engine with 8-bit activations gets.

Owns unpacking (F32 files are written anew, quantised ones are unpacked, both once a test run) and nothing else.
"""

from __future__ import annotations

import atexit
import json
import lzma
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "oracle"
TINY = ("llama", "qwen3", "qwen3moe", "deepseek2-lite", "deepseek2-lite-kvb", "deepseek2-v3")
QUANTISED = tuple(sorted(path.name.removesuffix(".gguf.xz") for path in DATA.glob("*.gguf.xz")))
TRAINED = ("tiny-qwen3moe-Q4_K_M", "tiny-qwen3moe-Q3_K_M", "tiny-deepseek2-Q4_K_M", "tiny-deepseek2-Q3_K_M")
TRAINED_FOLDERS = (HERE / "data" / "models", HERE.parent / "launcher" / "demo")


@cache
def _work() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bloomery-oracle-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def f32_file(name: str) -> Path:
    """The F32 file of a tiny model of TINY: random weights of a fixed seed, the bytes the oracle saw."""
    sys.path.insert(0, str(HERE / "oracle_kit"))
    try:
        import make_tiny
    finally:
        sys.path.pop(0)
    path = _work() / f"{name}-F32.gguf"
    make_tiny.write_f32(name, path)
    return path


@cache
def quantised_file(name: str) -> Path:
    """A file of QUANTISED, such as "qwen3moe-Q4_K_M"."""
    path = _work() / f"{name}.gguf"
    path.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
    return path


def trained_file(name: str) -> Path:
    """A model of TRAINED. Those that the repository does not hold are looked for in $BLOOMERY_TEST_MODELS."""
    extra = os.environ.get("BLOOMERY_TEST_MODELS")
    for folder in (*TRAINED_FOLDERS, *([Path(extra)] if extra else [])):
        if (folder / f"{name}.gguf").exists():
            return folder / f"{name}.gguf"
    pytest.skip(f"{name}.gguf is in neither the repository nor $BLOOMERY_TEST_MODELS")


def figures(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of tests/data/oracle/<name>.npz (see oracle_kit/README.md)."""
    with np.load(DATA / f"{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


def host_band(name: str) -> tuple[float, float]:
    """(median, mean) of the KL divergence in nats from llama.cpp's stored logits that an engine may show on a file of
    QUANTISED if it rounds activations to 8 bits before each quantised product, as ggml does.

    The aim is twice what llama.cpp shows against itself (one batch against token by token: `self`). That is often 0 or
    1e-13, since there both runs form the same sums in the same order. An engine that sums in another order differs by
    1e-7 before rounding; now and then a value falls on the other side of a rounding boundary, and in these models,
    which are random and so amplify, one such flip changes the roundings of all later layers. Two right engines are
    then two exact evaluations with independent rounding errors n1 and n2 in the logits. As KL is half the variance of
    the logits' difference under the distribution, and Var(n1 - n2) = Var(n1) + Var(n2), their divergence is twice
    `activation`, the divergence of one such engine from the exact evaluation (measured, oracle_kit/gates.py). Hence
    twice the greater.
    """
    entry = json.loads((DATA / "self_kld.json").read_text(encoding="utf-8"))[name]
    median, mean = (2.0 * max(pair) for pair in zip(entry["self"], entry["activation"], strict=True))
    return median, mean


def self_divergence(name: str) -> float:
    """Mean KL divergence in nats of llama.cpp from itself, one batch against token by token."""
    return float(json.loads((DATA / "self_kld.json").read_text(encoding="utf-8"))[name]["self"][1])
