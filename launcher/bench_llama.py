"""A build of llama.cpp as the other side of a comparison: its llama-bench, run once a round over all trials.

Owns the program's command line and the reading of what it prints. It loads the file anew in every round and leaves
before ours goes on; it makes its own tokens and warms up by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bloomery.launcher.bench_peer import PeerRun
from bloomery.launcher.bench_trial import Trial
from bloomery.runtime.errors import BloomeryError

EXECUTABLE: Final = "llama-bench"
_ALL_LAYERS: Final = 99
_HELP_SECONDS: Final = 60.0
_RUN_SECONDS: Final = 1800.0
_NEXT: Final = "name the folder of a build with --peer-path, and see that its libraries are found"


@dataclass(frozen=True)
class LlamaBenchOptions:
    """`folder` has the program and its libraries. `on_card`: all layers are the card's, but the experts of the first
    `cpu_moe` layers, which `threads` cores compute (0: the program's own choice)."""

    folder: Path
    on_card: bool
    cpu_moe: int
    threads: int
    cache_type: str
    batch: int
    micro_batch: int


class LlamaBench:
    """A program that can be run; BloomeryError if it cannot. `facts` and `name` are known after the first round."""

    def __init__(self, options: LlamaBenchOptions, model: str) -> None:
        self._options, self._model = options, model
        self._program = str(options.folder / EXECUTABLE)
        self.name, self.facts = "llama.cpp", {"system": ""}
        usage = self._call("--help", seconds=_HELP_SECONDS).stdout
        if "--output" not in usage:
            raise BloomeryError(f"{self._program} does not answer as llama-bench does", _NEXT)

    def arguments(self, trials: Sequence[Trial]) -> list[str]:
        """What the program is called with: all prompts and generations at all depths, which are what `trials_of` makes
        of the same lists."""
        options = self._options

        def distinct(values: Sequence[int]) -> str:
            return ",".join(map(str, dict.fromkeys(values))) or "0"

        given = ["-m", self._model, "-ngl", str(_ALL_LAYERS if options.on_card else 0), "-fa", "1", "-r", "1"]
        given += ["-ctk", options.cache_type, "-ctv", options.cache_type]
        given += ["-b", str(options.batch), "-ub", str(options.micro_batch)]
        given += ["-ncmoe", str(options.cpu_moe)] if options.cpu_moe else []
        given += ["-t", str(options.threads)] if options.threads else []
        given += ["-p", distinct([trial.count for trial in trials if trial.kind == "pp"])]
        given += ["-n", distinct([trial.count for trial in trials if trial.kind == "tg"])]
        return [*given, "-d", distinct([trial.depth for trial in trials]), "-o", "json"]

    def run(self, trials: Sequence[Trial]) -> dict[Trial, PeerRun]:
        """One round. BloomeryError if the program fails, or does not tell of one of the trials."""
        done = self._call(*self.arguments(trials), seconds=_RUN_SECONDS)
        tests = parse(done.stdout, self._program)
        found: dict[Trial, PeerRun] = {}
        for test in tests:
            self.name = f"llama.cpp {test['build_number']} ({test['build_commit']})"
            self.facts = {"system": f"{test.get('gpu_info', '')} {test.get('backends', '')}".strip()}
            prompt, generated, depth = test["n_prompt"], test["n_gen"], test["n_depth"]
            trial = Trial("pp", prompt, depth) if prompt else Trial("tg", generated, depth)
            found[trial] = PeerRun(test["samples_ns"][0] / 1e9, None)
        if missing := [trial for trial in trials if trial not in found]:
            raise BloomeryError(
                f"{self._program} told nothing of {missing[0].name} at depth {missing[0].depth}",
                "its version may know no depths (-d): take a newer one",
            )
        return found

    def _call(self, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
        libraries = os.pathsep.join([str(self._options.folder), os.environ.get("LD_LIBRARY_PATH", "")])
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries.rstrip(os.pathsep)}
        command = [self._program, *arguments]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, env=environment
            )
        except OSError as error:
            raise BloomeryError(f"--peer-path: {self._program}: {error.strerror}", _NEXT) from None
        except subprocess.TimeoutExpired:
            raise BloomeryError(f"{self._program} did not end within {seconds:.0f} s", "ask for fewer trials") from None
        if done.returncode:
            words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise BloomeryError(f"{self._program} failed with status {done.returncode}: {words[-1]}", _NEXT)
        return done


def parse(text: str, program: str) -> list[dict[str, Any]]:
    """llama-bench's `-o json`: an array with one object a test; libraries may have printed lines before it."""
    start = text.find("[\n")
    try:
        tests = json.loads(text[max(start, 0) :])
        needed = {"build_number", "build_commit", "n_prompt", "n_gen", "n_depth", "samples_ns"}
        if missing := next((needed - test.keys() for test in tests if needed - test.keys()), None):
            raise BloomeryError(
                f"{program} prints no {', '.join(sorted(missing))}", "it is of another version than is known here"
            )
    except (ValueError, AttributeError, TypeError):
        raise BloomeryError(f"{program} prints no JSON array of tests: {text[:80]!r}", _NEXT) from None
    return list(tests)
