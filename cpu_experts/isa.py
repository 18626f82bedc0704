"""Which instruction set the host kernels are written for: its names, what each needs of a CPU, and the choice.

Owns BLOOMERY_ISA, the features that compiled code may use and the system's permission for AMX. Knows nothing of what
kernels do with them. Every variant computes the same bits; they differ in speed only.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from typing import Any, Final

import llvmlite.binding as llvm
from numba.core import config as _config

AVX2: Final = "avx2"
AVX512VNNI: Final = "avx512vnni"
AMX: Final = "amx"
_AVX2_NEEDS: Final = ("avx2", "fma", "f16c")
_AVX512VNNI_NEEDS: Final = (*_AVX2_NEEDS, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    AVX2: _AVX2_NEEDS,
    AVX512VNNI: _AVX512VNNI_NEEDS,
    AMX: (*_AVX512VNNI_NEEDS, "amx-tile", "amx-int8", "amx-bf16"),
}
"""Features of the CPU by variant, slowest variant first; each variant may use all that an earlier one does."""

_PERMISSION: Final = "the system's permission for tiles (arch_prctl ARCH_REQ_XCOMP_PERM)"

# What code of the AVX2 variant is compiled for on a CPU that has more: otherwise LLVM would use AVX-512 where it likes.
_AVX2_CPU: Final = ("haswell", "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe")


def _narrow() -> None:
    """Holds Numba to AVX2 if BLOOMERY_ISA asks for it; an explicit choice of Numba's own variables stays."""
    if os.environ.get("BLOOMERY_ISA") != AVX2 or "NUMBA_CPU_FEATURES" in os.environ:
        return
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = _AVX2_CPU
    settings: Any = _config
    settings.CPU_NAME, settings.CPU_FEATURES = _AVX2_CPU


_narrow()


@functools.cache
def host_features() -> dict[str, bool]:
    """Features that compiled code may use: the CPU's, or NUMBA_CPU_FEATURES where that narrows them."""
    narrowed = os.environ.get("NUMBA_CPU_FEATURES")
    if narrowed is None:
        return dict(llvm.get_host_cpu_features())
    return {word[1:]: word.startswith("+") for word in narrowed.split(",") if word}


@functools.cache
def tiles_permitted() -> bool:
    """Asks the system once for this process (threads and forked children included) to use tiles; whether it may.

    Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), Documentation/arch/x86/xstate.rst."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    libc: Any = ctypes.CDLL(None, use_errno=True)
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(libc.syscall(arch_prctl, request_permission, tile_data) == 0)


def _missing(isa: str, features: dict[str, bool]) -> list[str]:
    missing = [name.upper() for name in NEEDS[isa] if not features.get(name, False)]
    if isa == AMX and not missing and not tiles_permitted():
        missing.append(_PERMISSION)
    return missing


def refusal(features: dict[str, bool] | None = None) -> str | None:
    """Why this CPU cannot run the kernels (names what it lacks), or None if it can. Also refuses a BLOOMERY_ISA that
    there is no variant for, or that the CPU lacks."""
    forced = os.environ.get("BLOOMERY_ISA", "")
    if forced not in ("", *NEEDS):
        return f"BLOOMERY_ISA={forced}: the host kernels exist for {', '.join(NEEDS)}"
    missing = _missing(forced or AVX2, host_features() if features is None else features)
    if not missing:
        return None
    if forced:
        return f"BLOOMERY_ISA={forced}: this machine lacks {', '.join(missing)}"
    return f"this CPU lacks {', '.join(missing)}, which the host kernels need"


def available_isas() -> list[str]:
    """The variants that code compiled now may use, slowest first."""
    return [isa for isa in NEEDS if not _missing(isa, host_features())]


@functools.cache
def active_isa() -> str:
    """The variant that kernels are made for: BLOOMERY_ISA, else the fastest that the CPU has."""
    return os.environ.get("BLOOMERY_ISA") or (available_isas() or [AVX2])[-1]


def at_least(isa: str) -> bool:
    """Whether the active variant may use the instructions of `isa`."""
    order = list(NEEDS)
    return order.index(active_isa()) >= order.index(isa)


@functools.cache
def prefetch_distance() -> int:
    """How many bytes ahead in each of its streams a kernel that reads weights once should prefetch; 0: not at all.

    AMD's Zen to Zen 4 follow four streams by themselves: measured on Zen 4, prefetching costs Q6_K 15 to 25 % of its
    rate from memory, whatever the distance. On Zen 5 2 to 2.5 KiB gain 17 % of an expert's rate and half a KiB loses
    10 %. On Intel's server cores it doubles rates; on Sapphire Rapids 1.5 to 3 KiB serve all types best, half a KiB
    loses 5 to 10 % of the rate."""
    return 0 if llvm.get_host_cpu_name() in ("znver1", "znver2", "znver3", "znver4") else 2048
