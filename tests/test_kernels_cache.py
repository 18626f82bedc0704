"""The cache of compiled kernels: shared by processes, proof against damage, keyed by what code depends on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.cpu_experts.isa import active_isa, available_isas
from bloomery.cpu_experts.kernels import WEIGHT_TYPES, kernel_function, kernel_names

SECONDS = 100
# Prints a digest of what two kernels compute, so that processes can be compared.
COMPUTE = """
import hashlib, sys
sys.path.insert(0, {tests!r})
import numpy as np
from kernel_references import random_weights
from test_kernels_products import multiply
generator = np.random.default_rng(60)
digest = hashlib.sha256()
for name in sys.argv[1:]:
    weights = random_weights(generator, name, 41, 768)
    x = generator.standard_normal((19, 768)).astype(np.float32)
    digest.update(multiply(name, weights, x, 2).tobytes())
    digest.update(multiply(name, weights, x[:1].copy(), 2).tobytes())
print(digest.hexdigest())
"""

COMPILE = "import sys; from bloomery.cpu_experts.compile_cache import compile_kernel; compile_kernel(sys.argv[1])"


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


def compute(cache: Path, *names: str, **environment: str) -> str:
    return finish(start(COMPUTE, cache, *names, **environment))[0]


def test_kernels_compiled_by_different_processes_do_not_mix(tmp_path: Path) -> None:
    """Functions inside kernels can have equal names when different processes compiled them: each kernel must still call
    its own."""
    apart = tmp_path / "apart"
    for kernel in ("matmul_Q4_K", "matmul_Q3_K"):
        finish(start(COMPILE, apart, kernel))
    loaded = compute(apart, "Q4_K", "Q3_K")
    assert loaded == compute(tmp_path / "together", "Q4_K", "Q3_K")


def test_processes_share_the_work_and_damage_is_repaired(tmp_path: Path) -> None:
    first, second = (start(COMPUTE, tmp_path, "Q8_0") for _ in range(2))
    digest = finish(first)[0]
    assert finish(second)[0] == digest
    (folder,) = (tmp_path / "numba").iterdir()
    files = sorted(folder.glob("*.kernel"))
    assert [path.name.split(".")[0] for path in files] == ["matmul_Q8_0", "quantise_Q8_0"]
    assert {path.suffix for path in folder.iterdir()} == {".kernel", ".lock"}, "a temporary file was left"
    path = files[0]
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        path.write_bytes(damaged)
        assert compute(tmp_path, "Q8_0") == digest
        assert len(path.read_bytes()) > 1000, "the damaged file was not replaced"


@pytest.mark.parametrize("isa", [name for name in available_isas() if name != active_isa()])
def test_every_instruction_set_computes_the_same_bits(isa: str) -> None:
    """The active variant is compared with NumPy elsewhere; here the others with it, in processes of their own and with
    code compiled for no more than their instructions. The user's cache keeps what this compiles."""
    digests = []
    for environment in ({}, {"BLOOMERY_ISA": isa}):
        code = COMPUTE.format(tests=str(Path(__file__).parent))
        command = [sys.executable, "-c", code, *WEIGHT_TYPES]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout)
    assert digests[0] == digests[1]


def test_an_instruction_set_of_its_own_has_a_folder_of_its_own(tmp_path: Path) -> None:
    compute(tmp_path, "Q8_0")
    compute(tmp_path, "Q8_0", BLOOMERY_ISA="avx2")
    assert len(list((tmp_path / "numba").iterdir())) == 2, "two variants must not share a folder"


def test_a_folder_that_cannot_be_written_is_replaced_and_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    code = "from bloomery.cpu_experts.compile_cache import cache_folder; print(cache_folder()); cache_folder()"
    out, errors = finish(start(code, blocked, TMPDIR=str(tmp_path)))
    assert Path(out).parent == tmp_path and Path(out).stat().st_mode & 0o077 == 0
    assert errors.count("compiled kernels cannot be kept in") == 1


def test_an_unknown_isa_is_refused(tmp_path: Path) -> None:
    process = start(COMPUTE, tmp_path, "Q8_0", BLOOMERY_ISA="mmx")
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode != 0 and "BLOOMERY_ISA=mmx" in errors


def test_names() -> None:
    assert len(set(kernel_names())) == len(kernel_names())
    for name in ("matmul_Q9_K", "rope_", "add_f32", ""):
        with pytest.raises(KeyError):
            kernel_function(name)
