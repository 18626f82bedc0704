"""Shallow steps: of rows that only rows far behind read less is computed, and those rows come out as ever."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated_driver
import numpy as np
import pytest
from card_stand import need_card
from deepseek_data import program_of, tiny4, tiny41
from numpy.typing import NDArray
from oracle_data import quantised_file
from running import rows_of
from test_hand_off import tiers_of

from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.launcher.bench_rows import trial_work
from bloomery.launcher.bench_trial import Trial
from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime.card_pool import CardPool
from bloomery.runtime.completion import new_request_id
from bloomery.runtime.engine import Engine
from bloomery.runtime.errors import RequestError
from bloomery.runtime.executor import StepExecutor, StepRows
from bloomery.runtime.host_pool import HostPool
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.program import RoutedExperts
from bloomery.runtime.reference import ReferenceExecutor
from bloomery.runtime.requests import Chunk, GenerationRequest, SamplingParameters
from bloomery.runtime.row_reader import TableReadError
from bloomery.runtime.shallow_steps import BACK, shallow_part, shallow_program, written_states
from bloomery.runtime.slot_errands import Save
from bloomery.runtime.slots import Slot
from bloomery.runtime.states import RingState
from bloomery.runtime.step_work import step_work
from bloomery.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(300)
BLOCK = 40
TOKENS = np.random.default_rng(11).integers(1, 200, 4 * BLOCK)


def run(executor: StepExecutor, shallow: int, rows: int, slot: int = 0) -> NDArray[np.float32]:
    """Logits of the last `rows` of TOKENS, whose first `shallow` blocks are computed in part."""
    for number in range(4):
        first = number * BLOCK
        step = rows_of(TOKENS[first : first + BLOCK], slot=slot, start=first, out="none")
        if number == 3:
            step = replace(step, out_rows=np.arange(BLOCK - rows, BLOCK, dtype=np.int32))
        logits = executor.step(replace(step, shallow=number < shallow)).logits
    return logits.copy()


def check(
    executor: StepExecutor,
    reach: int,
    numbers: tuple[int, ...] = (1, 3),
    same: Callable[[Any, Any], Any] = np.array_equal,
    spoil: Callable[[], None] = lambda: None,
) -> None:
    """The first row that may be wanted and those behind it are the `same` (to the bit) as without shallow steps, of
    which there are as many as one of `numbers`, over what `spoil` leaves; the row before it is refused."""
    assert executor.shallow_reach == reach and 0 < reach < BLOCK  # type: ignore[attr-defined]
    whole = run(executor, 0, BLOCK)
    for shallow in numbers:
        rows = BLOCK if shallow < 3 else BLOCK - reach
        spoil()
        assert same(run(executor, shallow, rows), whole[BLOCK - rows :])
    assert next(iter(executor.continuable(0))) >= 3 * BLOCK + reach
    if len(numbers) > 1:
        one = executor.step(rows_of(TOKENS[:1], start=4 * BLOCK)).logits.copy()
        assert same(run(executor, 0, BLOCK, slot=1), whole)
        assert same(executor.step(rows_of(TOKENS[:1], slot=1, start=4 * BLOCK)).logits, one)
    with pytest.raises(ValueError, match=f"{3 * BLOCK + reach} is the first that can be"):
        run(executor, 3, BLOCK - reach + 1)
    with pytest.raises(ValueError, match="no rows can be wanted"):
        executor.step(replace(rows_of(TOKENS[:BLOCK]), shallow=True))


def test_what_a_shallow_step_leaves_out() -> None:
    """Of the tiny V4.1 the layers behind the last that keeps compressed rows, which are three windows of 8; of models
    whose layers all keep something for everybody, nothing."""
    program = program_of(tiny41("a"))
    part = shallow_part(program)
    assert part is not None and part.reach == 3 * 7
    assert sum(isinstance(op, RoutedExperts) for op in program.ops[part.ops :]) >= 3
    left = {name for op in program.ops[part.ops :] for name in written_states(op)}
    assert left == {f"blk.{layer}.window" for layer in (6, 7, 8)}
    assert all(isinstance(program.states[name], RingState) for name in left)
    assert len(shallow_program(program).ops) == part.ops
    assert shallow_part(program_of(tiny4())) is None
    assert shallow_part(program_of(quantised_file("qwen3moe-Q4_K_M"))) is None


def test_the_reference() -> None:
    """Also where the windows hold garbage before. Its products round by what else is in them."""
    executor = ReferenceExecutor(program_of(tiny41("a")), context=192, slots=2, max_rows=BLOCK)

    def same(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
        return bool(np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max())

    def spoil() -> None:
        for layer in (6, 7, 8):
            executor._states[f"blk.{layer}.window"][0] = 1e3

    check(executor, 21, same=same, spoil=spoil)


def test_processes() -> None:
    """Two ranks; the host's kernels give every row the same bits."""
    path = tiny41("a")
    sizes: dict[str, Any] = {"context": 192, "slots": 2, "processes": 2, "prompt_block": BLOCK, "cache_type": "f16"}
    with closing(HostPool.start(str(path), program_of(path), **sizes)) as pool:
        check(pool, 21)


