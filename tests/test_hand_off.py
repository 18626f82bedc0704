"""Experts on the host in the step of a card: the real workers and their kernels, the card's side played in NumPy."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from oracle_data import host_band, quantised_file
from pool_kit import left_behind, worker_environment
from running import evaluate, greedy, rows_of

from bloomery.runtime.architectures import build_program
from bloomery.runtime.arena import ArenaLayout, ArenaShape, Lowered
from bloomery.runtime.card_pool import CardPool
from bloomery.runtime.divergence import divergence
from bloomery.runtime.errors import StepAborted, WorkerLost
from bloomery.runtime.expert_tiers import ExpertTiers, routed_ops
from bloomery.runtime.hand_off import RANK_FLAGS, target
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.ops_hand_off import HandOffAnswer, HandOffReceive, HandOffSend, HandOffWait
from bloomery.runtime.program import Program, RoutedExperts, op_views
from bloomery.runtime.reference import ReferenceExecutor
from bloomery.runtime.split_program import card_part, host_part
from bloomery.runtime.step_record import LINE

NAMES = ("qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M")
TOKENS = list(np.random.default_rng(5).integers(1, 60, 12))


def program_of(name: str) -> Program:
    return build_program(ModelFile.open(quantised_file(name)))


def tiers_of(program: Program, share: float) -> ExpertTiers:
    """About this share of each layer's experts on the card, the first and the last layer less and more."""
    everything = ExpertTiers.everything(program)
    rng = np.random.default_rng(int(100 * share))
    on_card = {
        layer.gate: tuple(int(i) for i in np.flatnonzero(rng.random(layer.experts) < share))
        for layer in everything.layers
    }
    return ExpertTiers(everything.layers, on_card)


@contextmanager
def open_pool(name: str, tiers: ExpertTiers | None, **options: Any) -> Iterator[CardPool]:
    settings = {"context": 64, "slots": 2, "prompt_block": 12, "cache_type": "f32", "processes": 1, **options}
    pool = CardPool.start(
        str(quantised_file(name)), program_of(name), tiers=tiers, workload="stand_in_card:load", **settings
    )
    try:
        yield pool
    finally:
        pool.close()
        assert not left_behind()


@pytest.fixture(autouse=True)
def find_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", NAMES)
def test_any_placement_gives_the_same_answer(name: str) -> None:
    """Logits inside the band of an engine that rounds activations (here only those of the host's experts) around the
    whole program's, at 0 and 50 % on the card; steps of one row and of groups."""
    program = program_of(name)
    wanted = evaluate(ReferenceExecutor(program, context=64), TOKENS)
    for share, processes in ((0.0, 1), (0.5, 2)):
        with open_pool(name, tiers_of(program, share), processes=processes) as pool:
            found = evaluate(pool, TOKENS, block=12)
            again = evaluate(pool, TOKENS[:3], block=1, slot=1)
            steps = pool.statistics()["steps"]
        together = divergence(np.concatenate([wanted, wanted[:3]]), np.concatenate([found, again]))
        print(name, share, together)
        median, mean = host_band(name)
        assert 0 < together.kl_median <= median and together.kl_mean <= mean
        assert steps == 2 + 3, "12 rows run as 8 + 4"


def test_neither_the_number_of_processes_nor_where_their_weights_lie_changes_a_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor whether ranks help each other, by rows of one step and by steps of one row."""
    name = NAMES[0]
    tiers = tiers_of(program_of(name), 0.3)
    found: list[np.ndarray] = []
    alone: list[np.ndarray] = []
    seen: list[tuple[str, int, int]] = []
    for processes, own, lend in ((1, False, 0), (3, False, 0), (2, True, 0), (2, True, 1)):
        monkeypatch.setenv("BLOOMERY_LEND", str(lend))
        seen.clear()
        progress = {"progress": lambda *facts: seen.append(facts)}
        with open_pool(name, tiers, processes=processes, own_weights=own, **progress) as pool:
            found.append(evaluate(pool, TOKENS[:9], block=4))
            facts = pool.statistics().get("weights")
            if own:
                os.kill(pool.statistics()["pids"][0], signal.SIGKILL)
                with pytest.raises(WorkerLost):
                    evaluate(pool, TOKENS[:9], block=1, slot=1)
                pool.recover()
                found.append(evaluate(pool, TOKENS[:9], block=4))
            alone.append(evaluate(pool, TOKENS[:9], block=1, slot=1))
        assert (facts is not None) == own == any(stage == "weights" for stage, _, _ in seen)
        if facts:
            assert facts["place"] == "private" and 0 <= sum(facts["bytes"].values()) - tiers.host_bytes < 1 << 16
    for each in (found, alone):
        for other in each[1:]:
            assert (each[0] == other).all()


def test_a_killed_host_worker_ends_the_step_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card waits for its flag inside the step; the survivors keep their slots."""
    monkeypatch.setenv("STAND_IN", "slow")
    name = NAMES[0]
    with open_pool(name, tiers_of(program_of(name), 0.3), processes=2) as pool:
        first = evaluate(pool, TOKENS[:2], block=2)
        host, other, card = pool.statistics()["pids"]
        sent: list[float] = []

        def kill() -> None:
            sent.append(time.monotonic())
            os.kill(host, signal.SIGKILL)

        threading.Timer(0.15, kill).start()
        with pytest.raises(WorkerLost, match=rf"worker 0 \(pid {host}\) was killed by SIGKILL"):
            pool.step(rows_of(TOKENS[:8]))
        assert time.monotonic() - sent[0] < 1.0
        pool.recover()
        assert pool.statistics()["pids"][1:] == [other, card] and pool.continuable(0) == range(65)
        assert (evaluate(pool, TOKENS[:2], block=2) == first).all()


