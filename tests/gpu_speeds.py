"""Times the card executor on the card that is present: products, experts, whole models.

    python tests/gpu_speeds.py [--model FILE.gguf ...] [--skip-large] [--json FIGURES]

Prints tables: products against the measured copy bandwidth, decode and prompt speed of the given models, and of one
with Qwen3-30B-A3B's shapes and random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from card_stand import Bench, steps, tensor
from gguf_bytes import random_blocks
from numpy.typing import NDArray
from running import rows_of

from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.gpu_worker.driver import Card
from bloomery.gpu_worker.launches import Launch
from bloomery.runtime.architectures import build_program
from bloomery.runtime.model_file import ModelFile, Tensor
from bloomery.runtime.program import MatMul, Program, RoutedExperts, Router
from bloomery.runtime.quant_types import QuantType

Figures = dict[str, Any]


def copy_bandwidth() -> float:
    """GB/s of a device copy of 4 GiB, bytes read and written; median of 9."""
    card = Card()
    try:
        with card.current("measuring copies"):
            nbytes = 4 << 30
            source, target = card.cuda.mem_alloc(nbytes), card.cuda.mem_alloc(nbytes)
            card.cuda.memset_d32(source, 0x3F8A1234, nbytes // 4)
            times = []
            for _ in range(9):
                times.append(timed(card, lambda: card.cuda.memcpy_dtod_async(target, source, nbytes, card.stream)))
            source.free()
            target.free()
            return 2 * nbytes / float(np.median(times)) / 1e9
    finally:
        card.close()


def timed(card: Card, work: Any) -> float:
    begun, ended = card.cuda.Event(), card.cuda.Event()
    begun.record(card.stream)
    work()
    ended.record(card.stream)
    ended.synchronize()
    return float(ended.time_since(begun)) / 1e3


_POOL: dict[str, NDArray[np.uint8]] = {}


def random_tensor(name: str, shape: tuple[int, ...], kind: str) -> Tensor:
    """Random blocks; tensors of one type share the same bytes on the host."""
    quant = QuantType.named(kind)
    nbytes = quant.row_bytes(shape[0]) * int(np.prod(shape[1:]))
    if kind == "F32":
        values = np.random.default_rng(len(name)).standard_normal(nbytes // 4, np.float32)
        return tensor(name, shape, kind, values * np.float32(0.02) + (1 if len(shape) == 1 else 0))
    if len(_POOL.get(kind, ())) < nbytes:
        some = np.frombuffer(random_blocks(np.random.default_rng(7), kind, (256 * 4096, 8)), np.uint8)
        _POOL[kind] = np.resize(some, max(nbytes, 200 << 20) // len(some) * len(some) + len(some))
    return Tensor(name, shape, quant, _POOL[kind][:nbytes], Path("random"), 0)


def graph_seconds(executor: CardExecutor, rows: int, out_rows: int, labels: str = "", repeats: int = 30) -> float:
    """Median seconds of a replay of the graph of so many rows, or of its launches of ops with this label."""
    prepared = executor._prepare(rows, out_rows)
    if prepared.graph is None:
        raise RuntimeError("the step has not run yet")
    with executor.card.current("timing"):
        return float(np.median([timed(executor.card, prepared.graph.launch) for _ in range(repeats)]))


def op_seconds(executor: CardExecutor, rows: int, label: str, copies: int = 20) -> float:
    """Median seconds of an op's launches, captured `copies` times over in a graph of their own."""
    from bloomery.gpu_worker.driver import Graph

    launches = [launch for launch in executor.launches(rows, rows) if launch.label == label]
    assert launches, label
    with executor.card.current(f"timing {label}"):
        graph = Graph(executor.card)
        with graph.capture():
            for _ in range(copies):
                executor._launch_eagerly(launches, wait=False)
        graph.launch()
        seconds = float(np.median([timed(executor.card, graph.launch) for _ in range(9)])) / copies
        graph.close()
        return seconds


SHAPES = {  # of Qwen3-30B-A3B: inputs, outputs; enough copies to be several times the cache
    "attn_q": (2048, 4096),
    "attn_output": (4096, 2048),
    "head": (2048, 151936),
}


