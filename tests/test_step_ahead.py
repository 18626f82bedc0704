"""Steps ahead: on emulated kernels and through the worker they give what single steps give, bit for bit; the engine
takes of them what it would have chosen, and takes the rest back."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated_driver
import numpy as np
import pytest
from deepseek_data import tiny41
from numpy.typing import NDArray
from oracle_data import quantised_file
from pool_kit import left_behind, worker_environment
from running import joined, rows_of
from test_hand_off import tiers_of

from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.gpu_worker.launches import MAX_ROWS
from bloomery.runtime.architectures import build_program
from bloomery.runtime.card_pool import CardPool
from bloomery.runtime.completion import new_request_id
from bloomery.runtime.engine import Engine
from bloomery.runtime.errors import StepAborted
from bloomery.runtime.executor import MOST_AHEAD, StepExecutor, StepRows
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.reference import ReferenceExecutor
from bloomery.runtime.requests import Chunk, Final, GenerationRequest, SamplingParameters
from bloomery.runtime.row_reader import TableReadError
from bloomery.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(300)
NAME = "qwen3moe-Q4_K_M"
PROMPTS = ([5, 9, 17, 3], [40, 2, 8], [21, 33])


def after(executor: StepExecutor, ahead: int) -> StepRows:
    """A step of the streams behind PROMPTS, which are brought into the slots before."""
    for slot, prompt in enumerate(PROMPTS[: executor.slots]):
        executor.step(rows_of(prompt[:-1], slot=slot, out="none"))
    parts = [rows_of(p[-1:], slot=slot, start=len(p) - 1) for slot, p in enumerate(PROMPTS[: executor.slots])]
    return replace(joined(*parts), ahead=ahead)


def one_by_one(executor: StepExecutor, rows: StepRows) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    logits, greedy = [], []
    for number in range(rows.ahead + 1):
        tokens = greedy[-1] if greedy else rows.tokens
        made = executor.step(replace(rows, tokens=tokens, positions=rows.positions + np.int32(number), ahead=0))
        logits.append(made.logits.copy())
        greedy.append(made.greedy.copy())
    return np.concatenate(logits), np.concatenate(greedy)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_driver.stand_in(monkeypatch.setattr)


def open_executor(slots: int, **options: Any) -> CardExecutor:
    program = build_program(ModelFile.open(quantised_file(NAME)))
    return CardExecutor(program, context=32, slots=slots, prompt_block=64, deterministic=True, **options)


@pytest.mark.parametrize(("slots", "ahead"), [(1, 3), (3, 1)])
@pytest.mark.usefixtures("emulated")
def test_steps_ahead_on_the_card_are_single_steps(slots: int, ahead: int) -> None:
    """Kernels, graphs and copies of the real executor; also a second time, when everything is replayed."""
    executor = open_executor(slots)
    rows = after(executor, ahead)
    logits, greedy = one_by_one(executor, rows)
    for _ in range(2):
        made = executor.step(rows)
        assert (made.logits == logits).all() and (made.greedy == greedy).all()
    assert (
        executor.statistics()["graph_nodes"][f"{slots}x{slots}+"]
        == 1 + executor.statistics()["graph_nodes"][f"{slots}x{slots}"]
    )
    executor.close()
    if slots == 1:
        fresh = open_executor(slots)  # nothing of the single steps is left in its caches
        assert (fresh.step(after(fresh, ahead)).logits == logits).all()
        fresh.close()


@pytest.mark.usefixtures("emulated")
def test_steps_ahead_with_n_gram_tables() -> None:
    """The rows of each step are those of its own tokens, of two streams."""
    program = build_program(ModelFile.open(tiny41("a")))
    executor = CardExecutor(program, context=32, slots=2, prompt_block=8, deterministic=True)
    rows = after(executor, 2)
    logits, greedy = one_by_one(executor, rows)
    made = executor.step(rows)
    assert (made.logits == logits).all() and (made.greedy == greedy).all()
    executor.close()


@pytest.mark.usefixtures("emulated")
def test_steps_ahead_whose_n_gram_rows_do_not_come(tmp_path: Path) -> None:
    """An abort between them, and rows that cannot be read, end the step; nobody waits on, the next one is right."""
    path = tmp_path / "model.gguf"
    shutil.copy(tiny41("a"), path)
    program = build_program(ModelFile.open(path))
    executor = CardExecutor(program, context=32, slots=1, prompt_block=8, deterministic=True)
    rows = after(executor, 6)
    wanted = one_by_one(executor, rows)[1]
    assert (executor.step(rows).greedy == wanted).all()
    looked = iter(range(100))
    executor._is_cut = lambda: next(looked) >= 3
    with pytest.raises(StepAborted, match="before step 3"):
        executor.step(rows)
    executor._is_cut = lambda: False
    assert (executor.step(rows).greedy == wanted).all()
    assert executor._feed is not None
    reader = executor._feed._reader
    reader.cache.keys[:] = -1
    executor.step(replace(rows, ahead=0))  # whose rows are kept, so that it is a later step's that do not come
    told = executor._feed._ahead._words  # type: ignore[union-attr]
    told[:] = 0
    end = min(table.offset for table in reader.tables)
    with path.open("rb") as whole:
        tables = whole.read()[end:]
    os.truncate(path, end)
    with pytest.raises(TableReadError, match="cannot be read: 0 of 110 bytes are there"):
        executor.step(rows)
    assert told[0] == 7, "the card went on to the end"
    with path.open("ab") as whole:
        whole.write(tables)
    assert (executor.step(rows).greedy == wanted).all()
    executor.close()


@pytest.mark.usefixtures("emulated")
def test_a_token_that_is_not_fed_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails without the kernel that moves the record on."""
    executor = open_executor(1)
    rows = after(executor, 3)
    logits, _ = one_by_one(executor, rows)
    prepared = executor._prepare(1, 1, advance=True)
    assert prepared.launches.pop().kernel.function == "next_record"
    assert not (executor.step(rows).logits == logits).all()


