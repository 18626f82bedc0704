"""A card that is not there: runs lowered programs on the CPU by way of `card_kit/emulator.h`, for small shapes.

Owns compiling kernel files for the host and the memory of one program. Knows no expectations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bloomery.gpu_worker.compile_cache import KERNELS, cache_folder
from bloomery.gpu_worker.launches import MAX_ROWS, RECORD_LINES, KernelName, Launch, StateAddress, StepAddresses
from bloomery.gpu_worker.lowering import lower
from bloomery.gpu_worker.prompt_lowering import lower_prompt
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.executor import StepRows
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.program import Program, RoutedExperts, View
from bloomery.runtime.states import element_type

KIT = Path(__file__).parent / "card_kit"
_HEADERS = ("/usr/local/cuda/include", "/opt/cuda/include", "/usr/include")
_FILLED = 0x7D  # what memory holds before it is written


def source_of(file: str) -> str:
    """A kernel file with the headers of its own that it includes, and those that they do."""
    seen: set[str] = set()

    def read(name: str) -> str:
        seen.add(name)
        text = (KERNELS / name).read_text(encoding="utf-8").replace("\\\n", " ")
        included = re.findall(r'^#include "(\w+\.cuh)"', text, re.M)
        return "".join(read(each) for each in included if each not in seen) + text

    return read(f"{file}.cu")


@functools.cache
def _machine() -> list[str]:
    """Options for eight numbers at a time, where the processor has that; the results are the same bits."""
    about = Path("/proc/cpuinfo")
    known = set(about.read_text().split()) if about.exists() else set()
    return ["-march=x86-64-v3"] if {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"} <= known else []


@functools.cache
def library(file: str, quant_type: str) -> ctypes.CDLL:
    """A kernel file for the host; skips the test where a compiler or CUDA's headers are missing."""
    compiler = shutil.which("g++")
    headers = next((path for path in _HEADERS if (Path(path) / "cuda_fp16.h").exists()), None)
    if compiler is None or headers is None:
        pytest.skip("needs g++ and the CUDA toolkit's headers")
    source = source_of(file)
    names = re.findall(
        r'extern "C" __global__ void[^;{]*?\b(\w+)\(', re.sub(r"#define.*|__launch_bounds__\([^)]*\)", "", source)
    )
    macros = {"MATMUL": "matmul_{}", "ATTEND": "attend_{}", "FLASH": "flash_{}", "CORES_KERNEL": "attend_cores_{}"}
    macros |= {"ATTEND_WINDOW": "attend_window_{}", "FRESH_KERNEL": "attend_fresh_{}"}
    macros |= {"ATTEND_ROWS": "attend_rows_{}", "SCORE_CORES": "score_cores_{}"}
    macros |= {"WINDOW_CORES": "window_cores_{}"}
    for macro, pattern in macros.items():
        for found in re.findall(rf"^{macro}\(([^)]*)\)", source, re.M):
            arguments = [part.strip() for part in found.split(",")]
            names.append(pattern.format("_".join(arguments) if macro == "FLASH" else arguments[0]))
    cases = "\n".join(
        f'    if (!strcmp(name, "{name}")) return call({name}, words, grid, threads, shared) ? 0 : 2;' for name in names
    )
    text = (
        f'#include "{KIT / "emulator.h"}"\n#include "{KERNELS / f"{file}.cu"}"\nusing namespace emulated;\n'
        'extern "C" int launch(const char* name, const uint8_t* words, unsigned x, unsigned y, unsigned z,'
        f" unsigned threads, size_t shared) {{\n    const Three grid{{x, y, z}};\n{cases}\n    return 1;\n}}\n"
    )
    parts = [text, (KIT / "emulator.h").read_text(), source]
    # without -fno-gnu-unique the loader gives the static memory of a template's functions to all libraries in common,
    # though each quant type has its own size of it; without -Bsymbolic a kernel with the name of a function of the C
    # library (`send`) would be that function
    options = ["-O2", "-w", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-gnu-unique", "-Wl,-Bsymbolic"]
    options += _machine()
    digest = hashlib.sha256("\0".join([*parts, *options, quant_type]).encode()).hexdigest()[:20]
    folder = cache_folder().parent / "emulated"
    folder.mkdir(exist_ok=True)
    to = folder / f"{file}-{quant_type}-{digest}.so"
    if not to.exists():
        unit, aside = folder / f"{to.stem}-{os.getpid()}.cpp", folder / f"{to.stem}-{os.getpid()}.aside"
        unit.write_text(text, encoding="utf-8")
        define = [f"-DQUANT={quant_type}"] if quant_type else []
        command = [compiler, *options, f"-I{headers}", *define, "-o", aside, unit]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
        aside.rename(to)
        unit.unlink()
    return ctypes.CDLL(str(to))


def run(launch: Launch) -> None:
    name: KernelName = launch.kernel
    words = np.array(launch.words, np.int64)
    status = library(name.file, name.quant_type).launch(
        name.function.encode(),
        ctypes.c_void_p(words.ctypes.data),
        *map(ctypes.c_uint, launch.grid),
        ctypes.c_uint(launch.threads),
        ctypes.c_size_t(launch.shared),
    )
    assert status != 1, f"no kernel {name}"
    assert status == 0, f"{name} of {launch.label} writes beyond its {launch.shared} bytes of shared memory"


class EmulatedCard:
    """The memory of one program (a CardContext) and steps over it."""

    multiprocessors = 4
    block_shared = 94 << 10

    def __init__(
        self, program: Program, *, context: int = 256, slots: int = 2, cache_type: str = "f16", rows: int = 256
    ):
        self.program, self.context, self.cache_type, self.rows = program, context, cache_type, rows
        self.areas: dict[str, NDArray[np.uint8]] = {}
        self.step = StepAddresses(*(self.area(f"step {i}", 4 * MAX_ROWS) for i in range(RECORD_LINES)))
        self.prompt_step = StepAddresses(*(self.area(f"prompt {i}", 4 * rows) for i in range(RECORD_LINES)))
        for buffer in program.buffers.values():
            self.area(f"buffer {buffer.name}", 4 * buffer.width * rows)
        for state in program.states.values():
            elements = slots * state.rows(context, rows) * state.width
            self.area(f"cache {state.name}", elements * element_type(state, cache_type).itemsize)
        tables = {table.weight: table.row_bytes for table in engram_tables(program)}
        for name, row_bytes in tables.items():
            assert program.engram is not None
            self.area(f"rows {name}", rows * program.engram.buckets * row_bytes)
        for name in program.weights.keys() - tables.keys():
            self.put(f"weight {name}", program.weights[name].data)
        for op in program.ops:
            if isinstance(op, RoutedExperts):
                self.put(f"slot map {op.gate}", np.arange(program.weights[op.gate].shape[2], dtype=np.int32))

    def area(self, name: str, nbytes: int) -> int:
        if name not in self.areas or len(self.areas[name]) < nbytes:
            whole = np.full(nbytes + 1024, _FILLED, np.uint8)
            start = -whole.ctypes.data % 256
            self.areas[name] = whole[start : start + nbytes + 256]
        return self.areas[name].ctypes.data

    def put(self, name: str, values: NDArray[Any]) -> int:
        flat = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self.area(name, flat.size)
        self.areas[name][: flat.size] = flat
        return self.areas[name].ctypes.data

    def view(self, view: View) -> tuple[int, int]:
        return self.areas[f"buffer {view.buffer}"].ctypes.data + 4 * view.start, self.program.buffers[view.buffer].width

    def weight(self, name: str) -> tuple[int, Tensor]:
        return self.areas[f"weight {name}"].ctypes.data, self.program.weights[name]

    def slot_map(self, name: str) -> int:
        return self.areas[f"slot map {name}"].ctypes.data

    def state(self, name: str) -> StateAddress:
        width = self.program.states[name].width
        rows = self.program.states[name].rows(self.context, self.rows)
        return StateAddress(self.areas[f"cache {name}"].ctypes.data, rows * width, width, rows)

    def brought(self, table: str) -> int:
        return self.areas[f"rows {table}"].ctypes.data

    def scratch(self, name: str, nbytes: int) -> int:
        return self.area(f"scratch {name}", nbytes)

    def constant(self, name: str, values: NDArray[Any]) -> int:
        return self.put(f"constant {name}", values)

    def read(self, view: View, rows: int) -> NDArray[Any]:
        """(rows, count, width) of a buffer."""
        buffer = self.program.buffers[view.buffer]
        kind = np.float32 if buffer.dtype == "f32" else np.int32
        whole = self.areas[f"buffer {view.buffer}"][: 4 * rows * buffer.width].view(kind).reshape(rows, -1)
        starts = view.start + view.stride * np.arange(view.count)
        return whole[:, starts[:, None] + np.arange(view.width)].copy()

    def run(self, rows: StepRows, *, block: bool) -> Sequence[Launch]:
        """One step: as a prompt block, or (up to MAX_ROWS rows) as a decode step."""
        n = len(rows.tokens)
        make = lower_prompt if block else lower
        make(self.program, self, n, len(rows.out_rows))  # sizes the scratch
        launches = make(self.program, self, n, len(rows.out_rows))
        laps = np.array([0, rows.ahead], np.int32)
        for i, values in enumerate((rows.tokens, rows.slots, rows.positions, rows.out_rows, laps)):
            self.areas[f"{'prompt' if block else 'step'} {i}"][: values.nbytes] = values.view(np.uint8)
        for launch in launches:
            run(launch)
        return launches
