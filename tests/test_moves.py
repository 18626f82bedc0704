"""States of slots are copied in pieces between steps: running streams go on, and nothing is lost or mixed up.

Planted once and seen to fail: everything copied at once; a source handed out while it is being copied; rows claimed
before the last piece; memory of a copy that was broken off not given back; a slot that lost its conversation although
nothing had been written into it yet; a slot handed out while it is saved; a file written by the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_client import GREEDY, Client, exhaust
from test_snapshot_cache import STATES, Stored
from toy_model import MASK, TOKENIZER, VOCABULARY, ToyExecutor, solo

from bloomery.runtime import engine as engine_module
from bloomery.runtime import slot_states
from bloomery.runtime.engine import Engine
from bloomery.runtime.errors import RequestError, WorkerLost
from bloomery.runtime.executor import InPieces, StateSnapshot
from bloomery.runtime.requests import GenerationRequest
from bloomery.runtime.slots import SlotPool

PIECE = 16


class PiecesToy(ToyExecutor):
    """Copies 16 positions at a time; `pieces` counts, `at` is called before each with its number."""

    pieces = 0

    def at(self, piece: int) -> None:
        pass

    def _steps(self, positions: int) -> Iterator[slice]:
        for first in range(0, positions, PIECE):
            self.pieces += 1
            self.at(self.pieces)
            yield slice(first, min(first + PIECE, positions))

    def _scramble(self, slot: int, positions: int) -> None:
        self.states[slot, :positions] = self.noise.integers(1, MASK, size=positions, dtype=np.uint64)

    def copy_pieces(self, source: int, target: int, positions: int) -> Generator[None, None, None]:
        self._scramble(target, positions)
        self.copies.append((source, target, positions))
        for part in self._steps(positions):
            self.states[target, part] = self.states[source, part]
            yield

    def snapshot_pieces(self, slot: int, positions: int, reach: int = 0) -> Generator[None, None, StateSnapshot]:
        rows = np.zeros(positions, np.uint64)
        for part in self._steps(positions):
            rows[part] = self.states[slot, part]
            yield
        return StateSnapshot(positions, {"states": rows}, reach)

    def restore_pieces(
        self, slot: int, snapshot: StateSnapshot, positions: int | None = None
    ) -> Generator[None, None, None]:
        positions = snapshot.positions if positions is None else positions
        self._scramble(slot, positions)
        for part in self._steps(positions):
            self.states[slot, part] = snapshot.rows["states"][part]
            yield


@pytest.fixture(autouse=True)
def one_piece_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MOVE_SECONDS", 0.0)
    monkeypatch.setattr(engine_module, "ALONE_SECONDS", 0.0)


class Stand:
    def __init__(self, slots: int = 2, limit: int = 1 << 20) -> None:
        self.executor = PiecesToy(slots=slots, context=900, max_rows=64, max_out_rows=64)
        assert isinstance(self.executor, InPieces)
        self.client = Client(Engine(self.executor, TOKENIZER, None, snapshot_bytes=limit))
        self.asked: dict[bytes, GenerationRequest] = {}

    def ask(self, prompt: tuple[int, ...], count: int, **fields: Any) -> bytes:
        request_id = self.client.submit(prompt, max_tokens=count, ignore_eos=True, **fields)
        self.asked[request_id] = GenerationRequest(
            request_id, tokens=prompt, max_tokens=count, sampling=GREEDY, ignore_eos=True
        )
        return request_id

    def settle(self, *requests: bytes) -> None:
        """Each of them says what it says alone."""
        exhaust(self.client)
        for request_id in requests:
            assert self.client.tokens(request_id) == solo(self.asked[request_id], 900, 0).tokens

    def slots(self) -> list[dict[str, Any]]:
        return list(self.client.engine.status()["slots"])


def prompt(seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, VOCABULARY, count).tolist())


def test_streams_go_on_while_a_conversation_is_put_aside_and_brought_back() -> None:
    stand = Stand()
    old = prompt(1, 400)
    first = stand.ask(old, 3)
    stand.settle(first)
    stream = stand.ask(prompt(2, 20), 300)
    for _ in range(20):
        stand.client.engine.turn()
    assert not stand.executor.pieces, "there was another slot"
    other = stand.ask(prompt(3, 30), 2)
    steps = len(stand.executor.history)
    stand.client.engine.turn()
    assert stand.slots()[0]["cached"] == 0, "nothing is claimed of a slot that is being made ready"
    while stand.client.last(other) is None:
        stand.client.engine.turn()
    assert stand.executor.pieces == -(-402 // PIECE)
    during = stand.executor.history[steps:]
    assert len(during) >= stand.executor.pieces and all((1, rows) for step in during for _, _, rows in step)
    assert sum(any(slot == 1 for slot, _, _ in step) for step in during) == len(during), "the stream is in every step"
    back = stand.ask((*old, 5), 4)
    while stand.client.last(back) is None:
        stand.client.engine.turn()
    assert stand.client.final(back).cached_tokens == 400
    stand.settle(stream, other, back)


def test_what_is_copied_from_is_nobody_elses_meanwhile() -> None:
    """Three slots: a stream, a long conversation, an old one. A copy of the long one's beginning goes to the old one's
    slot; whoever comes next has to wait for the long one's slot."""
    stand = Stand(slots=3, limit=0)
    long, old = prompt(1, 500), prompt(2, 100)
    for tokens in (old, long):
        stand.settle(stand.ask(tokens, 2))
    stream = stand.ask(prompt(3, 20), 200)
    stand.client.engine.turn()
    fork = stand.ask((*long[:300], 7, 7), 3)
    stand.client.engine.turn()
    next_one = stand.ask(prompt(4, 250), 3)
    while stand.client.last(next_one) is None:
        assert stand.client.engine.turn()
        if not any(slot["request"] == fork.hex() for slot in stand.slots()) and stand.client.last(fork) is None:
            assert not any(slot["request"] == next_one.hex() for slot in stand.slots()), "taken while it was copied"
    assert stand.executor.copies == [(1, 0, 300)] and stand.client.final(fork).cached_tokens == 300
    stand.settle(stream, fork, next_one)