def test_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated kernels of prompt blocks."""
    emulated_driver.stand_in(monkeypatch.setattr)
    executor = CardExecutor(program_of(tiny41("a")), context=192, slots=2, prompt_block=BLOCK, cache_type="f16")
    try:
        check(executor, 21, (3,))
    finally:
        executor.close()


@pytest.mark.gpu
def test_a_real_card() -> None:
    """The same blocks on a card, in this process."""
    need_card()
    executor = CardExecutor(program_of(tiny41("a")), context=192, slots=2, prompt_block=BLOCK, cache_type="f16")
    try:
        check(executor, 21)
    finally:
        executor.close()


@pytest.mark.gpu
@pytest.mark.parametrize("share", (1.0, 0.3))
def test_a_worker_on_a_card(share: float) -> None:
    """Through its process, whole and with experts that come from the host to blocks that the card computes alone."""
    need_card()
    path = tiny41("a")
    program = program_of(path)
    sizes: dict[str, Any] = {"context": 192, "slots": 2, "processes": 2, "prompt_block": BLOCK, "cache_type": "f16"}
    if share < 1:
        sizes |= {"tiers": tiers_of(program, share), "stream_rows": BLOCK}
    with closing(CardPool.start(str(path), program, **sizes)) as pool:
        check(pool, 21)


def test_a_block_whose_rows_do_not_come_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that cannot be read ends a block between its layers; the next step is right."""
    emulated_driver.stand_in(monkeypatch.setattr)
    path = tmp_path / "model.gguf"
    shutil.copy(tiny41("a"), path)
    executor = CardExecutor(program_of(path), context=64, slots=1, prompt_block=BLOCK, cache_type="f16")
    block = rows_of(TOKENS[:BLOCK], out="last")
    wanted = executor.step(block).logits.copy()
    assert executor._feed is not None
    reader = executor._feed._reader
    reader.cache.keys[:] = -1
    whole, end = path.read_bytes(), max(table.offset for table in reader.tables)
    os.truncate(path, end)
    with pytest.raises(TableReadError, match="cannot be read: 0 of 110 bytes"):
        executor.step(block)
    assert not executor.card.stream.work  # type: ignore[attr-defined]
    with path.open("ab") as file:
        file.write(whole[end:])
    assert (executor.step(block).logits == wanted).all()
    executor.close()


def test_a_shallow_step_that_was_cut_is_taken_back() -> None:
    """A prompt goes on where it was, also with whole rows; those that can be wanted come out as ever."""
    executor = ReferenceExecutor(program_of(tiny41("a")), context=192, slots=2, max_rows=BLOCK)
    wanted = run(executor, 0, 5)
    for done, again in ((1, 2), (2, 3)):
        for number in range(done + 1):
            first = number * BLOCK
            executor.step(replace(rows_of(TOKENS[first : first + BLOCK], start=first, out="none"), shallow=True))
        for number in range(done, again):
            executor.step(rows_of(TOKENS[number * BLOCK :][:BLOCK], start=number * BLOCK, out="none"))
        for number in range(again, 4):
            step = rows_of(TOKENS[number * BLOCK :][:BLOCK], start=number * BLOCK, out="none")
            last = np.arange(BLOCK - 5, BLOCK, dtype=np.int32)
            found = executor.step(replace(step, out_rows=last if number == 3 else step.out_rows)).logits
        assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_slots_of_a_shallow_prompt_serve_nobody_else() -> None:
    executor = ReferenceExecutor(program_of(tiny41("a")), context=192, slots=2, max_rows=BLOCK)
    executor.step(replace(rows_of(TOKENS[:BLOCK], out="none"), shallow=True))
    assert not executor.continuable(0)
    for use in (lambda: executor.copy_prefix(0, 1, BLOCK), lambda: executor.snapshot(0, BLOCK)):
        with pytest.raises(ValueError, match="cannot go on"):
            use()
    slot = Slot(0, executor.continuable)
    slot.tokens, slot.count = TOKENS[:BLOCK].astype(np.int32), BLOCK
    errand = Save(slot, Path("nowhere"), None, executor)  # type: ignore[arg-type]
    errand.begin()
    assert errand.advance(1.0) and slot.free
    with pytest.raises(RequestError, match="slot 0 cannot be saved"):
        errand.result.result(0)
    executor.step(rows_of(TOKENS[:5]))
    assert list(executor.continuable(0)) == list(range(6))


