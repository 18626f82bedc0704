"""The daemon: opens a model, starts an executor, serves clients until it is told to stop, and leaves nothing behind.

Owns the order in which things start and stop, and signals. What runs is others': engine, executor, sockets, placement.
Heavy modules are imported when their turn comes, so that the sockets answer early.

Threads: the main one loads, starts the workers (it must outlive them) and then waits; the engine has one; each of the
two sockets has one; prompts and utility calls are prepared in another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any

from bloomery.runtime.control import ControlSocket
from bloomery.runtime.cpu_limits import session_groups
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.daemon_state import DaemonState
from bloomery.runtime.errors import BloomeryError, PlanError, WorkerLost, system_hint
from bloomery.runtime.facts import Limits, PlanFacts, Welcome
from bloomery.runtime.parent_watch import end_with_parent
from bloomery.runtime.protocol import VERSIONS
from bloomery.runtime.runtime_files import owner_name, socket_path, sweep, unlink_owned
from bloomery.runtime.service import Served, Service
from bloomery.runtime.utility_calls import UtilityCalls

if TYPE_CHECKING:
    from bloomery.runtime.engine import Engine
    from bloomery.runtime.executor import StepExecutor
    from bloomery.runtime.placement import Plan
    from bloomery.runtime.program import Program

log = logging.getLogger(__name__)

DRAIN_SECONDS = 1.0
ENGINE_END_SECONDS = 5.0
CHECK_SECONDS = 1.0
SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from the control socket's thread (Python's default: 5 ms)."""

Progress = Callable[[str, int, int], None]


RAISE_AGAIN_S = 0.02


class Stopped(BaseException):
    """A signal or a shutdown call came while the model was loading."""


