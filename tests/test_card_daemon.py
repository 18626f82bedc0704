"""Plan a on a real card: pools and daemons, experts anywhere, deaths, and hand-offs under random delays. Needs a card.

BLOOMERY_STRESS_STEPS is how many steps the stress test runs; without it as many as fit its time.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_stand import need_card
from conftest import left_behind, program, start_daemon, stop_daemon
from deepseek_data import figures41, tiny4, tiny41
from oracle_data import TRAINED, figures, host_band, quantised_file, self_divergence, trained_file
from pool_kit import worker_environment
from running import evaluate, greedy, rows_of
from test_hand_off import tiers_of

from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime.architectures import build_program
from bloomery.runtime.card_pool import CardPool
from bloomery.runtime.card_probe import probe_cards
from bloomery.runtime.client import Client, ControlClient
from bloomery.runtime.completion import new_request_id
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.divergence import divergence
from bloomery.runtime.errors import RequestError, WorkerLost
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.placement import machine_room, make_plan
from bloomery.runtime.requests import GenerationRequest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SHARES = (0.0, 0.3, 1.0)
STRESS_SECONDS = 10.0
DEEPSEEK_BAND = 1e-5  # relative rms at each position, as on the host
PROMPT = "func (r *Reader) Read"


@pytest.fixture(autouse=True, scope="module")
def card() -> None:
    need_card()


@contextmanager
def card_pool(path: Path, share: float, **options: Any) -> Iterator[CardPool]:
    program = build_program(ModelFile.open(path))
    tiers = tiers_of(program, share) if share < 1 else None
    settings = {"context": 256, "slots": 2, "prompt_block": 128, "cache_type": "f16", "processes": 3, **options}
    pool = CardPool.start(str(path), program, tiers=tiers, **settings)
    try:
        yield pool
    finally:
        pool.close()
        assert not left_behind()


@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_answer_as_on_the_host_at_any_placement(name: str) -> None:
    """Greedy tokens of the host executor wherever its choice is clear, logits inside llama.cpp's band."""
    path, stored = trained_file(name), figures(f"{name}-trained")
    with HostPool_of(path) as host:
        wanted = [greedy(host, stored[f"prompt{i}"], 24) for i in range(2)]
    base = stored["prose_log_probabilities"].astype(np.float32)
    bound = 3 * 2 * math.sqrt(self_divergence(name))
    median, mean = host_band(name)
    for share in SHARES:
        with card_pool(path, share) as pool:
            result = divergence(base, evaluate(pool, stored["prose_tokens"])[stored["prose_rows"]])
            for i in range(2):
                prompt = stored[f"prompt{i}"]
                tokens = np.concatenate([prompt, wanted[i][:-1]])
                logits = evaluate(pool, tokens)[len(prompt) - 1 :]
                best = np.sort(logits, axis=1)
                wrong = (logits.argmax(axis=1) != wanted[i]) & (best[:, -1] - best[:, -2] > bound)
                assert not wrong.any(), (share, i, np.nonzero(wrong))
        print(name, share, result)
        assert result.kl_median <= median and result.kl_mean <= mean, share


def HostPool_of(path: Path) -> Any:
    @contextmanager
    def opened() -> Iterator[HostPool]:
        pool = HostPool.start(
            str(path),
            build_program(ModelFile.open(path)),
            context=256,
            slots=2,
            processes=4,
            prompt_block=128,
            cache_type="f16",
        )
        try:
            yield pool
        finally:
            pool.close()

    return opened()


@pytest.mark.parametrize("name", ("qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M", "deepseek2-lite-Q8_0"))
def test_tiny_models_stay_in_the_band_and_repeat_bit_for_bit(name: str) -> None:
    stored, path = figures(name), quantised_file(name)
    median, mean = host_band(name)
    for share in SHARES:
        with card_pool(path, share, cache_type="f32") as pool:
            first = evaluate(pool, stored["tokens"])
            assert (evaluate(pool, stored["tokens"], slot=1) == first).all(), "replay differs"
            one = evaluate(pool, stored["tokens"][:6], block=1)
            assert (one == first[:6]).all(), "single rows differ from groups"
            kept = pool.snapshot(1, 7)
            pool.copy_prefix(1, 0, 7)
            assert (evaluate(pool, stored["tokens"][7:9], start=7) == first[7:9]).all()
            pool.restore(0, kept)
            assert (evaluate(pool, stored["tokens"][7:9], start=7) == first[7:9]).all()
        result = divergence(stored["logits"], first)
        print(name, share, result)
        assert result.kl_median <= median and result.kl_mean <= mean, share


