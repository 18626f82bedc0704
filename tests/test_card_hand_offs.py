"""Hand-offs inside the kernels beside them, on the emulator, with a host that is played in NumPy by another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from emulated_card import EmulatedCard
from oracle_data import quantised_file
from running import rows_of
from test_card_chains import Unchained
from test_hand_off import tiers_of

from bloomery.gpu_worker.launches import STATE_WORDS, HandOffAddresses, HandOffBuffers
from bloomery.gpu_worker.lowering import Lowering
from bloomery.runtime.architectures import build_program
from bloomery.runtime.dequantised_weights import DequantisedWeights
from bloomery.runtime.expert_tiers import ExpertTiers
from bloomery.runtime.hand_off import CutReason, HandOffWords, hand_off_bytes, target
from bloomery.runtime.leg_times import LegWords, leg_bytes
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.ops_hand_off import HandOffSend
from bloomery.runtime.program import Program, RoutedExperts, View
from bloomery.runtime.reference_ops import routed_experts
from bloomery.runtime.split_program import card_part
from bloomery.runtime.step_record import ABORT, LINE, STEP

pytestmark = pytest.mark.timeout(300)
RANKS = 3
ROWS = 8
AS_LONG_AS_IT_TAKES = 10**11


class HostedCard(EmulatedCard):
    """An emulated card whose layers have experts on a host."""

    def __init__(self, program: Program, tiers: ExpertTiers, deadline_ns: int = 10**11) -> None:
        self.layers = tiers.host_layers
        super().__init__(card_part(program, self.layers), rows=ROWS)
        self.whole, self.counts = program, {"step": 1, "out": 1}
        self.skipped: list[int] = []
        self.weights = DequantisedWeights(program, np.float32, 1 << 30)
        for gate, ids in tiers.on_card.items():
            slots = np.full(program.weights[gate].shape[2], -1, np.int32)
            slots[list(ids)] = ids  # weights stay where they are
            self.put(f"slot map {gate}", slots)
        self.control = self.words_of("control", 1024)
        self.flags = self.words_of("hand-off words", hand_off_bytes(RANKS))
        state = self.words_of("hand-off state", 8 * STATE_WORDS)
        self.times = self.words_of("times", leg_bytes(1 + max(self.layers)))
        ops = [op for op in self.program.ops if isinstance(op, HandOffSend)]
        wide, used = max(op.x.elements for op in ops), max(op.ids.elements for op in ops)
        sizes = {"x": wide, "ids": used, "mix": used, "out": wide}
        payloads = {}
        self.payload: dict[str, dict[str, np.ndarray]] = {}
        for rows in ("step", "out"):
            areas = {name: self.words_of(f"{rows} {name}", 4 * ROWS * width) for name, width in sizes.items()}
            kinds = {name: np.int32 if name == "ids" else np.float32 for name in sizes}
            self.payload[rows] = {name: areas[name].view(kinds[name]).reshape(ROWS, -1) for name in sizes}
            payloads[rows] = HandOffBuffers(**{name: (areas[name].ctypes.data, width) for name, width in sizes.items()})
        addresses = [each.ctypes.data for each in (self.flags, self.control)]
        self.done = state[32:40]
        places = [state.ctypes.data + 8 * i for i in range(STATE_WORDS)]
        waits = (RANKS, deadline_ns, min(self.layers), max(self.layers))
        self.hand_off = HandOffAddresses(*addresses, *places, *waits, payloads, self.times.ctypes.data)

    def words_of(self, name: str, nbytes: int) -> np.ndarray:
        self.put(name, np.zeros(nbytes, np.uint8))
        return self.areas[name][:nbytes]

    @contextmanager
    def host(self, step: int, answers: int | None = None) -> Iterator[list[str]]:
        """Answers the hand-offs of a step, or the first few of them; yields what was wrong."""
        wrong: list[str] = []
        done = threading.Event()
        self.control.view(np.int64)[STEP // 8] = step

        def serve() -> None:
            for index in sorted(self.layers)[:answers]:
                while HandOffWords(self.flags).card_flag < target(step, index):
                    if done.is_set():
                        return wrong.append(f"hand-off {index} did not come")
                    time.sleep(0)
                if HandOffWords(self.flags).card_flag > target(step, index):
                    self.skipped.append(index)
                    continue
                part, sums = self.answer(index, wrong)
                for rank, columns in enumerate(np.array_split(np.arange(sums.shape[1]), RANKS)):
                    time.sleep(0.001)
                    part[: len(sums), columns] = sums[:, columns]
                    self.flags.view(np.int64)[(2 + rank) * LINE // 8] = target(step, index)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield wrong
        finally:
            done.set()
            thread.join(60)

    def answer(self, index: int, wrong: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Where the sums of a hand-off go, and these."""
        send = next(op for op in self.program.ops if isinstance(op, HandOffSend) and op.index == index)
        op = [op for op in self.whole.ops if isinstance(op, RoutedExperts)][index]
        slots = self.areas[f"slot map {op.gate}"].view(np.int32)
        kind = self.program.buffers[send.x.buffer].rows
        part, count = self.payload[kind], self.counts[kind]
        widths = {"x": op.x.elements, "ids": op.ids.elements, "mix": op.mix.elements}
        x, ids, mix = (part[name][:count, :width] for name, width in widths.items())
        here = [i for row in ids for i in row[: list(row).index(-1) if -1 in row else None] if slots[i] >= 0]
        if here:
            wrong.append(f"hand-off {index} sent ids {here} that lie on the card")
        if index != max(self.layers) and all(row[0] < 0 for row in ids):
            wrong.append(f"hand-off {index} was sent and had nothing for the host")
        weights = self.weights

        def matrices(e: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            return weights.expert(op.gate, e), weights.expert(op.up, e), weights.expert(op.down, e)

        return part["out"], routed_experts(x, ids, mix, matrices, op.limit)

    def play(self, rows: int, step: int, start: int = 0) -> list[str]:
        self.counts = {"step": rows, "out": rows}
        with self.host(step) as wrong:
            self.run(rows_of(np.arange(7, 7 + rows), start=start), block=False)
        return wrong


@pytest.mark.parametrize(
    "name, share",
    (("qwen3moe-Q4_K_M", 0.5), ("qwen3moe-Q4_K_M", 0.0), ("deepseek2-v3-Q3_K_M", 0.5), ("deepseek2-v3-Q4_K_M", 0.0)),
)
def test_joined_hand_offs_change_no_bit(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All buffers as with a send, experts, a receive and a sum one after the other, whether the answers come while
    experts are opened or later; near those of a whole card."""
    program = build_program(ModelFile.open(quantised_file(name)))
    tiers = tiers_of(program, share)
    views = {each: View(each, 0, buffer.width) for each, buffer in program.buffers.items()}
    for rows in (1, 3):
        found = []
        for lowering, linger in ((Lowering, AS_LONG_AS_IT_TAKES), (Lowering, 0), (Unchained, 0)):
            monkeypatch.setattr("bloomery.gpu_worker.lowering.Lowering", lowering)
            monkeypatch.setattr("bloomery.gpu_worker.hand_off_lowering._LINGER_NS", linger)
            card = HostedCard(program, tiers)
            for step in (5, 6):  # the same rows twice: what the first left behind is in no one's way
                assert not card.play(rows, step, start=rows * (step - 5))
                assert not card.done.any()
            found.append({each: card.read(view, rows) for each, view in views.items()})
        monkeypatch.setattr("bloomery.gpu_worker.lowering.Lowering", Lowering)
        for each in ("hidden", program.logits, program.argmax):
            for other in found[1:]:
                assert np.array_equal(found[0][each], other[each]), (each, rows)
        whole = EmulatedCard(program, rows=ROWS)
        for step in range(2):
            whole.run(rows_of(np.arange(7, 7 + rows), start=rows * step), block=False)
        logits, expected = found[0][program.logits], whole.read(views[program.logits], rows)
        rms = float(np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2)))
        assert rms < 0.05, rms  # the host's rounding of activations is not the card's


@pytest.mark.parametrize("linger", (0, AS_LONG_AS_IT_TAKES))
def test_times_of_joined_hand_offs(linger: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-off has been sent before it is seen, and the card's own work ends between or after. The block that sent
    sees the answer while others, which come later on the emulator, are at work, if it is given the time."""
    monkeypatch.setattr("bloomery.gpu_worker.hand_off_lowering._LINGER_NS", linger)
    program = build_program(ModelFile.open(quantised_file("qwen3moe-Q4_K_M")))
    card = HostedCard(program, tiers_of(program, 0.5))
    begun = time.monotonic_ns()
    assert not card.play(2, 9)
    legs = LegWords(card.times, card.layers)
    legs.note(9, time.monotonic_ns() - begun)
    step = legs.read(9)
    assert step is not None
    sent, ready, seen = step.hand_offs.T
    assert (begun < sent).all() and (sent < seen).all() and (sent < ready).all()
    assert (np.maximum(ready, seen)[:-1] < sent[1:]).all()
    assert not linger or (seen < ready).all()


@pytest.mark.parametrize("name", ("qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M"))
@pytest.mark.parametrize("told", (False, True))
def test_a_host_that_does_not_answer_ends_the_step(name: str, told: bool) -> None:
    """The first hand-off that is not answered is waited for, until it is late or told to end; those after it are not;
    and the next step is whole again."""
    program = build_program(ModelFile.open(quantised_file(name)))
    deadline = 10**11 if told else 3 * 10**8
    card = HostedCard(program, tiers_of(program, 0.5), deadline)
    if told:
        card.control.view(np.int64)[ABORT // 8] = 3
    begun = time.monotonic()
    with card.host(3, answers=1):
        card.run(rows_of([7]), block=False)
    took = time.monotonic() - begun
    reason, rank = HandOffWords(card.flags).cut(3) or (None, None)
    assert reason is (CutReason.TOLD if told else CutReason.LATE) and rank in range(RANKS)
    assert took < 20
    logits = View(program.logits, 0, program.buffers[program.logits].width)
    before = card.read(logits, 1)
    card.hand_off = replace(card.hand_off, deadline_ns=10**11)
    assert not card.play(1, 4)
    again = HostedCard(program, tiers_of(program, 0.5))
    assert not again.play(1, 1)
    after, expected = (each.read(logits, 1) for each in (card, again))
    assert np.array_equal(after, expected) and not np.array_equal(before, after)


@pytest.mark.parametrize("name", ("qwen3moe-Q4_K_M", "deepseek2-v3-Q3_K_M"))
def test_hand_offs_without_work_cost_the_host_nothing(name: str) -> None:
    """With two experts of a layer on the host most steps have layers that chose none of them: the host is told of those
    by the next flag only, or by the last one, and the results are those of a host that is told of each."""
    program = build_program(ModelFile.open(quantised_file(name)))
    whole = ExpertTiers.everything(program)
    tiers = ExpertTiers(whole.layers, {gate: ids[2:] for gate, ids in whole.on_card.items()})
    card, logits = HostedCard(program, tiers), View(program.logits, 0, program.buffers[program.logits].width)
    expected = EmulatedCard(program, rows=ROWS)
    for step in range(6):
        assert not card.play(1, 5 + step, start=step)
        expected.run(rows_of([7], start=step), block=False)
        found, wanted = card.read(logits, 1), expected.read(logits, 1)
        assert np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)) < 0.05
    assert 0 < len(card.skipped) < 6 * len(card.layers) and max(card.layers) not in card.skipped
    words = card.times.view(np.int64)[LINE // 8 :].reshape(-1, 4)[:, :3]
    assert all((words[index] == 0).all() or (words[index] > 0).all() for index in card.layers)


def test_steps_without_wanted_rows_reach_the_host() -> None:
    """The last layer computes wanted rows only; of none of them the host hears, and ends the step."""
    program = build_program(ModelFile.open(quantised_file("qwen3moe-Q4_K_M")))
    card = HostedCard(program, tiers_of(program, 0.5))
    card.counts = {"step": 3, "out": 0}
    with card.host(2) as wrong:
        card.run(rows_of([7, 8, 9], out="none"), block=False)
    assert not wrong and HandOffWords(card.flags).card_flag == target(2, max(card.layers))