@pytest.mark.usefixtures("emulated")
def test_steps_ahead_end_at_an_abort() -> None:
    executor = open_executor(1)
    rows = after(executor, 6)
    threading.Timer(0.02, executor.abort).start()
    with pytest.raises(StepAborted, match="before step"):
        while True:
            executor.step(rows)
    found = executor.step(rows).greedy.copy()
    assert (found == one_by_one(executor, rows)[1]).all()


@pytest.mark.usefixtures("emulated")
def test_steps_that_cannot_be_run_ahead_are_refused() -> None:
    executor = open_executor(2)
    rows = after(executor, 1)
    assert executor.most_ahead(2) == MOST_AHEAD and executor.most_ahead(9) == 0
    for wrong in (
        replace(rows, ahead=MOST_AHEAD + 1),
        replace(rows, slots=rows.slots * 0),
        replace(rows, out_rows=rows.out_rows[:1]),
        replace(rows, positions=rows.positions + np.int32(28)),
    ):
        with pytest.raises(ValueError, match=r"ahead|position"):
            executor.step(wrong)


@pytest.fixture
def find_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("workload", ["stand_in_card:load", "emulated_driver:load"])
@pytest.mark.usefixtures("find_stand_ins")
def test_steps_ahead_through_the_worker(workload: str) -> None:
    path = quantised_file(NAME)
    program = build_program(ModelFile.open(path))
    pool = CardPool.start(str(path), program, context=32, slots=2, prompt_block=64, workload=workload)
    try:
        rows = after(pool, 4)
        logits, greedy = one_by_one(pool, rows)
        before = pool.statistics()["steps"]
        made = pool.step(rows)
        assert (made.greedy == greedy).all() and (made.logits == logits).all()
        assert pool.statistics()["steps"] == before + 5
    finally:
        pool.close()
    assert not left_behind()


