"""deepseek41 and deepseek4 on the card: op by op on the emulator and on a card, whole models on a card.

The reference runs tiny models in float32; before each of its ops every buffer and state that the op reads is copied
into the card's memory, the op's launches run, and what they made is compared: whole numbers (expert ids, row lists,
kept blocks, tokens) equal, floats to rounding.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from card_stand import NoCard, need_card
from deepseek_data import FIGURES, figures41, program_of, tapped_program, tiny4, tiny41
from emulated_card import EmulatedCard
from emulated_card import run as run_emulated
from numpy.typing import NDArray
from oracle_data import trained_file
from running import evaluate, greedy, joined, rows_of

from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.gpu_worker.chains import Chained
from bloomery.gpu_worker.engram_feed import EngramFeed
from bloomery.gpu_worker.launches import Launch
from bloomery.gpu_worker.lowering import Lowering, lower
from bloomery.gpu_worker.prompt_lowering import _PromptLowering
from bloomery.runtime.divergence import divergence
from bloomery.runtime.engram_hash import histories
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.errors import PlanError
from bloomery.runtime.executor import StepRows
from bloomery.runtime.ops_deepseek4 import (
    EngramGate,
    GroupPool,
    GroupWrite,
    HyperCollapse,
    HyperMix,
    HyperPost,
    IndexRows,
    SoftplusRouter,
    TableRows,
    TokenWrite,
    UnitNorm,
    WindowAttention,
)
from bloomery.runtime.program import CacheWrite, Op, op_states, op_views
from bloomery.runtime.reference import ReferenceExecutor
from bloomery.runtime.reference_deepseek4 import best_blocks, best_rows, only_blocks
from bloomery.runtime.row_reader import TableReadError

pytestmark = pytest.mark.timeout(300)
KINDS = (
    UnitNorm, HyperMix, HyperCollapse, HyperPost, TokenWrite, TableRows, EngramGate, GroupPool, GroupWrite, IndexRows,
    WindowAttention, SoftplusRouter, CacheWrite,
)  # fmt: skip
CLOSE = 3e-6  # of the greatest magnitude of a result: float32 sums of up to 1024 products, in another order
HALF_CLOSE = 2e-3  # where queries and weights are rounded to f16
CONTEXT, ROWS, BLOCK = 256, 64, 12
F32_BAND = 1e-5  # relative rms at each position, as on the host
GARBAGE = -7.0


class Emulated:
    """The memory of an emulated card by name, and launches on it."""

    def __init__(self, path: Path, cache_type: str = "f32") -> None:
        self.program = program_of(path)
        self.memory = EmulatedCard(self.program, context=CONTEXT, rows=ROWS, cache_type=cache_type)

    def put(self, name: str, values: NDArray[Any]) -> None:
        flat = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self.memory.areas[name][: flat.size] = flat

    def get(self, name: str, like: NDArray[Any]) -> NDArray[Any]:
        return self.memory.areas[name][: like.nbytes].view(like.dtype).reshape(like.shape).copy()

    def record(self, rows: StepRows, block: bool) -> None:
        for i, values in enumerate((rows.tokens, rows.slots, rows.positions, rows.out_rows)):
            self.put(f"{'prompt' if block else 'step'} {i}", values)

    def run(self, launch: Launch) -> None:
        run_emulated(launch)


class OnCard:
    """The same of a card."""

    def __init__(self, executor: CardExecutor) -> None:
        self.program, self.memory, self._executor = executor.program, executor.memory, executor

    def put(self, name: str, values: NDArray[Any]) -> None:
        self._executor.card.cuda.memcpy_htod(self.memory.address(name), np.ascontiguousarray(values))

    def get(self, name: str, like: NDArray[Any]) -> NDArray[Any]:
        made = np.empty_like(like)
        self._executor.card.cuda.memcpy_dtoh(made, self.memory.address(name))
        return made

    def record(self, rows: StepRows, block: bool) -> None:
        place = self.memory.prompt_step if block else self.memory.step
        addresses = (place.tokens, place.slots, place.positions, place.out_rows)
        for address, values in zip(addresses, (rows.tokens, rows.slots, rows.positions, rows.out_rows), strict=True):
            if len(values):
                self._executor.card.cuda.memcpy_htod(address, np.ascontiguousarray(values))

    def run(self, launch: Launch) -> None:
        self._executor._kernels.load({launch.kernel}, lambda *_: None)
        self._executor._kernels.launch(launch)
        self._executor.card.stream.synchronize()


class Alone(Lowering):
    """Every op in launches of its own."""

    def parts(self) -> Iterable[Chained]:
        return self.program.ops


class AloneInBlocks(_PromptLowering):
    def parts(self) -> Iterable[Chained]:
        return self.program.ops


class Comparing(ReferenceExecutor):
    """A reference executor that, while `how` is set, has a card compute every op of `kinds` from the same inputs."""

    def __init__(
        self, card: Emulated | OnCard, cache_type: Literal["f32", "f16"] = "f32", kinds: tuple[type[Op], ...] = KINDS
    ) -> None:
        super().__init__(card.program, context=CONTEXT, slots=2, max_rows=ROWS, cache_type=cache_type)
        self.card, self.kinds, self.how = card, kinds, ""
        self.seen: Counter[type[Op]] = Counter()
        self._launches: list[Launch] = []

    def compare(self, rows: StepRows, how: str) -> None:
        """One step, compared as a decode step ("step") or as a prompt block ("block")."""
        make = AloneInBlocks if how == "block" else Alone
        for _ in range(2):  # the first time sizes scratch
            self._launches = make(self.program, self.card.memory, len(rows.tokens), len(rows.out_rows)).launches()
        self.card.record(rows, how == "block")
        self.how = how
        self.step(rows)
        self.how = ""

    def _execute(self, op: Op, rows: StepRows) -> None:
        mine = [
            launch for launch in self._launches if launch.label == op.name and launch.kernel.function != "rope_table"
        ]
        if not self.how or not isinstance(op, self.kinds) or not mine:
            super()._execute(op, rows)
            return
        before = {name: self._states[name].copy() for name in op_states(op)}
        inputs = {
            view.buffer: self._buffers[view.buffer].copy() for view, _ in op_views(op) if view.buffer in self._buffers
        }
        super()._execute(op, rows)
        self.seen[type(op)] += 1
        for view, _ in op_views(op):
            after = self._buffers[view.buffer]
            given = inputs.get(view.buffer)
            fits = given is not None and given.shape == after.shape
            self.card.put(f"buffer {view.buffer}", given if fits else np.full_like(after, GARBAGE))
        for name, state in before.items():
            self.card.put(f"cache {name}", state)
        if isinstance(op, TableRows):
            tensor = self.program.weights[op.table]
            ids = inputs[op.ids.buffer][:, op.ids.start : op.ids.end].ravel()
            self.card.put(
                f"rows {op.table}", tensor.data.reshape(-1, tensor.quant_type.row_bytes(tensor.shape[0]))[ids]
            )
        for launch in mine:
            self.card.run(launch)
        for view, writes in op_views(op):
            if writes:
                expected = self._buffers[view.buffer]
                found = self.card.get(f"buffer {view.buffer}", expected)
                columns = (view.start + (view.stride or view.width) * np.arange(view.count))[:, None] + np.arange(
                    view.width
                )
                self._same(op, view.buffer, found[:, columns], expected[:, columns])
        for name in op_states(op):
            self._same(op, name, self.card.get(f"cache {name}", self._states[name]), self._states[name])

    def _same(self, op: Op, what: str, found: NDArray[Any], expected: NDArray[Any]) -> None:
        if expected.dtype == np.int32:
            np.testing.assert_array_equal(found, expected, f"{op.name}: {what}")
        else:
            halves = isinstance(op, WindowAttention) and self.how == "block" and self.card.memory.cache_type == "f16"
            bound = (HALF_CLOSE if halves else CLOSE) * max(1e-30, float(np.abs(expected).max()))
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound, err_msg=f"{op.name}: {what}")


def every_op(card: Emulated | OnCard, name: str) -> None:
    """A prompt block, then rows of two slots mixed: one decodes, one goes on; rows were taken back before."""
    tokens = figures41("tiny-deepseek41-a")["ids"] if name == "deepseek41" else figures41("deepseek4-F32")["tokens"]
    executor = Comparing(card)
    first = 60 if name == "deepseek41" else 130
    for start in range(0, first - BLOCK, ROWS):
        executor.step(rows_of(tokens[start : min(start + ROWS, first - BLOCK)], start=start, out="none"))
    executor.compare(rows_of(tokens[first - BLOCK : first], start=first - BLOCK, out="last"), "block")
    executor.step(rows_of(tokens[:17], slot=1, out="none"))
    executor.compare(
        joined(rows_of(tokens[3:7], slot=1, start=16), rows_of(tokens[20:24], start=first - 3, out="last")), "step"
    )
    absent = {UnitNorm} if name == "deepseek41" else {TokenWrite, TableRows, EngramGate}
    assert set(executor.seen) == set(KINDS) - absent


WIDTHS = {"deepseek4": (128, 64), "deepseek41": (256, 64), "deepseek41 wide": (512, 128)}
"""Of heads and of the indexer's."""


