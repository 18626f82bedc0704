"""Times the host's leg of hand-offs without a card: the real ranks' code and kernels, a card played by one of them.

    python tests/hand_off_speed.py [--ranks N] [--experts N] [--used N] [--width N] [--hidden N] [--on-host N ...]

Ranks are threads of this process, which run `interpreter.serve` without the GIL, pinned one to a core. Rank 0 raises
the card's flag when all have answered the hand-off before. One line for each number of chosen experts that lie on the
host: microseconds from the card's flag to the next one, the median of the steps' means and the least.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from in_process import InProcessExecutor
from numba import cfunc, int64, void
from numpy.typing import NDArray

from bloomery.cpu_experts import interpreter
from bloomery.cpu_experts.compile_cache import compile_kernel
from bloomery.cpu_experts.stage import HandOffPlace
from bloomery.cpu_experts.worker import aligned_words
from bloomery.runtime.hand_off import BUFFERS, RANK_FLAGS, hand_off_bytes
from bloomery.runtime.model_file import Tensor
from bloomery.runtime.ops_hand_off import HandOffAnswer, HandOffWait
from bloomery.runtime.program import Buffer, Program, RoutedExperts, View
from bloomery.runtime.quant_types import QuantType
from bloomery.runtime.step_record import (
    DONE,
    LINE,
    RANK_BYTES,
    RANK_LINES,
    ROWS,
    STAGE_BITS,
    STEP,
    STOP,
    control_bytes,
    record_bytes,
)
from bloomery.runtime.sync import load_acquire, pause, store_release, ticks

LAYERS = 8
X, IDS, MIX, OUT = BUFFERS["step"]


def _play(args: int, rank: int, ranks: int, step: int) -> None:
    """args: the hand-off words, the control block, the number of the hand-off, where its time goes. What rank 0 does as
    the card."""
    if rank != 0:
        return
    before = load_acquire(args + 16) + (load_acquire(load_acquire(args + 8) + STEP) << STAGE_BITS)
    words = load_acquire(args)
    for other in range(ranks):
        while load_acquire(args + 16) != 0 and load_acquire(words + RANK_FLAGS + other * LINE) < before:
            pause()
    store_release(load_acquire(args + 24), ticks())
    store_release(words, before + 1)


def random_weights(name: str, kind: str, width: int, rows: int, experts: int) -> Tensor:
    """Blocks of random bytes but for the scales of Q4_K and Q6_K, so that no product overflows."""
    quant = QuantType.named(kind)
    data = np.random.default_rng(1).integers(0, 255, quant.row_bytes(width) * rows * experts, np.uint8)
    nbytes, at = {"Q4_K": (144, 0), "Q6_K": (210, 208)}[kind]
    data.reshape(-1, nbytes)[:, at : at + 4] = np.array([0x2000, 0x2000], np.uint16).view(np.uint8)[: nbytes - at]
    return Tensor(name, (width, rows, experts), quant, data, Path("none.gguf"), 0)


def host_program(width: int, hidden: int, experts: int, used: int, down: str) -> Program:
    """One layer's experts for each of LAYERS hand-offs."""
    buffers = [Buffer(X, width), Buffer(IDS, used, dtype="i32"), Buffer(MIX, used), Buffer(OUT, width)]
    weights: dict[str, Tensor] = {}
    ops: list[Any] = []
    for layer in range(LAYERS):
        for name, kind, inputs, outputs in (
            ("gate", "Q4_K", width, hidden),
            ("up", "Q4_K", width, hidden),
            ("down", down, hidden, width),
        ):
            weights[f"{name}{layer}"] = random_weights(f"{name}{layer}", kind, inputs, outputs, experts)
        views = (View(X, 0, width), View(IDS, 0, used), View(MIX, 0, used))
        out = View(OUT, 0, width)
        ops.append(HandOffWait(f"wait{layer}", layer, views))
        ops.append(RoutedExperts(f"experts{layer}", *views, out, f"gate{layer}", f"up{layer}", f"down{layer}"))
        ops.append(HandOffAnswer(f"answer{layer}", layer, out))
    buffers += [Buffer("logits", 1), Buffer("argmax", 1, dtype="i32")]
    return Program("test", MappingProxyType({b.name: b for b in buffers}), {}, weights, tuple(ops), 1, 1, LAYERS)


