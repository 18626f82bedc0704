"""The card kernels' block formats, compiled for the host: every type gives the weights that the gguf package gives."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import random_blocks

from bloomery.gpu_worker.compile_cache import KERNELS
from bloomery.gpu_worker.products import SMALL_TYPES, SUPER_TYPES
from bloomery.runtime.quant_types import QuantType

SEED = 20261129
SOURCE = Path(__file__).parent / "card_kit" / "decode_on_host.cpp"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    to = tmp_path_factory.mktemp("formats") / "formats.so"
    subprocess.run(
        [compiler, "-O1", "-w", "-std=c++17", "-shared", "-fPIC", f"-I{KERNELS}", "-o", to, SOURCE], check=True
    )
    return ctypes.CDLL(str(to))


@pytest.mark.parametrize("shift", (0, 1, 2))
@pytest.mark.parametrize("name", (*SMALL_TYPES, *SUPER_TYPES))
def test_groups_of_32(library: ctypes.CDLL, name: str, shift: int) -> None:
    """Rows begin at multiples of 16 bytes on the card, those of types with odd blocks 2 bytes off,
    or anywhere."""
    kind = QuantType.named(name)
    if shift % np.gcd(kind.block_bytes, 4):
        pytest.skip(f"rows of {name} always begin at multiples of {np.gcd(kind.block_bytes, 4)}")
    width, generator = 1024, np.random.default_rng(SEED)
    blocks = np.frombuffer(random_blocks(generator, name, (width, 1)), np.uint8)
    memory = np.zeros(len(blocks) + 64, np.uint8)
    start = -memory.ctypes.data % 16 + shift
    memory[start : start + len(blocks)] = blocks
    found = np.full(width, np.nan, np.float32)
    decode = getattr(library, f"decode_{name}")
    decode(ctypes.c_void_p(memory.ctypes.data + start), width // 32, ctypes.c_void_p(found.ctypes.data))
    expected = kind.dequantise(blocks)
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max()), np.abs(found - expected).max()