def test_a_busy_source_is_copied_while_it_goes_on() -> None:
    stand = Stand(slots=2, limit=0)
    shared = prompt(1, 320)
    running = stand.ask((*shared, 3), 200)
    while stand.slots()[0]["cached"] < 330:
        stand.client.engine.turn()
    fork = stand.ask((*shared, 4), 5)
    steps = len(stand.executor.history)
    while stand.client.last(fork) is None:
        stand.client.engine.turn()
    assert stand.executor.copies == [(0, 1, 320)] and len(stand.executor.history) - steps >= 320 // PIECE
    stand.settle(running, fork)


def test_a_source_that_may_shift_is_copied_at_once() -> None:
    stand = Stand(slots=2, limit=0)
    shared = prompt(1, 320)
    running = stand.ask((*shared, 3), 200, context_shift=True)
    while stand.slots()[0]["cached"] < 330:
        stand.client.engine.turn()
    fork = stand.ask((*shared, 4), 5)
    stand.client.engine.turn()
    assert stand.executor.copies == [(0, 1, 320)] and not stand.executor.pieces
    stand.settle(running, fork)


@pytest.mark.parametrize("after", [1, 10, 24, 27, 40])
def test_a_request_that_goes_away_meanwhile(after: int) -> None:
    """While its slot's conversation is put aside (25 pieces), the slot keeps it; while another is brought in, it is
    empty. Memory is what is kept, and later requests are served as ever."""
    stand = Stand(slots=1)
    first, second = prompt(1, 390), prompt(2, 390)
    for tokens in (first, second):
        stand.settle(stand.ask(tokens, 2))
    assert stand.client.engine.metrics()["snapshots"]["snapshots"] == 1
    kept, pieces = stand.client.engine.metrics()["snapshots"]["bytes"], stand.executor.pieces
    leaving = stand.ask((*first, 5), 3)
    while stand.executor.pieces < pieces + after:
        stand.client.engine.turn()
    stand.client.abort(leaving)
    exhaust(stand.client)
    assert stand.client.final(leaving).reason == "aborted" and not stand.client.tokens(leaving)
    figures = stand.client.engine.metrics()["snapshots"]
    putting_aside = after <= 25
    assert figures["snapshots"] == (1 if putting_aside else 2)
    assert (figures["bytes"] == kept) is putting_aside and figures["bytes"] <= figures["limit_bytes"]
    assert stand.slots()[0]["cached"] == (391 if putting_aside else 0) and not stand.slots()[0]["request"]
    again, other = stand.ask((*second, 4), 3), stand.ask((*first, 5), 3)
    stand.settle(again, other)
    assert stand.client.final(again).cached_tokens >= 390 - 1