class Stand(InProcessExecutor):
    """The memory of the ranks, and their threads."""

    def __init__(self, program: Program, ranks: int) -> None:
        self.words = aligned_lines(hand_off_bytes(ranks))
        self.control = aligned_lines(control_bytes(ranks))
        self.record = aligned_lines(record_bytes(8))
        self.times = aligned_words(LAYERS + 1)
        super().__init__(program, max_rows=8, max_out_rows=8, ranks=ranks)
        self._play = cfunc(void(int64, int64, int64, int64))(_play)
        self._kept: list[NDArray[np.int64]] = []
        interpreter.now_ticks()
        begun, first = time.perf_counter(), interpreter.now_ticks()
        time.sleep(0.05)
        self.tick_rate = (interpreter.now_ticks() - first) / (time.perf_counter() - begun)
        cores = sorted(os.sched_getaffinity(0))
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, cores[rank % len(cores)], self._table()))
            for rank in range(ranks)
        ]
        interpreter.compile_interpreter()
        for thread in self._threads:
            thread.start()

    def hand_off(self) -> HandOffPlace:
        return HandOffPlace(self.words.ctypes.data, self.control.ctypes.data, 10**10)

    def _table(self) -> NDArray[np.int64]:
        stages: list[tuple[int, list[int], bool]] = []
        for stage in self.stages:
            if stage.kernel == "hand_off_wait":
                stages.append(self._card(stage.arguments[2]))
            stages.append((compile_kernel(stage.kernel), list(stage.arguments), stage.barrier))
        stages.append(self._card(LAYERS))
        table = aligned_words(interpreter.STAGE_WORDS * len(stages)).reshape(-1, interpreter.STAGE_WORDS)
        for entry, (kernel, arguments, barrier) in zip(table, stages, strict=True):
            words = aligned_words(len(arguments))
            words[:] = arguments
            self._kept.append(words)
            entry[:] = kernel, words.ctypes.data, barrier
        return table

    def _card(self, index: int) -> tuple[int, list[int], bool]:
        times = self.times.ctypes.data + 8 * index
        return int(self._play.address), [self.words.ctypes.data, self.control.ctypes.data, index, times], False

    def _serve(self, rank: int, core: int, table: NDArray[np.int64]) -> None:
        os.sched_setaffinity(0, {core})
        private = aligned_words(interpreter.PRIVATE_WORDS)
        self._kept += [table, private]
        private[interpreter.SPINS // 8] = 20000
        private[interpreter.YIELDS // 8] = 1
        private[interpreter.IDLE_NS // 8] = private[interpreter.DEADLINE_NS // 8] = 10**10
        private[interpreter.REPORTERS // 8] = self.ranks
        places = (self.control.ctypes.data, self.record.ctypes.data, table.ctypes.data, len(table), private.ctypes.data)
        while interpreter.serve(*places, rank, self.ranks) != interpreter.Reason.STOPPED:
            pass

    def seconds(self) -> float:
        """Of a hand-off, the mean of a step."""
        words = self.control.view(np.int64)
        self.record.view(np.int64)[ROWS // 8] = 1
        step = int(words[STEP // 8]) + 1
        done = [(RANK_LINES + rank * RANK_BYTES + DONE) // 8 for rank in range(self.ranks)]
        words[STEP // 8] = step
        while any(words[at] != step for at in done):
            time.sleep(1e-4)
        return float(self.times[-1] - self.times[0]) / LAYERS / self.tick_rate

    def close(self) -> None:
        self.control.view(np.int64)[STOP // 8] = 1
        for thread in self._threads:
            thread.join()


def aligned_lines(nbytes: int) -> NDArray[np.uint8]:
    return aligned_words(-(-nbytes // 8)).view(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--used", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--down", choices=("Q4_K", "Q6_K"), default="Q6_K")
    parser.add_argument("--on-host", type=int, nargs="*", default=[0, 1, 4, 8])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    program = host_program(arguments.width, arguments.hidden, arguments.experts, arguments.used, arguments.down)
    stand = Stand(program, arguments.ranks)
    generator = np.random.default_rng(2)
    stand.buffers[X][:] = generator.standard_normal(stand.buffers[X].shape, np.float32)
    stand.buffers[MIX][:] = 0.1
    try:
        for count in arguments.on_host:
            seconds = []
            for _ in range(arguments.steps):
                stand.buffers[IDS][0, : arguments.used] = -1
                stand.buffers[IDS][0, :count] = generator.choice(arguments.experts, count, replace=False)
                seconds.append(1e6 * stand.seconds())
            print(f"{count} of {arguments.used} on the host: {np.median(seconds):7.2f} us, least {min(seconds):7.2f}")
    finally:
        stand.close()


if __name__ == "__main__":
    main()