def kernels_of_halves(card: Emulated | OnCard, name: str) -> None:
    """The kernels of tensor cores over f16 caches: a prompt block that begins a sequence, one far behind its window,
    with lists that are full, and a decode step's rows, which come out as with f32 arithmetic."""
    tokens = np.resize(figures41("tiny-deepseek41-a")["ids"], 300)
    executor = Comparing(card, "f16", (IndexRows, WindowAttention))
    shapes = {(type(op), op.q.width) for op in card.program.ops if isinstance(op, IndexRows | WindowAttention)}
    assert shapes == {(WindowAttention, WIDTHS[name][0]), (IndexRows, WIDTHS[name][1])}
    executor.compare(rows_of(tokens[:BLOCK], out="none"), "block")
    functions = {launch.kernel.function for launch in executor._launches}
    assert {f"attend_rows_{WIDTHS[name][0]}", f"score_cores_{WIDTHS[name][1]}"} <= functions
    for start in range(BLOCK, 180, ROWS):
        executor.step(rows_of(tokens[start : start + ROWS], start=start, out="none"))
    executor.compare(rows_of(tokens[180 : 180 + BLOCK], start=180, out="none"), "block")
    executor.compare(rows_of(tokens[192:195], start=192, out="none"), "step")
    assert f"window_cores_{WIDTHS[name][0]}" in {launch.kernel.function for launch in executor._launches}
    assert executor.seen[WindowAttention] > executor.seen[IndexRows] > 0