@pytest.mark.parametrize(
    ("workload", "slots", "lend"),
    [("stand_in_card:load", 2, 0), ("stand_in_card:load", 1, 1), ("emulated_driver:load", 1, 0)],
)
@pytest.mark.usefixtures("find_stand_ins")
def test_steps_ahead_with_experts_on_the_host(
    workload: str, slots: int, lend: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of the host go along from lap to lap, also where hand-offs have no work for them or ranks help each
    other, and a step that is ended between laps leaves nothing behind."""
    monkeypatch.setenv("BLOOMERY_LEND", str(lend))
    path = quantised_file(NAME)
    program = build_program(ModelFile.open(path))
    whole = ExpertTiers.everything(program)
    few = ExpertTiers(whole.layers, {gate: ids[2:] for gate, ids in whole.on_card.items()})
    for tiers in (few, tiers_of(program, 0.4)):
        pool = CardPool.start(
            str(path),
            program,
            tiers=tiers,
            context=64,
            slots=slots,
            prompt_block=64,
            workload=workload,
            processes=2 + lend,
            own_weights=bool(lend),
        )
        try:
            most = pool.most_ahead(slots)
            assert most == MAX_ROWS // slots - 1
            rows = after(pool, most)
            logits, greedy = one_by_one(pool, rows)
            for _ in range(3):
                made = pool.step(rows)
                assert (made.greedy == greedy).all() and (made.logits == logits).all()
            with pytest.raises(StepAborted):
                for _ in range(200):
                    timer = threading.Timer(0.005, pool.abort)
                    timer.start()
                    try:
                        pool.step(rows)
                    finally:
                        timer.join()  # else it would end a later step
            assert (pool.step(rows).logits == logits).all()
        finally:
            pool.close()
        assert not left_behind()


# ---- the engine


class Counting(ReferenceExecutor):
    """The reference, which notes how many steps ahead it was asked for and can be made slow."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[int] = []
        self.pause = 0.0

    def step(self, rows: StepRows) -> Any:
        if rows.ahead or not self.asked or self.asked[-1] >= 0:
            self.asked.append(rows.ahead)
        if self.pause:
            time.sleep(self.pause)
        return super().step(rows)


@pytest.fixture(scope="module")
def model() -> Iterator[ModelFile]:
    with ModelFile.open(quantised_file(NAME)) as opened:
        yield opened


def generated(engine: Engine, **request: Any) -> tuple[list[int], str]:
    """(tokens, reason) of one request, greedy unless told otherwise."""
    events: list[Any] = []
    settings = {"sampling": SamplingParameters(temperature=0.0), "ignore_eos": True, **request}
    engine.submit(GenerationRequest(new_request_id(), **settings), events.append)
    while engine.turn():
        pass
    tokens = [token for event in events if isinstance(event, Chunk) for token in event.tokens]
    (final,) = (event for event in events if isinstance(event, Final))
    return tokens, final.reason


def answer(
    model: ModelFile, step_ahead: int, ahead_seconds: float = math.inf, **request: Any
) -> tuple[list[int], str, list[int], Engine]:
    """(tokens, reason, steps ahead that were asked for, the engine) of one request."""
    executor = Counting(build_program(model), context=32, slots=2, max_rows=64)
    tokenizer = Tokenizer.from_model_file(model)
    engine = Engine(executor, tokenizer, None, step_ahead=step_ahead, ahead_seconds=ahead_seconds)
    tokens, reason = generated(engine, **{"tokens": tuple(PROMPTS[0]), "max_tokens": 12, **request})
    return tokens, reason, executor.asked, engine


def test_the_engine_generates_the_same_tokens_in_fewer_steps(model: ModelFile) -> None:
    wanted, reason, asked, _ = answer(model, 0)
    assert reason == "length" and not any(asked)
    for ahead in (1, 4, 15):
        tokens, reason, asked, engine = answer(model, ahead)
        assert (tokens, reason) == (wanted, "length")
        assert max(asked) == min(ahead, 9), "one to know how long a step takes; the last token is nobody's next one"
        slot = engine._pool.slots[0]
        assert slot.tokens[: slot.count].tolist() == [*PROMPTS[0], *wanted[:-1]]


def test_an_end_takes_the_rest_back(model: ModelFile) -> None:
    wanted, _, _, _ = answer(model, 0)
    stop = wanted[5]
    first = wanted.index(stop)
    tokens, reason, asked, engine = answer(model, 8, stop_tokens=(stop,))
    assert (tokens, reason) == (wanted[: first + 1], "stop") and max(asked) == 8
    slot = engine._pool.slots[0]
    assert slot.count == len(PROMPTS[0]) + first, "what ran too far is not claimed"
    # and goes on from there as if nothing had run further
    more, _ = generated(engine, tokens=(*PROMPTS[0], *wanted[: first + 1]), max_tokens=3)
    assert more == wanted[first + 1 : first + 4]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(temperature=0.8, seed=3),
        SamplingParameters(temperature=0.0, repeat_penalty=1.3),
    ],
)
def test_who_does_not_choose_greedily_takes_single_steps(model: ModelFile, sampling: SamplingParameters) -> None:
    assert answer(model, 8, sampling=sampling)[:3] == answer(model, 0, sampling=sampling)[:3]