def test_a_killed_card_worker_ends_the_step_for_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "stuck:2")
    name = NAMES[0]
    with open_pool(name, tiers_of(program_of(name), 0.3), processes=2) as pool:
        first = evaluate(pool, TOKENS[:2], block=2)
        *hosts, card = pool.statistics()["pids"]
        threading.Timer(0.2, os.kill, (card, signal.SIGKILL)).start()
        with pytest.raises(WorkerLost, match=rf"card worker \(pid {card}\) was killed by SIGKILL"):
            pool.step(rows_of(TOKENS[:2], slot=1))  # the hosts wait for a hand-off that never comes
        pool.recover()
        assert pool.statistics()["pids"][:2] == hosts and pool.continuable(0) == range(1)
        assert (evaluate(pool, TOKENS[:2], block=2) == first).all()


def test_a_card_that_never_sends_is_found_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's wait ends first and says for whom; the card's worker, which hangs, is killed and replaced."""
    monkeypatch.setattr("bloomery.runtime.host_pool._STALL_SECONDS", 8.0)
    monkeypatch.setenv("BLOOMERY_DEADLINE_SCALE", "0.25")  # of 8 s: a second for hand-offs, two for a stall
    monkeypatch.setenv("STAND_IN", "stuck:2")
    name = NAMES[0]
    with open_pool(name, tiers_of(program_of(name), 0.3), processes=1) as pool:
        pool.step(rows_of(TOKENS[:1]))
        *_, card = pool.statistics()["pids"]
        begun = time.monotonic()
        words = rf"card worker \(pid {card}\) made no progress .*worker 0 .* waited too long for card worker"
        with pytest.raises(WorkerLost, match=words):
            pool.step(rows_of(TOKENS[:1]))
        assert 0.9 < time.monotonic() - begun < 2
        pool.recover()
        assert pool.statistics()["pids"][-1] != card


def test_a_host_that_stops_is_found_by_the_cards_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.runtime.host_pool._STALL_SECONDS", 8.0)
    monkeypatch.setenv("BLOOMERY_DEADLINE_SCALE", "0.25")
    name = NAMES[0]
    with open_pool(name, tiers_of(program_of(name), 0.3), processes=2) as pool:
        pool.step(rows_of(TOKENS[:1]))
        host, other, card = pool.statistics()["pids"]
        os.kill(host, signal.SIGSTOP)
        begun = time.monotonic()
        words = rf"worker 0 \(pid {host}\) made no progress .*card worker .* waited too long for .*worker"
        with pytest.raises(WorkerLost, match=words):
            pool.step(rows_of(TOKENS[:1]))
        assert 0.9 < time.monotonic() - begun < 2
        pool.recover()
        assert pool.statistics()["pids"][1:] == [other, card]


def test_an_abort_ends_both_sides_and_the_groups_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "slow")
    name = NAMES[0]
    with open_pool(name, tiers_of(program_of(name), 0.3), processes=1) as pool:
        for pause in (0.1, 0.5):
            threading.Timer(pause, pool.abort).start()
            begun = time.monotonic()
            with pytest.raises(StepAborted):
                pool.step(rows_of(TOKENS[:12]))
            assert time.monotonic() - begun < pause + 1.0
        assert len(greedy(pool, TOKENS[:2], 2)) == 2


def test_the_parts_of_a_program() -> None:
    """Hand-offs stand where they must: sent before the experts, received before anybody reads what the experts put
    out; layers without an expert on the host have none."""
    program = program_of(NAMES[1])
    layers = routed_ops(program)
    some = tuple(range(0, len(layers), 2))
    card, host = card_part(program, some), host_part(program, some)
    assert [op for op in card.ops if not isinstance(op, HandOffSend | HandOffReceive)] == list(program.ops)
    sends = [i for i, op in enumerate(card.ops) if isinstance(op, HandOffSend)]
    receives = [i for i, op in enumerate(card.ops) if isinstance(op, HandOffReceive)]
    assert [card.ops[i].index for i in sends] == list(some) == [card.ops[i].index for i in receives]  # type: ignore[union-attr]
    for send, receive in zip(sends, receives, strict=True):
        experts = card.ops[send + 1]
        assert isinstance(experts, RoutedExperts) and receive > send + 1
        between, after = card.ops[send + 2 : receive], card.ops[receive + 1]
        touched = {view.buffer for op in between for view, _ in op_views(op)}
        assert experts.out.buffer not in touched
        assert experts.out.buffer in {view.buffer for view, _ in op_views(after)}
    kinds = [type(op) for op in host.ops]
    assert kinds == [HandOffWait, RoutedExperts, HandOffAnswer] * len(some) and not host.states
    assert card_part(program, ()).ops == program.ops and host_part(program, ()).ops == ()


def test_words_lie_on_lines_of_their_own() -> None:
    """One writer a line; the layout has room for every rank; values grow from hand-off to hand-off and step to step."""
    program = program_of(NAMES[0])
    shape = ArenaShape(64, 1, 8, 8, 5, "f16", cards=1)
    layout = ArenaLayout(host_part(program, (0, 1)), shape, Lowered((), 6))
    region = layout.regions["hand_off"]
    assert region.offset % LINE == 0 and region.nbytes == RANK_FLAGS + 5 * LINE and RANK_FLAGS % LINE == 0
    assert layout.rows(layout.buffers["hand_off.x"]) == 8
    values = [target(step, index) for step in (1, 2, 3) for index in range(61)]
    assert values == sorted(set(values)) and min(values) > 0
    assert "hand_off" not in ArenaLayout(host_part(program, ()), shape, Lowered((), 6)).regions
