"""The other side of a comparison: llama.cpp in a process of its own, on the same file, tokens and threads.

Owns starting that process, the conversation with it (`llama_process.py` is its other half) and its end.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bloomery.launcher.bench_trial import Trial
from bloomery.runtime.errors import BloomeryError

PACKAGES = ("auto", "xllamacpp", "llama_cpp")
REPACKING = ("on", "off")
BATCH = 2048  # tokens a call, llama.cpp's default
MICRO_BATCH = 512  # of which so many are evaluated together, also its default
CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class PeerOptions:
    """`python`: the interpreter of the environment with the wheel; `package`: which one, if it has several; `repack`:
    whether llama.cpp may rearrange weights when it loads them (its default)."""

    python: str
    package: str
    repack: bool


@dataclass(frozen=True)
class PeerRun:
    """One timed trial of the peer: seconds, and CPU seconds of all its threads, where it tells them."""

    seconds: float
    cpu_seconds: float | None


class LlamaPeer:
    """An open model. Raises BloomeryError if the wheel is missing or does not take the file. Close it."""

    def __init__(self, options: PeerOptions, model: str, *, threads: int, context: int, micro_batch: int) -> None:
        script = Path(__file__).with_name("llama_process.py")
        self._depth = 0
        try:
            self._process = subprocess.Popen(
                [options.python, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise BloomeryError(f"--peer-python {options.python}: {error.strerror}", "name an interpreter") from None
        try:
            self.facts = self._ask(
                call="open",
                package=options.package,
                model=model,
                threads=threads,
                context=context,
                batch=BATCH,
                micro_batch=micro_batch,
                repack=options.repack,
            )
        except BaseException:
            self.close()
            raise
        self.name = f"{self.facts['package']} {self.facts['version']}, repacking {'on' if options.repack else 'off'}"

    def fill(self, prefix: tuple[int, ...]) -> None:
        """Brings these tokens into the cache, untimed. A longer prefix begins with the shorter ones before it."""
        self._ask(call="run", keep=self._depth, tokens=prefix[self._depth :], batch=BATCH)
        self._depth = len(prefix)

    def run(self, trial: Trial, tokens: tuple[int, ...]) -> PeerRun:
        """Times the tokens of a trial behind the prefix: at once, or one by one as in generating them."""
        batch = BATCH if trial.kind == "pp" else 1
        return PeerRun(**self._ask(call="run", keep=self._depth, tokens=tokens, batch=batch))

    def _ask(self, **call: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(call) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise BloomeryError(f"the llama.cpp process ended with status {status}", "run without --against")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BloomeryError(answer["error"], answer["hint"])
        return answer

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
