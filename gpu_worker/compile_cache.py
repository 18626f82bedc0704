"""Compiled kernels: from a kernel file to the binary for a card, through nvcc and a cache on disk.

Owns the compiler's command line, the cache folder and its key. It needs no card and no PyCUDA.

The folder is `$BLOOMERY_CACHE/cuda`, else `bloomery/cuda` in `$XDG_CACHE_HOME` or `~/.cache`. A file's name ends in a
hash of the sources that it is made of, the compiler's version, its options and the architecture: a binary of other
sources is never found. Files are written aside and renamed into place.

    python -m bloomery.gpu_worker.compile_cache [sm_80 ...]      # compiles every kernel; says what does not compile
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from bloomery.gpu_worker.products import WEIGHT_TYPES
from bloomery.runtime.cache_base import cache_base
from bloomery.runtime.errors import PlanError

KERNELS: Final = Path(__file__).parent / "kernels"
ARCHITECTURES: Final = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
QUANT_FILES: Final = ("matmul",)
"""Files that are compiled once for each quant type."""

_OPTIONS: Final = ("-std=c++17", "-O3", "-cubin")
_TOOLKITS: Final = ("/usr/local/cuda/bin", "/opt/cuda/bin")
_COMPILE_SECONDS: Final = 300


def kernel_files() -> list[str]:
    """Names of all kernel files, without suffix."""
    return sorted(path.stem for path in KERNELS.glob("*.cu"))


def units() -> list[tuple[str, str]]:
    """Everything that can be compiled: (file, quant type or "")."""
    return [(file, kind) for file in kernel_files() for kind in (WEIGHT_TYPES if file in QUANT_FILES else ("",))]


@functools.cache
def find_compiler() -> str:
    """Path of nvcc: $BLOOMERY_NVCC, the one on PATH, or a toolkit's. PlanError if there is none."""
    wanted = os.environ.get("BLOOMERY_NVCC")
    search = os.pathsep.join([os.environ.get("PATH", ""), *_TOOLKITS])
    found = shutil.which(wanted) if wanted else shutil.which("nvcc", path=search)
    if found is None:
        raise PlanError(
            f"the CUDA compiler {wanted or 'nvcc'} is not installed, which the card's kernels are compiled with",
            "install the CUDA toolkit, or name its nvcc in BLOOMERY_NVCC; plan cpu needs neither",
        )
    return found


def cubin(file: str, kind: str, architecture: str) -> Path:
    """Path of the compiled file for a card's architecture ("sm_90"); compiled now unless it is in the cache.

    Raises PlanError with the compiler's first error line.
    """
    path = (
        cache_folder() / f"{file}{'-' + kind if kind else ''}-{architecture}-{_digest(file, kind, architecture)}.cubin"
    )
    if path.exists():
        return path
    handle, aside = tempfile.mkstemp(dir=path.parent, suffix=".cubin")
    os.close(handle)
    try:
        _compile(file, kind, architecture, aside)
        os.replace(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)
    return path


def cache_folder() -> Path:
    """Where binaries are kept; made if need be."""
    folder = cache_base() / "cuda"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"the folder for compiled kernels {folder} cannot be made: {error.strerror}",
            "name a folder that can be written in BLOOMERY_CACHE",
        ) from error
    return folder


def _command(file: str, kind: str, architecture: str, to: str) -> list[str]:
    define = [f"-DQUANT={kind}"] if kind else []
    return [find_compiler(), *_OPTIONS, f"-arch={architecture}", *define, "-o", to, str(KERNELS / f"{file}.cu")]


def _compile(file: str, kind: str, architecture: str, to: str) -> None:
    command = _command(file, kind, architecture, to)
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line or "fatal" in line]
        first = lines[0] if lines else (done.stderr.strip() or f"exit status {done.returncode}")
        raise PlanError(
            f"kernels {file}.cu{f' for {kind}' if kind else ''} do not compile for {architecture}: {first}",
            f"{command[0]} must be of CUDA 12 or newer and know this card",
        )


def _digest(file: str, kind: str, architecture: str) -> str:
    digest = hashlib.sha256()
    for path in (KERNELS / f"{file}.cu", *sorted(KERNELS.glob("*.cuh"))):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    digest.update("\0".join((*_OPTIONS, kind, architecture, _compiler_version())).encode())
    return digest.hexdigest()[:24]


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([find_compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def main(architectures: list[str]) -> int:
    """Compiles every unit for these architectures (default: all that are supported); says what does not compile."""
    unknown = set(architectures) - set(ARCHITECTURES)
    if unknown:
        print(f"unknown architecture {', '.join(sorted(unknown))}, expected some of {', '.join(ARCHITECTURES)}")
        return 2
    failed = 0
    for architecture in architectures or ARCHITECTURES:
        begun = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            errors = [error for error in pool.map(partial(_error_of, architecture), units()) if error]
        for error in errors:
            print(error)
        failed += len(errors)
        print(
            f"{architecture}: {len(units()) - len(errors)} of {len(units())} compile ({time.monotonic() - begun:.0f} s)"
        )
    return int(failed > 0)


def _error_of(architecture: str, unit: tuple[str, str]) -> str:
    try:
        cubin(*unit, architecture)
    except PlanError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
