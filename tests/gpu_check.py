"""Builds, checks and times everything on the card that is present: parts in the order of their worth, each with a time
budget and a result that a program can read, so that whatever ends the run early loses only the rest.

    python tests/gpu_check.py OUT [--budget SECONDS] [--only PART,..] [--peer-path DIR] [--file FILE.gguf]

OUT gets results.jsonl (a line a part: status, seconds, result) and a log and other files of each part. Called again
with the same OUT it goes on where it was: parts that passed or failed are not run again, unless --only names them.
--budget is for this call; what it leaves no time for is left for the next one, and a part that passes its own budget
is cut.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
TEMPLATE, LAYERS, MIX = "qwen3-30b-a3b", 48, "Q4_K_M"
SANITIZERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
SANITIZER_SCALE = "40"  # of deadlines, for workers under the sanitizer
LEAST_SECONDS = 20.0
"""Of the call's budget, without which no part is begun."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """`command` runs for `seconds` at most; `result` reads what it left (its log, its exit status), `needs` says what
    is missing on this machine ("" for nothing)."""

    name: str
    seconds: float
    command: Sequence[str]
    result: Callable[[str, int], Result] = lambda log, status: {}
    environment: dict[str, str] = field(default_factory=dict)
    needs: Callable[[], str] = lambda: ""


def parts(out: Path, peer: Path | None, file: Path | None) -> list[Part]:
    """The most important first."""
    model = ["-m", str(file)] if file else ["--synthetic", TEMPLATE, "--layers", str(LAYERS), "--mix", MIX]
    bench = [PYTHON, "-m", "bloomery.launcher.bench", *model, "--plan", "a", "-o", "json"]
    against = ["--against", "llama.cpp", "--peer-path", str(peer)] if peer else []
    decode = ["-p", "0", "-n", "64", "-d", "6,1024,4096,16384"]
    hybrid = ["--card-memory", "10GiB", "-p", "0", "-n", "32", "-d", "6,4096"]
    # dense weights, caches, a block's buffers and the staging areas: all experts but a few stay on the host
    streamed = ["--card-memory", "5250MiB", "-p", "4096", "-n", "0", "--prompt-block", "4096", "-r", "2"]
    all_on_host = ["--peer-cpu-moe", str(LAYERS), "--micro-batch", "4096"] if peer else []
    shared = {} if "BLOOMERY_CACHE" in os.environ or file else {"BLOOMERY_CACHE": "/dev/shm/bloomery-check"}
    tests = [PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    gpu_files = [str(path) for path in sorted(HERE.glob("test_*.py")) if "pytest.mark.gpu" in path.read_text("utf-8")]
    stress = f"{HERE / 'test_card_daemon.py'}::test_hand_offs_under_random_delays"
    tiny = [PYTHON, str(HERE / "gpu_tiny_steps.py")]

    def tested(name: str) -> Callable[[str, int], Result]:
        return lambda log, status: junit(out / f"{name}.xml")

    def rows(log: str, status: int) -> Result:
        return {"rows": json.loads(log[log.index("[\n") :])} if status == 0 else {}

    return [
        Part("compile", 200, [PYTHON, str(HERE / "gpu_check.py"), "--compile"], environment=shared),
        Part("tests", 300, [*tests, f"--junitxml={out / 'tests.xml'}", *gpu_files], tested("tests"), shared),
        Part("file", 200, [*bench[: len(bench) - 4], "-p", "0", "-n", "0"], environment=shared),
        Part("decode", 240, [*bench, *decode, "-r", "3", *against], rows, shared),
        Part("prompts", 180, [*bench, "-p", "512,4096,16384", "-n", "0", "--prompt-block", "4096", "-r", "3", *against,
                              *(["--micro-batch", "4096"] if peer else [])], rows, shared),
        Part("prompts with a host", 240, [*bench, *streamed, *against, *all_on_host], rows, shared),
        Part("decode one by one", 100, [*bench, *decode, "-r", "3", "--step-ahead", "0"], rows, shared),
        Part("decode with a host", 240, [*bench, *hybrid, "-r", "3", *against,
                                         *(["--peer-cpu-moe", str(LAYERS // 2)] if peer else [])], rows, shared),
        Part("stress", 150, [*tests, "-s", f"--junitxml={out / 'stress.xml'}", stress], tested("stress"),
             {**shared, "BLOOMERY_STRESS_STEPS": "100000"}),
        sanitizer_part("memcheck", 200, tiny, shared),
        sanitizer_part("racecheck", 300, tiny, shared),
        Part("hand-off", 150, [PYTHON, str(HERE / "gpu_hand_off.py"), "--layers", "8"], environment=shared),
        Part("speeds", 240, [PYTHON, str(HERE / "gpu_speeds.py"), "--json", str(out / "speeds.json")],
             lambda log, status: json.loads((out / "speeds.json").read_text()) if status == 0 else {}, shared),
    ]  # fmt: skip


def sanitizer_part(tool: str, seconds: float, command: Sequence[str], environment: dict[str, str]) -> Part:
    """The tiny steps under one of compute-sanitizer's tools, which find what is wrong also where results are right."""
    program = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *SANITIZERS]))
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", "9", "--print-limit", "20"]

    def counted(log: str, status: int) -> Result:
        found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", log)
        return {"errors": sum(int(errors or hazards) for errors, hazards in found), "summaries": len(found)}

    return Part(
        tool,
        seconds,
        [program or "compute-sanitizer", *options, *command],
        counted,
        {**environment, "BLOOMERY_DEADLINE_SCALE": SANITIZER_SCALE},
        lambda: "" if program else "compute-sanitizer is not installed (it comes with the CUDA toolkit)",
    )