@pytest.mark.parametrize("name", WIDTHS)
def test_half_caches_on_the_emulator(name: str) -> None:
    kernels_of_halves(Emulated(path_of(name), "f16"), name)


def path_of(name: str) -> Path:
    if name == "deepseek41 wide":
        return tiny41("b")
    return tiny41("a") if name == "deepseek41" else tiny4()


@pytest.mark.parametrize("name", ("deepseek41", "deepseek4"))
def test_every_op_on_the_emulator(name: str) -> None:
    every_op(Emulated(path_of(name)), name)


def lists_with_ties(card: Emulated | OnCard) -> None:
    """Scores full of exact ties and zeros of both signs, and a row of NaN: the kernels' choice is the reference's."""
    generator = np.random.default_rng(41)
    op = next(op for op in card.program.ops if isinstance(op, IndexRows) and op.kept)
    later = next(op for op in card.program.ops if isinstance(op, IndexRows) and op.within)
    op, later = replace(op, scale=0.25), replace(later, scale=0.25)  # no sum is rounded
    heads, width, n, start = op.q.count, op.q.width, 6, 144
    program = replace(
        card.program, ops=(*(each for each in card.program.ops if each.name not in (op.name, later.name)), op, later)
    )
    rows = rows_of(np.zeros(n, np.int32), start=start)
    keys = generator.integers(-1, 2, (150, 1)) * np.ones(width, np.float32)
    state = np.zeros((1, card.memory.state(op.keys).rows, width), np.float32)
    state[0, :150] = keys
    q = (generator.integers(-1, 2, (n, heads, 1)) * np.ones(width)).astype(np.float32)
    weights = generator.integers(-2, 3, (n, heads)).astype(np.float32)
    weights[0, 0] = np.nan
    buffers = {}
    for view, values in ((op.q, q.reshape(n, -1)), (op.weights, weights)):
        buffers[view.buffer] = np.zeros((n, program.buffers[view.buffer].width), np.float32)
        buffers[view.buffer][:, view.start : view.end] = values
        card.put(f"buffer {view.buffer}", buffers[view.buffer])
    card.put(f"cache {op.keys}", state)
    for _ in range(2):
        launches = lower(program, card.memory, n, 0)
    card.record(rows, False)
    for each in (op, later):
        for launch in launches:
            if launch.label == each.name:
                card.run(launch)
        found, kept = (
            card.get(f"buffer {view.buffer}", np.empty((n, program.buffers[view.buffer].width), np.int32))[
                :, view.start : view.end
            ]
            for view in (each.out, op.kept)
            if view
        )
        for r in range(n):
            visible = (int(rows.positions[r]) + 1) // op.ratio
            products = np.maximum(q[r] @ keys[:visible].T, 0)
            scores = (weights[r] * np.float32(op.scale)).astype(np.float64) @ products
            scores = np.where(np.isnan(scores), -np.inf, scores.astype(np.float32))
            assert len(np.unique(scores)) < visible
            assert op.kept is not None
            blocks = best_blocks(scores, op.block, op.kept.width)
            if each is op and np.isfinite(scores).all():
                np.testing.assert_array_equal(kept[r][kept[r] >= 0], blocks)
            elif each is later:
                scores = only_blocks(scores, blocks, op.block)
            best = best_rows(scores, each.out.width)
            np.testing.assert_array_equal(
                found[r], np.pad(best, (0, len(found[r]) - len(best)), constant_values=-1), f"row {r}"
            )


