"""Continuous batching: requests in, events out, one executor step after the other.

Owns queue, running sequences and the order in which they meet the executor. Knows no sockets and no processes. `run`
and everything that touches slots or steps belong to one thread, the engine's; `submit`, `abort`, `hold`, `status`,
`metrics`, `end_reasoning`, `drain` and `close` may be called from any thread and never wait for a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from bloomery.runtime.drafts.drafting import Drafting
from bloomery.runtime.engine_counters import EngineCounters
from bloomery.runtime.errors import RequestError, StepAborted, WorkerLost
from bloomery.runtime.executor import InBlocks, InPieces, InShallow, StepExecutor, StepResult
from bloomery.runtime.requests import Event, Failed, GenerationRequest
from bloomery.runtime.sampling_checks import check_integer
from bloomery.runtime.sampling_tools import SamplingTools
from bloomery.runtime.scheduler import Scheduler
from bloomery.runtime.sequence import Sequence, Sink, Why
from bloomery.runtime.shallow_steps import may_be_shallow
from bloomery.runtime.slot_errands import Errands, as_failure, slot_errand
from bloomery.runtime.slots import SlotPool, Taking
from bloomery.runtime.snapshot_cache import SnapshotCache
from bloomery.runtime.step_rows import step_rows

if TYPE_CHECKING:
    from bloomery.runtime.chat_template import ChatTemplate
    from bloomery.runtime.slot_files import SlotFiles
    from bloomery.runtime.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LARGE_VOCABULARY = 20_000
MOVE_SECONDS = 0.005
"""How long states of slots are copied before each step, while somebody waits for that step; for ALONE_SECONDS, where
nobody does but the copies' own requests, which may be aborted meanwhile."""
ALONE_SECONDS = 0.05

AHEAD_SECONDS: Final = 0.05
"""That steps which nobody looks at may take together."""