class Noting(ReferenceExecutor):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps: list[tuple[int, bool]] = []

    def step(self, rows: StepRows) -> Any:
        self.steps.append((len(rows.tokens), rows.shallow))
        return super().step(rows)


def test_the_engine_asks_for_them_far_from_the_end_only() -> None:
    """The answer is that of whole steps, also to a second request that shares all but the end of the prompt."""
    path = demo_model_path("tiny")
    with ModelFile.open(path) as model:
        program, tokenizer = program_of(path), Tokenizer.from_model_file(model)  # type: ignore[arg-type]
        prompt = np.random.default_rng(3).integers(300, 2000, 700).tolist()
        answers, vectors = [], []
        for able in (True, False):
            executor = Noting(program, context=768, slots=1, max_rows=128)
            if not able:
                executor._shallow = None
            engine = Engine(executor, tokenizer, None)
            pooled: list[Any] = []
            wanted = GenerationRequest(new_request_id(), tokens=tuple(prompt[::-1]), embeddings="last", max_tokens=0)
            engine.submit(wanted, pooled.append)
            while engine.turn():
                pass
            vectors.append(next(event.logits for event in pooled if isinstance(event, Chunk)))
            executor.steps.clear()
            for tokens in (prompt, [*prompt[:-10], 7, 8, 9]):
                found: list[Any] = []
                sampling = SamplingParameters(temperature=0.0)
                request = GenerationRequest(
                    new_request_id(), tokens=tuple(tokens), max_tokens=4, sampling=sampling, ignore_eos=True
                )
                engine.submit(request, found.append)
                while engine.turn():
                    pass
                answers.append([t for event in found if isinstance(event, Chunk) for t in event.tokens])
            shallow = [count for count, is_shallow in executor.steps if is_shallow]
            if not able:
                assert not shallow
                continue
            assert executor.shallow_reach == 126 and shallow
            done = sum(shallow)
            assert len(prompt) - done > executor.shallow_reach + BACK
            assert len(prompt) - done - 128 <= executor.shallow_reach + BACK, "one block more could have been"
            assert sum(count for count, _ in executor.steps) < 2 * len(prompt), "the shared prompt was computed again"
    assert answers[0] == answers[2] and answers[1] == answers[3]
    np.testing.assert_allclose(*vectors, rtol=1e-3, atol=1e-4)


def test_a_bench_counts_what_was_run() -> None:
    program = program_of(tiny41("a"))
    trial = Trial("pp", 4 * BLOCK, 0)
    whole, found = (trial_work(program, trial, BLOCK, 2, shallow)["experts"] for shallow in (False, True))
    first, of_part = (step_work(each, BLOCK, BLOCK - 1, 2)["experts"] for each in (program, shallow_program(program)))
    assert found.operations == whole.operations - first.operations + of_part.operations < whole.operations
    assert trial_work(program, Trial("tg", 4, 160), 1, 2, True) == trial_work(program, Trial("tg", 4, 160), 1, 2)
    plain = program_of(quantised_file("qwen3moe-Q4_K_M"))
    assert trial_work(plain, trial, BLOCK, 2, True) == trial_work(plain, trial, BLOCK, 2)


def test_logits_of_all_rows_are_never_left_out() -> None:
    """A prompt all of whose rows are wanted has one step a block, none of them shallow."""
    path = demo_model_path("tiny")
    with ModelFile.open(path) as model:
        executor = Noting(program_of(path), context=512, slots=1, max_rows=128)  # type: ignore[arg-type]
        engine = Engine(executor, Tokenizer.from_model_file(model), None)
        found: list[Any] = []
        tokens = tuple(np.random.default_rng(3).integers(300, 2000, 500).tolist())
        engine.submit(GenerationRequest(new_request_id(), tokens=tokens, logits="all", max_tokens=0), found.append)
        while engine.turn():
            pass
    rows = [len(event.logits) for event in found if isinstance(event, Chunk) and event.logits is not None]
    assert executor.shallow_reach + BACK < 500 - 128, "the first block could be"
    assert sum(rows) == 500 and executor.steps and not any(shallow for _, shallow in executor.steps)