@pytest.mark.parametrize("name", ("tiny-deepseek41-a", "deepseek4-F32"))
def test_deepseek_at_any_placement(name: str) -> None:
    """With n-gram tables, windows and compressed rows beside hand-offs: the figures of the publisher's program, rows
    alone and in groups bit for bit, and slots that go on from another's rows."""
    stored = figures41(name)
    path, tokens = (tiny41("a", "f32"), stored["ids"]) if "41" in name else (tiny4(), stored["tokens"])
    for share in SHARES:
        with card_pool(path, share, cache_type="f32", deterministic=True) as pool:
            first = evaluate(pool, tokens)
            assert divergence(stored["logits"], first).relative_rms_max < DEEPSEEK_BAND, share
            assert (evaluate(pool, tokens, slot=1) == first).all(), "replay differs"
            assert (evaluate(pool, tokens[:6], block=1) == first[:6]).all(), "single rows differ from groups"
            kept = pool.snapshot(1, len(tokens))
            pool.restore(0, kept)
            one = pool.step(rows_of(tokens[-1:], slot=1, start=len(tokens))).logits.copy()
            assert (pool.step(rows_of(tokens[-1:], slot=0, start=len(tokens))).logits == one).all(), share


@pytest.mark.parametrize("name", ("qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M", "deepseek2-lite-Q8_0"))
def test_blocks_whose_experts_come_from_the_host_are_those_of_a_whole_card(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with no and with some experts on the card, out of locked pages and through pinned buffers; and as
    near to groups with hand-offs as a block of a whole card is to its groups: blocks round otherwise, and random
    models amplify that."""
    path = quantised_file(name)
    tokens = np.random.default_rng(3).integers(1, 60, 200)

    def blocks(pool: CardPool) -> Any:
        first = pool.step(rows_of(tokens[:128])).logits.copy()
        return np.concatenate([first, pool.step(rows_of(tokens[128:], start=128, out="last")).logits])

    with card_pool(path, 1.0) as pool:
        wanted = blocks(pool)
        usual = divergence(evaluate(pool, tokens[:128], block=8, slot=1), wanted[:128])
    for share in (0.0, 0.3):
        for lock in ("1", "0"):
            monkeypatch.setenv("BLOOMERY_CARD_LOCK", lock)
            with card_pool(path, share, stream_rows=64) as pool:
                for _ in range(3):
                    assert (blocks(pool) == wanted).all(), (share, lock)
                handed = evaluate(pool, tokens[:128], block=8, slot=1)
        with card_pool(path, share, stream_rows=64, stream_tiers=left_to_the_host(path, share)) as pool:
            both = pool.step(rows_of(tokens[:128])).logits.copy()
            for slot in (0, 1):
                assert (pool.step(rows_of(tokens[:128], slot=slot)).logits == both).all(), share
            assert len(pool.step(rows_of(tokens[128:], start=128, out="last")).logits) == 1
        for block in (both, wanted[:128]):
            result = divergence(handed, block)
            print(name, share, result, usual)
            assert result.kl_median <= 2 * usual.kl_median and result.kl_mean <= 2 * usual.kl_mean, share


def left_to_the_host(path: Path, share: float) -> tuple[tuple[int, str], ...]:
    """Blocks of less than 160 rows leave about half of the experts to the host."""
    program = build_program(ModelFile.open(path))
    tiers, half = tiers_of(program, share), tiers_of(program, 0.5)
    there = {gate: tuple(sorted({*ids, *half.on_card[gate]})) for gate, ids in tiers.on_card.items()}
    return (64, ExpertTiers(tiers.layers, there).text()), (160, "")


def free_on_card() -> int:
    return max(card.free for card in probe_cards())


@pytest.mark.parametrize("demo", ("tiny-qwen3moe", "tiny"))
def test_a_daemon_serves_plan_a_and_replaces_its_worker(demo: str) -> None:
    """Whole on the card, then with half of the experts on the host: same tokens as plan cpu; kill -9 of the card's
    worker ends the running request with worker_lost, the card's memory comes back, the next answer is the same."""
    reference = start_daemon("--demo", demo, "--plan", "cpu", "--parallel", "2", "--ctx", "512")
    try:
        wanted = generate(reference.endpoint)
    finally:
        stop_daemon(reference)
    with ModelFile.open(demo_model_path(demo)) as model:
        plan = make_plan(
            DaemonConfig(str(demo_model_path(demo)), plan="a", context=512, slots=2),
            build_program(model),
            machine_room("a"),
        )
    assert plan.tiers is not None
    half = plan.total("card") - plan.tiers.card_bytes // 2
    before = free_on_card()
    for arguments in ((), ("--card-memory", str(half))):
        daemon = start_daemon(
            "--demo", demo, "--plan", "a", "--parallel", "2", "--ctx", "512", "--threads", "3", *arguments
        )
        try:
            assert daemon.ready["plan"] == "a" and daemon.ready["executor"] == "card"
            assert daemon.ready["processes"] == (3 if arguments else 0)
            assert generate(daemon.endpoint) == wanted
            with ControlClient(str(daemon.ready["control"])) as control:
                pids = control.status()["workers"]["pids"]
                assert kill_in_a_request(daemon.endpoint, pids[-1]) == "worker_lost"
                wait_ready(control)
                assert control.status()["workers"]["pids"][-1] != pids[-1]
                assert generate(daemon.endpoint) == wanted
                if arguments:
                    assert kill_in_a_request(daemon.endpoint, pids[0]) == "worker_lost"
                    wait_ready(control)
                    assert generate(daemon.endpoint) == wanted
        finally:
            assert stop_daemon(daemon) == 0
        assert not left_behind()
    deadline = time.monotonic() + 10
    while free_on_card() < before - (64 << 20):
        assert time.monotonic() < deadline, "the card's memory did not come back"
        time.sleep(0.5)


def generate(endpoint: str) -> str:
    """The greedy answer, through the program."""
    command = program("generate", "--endpoint", endpoint, "--prompt", PROMPT, "-n", "16")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_ready(control: ControlClient) -> None:
    deadline = time.monotonic() + 60
    while control.status()["engine"]["state"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_in_a_request(endpoint: str, pid: int) -> str:
    """The code with which a long request ends whose worker is killed while it runs."""
    threading.Timer(0.02, os.kill, (pid, signal.SIGKILL)).start()
    with Client(endpoint) as client:
        tokens = tuple(client.tokenize(PROMPT))
        while True:
            request = GenerationRequest(new_request_id(), tokens=tokens, max_tokens=450, ignore_eos=True)
            try:
                client.complete(request, timeout=60)
            except RequestError as error:
                return error.code


def test_plan_auto_takes_the_card() -> None:
    done = subprocess.run(
        program("plan", "--demo", "tiny-qwen3moe", "--json"), capture_output=True, text=True, timeout=120
    )
    found = json.loads(done.stdout)
    assert found["plan"] == "a" and found["card"]["read"] > 1e11 and found["prediction"]["seconds"] > 0


def test_hand_offs_under_random_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step's results, its own and those ahead, are those that its token gave the first time, however long the
    hosts take."""
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)
    wanted_steps = int(os.environ.get("BLOOMERY_STRESS_STEPS", "0"))
    rng, begun, done = np.random.default_rng(1), time.monotonic(), 0
    path = quantised_file("qwen3moe-Q4_K_M")
    with card_pool(path, 0.3, host_workload="delayed_experts:load", processes=5) as pool:
        first = {token: pool.step(replace(rows_of([token]), ahead=3)).logits.copy() for token in range(1, 40)}
        while done < wanted_steps if wanted_steps else time.monotonic() - begun < STRESS_SECONDS:
            token, ahead = int(rng.integers(1, 40)), int(rng.integers(4))
            result = pool.step(replace(rows_of([token], slot=int(rng.integers(2))), ahead=ahead)).logits
            assert (result == first[token][: 1 + ahead]).all(), done
            done += 1 + ahead
        steps = pool.statistics()["steps"]
    print(f"{steps} steps in {time.monotonic() - begun:.1f} s")
    assert done > 1000 or wanted_steps


def test_a_host_worker_that_dies_or_stops_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOOMERY_DEADLINE_SCALE", "0.05")  # of 60 s: hand-offs 1.5 s, a stall 3 s
    path = quantised_file("qwen3moe-Q4_K_M")
    with card_pool(path, 0.3, processes=3) as pool:
        first = pool.step(rows_of([7])).logits.copy()
        for number, limit in ((signal.SIGKILL, 1.0), (signal.SIGSTOP, 4.0)):
            victim, *_, card = pool.statistics()["pids"]
            threading.Timer(0.2, os.kill, (victim, number)).start()
            begun = time.monotonic()
            with pytest.raises(WorkerLost, match=rf"worker 0 \(pid {victim}\)"):
                while True:
                    pool.step(rows_of([7]))
            assert time.monotonic() - begun < 0.2 + limit
            pool.recover()
            assert pool.statistics()["pids"][-1] == card, "the card's worker was at no fault"
            assert (pool.step(rows_of([7])).logits == first).all()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-m", "gpu", "-s"]))