def test_lists_and_blocks_with_ties_on_the_emulator() -> None:
    lists_with_ties(Emulated(tiny41("a")))


@pytest.mark.parametrize("more", (5, 9))
def test_rows_of_tables_are_those_of_each_rows_history(more: int) -> None:
    """Two slots in one step: one in the middle, with its history in the state, one at its start; of a few rows and of
    many."""
    program = program_of(tiny41("a"))
    assert program.engram is not None
    tokens = figures41("tiny-deepseek41-a")["ids"]
    feed = EngramFeed(program, 16)
    step = joined(rows_of(tokens[20:23], start=20), rows_of(tokens[:more], slot=1))
    asked: list[tuple[int, range]] = []

    def history(state: str, slot: int, positions: range) -> NDArray[np.int32]:
        asked.append((slot, positions))
        return np.asarray(tokens[positions.start : positions.stop], np.int32)

    with feed.bringing(step, history):
        brought = {table.weight: feed.need(table.weight) for table in engram_tables(program)}
    longest = program.engram.longest
    assert asked == [(0, range(21 - longest, 20))]
    whole = histories(tokens, longest)
    expected = np.concatenate([whole[20:23], whole[:more]])
    for table in engram_tables(program):
        ids = program.engram.row_ids(table.site, expected)
        rows = program.weights[table.weight].data.reshape(-1, table.row_bytes)[ids]
        np.testing.assert_array_equal(brought[table.weight][: 3 + more].reshape(rows.shape), rows)
    feed.close()