def test_a_forbidden_token_takes_the_rest_back(model: ModelFile) -> None:
    """The executor's greedy token is one that the request excludes: another is chosen, and what was fed is void."""
    wanted, _, _, _ = answer(model, 0)
    sampling = SamplingParameters(temperature=0.0, logit_bias=((wanted[4], -100.0),))
    expected = answer(model, 0, sampling=sampling)
    found = answer(model, 8, sampling=sampling)
    assert found[:2] == expected[:2] and max(found[2]) == 8


def test_several_streams_go_ahead_together_and_an_abort_ends_them(model: ModelFile) -> None:
    executor = Counting(build_program(model), context=64, slots=2, max_rows=64)
    engine = Engine(executor, Tokenizer.from_model_file(model), None, step_ahead=6, ahead_seconds=math.inf)
    tokens: list[list[int]] = [[], []]
    ends: list[str] = []
    ids = [new_request_id(), new_request_id()]

    def sink(index: int, event: Any) -> None:
        if isinstance(event, Chunk):
            tokens[index] += event.tokens
        elif isinstance(event, Final):
            ends.append(event.reason)

    for index, prompt in enumerate(PROMPTS[:2]):
        request = GenerationRequest(
            ids[index],
            tokens=tuple(prompt),
            max_tokens=(9, 40)[index],
            ignore_eos=True,
            sampling=SamplingParameters(temperature=0.0),
        )
        engine.submit(request, lambda event, index=index: sink(index, event))
    while len(ends) < 1:
        engine.turn()
    assert tokens[0] == answer(model, 0, max_tokens=9)[0] and max(executor.asked) == 6
    executor.pause = 0.05
    threading.Timer(0.12, engine.abort, (ids[1],)).start()
    begun = time.monotonic()
    while len(ends) < 2:
        engine.turn()
    assert time.monotonic() - begun < 2 and ends == ["length", "aborted"]
    whole = answer(model, 0, tokens=tuple(PROMPTS[1]), max_tokens=28)[0]
    assert tokens[1][:28] == whole[: len(tokens[1])]


def test_no_more_steps_than_there_is_time_for(model: ModelFile) -> None:
    """Whoever comes meanwhile waits for all of them: none if one alone takes longer than that, and the tokens stay."""
    wanted, _, _, _ = answer(model, 0)
    tokens, _, asked, _ = answer(model, 8, ahead_seconds=1e-9)
    assert tokens == wanted
    assert not any(asked)
