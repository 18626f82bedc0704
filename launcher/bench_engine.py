"""Our side of a benchmark: the engine with its workers in this process, without sockets.

A request goes in as a client's would: scheduler, slots, sampling and detokenising are part of what is timed; only the
protocol is left out, whose threads would share the cores with the workers. Knows nothing of peers and tables.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from bloomery.launcher.bench_trial import Trial
from bloomery.runtime.architectures import build_program
from bloomery.runtime.cache_types import CacheType
from bloomery.runtime.card_pool import CARD_WORKLOAD, CardPool
from bloomery.runtime.completion import new_request_id
from bloomery.runtime.engine import Engine
from bloomery.runtime.errors import RequestError
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.host_weights import HostWeightsPlace, copied_bytes, copy_pays
from bloomery.runtime.leg_times import StepLegs
from bloomery.runtime.memory_limits import available_memory
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.placement import COPY_SHARE, Plan
from bloomery.runtime.program import Program, RoutedExperts
from bloomery.runtime.requests import Admitted, Chunk, Event, Failed, Final, GenerationRequest, SamplingParameters
from bloomery.runtime.step_work import op_kind
from bloomery.runtime.tokenizer import Tokenizer
from bloomery.runtime.worker_group import Progress

GREEDY = SamplingParameters(temperature=0.0)


@dataclass(frozen=True)
class CardRun:
    """What card and host told of the steps of a trial: the steps, for each hand-off the seconds of all steps that a
    rank of the host spent on its experts, and those that it waited for the card; how experts on the host came to blocks
    of prompts."""

    legs: tuple[StepLegs, ...]
    host_seconds: tuple[float, ...]
    host_wait_seconds: float
    experts_from: str = ""


@dataclass(frozen=True)
class EngineRun:
    """One timed trial. `seconds` is from handing in the request to its last event, `step_seconds` what the executor's
    steps took of that, `cpu_seconds` what workers and
    coordinator ran; `tokens` were generated. `kinds` is each kind of op's part of the steps: seconds in kernels and at
    barriers, the mean of all ranks; with a card there are none, but a `card`. `shallow`: some may
    have been shallow steps."""

    seconds: float
    steps: int
    step_seconds: float
    cpu_seconds: float
    tokens: tuple[int, ...]
    kinds: dict[str, tuple[float, float]]
    card: CardRun | None = None
    shallow: bool = False


class BenchEngine:
    """An engine of one slot on the workers of a plan: `threads` processes that run whole programs, or with a plan with
    a card its worker and its helpers. `host_weights` "auto" is what a daemon would choose; afterwards it says where
    weights lie. Close it."""

    def __init__(
        self,
        path: str,
        *,
        threads: int,
        context: int,
        prompt_block: int,
        cache_type: CacheType,
        host_weights: HostWeightsPlace | Literal["auto"] = "mmap",
        plan: Plan | None = None,
        step_ahead: int = 0,
        progress: Progress = lambda stage, done, total: None,
    ) -> None:
        """`plan` is one with a card; without it everything runs on the host. `step_ahead` is the engine's."""
        with ExitStack() as stack:
            model = stack.enter_context(ModelFile.open(path))
            self.program = build_program(model)
            self._pool: HostPool | CardPool
            if plan is not None and plan.card is not None:
                self._pool = start_on_card(path, self.program, plan, cache_type, progress)
            else:
                if host_weights == "auto":
                    nbytes = copied_bytes(self.program)
                    pays = copy_pays(nbytes, threads) and nbytes <= COPY_SHARE * available_memory()
                    host_weights = "copy" if pays else "mmap"
                self._pool = HostPool.start(
                    path,
                    self.program,
                    context=context,
                    slots=1,
                    processes=threads,
                    prompt_block=prompt_block,
                    cache_type=cache_type,
                    host_weights=host_weights,
                    progress=progress,
                    time_stages=True,
                )
            facts = self._pool.statistics().get("weights")
            self.host_weights: str = facts["place"] if facts else "mmap"
            stack.callback(self._pool.close)
            self._kinds = {op.name: op_kind(self.program, op) for op in self.program.ops}
            routed = [op.name for op in self.program.ops if isinstance(op, RoutedExperts)]
            layers = plan.tiers.host_layers if plan is not None and plan.tiers is not None else ()
            self._handed_over = [routed[layer] for layer in layers]
            self._engine = Engine(self._pool, Tokenizer.from_model_file(model), None, step_ahead=step_ahead)
            thread = threading.Thread(target=self._engine.run, name="bench-engine", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(self._engine.close)
            self._stack = stack.pop_all()

    @property
    def block(self) -> int:
        """Greatest number of rows of a step of the workers."""
        return self._pool.group_rows if isinstance(self._pool, CardPool) else self._pool.max_rows

    def fill(self, prefix: tuple[int, ...]) -> None:
        """Brings these tokens into the cache, untimed. What is there already is kept."""
        if prefix:
            self._request(prefix, 0)

    def run(self, trial: Trial, prefix: tuple[int, ...], fresh: tuple[int, ...]) -> EngineRun:
        """Times a trial behind `prefix`, which `fill` has brought into the cache. `fresh`: the prompt's tokens ("pp"),
        or the one token that generation starts from ("tg"); the tokens generated are the model's own, greedily."""
        wanted = 1 if trial.kind == "pp" else trial.count
        before, card_before = self._kind_seconds(), self._card_seconds()
        if isinstance(self._pool, CardPool):
            self._pool.step_legs()
        counted = self._pool.statistics()
        cpu = self._cpu_seconds()
        begun = time.perf_counter()
        finished, tokens, cached = self._request(prefix + fresh, wanted)
        cpu = self._cpu_seconds() - cpu
        after = self._pool.statistics()
        assert cached == len(prefix) and len(tokens) == wanted, f"{cached} tokens were cached, expected {len(prefix)}"
        kinds = {
            kind: (pair[0] - before[kind][0], pair[1] - before[kind][1]) for kind, pair in self._kind_seconds().items()
        }
        step_seconds = _total_seconds(after) - _total_seconds(counted)
        card: CardRun | None = None
        if isinstance(self._pool, CardPool):
            *host, wait = (now - then for now, then in zip(self._card_seconds(), card_before, strict=True))
            card = CardRun(tuple(self._pool.step_legs()), tuple(host), wait, after.get("experts_from", ""))
        steps, shallow = after["steps"] - counted["steps"], self._pool.shallow_reach > 0
        return EngineRun(finished - begun, steps, step_seconds, cpu, tokens, kinds, card, shallow)

    def _request(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[float, tuple[int, ...], int]:
        """When the last event came, the tokens generated, and how many of the prompt were cached."""
        sink = _Sink()
        request = GenerationRequest(
            new_request_id(), tokens=prompt, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True
        )
        self._engine.submit(request, sink)
        sink.ended.wait()
        if sink.failure is not None:
            raise RequestError(sink.failure.code, sink.failure.message, sink.failure.hint)
        self._engine.wait_idle()
        return sink.finished, tuple(sink.tokens), sink.cached

    def _kind_seconds(self) -> dict[str, tuple[float, float]]:
        sums: dict[str, tuple[float, float]] = {}
        if isinstance(self._pool, CardPool):
            return sums
        for name, (kernel, barrier) in self._pool.op_seconds().items():
            kind = self._kinds[name]
            before = sums.get(kind, (0.0, 0.0))
            sums[kind] = (before[0] + kernel, before[1] + barrier)
        return sums

    def _card_seconds(self) -> list[float]:
        """Seconds since the start that a rank of the host has worked on the experts of each hand-off, and last those
        that it has waited for the card."""
        if not isinstance(self._pool, CardPool):
            return []
        spent = self._pool.op_seconds()
        waits = [sum(spent.get(f"{name} wait", ())) for name in self._handed_over]
        return [*(sum(spent.get(name, ())) for name in self._handed_over), sum(waits)]

    def _cpu_seconds(self) -> float:
        """What this process and the workers have run on CPUs so far."""
        stats = (Path(f"/proc/{pid}/schedstat").read_text() for pid in self._pool.statistics()["pids"])
        return time.process_time() + sum(int(text.split()[0]) for text in stats) / 1e9

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_on_card(path: str, program: Program, plan: Plan, cache_type: CacheType, progress: Progress) -> CardPool:
    """The workers of a plan with a card, with their times."""
    assert plan.card is not None
    return CardPool.start(
        path,
        program,
        context=plan.context,
        slots=plan.slots,
        prompt_block=plan.prompt_block,
        cache_type=cache_type,
        card=plan.card.number,
        tiers=plan.tiers,
        processes=plan.processes,
        stream_rows=plan.stream_rows,
        stream_tiers=plan.stream_tiers,
        deterministic=plan.deterministic,
        own_weights=plan.host_weights == "copy",
        time_legs=True,
        progress=progress,
        workload=CARD_WORKLOAD,
    )


class _Sink:
    """Gathers one request's events; called in the engine's thread."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.tokens: list[int] = []
        self.cached = 0
        self.finished = 0.0
        self.failure: Failed | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Chunk):
            self.tokens += event.tokens
        elif isinstance(event, Admitted):
            self.cached = event.cached_tokens
        elif isinstance(event, Final | Failed):
            self.finished = time.perf_counter()
            self.failure = event if isinstance(event, Failed) else None
            self.ended.set()


def _total_seconds(statistics: dict[str, float]) -> float:
    return statistics["step_seconds_mean"] * statistics["steps"]
