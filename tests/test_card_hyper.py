"""The reading side of hyper-connections in one launch against its ops one by one, on the emulator: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_stand import Bench, NoCard, f32
from deepseek_data import figures41, program_of, tiny4, tiny41
from emulated_card import EmulatedCard
from numpy.typing import NDArray
from running import rows_of
from test_card_units import weights

from bloomery.gpu_worker.chain_lowering import joined_always
from bloomery.gpu_worker.chains import Chained, Spreading, chained
from bloomery.gpu_worker.early_collapse import collapsed_early
from bloomery.gpu_worker.fusions import fused
from bloomery.gpu_worker.hyper_lowering import HyperRead, read_together
from bloomery.gpu_worker.launches import Launch
from bloomery.gpu_worker.lowering import Lowering
from bloomery.gpu_worker.products import UNIT_TYPES
from bloomery.gpu_worker.prompt_lowering import lower_prompt
from bloomery.runtime.ops_deepseek4 import EngramGate, HyperCollapse, HyperMix, HyperPost
from bloomery.runtime.program import Add, MatMul, Op, Program, View

pytestmark = pytest.mark.timeout(300)


class OneByOne(Lowering):
    """Without the launch in question."""

    def parts(self) -> Iterable[Chained]:
        return chained(fused(self.program), lambda shared: joined_always(self, shared))


def reads(launches: Iterable[Launch]) -> list[Launch]:
    return [launch for launch in launches if launch.kernel.function == "hyper_read"]


def early(launches: Iterable[Launch]) -> list[Launch]:
    """Those that collapse the copies they make."""
    makers = [launch for launch in launches if launch.kernel.function in ("spread_matmul", "close_experts")]
    return [launch for launch in makers if launch.label.endswith("_collapse")]


def both_ways(
    program: Program, tokens: NDArray[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Launch], list[Launch], dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Launches of one step of these tokens with and without those in question, and what is then in all buffers and
    caches. Words between blocks are 0 afterwards; a second step in the same memory gives the same."""
    found = []
    for lowering in (Lowering, OneByOne):
        monkeypatch.setattr("bloomery.gpu_worker.lowering.Lowering", lowering)
        card = EmulatedCard(program, rows=8)
        for _ in range(2):
            launches = list(card.run(rows_of(tokens), block=False))
            made = {name: card.read(View(name, 0, b.width), len(tokens)) for name, b in program.buffers.items()}
            made |= {name: held.copy() for name, held in card.areas.items() if name.startswith("cache ")}
            words = [held[:-256] for name, held in card.areas.items() if name.startswith("constant words of hyper")]
            assert bool(words) == bool(reads(launches)) and not any(held.any() for held in words)
            found.append((launches, made))
    (one, first), (_, again), (apart, other), _ = found
    assert same(first, again) == [] and not reads(apart)
    return one, apart, first, other


