"""Hand-offs in which the card has nothing for the host, which ranks answer without computing: the same bits as if they
had computed them, whatever the number of ranks; steps that end there."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from in_process import KERNEL, aligned_bytes
from pool_kit import worker_environment
from running import evaluate, joined, rows_of
from test_hand_off import NAMES, TOKENS, open_pool, program_of

from bloomery.cpu_experts.compile_cache import compile_kernel
from bloomery.cpu_experts.stage import STEP_SKIP, STEP_WORDS
from bloomery.runtime.card_pool import EXPERT_WORKLOAD
from bloomery.runtime.errors import StepAborted, WorkerLost
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.hand_off import hand_off_bytes, target
from bloomery.runtime.step_record import ABORT, STEP

STEPS = 12


@pytest.fixture(autouse=True)
def find_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


def all_but(name: str, *on_host: int) -> ExpertTiers:
    """All experts on the card but these of each layer."""
    everything = ExpertTiers.everything(program_of(name))
    return ExpertTiers(
        everything.layers,
        {
            layer.gate: tuple(expert for expert in range(layer.experts) if expert not in on_host)
            for layer in everything.layers
        },
    )


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_wait_kernel(rows: int, ranks: int) -> None:
    """Zeros in every element of the rows and nowhere else, and the skip, only where every row's list is empty and the
    card's flag is up."""
    kernel = KERNEL(compile_kernel("hand_off_wait"))
    generator = np.random.default_rng(rows)
    words = aligned_bytes(hand_off_bytes(ranks)).view(np.int64)
    control = aligned_bytes(4096).view(np.int64)
    control[STEP // 8] = 7
    ids = generator.integers(0, 9, (rows + 1, 4)).astype(np.int32)
    out = np.empty((rows + 1, 37), np.float32)
    places = (ids.ctypes.data, ids.strides[0], out.ctypes.data, out.strides[0], 29)
    arguments = np.array(
        [words.ctypes.data, control.ctypes.data, 2, 10**8, 0, 0, 0, *places, 5], np.int64
    )  # hand-off 2, row count 0, five stages to leave out

    def skips() -> list[int]:
        found = []
        for rank in range(ranks):
            step = np.zeros(STEP_WORDS, np.int64)
            step[0] = rows
            kernel(arguments.ctypes.data, rank, ranks, step.ctypes.data)
            found.append(int(step[STEP_SKIP]))
        return found

    for busy in [*range(rows), None]:
        ids[:rows, 0] = -1
        if busy is not None:
            ids[busy, 0] = 3
        for sent in (False, True):
            words[0] = target(7, 2 if sent else 1)
            control[ABORT // 8] = 0 if sent else 7
            out[...] = 5
            wanted = out.copy()
            empty = sent and busy is None
            if empty:
                wanted[:rows, :29] = 0
            assert skips() == [5 * empty] * ranks
            assert (out == wanted).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_out_changes_no_bit(name: str) -> None:
    """Two experts of each layer on the host: in most steps of one row, and some of several, it has work in some layers
    only. That experts did not run is seen by the ticks. Steps with and without wanted rows."""
    experts = ExpertTiers.everything(program_of(name)).layers[0].experts
    tiers = all_but(name, 1, experts - 1)
    generator = np.random.default_rng(11)
    tokens = generator.integers(1, 60, (3, STEPS))
    found, idle = [], []
    variants = (2, "unskipping_experts:load"), (1, EXPERT_WORKLOAD), (2, EXPERT_WORKLOAD), (3, "delayed_experts:load")
    for processes, workload in variants:
        with open_pool(name, tiers, processes=processes, host_workload=workload, slots=3, time_legs=True) as pool:
            logits = []
            for slot in (0, 1):
                for at in range(STEPS):
                    out = "none" if slot and at % 3 else "all"
                    step = rows_of(tokens[slot, at : at + 1], slot=slot, start=at, out=out)
                    logits.append(pool.step(step).logits.copy())
                    if slot == at == 0:
                        idle.append({op for op, (kernel, _) in pool.op_seconds().items() if kernel == 0})
            logits.append(evaluate(pool, tokens[2, :8], slot=2, block=4))
            ends = ((0, STEPS), (1, STEPS), (2, 8))
            together = joined(*(rows_of([5 + slot], slot=slot, start=at) for slot, at in ends))
            logits.append(pool.step(together).logits.copy())
            found.append(np.concatenate(logits))
            counts = pool.statistics()
    assert counts["steps"] == 2 * STEPS + 3
    print(idle)
    assert not idle[0] and idle[1] and idle[1] == idle[2] == idle[3], "left out in every rank, or in none"
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_an_abort_between_empty_hand_offs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "slow")
    name = NAMES[0]
    with open_pool(name, all_but(name, 0), processes=2) as pool:
        first = evaluate(pool, TOKENS[:1], block=1)
        for pause in (0.1, 0.35, 0.6):
            threading.Timer(pause, pool.abort).start()
            with pytest.raises(StepAborted):
                for _ in range(4):
                    pool.step(rows_of(TOKENS[:1], slot=1))
        assert (evaluate(pool, TOKENS[:1], block=1, slot=1) == first).all()


def test_a_host_worker_killed_between_empty_hand_offs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "slow")
    name = NAMES[0]
    with open_pool(name, all_but(name, 0), processes=2) as pool:
        first = evaluate(pool, TOKENS[:2], block=1)
        host, other, card = pool.statistics()["pids"]
        threading.Timer(0.2, os.kill, (host, signal.SIGKILL)).start()
        begun = time.monotonic()
        with pytest.raises(WorkerLost, match=rf"worker 0 \(pid {host}\) was killed by SIGKILL"):
            while True:
                pool.step(rows_of(TOKENS[:1], slot=1))
        assert time.monotonic() - begun < 2.0
        pool.recover()
        assert pool.statistics()["pids"][1:] == [other, card]
        assert (evaluate(pool, TOKENS[:2], block=1) == first).all()