def test_a_worker_that_dies_meanwhile_ends_who_waits_for_the_copy() -> None:
    stand = Stand(slots=1)
    stand.settle(stand.ask(prompt(1, 390), 2))
    pieces = stand.executor.pieces

    def die(piece: int) -> None:
        if piece == pieces + 7:
            stand.executor.broken = True
            raise WorkerLost("worker 0 has died", "")

    stand.executor.at = die  # type: ignore[method-assign]
    failed = stand.ask(prompt(2, 50), 2)
    exhaust(stand.client)
    assert stand.client.failure(failed).code == "worker_lost" and stand.executor.recoveries == 1
    assert stand.client.engine.metrics()["snapshots"]["bytes"] == 0
    stand.settle(stand.ask(prompt(3, 50), 2))


def test_two_arrive_at_once() -> None:
    stand = Stand(slots=2, limit=1 << 20)
    for seed in (1, 2):
        stand.settle(stand.ask(prompt(seed, 200), 1))
    for seed in (3, 4):  # both slots have a conversation, both are put aside
        stand.settle(stand.ask(prompt(seed, 200), 1))
    both = [stand.ask((*prompt(seed, 200), 9), 4) for seed in (1, 2)]
    stand.settle(*both)
    assert [stand.client.final(one).cached_tokens for one in both] == [200, 200]
    figures = stand.client.engine.metrics()["snapshots"]
    assert figures["bytes"] <= figures["limit_bytes"] and figures["hits"] == 2


def test_a_source_whose_rings_have_gone_on_is_not_copied() -> None:
    allowed = [range(0, 400), range(0, 400)]
    pool = SlotPool(2, lambda *_: pytest.fail("copied"), lambda slot: allowed[slot])
    source = pool.slots[0]
    source.tokens, source.count, source.busy, source.steady = np.arange(300, dtype=np.int32), 300, True, True
    tokens = np.arange(200, dtype=np.int32)
    taking = pool.take(tokens, 200, True)
    assert (taking.slot.index, taking.cached, source.lent) == (1, 199, 1)
    allowed[0] = range(250, 400)
    assert taking.advance(1.0) and taking.cached == 0 == taking.slot.count and source.lent == 0


def test_pieces_of_states_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_states, "PIECE_BYTES", 40)  # five rows
    source = Stored()
    source.run(0, 33)
    pieces = source.states.snapshot_pieces(0, 33, 7)
    count = 0
    try:
        while True:
            next(pieces)
            count += 1
    except StopIteration as end:
        taken = end.value
    whole = source.states.snapshot(0, 33, 7)
    assert count > len(STATES) and taken.rows.keys() == whole.rows.keys()
    assert all(np.array_equal(taken.rows[name], whole.rows[name]) for name in whole.rows)
    for position in (26, 30, 33):
        target = Stored(spare=9)
        for _ in target.states.restore_pieces(1, taken, position):
            assert target.states.reach.continuable(1) == range(1), "nothing is there before the last piece"
        assert target.holds(1, position) and target.states.reach.continuable(1).stop == position + 1
    for _ in source.states.copy_pieces(0, 1, 31):
        pass
    assert source.holds(1, 31) and source.states.reach.continuable(1).stop == 32
    with pytest.raises(ValueError, match="goes on at 26 to 33"):
        next(source.states.restore_pieces(1, taken, 25))