def same(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> list[str]:
    """Names of what differs."""
    return [name for name, held in one.items() if held.tobytes() != other[name].tobytes()]


def with_products(program: Program, kind: str) -> Program:
    """The same with random weights of another type where mixes are made."""
    generator = np.random.default_rng(41)
    changed = dict(program.weights)
    for op, mix in pairwise(program.ops):
        if isinstance(op, MatMul) and isinstance(mix, HyperMix):
            (name,) = op.weights
            changed[name] = weights(generator, kind, name, *program.weights[name].shape[:2])
    return replace(program, weights=changed)


@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("path", (lambda: tiny41("a"), lambda: tiny4("MXFP4_MOE")), ids=("deepseek41", "deepseek4"))
def test_models(path: Callable[[], Path], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sublayer, and deepseek4's head, of rows that are cut to the wanted ones."""
    program = with_products(program_of(path()), "Q3_K")
    tokens = figures41("tiny-deepseek41-a")["ids"][:rows] % program.vocabulary
    launches, apart, one, other = both_ways(program, tokens, monkeypatch)
    assert same(one, other) == []
    mixes = sum(isinstance(op, HyperMix) for op in program.ops)
    collapses = sum(isinstance(op, HyperCollapse) for op in program.ops)
    found = [len(launch.label.split(" & ")) for launch in reads(launches)]
    # of 4.1 the first sublayer collapses nothing, and the head has no mix of its own; a single row's copies are
    # collapsed where they are made, but for those that an engram adds to, or of which wanted rows are taken
    assert len(found) == mixes
    if path() == tiny4("MXFP4_MOE"):
        assert found.count(3) == collapses and not early(launches)
    elif rows == 1:
        assert found.count(3) == sum(isinstance(op, EngramGate) for op in program.ops) + 1
        assert found.count(3) + len(early(launches)) == collapses
    else:
        assert found.count(3) == collapses - 1 and not early(launches)
    assert len(launches) <= len(apart) - sum(found)
    assert not reads(lower_prompt(program, NoCard(program), 40, 1))


def test_types_of_a_file_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float weights stay what they were."""
    launches, apart, one, other = both_ways(program_of(tiny4("MXFP4_MOE")), np.arange(1), monkeypatch)
    assert not reads(launches) and len(launches) == len(apart) and same(one, other) == []


class Copies:
    """What one sublayer reads, in a program of its own: logits are "scores", the rest has the names of HyperMix."""

    def __init__(self, kind: str, copies: int, width: int, start: int = 0) -> None:
        generator = np.random.default_rng(copies + width)
        self.bench, self.copies, all_of = Bench(), copies, copies * width
        values = generator.standard_normal((64, start + all_of + 4 * (start > 0)), np.float32)
        held = self.bench.input("streams", values * np.float32(3.0))
        self.streams = View(held.buffer, start, width, copies, width)
        self.flat = View(held.buffer, start, all_of)
        self.earlier = self.bench.input("earlier", generator.random((64, copies), np.float32))
        outputs = copies * (copies + 2)
        self.mixes = {name: self.bench.buffer(name, n) for name, n in (("pre", copies), ("post", copies))}
        self.mixes["mixing"] = self.bench.buffer("mixing", copies * copies)
        self.scores, self.out = self.bench.buffer("scores", outputs), self.bench.buffer("collapsed", width)
        self.weight = weights(generator, kind, "fn", all_of, outputs)
        sums = values[:, start : start + all_of] @ self.weight.dequantise(np.float32).reshape(outputs, all_of).T
        scale = (0.5 + generator.random(3)) / np.abs(sums).mean()  # nothing is all 0 or 1
        self.bench.weights |= {"fn": self.weight, "scale": f32("scale", scale)}
        self.bench.weights["base"] = f32("base", generator.standard_normal(outputs))

    def program(
        self, *, pre: View | None = None, bias: bool = False, second: bool = False, head: bool = False
    ) -> Program:
        """`pre`: of which mix the copies are collapsed; `head`: a mix without what goes back to the copies."""
        bench, mixes = self.bench, self.mixes
        logits = View("scores", 0, self.copies) if head else self.scores
        if head:
            data = self.weight.data[: self.copies * self.weight.quant_type.row_bytes(self.flat.elements)]
            bench.weights["fn"] = replace(self.weight, shape=(self.flat.elements, self.copies), data=data)
        if bias:
            bench.weights["bias"] = f32("bias", np.arange(logits.elements, dtype=np.float32))
        outs: tuple[View, ...] = (logits,)
        if second:
            outs = (logits, bench.buffer("more", logits.elements))
        product = MatMul("product", self.flat, outs, ("fn",) * len(outs), ("bias" if bias else None,) * len(outs))
        post, mixing = (None, None) if head else (mixes["post"], mixes["mixing"])
        mix = HyperMix("mix", self.streams, logits, mixes["pre"], post, mixing, "base", "scale", 1e-6, 1e-6, 20)
        ops: list[Op] = [product, mix]
        if pre is not None:
            ops.append(HyperCollapse("collapse", self.streams, pre, self.out))
        if not head:
            y = bench.input("y", np.ones((64, self.streams.width), np.float32))
            spread = bench.buffer("spread", self.flat.elements)
            after = replace(self.streams, buffer=spread.buffer, start=0)
            ops.append(HyperPost("spread", y, self.streams, mixes["post"], mixes["mixing"], after))
        return bench.program(*ops)


SIZES = ((4, 64), (3, 256), (2, 1024), (6, 256), (4, 1024), (4, 5120), (4, 7168))
"""Lanes of a row 4 to 32, chunks that are not full, all logits that fit, several turns of a lane."""


@pytest.mark.parametrize("whose", ("own", "earlier", "none", "head"))
@pytest.mark.parametrize("kind, copies, width", [(kind, *size) for kind in UNIT_TYPES for size in SIZES])
def test_sizes(kind: str, copies: int, width: int, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mix of this product and of another, with and without what goes back to the copies."""
    for rows in (1, 3):
        made = Copies(kind, copies, width)
        pre = {"own": made.mixes["pre"], "head": made.mixes["pre"], "earlier": made.earlier}.get(whose)
        program = made.program(pre=pre, head=whose == "head")
        launches, apart, one, other = both_ways(program, np.arange(5, 5 + rows), monkeypatch)
        (read,) = reads(launches)
        assert read.label == "product & mix" + " & collapse" * (pre is not None) and read.kernel.quant_type == kind
        assert len(apart) == len(launches) + 2 + (pre is not None)
        assert same(one, other) == []
        assert (np.abs(one["pre"] - 0.5) < 0.45).any()
        assert all(np.isfinite(held).all() for held in one.values() if held.dtype == np.float32)


def alone(kind: str = "Q3_K", copies: int = 4, start: int = 0, **how: Any) -> Program:
    made = Copies(kind, copies, 256, start)
    return made.program(pre=made.earlier, **how)


CASES: dict[str, Callable[[], Program]] = {
    "another type": lambda: alone("Q5_K"),
    "seven copies": lambda: alone(copies=7),
    "a bias": lambda: alone(bias=True),
    "two products": lambda: alone(second=True),
    "an odd place": lambda: alone(start=1),
}


@pytest.mark.parametrize("name", CASES)
def test_what_stays_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, apart, one, other = both_ways(CASES[name](), np.arange(2), monkeypatch)
    assert not reads(launches) and [launch.label for launch in launches] == [launch.label for launch in apart]
    assert same(one, other) == []


def test_what_belongs_together() -> None:
    """Nothing is put together across another op, and nothing that writes where others still read."""
    made = Copies("Q3_K", 4, 256)
    ops = [op for op in made.program(pre=made.mixes["pre"]).ops if op.name in ("product", "mix", "collapse")]
    product, mix, collapse = ops
    assert isinstance(product, MatMul) and isinstance(mix, HyperMix) and isinstance(collapse, HyperCollapse)

    def sizes(*parts: Op) -> list[int]:
        return [len(part.parts) if isinstance(part, HyperRead) else 1 for part in read_together(parts)]

    assert sizes(product, mix, collapse, product) == [3, 1]
    assert sizes(product, mix, product, mix) == [2, 2]
    assert sizes(product, collapse, mix) == [1, 1, 1] and sizes(mix, collapse) == [1, 1]
    assert sizes(product, mix, replace(collapse, streams=replace(made.streams, start=4))) == [2, 1]
    assert sizes(product, mix, replace(collapse, pre=made.mixes["post"])) == [2, 1]
    assert sizes(product, mix, replace(collapse, out=View("streams", 0, 256))) == [2, 1]
    assert sizes(product, replace(mix, pre=View("scores", 0, 4)), collapse) == [1, 1, 1]
    assert sizes(replace(product, x=made.earlier), mix) == [1, 1]


def test_what_is_collapsed_early() -> None:
    """A collapse goes to the copies it is of, unless somebody changes what it reads or looks at its result before."""
    made = Copies("Q3_K", 4, 256)
    ops = made.program(pre=made.earlier).ops
    product, mix, later = (op for op in ops if op.name in ("product", "mix", "collapse"))
    assert isinstance(product, MatMul) and isinstance(mix, HyperMix) and isinstance(later, HyperCollapse)
    given = (("x", 256), ("made", 256), ("more", 256), ("result", 256), ("old post", 4), ("old mixing", 16))
    x, y, more, out, old, older = (made.bench.input(name, np.zeros((64, size), np.float32)) for name, size in given)
    later = replace(later, out=out)
    last = MatMul("last", x, (y,), ("own",), (None,))
    made.bench.weights["own"] = f32("own", np.zeros((256, 256)))
    post = HyperPost("post", y, made.streams, old, older, made.streams)
    mean = Add("mean", View("streams", 0, 256), View("streams", 256, 256), more)

    def taken(*ops: Op, can: bool = True) -> list[str]:
        program = made.bench.program(*ops)
        found = list(collapsed_early(program, read_together(chained(ops)), lambda chain: can))
        names = [name for part in found for name in part.name.split(" & ")]
        assert sorted(names) == sorted(op.name for op in ops)
        return [part.name for part in found if isinstance(part, Spreading) and part.collapse]

    early = ["last & post & collapse"]
    assert taken(last, post, product, mix, later) == early
    assert taken(last, post, later) == taken(last, post, mean, later) == early
    assert taken(last, post, later, product, mix, replace(later, name="again")) == early
    assert taken(last, post, product, mix, later, can=False) == []
    assert taken(last, post, mean, replace(later, streams=replace(made.streams, count=3))) == []
    assert taken(last, post, product, replace(mix, pre=made.earlier), later) == []
    assert taken(last, post, product, mix, replace(later, pre=made.mixes["pre"])) == []
    assert taken(last, post, replace(mean, out=View("streams", 0, 256)), later) == []
    assert taken(last, post, replace(mean, out=later.out), later) == []
    assert taken(last, post, replace(mean, x=later.out), later) == []
    assert taken(last, post, replace(later, out=x)) == taken(last, post, replace(later, out=y)) == []
    assert taken(last, post, replace(later, pre=View("made", 0, 4))) == []
