"""How fast the cores multiply bytes, which bounds prompts: asked of the workers' package in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

import psutil

from bloomery.runtime.errors import WorkerLost

PROBE: Final = "bloomery.cpu_experts.arithmetic_probe"
SECONDS: Final = 0.3
_DEADLINE: Final = 120.0  # importing and compiling on a loaded machine


def arithmetic_ceiling(threads: int) -> dict[str, Any]:
    """{"isa": instruction set of the kernels, "arithmetic_gops": 10^9 operations a second, two a multiply-add, of
    `threads` cores that multiply bytes in registers at the same time}. WorkerLost where the probe fails."""
    cpus = psutil.Process().cpu_affinity()[:threads]
    commands = [[sys.executable, "-m", PROBE, str(cpu), str(SECONDS)] for cpu in cpus]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for command in commands]
    try:
        answers = [process.communicate(timeout=_DEADLINE) for process in processes]
    except subprocess.TimeoutExpired:
        message = f"the arithmetic probe said nothing for {_DEADLINE:.0f} s"
        raise WorkerLost(message, "see whether the machine is overloaded") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, answers):
        if process.returncode:
            raise WorkerLost(f"the arithmetic probe failed: {errors.decode(errors='replace').strip()}")
    found = [json.loads(out) for out, _ in answers]
    return {"isa": found[0]["isa"], "arithmetic_gops": sum(answer["gops"] for answer in found)}