class Files:
    """Slot files whose disk waits until it is told."""

    def __init__(self) -> None:
        self.disk = threading.Event()
        self.kept: dict[str, Any] = {}

    def path(self, name: str) -> Path:
        return Path(name)

    def save(self, path: Path, tokens: Any, snapshot: StateSnapshot) -> dict[str, Any]:
        assert self.disk.wait(20)
        self.kept[path.name] = tokens, snapshot
        return {"tokens": len(tokens), "bytes": 1, "seconds": 0.0}

    def load(self, path: Path, context: int) -> Any:
        assert self.disk.wait(20)
        return (*self.kept[path.name], 1)


def until(stand: Stand, done: Callable[[], bool]) -> int:
    """Turns until then, and how many."""
    deadline, turns = time.monotonic() + 20, 0
    while not done():
        assert time.monotonic() < deadline
        turns += stand.client.engine.turn()
    return turns


def test_slots_are_saved_and_brought_back_between_steps() -> None:
    """A stream goes on while 400 positions are copied, and while the disk takes its time; the slot is nobody's during
    the copy, and what comes back is what was saved."""
    stand, files = Stand(), Files()
    engine, old = stand.client.engine, prompt(1, 400)
    stand.settle(stand.ask(old, 3))
    stream = stand.ask(prompt(2, 20), 500)
    until(stand, lambda: len(stand.client.tokens(stream)) > 5)
    saved = engine.slot_call("save", 0, "one", files)  # type: ignore[arg-type]
    waiting = stand.ask(prompt(3, 30), 2)
    for _ in range(10):
        engine.turn()
    assert 5 <= stand.executor.pieces <= 11 and not stand.slots()[0]["request"], "the slot is taken when it is free"
    steps = len(stand.executor.history)
    until(stand, lambda: stand.client.last(waiting) is not None)
    assert len(stand.executor.history) > steps + 15 and not saved.done(), "nobody waits for the disk"
    files.disk.set()
    assert saved.result(20)["tokens"] == 402
    erased = engine.slot_call("erase", 0, "", files)  # type: ignore[arg-type]
    restored = engine.slot_call("restore", 0, "one", files)  # type: ignore[arg-type]
    pieces = stand.executor.pieces
    until(stand, lambda: restored.done())
    assert erased.result()["tokens"] and restored.result()["tokens"] == 402 == stand.slots()[0]["cached"]
    assert stand.executor.pieces - pieces >= 400 // PIECE
    again = stand.ask((*old, 5), 3)
    stand.settle(stream, waiting, again)
    assert stand.client.final(again).cached_tokens == 400


def test_errands_that_are_broken_off_end_with_the_reason() -> None:
    stand, files = Stand(), Files()
    stand.settle(stand.ask(prompt(1, 400), 3))
    begun = stand.client.engine.slot_call("save", 0, "one", files)  # type: ignore[arg-type]
    behind = stand.client.engine.slot_call("erase", 0, "", files)  # type: ignore[arg-type]
    stand.client.engine.turn()
    assert stand.executor.pieces == 1 and not begun.done() and not behind.done()
    stand.client.engine.close()
    assert not stand.client.engine.turn()
    for future in (begun, behind):
        with pytest.raises(RequestError, match="shutting down"):
            future.result(0)
    missing = Stand().client.engine.slot_call("restore", 0, "never", files)  # type: ignore[arg-type]
    files.disk.set()
    with pytest.raises(RequestError, match="KeyError"):
        missing.result(20)