class Engine:
    """A request's events go to its sink: from the engine's thread, or, if the request ends before it is admitted, from
    the thread that ended it. A sink must not block; one that raises ends its request."""

    def __init__(
        self,
        executor: StepExecutor,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        queue_limit: int = 64,
        snapshot_bytes: int = 0,
        drafting: Drafting | None = None,
        step_ahead: int = 0,
        ahead_seconds: float = AHEAD_SECONDS,
    ) -> None:
        """`snapshot_bytes`: what states of conversations without a slot may take (`snapshot_cache`). `step_ahead`: how
        many steps may follow one without a look at its tokens, where all are chosen greedily; not so many that they
        take longer than `ahead_seconds`."""
        assert executor.slots <= min(executor.max_rows, executor.max_out_rows)
        self._executor, self._tokenizer, self._template = executor, tokenizer, template
        self._tools, self._drafting = SamplingTools(tokenizer), drafting
        self._queue_limit, self._step_ahead, self._ahead_seconds = queue_limit, step_ahead, ahead_seconds
        self._decode_seconds = 0.0  # of the last step that only generated; 0: there was none
        self._snapshots = SnapshotCache(executor, snapshot_bytes)
        pieces = executor.copy_pieces if isinstance(executor, InPieces) else None
        self._pool = SlotPool(executor.slots, executor.copy_prefix, executor.continuable, self._snapshots, pieces)
        block_rows = executor.stream_rows if isinstance(executor, InBlocks) else 0
        self._shallow_reach = executor.shallow_reach if isinstance(executor, InShallow) else 0
        self._scheduler = Scheduler(executor.max_rows, executor.max_out_rows, block_rows)
        self._counters = EngineCounters(executor.slots)
        self._lock = threading.Lock()  # guards the next five; never held during a step, a copy or a sink's call
        self._preparing: dict[bytes, Why | None] = {}  # being tokenised; with the reason to end, if one came meanwhile
        self._queue: deque[Sequence] = deque()
        self._known: dict[bytes, Sequence] = {}  # queued and running
        self._step_of: tuple[Sequence, ...] = ()  # whom the running step is for, if it may take long
        self._errands = Errands(self._lock)  # what to do with slots once they are idle
        self._running: list[Sequence] = []  # in order of admission; changed by the engine's thread alone
        self._arriving: list[tuple[Sequence, Taking]] = []  # out of the queue; their slots are being made ready
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._interrupted = self._draining = self._closed = self._recovering = False
        self._defect: RequestError | None = None
        self._started = time.monotonic()

    # Called from any thread.

    def prepare(self) -> None:
        """Does ahead of time what the first constrained request would hold up other requests with."""
        if self._tokenizer.vocabulary > LARGE_VOCABULARY:
            self._tools.constraints.prepare()

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queues a request, or fails it at once. Renders and tokenises the prompt in the calling thread (up to a second
        for megabytes of text): a thread that must not wait leaves the call to another."""
        try:
            sequence = self._prepare(request, sink)
        except Exception as error:
            failure = as_failure(error)
            self._counters.ended(failure.code)
            sink(Failed(request.request_id, failure.code, failure.message, failure.hint, failure.details))
            return
        if sequence.interrupted:
            self._deliver(sequence, sequence.interrupt(sequence.interrupted))
        else:
            self._wake.set()

    def abort(self, request_id: bytes, failure: RequestError | None = None) -> bool:
        """Ends a request: Final(reason="aborted"), or Failed if a failure is given. A queued one ends at once, a
        running one after the step; a prompt step or steps ahead that serve no other request are cut short. False if it
        is unknown."""
        why: Why = failure or "aborted"
        with self._lock:
            if request_id in self._preparing:
                self._preparing[request_id] = self._preparing[request_id] or why
                return True
            sequence = self._known.get(request_id)
            if sequence is None:
                return False
            sequence.interrupted = sequence.interrupted or why
            queued = sequence in self._queue
            if queued:
                self._queue.remove(sequence)
            elif self._step_of and all(other.interrupted for other in self._step_of):
                self._executor.abort()
            self._interrupted = True
        if queued:
            self._deliver(sequence, sequence.interrupt(sequence.interrupted))
        self._wake.set()
        return True

    def hold(self, request_id: bytes, held: bool) -> bool:
        """Keeps a request's rows out of steps, or lets them in again (its reader lags behind). It keeps its slot."""
        sequence = self._known.get(request_id)
        if sequence is not None:
            sequence.on_hold = held
            self._wake.set()
        return sequence is not None

    def end_reasoning(self, request_id: bytes) -> bool:
        """Brings the reasoning of a request to its end with its next token; False if there is none that runs."""
        sequence = self._known.get(request_id)
        return sequence is not None and sequence.end_reasoning()

    def drain(self) -> None:
        """No new requests: queued ones fail, running ones are finished. `wait_idle` tells when."""
        self._draining = True
        self._fail_queued(shutting_down())

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Waits until no request is queued or running; False after the time-out (seconds)."""
        return self._idle.wait(timeout)

    def close(self) -> None:
        """Ends every request and `run`. The executor stays open; it belongs to the caller."""
        self._closed = True
        self._fail_queued(shutting_down())
        self._executor.abort()
        self._wake.set()

    @property
    def state(self) -> str:
        """ready, loading (lost workers are being replaced), draining or failed (`status` has the message)."""
        if self._defect:
            return "failed"
        if self._draining or self._closed:
            return "draining"
        return "loading" if self._recovering else "ready"

    def status(self) -> dict[str, Any]:
        """What is going on now; plain values. Read without a lock, so neighbours may differ by one step."""
        owners = {sequence.slot.index: sequence for sequence in tuple(self._running) if sequence.slot}
        return {
            "state": self.state,
            "error": self._defect.message if self._defect else "",
            "uptime_seconds": time.monotonic() - self._started,
            "slots": [
                {
                    "slot": slot.index,
                    "context": self._executor.context,
                    "cached": slot.count,
                    **(owners[slot.index].status() if slot.index in owners else {"request": ""}),
                }
                for slot in self._pool.slots
            ],
            "snapshots": self._snapshots.statistics(),
            "queue": len(self._queue) + len(self._preparing),
            "queue_limit": self._queue_limit,
            "steps": self._counters.steps,
            "prompt_tokens_per_second": self._scheduler.prompt_rate,
            "generated_tokens_per_second": self._counters.generation_rate,
            **({"draft": self._drafting.statistics()} if self._drafting else {}),
        }

    def metrics(self) -> dict[str, Any]:
        """Counters since the start and gauges; plain values, names of their units (tokens, seconds, steps)."""
        return {
            **self._counters.values(),
            **(self._drafting.counts() if self._drafting else {}),
            "queue_depth": len(self._queue) + len(self._preparing),
            "running": len(self._running) + len(self._arriving),
            "slots": len(self._pool.slots),
            "cache_tokens_used": self._pool.held_tokens,
            "cache_tokens_total": len(self._pool.slots) * self._executor.context,
            "snapshots": self._snapshots.statistics(),
            "executor": self._executor.statistics(),
        }

    def slot_call(self, action: str, index: int, name: str, files: SlotFiles) -> Future[dict[str, Any]]:
        """save, restore or erase a slot once it is idle; `name` is that of a file. The future gets the number of
        tokens, for files also bytes and seconds. Raises RequestError at once for what cannot be meant."""
        check_integer("slot", index, 0, len(self._pool.slots) - 1)
        errand = slot_errand(action, self._pool.slots[index], name, files, self._executor)

        def ready() -> None:
            with self._lock:
                self._check_open()
                self._errands.add(errand)
            self._wake.set()

        errand.prepare(ready)
        return errand.result

    # The engine's thread.

    def run(self) -> None:
        """Serves requests in the calling thread until `close`."""
        try:
            while True:
                self._wake.clear()
                if not self.turn():
                    if self._closed:
                        return
                    self._wake.wait()
        except BaseException as error:
            self._give_up(as_failure(error))
            raise

    def turn(self) -> bool:
        """Ends interrupted requests, admits waiting ones, runs one step. False if there was nothing to run."""
        if self._closed:
            self._end_running(shutting_down())
            return False
        if self._interrupted:
            self._interrupted = False
            self._turn_away(lambda sequence: sequence.interrupted)
            for sequence in tuple(self._running):
                if sequence.interrupted:
                    self._deliver(sequence, sequence.interrupt(sequence.interrupted))
        if self._errands:
            self._errands.run(self._copy_seconds())
        if self._queue:
            self._admit()
        if self._arriving:
            self._make_ready()
        parts = self._scheduler.plan(self._running, bool(self._queue or self._arriving))
        if not parts:
            return self._interrupted or bool(self._arriving) or self._errands.copying  # interrupted by a sink, just now
        prompt_rows = sum(rows for sequence, rows in parts if sequence.rows_left > 1)
        streams = sum(sequence.rows_left == 1 for sequence, _ in parts)
        if self._drafting and not prompt_rows:
            parts = self._drafting.extend(parts)
        out_rows = [sequence.out_rows(rows) for sequence, rows in parts]
        ahead = 0 if prompt_rows or self._drafting else self._ahead_of(parts)
        result = self._step(parts, out_rows, prompt_rows > 0, ahead)
        if result is None:
            return True
        rows_in_all = sum(rows for _, rows in parts) * (1 + ahead)
        self._scheduler.observe(rows_in_all, prompt_rows, streams, result.seconds)
        if not prompt_rows:
            self._decode_seconds = result.seconds / (1 + ahead)
        longest = max(sequence.length for sequence, _ in parts)
        self._counters.step(rows_in_all, prompt_rows, result.seconds, len(parts), longest)
        first = generated = 0
        for number, (sequence, _) in enumerate(parts) if ahead else ():
            mine = slice(number, None, len(parts))
            before = sequence.generated
            self._deliver(sequence, sequence.accept_ahead(result.logits[mine], result.greedy[mine]))
            generated += sequence.generated - before
        for (sequence, rows), outs in zip(parts, out_rows, strict=True) if not ahead else ():
            logits, greedy = result.logits[first : first + outs], result.greedy[first : first + outs]
            hidden = None if result.hidden is None else result.hidden[first : first + outs]
            first += outs
            self._counters.prompt_tokens += min(rows, sequence.prompt_left)
            before = sequence.generated
            self._deliver(sequence, sequence.accept(rows, logits, greedy, hidden))
            generated += sequence.generated - before
        self._counters.generated(generated, prompt_rows, result.seconds)
        if self._drafting and not prompt_rows:
            self._drafting.learn(parts, result.seconds)
        return True

    def _ahead_of(self, parts: list[tuple[Sequence, int]]) -> int:
        """How many steps may follow that of these streams: none that would keep a waiting request waiting, and none as
        long as nobody knows how long one takes, since whoever comes meanwhile waits for all."""
        if not self._step_ahead or not self._decode_seconds or self._queue or self._arriving or self._errands:
            return 0
        room = min(sequence.ahead_room for sequence, _ in parts)
        room = int(min(room, self._step_ahead, self._ahead_seconds / self._decode_seconds))
        return min(room, self._executor.most_ahead(len(parts))) if room else 0

    def _is_shallow(self, parts: list[tuple[Sequence, int]], out_rows: list[int]) -> bool:
        """Whether all rows are of prompts that go on so far that nothing near reads what these rows have in windows,
        from the end of the prompt or from BACK positions before it. Who drafts may want every row."""
        if self._drafting or any(out_rows):
            return False
        return all(may_be_shallow(sequence.prompt_left - rows, self._shallow_reach) for sequence, rows in parts)

    def _prepare(self, request: GenerationRequest, sink: Sink) -> Sequence:
        request_id = request.request_id
        with self._lock:
            self._check_open()
            if request_id in self._known or request_id in self._preparing:
                raise RequestError("duplicate_request", f"request {request_id.hex()} is already being served")
            waiting, idle = len(self._queue) + len(self._preparing), self._pool.idle
            if waiting >= self._queue_limit + idle:
                raise RequestError(
                    "overloaded",
                    f"{waiting} requests wait for {len(self._pool.slots)} slots, the queue holds {self._queue_limit}",
                    "try again after retry_after_s seconds",
                    retry_after_s=self._counters.wait_estimate(waiting),
                    limit=self._queue_limit,
                    queued=waiting,
                )
            self._preparing[request_id] = None
            self._idle.clear()
        try:
            context, slots = self._executor.context, self._executor.slots
            sequence = Sequence(request, sink, self._tokenizer, self._template, context, slots, self._tools)
        except BaseException:
            with self._lock:
                del self._preparing[request_id]
                self._note_idle()
            raise
        with self._lock:
            sequence.interrupted = self._preparing.pop(request_id)
            self._note_idle()
            self._check_open()
            if sequence.interrupted is None:
                self._known[request_id] = sequence
                self._queue.append(sequence)
                self._idle.clear()
        return sequence

    def _check_open(self) -> None:
        if self._defect:
            raise self._defect
        if self._draining or self._closed:
            raise shutting_down()

    def _admit(self) -> None:
        """First come, first served: fills idle slots from the queue. Who asks for a busy slot lets others pass."""
        while True:
            with self._lock:
                able = (sequence for sequence in self._queue if self._pool.can_take(sequence.request.slot))
                sequence = next(able, None)
                if sequence is None:
                    return
                self._queue.remove(sequence)
            wanted = sequence.request.slot
            taking = self._pool.take(sequence.tokens, sequence.prompt_length, sequence.reuse, wanted)
            self._arriving.append((sequence, taking))

    def _make_ready(self) -> None:
        """Goes on with the slots of who arrives, first come, first served, for as long as the running ones can wait.
        Whose slot is ready as it is does not wait for others' copies."""
        end, copied = time.perf_counter() + self._copy_seconds(), False
        for arrival in tuple(self._arriving):
            sequence, taking = arrival
            left = end - time.perf_counter()
            if taking.copies and left <= 0 and copied:
                continue
            copied = copied or taking.copies
            try:
                ready = taking.advance(left)
            except WorkerLost as error:
                self._arriving.remove(arrival)
                self._running.append(sequence)  # ends with all the others
                return self._recover(error)
            except Exception as error:
                self._arriving.remove(arrival)
                self._deliver(sequence, sequence.interrupt(as_failure(error)))
                continue
            if not ready:
                continue
            self._arriving.remove(arrival)
            self._running.append(sequence)
            taking.slot.steady = not sequence.request.context_shift
            self._counters.cached_tokens += taking.cached
            self._deliver(sequence, [sequence.start(taking.slot, taking.cached)])

    def _turn_away(self, why: Callable[[Sequence], Why | None]) -> None:
        """Ends those who arrive for whom there is a reason."""
        for arrival in tuple(self._arriving):
            sequence, taking = arrival
            if reason := why(sequence):
                self._arriving.remove(arrival)
                taking.cancel()
                self._deliver(sequence, sequence.interrupt(reason))

    def _copy_seconds(self) -> float:
        return ALONE_SECONDS if all(sequence.held for sequence in self._running) else MOVE_SECONDS

    def _step(
        self, parts: list[tuple[Sequence, int]], out_rows: list[int], prompt: bool, ahead: int
    ) -> StepResult | None:
        """Runs a step; None if it has no result. Nothing is recorded of such a step: its rows are computed again. One
        with prompt rows, or that others follow, is cut short once nobody wants it any more."""
        rows = step_rows(parts, out_rows, ahead, self._is_shallow(parts, out_rows))
        long = prompt or ahead > 0
        if long:
            with self._lock:
                self._step_of = tuple(sequence for sequence, _ in parts)
                if self._closed or all(sequence.interrupted for sequence in self._step_of):
                    self._step_of = ()
                    return None
                self._executor.announce()  # an abort from here on is not lost
        try:
            result = self._executor.step(rows)
            if self._drafting:
                self._drafting.observe(rows, result)
            return result
        except StepAborted:
            self._counters.aborted_steps += 1
        except WorkerLost as error:
            self._recover(error)
        except Exception as error:
            failure = as_failure(error)
            for sequence, _ in parts:
                self._deliver(sequence, sequence.interrupt(failure))
        finally:
            if long:
                with self._lock:
                    self._step_of = ()
        return None

    def _deliver(self, sequence: Sequence, events: Iterable[Event]) -> None:
        """Passes events on. Whatever goes wrong with one request, in its sampling or in its sink, ends that request."""
        try:
            for event in events:
                if event is sequence.ended:
                    self._forget(sequence)
                sequence.sink(event)
        except Exception as error:
            failure = as_failure(error)
            if sequence.ended is None:
                self._deliver(sequence, sequence.interrupt(failure))

    def _forget(self, sequence: Sequence) -> None:
        """Frees what an ended request holds, before its last event is sent."""
        assert sequence.ended is not None
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence.slot:
            self._pool.release(sequence.slot)
        self._counters.ended(sequence.ended)
        with self._lock:
            self._known.pop(sequence.request_id, None)
            self._note_idle()

    def _note_idle(self) -> None:
        if not self._known and not self._preparing:
            self._idle.set()

    def _recover(self, error: WorkerLost) -> None:
        log.error("a worker was lost: %s", error)
        self._recovering = True
        self._end_running(RequestError("worker_lost", error.message, "it is being replaced: send the request again"))
        try:
            self._executor.recover()
            self._counters.recoveries += 1
        except Exception as failed:
            message = f"lost workers could not be replaced: {failed}"
            self._give_up(RequestError("worker_lost", message, "restart the daemon"))
        self._recovering = False

    def _give_up(self, failure: RequestError) -> None:
        """Nothing can be served any more; `status` says so."""
        self._defect = failure
        self._end_running(failure)
        self._fail_queued(failure)

    def _end_running(self, failure: RequestError) -> None:
        self._turn_away(lambda sequence: sequence.interrupted or failure)
        self._errands.fail(failure, begun=True)
        for sequence in tuple(self._running):
            self._deliver(sequence, sequence.interrupt(sequence.interrupted or failure))

    def _fail_queued(self, failure: RequestError) -> None:
        with self._lock:
            queued, self._queue = tuple(self._queue), deque()
        self._errands.fail(failure, begun=False)
        for sequence in queued:
            self._deliver(sequence, sequence.interrupt(failure))


def shutting_down() -> RequestError:
    return RequestError("shutting_down", "the daemon is shutting down", "send the request to another one or try later")
