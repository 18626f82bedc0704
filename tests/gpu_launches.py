"""Says where a decode step's time goes on the card that is present: each launch of one row's step, repeated alone.

    python tests/gpu_launches.py deepseek41 --layers 8 --experts 16 --mix Q3_K_M --depth 300 --show blk.4.,blk.5.

A launch is repeated 20 times in a graph of its own, so that what is shown is what it adds to a step in which launches
overlap, at best: its inputs are in the card's caches, and the launches beside it are its own.
"""

from __future__ import annotations

import argparse
import contextlib

import numpy as np
from running import rows_of

from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.gpu_worker.driver import Graph
from bloomery.gpu_worker.launches import Launch
from bloomery.gpu_worker.lowering import lower
from bloomery.runtime.architectures import build_program
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.synthetic_file import synthetic_file

REPEATED, BEST_OF, BLOCK = 20, 5, 256


def graph_us(executor: CardExecutor, launches: list[Launch], beside: bool) -> tuple[float, int]:
    """Microseconds of a graph of these launches, the best of some, and its nodes; `beside`: with those beside others
    that may be. The card's context is current."""
    event, stream, found = executor.card.cuda.Event, executor.card.stream, []
    with contextlib.closing(Graph(executor.card)) as graph:
        with graph.capture(), executor._kernels.beside() if beside else contextlib.nullcontext():
            executor._launch_eagerly(launches, wait=False)
        for _ in range(BEST_OF):
            begun, ended = event(), event()
            begun.record(stream)
            graph.launch()
            ended.record(stream)
            ended.synchronize()
            found.append(1e3 * float(ended.time_since(begun)))
        return min(found), graph.nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("template", help="whose shapes: see bloomery-bench --synthetic")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=0, help="experts a layer (default: as bloomery-bench)")
    parser.add_argument("--mix", default="Q4_K_M")
    parser.add_argument("--depth", type=int, default=300, help="tokens before the step")
    parser.add_argument("--show", default="blk.", help="beginnings of ops' names, with commas between")
    arguments = parser.parse_args()
    file = synthetic_file(arguments.template, arguments.layers, arguments.mix, arguments.experts)
    program = build_program(ModelFile.open(file))
    depth = arguments.depth
    tokens = np.random.default_rng(1).integers(1, 1000, depth + 2)
    executor = CardExecutor(program, context=depth + 64, slots=1, prompt_block=BLOCK)
    with contextlib.closing(executor):
        for first in range(0, depth, BLOCK):
            executor.step(rows_of(tokens[first : min(first + BLOCK, depth)], start=first, out="none"))
        for at in range(depth, depth + 2):
            executor.step(rows_of(tokens[at : at + 1], start=at))
        launches = lower(program, executor.memory, 1, 1)
        with executor.card.current("timing launches"):
            whole, nodes = graph_us(executor, launches, beside=True)
            print(f"graph of the step: {whole:.0f} us, {nodes} nodes")
            for launch in launches:
                if launch.label.startswith(tuple(arguments.show.split(","))):
                    took = graph_us(executor, [launch] * REPEATED, beside=False)[0] / REPEATED
                    print(f"{took:8.2f} us  {launch.kernel!s:36} {launch.grid} x {launch.threads}  {launch.label}")


if __name__ == "__main__":
    main()
