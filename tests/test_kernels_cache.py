"""The cache of compiled kernels: shared by processes, proof against damage, keyed by what code depends on."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from kernel_references import random_weights
from test_kernels_products import multiply

from bloomery.cpu_experts.isa import active_isa, available_isas
from bloomery.cpu_experts.kernels import WEIGHT_TYPES, kernel_function, kernel_names

SECONDS = 300  # only a process that hangs takes so long
pytestmark = pytest.mark.timeout(600)

# Prints a digest of what products compute, so that processes can be compared.
COMPUTE = """
import sys
sys.path.insert(0, {tests!r})
from test_kernels_cache import digest_of_products
print(digest_of_products(sys.argv[1:]))
"""
# The same of embedding rows in blocks of 32, which need the smallest kernels that there are.
EMBED = """
import hashlib, sys
sys.path.insert(0, {tests!r})
import numpy as np
from in_process import run_kernel
from kernel_references import random_weights
digest = hashlib.sha256()
for name in sys.argv[1:]:
    weights, out = random_weights(np.random.default_rng(60), name, 9, 768), np.zeros((2, 768), np.float32)
    tokens = np.array([8, 3], np.int32)
    step = np.array([2, 2, tokens.ctypes.data, 0, 0, 0], np.int64)
    words = [weights.ctypes.data, weights.strides[0], 768 // 32, out.ctypes.data, out.strides[0]]
    run_kernel("embed_" + name, words, step)
    digest.update(out.tobytes())
print(digest.hexdigest())
"""
COMPILE = "import sys; from bloomery.cpu_experts.compile_cache import compile_kernel; compile_kernel(sys.argv[1])"


def digest_of_products(names: Sequence[str]) -> str:
    generator = np.random.default_rng(60)
    digest = hashlib.sha256()
    for name in names:
        weights = random_weights(generator, name, 41, 768)
        x = generator.standard_normal((19, 768)).astype(np.float32)
        digest.update(multiply(name, weights, x, 2).tobytes())
        digest.update(multiply(name, weights, x[:1].copy(), 2).tobytes())
    return digest.hexdigest()


def start(code: str, cache: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code.format(tests=str(Path(__file__).parent)), *arguments],
        env={**os.environ, "BLOOMERY_CACHE": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        out, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return out.strip(), errors


def test_kernels_compiled_by_different_processes_do_not_mix(tmp_path: Path) -> None:
    """Functions inside kernels can have equal names when different processes compiled them: each kernel must still call
    its own."""
    for process in [start(COMPILE, tmp_path, kernel) for kernel in ("matmul_Q4_K", "matmul_Q3_K")]:
        finish(process)
    loaded, _ = finish(start(COMPUTE, tmp_path, "Q4_K", "Q3_K"))
    assert loaded == digest_of_products(("Q4_K", "Q3_K"))


def test_processes_share_the_work_and_damage_is_repaired(tmp_path: Path) -> None:
    first, second = (start(EMBED, tmp_path, "Q8_0") for _ in range(2))
    digest = finish(first)[0]
    assert finish(second)[0] == digest
    (folder,) = (tmp_path / "numba").iterdir()
    (path,) = folder.glob("*.kernel")
    assert path.name.split(".")[0] == "embed_Q8_0"
    assert {path.suffix for path in folder.iterdir()} == {".kernel", ".lock"}, "a temporary file was left"
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        path.write_bytes(damaged)
        assert finish(start(EMBED, tmp_path, "Q8_0"))[0] == digest
        assert len(path.read_bytes()) > 1000, "the damaged file was not replaced"


@pytest.mark.parametrize("isa", [name for name in available_isas() if name != active_isa()])
def test_every_instruction_set_computes_the_same_bits(isa: str) -> None:
    """The active variant is compared with NumPy elsewhere; here the others with it, in processes of their own and with
    code compiled for no more than their instructions. The user's cache keeps what this compiles."""
    code = COMPUTE.format(tests=str(Path(__file__).parent))
    parts = WEIGHT_TYPES[::2], WEIGHT_TYPES[1::2]  # where nothing is compiled yet, two cores share the work
    environment = {**os.environ, "BLOOMERY_ISA": isa}
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code, *part],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in parts
    ]
    assert [finish(other)[0] for other in others] == [digest_of_products(part) for part in parts]


def test_an_instruction_set_of_its_own_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for process in (start(COMPILE, tmp_path, "embed_F32"), start(COMPILE, tmp_path, "embed_F32", BLOOMERY_ISA="avx2")):
        finish(process)
    assert len(list((tmp_path / "numba").iterdir())) == 2, "two variants must not share a folder"


def test_a_folder_that_cannot_be_written_is_replaced_and_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    code = "from bloomery.cpu_experts.compile_cache import cache_folder; print(cache_folder()); cache_folder()"
    out, errors = finish(start(code, blocked, TMPDIR=str(tmp_path)))
    assert Path(out).parent == tmp_path and Path(out).stat().st_mode & 0o077 == 0
    assert errors.count("compiled kernels cannot be kept in") == 1


def test_an_unknown_isa_is_refused(tmp_path: Path) -> None:
    process = start(COMPILE, tmp_path, "embed_F32", BLOOMERY_ISA="mmx")
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode != 0 and "BLOOMERY_ISA=mmx" in errors


def test_names() -> None:
    assert len(set(kernel_names())) == len(kernel_names())
    for name in ("matmul_Q9_K", "rope_", "add_f32", ""):
        with pytest.raises(KeyError):
            kernel_function(name)