def product_speeds(kinds: tuple[str, ...], bandwidth: float) -> list[Figures]:
    """Weight bytes a second of matmuls whose weights together pass the cache, one and eight rows."""
    out = []
    for kind in kinds:
        for shape, (width, height) in SHAPES.items():
            nbytes = QuantType.named(kind).row_bytes(width) * height
            copies = max(1, (400 << 20) // nbytes)
            bench = Bench()
            x = bench.input("x", np.random.default_rng(1).standard_normal((64, width), np.float32))
            y = bench.buffer("y", height)
            for i in range(copies):
                bench.weights[f"w{i}"] = random_tensor(f"w{i}", (width, height), kind)
            ops = [MatMul("product", x, (y,), (f"w{i}",), (None,)) for i in range(copies)]
            executor = CardExecutor(bench.program(*ops), context=64, prompt_block=8)
            try:
                for rows in (1, 8):
                    executor.step(steps(range(rows)))
                    seconds = op_seconds(executor, rows, "product", 2)
                    speed = copies * nbytes / seconds / 1e9
                    share = speed / bandwidth
                    out.append(
                        {"type": kind, "shape": shape, "rows": rows, "us": 1e6 * seconds / copies, "GB/s": speed}
                    )
                    print(
                        f"{kind:8}{shape:12}{rows} rows {1e6 * seconds / copies:8.1f} us {speed:7.0f} GB/s {share:6.1%}"
                    )
            finally:
                executor.close()
    return out


def expert_speeds(kinds: tuple[tuple[str, str], ...], bandwidth: float) -> list[Figures]:
    """A routed layer of Qwen3-30B-A3B: 8 of 128 experts, 2048 -> 768 -> 2048; the bytes of the experts used."""
    out = []
    for kind, down in kinds:
        layers = 8
        bench = Bench()
        x = bench.input("x", np.random.default_rng(1).standard_normal((64, 2048), np.float32))
        logits = bench.input("scores", np.random.default_rng(2).standard_normal((64, 128), np.float32))
        ids, mix, y = bench.buffer("ids", 8, "i32"), bench.buffer("mix", 8), bench.buffer("y", 2048)
        ops: list[Any] = [Router("router", logits, ids, mix, None, "softmax", True, 1.0, 1, 1)]
        for i in range(layers):
            for name, shape, quant in (
                ("gate", (2048, 768), kind),
                ("up", (2048, 768), kind),
                ("down", (768, 2048), down),
            ):
                bench.weights[f"{name}{i}"] = random_tensor(f"{name}{i}", (*shape, 128), quant)
            ops.append(RoutedExperts("experts", x, ids, mix, y, f"gate{i}", f"up{i}", f"down{i}"))
        executor = CardExecutor(bench.program(*ops), context=64, prompt_block=8)
        try:
            for rows in (1, 8):
                executor.step(steps(range(rows)))
                seconds = op_seconds(executor, rows, "experts", 1) / layers
                with executor.card.current("reading ids"):
                    chosen = len(np.unique(executor.memory.buffer(ids, rows)))
                each = 2 * QuantType.named(kind).row_bytes(2048) * 768 + QuantType.named(down).row_bytes(768) * 2048
                speed = chosen * each / seconds / 1e9
                out.append({"types": [kind, down], "rows": rows, "us": 1e6 * seconds, "GB/s": speed})
                print(
                    f"experts {kind} {down} {rows} rows, {chosen} experts {1e6 * seconds:8.1f} us {speed:7.0f} GB/s"
                    f" {speed / bandwidth:6.1%}"
                )
        finally:
            executor.close()
    return out


def profile(executor: CardExecutor, launches: list[Launch], least: float = 0.01) -> Figures:
    """Milliseconds of each kernel in these launches, run one after the other: each between two events of its own."""
    cuda, stream = executor.card.cuda, executor.card.stream
    with executor.card.current("profiling"):
        events = [cuda.Event() for _ in range(len(launches) + 1)]
        events[0].record(stream)
        for launch, event in zip(launches, events[1:]):
            executor._kernels.launch(launch)
            event.record(stream)
        events[-1].synchronize()
        times: dict[str, list[float]] = {}
        for launch, before, after in zip(launches, events, events[1:]):
            times.setdefault(str(launch.kernel), []).append(float(after.time_since(before)))
    whole = sum(sum(each) for each in times.values())
    print(f"profile of {len(launches)} launches, {whole:.2f} ms:")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        if sum(each) > least * whole:
            print(f"  {name:36}{len(each):5} x {1e3 * sum(each) / len(each):9.1f} us = {sum(each):8.2f} ms")
    return {name: sum(each) for name, each in times.items()}


def prompt_speed(executor: CardExecutor, tokens: NDArray[np.int32], block: int, prompt: int) -> float:
    """Tokens a second of a prompt in blocks, the logits of its last row wanted."""
    begun = time.perf_counter()
    for first in range(0, prompt, block):
        last = min(first + block, prompt)
        executor.step(rows_of(tokens[first:last], start=first, out="last" if last == prompt else "none"))
    return prompt / (time.perf_counter() - begun)


def model_speeds(name: str, program: Program, depths: tuple[int, ...], context: int, prompt: int) -> Figures:
    """Prompt and decode tokens a second, as seen by the caller of `step`; and the card's own time of a step."""
    executor = CardExecutor(program, context=context, slots=1, prompt_block=min(4096, prompt), cache_type="f16")
    out: Figures = {"model": name, "card_bytes": sum(executor.memory.sizes.values())}
    try:
        tokens = np.random.default_rng(3).integers(0, min(1000, program.vocabulary), context).astype(np.int32)
        executor.step(rows_of(tokens[:9], out="last"))
        executor.step(rows_of(tokens[:8], out="none"))
        executor.step(rows_of(tokens[:1]))
        for block in (512, 2048, 4096):
            if block <= executor.max_rows:
                prompt_speed(executor, tokens, block, min(prompt, 2 * block))
                rates = [prompt_speed(executor, tokens, block, prompt) for _ in range(3)]
                out[f"prompt {prompt}/{block} tok/s"] = float(np.median(rates))
        out["profile"] = profile(executor, executor._block(executor.max_rows, 1))
        for depth in depths:
            count = 64
            begun = time.perf_counter()
            for i in range(count):
                executor.step(rows_of(tokens[:1], start=depth + i))
            out[f"decode tok/s at {depth}"] = count / (time.perf_counter() - begun)
            out[f"card ms at {depth}"] = 1e3 * graph_seconds(executor, 1, 1)
        out["nodes"] = executor.statistics()["graph_nodes"]
        eight = rows_of(tokens[:8], start=depths[0])
        executor.step(eight)
        out["8 rows ms"] = 1e3 * graph_seconds(executor, 8, 8)
    finally:
        executor.close()
    for key, value in out.items():
        if key != "profile":
            print(f"{key:26}{value:.5g}" if isinstance(value, float) else f"{key:26}{value}")
    return out


class RandomQwen3(ModelFile):
    """Qwen3-30B-A3B's shapes in llama.cpp's Q4_K_M mix with random weights: 48 layers, 18.5 GB on the card."""

    def __init__(self, layers: int = 48) -> None:
        width, heads, kv, head, experts, hidden, vocabulary = 2048, 32, 4, 128, 128, 768, 151936
        self.path = Path("random-qwen3-30b")  # type: ignore[misc]
        prefix = "qwen3moe."
        self.metadata = {  # type: ignore[misc]
            "general.architecture": "qwen3moe",
            "tokenizer.ggml.tokens": ["a"] * vocabulary,
            prefix + "context_length": 40960,
            prefix + "embedding_length": width,
            prefix + "block_count": layers,
            prefix + "feed_forward_length": 6144,
            prefix + "attention.head_count": heads,
            prefix + "attention.head_count_kv": kv,
            prefix + "attention.key_length": head,
            prefix + "attention.value_length": head,
            prefix + "attention.layer_norm_rms_epsilon": 1e-6,
            prefix + "rope.freq_base": 1e6,
            prefix + "expert_count": experts,
            prefix + "expert_used_count": 8,
            prefix + "expert_feed_forward_length": hidden,
        }
        self.tensors = {}  # type: ignore[misc]
        self._add("token_embd", "Q4_K", width, vocabulary)
        self._add("output", "Q6_K", width, vocabulary)
        self._add("output_norm", "F32", width)
        for i in range(layers):
            more = "Q6_K" if i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2 else "Q4_K"
            for name, kind, *shape in (
                ("attn_norm", "F32", width),
                ("attn_q", "Q4_K", width, heads * head),
                ("attn_k", "Q4_K", width, kv * head),
                ("attn_v", more, width, kv * head),
                ("attn_output", "Q4_K", heads * head, width),
                ("attn_q_norm", "F32", head),
                ("attn_k_norm", "F32", head),
                ("ffn_norm", "F32", width),
                ("ffn_gate_inp", "F32", width, experts),
                ("ffn_gate_exps", "Q4_K", width, hidden, experts),
                ("ffn_up_exps", "Q4_K", width, hidden, experts),
                ("ffn_down_exps", more, hidden, width, experts),
            ):
                self._add(f"blk.{i}.{name}", kind, *shape)

    def _add(self, name: str, kind: str, *shape: int) -> None:
        self.tensors[f"{name}.weight"] = random_tensor(f"{name}.weight", shape, kind)  # type: ignore[index]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-large", action="store_true")
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: Figures = {}
    models = figures["models"] = []
    if not arguments.skip_large:  # what matters most comes first
        large = build_program(RandomQwen3())
        models.append(model_speeds("Qwen3-30B-A3B shapes", large, (6, 1024, 4096, 16000), 16384, 4096))
    models += [model_speeds(m.name, build_program(ModelFile.open(m)), (6, 400), 1024, 512) for m in arguments.model]
    bandwidth = figures["copy GB/s"] = copy_bandwidth()
    print(f"copy {bandwidth:.0f} GB/s (read + written)")
    figures["experts"] = expert_speeds((("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")), bandwidth)
    figures["products"] = product_speeds(("Q4_K", "Q6_K", "Q3_K", "Q8_0", "Q5_0", "IQ4_XS", "F16"), bandwidth)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