def run_daemon(
    config: DaemonConfig,
    *,
    on_ready: Callable[[dict[str, Any]], None],
    progress: Progress = lambda stage, done, total: None,
    parent: int | None = None,
) -> int:
    """Serves a model until SIGTERM, SIGINT or a shutdown call. Returns the exit status: 0, or 128 + the signal's number
    if a signal from outside came before the daemon was ready. Call it in the main thread.

    `on_ready` gets endpoint, control, pid, model, plan, ctx, slots and more; `progress(stage, done, total)` is called
    while the model loads. `parent` is the process to end with, if `config.exit_with_parent` (default: os.getppid()).
    Raises BloomeryError for whatever keeps it from serving.
    """
    from bloomery.runtime.drafts.start import draft_kind, draft_limits
    from bloomery.runtime.placement import check_plan_name

    check_plan_name(config.plan)
    draft_kind(config)
    draft_limits(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sweep()
    with ExitStack() as stack:
        stop = stack.enter_context(StopSwitch())
        if config.exit_with_parent:
            end_with_parent(os.getppid() if parent is None else parent, stop.pull)
        stack.callback(unlink_owned, owner_name())
        try:
            Daemon(config, stop, progress, stack).run(on_ready)
        except Stopped:
            log.info("stopped while loading")
            return 128 + stop.signal if stop.signal else 0
    return 0


class StopSwitch:
    """Turns SIGTERM and SIGINT into an orderly end: an exception while loading, an event afterwards."""

    def __init__(self) -> None:
        self.pulled = threading.Event()
        self.pulls = 0
        self.signal = 0  # the first that came from outside
        self._own = False
        self._loading = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSwitch:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def pull(self) -> None:
        """From any thread."""
        self.pulled.set()
        self._own = True
        os.kill(os.getpid(), signal.SIGTERM)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, a stop raises Stopped in the main thread."""
        previous, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._loading = True
        try:
            self._check()
            yield
        finally:
            self._loading = False
            sys.unraisablehook = previous
        self._check()

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """A stop that came while an object was finalised or in a callback of C code, where Python drops exceptions: it
        is raised again a moment later."""
        if not isinstance(unraisable.exc_value, Stopped):
            sys.__unraisablehook__(unraisable)
            return
        self._loading = True
        threading.Timer(RAISE_AGAIN_S, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def _check(self) -> None:
        if self.pulled.is_set():
            raise Stopped

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.pulls += 1
        self.pulled.set()
        if not self._own:
            self.signal = self.signal or number
        if self._loading:
            self._loading = False  # a second signal must not interrupt the cleaning up after the first
            raise Stopped


class Daemon:
    """One daemon's life. `stack` closes, in reverse order, whatever has been started."""

    def __init__(self, config: DaemonConfig, stop: StopSwitch, progress: Progress, stack: ExitStack) -> None:
        self._config, self._stop, self._stack = config, stop, stack
        self._progress = progress
        self._state = DaemonState()
        self._limits = Limits(queue=config.queue_limit)
        self._fatal: BaseException | None = None
        self._engine: Engine | None = None

    def run(self, on_ready: Callable[[dict[str, Any]], None]) -> None:
        self._listen()  # where a stop is only noted: sockets are bound and registered for closing, or neither
        with self._stop.loading():
            self._load()
        on_ready(self._ready_status())
        self._wait()
        if self._fatal:
            raise self._fatal

    def _listen(self) -> None:
        methods = {
            "status": self._state.status,
            "metrics": self._metrics,
            "drain": self._drain,
            "shutdown": self._stop.pull,
        }
        endpoint, control = endpoints(self._config)
        self._control = ControlSocket(control, methods)
        self._stack.callback(self._control.close)
        self._service = Service(endpoint, self._limits, self._state.loading_details)
        self._stack.callback(self._service.close)
        self._state.facts = {
            "endpoint": self._service.endpoint,
            "control": self._control.endpoint,
            "pid": os.getpid(),
            "version": version("bloomery"),
        }

    def _load(self) -> None:
        from bloomery.runtime.architectures import build_program
        from bloomery.runtime.chat_template import ChatTemplate
        from bloomery.runtime.deepseek_template import chat_template_text
        from bloomery.runtime.drafts.drafting import Drafting
        from bloomery.runtime.drafts.start import draft_kind, draft_limits, draft_taps, start_draft
        from bloomery.runtime.engine import Engine
        from bloomery.runtime.hot_list import check_hot_list, model_name, read_hot_list
        from bloomery.runtime.model_facts import model_facts
        from bloomery.runtime.model_file import ModelFile
        from bloomery.runtime.placement import machine_room, make_plan
        from bloomery.runtime.slot_files import SlotFiles
        from bloomery.runtime.tokenizer import Tokenizer

        self._report("open", 0, 3)
        model = self._stack.enter_context(ModelFile.open(self._config.model))
        program = build_program(model, draft_taps(self._config, model))
        hot = None
        if self._config.hot_list:
            hot = read_hot_list(self._config.hot_list)
            check_hot_list(hot, program)
            if hot.model != model_name(model):
                log.info("%s was made with %s, the model is %s", hot.path, hot.model, model_name(model))
        plan = make_plan(self._config, program, machine_room(self._config.plan, self._config.card_memory), hot)
        self._report("open", 1, 3)
        tokenizer = Tokenizer.from_model_file(model)
        self._report("open", 2, 3)
        template = ChatTemplate.from_model_file(model, tokenizer) if chat_template_text(model) else None
        self._report("open", 3, 3)
        draft, draft_bytes = start_draft(self._config, model, plan, self._start_on_host, self._stack)
        plan, executor = self._start_executor(program, plan)
        self._stack.callback(executor.close)
        max_rows = min(executor.max_rows, executor.max_out_rows)
        engine = Engine(
            executor,
            tokenizer,
            template,
            queue_limit=self._config.queue_limit,
            snapshot_bytes=max(0, plan.term("snapshots") - draft_bytes),
            drafting=Drafting(draft, draft_limits(self._config), max_rows) if draft else None,
            step_ahead=self._config.step_ahead,
        )
        engine.prepare()
        self._start_engine(engine)
        facts = model_facts(model, tokenizer, plan, self._config.alias, draft_kind(self._config))
        welcome = Welcome(
            version=max(VERSIONS),
            server=f"bloomery/{version('bloomery')}",
            control=self._control.endpoint,
            model=facts,
            plan=PlanFacts(plan.name, plan.digest),
            limits=self._limits,
        )
        self._state.facts = {
            **self._state.facts,
            "model": facts.alias,
            "path": facts.path,
            "architecture": facts.architecture,
            "plan": plan.name,
            "plan_digest": plan.digest,
            "executor": "card" if plan.card else self._config.executor,
            "plan_note": plan.note,
            "processes": plan.processes,
            "ctx": plan.context,
            "slots": plan.slots,
            "draft": facts.draft,
            "memory": {term.name: term.nbytes for term in plan.terms} | ({"draft": draft_bytes} if draft_bytes else {}),
        }
        self._state.parts = {"engine": engine.status, "workers": executor.statistics}
        files = SlotFiles(self._config.slot_folder, {"tokenizer": facts.tokenizer_digest, "plan": plan.digest})
        calls = UtilityCalls(tokenizer, template, partial(engine.slot_call, files=files))
        self._service.serve(Served(engine, calls, welcome))
        self._state.state = "ready"

    def _start_executor(self, program: Program, plan: Plan) -> tuple[Plan, StepExecutor]:
        """The plan's executor. With plan auto a card that turns out not to run this model gives way to the host."""
        if plan.card is None:
            if plan.note:  # a machine without a card needs no warning
                from bloomery.runtime.card_probe import may_have_card

                level = logging.WARNING if may_have_card() else logging.INFO
                log.log(level, "running on the host: %s", plan.note)
            return plan, self._start_on_host(self._config, program, plan)
        try:
            return plan, self._start_on_card(program, plan, plan.card.number)
        except PlanError as error:
            if self._config.plan != "auto":
                raise
            from bloomery.runtime.placement import make_plan, memory_room

            room = replace(memory_room(), no_card=error.message)
            return self._start_executor(program, make_plan(self._config, program, room))

    def _start_on_card(self, program: Program, plan: Plan, card: int) -> StepExecutor:
        from bloomery.runtime.card_pool import CardPool

        return CardPool.start(
            self._config.model,
            program,
            context=plan.context,
            slots=plan.slots,
            prompt_block=plan.prompt_block,
            cache_type=self._config.cache_type,
            card=card,
            tiers=plan.tiers,
            processes=plan.processes,
            stream_rows=plan.stream_rows,
            stream_tiers=plan.stream_tiers,
            deterministic=plan.deterministic,
            own_weights=plan.host_weights == "copy",
            progress=self._report,
        )

    def _start_on_host(self, config: DaemonConfig, program: Program, plan: Plan) -> StepExecutor:
        if config.executor == "reference":
            from bloomery.runtime.placement import REFERENCE_WEIGHT_BYTES
            from bloomery.runtime.reference import ReferenceExecutor

            return ReferenceExecutor(
                program,
                context=plan.context,
                slots=plan.slots,
                max_rows=max(plan.prompt_block, plan.slots),
                cache_type=config.cache_type,
                weight_bytes=REFERENCE_WEIGHT_BYTES,
            )
        from bloomery.runtime.host_pool import HostPool
        from bloomery.runtime.worker_messages import EngramOptions

        return HostPool.start(
            config.model,
            program,
            context=plan.context,
            slots=plan.slots,
            processes=plan.processes,
            prompt_block=plan.prompt_block,
            cache_type=config.cache_type,
            progress=self._report,
            engram=EngramOptions(config.engram_cache << 20, config.engram_direct),
            host_weights="copy" if plan.host_weights == "copy" else "mmap",
            mlock=config.mlock,
            yields=config.exit_with_parent or not session_groups(),
        )

    def _start_engine(self, engine: Engine) -> None:
        def run() -> None:
            try:
                engine.run()
            except BaseException as error:
                self._fatal = error
                self._stop.pull()

        thread = threading.Thread(target=run, name="bloomery-engine", daemon=True)

        def end() -> None:
            engine.close()
            thread.join(ENGINE_END_SECONDS)
            if thread.is_alive():
                log.error("the engine did not end within %g s", ENGINE_END_SECONDS)

        self._engine = engine
        self._stack.callback(end)
        thread.start()

    def _wait(self) -> None:
        """Until a stop, or until the engine cannot serve any more. Running requests then get a moment to finish, or all
        the time they need after a drain."""
        engine = self._engine
        assert engine is not None
        while not self._stop.pulled.wait(CHECK_SECONDS):
            if engine.state == "failed":
                raise WorkerLost(str(engine.status()["error"]), "restart the daemon")
        drained = self._state.state == "draining"
        self._state.state = "stopping"
        self._service.refuse_new()
        engine.drain()
        if drained:  # the operator wants what runs to finish, until told otherwise
            while self._stop.pulls < 2 and not engine.wait_idle(CHECK_SECONDS):
                pass
        else:
            engine.wait_idle(DRAIN_SECONDS)

    def _drain(self) -> None:
        """The control method: running requests finish, new ones are refused; the daemon stays until it is stopped."""
        if self._engine is None:
            self._stop.pull()
            return
        self._state.state = "draining"
        self._service.refuse_new()
        self._engine.drain()

    def _report(self, stage: str, done: int, total: int) -> None:
        self._state.report(stage, done, total)
        self._progress(stage, done, total)

    def _metrics(self) -> dict[str, Any]:
        engine = self._engine.metrics() if self._engine else {}
        return {**engine, "service": self._service.counters(), "resident_bytes": resident_bytes()}

    def _ready_status(self) -> dict[str, Any]:
        names = ("endpoint", "control", "pid", "model", "plan", "ctx", "slots", "processes", "executor", "version")
        return {name: self._state.facts[name] for name in names}


def endpoints(config: DaemonConfig) -> tuple[str, str]:
    """Client and control endpoint. Unnamed ones lie in the runtime directory, but the control socket of a named
    Unix-domain endpoint lies beside it, so that it can be found while the model loads."""
    endpoint = config.endpoint or f"ipc://{socket_path('client')}"
    if config.control:
        return endpoint, config.control
    if config.endpoint.startswith("ipc://"):
        return endpoint, f"{endpoint}.control"
    return endpoint, f"ipc://{socket_path('control')}"


def resident_bytes() -> int:
    """Resident set of this process, mapped weights included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def describe_error(error: BaseException) -> dict[str, str]:
    """An error as the parent process gets it (`private_daemon.py` makes an exception of it again)."""
    if isinstance(error, BloomeryError):
        return {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    hint = system_hint(error) or "the log on standard error has the trace"
    return {"type": "", "message": f"{type(error).__name__}: {error}", "hint": hint}