def test_rows_of_tables_that_cannot_be_read(tmp_path: Path) -> None:
    """Whoever needs them is told, and nobody waits for ever."""
    path = tmp_path / "model.gguf"
    shutil.copy(tiny41("a"), path)
    program = program_of(path)
    feed = EngramFeed(program, 16)
    first, *_, last = engram_tables(program)
    os.truncate(path, program.weights[last.weight].offset)
    with (
        pytest.raises(TableReadError, match=rf"of table {last.weight} cannot be read: 0 of 110 bytes"),
        feed.bringing(rows_of(list(range(12))), lambda state, slot, positions: np.empty(0, np.int32)),
    ):
        feed.need(first.weight)
        feed.need(last.weight)
    feed.close()


def test_what_the_card_cannot_run_is_refused_by_name() -> None:
    """A target that reports to a draft, and attention of a block that sees itself."""
    program = tapped_program()
    with pytest.raises(PlanError, match=r"deepseek41: op blk\.\d\.tap \(StreamMean\) has no card kernel yet"):
        lower(program, NoCard(program), 1, 1)
    program = program_of(tiny4())
    ops = [replace(op, block=True) if isinstance(op, WindowAttention) else op for op in program.ops]
    with pytest.raises(PlanError, match=r"deepseek4: op blk\.0\.attention .* of a block that sees itself"):
        lower(replace(program, ops=tuple(ops)), NoCard(program), 1, 1)


# -- on a card --------------------------------------------------------------------------------------------------------
@contextmanager
def on_card(path: Path, **arguments: Any) -> Iterator[CardExecutor]:
    need_card()
    settings = {"context": CONTEXT, "cache_type": "f32", "prompt_block": ROWS, "slots": 2, **arguments}
    executor = CardExecutor(program_of(path), **settings)
    try:
        yield executor
    finally:
        executor.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("deepseek41", "deepseek4"))
def test_every_op_on_a_card(name: str) -> None:
    with on_card(path_of(name)) as executor, executor.card.current("op by op"):
        every_op(OnCard(executor), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WIDTHS)
def test_half_caches_on_a_card(name: str) -> None:
    with on_card(path_of(name), cache_type="f16") as executor, executor.card.current("op by op"):
        kernels_of_halves(OnCard(executor), name)


@pytest.mark.gpu
def test_lists_and_blocks_with_ties_on_a_card() -> None:
    with on_card(tiny41("a"), slots=1) as executor, executor.card.current("op by op"):
        lists_with_ties(OnCard(executor))


SEQUENCES = {"deepseek41": ("tiny-deepseek41-a", "ids"), "deepseek4": ("deepseek4-F32", "tokens")}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("tiny-deepseek41-dense", "tiny-deepseek41-a", "tiny-deepseek41-b", "deepseek4-F32"))
def test_f32_files(name: str) -> None:
    """Against the publisher's program in float64 and llama.cpp: by decode steps, and by prompt blocks."""
    stored = figures41(name)
    path = tiny4() if name == "deepseek4-F32" else tiny41(name.rsplit("-", 1)[1], "f32")  # type: ignore[arg-type]
    tokens = stored["tokens" if name == "deepseek4-F32" else "ids"]
    for deterministic in (True, False):
        with on_card(path, deterministic=deterministic) as executor:
            result = divergence(stored["logits"], evaluate(executor, tokens))
        print(name, deterministic, result)
        assert result.relative_rms_max < F32_BAND


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("deepseek41", "deepseek4"))
def test_the_references_tokens(name: str) -> None:
    path = tiny41("a", "f32") if name == "deepseek41" else tiny4()
    figures, key = SEQUENCES[name]
    prompt = figures41(figures)[key][:40]
    reference = ReferenceExecutor(program_of(path), context=CONTEXT, max_rows=ROWS)
    with on_card(path, prompt_block=40) as executor:
        assert greedy(executor, prompt, 60) == greedy(reference, prompt, 60)


