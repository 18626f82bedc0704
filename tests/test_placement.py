"""Plans: their names, their memory terms in bytes, and refusals before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime.architectures import build_program
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.errors import PlanError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.placement import LATER_PLANS, MemoryRoom, Plan, check_plan_name, make_plan, memory_room
from bloomery.runtime.program import Program

CONFIG = DaemonConfig(str(demo_model_path("tiny-qwen3moe")), context=512, slots=2, prompt_block=64, processes=2)
PLENTY = MemoryRoom(1 << 40, 1 << 40)


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with ModelFile.open(CONFIG.model) as model:
        yield build_program(model)


def term(plan: Plan, name: str) -> int:
    return next(term.nbytes for term in plan.terms if term.name == name)


def test_plan_names() -> None:
    for name in ("cpu", "auto", "a"):
        check_plan_name(name)
    for name in LATER_PLANS:
        with pytest.raises(PlanError, match=f"plan {name} .* is not built yet") as caught:
            check_plan_name(name)
        assert "--plan a" in caught.value.hint
    with pytest.raises(PlanError, match="no plan 'gpu'") as caught:
        check_plan_name("gpu")
    assert "auto, cpu, a, b, bp" in caught.value.hint


def test_terms_are_what_the_shapes_say(program: Program) -> None:
    plan = make_plan(CONFIG, program, PLENTY)
    assert (plan.name, plan.context, plan.slots, plan.processes) == ("cpu", 512, 2, 2)
    weights = sum(tensor.nbytes for tensor in program.weights.values())
    assert term(plan, "dense weights") + term(plan, "host experts") == weights
    rows = 2 * sum(state.width for state in program.states.values())
    assert term(plan, "KV cache") == pytest.approx(512 * 2 * rows, rel=0.01)
    doubled = make_plan(replace(CONFIG, context=1024), program, PLENTY)
    assert term(doubled, "KV cache") == pytest.approx(2 * term(plan, "KV cache"), rel=0.01)
    assert term(doubled, "activations") == term(plan, "activations")
    wide = make_plan(replace(CONFIG, cache_type="f32"), program, PLENTY)
    assert term(wide, "KV cache") == pytest.approx(2 * term(plan, "KV cache"), rel=0.01)
    assert term(plan, "logits") == 4 * program.vocabulary * CONFIG.prompt_block
    assert plan.total() == sum(term.nbytes for term in plan.terms)
    assert plan.total("shared") == plan.total() - plan.total("mapped", "private")


@pytest.mark.parametrize("name", ["dense weights", "host experts", "KV cache", "activations", "logits", "processes"])
def test_the_refusal_names_term_and_shortfall(program: Program, name: str) -> None:
    plan = make_plan(CONFIG, program, PLENTY)
    names = [term.name for term in plan.terms]
    before = sum(term.nbytes for term in plan.terms[: names.index(name) + 1])
    with pytest.raises(PlanError) as caught:
        make_plan(CONFIG, program, MemoryRoom(before - 12345, 1 << 40))
    assert f"{name} takes {term(plan, name)} bytes, 12345 too many; {before - 12345} bytes are free" in str(
        caught.value
    )
    assert caught.value.hint
    make_plan(CONFIG, program, MemoryRoom(plan.total(), 1 << 40))


def test_shared_memory_is_checked_for_itself(program: Program) -> None:
    plan = make_plan(CONFIG, program, PLENTY)
    room = MemoryRoom(1 << 40, plan.total("shared") - 7)
    with pytest.raises(
        PlanError, match=rf"KV cache takes \d+ bytes, 7 too many; /dev/shm has {room.shared} bytes free"
    ):
        make_plan(CONFIG, program, room)
    make_plan(CONFIG, program, MemoryRoom(1 << 40, plan.total("shared")))
    make_plan(replace(CONFIG, executor="reference"), program, MemoryRoom(1 << 40, 0))


def test_a_context_that_nobody_asked_for_fits(program: Program) -> None:
    config = replace(CONFIG, context=0)
    assert make_plan(config, program, PLENTY).context == program.context_length
    others = make_plan(CONFIG, program, PLENTY)
    fixed = others.total() - term(others, "KV cache") - term(others, "snapshots")
    position = term(others, "KV cache") / CONFIG.context
    for positions in (300, 500, 900):
        plan = make_plan(config, program, MemoryRoom(fixed + int(2 * positions * position), 1 << 40))
        assert plan.context == pytest.approx(positions, abs=8), "caches take half of what is left"
    with pytest.raises(PlanError, match="KV cache takes"):
        make_plan(config, program, MemoryRoom(fixed + 1000, 1 << 40))


def test_nonsense_is_refused(program: Program) -> None:
    for config in (replace(CONFIG, slots=0), replace(CONFIG, prompt_block=-1), replace(CONFIG, context=-1)):
        with pytest.raises(PlanError):
            make_plan(config, program, PLENTY)


def test_digest_changes_with_what_is_computed_and_with_nothing_else(program: Program) -> None:
    digest = make_plan(CONFIG, program, PLENTY).digest
    assert re.fullmatch("[0-9a-f]{16}", digest)
    same = (
        replace(CONFIG, context=64),
        replace(CONFIG, slots=3),
        replace(CONFIG, processes=1),
        replace(CONFIG, plan="auto"),
    )
    assert {make_plan(config, program, PLENTY).digest for config in same} == {digest}
    other = (replace(CONFIG, cache_type="f32"), replace(CONFIG, executor="reference"))
    digests = {make_plan(config, program, PLENTY).digest for config in other}
    assert len(digests) == 2 and digest not in digests


def test_this_machine_has_room(program: Program) -> None:
    room = memory_room()
    assert room.memory > 0 and room.shared > 0
    assert make_plan(CONFIG, program, room).processes == 2


def test_snapshots_get_what_was_asked_for_or_what_is_left(program: Program) -> None:
    others = make_plan(replace(CONFIG, cache_ram=0), program, PLENTY).total()
    for asked, left, found in ((8192, 1 << 40, 8192 << 20), (8192, 5000, 5000), (3, 5 << 20, 3 << 20), (-1, 77, 77)):
        plan = make_plan(replace(CONFIG, cache_ram=asked), program, MemoryRoom(others + left, 1 << 40))
        assert plan.term("snapshots") == term(plan, "snapshots") == found
    assert CONFIG.cache_ram == 8192, "llama-server's default"