def junit(path: Path) -> Result:
    """Numbers of tests, and the names of those that failed."""
    suites = list(xml.parse(path).getroot().iter("testsuite"))
    cases = [case for suite in suites for case in suite.iter("testcase")]
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases
              if case.find("failure") is not None or case.find("error") is not None]  # fmt: skip
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def run(part: Part, out: Path, seconds: float) -> Result:
    """One part, cut after so many seconds with everything that it started; a line for results.jsonl."""
    begun = time.monotonic()
    if missing := part.needs():
        return {"part": part.name, "status": "skipped", "seconds": 0.0, "why": missing}
    log = out / f"{part.name.replace(' ', '-')}.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **part.environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    with log.open("w") as file, log.with_suffix(".err").open("w") as errors:
        process = subprocess.Popen(
            part.command, stdin=subprocess.DEVNULL, stdout=file, stderr=errors, env=environment, start_new_session=True
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        except BaseException:
            end(process)
            raise
        if status is None:
            end(process)
    took = round(time.monotonic() - begun, 1)
    line: Result = {"part": part.name, "seconds": took, "exit": status}
    try:
        line["result"] = part.result(log.read_text(errors="replace"), -1 if status is None else status)
    except (OSError, ValueError, xml.ParseError) as error:
        line["result"], line["unread"] = {}, f"{type(error).__name__}: {error}"
    wrong = status != 0 or "unread" in line or line["result"].get("failed") or line["result"].get("errors")
    line["status"] = "cut" if status is None else "failed" if wrong else "passed"
    if line["status"] != "passed":
        told = log.with_suffix(".err").read_text(errors="replace") + log.read_text(errors="replace")
        line["tail"] = told.strip().splitlines()[-12:]
    return line


def end(process: subprocess.Popen[bytes]) -> None:
    """The part's own session, workers and all: they are told to go, and then made to."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def compile_all() -> int:
    """Every kernel for this card, as many at a time as there are cores."""
    from bloomery.gpu_worker import compile_cache
    from bloomery.gpu_worker.driver import Card

    card = Card()
    architecture = card.architecture
    card.close()
    return compile_cache.main([architecture])


def finished(results: Path) -> set[str]:
    """The parts that need not be run again."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {line["part"] for line in lines if line["status"] in ("passed", "failed")}


def go(todo: Sequence[Part], out: Path, budget: float, again: bool = False) -> bool:
    """Runs parts until the budget is spent, `again` also those that ended before; whether all that were run passed."""
    results, begun, well = out / "results.jsonl", time.monotonic(), True
    done = set() if again else finished(results)
    for part in todo:
        left = budget - (time.monotonic() - begun)
        if part.name in done:
            continue
        if left < LEAST_SECONDS:
            print(f"{part.name}: left for another call, {left:.0f} s remain", flush=True)
            continue
        line = run(part, out, min(part.seconds, left))
        if line["status"] == "cut" and left < part.seconds:
            line["why"] = f"the call's budget left it {left:.0f} of {part.seconds:.0f} s"
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        short = {name: value for name, value in line.get("result", {}).items() if name != "rows"}
        print(
            f"{part.name}: {line['status']} in {line['seconds']} s {line.get('why', '')} {str(short)[:400]}", flush=True
        )
        for text in line.get("tail", ()):
            print(f"    {text}", flush=True)
        well &= line["status"] in ("passed", "skipped")
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--budget", type=float, default=1700, metavar="SECONDS")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="PART,..")
    parser.add_argument("--peer-path", type=Path, metavar="DIR", help="a build of llama.cpp, to alternate with")
    parser.add_argument("--file", type=Path, help="the model of the benchmarks, instead of a synthetic one")
    parser.add_argument("--list", action="store_true", help="print the parts and their budgets")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        return compile_all()
    if arguments.out is None:
        parser.error("OUT is missing: a folder for results and logs")
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out.resolve()
    every = parts(out, arguments.peer_path, arguments.file)
    if unknown := set(arguments.only or ()) - {part.name for part in every}:
        parser.error(f"no part is called {', '.join(sorted(unknown))}: {', '.join(part.name for part in every)}")
    todo = [part for part in every if not arguments.only or part.name in arguments.only]
    if arguments.list:
        for part in todo:
            print(f"{part.seconds:5.0f} s  {part.name}")
        return 0
    return 0 if go(todo, out, arguments.budget, bool(arguments.only)) else 1


if __name__ == "__main__":
    sys.exit(main())