@pytest.mark.gpu
def test_quantised_deepseek4_against_llama_cpp() -> None:
    """MXFP4 experts, Q8_0 for the rest: the host's band."""
    name = "deepseek4-MXFP4_MOE"
    stored = figures41(name)
    with on_card(tiny4("MXFP4_MOE")) as executor:
        result = divergence(stored["logits"], evaluate(executor, stored["tokens"]))
    entry = json.loads((FIGURES / "self_kld.json").read_text(encoding="utf-8"))[name]
    median, mean = (2.0 * max(pair) for pair in zip(entry["self"], entry["activation"], strict=True))
    print(result, median, mean)
    assert result.kl_median <= median and result.kl_mean <= mean


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", (True, False))
def test_trained_deepseek41_against_its_figures(deterministic: bool) -> None:
    """As on the host: the same top tokens but for near ties, logits of the 32 best close."""
    path = trained_file("tiny-deepseek41-Q3_K_M")
    with on_card(path, context=640, prompt_block=512, cache_type="f16", deterministic=deterministic) as executor:
        for text in ("prose", "code"):
            every = figures41("tiny-deepseek41-reference").items()
            stored = {key.removeprefix(f"{text}_"): value for key, value in every}
            found = evaluate(executor, stored["ids"])[-len(stored["top_ids"]) :]
            off = np.take_along_axis(found, stored["top_ids"], axis=1) - stored["top_logits"]
            spread = np.sqrt((off**2).mean(axis=1))
            agree = (found.argmax(axis=1) == stored["top_ids"][:, 0]).mean()
            print(text, np.median(spread), spread.max(), agree)
            assert np.median(spread) < 0.25 and agree > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("deepseek41", "deepseek4"))
def test_results_depend_on_nothing_but_the_sequence(name: str) -> None:
    """Replay or eager, any block, any slot, neighbours in the step, a copied prefix, a stored one, rows taken back:
    the same bits. The sequence is longer than the rings."""
    path = tiny41("a") if name == "deepseek41" else tiny4("MXFP4_MOE")
    figures, key = SEQUENCES[name]
    tokens = np.resize(figures41(figures)[key], 180)
    settings: dict[str, Any] = {"cache_type": "f16", "deterministic": True, "prompt_block": 16, "slots": 3}
    with on_card(path, graphs=False, **settings) as eager:
        wanted = evaluate(eager, tokens)
    with on_card(path, **settings) as executor:
        for _ in range(2):  # the second replays graphs only
            assert (evaluate(executor, tokens) == wanted).all()
        for block in (1, 7, 13):
            assert (evaluate(executor, tokens, block=block, slot=1) == wanted).all(), block
        assert (evaluate(executor, tokens[166:], slot=1, start=166, block=5) == wanted[166:]).all(), "taken back"
        evaluate(executor, tokens[:90], slot=0)
        executor.copy_prefix(0, 2, 90)
        assert (evaluate(executor, tokens[90:], slot=2, start=90) == wanted[90:]).all(), "a copied prefix"
        evaluate(executor, tokens[:100], slot=0)
        kept = executor.snapshot(0, 100, 3)
        evaluate(executor, tokens[::-1].copy(), slot=0)
        for positions in (100, 97):
            executor.restore(1, kept, positions)
            assert (evaluate(executor, tokens[positions:], slot=1, start=positions) == wanted[positions:]).all()
        executor.restore(0, kept)
        executor.restore(2, kept)
        both = joined(rows_of(tokens[100:104], slot=0, start=100), rows_of(tokens[100:103], slot=2, start=100))
        found = executor.step(both).logits
        assert (found[:4] == wanted[100:104]).all() and (found[4:] == wanted[100:103]).all()
