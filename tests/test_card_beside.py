"""Launches beside others: which they are and who waits for them, on the emulator and against a recorded driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import emulated_driver
import numpy as np
import pytest
from card_stand import NoCard, need_card
from deepseek_data import program_of, tiny4, tiny41
from emulated_card import EmulatedCard
from numpy.typing import NDArray
from running import rows_of
from test_card_hyper import Copies, early, reads, with_products

from bloomery.gpu_worker import kernel_functions
from bloomery.gpu_worker.card_executor import CardExecutor
from bloomery.gpu_worker.kernel_functions import Kernels
from bloomery.gpu_worker.launches import KernelName, Launch
from bloomery.gpu_worker.lowering import lower
from bloomery.gpu_worker.prompt_lowering import lower_prompt
from bloomery.gpu_worker.step_ahead import ahead_launches
from bloomery.runtime.ops_deepseek4 import HyperMix, HyperPost
from bloomery.runtime.program import Add, MatMul, Op, Program, View, op_views

pytestmark = pytest.mark.timeout(300)


def tiny(name: str = "a", of: Callable[[Any], Any] = tiny41) -> Program:
    return with_products(program_of(of(name)), "Q3_K")


def found_early(program: Program, card: EmulatedCard, launches: list[Launch]) -> list[str]:
    """What touches results of a launch that is beside, or writes what it reads, before somebody waits for it. By
    addresses among the parameters for results, by ops for what it reads; and who is never waited for."""
    by_name = {op.name: op for op in program.ops}
    wrong: list[str] = []
    results: list[tuple[int, int]] = []
    read: set[str] = set()
    for launch in launches:
        if launch.joins:
            results, read = [], set()
        ops = [by_name[name] for name in launch.label.split(" & ") if name in by_name]
        if any(first <= given < last for given in launch.words for first, last in results):
            wrong.append(f"{launch.label} touches a result")
        if read & {view.buffer for op in ops for view, writes in op_views(op) if writes}:
            wrong.append(f"{launch.label} writes what is read")
        if launch.beside:
            if results:
                wrong.append(f"{launch.label} is beside another")
            made = {view.buffer for op in ops for view, writes in op_views(op) if writes}
            read = {view.buffer for op in ops for view, writes in op_views(op)} - made
            areas = [held for name, held in card.areas.items() if name.startswith("constant words of hyper")]
            areas += [card.areas[f"buffer {name}"] for name in made]
            results = [(held.ctypes.data, held.ctypes.data + held.nbytes) for held in areas]
    return wrong + ["one is never waited for"] * bool(results)


@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("name", ("a", "b"))
def test_who_waits(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that collapse nothing run beside others, up to the kernels that make the copies anew, or what rounds for
    them."""
    program = tiny(name)
    card: Any = EmulatedCard(program, rows=8)
    lower(program, card, rows, 1)  # sizes the scratch
    launches = lower(program, card, rows, 1)
    assert found_early(program, card, launches) == []
    beside = [launch for launch in launches if launch.beside]
    assert beside == [launch for launch in reads(launches) if "_collapse" not in launch.label]
    waits = [launch for launch in launches if launch.joins]
    assert len(waits) == len(beside) > 0
    if rows == 1:
        assert {launch.kernel.function for launch in waits} == {"quantise_Q8_K", "close_experts"}
        assert len(beside) == len(early(launches))  # the first one, and not the last
        assert [launch for launch in ahead_launches(program, card, 1, None) if launch.beside] == beside
    monkeypatch.setenv("BLOOMERY_CARD_BESIDE", "0")
    plain = lower(program, card, rows, 1)
    assert plain == [replace(launch, beside=False, joins=False) for launch in launches]


def test_who_has_none() -> None:
    """Copies that are collapsed by the mix that is made; prompt blocks; products of other types."""
    program = tiny("MXFP4_MOE", tiny4)
    for rows in (1, 3):
        launches = lower(program, NoCard(program), rows, 1)
        assert reads(launches) and not any(launch.beside or launch.joins for launch in launches)
    for program, make in ((tiny(), lower_prompt), (program_of(tiny41("a", "f32")), lower)):
        rows = 40 if make is lower_prompt else 1
        assert not any(launch.beside or launch.joins for launch in make(program, NoCard(program), rows, 1))


def test_what_lies_between() -> None:
    """Whoever touches a result or changes the copies waits; nobody is beside its own successor."""
    made = Copies("Q3_K", 4, 256)
    bench, all_ops = made.bench, made.program(pre=made.earlier).ops
    product, mix, collapse, post = (op for op in all_ops if op.name in ("product", "mix", "collapse", "spread"))
    assert isinstance(product, MatMul) and isinstance(mix, HyperMix) and isinstance(post, HyperPost)
    more, one = bench.buffer("more", 256), View("streams", 0, 256)
    other = Add("other", one, one, more)

    def marked(*ops: Op) -> list[str]:
        program = bench.program(*ops)
        card: Any = EmulatedCard(program)
        launches = lower(program, card, 1, 1)
        assert found_early(program, card, launches)[:-1] == []
        names = {op.name for op in ops} | {"product & mix", "product & mix & collapse", "again & apart"}
        shown = [launch for launch in launches if launch.label in names]
        return [launch.label + " beside" * launch.beside + " joins" * launch.joins for launch in shown]

    beside = "product & mix beside"
    assert marked(product, mix, post) == ["product & mix", "spread"]
    assert marked(product, mix, other, post) == [beside, "other", "spread joins"]
    assert marked(product, mix, other, replace(other, name="again", out=one)) == [beside, "other", "again joins"]
    small = View("scores", 0, 4)
    for view in (*made.mixes.values(), small):
        view = replace(view, width=4)
        taken = Add("taken", view, view, View("more", 0, 4))
        assert marked(product, mix, other, taken, post) == [beside, "other", "taken joins", "spread"]
    assert marked(product, mix, other, product, mix, post) == [beside, "other", "product & mix joins", "spread"]
    again = marked(product, mix, other, product, mix, replace(other, name="again"), post)
    assert again == [beside, "other", "product & mix beside joins", "again", "spread joins"]
    assert marked(product, mix, other) == [beside, "other"]  # the graph's end waits
    assert marked(product, mix, collapse, other, post) == ["product & mix & collapse", "other", "spread"]
    # another that has nothing in common with the first but the words that its blocks hand on
    logits, *results = (
        bench.buffer(f"{name} apart", size) for name, size in (("", 24), ("pre", 4), ("post", 4), ("mixing", 16))
    )
    apart = replace(mix, name="apart", logits=logits, pre=results[0], post=results[1], mixing=results[2])
    both = marked(product, mix, other, replace(product, name="again", outs=(logits,)), apart, post)
    assert both == [beside, "other", "again & apart beside joins", "spread"]


@contextmanager
def executor_of(program: Program, **how: Any) -> Iterator[CardExecutor]:
    executor = CardExecutor(program, context=64, slots=1, prompt_block=8, deterministic=True, **how)
    try:
        yield executor
    finally:
        executor.close()


def decoded(program: Program, steps: int, **how: Any) -> NDArray[np.float32]:
    """Logits of decode steps of one row on each other's greedy tokens, the last eight of them as steps ahead."""
    with executor_of(program, **how) as executor:
        token, logits = 7, []
        for at in range(steps):
            made = executor.step(rows_of([token], start=at))
            logits.append(made.logits[0].copy())
            token = int(made.greedy[0])
        for at in (steps, steps + 4):
            made = executor.step(replace(rows_of([token], start=at), ahead=3))
            logits += list(made.logits.copy())
            token = int(made.greedy[-1])
    return np.array(logits)


def compare(program: Program, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOOMERY_CARD_BESIDE", raising=False)
    replayed, one_by_one = (decoded(program, steps, graphs=graphs) for graphs in (True, False))
    monkeypatch.setenv("BLOOMERY_CARD_BESIDE", "0")
    plain = decoded(program, steps)
    assert np.isfinite(plain).all() and len(np.unique(plain.argmax(axis=1))) > 2
    assert np.array_equal(replayed, plain) and np.array_equal(one_by_one, plain)


def test_as_late_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of a step with each launch that is beside run when it is waited for: the same logits."""
    emulated_driver.stand_in(monkeypatch.setattr)
    compare(tiny(), 3, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("a", "b"))
def test_on_a_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed many times against eagerly and without, bit for bit."""
    need_card()
    compare(tiny(name), 20, monkeypatch)


class RecordedLibrary:
    """A libcuda that writes down what it is asked for: handles are numbers in the order in which they are made."""

    def __init__(self, card_name: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._made = 0

    def call(self, function: str, *arguments: Any) -> None:
        if function in ("cuStreamCreate", "cuEventCreate"):
            self._made += 1
            ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = self._made
        elif function == "cuLaunchKernelEx":
            configuration = ctypes.cast(arguments[0], ctypes.POINTER(kernel_functions._Configuration))[0]
            self.calls.append(("launch", configuration.stream, configuration.count))
        else:
            name = {"cuEventRecord": "record", "cuStreamWaitEvent": "wait"}[function]
            self.calls.append((name, *(argument.value for argument in arguments[:2])))


def test_streams_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork, overlap of the card's own stream (99), and join; all in order outside of a graph."""
    monkeypatch.setattr(kernel_functions, "Library", RecordedLibrary)
    card = SimpleNamespace(name="", architecture="sm_90", stream=SimpleNamespace(handle=99))
    kernels = Kernels(card)  # type: ignore[arg-type]
    library: Any = kernels._library
    name = KernelName("file", "function")
    kernels._functions[name] = ctypes.c_void_p(5)
    plain = Launch(name, (1, 1, 1), 32, (0,), "op")
    beside, joins = replace(plain, beside=True), replace(plain, joins=True)
    on = ("launch", 99, 1)
    for launch in (plain, beside, plain, joins):
        kernels.launch(launch)
    assert library.calls == [on] * 4
    library.calls.clear()
    stream, left, done = 1, 2, 3
    away = [("record", left, 99), ("wait", stream, left), ("launch", stream, 0)]
    back = [("record", done, stream), ("wait", 99, done)]
    with kernels.beside():
        for launch in (plain, beside, plain, joins, plain):
            kernels.launch(launch)
    assert library.calls == [on, *away, on, *back, ("launch", 99, 0), on]
    library.calls.clear()
    with kernels.beside():
        for launch in (beside, plain, replace(joins, beside=True), plain):
            kernels.launch(launch)
    assert library.calls == [*away, on, *back, *away, on, *back]
    library.calls.clear()
    with pytest.raises(ZeroDivisionError), kernels.beside():
        kernels.launch(beside)
        raise ZeroDivisionError
    assert library.calls == away
    kernels.launch(beside)
    assert library.calls == [*away, on]
